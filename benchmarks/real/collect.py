"""Drift against quality over all texts that ``quality.py`` has measured. No model is run.

For every arm and suite: accuracy and its difference from the target's own (paired by prompt, 95 % bootstrap), drift,
target calls and draft steps a token, and speed over the bases where ``speed.py`` has timed it. Then how well drift, and
other measures of distance, predict the loss of accuracy: over lossy arms (Spearman's rank correlation), and within an
arm, over its answers to prompts that the target alone gets right (AUC for "this answer is wrong").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import cells, grid
from benchmarks.real.arms import BASES
from sprinter.bench.statistics import BootstrapInterval, bootstrap, ratio_of_sums

PLAIN, EXACT = BASES
Speeds = dict[tuple[str, str, float], tuple[BootstrapInterval, BootstrapInterval]]
"""(arm, suite, temperature) -> speed over the target alone, and over the exact base."""
CHANGES: dict[str, tuple[str, str | None]] = {
    "accuracy_change": ("right", None),
    "rouge1_change": ("rouge1", None),
    "likelihood_change": ("log_likelihood", "new_tokens"),
}
"""Measure of an answer that is compared with the target's own -> field, and the field that it is divided by."""
PREDICTORS: dict[str, tuple[str, str | None]] = {
    "mean drift": ("drift_sum", "drift_tokens"),
    "sum of drifts": ("drift_sum", None),
    "drift of the first 16 tokens": ("drift_first", None),
    "worst drift": ("drift_most", None),
    "mean overshoot": ("over_sum", "new_tokens"),
    "worst overshoot": ("over_most", None),
    "mean shortfall": ("below_sum", "new_tokens"),
    "sum of shortfalls": ("below_sum", None),
    "worst shortfall": ("below_most", None),
    "length": ("new_tokens", None),
}
"""Measure of an answer -> field of a text, and the field that it is divided by."""


@dataclass
class Measured:
    """The texts of one arm on one suite at one temperature, by prompt."""

    arm: str
    suite: str
    temperature: float
    texts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def column(self, name: str, prompts: list[str]) -> np.ndarray:
        """A value of every text, NaN where it is unknown, ``[prompts]``."""
        return np.array([self.texts[prompt][name] for prompt in prompts], dtype=float)

    def ratio(self, top: str, bottom: str) -> BootstrapInterval | None:
        """Ratio of sums with its interval; None if the values are unknown."""
        tops, bottoms = (self.column(name, [*self.texts]) for name in (top, bottom))
        known = not np.isnan(tops).any() and bottoms.sum() > 0
        return ratio_of_sums(tops, bottoms) if known else None


def read(texts: Sequence[dict[str, Any]]) -> list[Measured]:
    """The arms of all texts."""
    found: dict[tuple[str, str, float], Measured] = {}
    for text in texts:
        key = text["model_id"], text["suite"], text["temperature"]
        found.setdefault(key, Measured(*key)).texts[text["question_id"]] = text
    return [*found.values()]


def read_speeds(path: Path) -> Speeds:
    """Speeds over the bases, by arm, suite and temperature; of an arm in several parts, that of most prompts."""
    found: Speeds = {}
    if path.is_file():
        parts = json.loads(path.read_text(encoding="utf-8"))["parts"].values()
        for row in sorted((row for rows in parts for row in rows), key=lambda row: -int(row["prompts"])):
            speeds = tuple(row["over_plain"]), tuple(row["over_exact"])
            found.setdefault((row["arm"], row["suite"], row["temperature"]), speeds)
    return found


def rows_of(measured: list[Measured], speeds: Speeds) -> Iterator[dict[str, Any]]:
    """One row an arm, suite and temperature."""
    by_key = {(one.arm, one.suite, one.temperature): one for one in measured}
    for key, one in by_key.items():
        plain = by_key.get((PLAIN, one.suite, one.temperature))
        over_plain, over_exact = speeds.get(key, (None, None))
        yield {
            "arm": one.arm,
            "suite": one.suite,
            "temperature": one.temperature,
            "prompts": len(one.texts),
            "accuracy": _accuracy(one),
            **{
                name: None if plain is None else _change(one, plain, *measure)
                for name, measure in CHANGES.items()
            },
            "mean_drift": one.ratio("drift_sum", "drift_tokens"),
            "target_calls_per_token": one.ratio("target_calls", "new_tokens"),
            "draft_steps_per_token": one.ratio("draft_steps", "new_tokens"),
            "speed_over_exact": over_exact,
            "speed_over_plain": over_plain,
        }


def _together(one: Measured, other: Measured) -> list[str]:
    return [prompt for prompt in one.texts if prompt in other.texts]


def _accuracy(one: Measured) -> BootstrapInterval | None:
    right = one.column("right", [*one.texts])
    return None if np.isnan(right).any() else ratio_of_sums(right, np.ones(len(right)))


def _change(one: Measured, base: Measured, top: str, bottom: str | None) -> BootstrapInterval | None:
    """A measure's mean minus that of the base on the same prompts; None where it was not taken."""
    prompts = _together(one, base)
    own, other = (ratios([side.texts[prompt] for prompt in prompts], top, bottom) for side in (one, base))
    gain = own - other
    return None if np.isnan(gain).any() else bootstrap(lambda rows: gain[rows].mean(-1), len(gain))


def ratios(texts: Sequence[dict[str, Any]], top: str, bottom: str | None) -> np.ndarray:
    """A field of every text, divided by another; NaN where it was not taken, ``[texts]``."""
    tops = np.array([text.get(top, np.nan) for text in texts], dtype=float)
    return tops if bottom is None else tops / np.array([text[bottom] for text in texts], dtype=float)


def predictor(texts: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """A measure of every text; NaN where it was not taken."""
    return ratios(texts, *PREDICTORS[name])


def lossy(one: Measured) -> bool:
    """Whether an arm has drift; exact arms, whose drift is 0 by identity, say nothing about what drift does."""
    return sum(text["drift_sum"] or 0.0 for text in one.texts.values()) > 0


def over_arms(measured: list[Measured], rows: list[dict[str, Any]]) -> tuple[int, dict[str, float | None]]:
    """Number of lossy arms, and over them the rank correlation of each measure's mean and the accuracy's change."""
    changes = {row["arm"]: row["accuracy_change"] for row in rows if row["accuracy_change"]}
    arms = [one for one in measured if one.arm in changes and lossy(one)]
    change = np.array([changes[one.arm][0] for one in arms])
    return len(arms), {
        name: correlation(
            np.array([float(np.mean(predictor([*one.texts.values()], name))) for one in arms]), change
        )
        for name in PREDICTORS
    }


def correlation(values: np.ndarray, change: np.ndarray) -> float | None:
    """Spearman's rank correlation; None for fewer than four arms, unknown or equal values."""
    if len(values) < 4 or np.isnan(values).any():
        return None
    ranks = [_ranks(one) for one in (values, change)]
    if any(one.std() == 0 for one in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def over_answers(measured: list[Measured]) -> dict[str, Any]:
    """AUC of each measure for a wrong answer within an arm, over answers to prompts that the target gets right.

    The areas of the lossy arms are averaged, weighted by their pairs of a right and a wrong answer, so that a measure
    that only tells the arms apart has 0.5. Intervals: bootstrap over prompts.
    """
    plain = {prompt: text for one in measured if one.arm == PLAIN for prompt, text in one.texts.items()}
    arms: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for one in measured:
        if lossy(one):
            arms[one.arm] = [
                (prompt, text)
                for prompt, text in one.texts.items()
                if plain.get(prompt, {}).get("right") and text["right"] is not None
            ]
    pooled = [(arm, prompt, text) for arm, answers in arms.items() for prompt, text in answers]
    wrong = np.array([not text["right"] for *_, text in pooled], dtype=bool)
    found: dict[str, Any] = {"answers": len(pooled), "wrong": int(wrong.sum()), "auc": {}}
    if len(pooled) < 20 or wrong.all() or not wrong.any():
        return found
    prompts = sorted({prompt for _, prompt, _ in pooled})
    of = [np.array([i for i, (_, prompt, _) in enumerate(pooled) if prompt == one]) for one in prompts]
    number = np.array([list(arms).index(arm) for arm, *_ in pooled])
    chance = np.random.default_rng(0)
    samples = [np.concatenate([of[i] for i in chance.integers(len(of), size=len(of))]) for _ in range(300)]
    for name in PREDICTORS:
        values = predictor([text for *_, text in pooled], name)
        if np.isnan(values).any():
            continue
        drawn = [within(values[rows], wrong[rows], number[rows]) for rows in samples]
        low, high = np.nanpercentile(drawn, [2.5, 97.5])
        found["auc"][name] = (within(values, wrong, number), float(low), float(high))
    return found


def within(values: np.ndarray, wrong: np.ndarray, arm: np.ndarray) -> float:
    """Mean of the arms' areas, weighted by pairs; NaN if no arm has right and wrong answers."""
    top = bottom = 0.0
    for one in np.unique(arm):
        mine = arm == one
        pairs = float(wrong[mine].sum() * (~wrong[mine]).sum())
        if pairs:
            top, bottom = top + pairs * area(values[mine], wrong[mine]), bottom + pairs
    return top / bottom if bottom else float("nan")


def area(values: np.ndarray, wrong: np.ndarray) -> float:
    """Chance that a wrong answer has the larger value than a right one; equal values count half."""
    ranks = _ranks(values)
    bad, good = int(wrong.sum()), int((~wrong).sum())
    return float((ranks[wrong].sum() - bad * (bad - 1) / 2) / (bad * good))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, equal values with their mean rank."""
    below, equal = (values[:, None] > values).sum(1), (values[:, None] == values).sum(1)
    return np.asarray(below + (equal - 1) / 2)


def collect(texts: Sequence[dict[str, Any]], speeds: Speeds) -> tuple[dict[str, Any], str]:
    """Rows and correlations of all texts, and their tables in Markdown."""
    measured = read(texts)
    rows = [*rows_of(measured, speeds)]
    lines: list[str] = []
    links = []
    for suite, temperature in sorted({(row["suite"], row["temperature"]) for row in rows}):
        block = [row for row in rows if (row["suite"], row["temperature"]) == (suite, temperature)]
        mine = [one for one in measured if (one.suite, one.temperature) == (suite, temperature)]
        (count, arms), answers = over_arms(mine, block), over_answers(mine)
        links.append({"suite": suite, "temperature": temperature, "arms": count, "spearman": arms, **answers})
        lines += ["", f"**{suite}, temperature {temperature:g}**", "", *_table(block)]
        if answers["auc"]:
            lines += [
                "",
                f"What foretells harm: rank correlation with the change of accuracy over {count} lossy arms, and AUC "
                f"for a wrong answer within an arm, over {answers['answers']} answers to prompts that the target "
                f"gets right ({answers['wrong']} wrong).",
                "",
                *grid(
                    "measure | over arms | over answers",
                    [
                        f"{name} | {_signed(arms[name])} | {_cells(answers['auc'].get(name))}"
                        for name in PREDICTORS
                    ],
                ),
            ]
    return {"rows": rows, "correlation": links}, "\n".join(lines).strip()


def _table(rows: list[dict[str, Any]]) -> list[str]:
    judged = {"right": ("accuracy", 2), "change": ("accuracy_change", 2)}
    if not any(row["accuracy"] for row in rows):  # answers that are not right or wrong
        judged = {
            "change of ROUGE-1": ("rouge1_change", 3),
            "change of log-likelihood a token": ("likelihood_change", 3),
        }
    measures = {**judged, "drift": ("mean_drift", 3)}
    shown = {head: of for head, of in measures.items() if any(row[of[0]] for row in rows)}
    head = " | ".join(
        [
            "arm",
            "prompts",
            *shown,
            "target calls/token",
            "draft steps/token",
            "÷ target alone",
            f"÷ `{EXACT}`",
        ]
    )
    lines = [
        " | ".join(
            [
                f"`{row['arm']}`", str(row["prompts"]),
                *(_cells(row[name], digits) for name, digits in shown.values()),
                *(_number(row[name]) for name in ("target_calls_per_token", "draft_steps_per_token")),
                *(_cells(row[name]) for name in ("speed_over_plain", "speed_over_exact")),
            ]
        )
        for row in sorted(rows, key=lambda row: -(row["speed_over_plain"] or (0,))[0])
    ]  # fmt: skip
    return grid(head, lines)


def _cells(values: BootstrapInterval | None, digits: int = 2) -> str:
    return "–" if values is None else cells(values, digits)


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def _number(value: BootstrapInterval | None) -> str:
    return "–" if value is None else f"{value[0]:.3f}"
