"""Answers one request's questions, and says what the models must do for it.

``RowDriver`` turns each question of the loop into jobs: a piece of a prompt's own pass, a draft step, a target pass. It
runs no model: whoever holds the models does the jobs, of one request at a time or of many at once (``Models.run``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sprinter.decode.draft import AskDraft, AskScore, Draft, Scores, Stats
from sprinter.decode.drafter import Lookup, Model, copied, look_up
from sprinter.decode.row import Answer
from sprinter.decode.signals import SIGNALS
from sprinter.decode.spec import Method
from sprinter.engine.ahead import Ahead
from sprinter.engine.rows import CacheRows, Feed, RequestRows
from sprinter.engine.steps import (
    Drafted,
    DraftPlan,
    DraftRow,
    DraftSteps,
    EagerDraftSteps,
    EagerTargetPasses,
    Scored,
    TargetPasses,
    TargetRow,
)
from sprinter.errors import SprinterError
from sprinter.heads.head import KINDS, Head
from sprinter.laws import Sampling
from sprinter.models.runner import Runner
from sprinter.random import Draws

__all__ = ["Costs", "DraftJob", "Job", "Jobs", "Models", "PromptJob", "RowDriver", "TargetJob"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Forward FLOPs of one token through each model (Hoffmann et al. 2022, Appendix F)."""

    target: float = 0.0
    draft: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptJob:
    """A piece of a prompt's own pass; done in seconds.

    Every job says where its rows start, so that one that failed or was broken off is simply done again.
    """

    model: str  # "target" or "draft"
    rows: list[Feed]


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Draft steps of a request's rows; done with the tokens of each row."""

    rows: list[DraftRow]


@dataclass(frozen=True, slots=True)
class TargetJob:
    """A target pass over a request's rows; done with the laws of each row."""

    rows: list[TargetRow]


Job = PromptJob | DraftJob | TargetJob
Done = float | list[list[Drafted]] | list[Scored] | SprinterError
Jobs = Generator[Job, Any, None]
"""A request under way: yields jobs, is sent what was done; an error among it ends the request."""


class Models:
    """Both models of a pair, their rows, and the steps that do jobs with them.

    Args:
        target, draft: runners with as many rows each; None where no request needs it.
        vocab: size of the common vocabulary.
        draft_steps, target_passes: other makers of steps than the eager ones.
    """

    def __init__(
        self,
        target: Runner | None,
        draft: Runner | None,
        vocab: int,
        draft_steps: Callable[[CacheRows], DraftSteps] = EagerDraftSteps,
        target_passes: Callable[[CacheRows], TargetPasses] = EagerTargetPasses,
    ) -> None:
        self.target = CacheRows(target, vocab, "target") if target else None
        self.draft = CacheRows(draft, vocab, "draft") if draft else None
        self._vocab = vocab
        self._draft_steps = draft_steps(self.draft) if self.draft else None
        self._target_passes = target_passes(self.target) if self.target else None

    @property
    def vocab(self) -> int:
        """Size of the common vocabulary."""
        return self._vocab

    @property
    def device(self) -> torch.device:
        """Where laws meet: the target's device, wherever the draft answers; without a target, the draft's."""
        rows = self.target or self.draft
        return rows.runner.device if rows else torch.device("cpu")

    def gather(self, laws: Tensor) -> Tensor:
        """Laws of either model on ``device``. All that leaves the driver goes through here."""
        return laws.to(self.device)

    def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Do jobs of one kind (and of one model) in one pass or step; what was done for each, in order.

        What is wrong with the rows of one job is its own answer, an error. Whatever is raised belongs to none of them:
        all may be done again.
        """
        first = jobs[0]
        if isinstance(first, PromptJob):
            return list(self._read_prompts(first.model, [row for job in jobs for row in _feeds(job)], jobs))
        rows: list[Any] = [row for job in jobs for row in job.rows]
        steps: Any = self._draft_steps if isinstance(first, DraftJob) else self._target_passes
        done = iter(steps(rows))
        return [_answer([next(done) for _ in job.rows]) for job in jobs]

    def _read_prompts(self, model: str, feeds: list[Feed], jobs: Sequence[Job]) -> list[float]:
        rows = self.target if model == "target" else self.draft
        assert rows is not None
        began = time.perf_counter()
        rows.read_prompts(feeds)
        seconds = time.perf_counter() - began
        return [seconds * len(job.rows) / len(feeds) for job in jobs]


def _answer(rows: list[Any]) -> Done:
    return next((done for done in rows if isinstance(done, SprinterError)), rows)


def _feeds(job: Job) -> list[Feed]:
    assert isinstance(job, PromptJob)
    return job.rows


@dataclass(slots=True)
class _GrowingDraft:
    """A draft as it grows."""

    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    raws: list[Tensor] = field(default_factory=list)

    def add(self, one: Drafted) -> None:
        self.tokens.append(one.token)
        self.laws.append(one.law)
        if one.raw is not None:
            self.raws.append(one.raw)

    def finish(self, signals: Mapping[str, Sequence[float]], models: Models) -> Draft:
        told = {name: torch.tensor(values, dtype=torch.float64) for name, values in signals.items()}
        raw = models.gather(_stacked(self.raws)) if self.raws else None
        return Draft(tuple(self.tokens), models.gather(_stacked(self.laws)), told, raw)


class RowDriver:
    """The driver of one request: its text in both models' rows, and jobs for what the loop asks.

    Args:
        models: what the rows are of.
        numbers: the request's rows, the same in both models: one, or one a draft where the method drafts several.
        heads: by kind, those that the method's rules read at least.
        prompt: token ids.
        ahead: draft up to so many tokens an answer (one host synchronisation), None: as many as pays; the text does
            not depend on it.
        prompt_piece: most tokens of a prompt in one pass; None: all.
        stats: counts and times are added here.
    """

    def __init__(
        self,
        models: Models,
        numbers: Sequence[int],
        heads: Mapping[str, Head],
        prompt: Sequence[int],
        method: Method,
        sampling: Sampling,
        draws: Draws,
        stats: Stats,
        costs: Costs = Costs(),
        ahead: int | None = 1,
        prompt_piece: int | None = None,
    ) -> None:
        if missing := sorted(method.needs & set(KINDS) - heads.keys()):
            raise SprinterError(f"the method reads a head that the pair has not: {', '.join(missing)}")
        self._target = RequestRows(models.target, numbers, prompt) if models.target else None
        self._draft = RequestRows(models.draft, numbers, prompt) if models.draft else None
        self._sampling, self._draws = sampling, draws
        self._drafter, self._needs_raw = method.drafter, method.accept.needs_raw
        greedy = isinstance(self._drafter, Model) and self._drafter.greedy
        # Rules ask of the first draft alone.
        self._bare = DraftPlan(_GREEDY if greedy else sampling, raw=self._needs_raw)
        self._plan = DraftPlan(
            self._bare.sampling,
            tuple(name for name in method.needs if name in SIGNALS),
            {name: heads[name] for name in sorted(method.needs & heads.keys())},
            self._needs_raw,
        )
        # Runs whose length is known beforehand are drafted in one go: nothing of them is thrown away.
        self._whole = method.length is not None and method.trust.never
        self._head_flops = sum(head.flops for head in self._plan.heads.values())
        self._place, self._run_start = (0, 0), 0  # round, tokens drafted in it; where they begin
        self._stats, self._costs, self._ahead, self._piece = stats, costs, Ahead(ahead), prompt_piece
        self._text = list(prompt)  # for prompt lookup
        self._model_round = 0  # the last round in which the model drafted in its place
        self._models = models

    def answer(self, request: AskDraft | AskScore) -> Generator[Job, Any, Answer]:
        """The jobs that answer one request of the loop; returns the answer."""
        if isinstance(request, AskScore):
            return (yield from self._score(request))
        if isinstance(self._drafter, Lookup):
            return (yield from self._look_up(self._drafter, request))
        drafts = yield from self._propose(request)
        return drafts if request.width > 1 else drafts[0]

    def _look_up(self, drafter: Lookup, request: AskDraft) -> Generator[Job, Any, Draft]:
        began = time.perf_counter()
        self._text[request.start :] = request.tokens
        # A run that the model began is the model's: what is drafted ahead must not change who drafts.
        began_by_model = request.round == self._model_round
        found = [] if began_by_model else look_up(self._text, drafter.n, drafter.least, request.at_most)
        self._stats.draft_s += time.perf_counter() - began
        if found or not drafter.uses_model:
            self._text += found
            return copied(found, self._models.vocab, device=self._models.device, raw=self._needs_raw)
        # The model may have missed what was looked up since it was last asked.
        assert self._draft is not None, "the method falls back on a draft model, and none was given"
        self._model_round = request.round
        # At least one token is left to read: its logits are what the next one is drawn from.
        same = min(_common(self._draft.texts[0], self._text), len(self._text) - 1)
        ask = AskDraft(same, tuple(self._text[same:]), request.round, request.at_most)
        (draft,) = yield from self._propose(ask)
        self._text += draft.tokens
        return draft

    def _propose(self, request: AskDraft) -> Generator[Job, Any, tuple[Draft, ...]]:
        side = self._draft
        assert side is not None, "the method drafts, and no draft model was given"
        side.goto(request.start, request.tokens, request.row)
        yield from self._prefill(side)
        chains = [_GrowingDraft() for _ in side.numbers]
        signals: dict[str, list[float]] = {name: [] for name in (*self._plan.signals, *self._plan.heads)}
        wanted, spent = request.at_most, 0.0
        if request.width == 1 and not self._whole:
            wanted = min(self._ahead.next(), wanted)
        while (left := wanted - len(chains[0].tokens)) > 0:
            rows = self._draft_rows(side, request.round, left)
            steps: list[list[Drafted]] = yield DraftJob(rows)
            # Where one row alone ran x through the model, it will do so again: rows hold the same number of tokens.
            side.cached += min(sum(sum(one.feeds) for one in drafted) for drafted in steps)
            side.after = [drafted[-1].after for drafted in steps]
            for chain, drafted in zip(chains, steps, strict=True):
                for one in drafted:
                    chain.add(one)
            side.append([[one.token for one in drafted] for drafted in steps])
            for one in steps[0]:
                for name, values in signals.items():
                    values.append(one.signals[name])
            self._count_drafts(request.round, steps)
            spent += sum(one.draft_s + one.gate_s for one in steps[0])
        self._ahead.looked(len(chains[0].tokens), spent)
        return tuple(chain.finish(signals, self._models) for chain in chains)

    def _draft_rows(self, side: RequestRows, round: int, count: int) -> list[DraftRow]:
        position = len(side.texts[0])
        place = self._place[1] + 1 if self._place[0] == round else 1
        return [
            DraftRow(
                feed.row, feed.tokens, position, round, self._draws, self._bare if n else self._plan, n, place, count,
                None if feed.tokens else side.after[n],
            )
            for n, feed in enumerate(side.unread())
        ]  # fmt: skip

    def _count_drafts(self, round: int, steps: list[list[Drafted]]) -> None:
        stats, costs = self._stats, self._costs
        before = self._place[1] if self._place[0] == round else 0
        if not before:
            self._run_start = len(self._draft.texts[0]) - len(steps[0]) if self._draft else 0
        self._place = (round, before + len(steps[0]))
        stats.draft_steps += sum(len(one.feeds) for one in steps[0])
        for one in (one for drafted in steps for one in drafted):
            fed = sum(one.feeds)
            stats.draft_tokens += fed
            stats.flops_passes += len(one.feeds) * costs.draft
            stats.flops_tokens += fed * costs.draft
            stats.draft_s += one.draft_s
            stats.gate_s += one.gate_s
        scored = len(steps[0]) * self._head_flops
        stats.flops_passes += scored
        stats.flops_tokens += scored

    def _score(self, request: AskScore) -> Generator[Job, Any, Scores]:
        side, stats = self._target, self._stats
        assert side is not None, "the method calls the target, and no target was given"
        side.goto(request.start, request.tokens, request.row)
        # Without several chains all rows hold the same text: one answer serves.
        side.append(request.chains or [()] * len(side.numbers))
        yield from self._prefill(side, request.closing)
        rows = [TargetRow(feed, self._sampling, self._needs_raw) for feed in side.unread()]
        scored: list[Scored] = yield TargetJob(rows)
        side.cached += len(rows[0].feed.tokens)
        seconds = sum(one.target_s for one in scored)
        laws, raw = scored[0].laws, scored[0].raw
        if request.chains:
            laws = torch.stack([one.laws for one in scored])
            raws = [one.raw for one in scored if one.raw is not None]
            raw = torch.stack(raws) if raws else None
        answer = Scores(self._models.gather(laws), None if raw is None else self._models.gather(raw))
        if request.closing:
            stats.closing_s += seconds
            return answer
        read = sum(len(row.feed.tokens) for row in rows)
        if self._place[0] == request.round:
            self._ahead.ended(request.start + len(request.tokens) - self._run_start)
        stats.target_s += seconds
        stats.target_tokens += read
        stats.flops_passes += self._costs.target
        stats.flops_tokens += read * self._costs.target
        return answer

    def _prefill(self, side: RequestRows, closing: bool = False) -> Generator[Job, Any, None]:
        """The prompt's own pass, counted apart; of a target that only meters it is a part of the closing passes."""
        while feeds := side.prompt_left(self._piece):
            seconds = yield PromptJob(side.rows.name, feeds)
            side.cached += len(feeds[0].tokens)
            if closing:
                self._stats.closing_s += seconds
            else:
                self._stats.prefill_s += seconds


def _stacked(laws: list[Tensor]) -> Tensor:
    return laws[0][None] if len(laws) == 1 else torch.stack(laws)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


_GREEDY = Sampling(temperature=0.0)
