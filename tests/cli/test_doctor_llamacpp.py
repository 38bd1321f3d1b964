"""What ``sprinter doctor`` says of llama.cpp's weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.tiny import Places, Run
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama

from sprinter.cli import doctor
from sprinter.models.gguf.load import GgufModel
from sprinter.models.gguf.repack import Repacking

RAN = Repacking(True, "a trial with Q4_K ran")
DIED = Repacking(False, "a trial with Q4_K repacked died of SIGILL")


def pair(**models: Repacking | None) -> Any:
    """A pair whose models are GGUF files with these verdicts; None is a model of transformers'."""
    loaded = {}
    for which, verdict in models.items():
        file = object.__new__(GgufModel)
        if verdict is not None:
            file.repacking = verdict
        loaded[which] = SimpleNamespace(model=file if verdict is not None else object())
    return SimpleNamespace(models=SimpleNamespace(**({"draft": None} | loaded)))


def test_the_setting_and_why() -> None:
    crash = f"weights as stored: {DIED.reason}"
    assert doctor._llamacpp(pair(target=RAN)) == ("ok", f"weights repacked: {RAN.reason}")
    assert doctor._llamacpp(pair(target=DIED, draft=DIED)) == ("warn", crash)
    assert doctor._llamacpp(pair(target=None, draft=DIED)) == ("warn", crash)
    both = f"target weights repacked: {RAN.reason}; draft {crash}"
    assert doctor._llamacpp(pair(target=RAN, draft=DIED)) == ("warn", both)


def test_nothing_is_said_where_llama_cpp_runs_no_model(run: Run, places: Places) -> None:
    _, out, _ = run("doctor", *places.pair, "--json")
    assert "llama.cpp" not in [check["name"] for check in json.loads(out)["checks"]]


def test_a_report_on_a_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    saved_llama(tmp_path / "target", 1)
    file = str(converted(tmp_path / "target"))
    for asked, status, words in (("on", "ok", "repacked"), ("off", "warn", "as stored")):
        monkeypatch.setenv("SPRINTER_LLAMACPP_REPACK", asked)
        done, out, _ = run("doctor", "--target", file, "--json")
        checks = {check["name"]: check for check in json.loads(out)["checks"]}
        assert done == 0
        assert checks["llama.cpp"]["status"] == status
        assert checks["llama.cpp"]["detail"] == f"weights {words}: SPRINTER_LLAMACPP_REPACK={asked}"


def test_a_probe_compares_runners_and_keeps_the_fastest(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, seed in (("target", 1), ("draft", 2)):
        saved_llama(tmp_path / name, seed)
    pair = [str(converted(tmp_path / name)) for name in ("target", "draft")]
    texts = tmp_path / "texts.txt"
    texts.write_text("The river rises in the hills.\n")
    line = ("doctor", "--target", pair[0], "--draft", pair[1], "--probe", str(texts), "--probe-tokens", "20")
    done, out, err = run(*line, "--json")
    assert done == 0, err
    found = json.loads(out)["probe"]
    assert set(found["runners"]) == {"llamacpp", "torch, dtype gguf"}
    timed = {name: one for name, one in found["runners"].items() if "error" not in one}
    assert "llamacpp" in timed and found["fastest_runner"] in timed
    assert found["seconds"] == timed[found["fastest_runner"]]
    done, out, err = run(*line, "--runner", "llamacpp", "--json")
    assert (json.loads(out)["probe"]["runners"], json.loads(out)["probe"]["fastest_runner"]) == ({}, None)
    done, out, err = run(*line)
    assert "Fastest here: runner " in " ".join(out.split())
