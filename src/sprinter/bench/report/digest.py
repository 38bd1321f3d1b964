"""Data for the tables and figures of a run: arms, suites and temperatures, speeds and drifts, the front."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sprinter.bench.report.arm_style import ArmStyle, arm_styles
from sprinter.bench.report.numbers import interval, value
from sprinter.bench.statistics import BootstrapInterval
from sprinter.bench.summary import ALL

__all__ = ["Digest", "SuiteView", "Summary", "digest", "drift_of", "front", "plane_points", "speed_of"]

Summary = Mapping[str, Any]
SuiteView = tuple[str, float]
"""Suite and temperature."""


@dataclass(frozen=True)
class Digest:
    """A results file, indexed for the report.

    Attributes:
        results: content of the file.
        arms: arms in order, including those that only a summary names.
        styles: style of each arm.
        failed: error of each arm that failed.
        suites: names of the suites, "all" first if present.
        temperatures: temperatures in order.
        bases: arms that speeds are reported relative to, in the run's order; may be empty.
        views: summaries of each suite and temperature, in the order of the arms.
    """

    results: Mapping[str, Any]
    arms: Sequence[Mapping[str, Any]]
    styles: Mapping[str, ArmStyle]
    failed: Mapping[str, str]
    suites: Sequence[str]
    temperatures: Sequence[float]
    bases: Sequence[str]
    views: Mapping[SuiteView, Sequence[Summary]]

    @property
    def base(self) -> str | None:
        """The first base."""
        return self.bases[0] if self.bases else None


def digest(results: Mapping[str, Any]) -> Digest:
    """Index a results file."""
    summaries: list[Summary] = list(results.get("summary") or [])
    arms = list(results.get("arms") or [])
    known = {arm["name"] for arm in arms}
    arms += [
        {"name": name, "spec": name, "engine": engine, "status": "ok"}
        for name, engine in {s["arm"]: s.get("engine") for s in summaries}.items()
        if name not in known
    ]
    order = {arm["name"]: i for i, arm in enumerate(arms)}
    views: dict[SuiteView, list[Summary]] = {}
    for summary in sorted(summaries, key=lambda s: order[s["arm"]]):
        views.setdefault((summary["suite"], float(summary["temperature"])), []).append(summary)
    suites = [str(suite["name"]) for suite in results.get("suites") or []]
    shown = _once([*suites, *(suite for suite, _ in views)])
    there = {suite for suite, _ in views}
    return Digest(
        results,
        arms,
        arm_styles(arms, {s["arm"]: s.get("lossless") for s in reversed(summaries)}),
        {arm["name"]: str(arm.get("error") or "no reason given") for arm in arms if arm.get("status") == "failed"},
        [suite for suite in _once([ALL, *shown]) if suite in there],
        sorted({temperature for _, temperature in views}),
        _bases(results, summaries),
        views,
    )  # fmt: skip


def _bases(results: Mapping[str, Any], summaries: Sequence[Summary]) -> list[str]:
    used = _once(base for summary in summaries for base in summary.get("speed_over") or {})
    wanted = (results.get("settings") or {}).get("bases") or []
    return [base for base in _once([*wanted, *used]) if base in used]


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def speed_of(summary: Summary, base: str | None) -> BootstrapInterval | None:
    """Speed relative to a base arm; without one, tokens/s."""
    if base is None:
        return interval(summary.get("tokens_per_s"))
    return interval((summary.get("speed_over") or {}).get(base))


def drift_of(summary: Summary) -> BootstrapInterval | None:
    """Mean TV(π, p); 0 where the arm's texts follow the target's law; None: not known."""
    if summary.get("lossless") is True:
        return 0.0, 0.0, 0.0
    return interval(summary.get("mean_drift"))


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names of the Pareto-optimal points (speed, drift), slowest first."""
    best: list[str] = []
    for name, (_, drift) in sorted(points.items(), key=lambda item: (-item[1][0], item[1][1])):
        if not best or drift < points[best[-1]][1]:
            best.append(name)
    return best[::-1]


def plane_points(summaries: Sequence[Summary], base: str | None) -> dict[str, tuple[float, float]]:
    """(speed, drift) of the arms for which both are known."""
    both = {s["arm"]: (value(speed_of(s, base)), value(drift_of(s))) for s in summaries}
    return {arm: (x, y) for arm, (x, y) in both.items() if x is not None and y is not None}
