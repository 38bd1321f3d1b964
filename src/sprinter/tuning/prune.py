"""Speed and drift of every candidate by replay, and which of them go on to the race."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sprinter.decode.costs import PassCosts
from sprinter.decode.spec import parse_method
from sprinter.theory.recording import Recording
from sprinter.theory.replay import replay
from sprinter.tuning.candidates import PLAIN, Candidate, family

__all__ = ["Predicted", "faster_half", "prune", "replay_all"]

_OF_A_FAMILY = 3  # neighbouring settings of a class that go on
_LEAST = 12  # candidates that are replayed even if there is no time left
_SLACK = 1.1  # of a budget: a replay has drawn other numbers than the live texts will


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a replay expects of a candidate.

    Attributes:
        spec, level: the candidate's.
        speed_up: relative to plain decoding, from the costs of forward passes alone.
        drift: mean TV(π, p) a token. kl: KL(p‖π) a token in nats; None: unknown or infinite.
    """

    spec: str
    level: float | None
    speed_up: float
    drift: float
    kl: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def replay_all(
    recording: Recording,
    costs: PassCosts,
    tried: Sequence[Candidate],
    *,
    seed: int,
    until: float = math.inf,
    progress: Callable[[int, int], None] = lambda done, wanted: None,
) -> list[Predicted]:
    """Replay candidates in order, until the clock shows ``until`` (``time.monotonic``); the first few always.

    Those whose rule has no drift of single positions are left out, as no budget could be checked beforehand.
    """
    found: list[Predicted] = []
    for done, one in enumerate(tried):
        if done >= _LEAST and time.monotonic() >= until:
            break
        run = replay(recording, parse_method(one.spec), seed=seed)
        if math.isfinite(run.mean_drift):
            kl = run.mean_kl if math.isfinite(run.mean_kl) else None
            found.append(Predicted(one.spec, one.level, run.speed_up(costs), run.mean_drift, kl))
        progress(done + 1, len(tried))
    return found


def faster_half(predicted: Sequence[Predicted]) -> list[Candidate]:
    """The faster half of each class, with plain decoding, in their order."""
    found: list[Candidate] = []
    for level in dict.fromkeys(one.level for one in predicted):
        kin = sorted((one for one in predicted if one.level == level), key=lambda one: -one.speed_up)
        kept = {one.spec for one in kin[: math.ceil(len(kin) / 2)]} | {PLAIN}
        found += [Candidate(one.spec, level) for one in predicted if one.level == level and one.spec in kept]
    order = [one.spec for one in predicted]
    return sorted(found, key=lambda one: order.index(one.spec))


def prune(predicted: Sequence[Predicted], keep: int, most_kl: float | None = None) -> dict[str, list[str]]:
    """The fastest ``keep`` of each class, at most three of a family, fastest first.

    Args:
        most_kl: maximum KL(p‖π) a token of lossy candidates; None: any.

    Returns:
        Class -> specs. A class is "exact" or a budget on drift, written as a number; plain decoding is in none.
    """
    classes: dict[str, list[str]] = {"exact": []}
    families: dict[tuple[str, str], int] = {}
    for one in sorted(predicted, key=lambda each: -each.speed_up):
        name = "exact" if one.level is None else f"{one.level:g}"
        if one.spec == PLAIN or not _fits(one, most_kl):
            continue
        chosen, kin = classes.setdefault(name, []), (name, family(one.spec))
        if len(chosen) < keep and families.get(kin, 0) < _OF_A_FAMILY:
            chosen.append(one.spec)
            families[kin] = families.get(kin, 0) + 1
    return {name: specs for name, specs in classes.items() if specs}


def _fits(one: Predicted, most_kl: float | None) -> bool:
    if one.level is None:
        return True
    return one.drift <= _SLACK * one.level and (most_kl is None or (one.kl is not None and one.kl <= most_kl))
