"""What ``sprinter doctor`` says of llama.cpp's weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cli.tiny import Places, Run
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama

import sprinter
from sprinter.cli import doctor, doctor_probe
from sprinter.decode.costs import PassCosts
from sprinter.engine import runners
from sprinter.engine.runners import keep_fastest
from sprinter.errors import SprinterError
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


@pytest.fixture
def probing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A command that probes a pair of GGUF files, on a machine without a GPU."""
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runners, "device_of", lambda name: torch.device("cpu"))
    for name, seed in (("target", 1), ("draft", 2)):
        saved_llama(tmp_path / name, seed)
    pair = [str(converted(tmp_path / name)) for name in ("target", "draft")]
    texts = tmp_path / "texts.txt"
    texts.write_text("The river rises in the hills.\n")
    return ("doctor", "--target", pair[0], "--draft", pair[1], "--probe", str(texts), "--probe-tokens", "20")


def test_a_probe_compares_runners_and_keeps_the_fastest(run: Run, probing: tuple[str, ...]) -> None:
    line = probing
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
    assert "Fastest here: runner " in " ".join(out.split()) and "from now on" in " ".join(out.split())


@pytest.mark.parametrize(
    ("ours", "fastest", "kept"),
    [
        (
            PassCosts(((1, 5.0), (9, 6.0)), ((1, 0.1), (2, 0.1))),
            "llamacpp, draft torch",
            ("llamacpp", "torch"),
        ),
        (
            PassCosts(((1, 0.5), (9, 0.6)), ((1, 9.0), (2, 9.0))),
            "torch, dtype gguf, draft llamacpp",
            ("torch", "llamacpp"),
        ),
        (
            PassCosts(((1, 0.1), (9, 0.2)), ((1, 0.1), (2, 0.1))),
            "torch, dtype gguf",
            ("torch", None),
        ),
    ],
)
def test_target_and_draft_may_have_different_runners(
    run: Run,
    probing: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    ours: PassCosts,
    fastest: str,
    kept: tuple[str, str | None],
) -> None:
    """Where one runner has the faster target and the other the faster draft step."""
    times = {True: PassCosts(((1, 1.0), (9, 2.0)), ((1, 1.0), (2, 1.0))), False: ours}

    def measured(pair: sprinter.Pair, **_: object) -> PassCosts:
        return times[isinstance(pair.models.target.model, GgufModel)]

    monkeypatch.setitem(runners.RIVALS, "torch, dtype gguf", {"runner": "torch", "dtype": "float32"})  # type: ignore[arg-type]
    monkeypatch.setattr("sprinter.theory.passes.measure_passes", measured)
    monkeypatch.setattr(
        PassCosts,
        "best_run",
        lambda one, _: (4 * one.target_s(1) / (one.target_s(2) + one.draft_s(1)), 1),
    )
    done, out, err = run(*probing, "--json")
    assert done == 0, err
    found = json.loads(out)["probe"]
    assert set(found["runners"]) == {*runners.RIVALS, *runners.MIXED} and found["fastest_runner"] == fastest
    options = runners.choose_runner(probing[2], probing[4], {}).options
    assert (options["runner"], options.get("draft_runner")) == kept


def test_a_doctor_looks_at_the_runner_that_was_found(
    run: Run, probing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {"runner": "torch", "dtype": "float32"}  # files of random weights are in float32
    monkeypatch.setitem(runners.RIVALS, "torch, dtype gguf", ours)  # type: ignore[arg-type]
    keep_fastest(probing[2], probing[4], {}, "torch, dtype gguf")
    for more, name in (((), "row"), (("--runner", "llamacpp"), "llamacpp")):
        _, out, _ = run(*probing[:5], *more, "--json")
        checks = {check["name"]: check for check in json.loads(out)["checks"]}
        assert name in checks["target"]["detail"], checks["target"]


@pytest.mark.parametrize(
    "error", [SprinterError("the model fails"), MemoryError(), RuntimeError("no kernel [gguf]")], ids=repr
)
def test_a_runner_that_fails_is_left_out(
    run: Run, probing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """And what is in brackets is shown: it is no markup."""
    real = doctor_probe.load

    def load(loading: Any) -> Any:
        if loading.dtype is not None:
            raise error
        return real(loading)

    monkeypatch.setattr(doctor_probe, "load", load)
    done, out, _ = run(*probing)
    assert done == 0 and "Fastest here: runner llamacpp" in " ".join(out.split())
    assert f"runner torch, dtype gguf: {str(error) or 'MemoryError'}" in out


def test_a_cache_that_cannot_be_written_loses_no_probe(
    run: Run, probing: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache").chmod(0o777)
    done, out, err = run(*probing)
    assert done == 0 and "How far the draft agrees" in out, err
    assert "cannot be kept for later" in caplog.text + err
    assert "Fastest here: runner " in " ".join(out.split()) and "from now on" not in " ".join(out.split())
