"""Breakdowns computed from the rows: speed along a text, and speed by category."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sprinter.bench.report.digest import Digest, View
from sprinter.bench.statistics import Array, BootstrapInterval, ratio_of_ratios
from sprinter.bench.summary import Group, groups

__all__ = ["LONG", "LongForm", "categories", "longforms"]

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


def longforms(run: Digest) -> dict[View, LongForm]:
    """A curve for each suite and temperature with texts of at least ``LONG`` new tokens and known arrival times."""
    rows = run.results.get("rows") or []
    long = {
        (row["suite"], row["temperature"])
        for row in rows
        if any(len(times) >= LONG for times in row.get("arrivals_ms") or [])
    }
    found = groups([row for row in rows if (row["suite"], row["temperature"]) in long])
    views: dict[View, dict[str, Group]] = {}
    for (arm, suite, temperature), group in found.items():
        if (suite, temperature) in long:
            views.setdefault((suite, temperature), {})[arm] = group
    return {view: _longform(parts, run.base) for view, parts in views.items()}


def _longform(parts: Mapping[str, Group], base: str | None) -> LongForm:
    most = max(
        (
            first + len(times)
            for group in parts.values()
            for row in group.rows
            for first, times in _turns(row)
        ),
        default=0,
    )
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


def categories(run: Digest) -> dict[View, dict[str, dict[str, BootstrapInterval]]]:
    """Speed-up relative to the base by arm and category, for each suite with several categories."""
    rows = run.results.get("rows") or []
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(row["suite"], []).append(row["category"])
    several = {suite: [*dict.fromkeys(names)] for suite, names in kinds.items() if len({*names}) > 1}
    found = groups([row for row in rows if row["suite"] in several])
    views: dict[View, dict[str, dict[str, BootstrapInterval]]] = {}
    for (arm, suite, temperature), group in found.items():
        other = found.get((run.base or "", suite, temperature))
        if suite in several and other is not None and other.prompts == group.prompts:
            by_name = {name: _category(group, other, name) for name in several[suite]}
            views.setdefault((suite, temperature), {})[arm] = by_name
    return views


def _category(group: Group, base: Group, name: str) -> BootstrapInterval:
    prompts = sorted({(row["suite"], row["question_id"]) for row in group.rows if row["category"] == name})
    return ratio_of_ratios(group.restrict(prompts).speed, base.restrict(prompts).speed)
