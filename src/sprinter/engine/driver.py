"""The driver of one request.

``RowDriver`` turns each request of the loop into jobs: a prefill chunk, a draft step, a target forward pass. It runs no
model itself: ``Models.run`` runs the jobs of one request, or of many at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sprinter.decode.adjust import Adjuster, Adjustments
from sprinter.decode.draft import AskDraft, AskScore, AskTips, Draft, Scores, Stats, Tips
from sprinter.decode.draft_heads import DraftHeads, HeadDrafts
from sprinter.decode.drafter import Context, Proposals
from sprinter.decode.row import Answer, Asking, LoopRequest
from sprinter.decode.signals import SIGNALS
from sprinter.decode.spec import Method
from sprinter.engine.ahead import Ahead
from sprinter.engine.jobs import Costs, DraftJob, Job, Jobs, Models, PromptJob, PromptRead, TargetJob, TreeJob
from sprinter.engine.logprobs import LogProbs
from sprinter.engine.prefix import common_prefix
from sprinter.engine.rows import FINAL, CacheRows, RequestRow
from sprinter.engine.steps import Drafted, DraftPlan, DraftRow, Scored, TargetRow
from sprinter.engine.trees import TipLaws, TreeRow
from sprinter.errors import SprinterError
from sprinter.heads.head import Head
from sprinter.laws import Sampling
from sprinter.random import Draws

__all__ = ["RowDriver"]


@dataclass(slots=True)
class _GrowingDraft:
    """A draft under construction."""

    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    raws: list[Tensor] = field(default_factory=list)

    def add(self, one: Drafted) -> None:
        self.tokens.append(one.token)
        self.laws.append(one.law)
        if one.raw is not None:
            self.raws.append(one.raw)

    def finish(self, signals: Mapping[str, Sequence[float]], models: Models) -> Draft:
        values = {name: torch.tensor(each, dtype=torch.float64) for name, each in signals.items()}
        raw = models.gather(_stacked(self.raws)) if self.raws else None
        laws = models.gather(_stacked(self.laws))
        return Draft(tuple(self.tokens), laws, values, raw)


_UNADJUSTED = Adjustments()
_GREEDY = Sampling(temperature=0.0)


class RowDriver:
    """The driver of one request: holds its text in both models' rows, and yields jobs to answer the loop.

    Args:
        models: the models and their rows.
        number: the request's row, the same in both models.
        heads: by kind, at least those that the method's rules read.
        drafting: heads on the target that draft; None: there are none.
        prompt: token ids.
        ahead: maximum number of draft tokens per answer (one host synchronisation); None: chosen from measured times.
            The text does not depend on it.
        prefill_chunk: maximum size of a prefill chunk in tokens; None: the whole prompt in one chunk.
        stats: counts and times are added here.
        adjustments: of both models' logits to the text.
        logprobs: is told the raw laws of all drafts and scores.
    """

    def __init__(
        self,
        models: Models,
        number: int,
        heads: Mapping[str, Head],
        prompt: Sequence[int],
        method: Method,
        sampling: Sampling,
        draws: Draws,
        stats: Stats,
        costs: Costs = Costs(),
        ahead: int | None = 1,
        prefill_chunk: int | None = None,
        adjustments: Adjustments = _UNADJUSTED,
        logprobs: LogProbs | None = None,
        drafting: DraftHeads | None = None,
    ) -> None:
        if missing := sorted(method.heads - heads.keys()):
            raise SprinterError(f"the method reads a head that the pair has not: {', '.join(missing)}")
        drafter = method.drafter
        layers = drafting.layers if drafter.by_heads and drafting is not None else drafter.target_states
        self._layers = tuple(dict.fromkeys(layers))
        self._target = RequestRow(models.target, number, prompt, self._layers) if models.target else None
        self._draft = RequestRow(models.draft, number, prompt) if models.draft else None
        self._proposals = Proposals.of(drafter)
        self._sampling, self._draws = sampling, draws
        self._needs, self._needs_raw = method.needs, method.accept.needs_raw
        self._judging = {kind: heads[kind] for kind in sorted(method.accept.needs)}
        self._logprobs, self._raw = logprobs, self._needs_raw or logprobs is not None

        def adjuster(settings: Adjustments, rows: CacheRows | None) -> Adjuster | None:
            return Adjuster(settings, prompt, rows.vocab, rows.runner.device) if settings and rows else None

        self._adjust_p, self._adjust_q = (adjuster(adjustments, one) for one in (models.target, models.draft))
        self._allow = Adjuster(adjustments, prompt, models.vocab) if adjustments.forbids else None
        self._plan = DraftPlan(
            _GREEDY if drafter.greedy else sampling,
            tuple(name for name in method.needs if name in SIGNALS),
            {name: heads[name] for name in sorted(method.needs & heads.keys())},
            self._raw,
        )
        self._head_drafts: HeadDrafts | None = None
        if drafter.by_heads:
            assert drafting is not None, "the method drafts with heads, and none were given"
            self._adjust_q, self._head_draft_flops = adjuster(adjustments, models.target), drafting.flops
            self._head_drafts = HeadDrafts(
                drafting.begin(), prompt, self._plan.sampling, draws, self._plan.signals, self._raw, models.vocab,
                self._adjust_q, drafting.kind,
            )  # fmt: skip
        # Runs of fixed length are drafted in one synchronisation, as none of their tokens is dropped.
        self._whole = method.length is not None and method.trust.never
        self._head_flops = sum(head.flops for head in self._plan.heads.values())
        # (round, tokens drafted in it), and where they begin in the text.
        self._place, self._run_start = (0, 0), 0
        self._stats, self._costs, self._ahead, self._chunk = stats, costs, Ahead(ahead), prefill_chunk
        self._text = list(prompt)  # for a proposer
        self._seen: int | None = None  # tokens whose states are shown; None: all that the target has read
        self._paths: list[
            tuple[int, ...]
        ] = []  # tokens from the text to each node that the draft has read of a tree
        self._models = models

    def answer(self, request: LoopRequest) -> Generator[Job, Any, Answer]:
        """Yield the jobs for one request of the loop; returns the answer."""
        if isinstance(request, AskScore):
            return (yield from self._score(request))
        if self._head_drafts is not None:
            return (yield from self._ask_heads(self._head_drafts, request))
        if isinstance(request, AskTips):
            return (yield from self._read_tips(request))
        if self._proposals is not None:
            return (yield from self._ask_proposer(self._proposals, request))
        return (yield from self._draft_chain(request))

    def jobs(self, loop: Asking, answered: Callable[[], None] = lambda: None) -> Jobs:
        """The jobs of a whole text; ``answered`` is called after each answer that the loop has taken."""
        question = next(loop, None)
        while question is not None:
            answer = yield from self.answer(question)
            try:
                question = loop.send(answer)
            except StopIteration:
                question = None
            answered()

    def _ask_proposer(self, proposals: Proposals, request: AskDraft) -> Generator[Job, Any, Draft]:
        self._text[request.start :] = request.tokens
        if self._allow is not None:
            self._allow.rewind(request.start)
            self._allow.read(self._text)
        states = yield from self._states_of(self._text)
        began, models = time.perf_counter(), self._models
        context = Context(
            tuple(self._text), request.round, request.at_most, models.vocab, self._draws, models.like, states
        )
        draft = proposals.draft(context, self._needs, self._needs_raw)
        self._stats.draft_s += time.perf_counter() - began
        if draft is None:
            assert self._draft is not None, "the method falls back on a draft model, and none was given"
            # The model may not have read the tokens proposed since its last draft. At least one token must be left to
            # read: its logits give the law of the next token.
            same = min(common_prefix(self._draft.text, self._text), len(self._text) - 1)
            ask = AskDraft(same, tuple(self._text[same:]), request.round, request.at_most)
            draft = yield from self._draft_chain(ask)
        elif self._allow is not None:
            draft = self._allow.allow(draft)
        self._text += draft.tokens
        return draft

    def _states_of(self, text: Sequence[int]) -> Generator[Job, Any, dict[int, Tensor]]:
        """The target's hidden states of a text's tokens that it has read, by layer."""
        row = self._target
        if row is None or not self._layers:
            return {}
        yield from self._prefill(row)
        made, empty = row.states_of(text), self._models.like.new_empty(0, self._models.target_size)
        return {layer: made.get(layer, empty)[: self._seen] for layer in self._layers}

    def _ask_heads(self, heads: HeadDrafts, request: AskDraft | AskTips) -> Generator[Job, Any, Draft | Tips]:
        """Draft with heads on the target, in this row alone."""
        goes_on = not heads.follow(request)
        states = None if goes_on else (yield from self._states_of(heads.text))
        began, before, stats = time.perf_counter(), heads.counts, self._stats
        with torch.inference_mode():
            if states is not None:
                heads.read(states)
            if isinstance(request, AskDraft):
                answer: Draft | Tips = heads.draft(request, request.at_most if self._whole else 1)
            else:
                answer = heads.tips(request)
        steps, tokens = (now - then for now, then in zip(heads.counts, before, strict=True))
        stats.draft_s += time.perf_counter() - began
        stats.draft_steps += steps
        stats.draft_tokens += tokens
        stats.flops_passes += steps * self._head_draft_flops
        stats.flops_tokens += tokens * self._head_draft_flops
        if isinstance(answer, Draft):
            return self._drafted(len(heads.text) - len(answer.tokens), answer)
        if self._logprobs is not None and answer.raws:
            self._logprobs.read_tips(len(heads.text), heads.paths, answer.raws)
        return answer if self._needs_raw else answer._replace(raws=())

    def _draft_chain(self, request: AskDraft) -> Generator[Job, Any, Draft]:
        row = self._draft
        assert row is not None, "the method drafts, and no draft model was given"
        row.goto(request.start, request.tokens)
        if self._adjust_q is not None:
            self._adjust_q.rewind(request.start)
        yield from self._prefill(row)
        growing, start = _GrowingDraft(), len(row.text)
        signals: dict[str, list[float]] = {name: [] for name in (*self._plan.signals, *self._plan.heads)}
        wanted = request.at_most if self._whole else min(self._ahead.next(), request.at_most)
        spent = 0.0
        while (left := wanted - len(growing.tokens)) > 0:
            drafted: list[Drafted] = yield DraftJob(self._draft_row(row, request.round, left))
            row.cached += sum(sum(one.feeds) for one in drafted)
            row.after = drafted[-1].after
            for one in drafted:
                growing.add(one)
                for name, values in signals.items():
                    values.append(one.signals[name])
            row.text += [one.token for one in drafted]
            self._count_drafts(request.round, drafted)
            spent += sum(one.draft_s + one.gate_s for one in drafted)
        self._ahead.synchronised(len(growing.tokens), spent)
        return self._drafted(start, growing.finish(signals, self._models))

    def _drafted(self, start: int, draft: Draft) -> Draft:
        """Note the raw laws of a draft after ``start`` tokens of text, and leave out those that no rule reads."""
        if self._logprobs is None:
            return draft
        self._logprobs.drafted(start, draft)
        return draft if self._needs_raw else replace(draft, raw=None)

    def _draft_row(self, row: RequestRow, round: int, count: int) -> DraftRow:
        feed = row.unread()
        place = self._place[1] + 1 if self._place[0] == round else 1
        adjust = None
        if self._adjust_q is not None:
            self._adjust_q.read(row.text)
            adjust, count = self._adjust_q.after([()]), 1  # the next token's logits depend on this token
        return DraftRow(
            feed.row, feed.tokens, len(row.text), round, self._draws, self._plan, 0, place, count,
            None if feed.tokens else row.after, adjust,
        )  # fmt: skip

    def _count_drafts(self, round: int, drafted: list[Drafted]) -> None:
        stats, costs = self._stats, self._costs
        before = self._place[1] if self._place[0] == round else 0
        if not before:
            self._run_start = len(self._draft.text) - len(drafted) if self._draft else 0
        self._place = (round, before + len(drafted))
        for one in drafted:
            fed = sum(one.feeds)
            stats.draft_steps += len(one.feeds)
            stats.draft_tokens += fed
            stats.flops_passes += len(one.feeds) * costs.draft
            stats.flops_tokens += fed * costs.draft
            stats.draft_s += one.draft_s
            stats.gate_s += one.gate_s
        scored = len(drafted) * self._head_flops
        stats.flops_passes += scored
        stats.flops_tokens += scored

    def _read_tips(self, request: AskTips) -> Generator[Job, Any, Tips]:
        """Read the newest nodes of a tree, or the text that it grows from."""
        row, stats, costs, models = self._draft, self._stats, self._costs, self._models
        assert row is not None, "the method drafts, and no draft model was given"
        if request.nodes:
            row.grow(request.nodes, request.parents)
            before = [self._paths[parent] if parent >= 0 else () for parent in request.parents]
            paths = [(*path, x) for path, x in zip(before, request.nodes, strict=True)]
            self._paths += paths
        else:
            row.goto(request.start, request.tokens, request.path)
            if self._adjust_q is not None:
                self._adjust_q.rewind(request.start)
                self._adjust_q.read(row.text)
            yield from self._prefill(row)
            self._paths, paths = [], [()]
        feed = row.unread()
        adjust = None if self._adjust_q is None else self._adjust_q.after(paths)
        step: TipLaws = yield TreeJob(
            TreeRow(
                feed,
                len(paths),
                self._plan.sampling,
                request.laws,
                request.top,
                self._raw,
                self._plan.signals,
                adjust,
            )
        )
        row.was_read(feed)
        stats.draft_steps += 1
        stats.draft_tokens += len(feed.tokens)
        stats.flops_passes += costs.draft
        stats.flops_tokens += len(feed.tokens) * costs.draft
        stats.draft_s += step.draft_s
        laws, raws = ([] if one is None else list(models.gather(one)) for one in (step.laws, step.raws))
        if self._logprobs is not None:
            self._logprobs.read_tips(len(row.text), paths, raws)
        return Tips(laws, step.top, step.signals, raws if self._needs_raw else ())

    def _score(self, request: AskScore) -> Generator[Job, Any, Scores]:
        row, stats = self._target, self._stats
        assert row is not None, "the method calls the target, and no target was given"
        linear = len(request.tokens) - len(request.parents)
        row.goto(request.start, request.tokens[:linear], request.path)
        if self._adjust_p is not None:
            self._adjust_p.rewind(request.start)
        yield from self._prefill(row, request.closing)
        row.grow(request.tokens[linear:], request.parents)
        feed, adjust = row.unread(), None
        if self._adjust_p is not None:
            adjust = self._adjust_p.along(row.text, feed.start, feed.tokens, feed.parents)
        layers = (*row.layers, FINAL) if self._judging else row.layers
        scored: Scored = yield TargetJob(TargetRow(feed, self._sampling, self._raw, layers, adjust))
        row.was_read(feed, scored.states[: len(row.layers)])
        gather = self._models.gather
        raw = None if scored.raw is None else gather(scored.raw)
        if self._logprobs is not None and raw is not None:
            self._logprobs.scored(request, raw)
        judged = {kind: gather(head(scored.states[-1])) for kind, head in self._judging.items()}
        answer = Scores(gather(scored.laws), raw if self._needs_raw else None, judged)
        if request.closing:  # the states that it has read must change no draft
            self._seen = request.start + len(request.path) if self._seen is None else self._seen
            stats.closing_s += scored.target_s
            return answer
        self._seen = None
        if self._place[0] == request.round:
            self._ahead.ended(request.start + linear - self._run_start)
        read = len(feed.tokens)
        stats.target_s += scored.target_s
        stats.target_tokens += read
        heads = read * sum(head.flops for head in self._judging.values())
        stats.flops_passes += self._costs.target + heads
        stats.flops_tokens += read * self._costs.target + heads
        return answer

    def _prefill(self, row: RequestRow, closing: bool = False) -> Generator[Job, Any, None]:
        """Run the prompt's prefill, counted separately; if ``closing``, it counts as a closing forward pass."""
        if not row.begun:
            began = time.perf_counter()
            self._count_prefill(row, row.begin(), time.perf_counter() - began, closing)
        while (feed := row.prompt_left(self._chunk)) is not None:
            done: PromptRead = yield PromptJob(row.rows.name, feed, row.layers)
            row.was_read(feed, done.states)
            self._count_prefill(row, done.copied, done.seconds, closing)

    def _count_prefill(self, row: RequestRow, reused: int, seconds: float, closing: bool) -> None:
        stats = self._stats
        if row is self._target:
            stats.cached_tokens += reused
        else:
            stats.draft_cached_tokens += reused
        if closing:
            stats.closing_s += seconds
        else:
            stats.prefill_s += seconds


def _stacked(laws: list[Tensor]) -> Tensor:
    return laws[0][None] if len(laws) == 1 else torch.stack(laws)
