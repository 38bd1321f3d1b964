"""Run all arms on all prompts, interleaved, so that other load on the machine affects all arms equally."""

from __future__ import annotations

import gc
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import compress
from random import Random
from typing import Any

import torch

from sprinter.bench.arm import Arm, ArmAnswer, Ask
from sprinter.bench.environment import load_average
from sprinter.bench.journal import Memory, key_of
from sprinter.bench.sample import Sample, Suite
from sprinter.bench.settings import BenchSettings
from sprinter.bench.suites import turn_ids, turn_prompt
from sprinter.engine.pair import Pair
from sprinter.engine.stream import continued_text
from sprinter.errors import SprinterError, UserError

__all__ = ["Harness", "OnBenchProgress", "Talk"]

OnBenchProgress = Callable[[int, int, str], None]
"""Progress callback: (answers done, answers in total, description of the current answer)."""


@dataclass(slots=True)
class Talk:
    """One arm's conversation about one sample: for each turn the prompt's token ids, the answer and its text."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[ArmAnswer] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Slot:
    """One question: suite, temperature, repeat, sample and seed."""

    suite: Suite
    temperature: float
    repeat: int
    sample: Sample
    seed: int


class Harness:
    """Asks every arm every prompt, with the arms in a different order for each prompt.

    Each arm is warmed up at each temperature. Python's garbage collector is disabled while the clock runs. A question
    during which the process was stopped (Ctrl-Z, a scheduler) is asked again, as its time is not the arm's. An arm that
    raises an error is marked as failed and not asked again; the others continue.

    Args:
        pair: pair that the arms run.
        arms: arms with unique names; started here, closed by ``close``.
        suites: suites with unique names.
        settings: settings of the run.
        journal: where rows are stored; questions whose rows it has are not asked again.
        progress: called after each answer.

    Attributes:
        failed: arm name -> error, one line.
        skipped: suite name -> {reason: number of prompts that were not asked}; "turn too long" counts later turns in
            all rows.

    Raises:
        UserError: no arm, no sample, or two arms or suites with the same name.
    """

    def __init__(
        self,
        pair: Pair,
        arms: Sequence[Arm],
        suites: Sequence[Suite],
        settings: BenchSettings,
        journal: Memory,
        progress: OnBenchProgress = lambda done, wanted, note: None,
    ) -> None:
        _different("arm", [arm.name for arm in arms])
        _different("suite", [suite.name for suite in suites])
        self._pair, self.arms, self._suites, self._settings = pair, list(arms), list(suites), settings
        self._journal, self._progress, self._stops = journal, progress, 0
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, dict[str, int]] = {suite.name: {} for suite in suites}
        self._kept = {suite.name: self._usable(suite) for suite in suites}
        if not any(self._kept.values()):
            raise UserError(
                "no prompt of these suites fits the pair's context: give others, or --max-new-tokens"
            )

    @property
    def asked(self) -> dict[str, int]:
        """Suite name -> number of prompts that fit the context."""
        return {name: len(samples) for name, samples in self._kept.items()}

    @property
    def wanted(self) -> int:
        """Number of answers of a complete run."""
        samples = sum(map(len, self._kept.values()))
        return samples * len(self.arms) * self._settings.repeats * len(self._settings.temperatures)

    def run(self) -> None:
        """Ask the questions that the journal has no row for."""
        with self._watching():
            self._run()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Count in ``_stops`` how often the process goes on after a stop; only the main thread can."""
        goes_on = getattr(signal, "SIGCONT", None)  # Windows has none
        if goes_on is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def seen(*_: object) -> None:
            self._stops += 1

        before = signal.signal(goes_on, seen)
        try:
            yield
        finally:
            signal.signal(goes_on, before)

    def _run(self) -> None:
        working = [arm for arm in self.arms if self._left(arm)]
        for arm in working:
            self._guarded(arm, lambda arm=arm: arm.start(self._pair))  # type: ignore[misc]
        temperature: float | None = None
        for i, place in enumerate(self._places()):
            waiting = [a for a in self._shuffled(i) if place_key(a, place) not in self._journal.done]
            if not waiting:
                continue
            if place.temperature != temperature:
                temperature = place.temperature
                self._warm_up(place, [arm for arm in working if self._left(arm, temperature)])
            for arm in waiting:
                if arm.name not in self.failed:
                    self._ask(arm, place)
        self._count_turns()

    def _left(self, arm: Arm, temperature: float | None = None) -> bool:
        """Whether an arm has unanswered questions at a temperature (None: at any)."""
        places = (place for place in self._places() if temperature in (None, place.temperature))
        return any(place_key(arm, place) not in self._journal.done for place in places)

    def close(self) -> None:
        """Close all arms."""
        for arm in self.arms:
            _close(arm)

    def _ask(self, arm: Arm, place: _Slot) -> None:
        row = self._guarded(arm, lambda: self._row(arm, place))
        if row is not None:
            self._journal.add(row)
        done = len(self._journal.done)
        self._progress(done, max(done, self.wanted), f"{place.suite.name} T={place.temperature:g} {arm.name}")

    def _row(self, arm: Arm, place: _Slot) -> dict[str, Any]:
        while True:
            stops = self._stops
            talk = self._talk(arm, place, place.seed)
            if self._stops == stops:
                break
        return row_of(arm, place, talk, arm.lossless(self._settings.sampling(place.temperature)))

    def _talk(self, arm: Arm, place: _Slot, seed: int) -> Talk:
        talk = Talk()
        self._pair._runtime.forget_texts()  # else only the first arm would read the prompt
        for turn in range(len(place.sample.turns)):
            ids, ends = turn_prompt(self._pair, place.sample, turn, talk.texts, chat=place.suite.chat)
            limit = self._limit(place.suite, len(ids))
            if limit is None:  # a later turn: ``_usable`` has checked the first
                break
            sampling = self._settings.sampling(place.temperature)
            with _quiet():
                answer = arm.answer(Ask(tuple(ids), limit, sampling, seed, ends))
            _check(answer, limit)
            talk.prompts.append(ids)
            talk.answers.append(answer)
            talk.texts.append(self._text(answer.ids, () if self._answers(place.suite) else ids))
        return talk

    def _answers(self, suite: Suite) -> bool:
        """Whether prompts are conversations to answer, and not texts to continue."""
        return suite.chat and getattr(self._pair.tokenizer, "chat_template", None) is not None

    def _text(self, ids: Sequence[int], prompt: Sequence[int]) -> str:
        tokenizer = self._pair.tokenizer
        return "" if tokenizer is None else continued_text(tokenizer, prompt, ids)

    def _limit(self, suite: Suite, prompt: int) -> int | None:
        """Maximum number of new tokens for a prompt of this length; None if it does not fit."""
        asked, context = self._settings.new_tokens, self._pair.models.context
        limit = suite.new_tokens if asked is None else asked
        limit = limit or context - prompt
        return limit if prompt >= 1 and limit >= 1 and prompt + limit <= context else None

    def _usable(self, suite: Suite) -> list[Sample]:
        sizes = [len(turn_ids(self._pair, sample, 0, [], chat=suite.chat)) for sample in suite.samples]
        fits = [self._limit(suite, size) is not None for size in sizes]
        self._skip(suite.name, "prompt too long", fits.count(False))
        return list(compress(suite.samples, fits))

    def _count_turns(self) -> None:
        """Count the turns missing in rows; counted from the rows, so that a resumed run gives the same number."""
        turns = {
            (suite.name, sample.id): len(sample.turns) for suite in self._suites for sample in suite.samples
        }
        asked = {place_key(arm, place) for arm in self.arms for place in self._places()}
        for row in self._journal.rows:
            if key_of(row) in asked:
                missing = turns[row["suite"], row["question_id"]] - len(row["choices"][0]["turns"])
                self._skip(row["suite"], "turn too long", missing)

    def _skip(self, suite: str, why: str, turns: int) -> None:
        if turns:
            self.skipped[suite][why] = self.skipped[suite].get(why, 0) + turns

    def _warm_up(self, place: _Slot, arms: Sequence[Arm]) -> None:
        samples = self._kept[place.suite.name][: self._settings.warmup]
        for arm in arms:
            for sample in samples:
                if arm.name not in self.failed:
                    warm = _Slot(place.suite, place.temperature, 0, sample, self._settings.seed)
                    self._guarded(arm, lambda arm=arm, warm=warm: self._talk(arm, warm, warm.seed))  # type: ignore[misc]

    def _shuffled(self, i: int) -> list[Arm]:
        """A different order for each prompt, the same in every run: no arm always follows the same other arm."""
        return Random(i).sample(self.arms, len(self.arms))

    def _places(self) -> Iterator[_Slot]:
        for temperature in self._settings.temperatures:
            for suite in self._suites:
                for repeat in range(self._settings.repeats):
                    for n, sample in enumerate(self._kept[suite.name]):
                        seed = self._settings.seed + repeat * len(suite.samples) + n
                        yield _Slot(suite, temperature, repeat, sample, seed)

    def _guarded(self, arm: Arm, work: Callable[[], Any]) -> Any:
        """Return the result of ``work``; on an error mark the arm as failed and return None."""
        try:
            return work()
        except Exception as error:  # other engines may raise anything
            message = (str(error).strip().splitlines() or ["no message"])[0]
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.failed[arm.name] = kind + message
            _close(arm)
            return None


def place_key(arm: Arm, place: _Slot) -> tuple[str, str, float, str, int]:
    """Key of the row of an arm's answer to a question (``journal.key_of``)."""
    return arm.name, place.suite.name, place.temperature, place.sample.id, place.repeat


def row_of(arm: Arm, place: _Slot, talk: Talk, lossless: bool | None) -> dict[str, Any]:
    """Make a row; ``sprinter.bench.results`` describes its format."""
    answers = talk.answers
    drifts = [drift for answer in answers for drift in answer.drifts or ()]
    origins = sum((Counter(answer.origins) for answer in answers), Counter[str]())
    choice = {
        "index": 0, "turns": talk.texts, "new_tokens": [len(a.ids) for a in answers],
        "decoding_steps": [len(a.accept_lengths) or len(a.ids) for a in answers],
        "wall_time": [a.wall_s for a in answers],
        "accept_lengths": [n for a in answers for n in a.accept_lengths],
    }  # fmt: skip
    return {
        "question_id": place.sample.id, "category": place.sample.category, "model_id": arm.name,
        "choices": [choice], "tstamp": time.time(), "load": load_average(), "suite": place.suite.name,
        "temperature": place.temperature, "repeat": place.repeat, "seed": place.seed, "lossless": lossless,
        "prompt_tokens": [len(ids) for ids in talk.prompts],
        "ttft_s": [a.arrivals_s[0] if a.arrivals_s else None for a in answers],
        "arrivals_ms": [[round(1000 * t, 3) for t in a.arrivals_s] for a in answers],
        "target_calls": [a.target_calls for a in answers],
        "draft_steps": [a.draft_steps for a in answers],
        "origins": dict(origins),
        "remote": dict(sum((Counter(answer.remote) for answer in answers), Counter[str]())),
        "drift_sum": sum(drifts) if any(a.drifts is not None for a in answers) else None,
        "drift_tokens": len(drifts),
        "flops": _flops(answers),
        "token_ids": [list(a.ids) for a in answers],
    }  # fmt: skip


def _flops(answers: Sequence[ArmAnswer]) -> dict[str, float] | None:
    """Forward FLOPs by way of counting (``Stats``); None: another engine does not count them."""
    counted = [answer.extra["stats"]["flops"] for answer in answers if "stats" in answer.extra]
    return {kind: sum(one[kind] for one in counted) for kind in ("passes", "tokens")} if counted else None


def _check(answer: ArmAnswer, limit: int) -> None:
    """Raise a SprinterError if the answer has impossible numbers or is too long: the arm has then failed."""
    times = [answer.wall_s, *answer.arrivals_s, *(answer.drifts or ())]
    if answer.wall_s <= 0 or not all(map(math.isfinite, times)):
        raise SprinterError(f"the arm reported impossible numbers (a time of {answer.wall_s} s, ...)")
    if len(answer.ids) > limit:
        raise SprinterError(f"the arm gave {len(answer.ids)} tokens, asked for {limit} at most")


def _close(arm: Arm) -> None:
    """Close an arm; errors are ignored, because they cannot change a result."""
    with suppress(Exception):
        arm.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Run the garbage collector before the timed part and not during it; synchronise the device at both ends."""
    gc.collect(0)
    gc.disable()
    try:
        _synchronise()
        yield
        _synchronise()
    finally:
        gc.enable()


def _synchronise() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _different(what: str, names: Sequence[str]) -> None:
    if not names:
        raise UserError(f"no {what} was given: give at least one")
    fix = "rename one of them (SPEC as NAME)" if what == "arm" else "give it once, files under other names"
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two of the {what}s are called '{name}': {fix}")
