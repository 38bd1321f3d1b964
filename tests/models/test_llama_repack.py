"""Whether weights are repacked: tried in a child process that may die, remembered, and said.

Most of these tests put a llama_cpp of their own in the child's way; they need none of the extra's packages.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama
from tests.real import real_file

from sprinter.errors import UserError
from sprinter.models.gguf import repack as llama_repack
from sprinter.models.gguf.repack import ASKED, Repacking, repacking

FAKE = """
import os, signal, sys, time
from collections import defaultdict
from types import SimpleNamespace
END = {end!r}

def decode(repack, batch):
    how = END["on" if repack else "off"]
    if batch.n_tokens > 1 and how == "refuses":
        return -1
    if batch.n_tokens > 1 and how == "hangs":
        signal.pause()
    elif batch.n_tokens > 1 and how:
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)
    return 0

def new(**fields):
    return lambda *_: SimpleNamespace(**fields)

llama_cpp = SimpleNamespace(
    llama_backend_init=lambda: print("words of its own", file=sys.stderr),
    llama_model_default_params=new(),
    llama_model_load_from_file=lambda path, params: SimpleNamespace(repack=params.use_extra_bufts),
    llama_context_default_params=new(),
    llama_init_from_model=lambda model, params: model,
    llama_batch_init=lambda *_: SimpleNamespace(
        token=dict(), pos=dict(), n_seq_id=dict(), logits=dict(), seq_id=defaultdict(dict)
    ),
    llama_memory_clear=lambda *_: None,
    llama_get_memory=lambda context: None,
    llama_decode=lambda context, batch: decode(context.repack, batch),
)
"""
TYPES = ("Q4_K", "Q6_K")


class Library:
    """A llama_cpp that ends as it is told, and the children that were started to try it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.tried, self._run = root / "llama_cpp", [], subprocess.run
        self.folder.mkdir()
        self.cache = root / "cache"
        monkeypatch.setenv("SPRINTER_CACHE", str(self.cache))
        monkeypatch.delenv(ASKED, raising=False)
        monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
        monkeypatch.syspath_prepend(root)
        monkeypatch.setattr(llama_repack, "_write_model", lambda path, types: path.touch())
        monkeypatch.setattr(llama_repack.subprocess, "run", self.run)
        self.ends()

    def ends(self, on: str = "", off: str = "") -> None:
        """How a pass of several tokens ends, repacked and as stored: "" well, else a signal, "refuses" or "hangs"."""
        (self.folder / "__init__.py").write_text(FAKE.format(end={"on": on, "off": off}))
        self.forget()

    def run(self, command: list[str], **options: Any) -> Any:
        """In the place of ``subprocess.run``."""
        self.tried.append(command[-1])
        return self._run(command, **options)

    def forget(self) -> None:
        """As in a new process."""
        llama_repack._verdict.cache_clear()
        llama_repack._try.cache_clear()

    def verdict(self, types: tuple[str, ...] = TYPES) -> Repacking:
        """As a new process would have it."""
        self.forget()
        return repacking(types)

    @property
    def kept(self) -> list[Path]:
        """Files of verdicts."""
        return sorted(self.cache.glob("llamacpp/*.json"))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library(tmp_path, monkeypatch)
    yield made
    made.forget()


@pytest.mark.parametrize("name", ["SIGILL", "SIGSEGV"])
def test_a_crash_is_met_in_a_child_and_remembered(
    library: Library, name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    library.ends(on=name)
    wanted = Repacking(False, f"a trial with Q4_K, Q6_K repacked died of {name}")
    with caplog.at_level(logging.WARNING, "sprinter"):
        assert [library.verdict(), library.verdict(), library.verdict(TYPES[::-1])] == [wanted] * 3
    assert library.tried == ["on", "off"]
    assert [record.getMessage() for record in caplog.records] == [
        f"llama.cpp's repacked weights are not used on this machine: {wanted.reason}"
    ]
    assert capfd.readouterr() == ("", "")
    assert not list(Path.cwd().glob("core*"))


def test_where_nothing_is_wrong_one_trial_is_all(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    wanted = Repacking(True, "a trial with Q4_K, Q6_K ran")
    assert [library.verdict(), library.verdict()] == [wanted, wanted]
    assert library.tried == ["on"] and not caplog.records


def test_the_verdict_is_of_a_build_a_machine_and_types(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.ends(on="SIGILL")
    assert library.verdict().on is False
    assert library.verdict(("Q8_0",)).on is False
    assert library.tried == ["on", "off"] * 2
    monkeypatch.setattr(llama_repack, "cpu_flags", lambda: "flags: another machine")
    assert library.verdict().on is False
    assert library.tried == ["on", "off"] * 3
    library.ends()  # a build that mends it
    assert library.verdict().on is True
    assert library.tried == ["on", "off"] * 3 + ["on"] and len(library.kept) == 4


def test_shared_libraries_are_a_part_of_the_build(library: Library) -> None:
    assert library.verdict().on is True
    (library.folder / "lib").mkdir()
    (library.folder / "lib" / "libggml-cpu.so").write_bytes(b"other code")
    library.verdict()
    assert library.tried == ["on", "on"] and len(library.kept) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"on": 1, "reason": "x"}', b'{"on": true, "reason": 3}'],
)
def test_a_damaged_verdict_is_taken_anew(library: Library, content: bytes) -> None:
    library.ends(on="SIGILL")
    wanted = library.verdict()
    (file,) = library.kept
    file.write_bytes(content)
    assert library.verdict() == wanted
    assert library.tried == ["on", "off"] * 2
    assert json.loads(file.read_text())["on"] is False
    assert [path.suffix for path in library.cache.iterdir() if path.suffix == ".part"] == []


def test_a_library_that_dies_either_way_is_refused(library: Library) -> None:
    library.ends(on="SIGILL", off="SIGSEGV")
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"cannot be used here, a trial .* died of SIGSEGV: install a build of"
        ):
            library.verdict()
    assert library.tried == ["on", "off"]


def test_a_trial_that_does_not_end_is_not_remembered(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_repack, "_PATIENCE_S", 0.2)
    library.ends(on="hangs", off="hangs")
    with pytest.raises(UserError, match=r"did not end within 0\.2 s"):
        library.verdict()
    assert not library.kept

    def one_hangs(command: list[str], **options: Any) -> Any:
        if command[-1] == "on":
            raise subprocess.TimeoutExpired(command, 60)
        return library.run(command, **options | {"timeout": 60})

    library.ends()
    monkeypatch.setattr(llama_repack.subprocess, "run", one_hangs)
    assert library.verdict() == Repacking(False, "a trial with Q4_K, Q6_K repacked did not end within 0.2 s")
    assert repacking(TYPES).on is False and library.tried[2:] == ["off"]
    assert not library.kept


def test_a_trial_that_others_ended_is_not_remembered(library: Library) -> None:
    library.ends(on="SIGKILL")
    assert "died of SIGKILL" in library.verdict().reason
    assert not library.kept


def test_a_trial_that_could_not_be_made_is_no_verdict(library: Library) -> None:
    library.ends(on="refuses")
    with pytest.raises(
        UserError, match=r"could not be tried .*failed on 2 tokens of the trial with status -1.*=on"
    ):
        library.verdict()
    assert not library.kept


def test_a_cache_that_cannot_be_written_is_said(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (library.folder / "file").touch()
    monkeypatch.setenv("SPRINTER_CACHE", str(library.folder / "file" / "cache"))
    assert library.verdict().on is True
    assert library.tried == ["on"]
    assert "set SPRINTER_CACHE" in caplog.text


@pytest.mark.parametrize(("asked", "on"), [("on", True), ("off", False)])
def test_it_can_be_said_without_a_trial(
    library: Library, monkeypatch: pytest.MonkeyPatch, asked: str, on: bool
) -> None:
    library.ends(on="SIGILL", off="SIGILL")
    monkeypatch.setenv(ASKED, asked)
    assert library.verdict() == Repacking(on, f"SPRINTER_LLAMACPP_REPACK={asked}")
    monkeypatch.setenv(ASKED, "yes")
    with pytest.raises(UserError, match="SPRINTER_LLAMACPP_REPACK='yes' is none of its values: use auto, on"):
        library.verdict()
    assert library.tried == []


# --- with the real library


@pytest.fixture
def extra() -> Any:
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    return pytest.importorskip("gguf", reason=NO_GGUF)


def test_a_model_is_loaded_as_the_verdict_says(
    extra: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sprinter.models.choose import runner_kind
    from sprinter.models.gguf import load as gguf_module
    from sprinter.models.gguf.library import library as real

    saved_llama(tmp_path / "model")
    path = converted(tmp_path / "model", "q8_0")
    asked = []
    load = real().llama_model_load_from_file

    def seen(name: bytes, params: Any) -> Any:
        asked.append(params.use_extra_bufts)
        return load(name, params)

    monkeypatch.setattr(real(), "llama_model_load_from_file", seen)
    told = []
    for on in (False, True):
        monkeypatch.setattr(
            gguf_module, "repacking", lambda types, on=on: told.append(sorted(types)) or Repacking(on, "so")
        )
        model = gguf_module.GgufModel(path)
        assert model.repacking == Repacking(on, "so")
        assert runner_kind(model)[1].endswith("the CPU" if on else "the CPU, its weights as stored")
    assert asked == [False, True]
    assert told == [["F16", "Q8_0"]] * 2
    assert real().llama_model_default_params().use_extra_bufts is True


def test_the_tiny_model_is_one_that_llama_cpp_runs(extra: Any, tmp_path: Path) -> None:
    from sprinter.models.gguf.header import gguf_head

    path, types = (
        tmp_path / "trial.gguf",
        ("BF16", "F16", "F32", "IQ4_XS", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"),
    )
    llama_repack._write_model(path, (*types, "99"))
    assert gguf_head(path).types == set(types)
    assert path.stat().st_size < 8e6
    assert llama_repack._end(path, "off") == (None, True)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "qwen-draft"])
def test_a_real_file_runs_here(extra: Any, name: str) -> None:
    """In a process of its own: where weights must not be repacked, this is what died."""
    path = real_file(name)
    code = (
        "import sys, pathlib, torch; from sprinter.models.gguf.load import GgufModel; "
        "from sprinter.models.gguf.runner import LlamaCppRunner; "
        "runner = LlamaCppRunner(GgufModel(pathlib.Path(sys.argv[1])), 1, 64); "
        "print(bool(runner.extend(torch.arange(1, 41)[None]).logits.isfinite().all()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
