"""The τ of a gate: what is expected of it, how it is chosen for a drift, and how it reaches decoding."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.training.synthetic import make_records, write_labels

import sprinter
from sprinter.cli import main
from sprinter.decode.stop import Disco
from sprinter.decode.trust import Gate
from sprinter.errors import UserError
from sprinter.heads.artifact import save_head
from sprinter.heads.load import load_gate
from sprinter.theory.pareto import gate_curve
from sprinter.training.dataset import read_positions
from sprinter.training.metrics import Bootstrap, rates
from sprinter.training.settings import TrainSettings
from sprinter.training.threshold import choose, setting
from sprinter.training.train import train

QUICK = ["--epochs", "2", "--lr", "0.005", "--batch", "64", "--repeats", "20"]


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labels(tmp_path_factory.mktemp("labels"), make_records(60, 8))


def test_drift_and_calls_are_those_of_the_loop_by_hand() -> None:
    """Four positions: two trusted (β 0.9, 0.7), two checked (β 0.5, 0.25), which bring 0.75 bonus tokens."""
    scores, overlap = torch.tensor([0.9, 0.8, 0.4, 0.3]), torch.tensor([0.9, 0.7, 0.5, 0.25])
    found = setting(0.6, scores, overlap)
    assert found.trusted == 0.5
    assert found.drift == pytest.approx((0.1 + 0.3) / 4.75)
    assert found.calls_per_token == pytest.approx(2 / 4.75)
    assert setting(0.0, scores, overlap).drift == pytest.approx(1 - float(overlap.mean()))
    assert setting(1.0, scores, overlap).drift == 0.0


@pytest.mark.parametrize("drift", [0.01, 0.05, 0.1, 0.3])
def test_the_chosen_tau_is_the_lowest_that_keeps_to_the_drift(drift: float) -> None:
    chance = torch.Generator().manual_seed(5)
    overlap = torch.rand(4000, generator=chance)
    scores = (overlap + 0.2 * torch.randn(4000, generator=chance)).clamp(0, 1)
    scores = (scores * 500).round() / 500  # ties, as an isotonic calibration makes them
    tau = choose(drift, scores, overlap)
    assert 0 < tau < 1 and setting(tau, scores, overlap).drift <= drift
    assert setting(tau - 2e-4, scores, overlap).drift > drift


def test_ends_of_the_dial() -> None:
    scores, overlap = torch.tensor([0.2, 0.6]), torch.tensor([0.9, 0.9])
    assert choose(0.5, scores, overlap) == 0.0
    assert setting(choose(0.0, scores, overlap), scores, overlap).trusted == 0.0
    with pytest.raises(UserError, match="drift=2 is out of range"):
        choose(2, scores, overlap)


def test_training_chooses_tau_for_a_drift_on_held_out_prompts(labels: Path) -> None:
    positions = read_positions([labels], ("hidden",))
    found = {
        drift: train(positions, TrainSettings(epochs=1, lr=0.005, batch=128, drift=drift)).head.config.tau
        for drift in (0.02, 0.1, None)
    }
    assert found[0.02] > found[0.1] == found[None]
    assert 0.5 not in found.values()
    assert train(positions, TrainSettings(epochs=1, batch=128, tau=0.6)).head.config.tau == 0.6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tau": 0.5, "drift": 0.1}, "give one of them"),
        ({"drift": 1.5}, "drift=1.5 is out of range"),
        ({"preset": "disco", "drift": 0.1}, "leave drift=0.1 out"),
    ],
)
def test_a_drift_that_chooses_nothing_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainSettings(**options)  # type: ignore[arg-type]


def test_config_card_and_table_tell_the_drift(
    labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "g"
    args = ["gate", "train", "--labels", str(labels), "--out", str(gate), "--drift", "0.05", *QUICK]
    assert main(args) == 0
    out = capsys.readouterr().out
    config = json.loads((gate / "config.json").read_text())
    expected = config["training"]["test"]["setting"]
    assert (config["tau"], config["drift"], config["trusted"]) == tuple(
        expected[name] for name in ("tau", "drift", "trusted")
    )
    assert config["training"]["settings"]["drift"] == 0.05 and config["tau"] != 0.5
    assert (
        f"| τ | {config['tau']:g}, chosen for drift 0.05; expected drift" in (gate / "README.md").read_text()
    )
    for text in (
        out,
        told(capsys, "gate", "roc", "--labels", str(labels), "--gate", str(gate), "--repeats", "30"),
    ):
        line = next(line for line in text.splitlines() if "recorded; drift" in line)
        assert line.split()[:3] == [
            f"{config['tau']:g}",
            f"{config['drift']:.3f}",
            f"{expected['calls_per_token']:.3f}",
        ]
        assert "target calls/token" in text


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(args) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("tau", "words"), [("0", "trusts every token at its tau=0"), ("1", "trusts no token at its tau=1")]
)
def test_a_threshold_that_decides_nothing_gives_a_warning(
    labels: Path, tmp_path: Path, tau: str, words: str, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    gate = str(tmp_path / "g")
    assert words in told(
        capsys, "gate", "train", "--labels", str(labels), "--out", gate, "--tau", tau, *QUICK
    )
    assert words in told(capsys, "gate", "roc", "--labels", str(labels), "--gate", gate, "--repeats", "30")
    with caplog.at_level(logging.WARNING, "sprinter"):
        load_gate(gate)
    assert words in caplog.text


def test_sprinter_without_tau_takes_what_the_gate_records(tmp_path: Path) -> None:
    """All entry points: one text, a batch, an engine, a composed spec; a tau in the spec has precedence."""
    paths = sprinter.builtin_paths()
    own = load_gate(paths["gate"])
    own.config = replace(own.config, tau=0.83)
    save_head(own, tmp_path / "g", "# A gate\n")
    pair = sprinter.load_pair(paths["target"], draft=paths["draft"], gate=tmp_path / "g")
    kept = {"max_new_tokens": 6, "seed": 3}
    prompt = "The river rises in"
    wanted = pair.generate(prompt, method="sprinter(tau=0.83)", **kept)
    for method in ("sprinter", "sprinter(tau=recorded)", "trust=gate"):
        out = pair.generate(prompt, method=method, **kept)
        assert [token.id for token in out.tokens] == [token.id for token in wanted.tokens]
        assert "tau=0.83" in out.method and "recorded" not in out.method
        pair.generate(prompt, method=method, rules=out.rules, max_new_tokens=2)  # its state may go on
    assert pair.generate_batch([prompt], method="sprinter", **kept)[0].method == wanted.method
    with sprinter.Engine(pair, rows=1, max_len=64) as engine:
        number = engine.add(prompt, method="sprinter", **kept)
        assert engine.finish()[number].method == wanted.method
    assert (
        pair.generate(prompt, method="sprinter(tau=0.6)", **kept).method
        == "sprinter(tau=0.6, cap=20, tail=0)"
    )


def test_predictions_and_bench_arms_take_it_too(tmp_path: Path) -> None:
    from sprinter.bench.arms import parse_arms
    from sprinter.bench.run import Extras, run_bench
    from sprinter.bench.sample import Sample, Suite
    from sprinter.theory.predict import predict
    from sprinter.theory.recording import probe

    pair = sprinter.load_pair()
    assert pair.gate is not None
    pair.gate.config = replace(pair.gate.config, tau=0.83)
    recording = probe(pair, ["The river rises in"], new_tokens=8)
    assert predict([recording], "sprinter") == predict([recording], "sprinter(tau=0.83)")
    suite = Suite("toy", (Sample("q0", "c", ("The river rises in",)),), 4)
    (arm,) = run_bench(
        pair, parse_arms(["sprinter"]), [suite], out=tmp_path, extras=Extras(quality=None, analysis=False)
    )["arms"]
    assert (arm["name"], arm["spec"]) == ("sprinter", "sprinter(tau=0.83, cap=20, tail=0)")


@pytest.mark.parametrize("tau", [0.94, 0.8, 0.7, 0.6, 0.9, 0.3, 0.55, 0.65, 0.85])
def test_reports_and_decoding_agree_about_scores_that_lie_on_the_threshold(tau: float) -> None:
    """Plateaus of a calibration give many tokens one score: float32 in a head, float64 in drivers' signals."""
    scores, overlap = torch.tensor([tau]), torch.tensor([0.5])
    told = torch.tensor(scores.tolist(), dtype=torch.float64)
    decided = bool(Gate(tau).trust({"gate": told}, ())[0])
    assert decided
    assert setting(tau, scores, overlap).trusted == setting(tau, told, overlap).trusted == 1.0
    for given in (scores, told):
        (point,) = gate_curve(given, 1 - overlap, [tau])
        assert point.x == 0.0
        found, _ = rates(
            given,
            torch.ones(1),
            torch.tensor([tau], dtype=torch.float64),
            Bootstrap.make(torch.zeros(1).long(), 2),
        )
        assert found.y.tolist() == [1.0]
    assert not bool(Disco(tau).stop({"disco": told}, ())[0])
    assert choose(0.1, scores, overlap) > tau
    assert not bool(Gate(choose(0.1, scores, overlap)).trust({"gate": told}, ())[0])
