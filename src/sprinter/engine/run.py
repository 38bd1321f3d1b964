"""One request under way: what was asked, what came of it so far, and the jobs that are left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from sprinter.decode.draft import Record, Token
from sprinter.decode.loop import Limits, decode
from sprinter.decode.state import RuleState
from sprinter.engine.captured import CapturedDraftSteps, CapturedTargetPasses
from sprinter.engine.driver import Costs, Jobs, Models, RowDriver
from sprinter.engine.ending import Detokenizer, Ending, cut_at_stop
from sprinter.engine.generation import Generation, Request
from sprinter.engine.pool import RunnerPool
from sprinter.engine.prompt import encode
from sprinter.errors import UserError
from sprinter.heads.head import KINDS, Head
from sprinter.models.choose import runner_kind
from sprinter.models.flops import forward_flops
from sprinter.models.pair import LoadedPair, check_request
from sprinter.random import AddressedDraws

__all__ = ["Parts", "Run", "render"]


class Parts:
    """What requests are served with: two models, a tokenizer, heads, and caches on loan.

    Attributes:
        heads: by kind, made for the draft of ``models``.
    """

    def __init__(self, models: LoadedPair, heads: Mapping[str, Head]) -> None:
        self.models, self.heads = models, heads
        self.targets = RunnerPool(models.target)
        self.drafts = RunnerPool(models.draft) if models.draft else None
        self.costs = Costs(
            forward_flops(models.target.model.config),
            forward_flops(models.draft.model.config) if models.draft else 0.0,
        )

    @property
    def taus(self) -> dict[str, float]:
        """By kind of head, the threshold that it records."""
        return {kind: head.config.tau for kind, head in self.heads.items()}

    def without_text(self) -> Parts:
        """The same models, heads and caches for requests whose ids alone are wanted: no text is made."""
        quiet = copy(self)
        quiet.models = replace(self.models, tokenizer=None)
        return quiet

    def take(self, max_len: int, rows: int, needs_target: bool, needs_draft: bool) -> Models:
        """Rows that hold ``max_len`` tokens, in the models that are needed, on loan."""
        target = self.targets.take(max_len, rows) if needs_target else None
        draft = self.drafts.take(max_len, rows) if self.drafts and needs_draft else None
        return Models(target, draft, self.models.vocab_size, CapturedDraftSteps, CapturedTargetPasses)

    def give_back(self, models: Models) -> None:
        """Return what was on loan, in whatever state it is."""
        for rows, pool in ((models.target, self.targets), (models.draft, self.drafts)):
            if rows is not None and pool is not None:
                pool.give_back(rows.runner)


class Run:
    """One request. It needs rows to do work: ``jobs`` says which, ``steps`` does all of it with a runner of its own.

    Attributes:
        record: tokens and counts so far.
        rows: rows that it takes in each model.
        length: the most tokens that a row must hold.
        needs_target, needs_draft: whether the model may be asked.

    Raises:
        UserError: what is wrong with the request and how to mend it.
    """

    def __init__(self, parts: Parts, prompt: str | Sequence[int], request: Request) -> None:
        method = request.method.settle(parts.taus)
        self._parts, self.request = parts, replace(request, method=method)
        RuleState.begin(method.trust, method.stop, request.rules)  # refused before any work
        self.record = Record()
        self._ids = encode(prompt, parts.models)
        self._check()
        ending = Ending(len(self._ids), parts.models.target.eos_ids, request.stop, self.tokenizer)
        self._limits = Limits(request.max_new_tokens, ending)
        self.record.stats.lossless = method.lossless(request.sampling.greedy)
        self.rows = method.drafter.drafts
        self.length = len(self._ids) + request.max_new_tokens
        self.needs_target = method.needs_target or request.meter == "complete"
        self.needs_draft = method.drafter.uses_model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The pair's."""
        return self._parts.models.tokenizer

    def jobs(self, models: Models, numbers: Sequence[int], prompt_piece: int | None = None) -> Jobs:
        """The whole request, as jobs for some rows of the models; ends when the text does."""
        request, record, draws = self.request, self.record, AddressedDraws(self.request.seed)
        method, complete = request.method, request.meter == "complete"
        driver = RowDriver(
            models, numbers, self._parts.heads, self._ids, method, request.sampling, draws, record.stats,
            self._parts.costs, request.ahead, prompt_piece,
        )  # fmt: skip
        loop = decode(self._ids, method, self._limits, draws, record, complete, request.rules)
        question = next(loop, None)
        while question is not None:
            answer = yield from driver.answer(question)
            try:
                question = loop.send(answer)
            except StopIteration:
                question = None

    def steps(self) -> Iterator[None]:
        """Work on runners of its own; yields whenever new tokens may be there. The clock stands still while the caller
        has the turn."""
        parts, stats = self._parts, self.record.stats
        models = parts.take(self.length, self.rows, self.needs_target, self.needs_draft)
        try:
            jobs = self.jobs(models, range(self.rows))
            began = time.perf_counter()
            job = next(jobs, None)
            while job is not None:
                (done,) = models.run([job])
                try:
                    job = jobs.send(done)
                except StopIteration:
                    job = None
                stats.wall_s += time.perf_counter() - began
                yield
                began = time.perf_counter()
        finally:
            self.record.count()
            parts.give_back(models)

    def generation(self) -> Generation:
        """The result so far, each token with its text; what comes later does not change it."""
        tokens, tokenizer = [replace(token) for token in self.record.tokens], self.tokenizer
        stats, text = replace(self.record.count()), ""
        if tokenizer is not None:
            render(tokens, Detokenizer(tokenizer), last=True)
            text = cut_at_stop("".join(token.text for token in tokens), self.request.stop)
        return Generation(
            text, tokens, stats, self.request.method.name, self.record.finish or "cancelled", len(self._ids),
            list(self.record.accept_lengths), self.record.rules,
        )  # fmt: skip

    def _check(self) -> None:
        parts, method = self._parts, self.request.method
        if method.drafter.uses_model and parts.models.draft is None:
            raise UserError(
                f"method {method.name} needs a draft model, and this pair has none: give draft=..."
            )
        for kind in sorted(method.needs & set(KINDS) - parts.heads.keys()):
            a_head, option = (
                ("a gate", "gate=...") if kind == "gate" else (f"a {kind} head", "heads=[...] (--head)")
            )
            raise UserError(
                f"method {method.name} needs {a_head}, and this pair has none: give {option} or another method"
            )
        if method.drafter.drafts > 1:
            for which, model in (("target", parts.models.target), ("draft", parts.models.draft)):
                if model is not None and runner_kind(model.model)[0] == "crop":
                    raise UserError(
                        f"method {method.name} needs rows, and the {which} has but one: give drafts=1"
                    )
        check_request(parts.models, len(self._ids), self.request.max_new_tokens)


def render(tokens: Sequence[Token], detokenizer: Detokenizer, last: bool) -> None:
    """Fill in ``text`` of each token; ``last`` gives an unfinished character to the last one."""
    for token in tokens:
        token.text = detokenizer.push(token.id)
    if last and tokens:
        tokens[-1].text += detokenizer.flush()
