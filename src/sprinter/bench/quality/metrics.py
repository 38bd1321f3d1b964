"""Measures of an answer (name, meaning, direction), and their means over prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sprinter.bench.quality.likelihood import perplexity
from sprinter.bench.quality.rouge import ROUGE
from sprinter.bench.statistics import BootstrapInterval, ratio_of_sums

__all__ = ["METRICS", "Metric", "Values", "intervals"]

Values = Mapping[str, float]
"""Measures of one answer by name; measures that do not apply to it are absent."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One measure.

    Attributes:
        name: key of the measure.
        meaning: short description.
        better: "higher" or "lower"; None: neither, an intermediate number.
        unit: unit; "" for shares and ratios.
        main: whether short tables show it.
    """

    name: str
    meaning: str
    better: Literal["higher", "lower"] | None
    unit: str = ""
    main: bool = False


_ROUGE_WORDS = {"rouge1": "words", "rouge2": "pairs of words", "rougeL": "longest common sequence of words"}
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in [
        *(Metric(f"{kind}", f"ROUGE F-measure, {_ROUGE_WORDS[kind]}", "higher", main=True) for kind in ROUGE),
        *(
            Metric(f"{kind}_{part}", f"ROUGE {part}, {_ROUGE_WORDS[kind]}", "higher")
            for kind in ROUGE
            for part in ("precision", "recall")
        ),
        Metric("perplexity", "of the answer under the target, temperature 1", "lower", main=True),
        Metric("log_likelihood_per_token", "under the target, temperature 1", "higher", "nats"),
        Metric("log_likelihood", "of the whole answer under the target", None, "nats"),
        Metric("scored_tokens", "tokens that the likelihood covers", None, "tokens"),
        Metric("distinct1", "distinct tokens over tokens", "higher"),
        Metric("distinct2", "distinct pairs of tokens over pairs", "higher", main=True),
        Metric(
            "repeated4", "share of runs of four tokens that occurred in the answer before", "lower", main=True
        ),
        Metric("longest_repeat", "longest run of tokens that occurs in the answer twice", "lower", "tokens"),
        Metric("exact_match", "right number or choice", "higher", main=True),
        Metric("pass_at_1", "the program passes its test", "higher", main=True),
        Metric("win", "wins against the base arm", "higher"),
        Metric("win_tie", "wins or ties against the base arm", "higher", main=True),
    ]
}
"""All measures, in the order of tables."""
_POOLED = ("perplexity", "log_likelihood_per_token")


def intervals(prompts: Sequence[Sequence[Values]]) -> dict[str, BootstrapInterval]:
    """Mean of each measure with its 95 % bootstrap interval over prompts, over the answers that have the measure.

    Perplexity and log-likelihood per token are computed over all tokens, not as means over answers, because one
    unlikely answer would outweigh all others.

    Args:
        prompts: for each prompt the measures of its answers (repeats).
    """
    have = {name for answers in prompts for values in answers for name in values}
    return {name: _interval(name, prompts) for name in METRICS if name in have}


def _interval(name: str, prompts: Sequence[Sequence[Values]]) -> BootstrapInterval:
    top, bottom = ("log_likelihood", "scored_tokens") if name in _POOLED else (name, None)
    kept = [having for answers in prompts if (having := [values for values in answers if name in values])]
    tops = [sum(values[top] for values in having) for having in kept]
    bottoms = [sum(values[bottom] if bottom else 1.0 for values in having) for having in kept]
    value, low, high = ratio_of_sums(tops, bottoms)
    if name == "perplexity":
        lowest, highest = (None if end is None else perplexity(end, 1) for end in (high, low))
        return perplexity(value, 1), lowest, highest
    return value, low, high
