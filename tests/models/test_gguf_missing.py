"""Without the extra: one line that says what to install. These tests need neither package."""

import sys
from pathlib import Path

import pytest
from tests.models.gguf_files import byte_tokenizer, saved_llama

import sprinter
from sprinter.errors import UserError
from sprinter.models.convert import convert_gguf
from sprinter.models.gguf.library import gguf_package, library
from sprinter.models.pair import load_models

MEND = (
    r"cannot be imported \(.*\): pip install '.\[gguf\]' in .*pip install 'gguf>=[\d.]+' 'llama-cpp-python>="
)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extra."""
    for name in ("gguf", "llama_cpp"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.setattr("sprinter.models.gguf.load.library", library.__wrapped__)


def test_loading_tells_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UserError, match="GGUF files need the package gguf, which " + MEND):
        load_models(path)
    with pytest.raises(UserError, match="GGUF files need the package gguf, which " + MEND):
        load_models(path, tokenizer=byte_tokenizer())


def test_converting_tells_what_is_missing(tmp_path: Path) -> None:
    saved_llama(tmp_path / "model")
    with pytest.raises(UserError, match="GGUF files need the package gguf, which " + MEND):
        convert_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_a_runner_that_is_not_there_is_told_before_anything_else(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="GGUF files need the package llama-cpp-python, which " + MEND):
        sprinter.load_pair(tmp_path / "nowhere", runner="llamacpp")
    with pytest.raises(UserError, match="there is no runner 'vllm': use auto, torch, llamacpp"):
        sprinter.load_pair(tmp_path / "nowhere", runner="vllm")


def test_a_library_that_cannot_be_loaded_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise OSError("libllama.so: no such file")

    monkeypatch.setattr("sprinter.models.gguf.library.import_module", broken)
    with pytest.raises(UserError, match=r"its library cannot be loaded \(libllama\.so.*install it again"):
        library.__wrapped__()
    with pytest.raises(UserError, match="install it again"):
        gguf_package()


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        llama_cpp = object()

    monkeypatch.setattr("sprinter.models.gguf.library.import_module", lambda _: Old)
    with pytest.raises(UserError, match="is too old"):
        library.__wrapped__()
