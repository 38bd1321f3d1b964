"""How far a draft agrees with its target along texts, and how well the draft's own certainty tells where."""

from __future__ import annotations

from typing import Any

import torch

from sprinter.decode.trust import Certain
from sprinter.laws import overlap, tv_distance
from sprinter.theory.recording import Recording, first_choices
from sprinter.training.metrics import Bootstrap, auc, mean_interval

__all__ = ["CLOSE", "SIGNS", "agreement", "certain_positions"]

CLOSE = 0.9
"""Overlap of a position at which the draft is said to write what the target would."""
SIGNS = {"entropy": -1.0, "max_prob": 1.0, "margin": 1.0}
"""Of the signals of the draft's certainty: 1 where the larger is the more certain."""
_THRESHOLDS = {
    "entropy": (0.3, 1.0, 1.5, 2.0, 2.5), "max_prob": (0.9, 0.7, 0.45), "margin": (3.0, 2.0, 1.0),
}  # fmt: skip


def agreement(recording: Recording) -> dict[str, Any]:
    """Overlap β = Σ min(p, q), first choices, and how well the signals tell where these are high.

    Returns:
        "overlap", "agreement": mean with its 95 % interval over texts, [value, low, high]; "overlap_above_0.9": share
        of positions; "auc": by signal, of "overlap_above_median" and "agreement", None where all positions are alike.
    """
    beta, same = overlap(recording.p, recording.q).double(), first_choices(recording).double()
    text = torch.repeat_interleave(torch.arange(len(recording.lengths)), torch.tensor(recording.lengths))
    bootstrap, weights = Bootstrap.make(text), torch.ones_like(beta)
    labels = {"overlap_above_median": (beta > beta.median()).double(), "agreement": same}
    scores = {name: sign * recording.signals[name] for name, sign in SIGNS.items()}
    return {
        "overlap": mean_interval(beta, weights, bootstrap).to_list(),
        f"overlap_above_{CLOSE:g}": float((beta > CLOSE).double().mean()),
        "agreement": mean_interval(same, weights, bootstrap).to_list(),
        "auc": {
            name: {what: _number(auc(score, label)) for what, label in labels.items()}
            for name, score in scores.items()
        },
    }


def certain_positions(recording: Recording) -> list[dict[str, Any]]:
    """By threshold: the share of positions that ``certain`` trusts, and the mean of TV(q, p) where it does, else 0."""
    drift, rows = tv_distance(recording.p, recording.q).double(), []
    for signal, thresholds in _THRESHOLDS.items():
        for threshold in thresholds:
            trusted = Certain(signal, threshold).trust(recording.signals, ())[0].double()
            shares = {"trusted": float(trusted.mean()), "drift": float((drift * trusted).mean())}
            rows.append({"signal": signal, "threshold": threshold, **shares})
    return rows


def _number(value: float) -> float | None:
    return value if value == value else None  # NaN: one class only
