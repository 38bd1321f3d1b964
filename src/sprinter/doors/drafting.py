"""Our draft model beside another engine's target: a row for each request, and draft steps that requests share."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sprinter.decode.adjust import Adjuster, Adjustments
from sprinter.decode.draft import AskDraft, Draft
from sprinter.decode.drafter import Context, Proposals
from sprinter.decode.signals import SIGNALS
from sprinter.doors.rules import HostedRequest
from sprinter.engine.backends.base import Drafted, DraftPlan, DraftRow, PromptRow, RowInput
from sprinter.engine.backends.cuda_graph import backend_of
from sprinter.engine.prefix import DEFAULT, HeldRows
from sprinter.errors import UserError
from sprinter.heads.head import Head
from sprinter.heads.load import load_gate
from sprinter.laws import Sampling
from sprinter.models.choose import make_runner
from sprinter.models.kernels import runs
from sprinter.models.pair import load_models

__all__ = ["DraftModel", "DraftedRequest"]

_log = logging.getLogger("sprinter")


@dataclass(slots=True)
class DraftedRequest:
    """A request whose tokens we draft.

    Attributes:
        hosted: the request. plan: what its draft steps compute. proposals: in place of the draft model, or None.
        adjuster: of the draft's logits to the text, or None.
        error: why the draft model has failed at it, after which it has no more drafts; or None.
    """

    hosted: HostedRequest
    plan: DraftPlan
    proposals: Proposals | None = None
    adjuster: Adjuster | None = None
    error: str | None = None
    _place: tuple[int, int] = field(default=(0, 0))  # round, and tokens drafted in it

    def place(self, drafted: int = 0) -> int:
        """Number of tokens drafted in this round; ``drafted``: to be added."""
        round = self.hosted.sequence.round
        before = self._place[1] if self._place[0] == round else 0
        self._place = (round, before + drafted)
        return self._place[1]


class DraftModel:
    """A draft model with rows.

    Args:
        source: directory, hub id or GGUF file; None: there is no model, and only what copies from the text drafts.
        tokenizer: of the target, which the draft's must agree with.
        gate: directory or hub id; None: no method reads one.
        vocab: last axis of the target's laws, which the draft's are widened or cut to.
        rows: requests at a time. context: tokens of the longest text.

    Raises:
        UserError: the model cannot be loaded, or does not hold texts of this length.
    """

    def __init__(
        self,
        source: str | None,
        *,
        vocab: int,
        rows: int,
        context: int,
        tokenizer: Any = None,
        gate: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
    ) -> None:
        self._size, self._vocab = vocab, vocab
        self.heads: dict[str, Head] = {}
        self._owners: dict[int, Hashable] = {}
        self._like = torch.empty(0, device=None if device == "auto" else device)
        self._backend: Any = None
        if source is None:
            return
        loaded = load_models(source, tokenizer=tokenizer, device=device, dtype=dtype).target
        if loaded.context < context:
            raise UserError(
                f"the draft {source} holds texts of {loaded.context} tokens, and the engine's have up to {context}: "
                f"give max_model_len={loaded.context}, or another draft"
            )
        self._vocab = min(vocab, loaded.vocab_size)
        runner = make_runner(loaded.model, batch=rows, max_len=context)
        self._backend = backend_of(runner, self._vocab, "draft", HeldRows(rows, DEFAULT, runs(loaded.model)))
        if gate is not None:
            self.heads["gate"] = load_gate(gate).to(runner.device)
        self._like = torch.empty(0, device=runner.device)

    @property
    def taus(self) -> dict[str, float]:
        """By kind of head, the threshold that it records."""
        return {kind: head.config.tau for kind, head in self.heads.items()}

    def request(
        self, hosted: HostedRequest, sampling: Sampling, adjustments: Adjustments | None = None
    ) -> DraftedRequest:
        """A request whose tokens this model drafts.

        Raises:
            UserError: its method reads a head, or drafts with a model, and there is none.
        """
        method = hosted.method
        if self._backend is None and method.drafter.uses_model:
            raise UserError(f"method {method.name} drafts with a model: give one, or method lookup")
        if missing := sorted(method.heads - self.heads.keys()):
            raise UserError(f"method {method.name} reads a {missing[0]} head: give one, or another method")
        plan = DraftPlan(
            Sampling(temperature=0.0) if method.drafter.greedy else sampling,
            tuple(name for name in method.needs if name in SIGNALS),
            {name: self.heads[name] for name in sorted(method.needs & self.heads.keys())},
            method.accept.needs_raw,
        )
        adjuster = None
        if adjustments:
            adjuster = Adjuster(adjustments, hosted.sequence.tokens, self._vocab, self._like.device)
        return DraftedRequest(hosted, plan, Proposals.of(method.drafter), adjuster)

    def draft(self, requests: Sequence[tuple[Hashable, DraftedRequest]]) -> None:
        """Draft until each request has its draft; ``requests``: with their names."""
        while asking := [(name, one, ask) for name, one in requests if (ask := one.hosted.wants) is not None]:
            left = [each for each in asking if not self._propose(*each[1:])]
            for name, one, _ in left:
                self._give_row(name, one, {name for name, _ in requests})
            self._read([one for _, one, _ in left])
            made = self._backend.draft([self._step(one, ask) for _, one, ask in left]) if left else []
            for (_, one, _), drafted in zip(left, made, strict=True):
                if isinstance(drafted, Drafted):
                    self._take(one, drafted)
                else:  # of this request alone: the engine goes on with all of them
                    one.error = str(drafted)
                    _log.warning("%s; the request goes on without drafts", drafted)

    def end(self, name: Hashable) -> None:
        """A request has ended: its row is free."""
        for row in [row for row, owner in self._owners.items() if owner == name]:
            del self._owners[row]
            self._backend.end_text(row)

    def _propose(self, one: DraftedRequest, ask: AskDraft) -> bool:
        """Answer with what a proposer copies from the text, or with nothing after an error; whether it did."""
        sequence, hosted = one.hosted.sequence, one.hosted
        if one.error is not None:
            none = self._like.new_empty(0, self._size)
            hosted.answer(Draft((), none, {}, none if one.plan.raw else None))
            return True
        if one.proposals is None:
            return False
        context = Context(
            sequence.tokens, sequence.round, ask.at_most, self._size, hosted.draws, self._like,
            successors=sequence.successors,
        )  # fmt: skip
        draft = one.proposals.draft(context, hosted.method.needs, one.plan.raw)
        if draft is None:
            return False
        if one.adjuster is not None:
            one.adjuster.follow(sequence.tokens)
            draft = one.adjuster.allow(draft)
        hosted.answer(draft)
        return True

    def _give_row(self, name: Hashable, one: DraftedRequest, busy: Collection[Hashable]) -> None:
        """Give a request a row, if it has none: a free one, or that of a request that the engine has set aside."""
        sequence, view = one.hosted.sequence, one.hosted.sequence.draft
        if view.begun and self._owners.get(view.row) == name:
            return
        free = [row for row in range(self._backend.runner.batch) if self._owners.get(row) not in busy]
        text = sequence.tokens[:-1]
        view.row, view.after = self._backend.best_row(free, text), None
        if view.row in self._owners:
            self._backend.end_text(view.row)
        self._owners[view.row] = name
        self._backend.begin_text(view, text)

    def _read(self, requests: Sequence[DraftedRequest]) -> None:
        """Prefill: what of the texts, but for their last tokens, the model has not read."""
        prompts = []
        for one in requests:
            sequence, view = one.hosted.sequence, one.hosted.sequence.draft
            if (end := len(sequence) - 1) - view.read > 1:
                feed = RowInput(view.row, view.read, sequence.tokens[view.read : end])
                prompts.append((view, PromptRow("draft", feed)))
        if prompts:
            self._backend.read([prompt for _, prompt in prompts])
            for view, prompt in prompts:
                view.read, view.after = view.read + len(prompt.feed.tokens), None

    def _step(self, one: DraftedRequest, ask: AskDraft) -> DraftRow:
        hosted, sequence = one.hosted, one.hosted.sequence
        view, method, adjust = sequence.draft, hosted.method, None
        unread = view.unread(sequence.tokens, len(sequence))
        # Runs of fixed length are drafted in one synchronisation, as none of their tokens is dropped.
        count = ask.at_most if method.length is not None and method.trust.never else 1
        if one.adjuster is not None:
            one.adjuster.follow(sequence.tokens)
            adjust, count = one.adjuster.after([()]), 1
        return DraftRow(
            view.row, unread, len(sequence), sequence.round, hosted.draws, one.plan, 0, one.place() + 1, count,
            None if unread else view.after, adjust,
        )  # fmt: skip

    def _take(self, one: DraftedRequest, done: Drafted) -> None:
        view = one.hosted.sequence.draft
        view.read += done.read
        view.after = done.after
        one.place(len(done.tokens))
        stats = one.hosted.record.stats
        stats.draft_steps += done.passes
        stats.draft_tokens += done.read
        raw = None if done.raws is None else self._wide(done.raws)
        one.hosted.answer(Draft(tuple(done.tokens), self._wide(done.laws), done.signals, raw))

    def _wide(self, laws: Tensor) -> Tensor:
        """Laws over the target's ids: those that the draft lacks have probability 0."""
        return pad(laws, (0, self._size - laws.shape[-1]))
