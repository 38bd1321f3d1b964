"""The code cache: what is run was written by this user, whole, and of the model that it is named after."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.tiny import fresh
from torch import nn

from sprinter.errors import UserError
from sprinter.models import convert
from sprinter.models.capture.compiled import Compiled, Recipe, cache_dir, find_compiled
from sprinter.models.source import Provenance

posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes are a POSIX matter")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that is not there yet, under the most generous mask; the compiler writes a word."""
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))

    def write(_: object, *, package_path: str, inductor_configs: object) -> None:
        Path(package_path).write_text("code")

    def load(path: str, run_single_threaded: bool) -> Any:
        return SimpleNamespace(loader=SimpleNamespace(boxed_run=lambda inputs: [Path(path).read_text()]))

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", write)
    monkeypatch.setattr("torch._inductor.aoti_load_package", load)
    before = os.umask(0)
    yield cache_dir()
    os.umask(before)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return recipe_of(lambda model: None)


def recipe_of(export: Callable[[nn.Module], Any]) -> Recipe:
    model = fresh("gpt2")
    return Recipe("pass-any", model, nn.Identity(), {}, lambda: export(model))


def code_of(recipe: Recipe, may_compile: bool = True) -> Compiled | None:
    return find_compiled(recipe, may_compile)


@posix
def test_what_is_written_is_this_users_alone(
    cache: Path, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    assert code_of(recipe, may_compile=False) is None and not cache.exists()
    code = code_of(recipe)
    assert "compiling passes (any number of tokens), once" in caplog.text
    assert code is not None and code([]) == ["code"]
    (path,) = cache.glob("*.pt2")
    assert [at.stat().st_mode & 0o777 for at in (cache, path)] == [0o700, 0o600]
    assert code_of(recipe, may_compile=False) is not None


@posix
@pytest.mark.parametrize("may_compile", [True, False])
@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_may_write_is_refused(
    cache: Path, recipe: Recipe, which: str, mode: int, may_compile: bool
) -> None:
    code_of(recipe)
    path = cache if which == "folder" else next(cache.glob("*.pt2"))
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(
        UserError, match=f"^'{path}' can be written by other users .* chmod -R go-w '{path}'$"
    ):
        code_of(recipe, may_compile)
    path.chmod(path.stat().st_mode & ~0o022)
    assert code_of(recipe, may_compile) is not None


@posix
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_belongs_to_another_user_is_refused(
    cache: Path, recipe: Recipe, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code_of(recipe)
    foreign, real = cache if which == "folder" else next(cache.glob("*.pt2")), Path.stat

    def stat(path: Path, **options: Any) -> Any:
        found = real(path, **options)
        owner = found.st_uid + (path == foreign)
        return SimpleNamespace(st_uid=owner, st_mode=found.st_mode, st_size=found.st_size)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(
        UserError, match=f"^'{foreign}' belongs to another user and is not trusted: remove it, or"
    ):
        code_of(recipe, may_compile=False)


@posix
def test_converted_models_are_held_to_the_same_rule(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_: object, path: Path, stored: str) -> None:
        assert not list(path.parent.glob("*.part"))
        path.write_text("GGUF")

    monkeypatch.setattr(convert, "convert_gguf", write)
    origin = Provenance(tmp_path, "org/model")
    (cache / "killed.gguf.part").parent.mkdir()
    (cache / "killed.gguf.part").write_text("half")
    with pytest.raises(UserError, match=f"^'{cache}' can be written by other users"):
        convert._kept_gguf(origin, "f16")
    cache.chmod(0o755)
    path = convert._kept_gguf(origin, "f16")
    assert path.stat().st_mode & 0o777 == 0o600 and convert._kept_gguf(origin, "f16") == path
    path.chmod(0o666)
    with pytest.raises(UserError, match=f"^'{path}' can be written by other users"):
        convert._kept_gguf(origin, "f16")
    path.chmod(0o644)
    cache.chmod(0o777)
    with pytest.raises(UserError, match=f"^'{cache}' can be written by other users"):
        convert._kept_gguf(origin, "f16")


@pytest.mark.parametrize(
    "error", [RuntimeError("failed to map segment\nstack"), OSError(28, "No space left on device")]
)
def test_sound_code_that_cannot_be_loaded_stays(
    cache: Path,
    recipe: Recipe,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    code_of(recipe)
    caplog.clear()

    def load(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("torch._inductor.aoti_load_package", load)
        assert code_of(recipe, may_compile=False) is None
        (line,) = caplog.records
        assert (
            line.levelno == logging.WARNING
            and "TMPDIR" in line.getMessage()
            and "\n" not in line.getMessage()
        )
        with pytest.raises(UserError, match=r"cannot be loaded \(.*\): see that .* or use compile=False$"):
            code_of(recipe)
        assert len(list(cache.glob("*.pt2"))) == 1
    assert code_of(recipe, may_compile=False) is not None


def test_damaged_code_is_deleted_and_made_anew(
    cache: Path, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    code_of(recipe)
    (path,) = cache.glob("*.pt2")
    path.write_text("kode")
    caplog.clear()
    assert code_of(recipe, may_compile=False) is None and not path.exists()
    assert "it is not what was written" in caplog.text
    code = code_of(recipe)
    assert code is not None and code([]) == ["code"]


def test_what_a_killed_compilation_left_is_removed(cache: Path, recipe: Recipe) -> None:
    code_of(recipe)
    left = cache / "tmp1234.part"
    left.mkdir()
    (left / "code.pt2").write_text("half")
    assert code_of(recipe) is not None and left.exists()  # found: nothing is locked, nothing is cleaned
    next(cache.glob("*.pt2")).unlink()
    code_of(recipe)
    assert not left.exists()


def test_weights_that_change_while_they_are_compiled_leave_no_code(cache: Path) -> None:
    def export(model: nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(1)

    with pytest.raises(UserError, match="GPT2LMHeadModel changed while it was compiled: ask again"):
        code_of(recipe_of(export))
    assert not list(cache.glob("*.pt2")) and not list(cache.glob("*.part"))


def test_a_cache_that_cannot_be_made_is_one_line(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot make the folder .* \(Not a directory\): set SPRINTER_CACHE"):
        code_of(recipe)
