"""The models of a pair with their rows, requests in these rows, and the passes that requests share.

A ``RequestRun`` says what its models must do next, and hands the loop the answers. It runs no model itself: ``advance``
gives the inputs of one request, or of many, to the ``Executor``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sprinter.decode.adjust import Adjuster, Adjustments
from sprinter.decode.decoding import Answer, Asking, LoopRequest
from sprinter.decode.draft import AskDraft, AskGrammar, AskScore, AskTips, Draft, Record, Scores, Tips
from sprinter.decode.draft_heads import BlockText, DraftHeads, HeadDrafts
from sprinter.decode.drafter import Context, Proposals
from sprinter.decode.run_rules import run_rules
from sprinter.decode.sequence import ReadState, TokenSequence
from sprinter.decode.signals import SIGNALS
from sprinter.decode.spec import Method
from sprinter.decode.suffix_index import SuffixIndex
from sprinter.decode.switch import AdaptiveSwitch
from sprinter.engine.backends import base
from sprinter.engine.backends.cuda_graph import backend_of, join
from sprinter.engine.backends.eager import EagerBackend, feed_of_text, leave_tree
from sprinter.engine.backends.greedy import judges_greedily
from sprinter.engine.blocks import block_row, take_block
from sprinter.engine.chains import Chains
from sprinter.engine.logprobs import LogProbs
from sprinter.engine.lookahead import Ahead
from sprinter.engine.prefix import HeldRows
from sprinter.errors import SprinterError
from sprinter.heads.head import Head
from sprinter.laws import Sampling
from sprinter.models.flops import ForwardCosts
from sprinter.models.interface import Runner
from sprinter.random import Draws

__all__ = ["Executor", "RequestRun"]

_ANSWERS = (Draft, Tips, Scores)
_STEPS = 8  # in one pass at most, of a draft of known length: others do not wait for a long one
_UNADJUSTED, _FREE, _GREEDY = Adjustments(), ForwardCosts(), Sampling(temperature=0.0)


class Executor:
    """Both models of a pair, their rows, and the passes over them.

    Args:
        target, draft: runners with the same number of rows; None if no request needs the model.
        vocab: size of the common vocabulary.
        held: what the rows of target and draft hold from earlier texts; None: nothing.

    Attributes:
        like: a tensor with the dtype and device of all laws that requests get: the target's; without it, the draft's.
        decides: as of the draft model's backend. judges: whether its runs go on to the target's verdict.
    """

    def __init__(
        self,
        target: Runner | None,
        draft: Runner | None,
        vocab: int,
        held: tuple[HeldRows | None, HeldRows | None] = (None, None),
    ) -> None:
        self.target = backend_of(target, vocab, "target", held[0]) if target else None
        self.draft = backend_of(draft, vocab, "draft", held[1]) if draft else None
        self.vocab, self.judges = vocab, join(self.draft, self.target)
        self.sync = 0.0 if self.draft is None else self.draft.sync
        self.decides = self.draft is not None and self.draft.decides
        rows = self.target or self.draft
        self.like = torch.empty(0, device=rows.runner.device if rows else "cpu")

    @property
    def models(self) -> list[EagerBackend]:
        """The backends of the models that are there."""
        return [rows for rows in (self.target, self.draft) if rows is not None]

    def gather(self, laws: Tensor) -> Tensor:
        """Move laws of either model to where those of requests are."""
        return laws.to(self.like.device)

    def run(self, inputs: Sequence[base.PassInput]) -> Sequence[base.PassOutput]:
        """Run inputs of one kind (and of one model) in one pass or step; returns their outputs in order.

        An exception that is raised concerns all of them: their rows must not be read again.
        """
        first, given = inputs[0], list[Any](inputs)
        if isinstance(first, AskGrammar):
            return [one.answer() for one in given]
        if isinstance(first, base.PromptRow):
            rows = self.target if first.model == "target" else self.draft
            assert rows is not None
            return rows.read(given)
        rows = self.draft if isinstance(first, base.DraftRow | base.TreeRow) else self.target
        assert rows is not None, "the method asks a model that was not given"
        if isinstance(first, base.DraftRow):
            return rows.draft(given)
        return rows.tips(given) if isinstance(first, base.TreeRow) else rows.score(given)


class RequestRun:
    """One request, from its prompt to the end of its text.

    Args:
        models: the models and their rows.
        row: index of the request's row, the same in both models.
        sequence: its text, which ``loop`` writes.
        heads: by kind, at least those that the method's rules read.
        record: what the loop writes; counts and times are added to its stats.
        ahead: maximum number of draft tokens per answer (one host synchronisation); None: chosen from measured times.
            The text does not depend on it.
        prefill_chunk: maximum size of a prefill chunk in tokens; None: the whole prompt in one chunk.
        adjustments: of both models' logits to the text.
        logprobs: is told the raw laws of all drafts and scores.
        drafting: heads on the target that draft, or ``Blocks`` of the draft model; None: the method has neither.
        switch: is charged for the passes that it shares; None: nothing is.
        earlier: earlier texts, for a proposer.

    Attributes:
        input: what the models must do next; None before the beginning, and at the end.
        over: whether the text has ended, or the request has failed.
        error: why it has failed: logits that are not finite, an exception of a rule or of a pass, an interrupt.
    """

    def __init__(
        self,
        models: Executor,
        row: int,
        sequence: TokenSequence,
        loop: Asking,
        method: Method,
        sampling: Sampling,
        draws: Draws,
        record: Record,
        *,
        heads: Mapping[str, Head],
        costs: ForwardCosts = _FREE,
        ahead: Ahead | int | None = 1,
        prefill_chunk: int | None = None,
        adjustments: Adjustments = _UNADJUSTED,
        logprobs: LogProbs | None = None,
        drafting: DraftHeads | None = None,
        switch: AdaptiveSwitch | None = None,
        earlier: SuffixIndex | None = None,
    ) -> None:
        if missing := sorted(method.heads - heads.keys()):
            raise SprinterError(f"the method reads a head that the pair has not: {', '.join(missing)}")
        self.row, self.sequence, self.over = row, sequence, False
        self.input: base.PassInput | None = None
        self.error: BaseException | None = None
        self._models, self._loop, self._record, self._switch = models, loop, record, switch
        self._ask: LoopRequest | None = None
        sequence.target.row = sequence.draft.row = row
        drafter = method.drafter
        layers = drafter.target_states if drafting is None else drafting.layers
        self._layers = tuple(dict.fromkeys(layers))  # of the target, whose states are kept
        self._sampling, self._draws, self._adjusters = sampling, draws, list[Adjuster]()
        self._needs, self._needs_raw = method.needs, method.accept.needs_raw
        self._judging = {kind: heads[kind] for kind in sorted(method.accept.needs)}
        self._judging_flops = sum(head.flops for head in self._judging.values())
        self._logprobs, self._raw = logprobs, self._needs_raw or logprobs is not None

        def adjuster(rows: EagerBackend | None) -> Adjuster | None:
            if not (adjustments and rows):
                return None
            self._adjusters.append(Adjuster(adjustments, sequence.tokens, rows.vocab, rows.runner.device))
            return self._adjusters[-1]

        self._adjust_p, self._adjust_q = adjuster(models.target), adjuster(models.draft)
        self._allow = Adjuster(adjustments, sequence.tokens, models.vocab) if adjustments.forbids else None
        self._plan = base.DraftPlan(
            _GREEDY if drafter.greedy else sampling,
            tuple(name for name in method.needs if name in SIGNALS),
            {name: heads[name] for name in sorted(method.needs & heads.keys())},
            self._raw,
        )
        self._proposals, self._earlier = Proposals.of(drafter), earlier
        self._left_to_model = False  # whether the proposer has left this draft to the draft model
        self._head_drafts: HeadDrafts | None = None
        if drafting is not None:
            own, self._head_draft_flops = adjuster(models.target or models.draft), drafting.flops
            self._head_drafts = HeadDrafts(
                drafting.begin(), self._plan.sampling, draws, self._plan.signals, self._raw, models.vocab,
                own, drafting.kind, drafter,
            )  # fmt: skip
        # Runs of fixed length are drafted in one synchronisation, as none of their tokens is dropped.
        self._whole = method.length is not None and method.trust.never
        self._head_flops = sum(head.flops for head in self._plan.heads.values())
        self._round = self._place = self._run_start = 0  # tokens drafted in a round, and where they begin
        self._stats, self._costs, self._chunk = record.stats, costs, prefill_chunk
        self._ahead = ahead if isinstance(ahead, Ahead) else Ahead(ahead)
        goes_on = models.judges and not (self._layers or self._judging or adjustments)
        self._chains = Chains.of(sequence, method, sampling, self._raw, draws) if goes_on else None
        self._greedy = judges_greedily(method, sampling, draws)
        self._seen: int | None = None  # tokens whose states are shown; None: all that the target has read

    def begin(self) -> None:
        """Find the first input."""
        try:
            self._ask = next(self._loop)
            self._find(self._ask)
        except Exception as error:
            self.fail(error)

    def take(self, done: base.PassOutput) -> None:
        """Take what the models made of ``input``, or the error of this request's row."""
        fault = done if isinstance(done, Exception) else None
        for one in self._adjusters:
            fault = one.error or fault
        if fault is not None:
            self.fail(fault)
            return
        given, ask, self.input = self.input, self._ask, None
        assert ask is not None
        try:
            answer = self._answer(ask, given, done)
            self._find(ask if answer is None else self._send(answer))
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the request with an error. What was final stays, its rows are cleared when they are given back."""
        self.error, self.over, self.input, self._ask, self._switch = error, True, None, None, None
        self._record.finish = "error" if isinstance(error, Exception) else "interrupted"
        self._loop.close()

    @property
    def charged(self) -> AdaptiveSwitch | None:
        """What is charged for the passes of this round; None: nothing, as in plain decoding."""
        return self._switch if self._switch is not None and self._switch.charged else None

    def _send(self, answer: Answer) -> LoopRequest | None:
        """The next request of the loop; None: the text has ended."""
        self._left_to_model = False
        try:
            self._ask = self._loop.send(answer)
        except StopIteration:
            self._ask, self.over, self._switch = None, True, None  # other rows no longer count it
        finally:
            if self._logprobs is not None:
                self._logprobs.settle(self._record.tokens)
        return self._ask

    # --- from requests of the loop to inputs of the models ---
    def _find(self, ask: LoopRequest | None) -> None:
        """Find the next input; requests that need no pass are answered at once."""
        while ask is not None:
            found = self._next(ask)
            if not isinstance(found, _ANSWERS):
                self.input = found
                return
            ask = self._send(found)

    def _next(self, ask: LoopRequest) -> base.PassInput | Draft | Tips | Scores:
        """What the models must do next for a request; its answer, if nothing."""
        target, models = self.sequence.target, self._models
        if isinstance(ask, AskScore):
            if self._chains is not None and (known := self._chains.known(ask)) is not None:
                return self._scores(ask, self._target_row(ask), known)
            return self._prompt_left(target, models.target) or self._target_row(ask)
        if isinstance(ask, AskGrammar):
            return ask
        draft, heads, round = self.sequence.draft, self._head_drafts, self.sequence.round
        if (self._layers or self._chains) and (left := self._prompt_left(target, models.target)):
            return left  # its states are asked for, or its verdict behind the draft
        if isinstance(ask, AskDraft) and self._proposals is not None and not self._left_to_model:
            proposed = self._propose(self._proposals, ask)
            if proposed is not None:
                return proposed
            self._left_to_model = True
        if heads is not None and not heads.left_to_model(round):
            block = heads.heads
            if isinstance(block, BlockText) and not block.answers(ask):
                return self._prompt_left(draft, models.draft) or block_row(block, ask, self._plan)
            answer = self._ask_heads(heads, ask)
            if not heads.left_to_model(round):
                return answer
        left = self._prompt_left(draft, models.draft)
        return left or (self._draft_row(ask) if isinstance(ask, AskDraft) else self._tree_row(ask))

    def _prompt_left(self, view: ReadState, rows: EagerBackend | None) -> base.PromptRow | None:
        """The next chunk of the prompt, but for its last token, that a model has not read."""
        assert rows is not None, "the method asks a model that was not given"
        end, tokens = self.sequence.prompt - 1, self.sequence.tokens
        if view.begun and view.read >= end:
            return None
        layers = self._layers if view is self.sequence.target else ()
        if not view.begun:
            began = time.perf_counter()
            # Hidden states are not cached: with layers the whole prompt is read.
            rows.begin_text(view, () if layers else tokens[:end])
            self._count_prefill(view, view.read, time.perf_counter() - began)
        if view.read >= end:
            return None
        stop = end if self._chunk is None else min(end, view.read + self._chunk)
        return base.PromptRow(rows.name, base.RowInput(view.row, view.read, tokens[view.read : stop]), layers)

    def _draft_row(self, ask: AskDraft) -> base.DraftRow:
        sequence, view = self.sequence, self.sequence.draft
        leave_tree(view, self._models.draft)
        unread = view.unread(sequence.tokens, len(sequence))
        whole = 0 if self._chains is None else ask.at_most
        ahead = self._ahead.fixed or self._ahead.next(whole) if ask.ahead is None else min(ask.ahead, _STEPS)
        wanted = min(_STEPS if self._whole else ahead, ask.at_most)
        if self._round != sequence.round:
            self._round, self._place, self._run_start = sequence.round, 0, len(sequence)
        adjust = None
        if self._adjust_q is not None:
            self._adjust_q.follow(sequence.tokens)
            adjust, wanted = self._adjust_q.after([()]), 1  # the next token's logits depend on this token
        rules = run_rules(ask.run) if ask.run and self._models.decides else None
        chain = None if self._chains is None else self._chains.row(ask, wanted, rules)
        return base.DraftRow(
            view.row, unread, len(sequence), sequence.round, self._draws, self._plan, 0, self._place + 1, wanted,
            None if unread else view.after, adjust, rules, chain,
        )  # fmt: skip

    def _tree_row(self, ask: AskTips) -> base.TreeRow:
        sequence, view = self.sequence, self.sequence.draft
        if not ask.nodes:
            leave_tree(view, self._models.draft)
            if self._adjust_q is not None:
                self._adjust_q.follow(sequence.tokens)
        view.grow(len(sequence), ask.nodes, ask.parents)
        adjust = None if self._adjust_q is None else self._adjust_q.after(ask.paths)
        feed = feed_of_text(view, sequence.tokens, len(sequence))
        return base.TreeRow(feed, len(ask.paths), self._plan, ask.laws, ask.top, adjust)

    def _target_row(self, ask: AskScore) -> base.TargetRow:
        sequence = self.sequence
        view = sequence.target
        if view.nodes:
            leave_tree(view, self._models.target)
        if ask.nodes:
            view.grow(ask.end, ask.nodes, ask.parents)
        feed, adjust = feed_of_text(view, sequence.tokens, ask.end), None
        assert feed.start == ask.start, "laws are asked for behind tokens that the target has read"
        if self._adjust_p is not None:
            adjust = self._adjust_p.along(sequence.tokens, feed.start, feed.tokens, feed.parents)
        layers = (*self._layers, base.FINAL) if self._judging else self._layers
        draft = sequence.tree.tokens  # without one what follows is drawn with the other rows'
        draw = None if draft or ask.closing else (self._draws, sequence.round, ask.end)
        chain = None if self._chains is None else self._chains.drafted(ask)
        judged = len(draft) if self._greedy and not (ask.nodes or ask.closing) else 0
        return base.TargetRow(feed, self._sampling, self._raw, layers, adjust, draw, chain, judged)

    # --- answers without a pass ---
    def _propose(self, proposals: Proposals, ask: AskDraft) -> Draft | AskGrammar | None:
        sequence, models = self.sequence, self._models
        if self._allow is not None:
            self._allow.follow(sequence.tokens)
        states, began = self._states(), time.perf_counter()
        place, known = (sequence.tokens, sequence.round, ask.at_most), sequence.successors
        asked = Context(*place, models.vocab, self._draws, models.like, states, self._earlier, known)
        draft = proposals.draft(asked, self._needs, self._needs_raw)
        self._stats.draft_s += time.perf_counter() - began
        if draft is None or self._allow is None:
            return draft
        self._proposed = draft
        kept = self._allow.kept(draft)
        return self._allow.allow(draft) if kept is None else AskGrammar(sequence, kept)

    def _states(self) -> dict[int, Tensor]:
        """The target's hidden states of the tokens that it has read, by layer."""
        if not self._layers:
            return {}
        view, rows = self.sequence.target, self._models.target
        leave_tree(view, rows)
        end = view.read if self._seen is None else min(self._seen, view.read)
        empty = self._models.like.new_empty(0, 0 if rows is None else rows.runner.hidden_size)
        return {layer: view.states.get(layer, empty)[:end] for layer in self._layers}

    def _ask_heads(self, heads: HeadDrafts, ask: AskDraft | AskTips) -> Draft | Tips:
        """Draft with heads on the target, in this row alone."""
        sequence, before = self.sequence, heads.counts
        goes_on = isinstance(ask, AskTips) and len(ask.nodes) > 0
        states = {} if goes_on else self._states()
        began = time.perf_counter()
        with torch.inference_mode():
            if not goes_on:
                heads.read(sequence.tokens, states)
            if isinstance(ask, AskDraft):
                answer: Draft | Tips = heads.draft(ask, ask.at_most if self._whole else 1)
            else:
                answer = heads.tips(ask)
        steps, tokens = (now - then for now, then in zip(heads.counts, before, strict=True))
        self._count_drafts(steps, tokens, time.perf_counter() - began, self._head_draft_flops)
        if isinstance(answer, Draft):
            return self._without_raw(answer)
        if self._logprobs is not None and answer.raws:
            self._logprobs.read_tips(len(sequence), heads.paths, answer.raws)
        return answer if self._needs_raw else answer._replace(raws=())

    # --- from what the models made to answers ---
    def _answer(self, ask: LoopRequest, given: base.PassInput | None, done: base.PassOutput) -> Answer | None:
        """The answer for the loop; None: its request needs more."""
        if isinstance(given, base.TargetRow):
            assert isinstance(ask, AskScore) and isinstance(done, base.Scored)
            return self._scores(ask, given, done)
        if isinstance(given, AskGrammar):
            if isinstance(done, int) and self._allow is not None:
                return self._allow.allow(self._proposed, done)
            return cast("Sequence[int]", done)
        if isinstance(given, base.PromptRow) and isinstance(done, base.PromptRead):
            view = self.sequence.target if given.model == "target" else self.sequence.draft
            view.was_read(given.feed.start, len(given.feed.tokens), given.layers, done.states)
            self._count_prefill(view, done.copied, done.seconds)
            return None
        if isinstance(given, base.DraftRow) and isinstance(done, base.Drafted):
            if self._chains is not None:
                self._chains.keep(given, done)
            return self._draft(done)
        assert isinstance(given, base.TreeRow) and isinstance(done, base.TipLaws)
        if given.bare and self._head_drafts is not None:
            self._count_drafts(1, len(given.feed.tokens), done.draft_s, self._costs.draft)
            take_block(self._head_drafts.heads, self.sequence, done, self._models.gather)
            return None
        assert isinstance(ask, AskTips)
        return self._tips(ask, given, done)

    def _draft(self, done: base.Drafted) -> Draft:
        view, gather, n = self.sequence.draft, self._models.gather, len(done.tokens)
        view.read, view.after = view.read + done.read, done.after
        self._place += n
        heads, each = n * self._head_flops, self._costs.draft
        self._count_drafts(done.passes, done.read, done.draft_s, each, heads)
        self._stats.gate_s += done.gate_s
        if self._ahead.fixed is None:
            self._ahead.synchronised(n, done.draft_s + done.gate_s)
        raw = None if done.raws is None else gather(done.raws)
        return self._without_raw(Draft(tuple(done.tokens), gather(done.laws), done.signals, raw))

    def _without_raw(self, draft: Draft) -> Draft:
        """Note the raw laws of a draft, and leave out those that no rule reads."""
        if self._logprobs is None:
            return draft
        self._logprobs.drafted(len(self.sequence), draft)
        return draft if self._needs_raw else draft._replace(raw=None)

    def _tips(self, ask: AskTips, given: base.TreeRow, done: base.TipLaws) -> Tips:
        gather = self._models.gather
        self.sequence.draft.was_read(given.feed.start, len(given.feed.tokens))
        self._count_drafts(1, len(given.feed.tokens), done.draft_s, self._costs.draft)
        laws, raws = ([] if one is None else list(gather(one)) for one in (done.laws, done.raws))
        if self._logprobs is not None:
            self._logprobs.read_tips(len(self.sequence), ask.paths, raws)
        return Tips(laws, done.top, done.signals, raws if self._needs_raw else ())

    def _scores(self, ask: AskScore, given: base.TargetRow, done: base.Scored) -> Scores:
        stats, gather, layers = self._stats, self._models.gather, self._layers
        read, states = len(given.feed.tokens), done.states[: len(layers)] if layers else ()
        self.sequence.target.was_read(given.feed.start, read, layers, states)
        if done.spent:
            stats.remote.update(done.spent)
        if isinstance(laws := done.laws, Tensor):
            raw = None if done.raw is None else gather(done.raw)
            if self._logprobs is not None and raw is not None:
                self._logprobs.scored(ask, raw)
            judged = {kind: gather(head(done.states[-1])) for kind, head in self._judging.items()}
            kept = raw if self._needs_raw else None
            answer = Scores(gather(laws), kept, judged, done.token, done.accepted, done.metered)
        else:
            answer = base.GreedyScores(laws, done.likeliest, done.token, done.accepted)
        if ask.closing:  # its states must change no draft
            self._seen = ask.start if self._seen is None else self._seen
            stats.closing_s += done.target_s
            return answer
        self._seen = None
        if self._ahead.fixed is None and self._round == self.sequence.round:
            self._ahead.ended(ask.end - self._run_start)
        stats.target_s += done.target_s
        stats.target_tokens += read
        stats.flops_passes += self._costs.target + read * self._judging_flops
        stats.flops_tokens += read * (self._costs.target + self._judging_flops)
        return answer

    def _count_drafts(self, steps: int, tokens: int, seconds: float, each: float, more: float = 0.0) -> None:
        """Count draft steps over so many tokens; ``each``: FLOPs of a token, ``more``: of heads."""
        stats = self._stats
        stats.draft_steps += steps
        stats.draft_tokens += tokens
        stats.draft_s += seconds
        stats.flops_passes += steps * each + more
        stats.flops_tokens += tokens * each + more

    def _count_prefill(self, view: ReadState, reused: int, seconds: float) -> None:
        stats = self._stats
        if view is self.sequence.target:
            stats.cached_tokens += reused
        else:
            stats.draft_cached_tokens += reused
        if isinstance(self._ask, AskScore) and self._ask.closing:
            stats.closing_s += seconds
        else:
            stats.prefill_s += seconds
