"""The public pair: load two models and a gate, generate and stream."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast, overload

from sprinter.decode.costs import PassCosts
from sprinter.decode.method import Method
from sprinter.decode.registry import did_you_mean
from sprinter.engine.astream import AsyncStream, LazyStream
from sprinter.engine.batch import generate_all, listed, options_of_each
from sprinter.engine.chat import ChatMessage, EncodedPrompt, render_chat
from sprinter.engine.drafting import attach_heads, cut_heads, native_heads
from sprinter.engine.generation import Generation
from sprinter.engine.options import GenerationKeywords, GenerationOptions
from sprinter.engine.policy import Policy
from sprinter.engine.prefix import DEFAULT, PrefixCache
from sprinter.engine.profile import Profile, read_profile
from sprinter.engine.prompt import PromptInput, PromptInputs, is_several
from sprinter.engine.request import Request
from sprinter.engine.rollout import Rollout, roll_out
from sprinter.engine.runners import choose_runner
from sprinter.engine.runtime import PairRuntime
from sprinter.engine.stream import Stream
from sprinter.engine.suffixes import DEFAULT_TOKENS, SuffixCache
from sprinter.errors import UserError, refuse_long
from sprinter.fingerprint import words_fingerprint
from sprinter.heads.drafting import TokenHeads
from sprinter.heads.head import Head
from sprinter.heads.load import load_any_head, load_gate
from sprinter.models.convert import for_runner
from sprinter.models.devices import choose_threads
from sprinter.models.kernels import is_quantised
from sprinter.models.lora import adapted
from sprinter.models.pair import LoadedPair, builtin_heads, builtin_paths, load_models
from sprinter.models.progress import bars_on_terminals
from sprinter.models.reduced_vocab import check_cut
from sprinter.models.source import Source
from sprinter.models.weights import Weights, write_weights

__all__ = ["Pair", "Stream", "load_pair"]


@bars_on_terminals()
def load_pair(
    target: Source | None = None,
    draft: Source | None = None,
    *,
    gate: str | Path | Head | None = None,
    heads: Sequence[str | Path | Head | TokenHeads] = (),
    runner: str = "auto",
    draft_runner: str | None = None,
    profile: str | Path | None = None,
    prefix_cache_bytes: int = DEFAULT.max_bytes,
    prefix_reuse: str = DEFAULT.reuse,
    suffix_cache: str | Path | None = None,
    suffix_cache_tokens: int = DEFAULT_TOKENS,
    **options: Any,
) -> Pair:
    """Load a pair from directories or hub ids; without arguments, the built-in pair and its gate (no network needed).

    Args:
        target: directory, hub id, GGUF file (also on the hub: org/name/file.gguf) or loaded model. None: the built-in
            pair.
        draft: as ``target``; None: plain decoding.
        gate: directory or hub id of a gate that was trained for this draft.
        heads: directories or hub ids of other heads for this draft, which "specdec++" and "disco" read, or for this
            target ("judge", "diversed"), or heads on the target that draft in place of a draft model (Medusa's).
            Without any of these, those of multi-token prediction that the target's checkpoint holds; records name
            them by the target.
        runner: "auto" (PyTorch; for a pair of GGUF files what ``sprinter doctor --probe`` found to be fastest here,
            else on a CPU our kernels where they know the files, else llama.cpp), "torch" (GGUF files too, their weights
            dequantised to ``dtype``) or "llamacpp" (other models are converted once and cached; dtype "float32",
            "float16" or "q8_0").
        draft_runner: of the draft, where it is to differ: a target through PyTorch and its draft through llama.cpp, or
            the reverse; None: as the target's.
        profile: file that ``sprinter tune`` wrote for this pair: without a method, or with ``method="auto"``, a text is
            decoded by the fastest setting within its ``budget``, and by the fastest exact one without a budget.
        prefix_cache_bytes: maximum memory of idle KV caches, from which later texts reuse the beginning that they share
            with earlier ones (system prompt, turns of a chat); 0, or less than one text's cache: nothing is reused.
        prefix_reuse: "exact": whole blocks of 128 prompt tokens, with which texts are the same to the bit (with our
            kernels, ``dtype`` "gguf", "int8" or "int4" of families whose layers join, all tokens but those of trees);
            "all": generated tokens always, which changes last bits and so, rarely, a token.
        suffix_cache: file of earlier texts, from which "suffix" drafts: it is read, and written when the pair is
            released, the program ends, or by ``save_suffix_cache``. None: they are kept as long as the pair.
        suffix_cache_tokens: number of tokens that are kept of each owner's earlier texts; 0: none.
        options: device, dtype, draft_dtype, cache_dtype, device_map, attn_implementation, quantization_config,
            tokenizer, revision, draft_revision, draft_vocabulary (without a draft: of heads that draft with the
            target's output layer), trust_remote_code, compile; see ``load_models``.

    Raises:
        UserError: a missing or invalid directory, different vocabularies, a gate of another draft, a profile of another
            pair, ...
    """
    own, known = (inspect.signature(one).parameters for one in (load_pair, load_models))
    for name in options.keys() - known.keys():
        raise did_you_mean("option of load_pair", name, sorted({*own, *known} - {"options"}))
    if target is None:
        if draft is not None:
            raise UserError("a draft was given without a target: give target=... too")
        paths = builtin_paths()
        target, draft, gate = paths["target"], paths["draft"], gate or paths["gate"]
        heads = heads or builtin_heads()
    if isinstance(heads, str | Path | Head | TokenHeads):
        raise UserError(f"heads={heads!r} is one head: give a list, heads=[...]")
    for name, value in options.items():
        refuse_long(name, value)
    choose_threads()
    tuned = None if profile is None else read_profile(profile)
    cache = PrefixCache(prefix_cache_bytes, prefix_reuse)
    reason = None
    if runner == "auto" and draft_runner is None:
        chosen, reason = choose_runner(target, draft, options)
        options |= chosen
        runner, draft_runner = options.pop("runner", runner), options.pop("draft_runner", None)
    target, draft, options = for_runner(runner, target, draft, options, draft_runner)
    # Without a draft model it is that of heads.
    words = options.pop("draft_vocabulary", None) if draft is None and heads else None
    if words is not None:
        check_cut(options)
    loaded = (
        load_gate(gate) if isinstance(gate, str | Path) else gate
    )  # before the models, which may take minutes
    given = [head for head in heads if not isinstance(head, str | Path) or str(head) != str(target)]
    others = [load_any_head(head) if isinstance(head, str | Path) else head for head in given]
    models = load_models(target, draft, **options)
    if not any(isinstance(head, TokenHeads) for head in others):
        others += native_heads(models.target)
    read_from = None if suffix_cache is None else models.tokenizer  # reading a large vocabulary takes a while
    vocabulary = "" if read_from is None else words_fingerprint(read_from.get_vocab())
    suffixes = SuffixCache(suffix_cache_tokens, suffix_cache, vocabulary, models.vocab_size)
    pair = Pair(models, loaded, others, cache, tuned, words, suffixes)
    pair.runner_reason = reason
    return pair


class Pair:
    """Two models, a tokenizer and optionally heads, ready to generate. Created by ``load_pair``.

    Attributes:
        runner_reason: which runner ``runner="auto"`` has chosen for GGUF files, and why; None: nothing was chosen.

    Args:
        prefix_cache: what is kept of texts for later ones.
        profile: of this pair, from ``sprinter tune``.
        draft_vocabulary: of heads that draft with the target's output layer, as in ``load_models``.
        suffix_cache: earlier texts, from which "suffix" drafts; None: those of this pair.

    Raises:
        UserError: a head of another draft or target, two heads of one kind or two sets that draft, a gate that
            reads the token that it judges, or a profile of another pair.
    """

    def __init__(
        self,
        models: LoadedPair,
        gate: Head | None = None,
        heads: Sequence[Head | TokenHeads] = (),
        prefix_cache: PrefixCache = DEFAULT,
        profile: Profile | None = None,
        draft_vocabulary: int | str | Path | Sequence[int] | None = None,
        suffix_cache: SuffixCache | None = None,
    ) -> None:
        self.models, self.tokenizer = models, models.tokenizer
        self.runner_reason: str | None = None
        self.heads: dict[str, Head] = {}
        self.drafting: TokenHeads | None = None
        for head in heads if gate is None else (gate, *heads):
            self._add(head)
        if draft_vocabulary is not None:
            self._cut_heads(draft_vocabulary)
        self.gate = self.heads.get("gate")
        if profile is not None:
            profile.check(models, self.heads)
        self._runtime = PairRuntime(models, self.heads, prefix_cache, profile, self.drafting, suffix_cache)

    def __repr__(self) -> str:
        target, draft = self.models.target, self.models.draft
        heads = ", ".join([*self.heads, *([self.drafting.kind] if self.drafting else [])]) or None
        where = f"{target.weights} on {target.model.device}"
        return f"Pair(target={target.id!r}, draft={draft and draft.id!r}, heads={heads}, {where})"

    def _add(self, head: Head | TokenHeads) -> None:
        if isinstance(head, TokenHeads):
            self._add_drafting(head)
            return
        if not isinstance(head, Head):
            raise UserError(f"{head!r} is not a head: give a directory, a hub id or a Head")
        kind = head.config.kind
        model = self.models.draft if head.config.model == "draft" else self.models.target
        if model is None:
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
        head.check_model(
            id=model.id, revision=model.revision, hidden_size=model.hidden_size, model=model.model
        )
        self.heads[kind] = head.to(model.model.device)

    def _add_drafting(self, heads: TokenHeads) -> None:
        if self.drafting is not None:
            raise UserError("two sets of heads that draft were given: a pair has one")
        self._heads_are_new = not heads.is_attached
        attach_heads(heads, self.models.target)
        self.drafting = heads

    def _cut_heads(self, given: int | str | Path | Sequence[int]) -> None:
        if self.drafting is None:
            raise UserError("draft_vocabulary was given without a draft or heads that draft: leave it out")
        cut_heads(self.drafting, given, self.models, self._heads_are_new)

    @property
    def default_method(self) -> str:
        """The method if none is given, lossless: the profile's fastest, else ``auto`` with a draft, ``heads`` with
        heads that draft, else ``autoregressive``.

        It is never slower than plain decoding: it drafts only while that pays, and not at all where by the costs of
        passes (``pass_costs``) no draft could pay.
        """
        return self._runtime.default_method

    @property
    def pass_costs(self) -> PassCosts:
        """What forward passes of the pair cost on this machine, in seconds, and the rules beside them.

        ``never_slower`` and ``auto`` decide by it, in batches by what passes of several rows cost in addition.

        Measured once, which takes some seconds, and kept in the cache directory (of models that were given as objects:
        for as long as the pair lives).
        """
        return self._runtime.pass_costs

    @property
    def profile(self) -> Profile | None:
        """The profile that ``method="auto"`` takes settings from; None: there is none."""
        return self._runtime.profile

    def method_for(
        self, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKeywords]
    ) -> Method:
        """The method that ``generate`` would use with these options, "auto" resolved by the profile."""
        return self._runtime.method_for(GenerationOptions.of(options, keywords))

    def clear_prefix_cache(self) -> None:
        """Forget all earlier texts and release their memory; those in an ``Engine`` stay until it is closed."""
        for pool in (self._runtime.targets, self._runtime.drafts):
            if pool is not None:
                pool.clear()

    def clear_suffix_cache(self) -> None:
        """Forget the earlier texts from which "suffix" drafts; a file has them until it is written again."""
        self._runtime.suffixes.clear()

    def save_suffix_cache(self) -> None:
        """Write the file of earlier texts (``load_pair(suffix_cache=...)``) now; without one nothing happens.

        Raises:
            UserError: it cannot be written.
        """
        self._runtime.suffixes.save()

    def with_lora(self, folder: str | Path) -> Pair:
        """A pair whose target has a LoRA adapter; draft, its heads and all weights that stay are those of this pair.

        Matrices that the adapter changes are copies, into which it is merged, but those of 4 to 8 bits: their forward
        passes compute its product beside them, in transformers instead of our kernels, which is slower. The profile is
        not taken over.

        Args:
            folder: PEFT's, with ``adapter_config.json`` and ``adapter_model.safetensors``.

        Raises:
            UserError: the adapter is not supported or is for another model; a pair with heads on its target.
        """
        given = (
            self.drafting is not None and self.drafting.kind != "mtp"
        )  # those of the checkpoint stay with it
        if given or any(head.config.model == "target" for head in self.heads.values()):
            raise UserError(
                f"heads on the target were not trained with the adapter {folder}: load a pair without them"
            )
        models = replace(self.models, target=adapted(self.models.target, folder))
        pair = Pair(models, heads=list(self.heads.values()), prefix_cache=self._runtime.targets.cache)
        if not is_quantised(self.models.target.module("an adapter")):
            pair._runtime.use_measured(self._runtime.measured)  # passes of the same shapes
        return pair

    def reload(self, target: Weights | None = None, draft: Weights | None = None) -> None:
        """Take the models as they are now, after a change of weights, modules, hooks, settings, dtype or device; or
        write new values into their weights, as training loops do after each step.

        A pair is frozen once it is loaded: what stands in a model then is decoded with. Nothing looks for later
        changes; until this call they may be seen, not seen, or seen in part, and cached texts are those of the models
        before. Layers that our kernels no longer know run by their own modules from then on, and a warning says so.
        Texts in KV caches are forgotten, and measured costs unless only values are new; close engines and streams
        before. Draft, heads and the suffix cache stay: what drafts cannot bias an exact method, it only costs calls.

        Args:
            target, draft: new values, as ``model.state_dict()`` or the folder of ``save_pretrained``; None: the model
                has been changed in place, or is as before.

        Raises:
            UserError: a model can no longer be served, or has fewer token ids than before; values of another
                architecture, of which none is written, or for quantised weights.
        """
        measured = self._runtime.measured
        for model, weights in ((self.models.target, target), (self.models.draft, draft)):
            if weights is None:
                continue
            if model is None:
                raise UserError("draft weights were given, and this pair has no draft: leave them out")
            write_weights(model, weights)
        self._runtime.reload()
        if target is not None or draft is not None:
            self._runtime.use_measured(measured)  # passes of the same shapes

    @overload
    def generate(
        self,
        prompt: PromptInput,
        options: GenerationOptions | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: PromptInputs,
        options: GenerationOptions | Sequence[GenerationOptions | None] | None = None,
        *,
        rows: int | None = None,
        policy: Policy = ...,
        memory_bytes: int | None = None,
        **keywords: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: PromptInput | PromptInputs,
        options: GenerationOptions | Sequence[GenerationOptions | None] | None = None,
        **keywords: Any,
    ) -> Generation | list[Generation]:
        """Generate a text; from a list of prompts, a list of texts as ``generate_batch`` does.

        Args:
            prompt: text, token ids, chat messages (``[{"role": "user", "content": "..."}, ...]``, to which the
                tokenizer's chat template is applied; a last message of the assistant is continued), or a
                ``BatchEncoding`` of one row; or a list of prompts. A list of numbers or of messages is one prompt.
            options: a ``GenerationOptions``; for several prompts, also a list with one for each.
            keywords: options by name; they replace those of ``options``. See ``GenerationOptions``. For several
                prompts, all keywords of ``generate_batch``.

        Raises:
            UserError: what is wrong with the request and how to fix it.
        """
        if is_several(prompt):
            return self.generate_batch(cast(PromptInputs, prompt), options, **keywords)
        with self.stream(cast(PromptInput, prompt), cast(Any, options), **keywords) as stream:
            return stream.finish()

    def render_chat(
        self, messages: Sequence[ChatMessage], chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> EncodedPrompt:
        """Apply the chat template to messages, as ``generate`` does: text, token ids, and the end of a turn.

        Args:
            messages: a conversation that ends with a message of the user, or one of the assistant to continue.
            chat_template_kwargs: further arguments of the template.

        Raises:
            UserError: what is wrong with the messages, the template or its arguments.
        """
        return render_chat(messages, self.models, chat_template_kwargs)

    def stream(
        self,
        prompt: PromptInput,
        options: GenerationOptions | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> Stream:
        """Generate one text, token by token; arguments as for ``generate``, checked at once."""
        return Stream(Request(self._runtime, prompt, GenerationOptions.of(options, keywords)))

    def astream(
        self,
        prompt: PromptInput,
        options: GenerationOptions | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> AsyncStream:
        """As ``stream``, for ``async for``: each step runs in a thread when its token is asked for.

        For many texts at once use an ``AsyncEngine``, where they share forward passes.
        """
        return LazyStream(self.stream(prompt, options, **keywords))

    def generate_batch(
        self,
        prompts: Iterable[PromptInput],
        options: GenerationOptions | Sequence[GenerationOptions | None] | None = None,
        *,
        rows: int | None = None,
        policy: Policy = Policy(),
        memory_bytes: int | None = None,
        **keywords: Any,
    ) -> list[Generation]:
        """Generate many texts at once, in the order of the prompts.

        Each text is that of ``generate`` with the same options, independent of the other prompts (but with
        ``never_slower``, which ``auto`` has: the rows decide together whether to draft, and greedy ones begin with what
        the batch before has learned; ``auto`` weighs the costs of as many rows; ``request`` of a result replays all of
        it). For the times in the stats, see ``Engine``.

        Args:
            prompts: texts, lists of token ids, or conversations.
            options: for all prompts, or a list with one for each.
            keywords: options by name: a value for all prompts, or a list with one for each. ``stop`` and
                ``stop_token_ids``: one list for all, or a list of lists. With ``max_new_tokens=None``, all rows
                have the length of the models' context.
            rows: number of texts that are decoded at the same time; None: all, up to 32.
            policy: when the target's forward pass is run.
            memory_bytes: maximum size of the caches; None: 90 % of the free memory.

        Raises:
            UserError: what is wrong with a request and how to fix it, with the prefix "prompt 3: " for the one at index
                3; rows that do not fit into memory.
            BatchError: some texts failed; it holds all results.
        """
        prompts = listed(prompts)
        each = options_of_each(options, keywords, len(prompts))
        return generate_all(self._runtime, prompts, each, rows, policy, memory_bytes)

    def rollout(
        self,
        prompts: Iterable[PromptInput],
        n: int = 8,
        options: GenerationOptions | None = None,
        *,
        rows: int | None = None,
        policy: Policy = Policy(),
        memory_bytes: int | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> list[Rollout]:
        """Sample each prompt ``n`` times from the target's raw law, with the log-probability of every token under it.

        The raw law has temperature 1 and nothing truncated, penalised or masked; options that draw from another one are
        refused, and so are lossy methods. Samples are independent: each has a seed of its own, made from ``seed`` and
        its number, whatever it is drafted from. Those of a prompt that begin together read it once.

        Args:
            prompts: texts, lists of token ids, or conversations.
            n: number of samples of each prompt.
            options, keywords: as for ``generate``, for all samples. ``method``: None is "suffix", which drafts from
                this pair's earlier samples too; at a seed texts are those of plain decoding. ``seed``: give another one
                in each step of a training, or -1.
            rows, policy, memory_bytes: as for ``generate_batch``.

        Returns:
            The samples, ``n`` in a row for each prompt, in the order of the prompts.

        Raises:
            UserError: as ``generate_batch``, and for what would change the law.
            BatchError: some samples failed; it holds all results, numbered as the samples are.
        """
        whole = GenerationOptions.of(options, keywords)
        return roll_out(self._runtime, listed(prompts), n, whole, rows, policy, memory_bytes)
