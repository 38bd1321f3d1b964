"""Grading after the timed part: measure every answer, and let a judge compare arms with a base arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sprinter.bench.harness import OnBenchProgress
from sprinter.bench.journal import QUALITY, hash_of, replies
from sprinter.bench.quality.endpoint import Endpoint, key_from_environment
from sprinter.bench.quality.judges import DuelJudge, LikelihoodJudge, LlmJudge, judge_rows
from sprinter.bench.quality.measure import Answered, QualitySettings, measure, prepare
from sprinter.bench.sample import Sample, Suite
from sprinter.bench.suites import turn_ids
from sprinter.decode.checks import between
from sprinter.engine.pair import Pair
from sprinter.errors import UserError

__all__ = ["Grading", "JudgeSettings"]

_TOGETHER = 256  # answers that are measured between two writes


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """Settings of the judge.

    Attributes:
        url: base URL of an OpenAI-compatible endpoint; None: the offline judge (log-likelihood under the target).
        model: name of the model at the endpoint.
        price_in, price_out: prices per million tokens, to compute the cost.

    Raises:
        UserError: an endpoint without a model, or the reverse; an invalid price, or a price without an endpoint.
    """

    url: str | None = None
    model: str | None = None
    price_in: float | None = None
    price_out: float | None = None

    def __post_init__(self) -> None:
        if (self.url is None) != (self.model is None):
            raise UserError(
                "a judge needs both an address and a model: give --judge URL and --judge-model NAME"
            )
        self._endpoint()  # check before the run, not after it
        prices = [price for price in (self.price_in, self.price_out) if price is not None]
        if prices and self.url is None:
            raise UserError("the offline judge costs nothing: leave --judge-price away, or give --judge URL")
        for price in prices:
            between("judge_price", price, 0, 1e6)

    def _endpoint(self) -> Endpoint | None:
        return None if self.url is None else Endpoint(self.url, str(self.model), key_from_environment())

    def open(self, directory: Path) -> DuelJudge:
        """Make the judge; an endpoint's replies are stored in ``directory``."""
        if (endpoint := self._endpoint()) is None:
            return LikelihoodJudge()
        return LlmJudge(endpoint, replies(directory / "judge.jsonl"), self.price_in, self.price_out)


class Grading:
    """Measures rows. Measurements are stored in ``quality.jsonl`` and not repeated.

    Args:
        suites: suites that were asked.
        measures: what to measure; its requirements are checked here, before anything is asked.
        judge: settings of the judge that compares arms with the base arm.

    Raises:
        UserError: see ``quality.measure.prepare``.
    """

    def __init__(
        self, pair: Pair, suites: Sequence[Suite], measures: QualitySettings, judge: JudgeSettings
    ) -> None:
        self._pair, self._measures, self._judge = pair, measures, judge
        self._chat = {suite.name: suite.chat for suite in suites}
        self._samples = {(suite.name, sample.id): sample for suite in suites for sample in suite.samples}
        self.facts = prepare(measures, self._samples.values())

    def grade(
        self, rows: Sequence[dict[str, Any]], bases: Sequence[str], directory: Path, progress: OnBenchProgress
    ) -> dict[str, Any]:
        """Add "quality" to every row.

        Args:
            bases: the other arms are compared with the first of these that took part; without one there is no judge.

        Returns:
            Facts about the judge for the results file.
        """
        self._measure(rows, directory, progress)
        arms = {row["model_id"] for row in rows}
        base = next((name for name in bases if name in arms), None)
        if base is None or len(arms) < 2:
            return {"status": "skipped", "error": "there is no base arm and other arm to compare"}
        if self._judge.url is None and not self._measures.likelihood:
            why = "the offline judge needs likelihoods, which were not measured"
            return {"status": "skipped", "error": why}
        judge: DuelJudge = self._judge.open(directory)

        def judged(done: int, wanted: int) -> None:
            if self._judge.url is not None:  # the offline judge compares what was measured, at once
                progress(done, wanted, "judging")

        try:
            scores, facts = judge_rows(rows, self._samples, base, judge, judged)
        finally:
            judge.close()
        for row, score in zip(rows, scores, strict=True):
            row["quality"] |= score
        return facts

    def _measure(self, rows: Sequence[dict[str, Any]], directory: Path, progress: OnBenchProgress) -> None:
        with replies(directory / QUALITY) as kept:
            keys = [hash_of([self.facts, row["suite"], row["question_id"], row["token_ids"]]) for row in rows]
            new = [(key, row) for key, row in zip(keys, rows, strict=True) if key not in kept.done]
            new = [*dict(new).items()]
            for at in range(0, len(new), _TOGETHER):
                part = new[at : at + _TOGETHER]
                values = measure(self._pair, [self._answered(row) for _, row in part], self._measures)
                for (key, _), value in zip(part, values, strict=True):
                    kept.add({"key": key, "quality": value})
                progress(at + len(part), len(new), "measuring answers")
            for key, row in zip(keys, rows, strict=True):
                row["quality"] = dict((kept.get(key) or {})["quality"])

    def _answered(self, row: Mapping[str, Any]) -> Answered:
        sample: Sample = self._samples[row["suite"], row["question_id"]]
        texts = row["choices"][0]["turns"]
        chat = self._chat[row["suite"]]
        prompts = [turn_ids(self._pair, sample, turn, texts[:turn], chat=chat) for turn in range(len(texts))]
        return Answered(sample, prompts, row["token_ids"], texts)
