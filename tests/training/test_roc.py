"""Evaluating heads: positions, labels, baselines, figures, and errors."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.synthetic import HIDDEN, make_records, write_labels

from sprinter.errors import UserError
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.networks import Linear
from sprinter.training.dataset import Positions, read_positions
from sprinter.training.metrics import auc
from sprinter.training.objectives import Ratio
from sprinter.training.plots import draw
from sprinter.training.records import Records
from sprinter.training.roc import Report, judge, judge_directory, unseen
from sprinter.training.settings import TrainSettings
from sprinter.training.train import train

PAPER = [f"ratio(lambda={value}, at={place})" for place in ("drawn", "greedy") for value in (1.0, 1.2, 1.5)]


def make_gate(seed: int = 0, **fields: Any) -> Head:
    config = HeadConfig(HIDDEN, "org/draft", "org/target", draft_fingerprint="d" * 64, **fields)
    chance = torch.Generator().manual_seed(seed)
    return Head(config, Linear.of(torch.randn(1, HIDDEN, generator=chance), torch.zeros(1)))


@pytest.fixture(scope="module")
def records() -> Records:
    return make_records(60, 16)


@pytest.fixture(scope="module")
def labels(records: Records, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labels(tmp_path_factory.mktemp("labels"), records)


@pytest.fixture(scope="module")
def positions(labels: Path) -> Positions:
    return read_positions([labels], ("hidden",))


@pytest.fixture(scope="module")
def report(positions: Positions) -> Report:
    return judge(make_gate(), positions, repeats=60)


def test_a_gate_is_judged_by_the_papers_labels_and_two_more(report: Report) -> None:
    assert list(report.truths) == [*PAPER, "overlap above its median", "agreement"]
    for truth in report.truths.values():
        assert list(truth.signals) == ["gate", "entropy", "max q"]
    assert report.truths["overlap above its median"].share == pytest.approx(0.5, abs=0.01)


def test_areas_are_those_of_the_columns(report: Report, records: Records) -> None:
    truth, label = Ratio(1.5).values(records.columns()), PAPER[2]
    found = report.truths[label].signals
    assert found["entropy"].auc.value == pytest.approx(auc(-records.entropy, truth))
    assert found["max q"].auc.value == pytest.approx(auc(records.max_q, truth))
    assert found["gate"].auc.value == pytest.approx(auc(make_gate()(records.hidden), truth))
    assert report.truths[label].share == pytest.approx(float(truth.mean()))


def test_rates_at_tau_are_those_of_the_curve(report: Report, records: Records) -> None:
    scores, truth = make_gate()(records.hidden), Ratio(1.0).values(records.columns()) > 0
    kept = scores >= 0.5
    at_tau, (true, false) = report.truths[PAPER[0]].at_tau, report.truths[PAPER[0]].rates
    assert at_tau[0].value == pytest.approx(float(kept[truth].float().mean()))
    assert at_tau[1].value == pytest.approx(float(kept[~truth].float().mean()))
    middle = int((true.x - 0.5).abs().argmin())
    assert float(true.y[middle]) == pytest.approx(at_tau[0].value)
    assert float(false.y[middle]) == pytest.approx(at_tau[1].value)


def test_the_table_tells_share_and_overlap(report: Report, records: Records) -> None:
    scores = make_gate()(records.hidden)
    row = next(row for row in report.table if row["tau"] == 0.3)
    kept = scores >= 0.3
    assert row["share"]["1.0"] == pytest.approx(float(kept.float().mean()))
    assert row["overlap"]["0.7"] == pytest.approx(float(records.overlap[kept][:, 1].mean()), abs=1e-6)


def test_a_head_that_knows_the_truth_has_area_1_and_no_error(records: Records) -> None:
    """A gate that reads nothing but the overlap itself."""
    columns = {name: values for name, values in records.columns().items() if values.dim() == 1}
    columns |= {"overlap": records.overlap, "expected_ratio": records.expected_ratio}
    scores = records.overlap[:, :1].clamp(1e-6, 1 - 1e-6)
    oracle = Positions(scores.logit(), columns, records.prompt, (), ())
    config = HeadConfig(HIDDEN, "d", "t", features=("entropy",))
    network = config.network()
    with torch.no_grad():
        network.weight.fill_(1)  # type: ignore[union-attr]
    found = judge(Head(config, network), oracle, repeats=30)
    assert found.truths["overlap above its median"].signals["gate"].auc.value == 1.0
    assert found.r2 > 0.999 and found.calibration_error < 1e-3


def test_a_trained_gate_beats_the_baselines_here(labels: Path, positions: Positions) -> None:
    settings = TrainSettings(epochs=8, lr=5e-3, batch=64)
    trained = train(positions, settings)
    found = judge(trained.head, positions.select(positions.parts(0) == 2), repeats=100)
    signals = found.truths["overlap above its median"].signals
    assert signals["gate"].auc.low > max(signals[name].auc.high for name in ("entropy", "max q"))


def test_an_own_hard_label_is_judged_too(positions: Positions) -> None:
    label = "fuzzy(divergence=js, threshold=0.1)"
    found = judge(make_gate(label=label), positions, repeats=30)
    assert next(iter(found.truths)) == label and found.label == label


@pytest.mark.parametrize(
    ("kind", "features"), [("specdec++", ("hidden_x",)), ("disco", ("entropy", "position"))]
)
def test_stop_rules_are_judged_in_draft_written_texts(
    labels: Path, records: Records, kind: str, features: tuple[str, ...]
) -> None:
    config = HeadConfig(
        HIDDEN, "org/draft", "t", draft_fingerprint="d" * 64, kind=kind, features=features, architecture="ffn",
        label="accept(at=text)" if kind == "specdec++" else "overlap", width=4, layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    head = Head(config, config.network())
    found = judge(head, read_positions([labels], features), repeats=30)
    assert found.positions == len(records) // 4
    signals = list(next(iter(found.truths.values())).signals)
    if kind == "specdec++":
        assert list(found.truths) == [f"ratio(lambda={v}, at=text)" for v in (1.0, 1.2, 1.5)] + [
            "accept(at=text)"
        ]
        assert signals == ["specdec++", "entropy", "max q", "q(x)"]
    else:
        assert "agreement" in found.truths and signals == ["disco", "entropy", "max q"]


# --- what was trained on is left out ----------------------------------------------------------------------------------
def test_prompts_that_were_trained_on_are_left_out(labels: Path, positions: Positions) -> None:
    gate = make_gate()
    assert unseen(gate, positions).all()  # nobody knows what it was trained on
    gate.facts = {"training": {"sources": ["a" * 64], "seed": 3}}
    assert unseen(gate, positions).equal(positions.parts(3) == 2)
    found = judge_directory(gate, [labels], repeats=30)
    assert found.prompts == len(set(positions.group[positions.parts(3) == 2].tolist())) < 30


def test_texts_of_other_files_are_judged_whole(records: Records, tmp_path: Path) -> None:
    gate = make_gate()
    gate.facts = {"training": {"sources": ["a" * 64], "seed": 3}}
    other = write_labels(tmp_path, records, data=({"name": "o", "sha256": "b" * 64, "texts": 60},))
    assert judge_directory(gate, [other], repeats=30).prompts == 60


def test_nothing_but_training_prompts_is_one_line(positions: Positions) -> None:
    gate = make_gate()
    gate.facts = {"training": {"sources": ["a" * 64], "seed": 0}}
    with pytest.raises(UserError, match="trained on all of these prompts"):
        unseen(gate, positions.select(positions.parts(0) == 0))


# --- mistakes ---------------------------------------------------------------------------------------------------------
def test_labels_of_another_draft_are_one_line(labels: Path) -> None:
    gate = make_gate()
    gate.config = replace(gate.config, draft_fingerprint="e" * 64)
    with pytest.raises(UserError, match="the labels are of draft 'org/draft' and the gate was made for"):
        judge_directory(gate, [labels])


def test_a_label_with_one_class_is_left_out_and_none_is_one_line(positions: Positions) -> None:
    alike = replace(positions, columns={**positions.columns, "greedy_ratio": torch.ones(len(positions))})
    found = judge(make_gate(), alike, repeats=30)
    assert [name for name in found.truths if "greedy" in name] == []
    one = positions.select(torch.tensor([0]))
    with pytest.raises(UserError, match="one class only"):
        judge(make_gate(), one)
    with pytest.raises(UserError, match="no position"):
        judge(make_gate(), positions.select(torch.zeros(0, dtype=torch.int64)))


# --- what is written --------------------------------------------------------------------------------------------------
def test_a_report_is_json_without_nan(report: Report) -> None:
    text = json.dumps(report.to_dict(), allow_nan=False)
    read = json.loads(text)
    assert (
        read["truths"]["agreement"]["signals"]["gate"]["auc"][0]
        == report.truths["agreement"].signals["gate"].auc.value
    )
    assert len(read["truths"]["agreement"]["rates"]["eta_tp"]["y"]) == 51
    small = json.dumps(report.summary(), allow_nan=False)
    assert len(small) < len(text) / 10 and '"roc"' not in small


def test_one_prompt_has_no_intervals(positions: Positions) -> None:
    found = judge(make_gate(), positions.select(positions.group == 0), repeats=30)
    area = found.truths[PAPER[2]].signals["gate"].auc
    assert area.to_list() == [area.value, None, None] and found.drift is not None
    assert str(found.drift).endswith("(n=1)")
    json.dumps(found.to_dict(), allow_nan=False)


def test_pictures_are_drawn(report: Report, tmp_path: Path) -> None:
    from matplotlib import image

    files = draw(report, tmp_path / "out")
    assert [file.name for file in files] == ["roc.png", "precision-recall.png", "gate.png"]
    for file in files:
        pixels = image.imread(file)
        assert pixels.shape[1] == 1350  # nine inches at 150 dots
        assert 0.5 < float(pixels[..., :3].mean()) < 1  # white, and something on it
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(file.name for file in files)


def test_without_matplotlib_there_is_one_line(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'matplotlib>="):
        draw(report, tmp_path / "out")
    assert not (tmp_path / "out").exists()
