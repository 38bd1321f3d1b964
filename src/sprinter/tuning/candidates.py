"""The methods that the tuner tries: trust × stop × accept × drafter, each setting once.

Lossy candidates carry a budget on drift. It has the place of the threshold of a trust rule that has one, so these are
tried by signal and tail alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from sprinter.decode.spec import parse_method, split_spec
from sprinter.theory.recording import Recording
from sprinter.theory.replay import unrecorded

__all__ = ["PLAIN", "Candidate", "candidates", "family"]

PLAIN = "autoregressive"
"""Plain decoding, which speeds are relative to."""
_STOPS = (
    "fixed(gamma=3)", "fixed(gamma=5)", "fixed(gamma=8)", "svip(h=0.3)", "svip(h=0.6)", "confidence(c=0.4)",
)  # fmt: skip
_ACCEPTS = (
    "fuzzy(threshold=0.3)", "opt(epsilon=0.01)", "lenient(w=0.5)", "cascade(alpha=0.5)", "mentored(kl=0.1)",
)  # fmt: skip
_SIGNALS = ("entropy", "margin", "max_prob")
_TAILS = (0, 2, 4)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method to try.

    Attributes:
        spec: the method. level: the budget on drift that it carries; None: it is lossless.
    """

    spec: str
    level: float | None = None


def candidates(
    recording: Recording, optimal: str, levels: Sequence[float], auto: str = ""
) -> list[Candidate]:
    """All candidates for a pair; exact ones and those of each level in turn, often good ones first.

    Args:
        recording: of the pair; methods that need an unrecorded signal are left out.
        optimal: the method ``optimal`` with the pair's costs.
        levels: budgets on drift of the lossy ones.
        auto: parameters of ``auto`` with the pair's costs; "": it is not tried.
    """
    own = [f"auto({auto})"] if auto else []
    classes = [[Candidate(spec) for spec in [PLAIN, *own, *_exact(optimal)]]]
    for level in levels:
        within = [Candidate(f"auto(budget={level}, {auto})", level)] if auto else []
        classes.append([*within, *(Candidate(f"{spec},budget={level}", level) for spec in _lossy())])
    found = [one for row in zip_longest(*classes) for one in row if one is not None]
    return [one for one in found if not unrecorded(recording, parse_method(one.spec).settle(recording.taus))]


def family(spec: str) -> str:
    """What neighbouring settings share: a preset's name, or the names of the rules."""
    parts = [part.partition("=") for part in split_spec(spec)]
    rules = [rule for key, sign, rule in parts if sign and "(" not in key and key not in ("budget", "cap")]
    return "+".join(sorted(rule.partition("(")[0] for rule in rules)) or spec.partition("(")[0]


def _exact(optimal: str) -> Iterable[str]:
    yield from (f"speculative(gamma={gamma})" for gamma in (3, 5, 2, 4, 8, 6, 7, 1))
    yield from (f"svip(h={h:g})" for h in (0.3, 0.5, 0.2, 0.8))
    yield from (f"hybrid(copies={copies})" for copies in (11, 6))
    yield optimal
    yield from (f"block(gamma={gamma})" for gamma in (3, 5, 8, 4))
    yield "adaedl"
    yield from (f"confidence(c={c:g})" for c in (0.4, 0.2, 0.6))
    yield from (f"calibrated(rate={rate:g})" for rate in (0.4, 0.2, 0.6))
    yield from (f"lookup(n={n}, gamma={gamma})" for n, gamma in ((3, 5), (2, 5), (3, 10)))
    yield "heuristic(start=5)"
    yield from (f"stop=svip(h={h:g}),accept=block" for h in (0.3, 0.6))
    yield "stop=confidence(c=0.4),accept=block"


def _lossy() -> Iterable[str]:
    """Composed specs, to which a budget is added."""
    for signal in _SIGNALS:
        yield from (f"trust=certain(signal={signal}),stop=untrusted(tail={tail}),cap=20" for tail in _TAILS)
    yield from (f"trust=gate,stop=untrusted(tail={tail}),cap=20" for tail in _TAILS)
    yield from (f"trust=online,stop=untrusted(tail={tail}),cap=20" for tail in _TAILS)
    for accept in _ACCEPTS:
        yield from (f"stop={stop},accept={accept}" for stop in _STOPS)
    for accept in ("fuzzy(threshold=0.3)", "lenient(w=0.5)"):
        yield f"drafter=lookup(n=3,least=2),stop=fixed(gamma=5),accept={accept}"
