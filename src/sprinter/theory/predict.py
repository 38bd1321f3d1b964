"""Predict a method on a pair from recorded laws: tokens per target call, drift, speed-up; choose the best parameters.

A method's texts follow neither the target's law nor the draft's. It is replayed along texts of both, and departs from
each in a share of the tokens; the two predictions are mixed in the ratio parted_draft : parted_target. An exact method
never departs from the target's text and the draft alone never from the draft's: each is predicted on its own texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sprinter.decode.spec import Method, parse_method
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.theory.montecarlo import check_drift
from sprinter.theory.passes import time_passes
from sprinter.theory.recording import Recording
from sprinter.theory.replay import Replay, replay, unrecorded

__all__ = ["FAMILIES", "CostRatio", "Prediction", "best", "dials", "measure_costs", "predict"]

_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class CostRatio:
    """Costs relative to a forward pass of the target with one new token.

    Attributes:
        draft: cost of a draft step.
        gate: cost of a gate's score.
        token: cost of each further token in a target pass; 0 if memory bandwidth is the limit.

    Raises:
        UserError: a ratio is negative or not finite.
    """

    draft: float
    gate: float = 0.0
    token: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0.0 <= value < float("inf"):
                raise UserError(
                    f"cost ratio {name}={value} is out of range: give a number of at least 0, such as 0.2"
                )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected counts of a method, per new token unless stated otherwise; intervals are 95 % intervals (low, high).

    Attributes:
        method: full name of the method.
        lossless: whether its texts have the target's law.
        tokens_per_call: tokens per target call (None: the target is never called), and its interval.
        mean_drift: mean TV(π, p), and its interval.
        calls, draft_steps, gate_scores, trusted: counts of the loop.
        tokens_read: tokens that the target processes.
        speed_up: speed relative to plain decoding with the target; None without a cost ratio.
        parted: shares of tokens in which the replays departed from the target's and the draft's text.
        weight: weight of the target's text in the mixture.
    """

    method: str
    lossless: bool
    tokens_per_call: float | None
    tokens_per_call_interval: tuple[float, float] | None
    mean_drift: float
    mean_drift_interval: tuple[float, float]
    calls: float
    draft_steps: float
    gate_scores: float
    tokens_read: float
    trusted: float
    speed_up: float | None
    parted: tuple[float, float | None]
    weight: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def predict(
    recordings: Sequence[Recording],
    method: str | Method,
    *,
    cost: CostRatio | None = None,
    seed: int = 0,
) -> Prediction:
    """Replay a method along texts of the target and, if recorded, of the draft, and mix the results.

    Args:
        recordings: one per writer, along texts after the same prompts; or the target's alone.
        seed: seed of the replays.

    Raises:
        UserError: recordings that do not belong together, a signal that was not recorded, or a rule without drift.
    """
    method = parse_method(method)
    check_drift(method)
    by_writer = {recording.writer: recording for recording in recordings}
    if "target" not in by_writer or len(by_writer) != len(recordings):
        raise UserError(
            "a prediction needs one recording along texts of the target, and at most one of the draft"
        )
    method = method.settle(by_writer["target"].taus)
    along = {writer: replay(one, method, seed=seed) for writer, one in by_writer.items()}
    target, draft = along["target"], along.get("draft")
    weight = _weight(target, draft)
    mixed = [(weight, target)] + ([(1 - weight, draft)] if draft is not None else [])

    def rate(name: str) -> float:
        return float(sum(share * getattr(one, name) / one.tokens for share, one in mixed))

    calls, steps = rate("target_calls"), rate("draft_steps")
    scores = steps if "gate" in method.needs else 0.0
    read = rate("read")
    intervals = _intervals([(share, one.by_text) for share, one in mixed], seed)
    return Prediction(
        method=method.name,
        lossless=method.lossless(_greedy(by_writer["target"])),
        tokens_per_call=1 / calls if calls else None,
        tokens_per_call_interval=intervals[0] if calls else None,
        mean_drift=sum(share * one.mean_drift for share, one in mixed),
        mean_drift_interval=intervals[1],
        calls=calls,
        draft_steps=steps,
        gate_scores=scores,
        tokens_read=read,
        trusted=rate("trusted"),
        speed_up=None if cost is None else _speed_up(cost, calls, steps, scores, read),
        parted=(target.parted / target.tokens, draft.parted / draft.tokens if draft is not None else None),
        weight=weight,
    )


def _weight(target: Replay, draft: Replay | None) -> float:
    """Weight of the target's text; the less a replay departs from a text, the larger is that text's weight."""
    if draft is None:
        return 1.0
    left, right = target.parted / target.tokens, draft.parted / draft.tokens
    return right / (left + right) if left + right > 0 else 1.0


def _greedy(recording: Recording) -> bool:
    """Whether the processed laws are one-hot."""
    return bool((recording.p.amax(-1) == 1).all()) and bool((recording.q.amax(-1) == 1).all())


def _speed_up(cost: CostRatio, calls: float, steps: float, scores: float, read: float) -> float:
    """Speed relative to plain decoding, which costs 1 per token; the counts are per new token."""
    spent = calls + cost.token * max(0.0, read - calls) + cost.draft * steps + cost.gate * scores
    return 1 / max(1e-12, spent)


def _intervals(mixed: Sequence[tuple[float, Tensor]], seed: int) -> list[tuple[float, float]]:
    """95 % bootstrap intervals over texts of tokens per target call and of mean drift."""
    numbers = torch.Generator().manual_seed(seed)
    calls, drift = (torch.zeros(_RESAMPLES, dtype=torch.float64) for _ in range(2))
    for share, by_text in mixed:
        picks = torch.randint(len(by_text), (_RESAMPLES, len(by_text)), generator=numbers)
        tokens, called, drifted = by_text[picks].sum(1)[:, :3].T
        calls += share * called / tokens
        drift += share * drifted / tokens
    edges = torch.tensor([0.025, 0.975], dtype=torch.float64)
    found = [torch.quantile(values, edges).tolist() for values in (1 / calls.clamp(min=1e-12), drift)]
    return [(low, high) for low, high in found]


def measure_costs(pair: Pair, *, context: int = 64, tokens: int = 8, repeats: int = 15) -> CostRatio:
    """Measure the cost ratios of a pair on this machine: medians of single forward passes after ``context`` tokens.

    Raises:
        UserError: the pair has no draft.
    """
    target, draft_s, gate_s = time_passes(pair, context, tokens, repeats)
    one, several = target[1], target[tokens]
    token = max(0.0, (several - one) / (tokens - 1) / one)
    return CostRatio((draft_s - gate_s) / one, gate_s / one, token)


# --- the best parameters ---------------------------------------------------------------------------------------------
FAMILIES: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "gamma": ("speculative(gamma={:.0f})", (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)),
    "h": ("svip(h={:g})", (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)),
    "lambda": ("stop=adaedl(threshold={:g})", (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)),
    "tau": ("sprinter(tau={:g})", (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)),
    "tau, tail 4": ("sprinter(tau={:g}, tail=4)", (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)),
    "T": ("fuzzy(threshold={:g})", (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)),
}
"""Dials: spec with a placeholder for the value, and the values tried (draft length, SVIP's h, AdaEDL's λ, the gate's τ,
the fuzzy threshold)."""


def dials(
    recording: Recording, families: Mapping[str, tuple[str, Iterable[float]]] = FAMILIES
) -> dict[str, list[Method]]:
    """Methods of each dial, one per value; dials that need unrecorded signals are left out."""
    found = {
        name: [parse_method(spec.format(value)) for value in values]
        for name, (spec, values) in families.items()
    }
    return {
        name: methods
        for name, methods in found.items()
        if not any(unrecorded(recording, one) for one in methods)
    }


def best(
    recordings: Sequence[Recording],
    cost: CostRatio,
    *,
    max_drift: float = 0.1,
    families: Mapping[str, tuple[str, Iterable[float]]] = FAMILIES,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Prediction | None]:
    """The fastest value of each dial whose predicted drift is at most ``max_drift``; None if there is none.

    Dials that need unrecorded signals (a gate's score) are left out. ``progress`` is called with the name of each
    method of ``dials`` when it has been tried.
    """
    if not 0.0 <= max_drift <= 1.0:
        raise UserError(f"max_drift={max_drift} is out of range: give a number in [0, 1]")
    found: dict[str, Prediction | None] = {}
    for name, methods in dials(recordings[0], families).items():
        tried = []
        for method in methods:
            tried.append(predict(recordings, method, cost=cost, seed=seed))
            if progress is not None:
                progress(method.name)
        fit = [one for one in tried if one.mean_drift <= max_drift]
        found[name] = max(fit, key=lambda one: one.speed_up or 0.0, default=None)
    return found
