"""``sprinter convert gguf``, and the command line on its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.tiny import Places, Run
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, saved_llama


def test_help(run: Run) -> None:
    status, out, err = run("convert")
    assert (status, err) == (0, "") and "gguf" in out


def test_convert_and_generate(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    saved_llama(tmp_path / "target", 1)
    saved_llama(tmp_path / "draft", 2, num_hidden_layers=1)
    files = [str(tmp_path / f"{name}.gguf") for name in ("target", "draft")]
    for name, file in zip(("target", "draft"), files, strict=True):
        status, out, err = run("convert", "gguf", str(tmp_path / name), file, "--dtype", "f32", "--json")
        assert (status, err) == (0, "")
        assert json.loads(out) == {"file": file, "dtype": "f32", "bytes": Path(file).stat().st_size}
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    pair = ("--target", files[0], "--draft", files[1])
    status, out, err = run("generate", "the thing", *pair, "--max-new-tokens", "5", "--json")
    assert (status, err) == (0, "")
    status, out, _ = run("doctor", *pair, "--json")
    details = {check["name"]: check["detail"] for check in json.loads(out)["checks"]}
    assert status == 0
    assert details["target"] == "llama: llamacpp runner (a GGUF file, F32, which llama.cpp runs on the CPU)"
    assert "speculative equals autoregressive" in details["self-test"]
    assert "MiB" in details["pair"]


def test_mistakes_are_one_line(run: Run, places: Places, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    status, out, err = run("convert", "gguf", str(places.root / "none"), str(tmp_path / "x.gguf"))
    assert (status, out, err.count("\n")) == (2, "", 1) and "does not exist" in err
    status, out, err = run("convert", "gguf", str(places.target), str(tmp_path / "x.bin"))
    assert (status, out, err.count("\n")) == (2, "", 1) and "must end in .gguf" in err
    status, out, err = run("convert", "gguf", str(places.target), str(tmp_path / "x.gguf"), "--dtype", "q2")
    assert (status, out, err.count("\n")) == (2, "", 1) and "'q2' is not one of" in err
