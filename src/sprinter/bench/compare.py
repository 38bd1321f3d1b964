"""Compare two runs: find what became slower, or further from the target, by more than chance and noise explain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sprinter.bench.statistics import BootstrapInterval, bootstrap, bounds, product_of_ratios, ratio_of_ratios
from sprinter.bench.summary import Group, PromptKey, SummaryKey, groups
from sprinter.errors import UserError

__all__ = ["Change", "compare", "differences"]

_SUITE = ("sources", "rule", "chat", "system", "new_tokens")
_SAMPLING = ("new_tokens", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class Change:
    """One number of one arm in two runs.

    Attributes:
        measure: "speed over BASE", "tokens/s", "target calls/token", "draft steps/token", "mean drift", or "answers" of
            an arm that failed in the later run.
        before, after: its values.
        ratio: after / before with its 95 % interval ("mean drift": the difference); without an interval if a single
            prompt is compared, or answers are counted.
        verdict: "worse", "better" or "same"; "told" if it is reported without a verdict (a single prompt has no
            interval).
    """

    arm: str
    suite: str
    temperature: float
    measure: str
    before: float
    after: float
    ratio: BootstrapInterval
    verdict: str


_ROUNDING = 1e-9  # of quotients of equal numbers


def compare(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    base: str | None = None,
    tolerance: float = 0.0,
    across: bool = False,
) -> list[Change]:
    """Compare two results files, over the prompts that both have.

    Speed is compared relative to a base arm of the same run, so a different or busy machine has no effect. Without a
    base arm in both runs, tokens/s are compared directly.

    Args:
        before, after: contents of two ``results.json``.
        base: name of the base arm; None: the first of the settings' bases that took part in both.
        tolerance: relative change (absolute for drift) that is tolerated in addition to chance.
        across: compare runs even if models, prompts or settings differ.

    Raises:
        UserError: other schemas, runs of different things (unless ``across``), no arm in common, an unknown base.
    """
    for results in (before, after):
        if results.get("schema") != "sprinter-bench/1":
            raise UserError("this is not a results.json of 'sprinter bench': give two of them")
    if not across and (differing := differences(before, after)):
        raise UserError(
            f"the two runs are not of the same thing, they differ in {'; '.join(differing)}: compare runs of one pair "
            "on the same prompts, or give across=True"
        )
    old, new = groups(before["rows"]), groups(after["rows"])
    keys = [key for key in new if key in old and _common(old[key], new[key])]
    lost = _lost(before["rows"], after)
    if not keys and not lost:
        raise UserError("the two runs have no arm, suite, temperature and prompt in common")
    reference = _base(before, keys, base)
    return [*lost, *(change for key in keys for change in _changes(key, old, new, reference, tolerance))]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describe in what two runs did not measure the same thing; empty if no recorded fact differs.

    Runs of the same thing have the same weights, tokenizer, prompts, limits and sampling, and the same spec for each
    arm name. Machine, versions, dtype, repeats and seed may differ, because comparisons measure their effect.
    """
    found = []
    for kind, one, other in _both(before.get("pair"), after.get("pair")):
        if one.get("sha256") != other.get("sha256"):
            names = one.get("name"), other.get("name")
            found.append(f"the {kind} ({names[0]}, {names[1]})" if names[0] != names[1] else f"the {kind}")
    suites = ({suite["name"]: suite for suite in results.get("suites") or ()} for results in (before, after))
    for name, one, other in _both(*suites):
        found += [f"suite {name}: {what}" for what in _SUITE if one.get(what) != other.get(what)]
    specs = ({arm["name"]: arm for arm in results.get("arms") or ()} for results in (before, after))
    for name, one, other in _both(*specs):
        if one.get("spec") != other.get("spec"):
            found.append(f"arm {name} ({one.get('spec')}, {other.get('spec')})")
    settings = [results.get("settings") or {} for results in (before, after)]
    for name in _SAMPLING:
        if all(name in each for each in settings) and settings[0][name] != settings[1][name]:
            found.append(f"{name} ({settings[0][name]}, {settings[1][name]})")
    return found


def _both(
    one: Mapping[str, Any] | None, other: Mapping[str, Any] | None
) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(name, value before, value after) of the entries in both mappings."""
    return [(name, value, other[name]) for name, value in (one or {}).items() if other and name in other]


def _lost(rows: Sequence[Mapping[str, Any]], after: Mapping[str, Any]) -> list[Change]:
    """Number of answers in both runs of the arms that failed in the later run."""
    failed = {arm["name"] for arm in after.get("arms", ()) if arm["status"] == "failed"}
    answered = (rows, after["rows"])
    then, now = (Counter((r["model_id"], r["suite"], r["temperature"]) for r in those) for those in answered)
    return [
        Change(*key, "answers", count, now[key], (now[key] / count, None, None), "worse")
        for key, count in then.items()
        if key[0] in failed and now[key] < count
    ]


def _base(results: Mapping[str, Any], keys: list[SummaryKey], base: str | None) -> str | None:
    arms = {key[0] for key in keys}
    if base is not None and base not in arms:
        raise UserError(f"arm '{base}' did not take part in both runs: give one of {', '.join(sorted(arms))}")
    wanted = [base] if base else results["settings"].get("bases", [])
    return next((name for name in wanted if name in arms), None)


def _common(one: Group, other: Group) -> list[PromptKey]:
    return sorted(one.prompts & other.prompts)


def _changes(
    key: SummaryKey,
    old: Mapping[SummaryKey, Group],
    new: Mapping[SummaryKey, Group],
    base: str | None,
    tolerance: float,
) -> Iterator[Change]:
    arm, suite, temperature = key
    prompts, other = _common(old[key], new[key]), (base or "", suite, temperature)
    beside: list[PromptKey] = []
    if base != arm and other in old and other in new:  # a base arm that failed part-way lacks some prompts
        beside = sorted({*prompts} & old[other].prompts & new[other].prompts)
    a, b = old[key].restrict(prompts), new[key].restrict(prompts)

    def change(
        measure: str, before: float, after: float, interval: BootstrapInterval, bad: int, neutral: float = 1.0
    ) -> Change:
        """``bad``: −1 where less is worse, 1 where more is, 0 where neither is judged."""
        low, high = neutral - tolerance - _ROUNDING, neutral + tolerance + _ROUNDING
        less, more = bounds(interval)[1] < low, bounds(interval)[0] > high
        verdict = "told" if not bad or interval[1] is None else "same"
        if verdict == "same" and (less or more):
            verdict = "worse" if more == (bad > 0) else "better"
        return Change(arm, suite, temperature, measure, before, after, interval, verdict)

    if beside:
        then, now, base_then, base_now = (g.restrict(beside).speed for g in (a, b, old[other], new[other]))
        values = (_over(*then) / _over(*base_then), _over(*now) / _over(*base_now))
        interval = product_of_ratios(now, base_now[::-1], then[::-1], base_then)
        yield change(f"speed over {base}", *values, interval, -1)
    judged = 0 if beside or base == arm else -1
    yield change("tokens/s", _over(*a.speed), _over(*b.speed), ratio_of_ratios(b.speed, a.speed), judged)
    for name, measure, bad in (
        ("target_calls", "target calls/token", 1),
        ("draft_steps", "draft steps/token", 0),
    ):
        tops = a.counts(name), b.counts(name)
        if tops[0] is not None and tops[1] is not None and tops[0].sum() and tops[1].sum():
            then, now = (tops[0], a.tokens), (tops[1], b.tokens)
            yield change(measure, _over(*then), _over(*now), ratio_of_ratios(now, then), bad)
    if a.drifts is not None and b.drifts is not None:
        then, now = (a.drifts, a.scored), (b.drifts, b.scored)
        yield change("mean drift", _over(*then), _over(*now), _difference(now, then), 1, 0.0)


SumPair = tuple[NDArray[np.float64], NDArray[np.float64]]


def _over(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> float:
    return float(top.sum() / bottom.sum())


def _difference(now: SumPair, then: SumPair) -> BootstrapInterval:
    def mean(of: SumPair, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(of[0][rows].sum(-1) / np.maximum(of[1][rows].sum(-1), 1))

    return bootstrap(lambda rows: mean(now, rows) - mean(then, rows), len(now[0]))
