"""Training: what it learns, early stopping, weights, mixing and seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.training.synthetic import HIDDEN, make_records, write_labels

from sprinter.errors import UserError
from sprinter.heads.artifact import load_head
from sprinter.heads.networks import Linear
from sprinter.training.card import save_trained
from sprinter.training.dataset import Positions, read_positions
from sprinter.training.metrics import auc, calibration_error
from sprinter.training.objectives import Accept
from sprinter.training.records import KINDS, Records
from sprinter.training.roc import judge
from sprinter.training.settings import PRESETS, TrainSettings
from sprinter.training.train import Epoch, Trained, position_weights, train

QUICK = {"epochs": 6, "lr": 3e-3, "batch": 128}


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labels(tmp_path_factory.mktemp("labels"), make_records(80, 16))


@pytest.fixture(scope="module")
def positions(labels: Path) -> Positions:
    return read_positions([labels], ("hidden",))


def part(positions: Positions, number: int, seed: int = 0) -> Positions:
    return positions.select(positions.parts(seed) == number)


def changed(records: Records, **columns: torch.Tensor) -> Records:
    return Records(**{**records.columns(), **columns})


# --- what is learnt ---------------------------------------------------------------------------------------------------
def test_the_papers_gate_reaches_the_optimum_of_its_convex_loss(positions: Positions) -> None:
    """Adam against a solver that needs no step size, on the same training part."""
    trained = train(positions, TrainSettings(calibration="none", epochs=20, lr=2e-3, batch=64))
    own = part(positions, 0)
    inputs, truth = own.inputs.double(), own.columns["overlap"][:, 0].double()
    weights = torch.zeros(HIDDEN + 1, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss(at: torch.Tensor) -> torch.Tensor:
        logits = inputs @ at[:-1] + at[-1]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, truth)

    def step() -> torch.Tensor:
        solver.zero_grad()
        value = loss(weights)
        value.backward()
        return value

    solver.step(step)
    assert isinstance(trained.head.network, Linear) and trained.head.size == HIDDEN + 1
    found = torch.cat([trained.head.network.weight[0], trained.head.network.bias]).double()
    assert float(loss(found)) - float(loss(weights).detach()) < 1e-3


def test_scores_of_a_soft_label_are_its_mean(positions: Positions) -> None:
    """On prompts that were not trained on: R² of the overlap well above 0, and the score means the overlap."""
    trained = train(positions, TrainSettings(epochs=20, lr=2e-3))
    test = part(positions, 2)
    truth, scores = test.columns["overlap"][:, 0], trained.head(test.inputs)
    error = float((scores - truth).square().mean() / truth.var())
    assert error < 0.5
    assert calibration_error(scores, truth) < 0.05


def test_calibration_undoes_the_bias_of_a_weight_on_rejections(positions: Positions) -> None:
    bent, mended = (
        train(positions, TrainSettings(weight=6.0, calibration=kind, **QUICK)) for kind in ("none", "temperature")
    )  # fmt: skip
    test = part(positions, 2)
    truth = test.columns["overlap"][:, 0]
    assert float(bent.head(test.inputs).mean()) < float(truth.mean()) - 0.2  # biased by the weight of 6
    assert calibration_error(mended.head(test.inputs), truth) < 0.05


def test_balanced_classes_have_a_mean_score_of_one_half(positions: Positions) -> None:
    trained = train(
        positions, TrainSettings(weight="balanced", label="agreement", calibration="none", **QUICK)
    )
    own = part(positions, 0)
    truth, scores = own.columns["overlap"][:, 2], trained.head(own.inputs)
    weight = torch.where(truth > 0.5, 1.0, trained.weight)
    assert trained.weight == pytest.approx(float(truth.sum() / (1 - truth).sum()), rel=1e-4)
    assert float((weight * scores).sum() / weight.sum()) == pytest.approx(0.5, abs=0.03)


def test_offset_and_scale_of_features_do_not_matter(labels: Path, positions: Positions) -> None:
    """Standardised inside, folded at the end: hidden states of another scale give the same scores."""
    other = replace(positions, inputs=positions.inputs * 300 + 7)
    for head in ("linear", "mlp", "resnet"):
        settings = TrainSettings(head, **{**QUICK, "epochs": 2})
        one, two = (train(these, settings).head(these.inputs[:50]) for these in (positions, other))
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3)


def test_a_constant_feature_does_no_harm(positions: Positions) -> None:
    inputs = torch.cat([positions.inputs[:, :-1], torch.full((len(positions), 1), 5.0)], 1)
    scores = train(replace(positions, inputs=inputs), TrainSettings(**QUICK)).head(inputs)
    assert torch.isfinite(scores).all() and float(scores.std()) > 0.01


# --- when it stops ----------------------------------------------------------------------------------------------------
def test_it_stops_after_patience_and_keeps_the_best_epoch(labels: Path) -> None:
    """A wide network overfits few prompts and pure noise: the validation loss soon rises."""
    records = make_records(40, 6, seed=3)
    chance = torch.Generator().manual_seed(4)
    noise = changed(records, overlap=torch.rand(len(records), 3, generator=chance).round())
    few = read_positions([write_labels(labels.parent / "noise", noise)], ("hidden",))
    settings = TrainSettings("mlp", width=128, lr=1e-2, epochs=60, patience=2, batch=32, calibration="none")
    trained = train(few, settings)
    best = max(epoch.number for epoch in trained.history if epoch.best)
    assert len(trained.history) == best + 2 < 60
    # the head is that of the best epoch: its own loss on the validation part says so
    own = part(few, 1)
    truth, scores = own.columns["overlap"][:, 0], trained.head(own.inputs)
    found = torch.nn.functional.binary_cross_entropy(scores, truth)
    assert float(found) == pytest.approx(min(epoch.validation_loss for epoch in trained.history), abs=1e-4)


def test_progress_is_reported_after_every_epoch(positions: Positions) -> None:
    told: list[Epoch] = []
    trained = train(positions, TrainSettings(**QUICK), told.append)
    assert tuple(told) == trained.history and [epoch.number for epoch in told] == list(
        range(1, len(told) + 1)
    )
    assert told[0].best and told[-1].train_loss < told[0].train_loss


def test_the_same_seed_gives_the_same_head(positions: Positions) -> None:
    scores = [
        train(positions, TrainSettings("mlp", seed=seed, **{**QUICK, "epochs": 2})).head(positions.inputs[:9])
        for seed in (0, 0, 1)
    ]
    assert scores[0].equal(scores[1]) and not scores[0].equal(scores[2])


def test_training_leaves_the_callers_random_numbers_alone(positions: Positions) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(positions, TrainSettings("mlp", **{**QUICK, "epochs": 1}))
    assert torch.rand(3).equal(expected)


# --- which positions count --------------------------------------------------------------------------------------------
def test_a_gate_is_trained_on_all_classes_and_a_head_with_positions_on_draft_text(
    positions: Positions,
) -> None:
    assert position_weights(positions, TrainSettings()).eq(1).all()
    kinds = positions.columns["kind"][position_weights(positions, TrainSettings("disco")) > 0]
    assert set(kinds.tolist()) == {KINDS.index("draft")}
    some = TrainSettings(classes=("original", "target"))
    assert int(position_weights(positions, some).sum()) == len(positions) // 2


def test_specdec_mixes_15_percent_of_target_tokens(positions: Positions) -> None:
    weights, kind = position_weights(positions, TrainSettings("specdec++")), positions.columns["kind"]
    shares = [float(weights[kind == number].sum() / weights.sum()) for number in range(len(KINDS))]
    # half of an interleaved text's tokens are the target's
    assert shares == pytest.approx([0, 0.70, 0, 0.30])


@pytest.mark.statistical
def test_tokens_of_interleaved_texts_count_as_drawn_from_q() -> None:
    """The weighted mean of min(1, p/q) there is that of draft-written texts; unweighted it is larger.

    12,000 positions a class, laws of the same prompts; six standard errors of about 0.004: false alarm below 1e-7.
    """
    records = make_records(500, 24, seed=1, kinds=("draft", "interleaved"))
    columns = {name: values for name, values in records.columns().items() if values.dim() == 1}
    infos = ()
    positions = Positions(records.hidden[:, :0], columns, records.prompt, (), infos)
    accept, mixed = Accept("text").values(columns), records.kind == KINDS.index("interleaved")
    weights = position_weights(positions, TrainSettings("specdec++"))
    drawn = float(accept[~mixed].mean())
    weighted = float((weights * accept)[mixed].sum() / weights[mixed].sum())
    assert abs(weighted - drawn) < 0.024
    assert float(accept[mixed].mean()) - drawn > 0.04


def test_the_papers_preset_has_its_label_and_threshold() -> None:
    paper = TrainSettings("paper")
    assert (paper.label, paper.tau, paper.drift) == ("ratio(lambda=1.2, at=drawn)", 0.5, None)
    assert (paper.features, paper.calibration, paper.kind) == (("hidden",), "none", "gate")
    changed = TrainSettings("paper", label="ratio(lambda=1)", drift=0.05)
    assert (changed.label, changed.tau, changed.drift) == ("ratio(lambda=1.0, at=drawn)", None, 0.05)


# --- every head, to disk and back -------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", PRESETS)
def test_every_head_is_trained_saved_and_loaded(labels: Path, tmp_path: Path, head: str) -> None:
    settings = TrainSettings(head, **QUICK)
    these = read_positions([labels], settings.inputs)
    trained = train(these, settings)
    report = judge(trained.head, part(these, 2), repeats=50)
    facts = save_trained(trained, report, these, tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    preset = PRESETS[head]
    assert (loaded.config.kind, loaded.config.architecture) == (preset["kind"], preset["architecture"])
    assert (loaded.config.draft_id, loaded.config.draft_fingerprint) == ("org/draft", "d" * 64)
    torch.testing.assert_close(
        loaded.calibration(loaded.network(these.inputs[:50])),
        trained.head.calibration(trained.head.network(these.inputs[:50])),
    )
    assert loaded.facts["training"] == facts
    assert facts["data_hash"] == these.data_hash and set(facts["split"]) == {"train", "validation", "test"}
    card = (tmp_path / "head" / "README.md").read_text()
    for words in (
        these.data_hash[:12],
        "AU-ROC",
        "η_TP",
        trained.settings.inputs[0],
        str(trained.label),
        "dddddddddddd",
    ):
        assert words in card
    if head == "specdec++":  # it sees how well x fits, and the baselines do not
        truth = report.truths["accept(at=text)"].signals
        assert truth["specdec++"].auc.low > truth["max q"].auc.high


def test_a_fresh_data_set_of_one_law_gives_a_lossless_gate(tmp_path: Path) -> None:
    """Draft and target the same: the overlap is 1 everywhere, and training says that there is nothing to learn."""
    same = write_labels(tmp_path, make_records(60, 4, noise=0))
    with pytest.raises(UserError, match="is 1 at every position of the train part"):
        train(read_positions([same], ("hidden",)), TrainSettings())


# --- mistakes ---------------------------------------------------------------------------------------------------------
def test_one_class_only_is_one_line(positions: Positions) -> None:
    with pytest.raises(
        UserError, match=r"fuzzy\(divergence=tv, threshold=2.0\) is 1 at every .*another label"
    ):
        train(positions, TrainSettings(label="fuzzy(divergence=tv, threshold=2)"))


def test_too_few_prompts_are_one_line(tmp_path: Path) -> None:
    few = read_positions([write_labels(tmp_path, make_records(2, 8))], ("hidden",))
    with pytest.raises(UserError, match=r"no prompt fell into the \w+ part \(2 prompts in all\)"):
        train(few, TrainSettings())


def test_a_step_that_is_too_large_is_one_line(positions: Positions) -> None:
    broken = replace(positions, inputs=torch.full_like(positions.inputs, math.nan))
    with pytest.raises(UserError, match="no longer a number in epoch 1: lower lr"):
        train(broken, TrainSettings())


def test_texts_of_the_wrong_class_are_one_line(tmp_path: Path, positions: Positions) -> None:
    with pytest.raises(UserError, match="prefix class 'target' does not fit"):
        train(positions, TrainSettings("specdec++", classes=("draft", "target")))
    originals = write_labels(tmp_path, make_records(30, 8, kinds=("original",)))
    with pytest.raises(UserError, match="no text of class draft or interleaved"):
        train(read_positions([originals], ("hidden_x",)), TrainSettings("specdec++"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preset": "linea"}, "did you mean 'linear'"),
        ({"preset": "judge"}, "fitted to mined tokens"),
        ({"label": "ovrlap"}, "did you mean 'overlap'"),
        ({"features": "hiden"}, "did you mean 'hidden'"),
        ({"calibration": "temprature"}, "did you mean 'temperature'"),
        ({"classes": ("drft",)}, "did you mean 'draft'"),
        ({"epochs": 0}, "epochs=0"),
        ({"batch": 0}, "batch=0"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"tau": 2.0}, "tau=2.0"),
        ({"weight": 0.0}, "weight=0.0"),
        ({"weight": "balance"}, "weight=balance"),
        ({"mix": 0.7}, "mix=0.7"),
        ({"preset": "specdec++", "label": "accept"}, r"use accept\(at=text\)"),
        ({"features": "hidden,log_q", "label": "ratio(at=greedy)"}, r"use ratio\(at=text\)"),
    ],
)
def test_wrong_settings_are_one_line(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainSettings(**fields)


def test_presets_fill_in_what_is_not_said() -> None:
    plain, stop = TrainSettings(), TrainSettings("specdec++", weight=2)
    assert (plain.label, plain.inputs, plain.calibration) == (
        "overlap(temperature=1.0)",
        ("hidden",),
        "temperature",
    )
    assert (stop.label, stop.weight, stop.layers, stop.calibration) == ("accept(at=text)", 2, 3, "none")


def test_a_head_of_other_features_beats_none(labels: Path) -> None:
    """Entropy alone says little here, the hidden state much: the features are really those that were asked for."""
    areas = {}
    for features in ("entropy", "hidden,entropy"):
        settings = TrainSettings(features=features, **QUICK)
        these = read_positions([labels], settings.inputs)
        trained: Trained = train(these, settings)
        test = part(these, 2)
        scores = trained.head.calibration(trained.head.network(test.inputs))
        areas[features] = auc(scores, test.columns["overlap"][:, 0])
    assert areas["hidden,entropy"] > areas["entropy"] + 0.05
