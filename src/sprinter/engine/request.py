"""One request: its options, and its text so far."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from sprinter.decode.adjust import Adjustments
from sprinter.decode.costs import PassCosts
from sprinter.decode.draft import Record, Stats
from sprinter.decode.draft_heads import DraftHeads
from sprinter.decode.loop import Limits, decode
from sprinter.decode.method import Method
from sprinter.decode.resting import COPIES
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import is_auto
from sprinter.decode.state import RuleState
from sprinter.decode.switch import AdaptiveSwitch, DraftSwitch, Replayed, Tracker
from sprinter.engine.blocks import blocks_of
from sprinter.engine.executor import Executor, RequestRun
from sprinter.engine.generation import Generation
from sprinter.engine.logprobs import LogProbs
from sprinter.engine.lookahead import Ahead
from sprinter.engine.options import GenerationOptions
from sprinter.engine.prompt import EncodedPrompt, PromptInput, encode_prompt
from sprinter.engine.runtime import PairRuntime
from sprinter.engine.spans import SpanReader
from sprinter.engine.stream import Ending, Spelling, TextWriter, prompt_end
from sprinter.engine.tokens import check_text
from sprinter.errors import UserError
from sprinter.models.choose import pads_rows, reads_trees, runner_kind
from sprinter.models.interface import ServedModel
from sprinter.models.pair import LoadedModel, check_request
from sprinter.models.runners.forward import CHUNK, decoder_layers
from sprinter.models.translated import TranslatedModel
from sprinter.random import AddressedDraws, PositionDraws, drawn_seed

__all__ = ["Request"]

_MOST_STATES = 16  # of rules that a tracker keeps
_MOST_TRACKERS = 64  # that an engine, or a pair, keeps: requests can make any number, by their temperature
_LONG = 2048
"""Rows up to this length, in tokens, are allocated without checking the free memory."""


class Request:
    """One request, before, while and after it has rows.

    Attributes:
        method: the method, with thresholds that are recorded in heads filled in.
        request: the given options, with defaults of ``method``, ``max_new_tokens`` and ``rules`` filled in, and the end
            of a turn among the stop tokens; without arguments of the chat template, which is applied.
        record: tokens and counts so far.
        sequence: the text.
        length: maximum length of its text in tokens, prompt included.
        spare: additional slots for a tree.
        needs_target, needs_draft: whether it may use the model.
        tracker: says whether drafting pays, common to all rows of an engine; None: one of its own.
        owner: whose it is; owners take turns. salt: KV caches and earlier texts are reused between requests of one
            salt; by default the owner.

    Args:
        longest: length of a row in tokens, which limits the text if ``max_new_tokens`` is None; None: the pair's
            context.
        rows: number of rows that share passes when it begins, for ``auto``. most: that may share them later.

    Raises:
        UserError: what is wrong with the request and how to fix it.
    """

    def __init__(
        self,
        runtime: PairRuntime,
        prompt: PromptInput,
        options: GenerationOptions,
        longest: int | None = None,
        rows: int = 1,
        most: int = 1,
        owner: str = "",
        salt: str | None = None,
    ) -> None:
        self._runtime, self.owner, self.salt = runtime, owner, owner if salt is None else salt
        options = options.replace(seed=drawn_seed(options.seed))
        self.tracker: Tracker | None = None
        self._tuned = runtime.tuned_for(options)
        self.method = method = runtime.method_for(options, rows)
        largest = max(
            runtime.models.longest, runtime.models.vocab_size, CHUNK
        )  # rules have lengths up to CHUNK by default
        method.check_counts(largest, "the pair's context and vocabulary have tokens")
        if options.copy_switches and options.switches is None:
            raise UserError("copy_switches= belongs to the switches= of the same record: give both")
        unnamed = options.method is None and self._tuned is None
        paced = unnamed or (options.method is not None and is_auto(options.method))
        if options.require_lossless and not method.lossless(options.sampling.greedy):
            raise UserError(
                f"method {method.name} is lossy, and require_lossless=True refuses it: give a lossless method, such as "
                f"{runtime.default_method}"
            )
        rules = RuleState.begin(method.trust, method.stop, options.rules)  # raises before any work
        self._rules = None if options.rules is None else rules
        self._prompt = encode_prompt(prompt, runtime.models, options.chat_template_kwargs)
        self.sequence = TokenSequence.begin(self._prompt.ids)
        self._chat_kwargs = options.chat_template_kwargs
        self.needs_target = method.needs_target or options.meter == "complete"
        self.needs_draft = method.drafter.uses_model
        self.new = new = self._room(longest) if options.max_new_tokens is None else options.max_new_tokens
        stops = self._stops(options)
        self.options = options.replace(
            method=method, max_new_tokens=new, rules=self._rules, stop_token_ids=stops,
            never_slower=paced or None if options.never_slower is None else options.never_slower,
            budget=None if unnamed else options.budget,
            chat_template_kwargs=None,  # they are in the prompt's ids now
        )  # fmt: skip
        self.length = self.sequence.prompt + new
        self.spare = _spare(method)
        self._check(new)
        ends = (*runtime.models.target.eos_ids, *stops)
        self._spelling = _spelling(runtime, options.stop, ends, self._prompt)
        if method.only is not None and self._spelling is None and not method.lossless():
            raise UserError(f"only={method.only} needs a tokenizer, and this pair has none: leave it out")
        self._adjustments = _adjustments(self.options, runtime, ends, owner)
        self._costs: PassCosts | None = None  # measured here, in the thread of the caller
        if self.options.never_slower and self.options.switches is None and self._may_switch:
            self._costs = runtime.costs_of(method, most, options.sampling.greedy)
        # Only where they cannot change the text: at a seed it is the same, whatever other texts there are.
        greedy = options.sampling.greedy
        fixed = method.lossless(greedy) and (greedy or method.accept.draws_by_position)
        self._fixed, self._reads_earlier = fixed, method.drafter.reads_earlier and fixed
        # Rows decide together though ``auto`` has other numbers in each.
        self._shares = method if rows == 1 or self._costs is None else runtime.method_for(options)
        self._alone, self._most = most == 1, most
        self._learns_on = is_auto(method) and self._rules is None and fixed
        self._earlier: tuple[Any, ...] = ()  # the key of the trackers that the pair keeps
        self._run: RequestRun | None = None
        self.record = Record(stats=Stats(lossless=method.lossless(options.sampling.greedy)))

    @property
    def _may_switch(self) -> bool:
        """Whether the method drafts, and calls the target where it does not."""
        return self.method.drafter.proposes and self.method.needs_target

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.sequence.tokens[: self.sequence.prompt]

    @property
    def prefix(self) -> list[int]:
        """The prompt without its last token: what prefill reads."""
        return self.sequence.tokens[: self.sequence.prompt - 1]

    def writer(self) -> TextWriter | None:
        """Create a writer of this request's text; None without a tokenizer."""
        return None if self._spelling is None else TextWriter(self._spelling)

    def take(self) -> Executor:
        """Borrow rows for this request alone.

        Raises:
            UserError: the caches of long rows do not fit into the free memory.
        """
        needed = self.length, 1, self.needs_target, self.needs_draft
        if self.length + self.spare > _LONG:
            self._runtime.check_memory(*needed, None, self.spare, self.sequence.tokens)
        return self._runtime.take(*needed, self.spare, self.sequence.tokens)

    def give_back(self, models: Executor) -> None:
        """Return rows that were borrowed for this request alone."""
        self.leave(models)
        self._runtime.give_back(models)

    def leave(self, models: Executor) -> None:
        """End its text in its rows, after the last token or before."""
        record = self.record
        watch, run = self._runtime.watch, self._run
        ended = run is not None and run.over and run.error is None
        if watch is not None and self._tuned is not None and ended:
            count, calls = len(record.tokens), record.stats.target_calls
            watch.add(self._tuned, self.options, self.sequence.prompt, count, calls)
        if self._reads_earlier and run is not None:
            text, prompt = self.sequence.tokens, self.sequence.prompt
            self._runtime.suffixes.add(self.salt, text[:prompt], text[prompt : self.sequence.final])
        if self.tracker is not None and self._fixed and ended:
            if self._learns_on and record.rules is not None:
                learned = self.tracker.learn(self._rules_key, record.rules, self._most)
                _keep(self.tracker.learned, self._rules_key, learned, _MOST_STATES)
            _keep(self._runtime.trackers, self._earlier, self.tracker.past(), _MOST_TRACKERS)
        for rows, view in ((models.target, self.sequence.target), (models.draft, self.sequence.draft)):
            if rows is not None:
                rows.end_text(view.row, self.sequence, view)

    def begin(self, models: Executor, row: int, prefill_chunk: int | None = None) -> RequestRun:
        """Begin in a row; returns what it does there.

        Args:
            models: the models and their rows. row: index of the row.
            prefill_chunk: size of a prefill chunk in tokens; None: the whole prompt.
        """
        options, record, prompt = self.options, self.record, self.sequence.prompt
        by_position = self.method.accept.draws_by_position
        draws = PositionDraws(options.seed, prompt) if by_position else AddressedDraws(options.seed)
        if self._reads_earlier and self.method.drafter.recycles:
            self.sequence.successors = self._runtime.suffixes.successors(self.salt)
        switch = self._switch()
        method, complete = self.method, options.meter == "complete"
        logprobs = None if options.logprobs is None else LogProbs(prompt, options.logprobs)
        loop = decode(
            self.sequence, method, self._limits(models), draws, record, complete, self._rules, switch
        )
        asked = options.ahead if options.ahead is not None or models.sync else 1
        ahead = Ahead(None) if isinstance(asked, str) else Ahead(asked, models.sync)
        self._run = RequestRun(
            models, row, self.sequence, loop, method, options.sampling, draws, record, heads=self._runtime.heads,
            costs=self._runtime.costs, ahead=ahead,
            prefill_chunk=prefill_chunk, adjustments=self._adjustments, logprobs=logprobs,
            drafting=self._drafting,
            earlier=self._runtime.suffixes.of(self.salt) if self._reads_earlier else None,
            switch=switch if isinstance(switch, AdaptiveSwitch) and not self._alone else None,  # passes are not shared
        )  # fmt: skip
        return self._run

    @property
    def _drafting(self) -> DraftHeads | None:
        """What drafts in place of steps of the draft model; None: nothing.

        Raises:
            UserError: the draft model cannot draft several tokens in one pass, which the method asks of it.
        """
        drafter, draft = self.method.drafter, self._runtime.models.draft
        if drafter.by_heads or drafter.tokens_a_pass == 1:
            return self._runtime.drafting if drafter.by_heads else None
        return None if draft is None else blocks_of(self.method, draft)

    def _switch(self) -> DraftSwitch | None:
        """What says whether a round drafts; None: each does."""
        if not self._may_switch:
            return None
        if self.options.switches is not None:
            return Replayed(self.options.switches, self.options.copy_switches or ())
        if self._costs is None:
            return None
        return AdaptiveSwitch(self._tracker(self._costs) if self.tracker is None else self.tracker)

    def _tracker(self, costs: PassCosts, **among: Any) -> Tracker:
        """Rounds that rest copy from the text, if the method does not do that anyway. ``among``: of ``Tracker``."""
        drafter, method = self.method.drafter, self.method
        pads = pads_rows(self._runtime.models.target.model)
        copies = Tracker(costs, apart=True, pads=pads, longest=COPIES.length + 1, reads=False, **among)
        if not drafter.uses_model and not drafter.by_heads:
            return copies
        chains = method.lossless() and drafter.uses_model and not method.grows and drafter.drafts == 1
        chains = chains and drafter.tokens_a_pass == 1  # whose least cost is that of a step a token
        return Tracker(costs, copying=copies, chains=chains, reads=drafter.uses_model, **among)

    def share(
        self, trackers: dict[Any, Tracker], rows: Callable[[], int], awaited: Callable[[], float]
    ) -> None:
        """Decide together with the other rows of an engine that decode by the same method; where drafts change no text,
        the first of them begins where those of an engine before it ended. A text alone that drafts could change begins
        anew: a seed gives the same one."""
        if self._costs is None or (self._most == 1 and not self._fixed):
            return
        # What earlier texts of a salt gain is told to no other one.
        key = self._shares, self.options.sampling, self.salt if self._reads_earlier else ""
        self._earlier = *key, self._most
        if (tracker := trackers.get(key)) is None:
            tracker = self._tracker(self._costs, rows=rows, awaited=awaited)
            if self._fixed and (before := self._runtime.trackers.get(self._earlier)) is not None:
                tracker.follow(before)
        self.tracker = tracker
        _keep(trackers, key, tracker, _MOST_TRACKERS)
        if self._learns_on and (learned := tracker.learned.get(self._rules_key)) is not None:
            self._rules = learned[0]
            self.options = self.options.model_copy(update={"rules": self._rules})

    @property
    def _rules_key(self) -> tuple[Any, ...]:
        """By which a tracker knows what rules have learned: of texts of one salt, and of the same numbers."""
        return self.salt, self.method.trust, self.method.stop

    def generation(self, *, rendered: bool = False) -> Generation:
        """The result so far, each token with its text; tokens of a text that goes on are copies.

        Args:
            rendered: whether a ``TokenReader`` has filled in the texts of all tokens.
        """
        over, writer = self.record.finish is not None, self.writer()
        tokens = [token if over else replace(token) for token in self.record.tokens]
        plain_s = self._runtime.plain_token_s if self._alone and self._may_switch else None
        stats = replace(self.record.count(), plain_token_s=plain_s)
        if writer is not None and not rendered:
            writer.render(tokens, last=True)
        text = "".join(token.text for token in tokens)
        return Generation(
            text, tokens, stats, self.method.name, self.record.finish or "cancelled", self.sequence.prompt,
            list(self.record.accept_lengths), self.record.rules, self._reproducing(), self._prompt.text,
            self.prompt_ids, self._runtime.described, self._prompt.messages, self._chat_kwargs,
        )  # fmt: skip

    def _reproducing(self) -> GenerationOptions:
        """The request with the switches that were made."""
        if self._costs is None:
            return self.options
        stats = self.record.stats
        switches = {"switches": tuple(stats.switches), "copy_switches": tuple(stats.copy_switches)}
        return self.options.model_copy(update=switches)

    def _limits(self, models: Executor) -> Limits:
        stops = self.options.stop_token_ids
        eos_ids = () if self.options.ignore_eos else self._runtime.models.target.eos_ids
        only, spelling = self.method.only, self._spelling
        lossy = None if only is None or spelling is None else SpanReader(only, self.prompt_ids, spelling)
        ends = Ending(self.sequence.prompt, spelling) if spelling is not None and spelling.stop else None
        last = dict.fromkeys(stops, "stop") | dict.fromkeys(eos_ids, "eos")
        if (grammar := self._adjustments.grammar) is None:
            return Limits(self.new, ends, lossy, last)
        return Limits(self.new, ends, lossy, last, grammar, models.like.new_empty(0, models.vocab))

    def _stops(self, options: GenerationOptions) -> tuple[int, ...]:
        """The stop tokens, with the chat template's end of a turn, which checkpoints do not always name as EOS."""
        models, given = self._runtime.models, options.stop_token_ids
        if options.ignore_eos:
            return given
        known = {*models.target.eos_ids, *given}
        more = tuple(id for id in self._prompt.ends if id not in known and id < models.vocab_size)
        return given + more if more else given

    def _room(self, longest: int | None) -> int:
        """Number of new tokens up to the end of a row; at least one, which a later check rejects if it does not fit."""
        room = self._runtime.models.room(self.needs_target, self.needs_draft)
        if room is None and longest is None:
            raise UserError(
                "the models of this pair name no context that a text could end at: give max_new_tokens"
            )
        return max(1, min(one for one in (room, longest) if one is not None) - self.sequence.prompt)

    def _check_tree(self, method: Method) -> None:
        """Refuse a tree that a model's runner cannot read."""
        nodes, models = method.drafter.slots(method.levels or 1), self._runtime.models
        if nodes >= CHUNK:
            raise UserError(
                f"method {method.name} drafts a tree of up to {nodes} tokens, and a forward pass reads fewer than "
                f"{CHUNK}: give a smaller gamma or tree, or fewer drafts"
            )
        chains = not method.drafter.uses_model or method.drafter.tokens_a_pass > 1
        drafting = None if chains else models.draft
        for which, model in (("target", models.target), ("draft", drafting)):
            if model is not None and not reads_trees(model.model):
                kind = runner_kind(model.model)[0]
                raise UserError(
                    f"method {method.name} drafts a tree, and the {which}'s runner ({kind}) reads chains alone: "
                    f"give {_chains(method)}"
                )

    def _check_laws(self, vocab: int, new: int) -> None:
        """Refuse token ids out of range, and limits that contradict each other."""
        options = self.options
        if options.min_new_tokens > new:
            raise UserError(
                f"min_new_tokens={options.min_new_tokens} is more than max_new_tokens={new}: give at most {new}"
            )
        if options.logprobs is not None and options.logprobs > vocab:
            raise UserError(f"logprobs={options.logprobs} is out of range: the vocabulary has {vocab} tokens")
        words = [("bad_words", id) for word in options.bad_words if not isinstance(word, str) for id in word]
        for name, id in [("logit_bias", id) for id, _ in options.logit_bias] + words:
            if id >= vocab:
                raise UserError(f"token id {id} in {name} is out of range: the vocabulary has {vocab} tokens")

    def _check(self, new: int) -> None:
        runtime, method = self._runtime, self.method
        if method.drafter.uses_model and runtime.models.draft is None:
            raise UserError(
                f"method {method.name} needs a draft model, and this pair has none: give draft=..."
            )
        if method.drafter.by_heads and runtime.drafting is None:
            raise UserError(
                f"method {method.name} drafts with heads on the target, and this pair has none: give heads=[...] "
                "(--head) of 'sprinter draft train'"
            )
        wanted, drafting = method.drafter.head_kind, runtime.drafting
        if wanted is not None and drafting is not None and drafting.kind != wanted:
            raise UserError(
                f"method {method.name} drafts with {wanted} heads, and those of this pair are of kind {drafting.kind}"
            )
        for kind in sorted(method.heads - runtime.heads.keys()):
            a_head, option = (
                ("a gate", "gate=...") if kind == "gate" else (f"a {kind} head", "heads=[...] (--head)")
            )
            raise UserError(
                f"method {method.name} needs {a_head}, and this pair has none: give {option} or another method"
            )
        if method.grows:
            self._check_tree(method)
        heads = self._drafting
        if layers := method.drafter.target_states if heads is None else heads.layers:
            _check_states(method, runtime.models.target, layers)
        draft = runtime.models.draft
        lacks = draft is not None and (draft.words is not None or isinstance(draft.model, TranslatedModel))
        if draft is not None and lacks and self.needs_draft and method.accept.needs_support:
            _say_none_kept(draft.id)
        vocab = runtime.models.vocab_size
        if outside := [id for id in self.options.stop_token_ids if not 0 <= id < vocab]:
            raise UserError(f"stop token id {outside[0]} is out of range: the vocabulary has {vocab} tokens")
        self._check_laws(vocab, new)
        check_request(runtime.models, self.sequence.prompt, new, self.needs_target, self.needs_draft)


def _keep(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put one behind the others: the first is the one that was used longest ago, and goes if there are too many."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        oldest, *_ = kept  # at once: another thread may put one too
        kept.pop(oldest, None)


def _spare(method: Method) -> int:
    """Slots that a tree needs beside the longest text: one path of it is a part of the text."""
    if not method.grows:
        return 0
    deepest = min(method.levels or 1, CHUNK)  # deeper ones are refused
    return max(method.drafter.slots(depth) - depth for depth in range(1, deepest + 1))


def _chains(method: Method) -> str:
    """What to give in place of a method that drafts trees."""
    return "drafts=1" if method.drafter.drafts > 1 else "a method that drafts chains, such as speculative"


def _adjustments(
    options: GenerationOptions, runtime: PairRuntime, ends: Sequence[int], owner: str
) -> Adjustments:
    """The adjustments of a request; ``ends``: EOS and stop tokens."""
    words = [word for one in options.bad_words for word in _spelled(one, runtime)]
    return Adjustments(
        options.repetition_penalty, options.presence_penalty, options.frequency_penalty, options.logit_bias,
        options.min_new_tokens, tuple(ends), tuple(dict.fromkeys(words)), runtime.grammars.of(options, ends, owner),
    )  # fmt: skip


def _spelled(word: str | tuple[int, ...], runtime: PairRuntime) -> list[tuple[int, ...]]:
    """The token ids of a bad word; those of a text are its own and, as in vLLM, those with a space before it."""
    if not isinstance(word, str):
        return [word]
    tokenizer = runtime.models.tokenizer
    if tokenizer is None:
        raise UserError("bad_words has a text and this pair has no tokenizer: give token ids")
    check_text("one of bad_words", word)
    texts = dict.fromkeys((word, f" {word.lstrip()}"))
    return [tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts]


def _check_states(method: Method, target: LoadedModel, layers: Sequence[int]) -> None:
    """Refuse layers that the target does not have, and runners that hand out no hidden states."""
    if isinstance(target.model, ServedModel):
        raise UserError(
            f"method {method.name} reads the target's hidden states, which its runner ({target.model.runner}) does not "
            "hand out"
        )
    try:
        count = len(decoder_layers(target.model))
    except NotImplementedError as error:
        raise UserError(f"method {method.name} reads the target's hidden states, and {error}") from None
    if outside := [layer for layer in layers if not -1 <= layer < count]:
        raise UserError(
            f"method {method.name} reads layer {outside[0]} of the target, which has layers 0 to {count - 1} "
            "(-1: after the final norm)"
        )


@cache
def _say_none_kept(draft: str) -> None:
    logging.getLogger("sprinter").warning(
        "a method will hardly keep a draft: its divergence is infinite where the draft's law is 0, and the draft %s "
        "lacks some of the target's tokens. Give divergence=js or tv (this is said once)", draft,
    )  # fmt: skip


def _spelling(
    runtime: PairRuntime, stop: Sequence[str], ends: Sequence[int], prompt: EncodedPrompt
) -> Spelling | None:
    """The spelling of a request; None without a tokenizer. ``ends``: ids of EOS and stop tokens."""
    tokenizer = runtime.models.tokenizer
    if tokenizer is not None:
        before = prompt_end(tokenizer, prompt.ids, runtime.special) if prompt.continued else ()
        return Spelling(tokenizer, runtime.special.union(ends), tuple(stop), before)
    if stop:
        raise UserError("stop strings need a tokenizer, and this pair has none: give stop=[]")
    return None
