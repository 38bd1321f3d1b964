"""Rejections against drift: Theorem 5's front and every method, from recorded laws.

At a single position a rule that sees q(x) and p(x) rejects with P(reject) and emits a law at a distance TV(π, p) from
the target's. By Theorem 5 no such rule with one draft is below the line from (0, TV) to (TV, 0), where TV is the mean
TV(p, q). In the loop, with drafts to the horizon, target calls per token equal rejections per token, so the same line
bounds target calls per token; drafts of γ tokens stay above 1/(γ + 1).

The line does not bound several drafts (Theorem 3), and does not show the gain of a prefix-only gate. A gate trusts or
checks a position without seeing x or p. Counted by rejections it is *on* the line, because its check is exact, but it
saves target checks, not rejections. So gates are plotted by the share of positions that they check: there the coin is
the straight line from (0, TV) to (1, 0), and the best prefix-only gate trusts the positions with the least TV(p, q).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule, Asd
from sprinter.decode.draft import Control
from sprinter.decode.spec import parse_method
from sprinter.decode.threshold import reaches
from sprinter.laws import one_hot, overlap, tv_distance
from sprinter.theory.front import rejection
from sprinter.theory.predict import predict
from sprinter.theory.recording import Recording
from sprinter.theory.replay import unrecorded

__all__ = ["LOOP", "RULES", "gate_curve", "oracle_curve", "pareto", "rule_point"]

_CHUNK = 256  # positions per chunk

_SLACKS = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3)
RULES: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "opt": ("opt(epsilon={:g})", _SLACKS), "mentored": ("mentored(kl={:g})", (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)),
    "lenient": ("lenient(w={:g})", (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)), "uno": ("uno(epsilon={:g})", _SLACKS),
    "fuzzy": ("fuzzy(threshold={:g})", (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.0)),
    "random": ("random(rate={:g})", (0.0, 0.25, 0.5, 0.75, 1.0)),
    "typical": ("typical(epsilon={:g})", (0.001, 0.003, 0.01, 0.03, 0.09)),
    "bild": ("bild(rollback={:g})", (2.0, 3.0, 5.0, 7.0)),
    "cascade": ("cascade(alpha={:g})", (0.0, 0.25, 0.5, 0.75, 1.0)),
    "threshold": ("threshold(total={:g})", (1.0, 0.8, 0.6, 0.4, 0.2)),
    "diversed": ("diversed(scale={:g})", (0.0, 0.25, 0.5, 0.75, 1.0)),
    "asd": ("asd(share={:g})", (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)),
    "relaxed": ("relaxed(delta={:g})", (0.0, 0.05, 0.2, 0.6)), "margin": ("margin(theta={:g})", (1.0, 0.95, 0.9, 0.8)),
}  # fmt: skip
"""Accept rules: spec with a place for the dial, values shown. At T = 1 or a tiny ε a curve ends where all is kept.

``diversed`` weighs by Σ min(p, q) in place of a trained head; any weight puts it on the front. ``asd`` judges a draft
of one token at the beginning of a text.
"""

_TAUS = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
LOOP: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "speculative": ("speculative(gamma={:.0f})", (1, 2, 3, 5, 8, 12)), "block": ("block(gamma={:.0f})", (2, 5, 8)),
    "svip": ("svip(h={:g})", (0.3, 0.6, 0.9)), "heuristic": ("heuristic(start={:.0f})", (5,)),
    "confidence": ("confidence(c={:g})", (0.1, 0.4)), "adaedl": ("stop=adaedl(threshold={:g})", (0.1, 0.5)),
    "calibrated": ("calibrated(rate={:g})", (0.3, 0.6)), "optimal": ("optimal(step={:g})", (0.1, 0.4)),
    "specdec++": ("specdec++(h={:g})", (0.7,)), "disco": ("disco(threshold={:g})", (0.5,)),
    "batch": ("batch(drafts={:.0f})", (2, 4)), "specinfer": ("specinfer(drafts={:.0f})", (2, 4)),
    "spectr": ("spectr(drafts={:.0f})", (2, 4)), "lookup": ("lookup(gamma={:.0f})", (5,)),
    "opt": ("opt(epsilon={:g})", (0.001, 0.005, 0.02)), "mentored": ("mentored(kl={:g})", (0.05, 0.2)),
    "lenient": ("lenient(w={:g})", (0.8, 0.5)), "uno": ("uno(epsilon={:g})", (0.001, 0.005, 0.02)),
    "fuzzy": ("fuzzy(threshold={:g})", (0.1, 0.2, 0.3)), "random": ("random(rate={:g})", (0.25, 0.5, 0.75)),
    "typical": ("typical(epsilon={:g})", (0.09,)), "bild": ("bild(rollback={:g})", (5.0,)),
    "cascade": ("cascade(alpha={:g})", (0.2, 0.5, 0.8)), "threshold": ("threshold(total={:g})", (0.9, 0.6, 0.3)),
    "relaxed": ("relaxed(delta={:g})", (0.05, 0.6)), "margin": ("margin(theta={:g})", (0.95, 0.9)),
    "autoregressive": ("autoregressive", (0,)), "draft-only": ("draft-only", (0,)),
    "allocation": ("allocation(share={:g})", (0.5,)), "coin": ("coin(rate={:g})", (0.3, 0.6, 0.8, 0.9)),
    "sprinter": ("sprinter(tau={:g})", _TAUS), "sprinter, tail 4": ("sprinter(tau={:g}, tail=4)", _TAUS),
}  # fmt: skip
"""Methods of the registry in the loop: spec with a place for the value, and the values shown.

``diversed`` reads states that no recording holds, and ``asd`` judges whole chains: a replay gives neither a drift.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """x: rejection probability, share of positions checked, or target calls per token; y: mean TV(π, p)."""

    value: float
    x: float
    y: float
    spec: str = ""

    def to_dict(self, tv: float) -> dict[str, Any]:
        """As JSON values, with the distance to the line x + y = tv measured along either axis."""
        shown = {"value": self.value, "x": self.x, "y": self.y, "above_front": self.x + self.y - tv}
        return shown | ({"spec": self.spec} if self.spec else {})


class OneToken(AcceptRule):
    """ASD on a draft of one token, with the whole account of its text left: then it has a b and an r."""

    needs_raw: ClassVar[bool] = True

    def __init__(self, rule: Asd) -> None:
        self._rule = rule

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """1 for the target's first choice, and for tokens of so small a regret that one may stay; else 0."""
        laws = p if control is None else control.p
        regret = laws.amax(-1, keepdim=True).log() - laws.log()
        stays = (regret <= min(self._rule.share, self._rule.total)) & regret.isfinite()
        if self._rule.lossless_greedy:
            stays = torch.zeros_like(stays)
        return (stays | one_hot(p).bool()).to(p)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """The target's first choice."""
        return one_hot(p)


def rule_point(recording: Recording, rule: AcceptRule, value: float) -> Point:
    """Mean rejection probability and mean drift of a rule over the recorded positions."""
    reject = drift = 0.0
    for rows in _rows(recording):
        p, q = _exact(recording.p[rows]), _exact(recording.q[rows])
        raw = None
        if rule.needs_raw or rule.needs:
            heads = dict.fromkeys(rule.needs, overlap(p, q))
            raw = Control(_exact(recording.raw_p[rows]), _exact(recording.raw_q[rows]), heads)
        reject += float(rejection(q, rule.keep(p, q, raw)).sum())
        drift += float(rule.drift(p, q, raw).sum())
    return Point(value, reject / len(recording.tokens), drift / len(recording.tokens))


def gate_curve(scores: Tensor, tv: Tensor, thresholds: Sequence[float]) -> list[Point]:
    """Trust positions whose score reaches τ: share checked against drift. ``scores`` and ``tv`` are ``[N]``."""
    trusted = [(tau, reaches(scores, tau)) for tau in thresholds]
    return [Point(tau, 1 - float(t.double().mean()), float((tv * t).mean())) for tau, t in trusted]


def oracle_curve(tv: Tensor, points: int = 41) -> list[Point]:
    """The best prefix-only gate: trust the positions with the least TV(p, q). ``tv`` is ``[N]``."""
    ranked = torch.cat([torch.zeros(1, dtype=tv.dtype), tv.sort().values.cumsum(0)]) / len(tv)
    at = torch.linspace(0, len(tv), points).long()
    return [Point(float(n) / len(tv), 1 - float(n) / len(tv), float(ranked[n])) for n in at]


def pareto(
    recordings: Sequence[Recording],
    *,
    loop: Mapping[str, tuple[str, Sequence[float]]] = LOOP,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Data of both plots, at one position and in the loop, as JSON values.

    Single positions are those of the target's text; methods are replayed on a mixture of texts as in ``predict``.

    Args:
        recordings: as for ``predict``.
        loop: methods to replay; those that need unrecorded signals are left out.
        seed: seed of the replays.
        progress: called with the name of each rule or method that is done.
    """
    say = progress or (lambda name: None)
    target = next(one for one in recordings if one.writer == "target")
    tv = _distances(target)
    mean = float(tv.mean())
    rules = []
    for name, (spec, values) in RULES.items():
        accepts: list[tuple[float, Any]] = [
            (value, parse_method(f"accept={spec.format(value)}").accept) for value in values
        ]
        accepts = [(value, OneToken(rule) if isinstance(rule, Asd) else rule) for value, rule in accepts]
        points = [rule_point(target, accept, value).to_dict(mean) for value, accept in accepts]
        rules.append({"name": name, "dial": spec.partition("(")[2].partition("=")[0], "points": points})
        say(name)
    curves = {
        ("coin", "rate"): [Point(rate, 1 - rate, rate * mean) for rate in (0.0, 0.5, 1.0)],
        ("best prefix-only gate", "share"): oracle_curve(tv),
    }
    if "gate" in target.signals:
        taus = torch.quantile(target.signals["gate"], torch.linspace(0, 1, 21, dtype=torch.float64)).tolist()
        curves["sprinter", "tau"] = gate_curve(target.signals["gate"], tv, [0.0, *taus, 1.0])
    gates = [
        {"name": name, "dial": dial, "points": [point.to_dict(mean) for point in points]}
        for (name, dial), points in curves.items()
    ]
    return {
        "front": {"tv": mean, "points": [[0.0, mean], [mean, 0.0]]},
        "positions": len(target.tokens),
        "texts": len(target.lengths),
        "rules": rules,
        "gates": gates,
        "loop": _in_the_loop(recordings, loop, seed, say),
    }


def _rows(recording: Recording) -> list[slice]:
    """Slices of all positions, one per chunk."""
    return [slice(first, first + _CHUNK) for first in range(0, len(recording.tokens), _CHUNK)]


def _distances(recording: Recording) -> Tensor:
    """TV(p, q) of every position, ``[N]``."""
    rows = _rows(recording)
    return torch.cat([tv_distance(_exact(recording.p[at]), _exact(recording.q[at])) for at in rows])


def _exact(law: Tensor) -> Tensor:
    """A recorded law in float64, normalised again because it was stored with rounding."""
    law = law.double()
    return law / law.sum(-1, keepdim=True)


def _in_the_loop(
    recordings: Sequence[Recording],
    loop: Mapping[str, tuple[str, Sequence[float]]],
    seed: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    distance = {one.writer: float(_distances(one).mean()) for one in recordings}
    curves = []
    for name, (spec, values) in loop.items():
        if unrecorded(recordings[0], parse_method(spec.format(values[0]))):
            continue
        points = []
        for value in values:
            found = predict(recordings, spec.format(value), seed=seed)
            # the front for the mixture of texts that stands for the method's own
            tv = found.weight * distance["target"] + (1 - found.weight) * distance.get("draft", 0.0)
            points.append(Point(value, found.calls, found.mean_drift, spec.format(value)).to_dict(tv))
            say(spec.format(value))
        exact = all(parse_method(spec.format(value)).lossless() for value in values)
        curves.append({"name": name, "lossless": exact, "points": points})
    return curves
