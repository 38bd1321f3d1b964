"""Candidates against each other, live: rounds on more and more prompts, after which the slower half of a class leaves.

Successive halving (Jamieson and Talwalkar 2016). Arms are interleaved and compared on the same prompts, so that other
load on the machine affects all of them equally.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from sprinter.bench.arms import parse_arm
from sprinter.bench.harness import Harness
from sprinter.bench.journal import Memory
from sprinter.bench.sample import Suite
from sprinter.bench.settings import BenchSettings
from sprinter.bench.statistics import BootstrapInterval, ratio_of_ratios
from sprinter.bench.summary import Group, groups
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.tuning.candidates import PLAIN
from sprinter.tuning.settings import TuneSettings

__all__ = ["Race", "grouped", "speed_over"]

_WARM_TOKENS = 8
_CLOSE = 0.98
"""A class is decided where no rival can be faster than the leader by more than 2 %."""
_LEAST = 4  # prompts before a class can be decided

RaceProgress = Callable[[int, int, str], None]
"""(answers done, answers in total, description)."""


class _TimeIsUp(Exception):
    """The clock has reached the end of the tuning."""


@dataclass
class Race:
    """One race, and how it ended.

    Args:
        pair, suite: the pair, and the prompts of all rounds.
        settings: of the tuning.
        journal: where rows are stored; answers that it has are not asked again.
        until: time (``time.monotonic``) at which it ends with what it knows.
        thorough: ask the finalists every prompt, even where their speeds are distinguishable: goals of quality need it.

    Attributes:
        classes: class -> specs that are left, fastest first.
        rounds: number of prompts, repeats and arms of each round.
        decided: whether the finalists were distinguishable, or have answered all prompts as often as is allowed;
            False: time was up.
        failed: spec -> error, one line.
    """

    pair: Pair
    suite: Suite
    settings: TuneSettings
    journal: Memory
    until: float = math.inf
    thorough: bool = False
    progress: RaceProgress = lambda done, wanted, note: None
    classes: dict[str, list[str]] = field(default_factory=dict)
    rounds: list[dict[str, int]] = field(default_factory=list)
    decided: bool = False
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, classes: Mapping[str, Sequence[str]]) -> None:
        """Race the specs of each class.

        Raises:
            UserError: plain decoding fails, or time was up before any prompt was answered.
        """
        self.classes = {name: list(specs) for name, specs in classes.items()}
        prompts, total = min(self.settings.first, len(self.suite.samples)), len(self.suite.samples)
        repeats = 1
        try:
            self._warm_up()
            while True:
                self._round(prompts, repeats)
                finals = all(len(specs) <= self.settings.finalists for specs in self.classes.values())
                enough = finals and (prompts == total or not self.thorough) and self._told_apart()
                if enough or (prompts == total and repeats == self.settings.repeats):
                    self.decided = True
                    break
                if not finals:
                    self._halve()
                if prompts == total:
                    repeats += 1
                prompts = min(total, 2 * prompts)
        except _TimeIsUp:
            if not any(row["model_id"] == PLAIN for row in self.journal.rows):
                why = "time was up before the first prompt was answered"
                raise UserError(f"{why}: give --time more, or run it again to continue") from None
        self._rank()
        self.classes = {name: specs[: self.settings.finalists] for name, specs in self.classes.items()}

    def _specs(self) -> list[str]:
        return list(dict.fromkeys([PLAIN, *(spec for specs in self.classes.values() for spec in specs)]))

    def _round(self, prompts: int, repeats: int) -> None:
        """Ask all arms that are left the first ``prompts`` prompts."""
        specs = self._specs()
        self.rounds.append({"prompts": prompts, "repeats": repeats, "arms": len(specs)})
        part = replace(self.suite, samples=self.suite.samples[:prompts])
        self._ask(part, specs, self._bench(repeats), self.journal, f"round {len(self.rounds)}")
        self._rank()

    def _warm_up(self) -> None:
        """Short answers by all arms, which are not stored."""
        part = replace(self.suite, samples=self.suite.samples[:1])
        settings = replace(self._bench(1), new_tokens=_WARM_TOKENS)
        self._ask(part, self._specs(), settings, Memory(), "warm-up")

    def _bench(self, repeats: int) -> BenchSettings:
        own = self.settings
        return BenchSettings(
            (own.temperature,), own.new_tokens, repeats, own.seed, own.top_k, own.top_p, own.min_p, warmup=0
        )

    def _ask(
        self, suite: Suite, specs: Iterable[str], settings: BenchSettings, rows: Memory, stage: str
    ) -> None:
        done = 0

        def step(_: int, wanted: int, note: str) -> None:
            nonlocal done
            done += 1
            self.progress(done, left, f"{stage}: {note}")
            if time.monotonic() >= self.until:
                raise _TimeIsUp

        arms = [parse_arm(spec) for spec in specs]
        ids = [sample.id for sample in suite.samples]
        asked = product((arm.name for arm in arms), ids, range(settings.repeats))
        left = len(set(asked) - {(row["model_id"], row["question_id"], row["repeat"]) for row in rows.rows})
        harness = Harness(self.pair, arms, [suite], settings, rows, step)
        try:
            harness.run()
        finally:
            harness.close()
            self.failed |= harness.failed
            self._drop_failed()

    def _drop_failed(self) -> None:
        if PLAIN in self.failed:
            raise UserError(f"plain decoding fails on this pair: {self.failed[PLAIN]}")
        left = {
            name: [spec for spec in specs if spec not in self.failed] for name, specs in self.classes.items()
        }
        self.classes = {name: specs for name, specs in left.items() if specs}

    def _rank(self) -> None:
        """Sort each class by speed relative to plain decoding, fastest first."""
        found = grouped(self.journal.rows, self._specs())
        speeds = {spec: speed_over(found, spec)[0] for spec in found if PLAIN in found}
        for specs in self.classes.values():
            specs.sort(key=lambda spec: -speeds.get(spec, 0.0))

    def _halve(self) -> None:
        """Drop the slower half of each class; at least the finalists stay."""
        for name, specs in self.classes.items():
            self.classes[name] = specs[: max(self.settings.finalists, math.ceil(len(specs) / 2))]

    def _told_apart(self) -> bool:
        """Whether in every class no rival can be more than 2 % faster than the leader, nor of the leaders of exact
        methods and of a budget the slower one."""
        found = grouped(self.journal.rows, self._specs())
        if len(found[PLAIN].prompts) < _LEAST:
            return False
        rivals = [(specs[0], other) for specs in self.classes.values() for other in specs[1:]]
        leaders = [specs[0] for specs in self.classes.values()]
        for other in leaders[1:]:
            faster = speed_over(found, leaders[0], other)[0] >= 1
            rivals.append((leaders[0], other) if faster else (other, leaders[0]))
        lows = [speed_over(found, leader, other)[1] for leader, other in rivals]
        return all(low is not None and low >= _CLOSE for low in lows)


def grouped(rows: Iterable[Mapping[str, Any]], specs: Iterable[str]) -> dict[str, Group]:
    """Spec -> its rows by prompt, over the prompts that all of these specs answered."""
    wanted = set(specs)
    chosen = [row for row in rows if row["model_id"] in wanted]
    return {arm: group for (arm, _, _), group in groups(chosen).items()}


def speed_over(found: Mapping[str, Group], spec: str, base: str = PLAIN) -> BootstrapInterval:
    """Speed of one spec relative to another, paired by prompt, with its 95 % interval."""
    own, other = found[spec], found[base]
    if own.prompts != other.prompts:  # an arm that was cut off: the prompts that both answered
        common = sorted(own.prompts & other.prompts)
        own, other = own.restrict(common), other.restrict(common)
    if not own.answered or not other.answered:
        return 0.0, None, None
    return ratio_of_ratios(own.speed, other.speed)
