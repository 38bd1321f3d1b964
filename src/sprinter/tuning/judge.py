"""The finalists of a race as entries of a profile: speeds, drift in every unit, quality, and what is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sprinter.bench.grading import Grading, JudgeSettings
from sprinter.bench.harness import OnBenchProgress
from sprinter.bench.quality.checks import check_answer
from sprinter.bench.quality.measure import QualitySettings
from sprinter.bench.sample import Suite
from sprinter.bench.statistics import BootstrapInterval, ratio_of_ratios, ratio_of_sums
from sprinter.bench.summary import Group
from sprinter.decode.spec import parse_method
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.tuning.candidates import PLAIN
from sprinter.tuning.prune import Predicted
from sprinter.tuning.race import grouped, speed_over
from sprinter.tuning.settings import Goal, TuneSettings

__all__ = ["check_goals", "choose", "front_of", "graded", "settings_of"]


def check_goals(suite: Suite, settings: TuneSettings) -> None:
    """Refuse, before anything is run, a goal of quality that these prompts cannot show.

    Raises:
        UserError: no sample has what the measure needs, or no text can satisfy a check.
    """
    checks = [sample.check for sample in suite.samples if sample.check is not None]
    for check in checks if settings.quality else ():
        check_answer(check)
    kinds = {check.kind for check in checks}
    right = 'right answers (an "answer" that ends in "#### NUMBER", or "check": "text" beside it)'
    needs = {
        "exact_match": (bool(kinds - {"code"}), right),
        "pass_at_1": ("code" in kinds, "tests of programs, as HumanEval has them"),
        "rouge": (any(sample.references for sample in suite.samples), "reference answers"),
    }
    for goal in settings.quality:
        has, what = needs.get("rouge" if goal.metric.startswith("rouge") else goal.metric, (True, ""))
        if not has:
            raise UserError(f"quality {goal} needs {what}, and no prompt of '{suite.name}' has them")


def graded(
    pair: Pair,
    suite: Suite,
    rows: Iterable[Mapping[str, Any]],
    specs: Sequence[str],
    settings: TuneSettings,
    directory: Path,
    progress: OnBenchProgress,
) -> list[dict[str, Any]]:
    """The rows of these specs, each with "quality" if there are goals; measurements are kept in ``directory``."""
    chosen = [dict(row) for row in rows if row["model_id"] in specs]
    if settings.quality:
        rouge = any(goal.metric.startswith("rouge") for goal in settings.quality)
        measures = QualitySettings(rouge=rouge, likelihood=False, run_code=settings.run_code)
        Grading(pair, [suite], measures, JudgeSettings()).grade(chosen, (), directory, progress)
    return chosen


def settings_of(
    rows: Sequence[Mapping[str, Any]],
    classes: Mapping[str, Sequence[str]],
    predicted: Mapping[str, Predicted],
    settings: TuneSettings,
) -> list[dict[str, Any]]:
    """The profile's "settings": plain decoding and the finalists, fastest first.

    Args:
        rows: of ``graded``. classes: finalists of each class. predicted: by spec.
    """
    specs = list(dict.fromkeys([PLAIN, *(spec for specs in classes.values() for spec in specs)]))
    found = grouped(rows, specs)
    ran = [spec for spec in specs if spec in found and found[spec].answered]
    ran = [spec for spec in ran if spec == PLAIN or found[spec].prompts & found[PLAIN].prompts]
    entries = [_entry(spec, found, predicted.get(spec), settings) for spec in ran]
    return sorted(entries, key=lambda entry: -entry["speed_up"][0])


def _entry(
    spec: str, found: Mapping[str, Group], predicted: Predicted | None, settings: TuneSettings
) -> dict[str, Any]:
    group, plain = found[spec], found[PLAIN]
    greedy = settings.sampling.greedy
    lossless = parse_method(spec).lossless(greedy)
    quality = {str(goal): _relative(goal, group, plain) for goal in settings.quality}
    kept = all((low := quality[str(goal)][1]) is not None and low >= goal.least for goal in settings.quality)
    drift: BootstrapInterval = (0.0, 0.0, 0.0)
    if not lossless:
        assert group.drifts is not None, "the engine's arms meter drift"
        drift = ratio_of_sums(group.drifts, group.scored)
    calls = group.sums(lambda row: sum(row["target_calls"])) / np.maximum(group.tokens, 1.0)
    return {
        "spec": spec,
        "lossless": lossless,
        "allowed": lossless or kept,
        "level": None if predicted is None else predicted.level,
        "tokens_per_s": float(group.tokens.sum() / group.seconds.sum()),
        "speed_up": list(speed_over(found, spec)) if spec != PLAIN else [1.0, 1.0, 1.0],
        "drift": list(drift),
        "changed": 0.0 if lossless or group.drifts is None else float(group.drifts.sum()) / len(group.rows),
        "kl": 0.0 if lossless else None if predicted is None else predicted.kl,
        "calls": [float(calls.mean()), float(calls.std())],
        "prompts": len(group.prompts),
        "quality": {name: list(interval) for name, interval in quality.items()},
    }


def _relative(goal: Goal, group: Group, plain: Group) -> BootstrapInterval:
    """Mean of a measure relative to the target's own, paired by prompt; NaN-free: 0 where the target has none."""
    common = sorted(group.prompts & plain.prompts)
    own, base = (_measured(one.restrict(common), goal.metric) for one in (group, plain))
    if not base[0].sum():
        return 0.0, None, None
    return ratio_of_ratios(own, base)


def _measured(group: Group, metric: str) -> tuple[Any, Any]:
    """Sum and number of a measure, by prompt."""
    have = [[row["quality"] for row in rows if metric in row["quality"]] for rows in group.by_prompt]
    return (
        np.array([sum(values[metric] for values in each) for each in have], dtype=float),
        np.array([float(len(each)) for each in have]),
    )


def choose(entries: Sequence[Mapping[str, Any]], settings: TuneSettings) -> list[dict[str, Any]]:
    """The profile's "chosen": the fastest lossless entry, and the fastest that meets each budget and the goals."""
    unit = settings.budget_unit
    chosen = [_chosen("exact", None, [one for one in entries if one["lossless"]])]
    for budget in settings.budgets:
        within = [
            one for one in entries if one["lossless"] or (one["allowed"] and _spent(one, unit) <= budget)
        ]
        chosen.append(_chosen(f"{unit}<={budget:g}", budget, within))
    if settings.quality and not settings.budgets:
        goals = ", ".join(map(str, settings.quality))
        chosen.append(_chosen(goals, None, [one for one in entries if one["allowed"]]))
    return chosen


def _spent(entry: Mapping[str, Any], unit: str) -> float:
    value = entry["drift"][0] if unit == "drift" else entry[unit]
    return float("inf") if value is None else float(value)


def _chosen(goal: str, budget: float | None, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    best = max(entries, key=lambda one: one["speed_up"][0])
    return {"goal": goal, "budget": budget, "level": best["level"], "spec": best["spec"]}


def front_of(
    predicted: Sequence[Predicted], rows: Sequence[Mapping[str, Any]], settings: TuneSettings
) -> list[dict[str, Any]]:
    """The profile's "front": every candidate as predicted and, if it ran, as measured; and whether none beats it."""
    found = grouped(rows, {row["model_id"] for row in rows})
    points: list[dict[str, Any]] = []
    for one in predicted:
        group, measured = found.get(one.spec), None
        if group is not None and group.answered and group.prompts & found[PLAIN].prompts:
            drift = 0.0 if group.drifts is None else float(group.drifts.sum() / group.scored.sum())
            lossless = parse_method(one.spec).lossless(settings.sampling.greedy)
            speed = 1.0 if one.spec == PLAIN else speed_over(found, one.spec)[0]
            measured = {"speed_up": speed, "drift": 0.0 if lossless else drift, "prompts": len(group.prompts)}
        expected = {"speed_up": one.speed_up, "drift": one.drift, "kl": one.kl}
        points.append(
            {"spec": one.spec, "level": one.level, "lossless": one.level is None, "predicted": expected,
             "measured": measured}
        )  # fmt: skip
    for which in ("predicted", "measured"):
        best = _undominated([point[which] for point in points])
        for point, good in zip(points, best, strict=True):
            point.setdefault("on_front", {})[which] = good
    return points


def _undominated(values: Sequence[Mapping[str, Any] | None]) -> list[bool]:
    """Whether no other value is at least as fast with less drift, or faster with no more drift."""
    known = [(one["speed_up"], one["drift"]) for one in values if one is not None]

    def beaten(speed: float, drift: float) -> bool:
        return any(s >= speed and d <= drift and (s > speed or d < drift) for s, d in known)

    return [one is not None and not beaten(one["speed_up"], one["drift"]) for one in values]
