"""Evaluate a head on records: ROC, precision-recall, calibration and rates, compared with entropy and confidence alone.

A gate is evaluated on the labels of the SPRINTER paper (q(x)/p(x) <= λ for a drawn and for the greedy x), on "overlap
above its median" and on "argmax agrees". A head that reads x is evaluated on the labels of the text's own token, in
draft-written texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sprinter.decode.threshold import reaches
from sprinter.errors import UserError
from sprinter.heads.head import Head
from sprinter.training.dataset import Positions, check_head, part_of, read_positions
from sprinter.training.metrics import (
    Bootstrap,
    Curve,
    Curves,
    Interval,
    as_json,
    calibration_curve,
    calibration_error,
    curves,
    mean_interval,
    rates,
)
from sprinter.training.objectives import (
    Accept,
    Agreement,
    Columns,
    Label,
    Overlap,
    Ratio,
    above_median,
    parse_label,
)
from sprinter.training.records import ENOUGH, LAMBDAS, TEMPERATURES, read_info
from sprinter.training.threshold import TauSetting, choose, setting
from sprinter.training.train import score

__all__ = ["Report", "Truth", "few_prompts", "judge", "judge_directory", "unseen"]

_TAUS = torch.linspace(0, 1, 51, dtype=torch.float64)
_DRIFTS = (0.02, 0.05, 0.1, 0.2)
_TABLE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class AtTau(NamedTuple):
    """Rates at a threshold: the shares of positives and of negatives that score at least τ."""

    eta_tp: Interval
    eta_fp: Interval


class Rates(NamedTuple):
    """The same over τ."""

    eta_tp: Curve
    eta_fp: Curve


@dataclass(frozen=True, slots=True)
class Truth:
    """Evaluation of the head on one label.

    Attributes:
        share: mean of the label.
        signals: ROC and precision-recall of the head (named by its kind) and of each baseline.
        rates: η_TP and η_FP over τ.
        at_tau: both rates at the head's own τ.
    """

    share: float
    signals: dict[str, Curves]
    rates: Rates
    at_tau: AtTau


@dataclass(frozen=True, slots=True)
class Report:
    """Evaluation of a head.

    Attributes:
        kind, label, tau: the head's kind, its own label and threshold.
        positions, prompts: number of positions and prompts that it was evaluated on.
        truths: evaluation on each label.
        calibration: mean of the head's own label over mean score, by bin.
        calibration_error: expected calibration error on the same label.
        r2: share of that label's variance that the score explains.
        mean_label, mean_score: means over all positions.
        table: for several τ the share that scores at least τ, and the mean overlap there, at each temperature.
        setting: for a gate, what to expect of decoding at its τ and temperature 1.
        drift: for a gate, the expected drift in ``setting`` with its interval.
        dial: for a gate, what to expect at the lowest τ that keeps several drifts.
    """

    kind: str
    label: str
    tau: float
    positions: int
    prompts: int
    truths: Mapping[str, Truth]
    calibration: Curve
    calibration_error: float
    r2: float
    mean_label: float
    mean_score: float
    table: tuple[dict[str, Any], ...]
    setting: TauSetting | None = None
    drift: Interval | None = None
    dial: tuple[TauSetting, ...] = ()

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the signals that every truth compares, the head's first."""
        return tuple(next(iter(self.truths.values())).signals)

    @property
    def caveat(self) -> str | None:
        """Warning about an evaluation on few prompts; None: there are enough."""
        return few_prompts(self.prompts)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**as_json(self), "caveat": self.caveat}

    def summary(self) -> dict[str, Any]:
        """``to_dict`` without the curves, for model cards and the command line."""
        whole = self.to_dict()
        del whole["calibration"]
        for truth in whole["truths"].values():
            del truth["rates"]
            truth["auc"] = {name: found["auc"] for name, found in truth.pop("signals").items()}
        return whole


def few_prompts(count: int) -> str | None:
    """Warning about areas and rates that rest on so many prompts; None from ``ENOUGH`` on."""
    if count >= ENOUGH:
        return None
    plural = "" if count == 1 else "s"
    return f"AU-ROC and rates rest on {count} prompt{plural} only: label more, until {ENOUGH} or more are held out"


def judge_directory(
    head: Head, directories: Sequence[str | Path], repeats: int = 500, seed: int = 0
) -> Report:
    """Evaluate a head on labels on disk, without the prompts that it was trained or calibrated on.

    Args:
        head: the head.
        directories: directories of finished data sets.
        repeats: number of bootstrap draws.
        seed: seed of the bootstrap.

    Raises:
        UserError: no labels, labels of another draft, nothing but training prompts, labels of one class only.
    """
    check_head(head, [read_info(directory) for directory in directories])
    positions = read_positions(directories, head.features)
    return judge(head, positions.select(unseen(head, positions)), repeats, seed)


def unseen(head: Head, positions: Positions) -> Tensor:
    """Mask of the positions whose prompts were used neither for training nor for validation, ``[n]`` bool.

    Raises:
        UserError: no position is left.
    """
    training = head.facts.get("training")
    training = training if isinstance(training, dict) else {}
    sources, seed = set(training.get("sources") or ()), int(training.get("seed") or 0)
    fresh = [name.partition(":")[0] not in sources or part_of(name, seed) == 2 for name in positions.prompts]
    mask = torch.tensor(fresh)[positions.group]
    if not bool(mask.any()):
        raise UserError(
            "the gate was trained on all of these prompts: give labels of other texts, or more of these"
        )
    return mask


def judge(head: Head, positions: Positions, repeats: int = 500, seed: int = 0) -> Report:
    """Evaluate a head on these positions.

    Args:
        head: the head.
        positions: positions with the features of the head.
        repeats: number of bootstrap draws of prompts.
        seed: seed of the bootstrap.

    Raises:
        UserError: no positions, or labels of one class only.
    """
    if head.config.model == "target":
        raise UserError(f"a {head.config.kind} head is not a gate: its card says how it was evaluated")
    own = parse_label(head.config.label)
    run = head.sees_token or own.at_text or "position" in head.features
    if (
        run
    ):  # only in draft-written texts did the draft write the token, and is the step the position in a run
        positions = positions.select(positions.of_kinds(["draft"]))
    if not len(positions):
        raise UserError("there is no position to judge the gate on: label more text")
    scores, columns = score(head, positions.inputs), positions.columns
    bootstrap = Bootstrap.make(positions.group, repeats, seed)
    signals = {head.config.kind: scores, "entropy": -columns["entropy"], "max q": columns["max_q"]}
    if head.sees_token:
        signals["q(x)"] = columns["log_q_token"]
    warm, cold = positions.at_temperature(1.0), positions.at_temperature(0.0)  # equal without the feature
    truths = {}
    for name, values in _labels(own, columns, at_text=head.sees_token or own.at_text).items():
        rows = cold if name == str(Agreement()) else warm
        shown = {signal: found[rows] for signal, found in signals.items()}
        draws = bootstrap if bool(rows.all()) else Bootstrap.make(positions.group[rows], repeats, seed)
        truths[name] = _truth(values[rows], shown, scores[rows], head.config.tau, draws)
    values = own.values(columns).double()
    expected = _expected(head, scores[warm], positions.select(warm), repeats, seed)
    error = (values - scores.double()).square().mean()
    return Report(
        kind=head.config.kind,
        label=str(own),
        tau=head.config.tau,
        positions=int(warm.sum()),
        prompts=len(torch.unique(positions.group)),
        truths=truths,
        calibration=calibration_curve(scores, values, bootstrap),
        calibration_error=calibration_error(scores, values),
        r2=float(1 - error / values.var(correction=0).clamp(min=1e-12)),
        mean_label=float(values.mean()),
        mean_score=float(scores.mean()),
        table=tuple(_row(tau, scores, positions) for tau in _TABLE),
        **expected,
    )


def _expected(head: Head, scores: Tensor, positions: Positions, repeats: int, seed: int) -> dict[str, Any]:
    """``setting``, ``drift`` and ``dial`` of a gate, from positions at temperature 1; empty for other heads."""
    if head.config.kind != "gate":
        return {}
    overlap = positions.columns["overlap"][:, TEMPERATURES.index(1.0)]
    own, dial = (
        [setting(tau, scores, overlap) for tau in taus]
        for taus in ([head.config.tau], (choose(drift, scores, overlap) for drift in _DRIFTS))
    )
    kept = reaches(scores, head.config.tau).double()
    tokens = 1 + overlap * (1 - kept)
    drift = mean_interval(
        (1 - overlap) * kept / tokens, tokens, Bootstrap.make(positions.group, repeats, seed)
    )
    return {"setting": own[0], "drift": drift, "dial": tuple(dial)}


def _labels(own: Label, columns: Columns, *, at_text: bool) -> dict[str, Tensor]:
    """Values ``[n]`` of the labels to evaluate on; labels with only one class are left out."""
    chosen: list[tuple[str, Tensor]] = []
    places = ("text",) if at_text else ("drawn", "greedy")
    for place in places:
        for value in LAMBDAS:
            label = Ratio(value, place)
            chosen.append((str(label), label.values(columns)))
    if at_text:
        chosen.append((str(Accept("text")), Accept("text").values(columns)))
    else:
        chosen.append(("overlap above its median", above_median(Overlap().values(columns))))
        chosen.append((str(Agreement()), Agreement().values(columns)))
    if not own.soft and str(own) not in dict(chosen):
        chosen.insert(0, (str(own), own.values(columns)))
    found = {name: values for name, values in chosen if float(values.max() - values.min()) > 1e-6}
    if not found:
        raise UserError("every label has one class only on these positions: label more text")
    return found


def _truth(
    values: Tensor, signals: Mapping[str, Tensor], scores: Tensor, tau: float, bootstrap: Bootstrap
) -> Truth:
    kept = reaches(scores, tau).float()
    return Truth(
        share=float(values.double().mean()),
        signals={name: curves(signal, values, bootstrap) for name, signal in signals.items()},
        rates=Rates(*rates(scores, values, _TAUS, bootstrap)),
        at_tau=AtTau(mean_interval(kept, values, bootstrap), mean_interval(kept, 1 - values, bootstrap)),
    )


def _row(tau: float, scores: Tensor, positions: Positions) -> dict[str, Any]:
    """At each temperature the share of scores >= τ, and the mean overlap of those positions."""
    kept, shares, overlaps = reaches(scores, tau), {}, {}
    for i, temperature in enumerate(TEMPERATURES):
        here = positions.at_temperature(temperature)
        chosen = positions.columns["overlap"][here & kept][:, i].double()
        shares[str(temperature)] = float(kept[here].double().mean())
        overlaps[str(temperature)] = float(chosen.mean()) if len(chosen) else None
    return {"tau": tau, "share": shares, "overlap": overlaps}
