"""The cache: what is run or read was written by this user, whole."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sprinter.errors import UserError
from sprinter.models import convert
from sprinter.models.cachedir import cache_dir, make_cache_dir, read_kept, write_kept
from sprinter.models.source import Provenance

posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes are a POSIX matter")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that is not there yet, under the most generous mask."""
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    before = os.umask(0)
    yield cache_dir()
    os.umask(before)


@posix
def test_what_is_written_is_this_users_alone(cache: Path) -> None:
    assert read_kept("own", "file") is None and not cache.exists()
    write_kept("own", "file", "words")
    path = cache / "own" / "file"
    assert [at.stat().st_mode & 0o777 for at in (cache, path)] == [0o700, 0o600]
    assert read_kept("own", "file") == "words"


@posix
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_refused(cache: Path, mode: int) -> None:
    write_kept("own", "file", "words")
    for path, use in ((cache, make_cache_dir), (cache / "own" / "file", lambda: read_kept("own", "file"))):
        path.chmod(path.stat().st_mode | mode)
        with pytest.raises(
            UserError, match=f"^'{path}' can be written by other users .* chmod -R go-w '{path}'$"
        ):
            use()
        path.chmod(path.stat().st_mode & ~0o022)
        use()


@posix
def test_what_belongs_to_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cache_dir()
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        found = real(path, **options)
        return SimpleNamespace(
            st_uid=found.st_uid + (path == cache), st_mode=found.st_mode, st_size=found.st_size
        )

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(
        UserError, match=f"^'{cache}' belongs to another user and is not trusted: remove it, or"
    ):
        make_cache_dir()


@posix
def test_converted_models_are_held_to_the_same_rule(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_: object, path: Path, stored: str) -> None:
        assert not list(path.parent.glob("*.part*"))
        path.write_text("GGUF")

    monkeypatch.setattr(convert, "convert_gguf", write)
    monkeypatch.setattr(convert, "find", lambda *_: Provenance(tmp_path, "org/model"))
    (cache / "killed.gguf.part").parent.mkdir()
    (cache / "killed.gguf.part").write_text("half")
    with pytest.raises(UserError, match=f"^'{cache}' can be written by other users"):
        convert._converted("org/model", "target", None, "float16")
    cache.chmod(0o755)
    path = convert._converted("org/model", "target", None, "float16")
    assert (
        path.stat().st_mode & 0o777 == 0o600
        and convert._converted("org/model", "target", None, "float16") == path
    )
    path.chmod(0o666)
    with pytest.raises(UserError, match=f"^'{path}' can be written by other users"):
        convert._converted("org/model", "target", None, "float16")
    path.chmod(0o644)
    cache.chmod(0o777)
    with pytest.raises(UserError, match=f"^'{cache}' can be written by other users"):
        convert._converted("org/model", "target", None, "float16")


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot make the folder .* \(Not a directory\): set SPRINTER_CACHE"):
        make_cache_dir()
