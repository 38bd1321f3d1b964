"""Methods with a dial (arms that differ in one parameter), and the baseline of assigning texts to a model at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sprinter.bench.quality.metrics import METRICS
from sprinter.bench.report.arm_style import ArmStyle
from sprinter.bench.report.digest import Digest, Summary
from sprinter.bench.report.numbers import value

__all__ = ["Dial", "allocation_line", "dials", "ends", "quality_of"]


_QUALITIES = ("exact_match", "pass_at_1", "log_likelihood_per_token", "win_tie", "rougeL")


@dataclass(frozen=True, slots=True)
class Dial:
    """One method's curve.

    Attributes:
        name: name of the method with its fixed parameters.
        parameter: parameter that varies.
        style: style of its arms.
        points: (value of the parameter, summary), ordered by value.
    """

    name: str
    parameter: str
    style: ArmStyle
    points: Sequence[tuple[float, Summary]]


def dials(run: Digest, summaries: Sequence[Summary]) -> list[Dial]:
    """Each lossy method with at least two values of its dial among the summaries."""
    by_method: dict[str, list[Summary]] = {}
    for summary in summaries:
        style = run.styles[summary["arm"]]
        if style.parameters and summary.get("lossless") is not True:
            by_method.setdefault(style.method, []).append(summary)
    return [dial for method, group in by_method.items() for dial in _dials(run, method, group)]


def _dials(run: Digest, method: str, summaries: Sequence[Summary]) -> list[Dial]:
    specs = {summary["arm"]: run.styles[summary["arm"]].parameters for summary in summaries}
    values = {key: {spec.get(key) for spec in specs.values()} for key in specs[summaries[0]["arm"]]}
    numeric = [key for key, found in values.items() if all(_float(each) is not None for each in found)]
    if not numeric:
        return []
    dial = max(numeric, key=lambda key: len(values[key]))
    curves: dict[tuple[str, ...], dict[float, Summary]] = {}
    for summary in summaries:
        spec = specs[summary["arm"]]
        others = tuple(f"{k}={v}" for k, v in spec.items() if k != dial and len(values[k]) > 1)
        curves.setdefault(others, {})[_float(spec[dial]) or 0.0] = summary
    return [
        Dial(
            " ".join([method, *others]),
            dial,
            run.styles[next(iter(points.values()))["arm"]],
            sorted(points.items(), key=lambda item: item[0]),
        )
        for others, points in curves.items()
        if len(points) > 1
    ]


def _float(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def allocation_line(
    target: tuple[float, float], draft: tuple[float, float], steps: int = 24
) -> list[tuple[float, float]]:
    """(speed, y) for a growing share of texts written by the draft alone.

    Fuzzy Speculative Decoding, section 5.3, draws a straight line. This curve is exact: times add up, speeds do not.

    Args:
        target, draft: (speed, y) of each alone; y (drift, or a quality) is a mean over tokens.
    """
    shares = [i / steps for i in range(steps + 1)]
    return [
        (1 / ((1 - s) / target[0] + s / draft[0]), (1 - s) * target[1] + s * draft[1])
        for s in shares
    ]  # fmt: skip


def ends(run: Digest, summaries: Sequence[Summary]) -> tuple[Summary, Summary] | None:
    """The target alone and the draft alone, if both took part."""
    methods = {run.styles[summary["arm"]].method: summary for summary in summaries}
    both = methods.get("autoregressive"), methods.get("draft-only")
    if (
        both[0] is None
        or both[1] is None
        or not all(value(each.get("tokens_per_s")) for each in both if each)
    ):
        return None
    return both[0], both[1]


def quality_of(summaries: Sequence[Summary]) -> tuple[str, str] | None:
    """(name, axis label) of the quality measure in a dial's figure, preferably the share of right answers."""
    measured = {
        name for s in summaries for name, of in (s.get("quality") or {}).items() if value(of) is not None
    }
    name = next((name for name in _QUALITIES if name in measured), None)
    return None if name is None else (name, f"{name.replace('_', ' ')}: {METRICS[name].meaning}")
