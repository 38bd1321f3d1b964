"""Entry point of the measures of answers; called after the timed part of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from sprinter.bench.quality import sandbox
from sprinter.bench.quality.code import passes
from sprinter.bench.quality.exact import check_answer, right
from sprinter.bench.quality.likelihood import log_likelihoods, perplexity
from sprinter.bench.quality.rouge import check_rouge, rouge
from sprinter.bench.quality.sandbox import SandboxLimits
from sprinter.bench.quality.text import distinct, longest_repeat, repeated
from sprinter.bench.sample import Sample
from sprinter.decode.checks import at_least
from sprinter.engine.pair import Pair

__all__ = ["Answered", "QualitySettings", "measure", "measure_all", "prepare"]


@dataclass(frozen=True, slots=True)
class QualitySettings:
    """Which measures to compute, and how.

    Attributes:
        rouge: compute ROUGE for samples with references.
        stemmer: stem words for ROUGE.
        likelihood: compute perplexity and log-likelihood under the target, which the offline judge needs.
        run_code: run generated code of samples with a test; otherwise pass@1 is absent.
        code_s, code_memory_bytes: limits of a program.
        batch: texts per forward pass of the target.

    Raises:
        UserError: a value out of range.
    """

    rouge: bool = True
    stemmer: bool = False
    likelihood: bool = True
    run_code: bool = False
    code_s: float = 5.0
    code_memory_bytes: int = 1 << 30
    batch: int = 8

    def __post_init__(self) -> None:
        at_least("batch", self.batch, 1)
        self.limits()

    def limits(self) -> SandboxLimits:
        """Limits of generated code."""
        return SandboxLimits(seconds=self.code_s, memory_bytes=self.code_memory_bytes)

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


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
    return settings.facts() | {"code_network": sandbox.network() if runs_code else None}


def measure(
    pair: Pair,
    sample: Sample,
    prompt_ids: Sequence[Sequence[int]],
    answer_ids: Sequence[Sequence[int]],
    texts: Sequence[str],
    settings: QualitySettings,
) -> dict[str, float]:
    """All measures of one answer; see ``Answered`` and ``measure_all``."""
    return measure_all(pair, [Answered(sample, prompt_ids, answer_ids, texts)], settings)[0]


def measure_all(
    pair: Pair,
    answers: Sequence[Answered],
    settings: QualitySettings,
    progress: Callable[[int, int], None] = lambda done, wanted: None,
) -> list[dict[str, float]]:
    """All measures of answers, by the names of ``metrics.METRICS``. Measures that do not apply are absent.

    Over several turns likelihoods are summed, ROUGE and repetition are averaged, and the last answer is checked.

    Args:
        progress: called with (answers done, answers in total).

    Raises:
        UserError: an answer exceeds the target's context, a package is missing, or no text can satisfy a check.
    """
    ends = set(pair.models.target.eos_ids)
    values, size = [], 4 * settings.batch  # answers per call of the target
    for at in range(0, len(answers), size):
        part = answers[at : at + size]
        scores = _likelihoods(pair, part, settings) if settings.likelihood else [{}] * len(part)
        values += [
            score | _of_text(answer, ends, settings) for score, answer in zip(scores, part, strict=True)
        ]
        progress(len(values), len(answers))
    return values


def _likelihoods(
    pair: Pair, answers: Sequence[Answered], settings: QualitySettings
) -> list[dict[str, float]]:
    texts = [pairs for one in answers for pairs in zip(one.prompt_ids, one.answer_ids, strict=True)]
    scored = iter(log_likelihoods(pair, texts, batch=settings.batch))
    values = []
    for answer in answers:
        turns = [next(scored) for _ in answer.answer_ids]
        total, tokens = sum(float(turn.sum()) for turn in turns), sum(map(len, turns))
        values.append(
            {
                "log_likelihood": total,
                "scored_tokens": float(tokens),
                "log_likelihood_per_token": total / tokens,
                "perplexity": perplexity(total, tokens),
            }
            if tokens
            else {}
        )
    return values


def _of_text(answer: Answered, ends: set[int], settings: QualitySettings) -> dict[str, float]:
    turns = [_variety([id for id in ids if id not in ends]) for ids in answer.answer_ids]
    if settings.rouge:
        referenced = zip(answer.texts, answer.sample.references, strict=False)
        turns += [rouge(text, reference, settings.stemmer) for text, reference in referenced]
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
    return {"pass_at_1": float(passes(sample.turns[-1], text, check, settings.limits()).passed)}
