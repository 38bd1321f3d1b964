"""All measures of answers; called after the timed part of a run."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from sprinter.bench.quality import sandbox
from sprinter.bench.quality.checks import check_answer, passes, right
from sprinter.bench.quality.likelihood import log_likelihoods, perplexity
from sprinter.bench.quality.rouge import check_rouge, rouge
from sprinter.bench.sample import Sample
from sprinter.engine.pair import Pair

__all__ = ["Answered", "QualitySettings", "distinct", "longest_repeat", "measure", "prepare", "repeated"]


@dataclass(frozen=True, slots=True)
class QualitySettings:
    """Which measures to compute.

    Attributes:
        rouge: ROUGE for samples with references.
        likelihood: perplexity and log-likelihood under the target, which the offline judge needs.
        run_code: run generated code of samples with a test; otherwise pass@1 is absent.
    """

    rouge: bool = True
    likelihood: bool = True
    run_code: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers to a sample; the three lists have one entry per turn, fewer if a later turn did not fit.

    Attributes:
        sample: the question.
        prompt_ids: token ids of the prompt of each turn, earlier turns included.
        answer_ids: token ids of each answer, an end-of-sequence token included.
        texts: the answers as text.
    """

    sample: Sample
    prompt_ids: Sequence[Sequence[int]]
    answer_ids: Sequence[Sequence[int]]
    texts: Sequence[str]


def prepare(settings: QualitySettings, samples: Iterable[Sample]) -> dict[str, Any]:
    """Check, before anything is asked, that these samples can be measured.

    Returns:
        Facts for the results file: the settings, and "code_network" ("namespace" or "guard") where code will be run.

    Raises:
        UserError: rouge-score is missing, there is no sandbox for generated code, or no text can satisfy a check.
    """
    samples = list(samples)
    if settings.rouge and any(sample.references for sample in samples):
        check_rouge()
    checks = [sample.check for sample in samples if sample.check is not None]
    for check in checks:
        check_answer(check)
    runs_code = settings.run_code and any(check.kind == "code" for check in checks)
    return asdict(settings) | {"code_network": sandbox.network() if runs_code else None}


def measure(pair: Pair, answers: Sequence[Answered], settings: QualitySettings) -> list[dict[str, float]]:
    """All measures of answers, by the names of ``metrics.METRICS``. Measures that do not apply are absent.

    Over several turns likelihoods are summed, ROUGE and repetition are averaged, and the last answer is checked.

    Raises:
        UserError: an answer exceeds the target's context, a package is missing, or no text can satisfy a check.
    """
    ends = set(pair.models.target.eos_ids)
    scores = _likelihoods(pair, answers) if settings.likelihood else [{}] * len(answers)
    return [score | _of_text(one, ends, settings) for score, one in zip(scores, answers, strict=True)]


def _likelihoods(pair: Pair, answers: Sequence[Answered]) -> list[dict[str, float]]:
    texts = [pairs for one in answers for pairs in zip(one.prompt_ids, one.answer_ids, strict=True)]
    scored = iter(log_likelihoods(pair, texts))
    values: list[dict[str, float]] = []
    for answer in answers:
        turns = [next(scored) for _ in answer.answer_ids]
        total, tokens = sum(float(turn.sum()) for turn in turns), sum(map(len, turns))
        found = {"log_likelihood": total, "scored_tokens": float(tokens)}
        if tokens:
            found |= {"log_likelihood_per_token": total / tokens, "perplexity": perplexity(total, tokens)}
        values.append(found if tokens else {})
    return values


def _of_text(answer: Answered, ends: set[int], settings: QualitySettings) -> dict[str, float]:
    turns = [_variety([id for id in ids if id not in ends]) for ids in answer.answer_ids]
    if settings.rouge:
        referenced = zip(answer.texts, answer.sample.references, strict=False)
        turns += [rouge(text, reference) for text, reference in referenced]
    names = {name: None for turn in turns for name in turn}
    means = {name: fmean(turn[name] for turn in turns if name in turn) for name in names}
    return means | _checked(answer, settings)


def _variety(ids: Sequence[int]) -> dict[str, float]:
    values = {"distinct1": distinct(ids, 1), "distinct2": distinct(ids, 2), "repeated4": repeated(ids, 4)}
    known = {name: value for name, value in values.items() if value is not None}
    return known | ({"longest_repeat": float(longest_repeat(ids))} if ids else {})


def _checked(answer: Answered, settings: QualitySettings) -> dict[str, float]:
    sample, check = answer.sample, answer.sample.check
    if check is None or len(answer.texts) < len(sample.turns):
        return {}
    text = answer.texts[-1]
    if check.kind != "code":
        return {"exact_match": float(right(text, check))}
    if not settings.run_code:
        return {}
    return {"pass_at_1": float(passes(sample.turns[-1], text, check).passed)}


# --- diversity and repetition, from token ids ---
def distinct(ids: Sequence[int], n: int) -> float | None:
    """Distinct n-grams over all n-grams (Li et al. 2016, distinct-n), in (0, 1]; None: shorter than n."""
    grams = len(ids) - n + 1
    return None if grams < 1 else _different(ids, n) / grams


def repeated(ids: Sequence[int], n: int = 4) -> float | None:
    """Share of n-grams that occurred in the text before (Welleck et al. 2020, seq-rep-n), in [0, 1)."""
    share = distinct(ids, n)
    return None if share is None else 1 - share


def longest_repeat(ids: Sequence[int]) -> int:
    """Length of the longest run of tokens that occurs in the text twice, possibly overlapping; 0: no token repeats."""
    low, high = 0, max(len(ids) - 1, 0)
    while low < high:  # a repeated run of length n contains repeated runs of all smaller lengths
        middle = (low + high + 1) // 2
        if _different(ids, middle) < len(ids) - middle + 1:
            low = middle
        else:
            high = middle - 1
    return low


def _different(ids: Sequence[int], n: int) -> int:
    """Number of different n-grams, counted by hash, so that long ones need little memory."""
    data = memoryview(array("q", ids).tobytes())
    return len({hash(bytes(data[8 * at : 8 * (at + n)])) for at in range(len(ids) - n + 1)})
