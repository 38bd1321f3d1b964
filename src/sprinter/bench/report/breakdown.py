"""Breakdowns of a run: speed along a text and by category, from its rows; methods with a dial (arms that differ in one
parameter), and the baseline of assigning texts to a model at random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from sprinter.bench.quality.metrics import METRICS
from sprinter.bench.report.arm_style import ArmStyle
from sprinter.bench.report.digest import Digest, SuiteView, Summary
from sprinter.bench.report.numbers import value
from sprinter.bench.statistics import Array, BootstrapInterval, ratio_of_ratios
from sprinter.bench.summary import Group, groups

__all__ = [
    "LONG", "Dial", "LongForm", "allocation_line", "categories", "dials", "ends", "longforms", "quality_of",
]  # fmt: skip

LONG = 64
"""Minimum number of new tokens for a curve along a text."""
_BINS = 8
_WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class LongForm:
    """Speed along texts.

    Attributes:
        edges: edges of the bins, as positions in the context.
        tokens_per_s: speed of each arm in each bin; None: no answer reached it.
        speed_up: speed relative to the base in each bin, with interval, over prompts where both reached it; empty
            without a base.
    """

    edges: Sequence[int]
    tokens_per_s: Mapping[str, Sequence[float | None]]
    speed_up: Mapping[str, Sequence[BootstrapInterval | None]]


def longforms(run: Digest) -> dict[SuiteView, LongForm]:
    """A curve for each suite and temperature with texts of at least ``LONG`` new tokens and known arrival times."""
    rows = run.results.get("rows") or []
    whole = [row for row in rows if any(len(times) >= LONG for times in row.get("arrivals_ms") or [])]
    long = {(row["suite"], row["temperature"]) for row in whole}
    found = groups([row for row in rows if (row["suite"], row["temperature"]) in long])
    views: dict[SuiteView, dict[str, Group]] = {}
    for (arm, suite, temperature), group in found.items():
        if (suite, temperature) in long:
            views.setdefault((suite, temperature), {})[arm] = group
    return {view: _longform(parts, run.base) for view, parts in views.items()}


def _longform(parts: Mapping[str, Group], base: str | None) -> LongForm:
    rows = [row for group in parts.values() for row in group.rows]
    most = max((first + len(times) for row in rows for first, times in _turns(row)), default=0)
    width = next((width for width in _WIDTHS if width * _BINS >= most), _WIDTHS[-1])
    edges = list(range(0, most + width, width))
    binned = {arm: _binned(group, edges) for arm, group in parts.items()}
    speeds: dict[str, list[float | None]] = {}
    ups: dict[str, list[BootstrapInterval | None]] = {}
    for arm, (tokens, seconds) in binned.items():
        whole = zip(tokens.sum(0), seconds.sum(0), strict=True)
        speeds[arm] = [float(n / s) if s > 0 else None for n, s in whole]
        if base in binned and binned[base][0].shape == tokens.shape:
            ups[arm] = [_up((tokens, seconds), binned[base], i) for i in range(len(edges) - 1)]
    return LongForm(edges, speeds, ups)


def _turns(row: Mapping[str, Any]) -> Iterator[tuple[int, Sequence[float]]]:
    """(tokens before the answer, arrivals in ms) of each turn."""
    yield from zip(row.get("prompt_tokens") or [], row.get("arrivals_ms") or [], strict=False)


def _binned(group: Group, edges: Sequence[int]) -> tuple[Array, Array]:
    """Tokens and seconds, ``[prompts, bins]``, without each text's first token, whose time includes prefill."""
    prompts = {prompt: i for i, prompt in enumerate(sorted(group.prompts))}
    tokens = np.zeros((len(prompts), len(edges) - 1))
    seconds = np.zeros_like(tokens)
    for row in group.rows:
        i = prompts[row["suite"], row["question_id"]]
        for first, times in _turns(row):
            at = first + np.arange(1, len(times))
            tokens[i] += np.histogram(at, edges)[0]
            seconds[i] += np.histogram(at, edges, weights=np.diff(times) / 1000)[0]
    return tokens, seconds


def _up(arm: tuple[Array, Array], base: tuple[Array, Array], i: int) -> BootstrapInterval | None:
    (tokens, seconds), (base_tokens, base_seconds) = arm, base
    both = (tokens[:, i] > 0) & (base_tokens[:, i] > 0) & (seconds[:, i] > 0)
    if not both.any():
        return None
    own, other = (tokens[both, i], seconds[both, i]), (base_tokens[both, i], base_seconds[both, i])
    return ratio_of_ratios(own, other)


def categories(run: Digest) -> dict[SuiteView, dict[str, dict[str, BootstrapInterval]]]:
    """Speed-up relative to the base by arm and category, for each suite with several categories."""
    rows = run.results.get("rows") or []
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(row["suite"], []).append(row["category"])
    several = {suite: [*dict.fromkeys(names)] for suite, names in kinds.items() if len({*names}) > 1}
    found = groups([row for row in rows if row["suite"] in several])
    views: dict[SuiteView, dict[str, dict[str, BootstrapInterval]]] = {}
    for (arm, suite, temperature), group in found.items():
        other = found.get((run.base or "", suite, temperature))
        if suite in several and other is not None and other.prompts == group.prompts:
            by_name = {name: _category(group, other, name) for name in several[suite]}
            views.setdefault((suite, temperature), {})[arm] = by_name
    return views


def _category(group: Group, base: Group, name: str) -> BootstrapInterval:
    prompts = sorted({(row["suite"], row["question_id"]) for row in group.rows if row["category"] == name})
    return ratio_of_ratios(group.restrict(prompts).speed, base.restrict(prompts).speed)


# --- dials -----------------------------------------------------------------------------------------------------------
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
    curves: dict[str, dict[float, Summary]] = {}
    for summary in summaries:
        spec = specs[summary["arm"]]
        others = [f"{k}={v}" for k, v in spec.items() if k != dial and len(values[k]) > 1]
        curves.setdefault(" ".join([method, *others]), {})[_float(spec[dial]) or 0.0] = summary
    return [
        Dial(
            name,
            dial,
            run.styles[next(iter(points.values()))["arm"]],
            sorted(points.items(), key=itemgetter(0)),
        )
        for name, points in curves.items()
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
    speeds = [1 / ((1 - s) / target[0] + s / draft[0]) for s in shares]
    return [(speed, (1 - s) * target[1] + s * draft[1]) for s, speed in zip(shares, speeds, strict=True)]


def ends(run: Digest, summaries: Sequence[Summary]) -> tuple[Summary, Summary] | None:
    """The target alone and the draft alone, if both took part."""
    methods = {run.styles[summary["arm"]].method: summary for summary in summaries}
    both = [methods[name] for name in ("autoregressive", "draft-only") if name in methods]
    return (both[0], both[1]) if sum(bool(value(each.get("tokens_per_s"))) for each in both) == 2 else None


def quality_of(summaries: Sequence[Summary]) -> tuple[str, str] | None:
    """(name, axis label) of the quality measure in a dial's figure, preferably the share of right answers."""
    found = (item for s in summaries for item in (s.get("quality") or {}).items())
    measured = {name for name, of in found if value(of) is not None}
    name = next((name for name in _QUALITIES if name in measured), None)
    return None if name is None else (name, f"{name.replace('_', ' ')}: {METRICS[name].meaning}")
