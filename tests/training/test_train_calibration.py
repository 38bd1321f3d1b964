"""Calibration: scores become probabilities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sprinter.errors import UserError
from sprinter.heads.calibration import Isotonic, Temperature
from sprinter.training.calibrate import fit_calibration, pool_adjacent_violators
from sprinter.training.metrics import auc, calibration_error


def sample(
    n: int = 20_000, slope: float = 0.4, shift: float = 1.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels drawn with chance sigmoid(slope · logit + shift)."""
    chance = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, generator=chance)
    return logits, (torch.rand(n, generator=chance) < torch.sigmoid(slope * logits + shift)).float()


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1, 2, 3], [1, 1, 1], [1, 2, 3]),
        ([3, 1, 2], [1, 1, 1], [2, 2, 2]),
        ([1, 3, 2, 4], [1, 1, 1, 1], [1, 2.5, 2.5, 4]),
        ([2, 1], [3, 1], [1.75, 1.75]),
        ([4, 3, 2, 1], [1, 1, 1, 1], [2.5] * 4),
    ],
)
def test_pooling_by_hand(values: list[float], weights: list[float], expected: list[float]) -> None:
    found = pool_adjacent_violators(torch.tensor(values).double(), torch.tensor(weights).double())
    assert found.tolist() == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_pooling_rises_and_keeps_the_mean(values: list[float]) -> None:
    given_values = torch.tensor(values, dtype=torch.float64)
    found = pool_adjacent_violators(given_values, torch.ones(len(values)))
    assert (found.diff() >= -1e-12).all()
    assert float(found.mean()) == pytest.approx(float(given_values.mean()), abs=1e-9)


@pytest.mark.statistical
def test_temperature_finds_slope_and_shift() -> None:
    """Standard errors at n = 20,000 are about 0.007 and 0.02; six of them: false alarm below 1e-8."""
    curve = fit_calibration("temperature", *sample())
    assert isinstance(curve, Temperature)
    assert 1 / curve.temperature == pytest.approx(0.4, abs=0.045) and curve.shift == pytest.approx(
        1.0, abs=0.12
    )


@pytest.mark.statistical
@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_the_calibration_error_falls_on_other_data(kind: str) -> None:
    """From above 0.15 to below 0.025, where sampling alone gives some 0.01: false alarm below 1e-6."""
    curve = fit_calibration(kind, *sample())
    logits, labels = sample(seed=1)
    before, after = torch.sigmoid(logits), curve(logits)
    assert calibration_error(before, labels) > 0.15
    assert calibration_error(after, labels) < 0.025
    assert abs(auc(after, labels) - auc(before, labels)) < 0.01  # the order stays


def test_isotonic_fits_what_no_line_can() -> None:
    chance = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(20_000, generator=chance)
    truth = 0.2 + 0.6 * (logits > 0.5).float()  # a step
    labels = (torch.rand(20_000, generator=chance) < truth).float()
    line, curve = (fit_calibration(kind, logits, labels) for kind in ("temperature", "isotonic"))
    assert calibration_error(curve(logits), labels) < 0.5 * calibration_error(line(logits), labels)


def test_soft_labels_and_weights_count() -> None:
    logits = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    soft = fit_calibration("temperature", logits, torch.tensor([0.3, 0.6, 0.3, 0.6]))
    torch.testing.assert_close(soft(logits[:2]), torch.tensor([0.3, 0.6]), rtol=1e-3, atol=1e-3)
    labels, weights = torch.tensor([0.1, 0.9, 0.3, 0.6]), torch.tensor([1e-9, 1e-9, 1.0, 1.0])
    torch.testing.assert_close(
        fit_calibration("temperature", logits, labels, weights)(logits[:2]), soft(logits[:2])
    )


def test_nothing_to_fit_leaves_the_scores_as_they_are() -> None:
    for kind in ("temperature", "isotonic"):
        curve = fit_calibration(kind, torch.zeros(50), torch.rand(50))
        assert curve.kind == "none"
    assert fit_calibration("temperature", torch.randn(50), torch.ones(50)).kind == "none"  # one class


def test_scores_that_say_the_opposite_keep_their_order() -> None:
    logits, labels = sample(slope=-0.5)
    scores = fit_calibration("temperature", logits, labels)(logits.sort().values)
    assert (scores.diff() >= 0).all()
    level = fit_calibration("isotonic", logits, labels)
    assert isinstance(level, Isotonic) and float(level.scores[-1] - level.scores[0]) < 0.05


def test_unknown_calibration_is_one_line() -> None:
    with pytest.raises(UserError, match="did you mean 'isotonic'"):
        fit_calibration("isotonik", torch.zeros(2), torch.zeros(2))
