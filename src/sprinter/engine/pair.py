"""The public pair: load two models and a gate, generate and stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from sprinter.decode.draft import Record, Token
from sprinter.decode.loop import Limits, decode
from sprinter.decode.methods import Method
from sprinter.decode.state import RuleState
from sprinter.engine.driver import Costs, RowDriver
from sprinter.engine.ending import Detokenizer, Ending, cut_at_stop
from sprinter.engine.generation import Generation, Request
from sprinter.engine.pool import RunnerPool
from sprinter.engine.prompt import encode
from sprinter.errors import UserError
from sprinter.heads.artifact import load_head
from sprinter.heads.gate import load_gate
from sprinter.heads.head import KINDS, Head
from sprinter.models.choose import runner_kind
from sprinter.models.flops import forward_flops
from sprinter.models.pair import LoadedPair, builtin_heads, builtin_paths, check_request, load_models
from sprinter.random import AddressedDraws

__all__ = ["Pair", "Stream", "load_pair"]

MeterMode = Literal["running", "complete"]


def load_pair(
    target: str | Path | PreTrainedModel | None = None,
    *,
    draft: str | Path | PreTrainedModel | None = None,
    gate: str | Path | Head | None = None,
    heads: Sequence[str | Path | Head] = (),
    **options: Any,
) -> Pair:
    """Load a pair from directories or hub ids; without arguments the built-in pair and its gate, no network needed.

    Args:
        target: directory, hub id or loaded model. None: the built-in pair.
        draft: likewise; may be left out for plain decoding.
        gate: gate directory or hub id, made for this draft.
        heads: directories or hub ids of other heads made for this draft: those that "specdec++" and "disco" read.
        options: device, dtype, device_map, tokenizer, revision, draft_revision, trust_remote_code; see ``load_models``.

    Raises:
        UserError: a directory that is missing or wrong, vocabularies that differ, a gate made for another draft, ...
    """
    if target is None:
        if draft is not None:
            raise UserError("a draft was given without a target: give target=... too")
        paths = builtin_paths()
        target, draft, gate = paths["target"], paths["draft"], gate or paths["gate"]
        heads = heads or builtin_heads()
    if isinstance(heads, str | Path | Head):
        raise UserError(f"heads={heads!r} is one head: give a list, heads=[...]")
    models = load_models(target, draft, **options)
    loaded = load_gate(gate) if isinstance(gate, str | Path) else gate
    others = [load_head(head) if isinstance(head, str | Path) else head for head in heads]
    return Pair(models, loaded, others)


class Pair:
    """Two models, a tokenizer and perhaps a gate, ready to generate. Made by ``load_pair``.

    Raises:
        UserError: a head that was made for another draft, two heads of one kind, a gate that looks at x.
    """

    def __init__(self, models: LoadedPair, gate: Head | None = None, heads: Sequence[Head] = ()) -> None:
        self.models, self.tokenizer = models, models.tokenizer
        self.heads: dict[str, Head] = {}
        for head in heads if gate is None else (gate, *heads):
            self._add(head)
        self.gate = self.heads.get("gate")
        self._target_pool = RunnerPool(models.target)
        self._draft_pool = RunnerPool(models.draft) if models.draft else None
        self._costs = Costs(
            forward_flops(models.target.model.config),
            forward_flops(models.draft.model.config) if models.draft else 0.0,
        )

    def _add(self, head: Head) -> None:
        if not isinstance(head, Head):
            raise UserError(f"{head!r} is no head: give a directory, a hub id or a Head")
        kind, draft = head.config.kind, self.models.draft
        if draft is None:
            raise UserError(
                f"a head ({kind}) reads the draft's hidden states, and this pair has no draft: give draft=..."
            )
        if kind in self.heads:
            raise UserError(f"two heads of kind '{kind}' were given: a pair has one of each")
        if kind in ("gate", "disco") and head.sees_token:  # the meter counts on it
            raise UserError(
                f"this {kind} head reads {', '.join(head.features)} and so looks at the token that it judges: "
                "train it on features of the prefix (hidden, entropy, max_q, top_q, position, temperature)"
            )
        head.check_draft(
            id=draft.id, revision=draft.revision, hidden_size=draft.hidden_size, model=draft.model
        )
        self.heads[kind] = head.to(draft.model.device)

    @property
    def default_method(self) -> str:
        """``sprinter`` with a gate, ``speculative`` with a draft alone, else ``autoregressive``."""
        return "sprinter" if self.gate else "speculative" if self.models.draft else "autoregressive"

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        method: str | Method | None = None,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = (),
        meter: MeterMode = "running",
        ahead: int = 1,
        rules: RuleState | None = None,
    ) -> Generation:
        """Generate one text.

        Args:
            prompt: text, or token ids.
            method: a spec such as "sprinter(tau=0.6)" or a Method; None takes ``default_method``.
            max_new_tokens: exact limit.
            temperature, top_k, top_p, min_p: sampling, for both models alike; temperature 0 is greedy.
            seed: the same seed gives the same text.
            stop: strings that end the text; they are cut off.
            meter: "complete" adds closing passes so that every trusted token is scored.
            ahead: draft tokens an answer of the driver; the text does not depend on it.
            rules: the ``rules`` of an earlier generation by the same method, so that AdaEDL's λ or the heuristic's γ
                are carried over; None begins anew.

        Raises:
            UserError: what is wrong with the request and how to mend it.
        """
        stream = self.stream(
            prompt, method=method, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, seed=seed, stop=stop, meter=meter, ahead=ahead, rules=rules,
        )  # fmt: skip
        return stream.finish()

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        method: str | Method | None = None,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = (),
        meter: MeterMode = "running",
        ahead: int = 1,
        rules: RuleState | None = None,
    ) -> Stream:
        """Like ``generate``, token by token; the request is checked at once, before the first token is asked for."""
        request = Request.make(
            self.default_method if method is None else method, max_new_tokens, temperature, top_k, top_p, min_p, seed,
            stop, meter, ahead, rules,
        )  # fmt: skip
        return Stream(_Run(self, prompt, request))


class _Run:
    """One request under way: loop, driver, clock, and the runners on loan."""

    def __init__(self, pair: Pair, prompt: str | Sequence[int], request: Request) -> None:
        self._pair, self._request = pair, request
        self.record = Record()
        self._ids = encode(prompt, pair.models)
        self._check()
        ending = Ending(len(self._ids), pair.models.target.eos_ids, request.stop, pair.tokenizer)
        self._limits = Limits(request.max_new_tokens, ending)
        self.record.stats.lossless = request.method.lossless(request.sampling.greedy)

    def steps(self) -> Iterator[None]:
        """Work; yields whenever new tokens may be there. The clock stands still while the caller has the turn."""
        pair, request, record = self._pair, self._request, self.record
        method, stats, size = request.method, record.stats, len(self._ids) + request.max_new_tokens
        complete, rows = request.meter == "complete", method.drafter.drafts
        target = pair._target_pool.take(size, rows) if method.needs_target or complete else None
        draft = pair._draft_pool.take(size, rows) if pair._draft_pool and method.drafter.uses_model else None
        try:
            draws = AddressedDraws(request.seed)
            driver = RowDriver(
                target, draft, pair.heads, self._ids, method, request.sampling, draws,
                pair.models.vocab_size, stats, pair._costs, request.ahead,
            )  # fmt: skip
            loop = decode(self._ids, method, self._limits, draws, record, complete, request.rules)
            began = time.perf_counter()
            question = next(loop, None)
            while question is not None:
                answer = driver.answer(question)
                try:
                    question = loop.send(answer)
                except StopIteration:
                    question = None
                stats.wall_s += time.perf_counter() - began
                yield
                began = time.perf_counter()
        finally:
            record.count()
            pair._target_pool.give_back(target)
            if pair._draft_pool:
                pair._draft_pool.give_back(draft)

    def generation(self) -> Generation:
        """The result so far, each token with its text; what comes later does not change it."""
        tokens, tokenizer = [replace(token) for token in self.record.tokens], self._pair.tokenizer
        stats, text = replace(self.record.count()), ""
        if tokenizer is not None:
            render(tokens, Detokenizer(tokenizer), last=True)
            text = cut_at_stop("".join(token.text for token in tokens), self._request.stop)
        return Generation(
            text, tokens, stats, self._request.method.name, self.record.finish or "cancelled", len(self._ids),
            list(self.record.accept_lengths), self.record.rules,
        )  # fmt: skip

    def _check(self) -> None:
        pair, method = self._pair, self._request.method
        if method.drafter.uses_model and pair.models.draft is None:
            raise UserError(
                f"method {method.name} needs a draft model, and this pair has none: give draft=..."
            )
        for kind in sorted(method.needs & set(KINDS) - pair.heads.keys()):
            a_head, option = (
                ("a gate", "gate=...") if kind == "gate" else (f"a {kind} head", "heads=[...] (--head)")
            )
            raise UserError(
                f"method {method.name} needs {a_head}, and this pair has none: give {option} or another method"
            )
        if method.drafter.drafts > 1:
            for which, model in (("target", pair.models.target), ("draft", pair.models.draft)):
                if model is not None and runner_kind(model.model)[0] != "row":
                    raise UserError(
                        f"method {method.name} needs rows, and the {which} has but one: give drafts=1"
                    )
        check_request(pair.models, len(self._ids), self._request.max_new_tokens)


def render(tokens: Sequence[Token], detokenizer: Detokenizer, last: bool) -> None:
    """Fill in ``text`` of each token; ``last`` gives an unfinished character to the last one."""
    for token in tokens:
        token.text = detokenizer.push(token.id)
    if last and tokens:
        tokens[-1].text += detokenizer.flush()


class Stream:
    """Iterator over tokens as they become final. Closing it early is safe; ``generation`` is the result so far.

    A trusted token comes out at once; its ``drift`` is filled in when the target has scored it.
    """

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._steps = run.steps()
        self._given = 0
        self._detokenizer = Detokenizer(run._pair.tokenizer) if run._pair.tokenizer else None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        tokens = self._run.record.tokens
        while self._given == len(tokens):
            next(self._steps)
        token = tokens[self._given]
        self._given += 1
        if self._detokenizer is not None:
            render(
                [token],
                self._detokenizer,
                last=self._given == len(tokens) and self._run.record.finish is not None,
            )
        if self._run.record.finish is not None and self._given == len(tokens):
            for _ in self._steps:  # a closing pass may be left
                pass
        return token

    def finish(self) -> Generation:
        """Work to the end; the whole result."""
        for _ in self._steps:
            pass
        return self.generation

    def close(self) -> None:
        """Stop; the caches are given back."""
        self._steps.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """What was generated so far, ``finish_reason`` "cancelled" if the text has no end yet."""
        return self._run.generation()
