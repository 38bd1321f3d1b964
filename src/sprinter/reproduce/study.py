"""What the papers' protocols share: prompts that fit, arms in turn on the bench's harness, settings that are tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sprinter.bench.arm import Arm
from sprinter.bench.arms.engine import EngineArm
from sprinter.bench.harness import OnBenchProgress
from sprinter.bench.quality.measure import QualitySettings
from sprinter.bench.run import Extras, run_bench
from sprinter.bench.sample import Sample, Suite
from sprinter.bench.settings import BenchSettings
from sprinter.bench.suites import group_of_spec_bench, load_suite, turn_ids
from sprinter.decode.spec import parse_method
from sprinter.engine.pair import Pair
from sprinter.engine.prefix import OFF
from sprinter.errors import UserError
from sprinter.files import writing
from sprinter.heads.head import Head
from sprinter.reproduce.answers import Answers
from sprinter.reproduce.claims import PaperTable
from sprinter.reproduce.settings import ReproduceSettings
from sprinter.theory.recording import Recording, probe

__all__ = ["HeadArm", "Paper", "PaperPart", "Study"]

T = TypeVar("T")
QUALITY = QualitySettings()
RUNNING = ("wiki-summary", "lm1b")
"""Suites of running text, which have no chat form."""


class HeadArm(EngineArm):
    """A method with a head of its own, in place of the pair's."""

    def __init__(self, spec: str, head: Head) -> None:
        super().__init__(parse_method(spec))
        self._head = head

    def fit(self, pair: Pair) -> None:
        """The spec has its threshold; what the pair's own head records is of no use here."""

    def start(self, pair: Pair) -> None:
        """Prepare the pair with this head; each text reads its own prompt."""
        super().start(Pair(pair.models, None, [self._head], OFF))


class Study:
    """One paper's protocol on one pair. Each measured part has a directory, in which it goes on if interrupted.

    Args:
        pair: loaded without a prefix cache, so that each arm reads its own prompt.
        data: directory of the suites' files; None: the hub.
        out: directory of results.
        settings: see ``ReproduceSettings``; values that are None are ``usual``'s.
        usual: the paper's prompts, new_tokens and repeats.
        suites: those of the paper's ``suites`` to measure; (): all.
        command: command line, stored with the results.
        restart: forget what an earlier run left in ``out``.
        progress: called after each answer.

    Raises:
        UserError: the pair has no draft, or ``out`` cannot be written.
    """

    def __init__(
        self,
        pair: Pair,
        data: Path | None,
        out: Path,
        settings: ReproduceSettings,
        usual: Mapping[str, int],
        *,
        suites: Sequence[str] = (),
        command: str = "",
        restart: bool = False,
        progress: OnBenchProgress = lambda done, wanted, note: None,
    ) -> None:
        if pair.models.draft is None:
            raise UserError(
                "the papers compare a target with its draft, and this pair has none: give --draft"
            )
        if out.exists() and not out.is_dir():
            raise UserError(f"'{out}' is a file: give a directory for the results")
        with writing(out):  # before hours of work
            out.mkdir(parents=True, exist_ok=True)
        self.pair, self.data, self.out, self.settings = pair, data, out, settings
        self.prompts = settings.prompts or usual["prompts"]
        self.new_tokens = settings.new_tokens or usual["new_tokens"]
        self.repeats = settings.repeats or usual["repeats"]
        self.tuning = settings.tuning_prompts or usual["tuning_prompts"]
        self.suites = suites
        self._command, self.restart, self.progress = command, restart, progress
        self._kept: dict[object, object] = {}
        self.calls = 1
        """Calls that the answers come from: more than one after an interruption."""
        self.asked, self._began = False, datetime.now(UTC).isoformat(timespec="seconds")
        """Whether this call asked for an answer; no: all of them lay there."""

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What ``make`` returns, made once for a key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[return-value]

    def suite(
        self, name: str, count: int, skip: int = 0, *, new_tokens: int = 0, groups: bool = False
    ) -> Suite:
        """First turns of a suite that fit the context with ``new_tokens`` more.

        Args:
            count: so many, after ``skip``; with ``groups`` of each of Spec-Bench's groups.

        Raises:
            UserError: no prompt is left.
        """
        whole, fits = self._first_turns(name, new_tokens or self.new_tokens)
        kept: dict[str, list[Sample]] = {}
        for sample in whole.samples:
            kept.setdefault(group_of_spec_bench(sample.category) if groups else "", []).append(sample)
        chosen = [one for group in kept.values() for one in islice(filter(fits, group), skip, skip + count)]
        if not chosen:
            raise UserError(
                f"the suite '{name}' has no prompt that fits after the first {skip}: ask for fewer"
            )
        return replace(whole, samples=tuple(chosen))

    def _first_turns(self, name: str, new_tokens: int) -> tuple[Suite, Callable[[Sample], bool]]:
        """The suite's first turns, and whether one of them fits."""

        def read() -> tuple[Suite, Callable[[Sample], bool]]:
            loaded = load_suite(
                name, self.data, tokenizer=self.pair.tokenizer, chat=self.chats and name not in RUNNING
            )
            firsts = (
                replace(one, turns=one.turns[:1], references=one.references[:1]) for one in loaded.samples
            )
            room, known = self.pair.models.context - new_tokens, dict[str, bool]()

            def fits(one: Sample) -> bool:
                if one.id not in known:
                    known[one.id] = 1 <= len(turn_ids(self.pair, one, 0, [], chat=loaded.chat)) <= room
                return known[one.id]

            return replace(loaded, samples=tuple(firsts)), fits

        return self.once(("first turns", name, new_tokens), read)

    @property
    def chats(self) -> bool:
        """Whether the pair has a chat template and so answers questions."""
        return getattr(self.pair.tokenizer, "chat_template", None) is not None

    def laws(self, suite: Suite, note: str = "") -> Recording:
        """Both models' laws along one text of the target a prompt, temperature 1; written anew in each call."""
        prompts = [turn_ids(self.pair, one, 0, [], chat=suite.chat) for one in suite.samples]
        return probe(
            self.pair, prompts, new_tokens=self.new_tokens,
            progress=lambda done, wanted: self.progress(done, wanted, f"{note}laws along texts"),
        )  # fmt: skip

    def answers(
        self,
        part: str,
        suite: Suite,
        arms: Mapping[str, str | Arm],
        temperature: float,
        *,
        new_tokens: int = 0,
        repeats: int = 1,
        quality: bool = False,
    ) -> dict[str, Answers]:
        """Every arm on every prompt, in turn, by the bench's harness.

        Args:
            part: directory in ``out``.
            arms: name -> method, or an arm.
            quality: measure ROUGE, right answers and log-likelihoods.

        Raises:
            UserError: an arm failed, or the directory holds another run.
        """
        made = [EngineArm(parse_method(arm)) if isinstance(arm, str) else arm for arm in arms.values()]
        for name, arm in zip(arms, made, strict=True):
            arm.name = name
        measures = replace(QUALITY, run_code=self.settings.run_code) if quality else None
        results = run_bench(
            self.pair, made, [suite],
            BenchSettings(temperatures=(temperature,), new_tokens=new_tokens or self.new_tokens, repeats=repeats),
            self.out / part, Extras(measures, analysis=False, command=self._command), restart=self.restart,
            progress=lambda done, wanted, note: self.progress(done, wanted, f"{part}: {note}"),
        )  # fmt: skip
        self.calls = max(self.calls, len(results["sessions"]))
        self.asked |= results["sessions"][-1]["began"] >= self._began
        for arm in results["arms"]:
            if arm["status"] != "ok":
                raise UserError(f"{arm['name']} failed in {part}: {arm['error']}")
        specs = {arm["name"]: arm["spec"] for arm in results["arms"]}
        rows = results["rows"]
        return {name: Answers(specs[name], [row for row in rows if row["model_id"] == name]) for name in arms}

    def fastest(self, part: str, suite: Suite, specs: Sequence[str], temperature: float) -> str:
        """The method with the most tokens/s on prompts that are measured nowhere else."""
        found = self.answers(part, suite, {spec: spec for spec in specs}, temperature)
        return max(specs, key=lambda spec: found[spec].tokens.sum() / found[spec].seconds.sum())


PaperPart = Callable[[Study], list[PaperTable]]
"""A piece of a paper's protocol: measures, and returns its tables."""


@dataclass(frozen=True)
class Paper:
    """One paper's protocol.

    Attributes:
        title: authors, year, and what is measured.
        about: how, as Markdown paragraphs; what differs from the paper.
        parts: functions of a study by name; each returns its tables.
        usual: prompts, new_tokens and repeats where the user gives none.
        suites: that the user may choose from; (): all are needed.
    """

    title: str
    about: str
    parts: Mapping[str, PaperPart]
    usual: Mapping[str, int]
    suites: Sequence[str] = ()
