"""Data for the tables and figures of a run: arms, suites and temperatures, speeds and drifts, the front."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sprinter.bench.report.arm_style import ArmStyle, arm_styles
from sprinter.bench.report.numbers import interval, value
from sprinter.bench.statistics import BootstrapInterval
from sprinter.bench.summary import ALL

__all__ = ["Digest", "Summary", "View", "digest", "drift_of", "front", "headline", "plane_points", "speed_of"]

Summary = Mapping[str, Any]
View = tuple[str, float]
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
    views: Mapping[View, Sequence[Summary]]

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
    views: dict[View, list[Summary]] = {}
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


def headline(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first table of terminal and page: each arm at each temperature over all suites, fastest first.

    Returns:
        Rows {"arm", "engine", "temperature", "suite", "lossless", "status", "error", "tokens_per_s", "base",
        "speed_up": Interval, "speed_by_suite": {suite: Interval}, "target_calls_per_token": Interval,
        "tokens_per_round": Interval, "mean_drift": Interval, "ttft_ms", "gap_ms": {"p50", "p95"}, "front": bool};
        unknown values are None. ``suite`` is "all", or the only one. ``speed_up`` is relative to ``base``, the first
        base of the run. ``front``: no other arm is both as fast and as close to the target. An arm without an answer
        has one row at temperature None.
    """
    run = digest(results)
    rows = [row for temperature in run.temperatures for row in _headlines(run, temperature)]
    shown = {row["arm"] for row in rows}
    for arm in run.arms:
        if arm["name"] not in shown:
            empty = {
                "arm": arm["name"],
                "engine": arm.get("engine"),
                "suite": run.suites[0] if run.suites else ALL,
            }
            rows.append(_headline(run, empty | {"temperature": None}, {}, set()))
    return rows


def _headlines(run: Digest, temperature: float) -> list[dict[str, Any]]:
    by_suite = {suite: run.views.get((suite, temperature), []) for suite in run.suites}
    first = next((suite for suite, summaries in by_suite.items() if summaries), None)
    if first is None:
        return []
    speeds: dict[str, dict[str, BootstrapInterval | None]] = {}
    shown: dict[str, Summary] = {}
    for suite, summaries in by_suite.items():
        for summary in summaries:
            arm = summary["arm"]
            speeds.setdefault(arm, {})[suite] = speed_of(summary, run.base)
            # An arm without a summary for this suite has only numbers by suite.
            facts = {key: summary.get(key) for key in ("arm", "engine", "temperature", "lossless")}
            shown.setdefault(arm, summary if suite == first else facts | {"suite": first})
    on_front = set(front(plane_points(by_suite[first], run.base)))
    rows = [_headline(run, summary, speeds[arm], on_front) for arm, summary in shown.items()]
    return sorted(rows, key=lambda row: -(value(row["speed_up"]) or value(row["tokens_per_s"]) or 0))


def plane_points(summaries: Sequence[Summary], base: str | None) -> dict[str, tuple[float, float]]:
    """(speed, drift) of the arms for which both are known."""
    both = {s["arm"]: (value(speed_of(s, base)), value(drift_of(s))) for s in summaries}
    return {arm: (x, y) for arm, (x, y) in both.items() if x is not None and y is not None}


def _headline(
    run: Digest, summary: Summary, by_suite: Mapping[str, BootstrapInterval | None], on_front: set[str]
) -> dict[str, Any]:
    arm = summary["arm"]
    return {
        "arm": arm,
        "engine": summary.get("engine"),
        "temperature": summary["temperature"],
        "suite": summary["suite"],
        "lossless": summary.get("lossless"),
        "status": "failed" if arm in run.failed else "ok",
        "error": run.failed.get(arm),
        "tokens_per_s": value(summary.get("tokens_per_s")),
        "base": run.base,
        "speed_up": speed_of(summary, run.base) if run.base else None,
        "speed_by_suite": dict(by_suite),
        "target_calls_per_token": interval(summary.get("target_calls_per_token")),
        "tokens_per_round": interval(summary.get("tokens_per_round")),
        "mean_drift": drift_of(summary),
        "ttft_ms": summary.get("ttft_ms"),
        "gap_ms": summary.get("gap_ms"),
        "front": arm in on_front,
    }
