"""Loads a pair (target, draft and their common tokenizer) and checks requests against it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from sprinter.errors import ContextLengthError, UserError
from sprinter.models.checks import check_config
from sprinter.models.choose import compile_model, keep_cache_in, longest_text, runner_kind
from sprinter.models.common_tokens import CommonTokens
from sprinter.models.eos import eos_ids_of
from sprinter.models.gguf.dequantise import dequantised
from sprinter.models.gguf.header import forget_heads
from sprinter.models.gguf.load import GgufModel
from sprinter.models.interface import ServedModel
from sprinter.models.kernels import compile_layers, knows, parameter_count, quantise, round_linears
from sprinter.models.options import LoadOptions, check_options, load_options
from sprinter.models.progress import bars_on_terminals
from sprinter.models.reduced_vocab import (
    CUT_TYPE,
    CutHead,
    check_cut,
    check_map,
    cut_output,
    keeping,
    known_words,
)
from sprinter.models.remote import RemoteModel
from sprinter.models.runners.forward import head_sizes
from sprinter.models.source import Provenance, Source, find, load_error
from sprinter.models.tokenizers import common_tokenizer
from sprinter.models.translated import TranslatedModel
from sprinter.models.vocabulary import Vocabulary, check_rows

__all__ = [
    "LoadedModel", "LoadedPair", "builtin_heads", "builtin_paths", "check_request", "in_memory",
    "load_models",
]  # fmt: skip

_log = logging.getLogger("sprinter")
_BUILTIN = Path(__file__).with_name("builtin")
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_Cut = Callable[[int, tuple[int, ...]], torch.Tensor]
"""Of the number of logits and the tokens that end a text, the tokens that an output layer keeps."""
_NO_LIMIT = 1 << 20
"""Context of a model whose config names none (ALiBi): larger than any request."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One model, ready to run.

    Attributes:
        model: a transformers model in evaluation mode, or one that something else runs, such as a GGUF file.
        id: directory, file or hub id that it was loaded from.
        revision: commit on the hub; None for other sources.
        context: maximum number of tokens that it can hold, prompt included.
        vocab_size: last axis of its logits, padded embedding rows included.
        hidden_size: d, last axis of its hidden states.
        eos_ids: token ids that end a text.
        compile: as it was loaded; see ``load_models`` and ``make_runner``.
        quantised: dtype of ``models.kernels`` that its weights have, such as "int8"; None: they are as loaded.
        adapter: folder of the LoRA adapter that it has (``models.lora``); None: none.
        stored: storage type in its GGUF file, e.g. "Q4_K_M", if PyTorch runs it; None for other models.
        load_s: seconds that loading took; None for models in memory.
    """

    model: PreTrainedModel | ServedModel = field(repr=False)  # the repr of a large model fills a page
    id: str
    revision: str | None
    context: int
    vocab_size: int
    hidden_size: int
    eos_ids: tuple[int, ...]
    compile: bool | None = False
    stored: str | None = None
    load_s: float | None = None
    quantised: str | None = None
    adapter: str | None = None

    def module(self, who: str) -> PreTrainedModel:
        """The transformers model, for a caller that cannot use a GGUF file.

        Args:
            who: the caller's name, for the message.

        Raises:
            UserError: the model is a GGUF file.
        """
        if isinstance(self.model, ServedModel):
            what = "is a GGUF file: give its directory" if isinstance(self.model, GgufModel) else "is not one"
            raise UserError(f"{who} needs transformers models, and {self.id} {what}")
        return self.model

    @property
    def size(self) -> int:
        """Number of parameters."""
        if isinstance(self.model, ServedModel):
            return self.model.size
        return parameter_count(self.model)

    @property
    def weights(self) -> str:
        """Storage type of its weights: "float32", "bfloat16", "int8", ...; for a GGUF file such as "Q8_0 (GGUF)", or
        "bfloat16 (from Q8_0)" if PyTorch runs it."""
        if isinstance(self.model, GgufModel):
            return f"{self.model.weights} (GGUF)"
        if isinstance(self.model, ServedModel):
            return self.model.weights
        name = self.quantised or str(self.model.dtype).removeprefix("torch.")
        return name if self.stored is None else f"{name} (from {self.stored})"

    @property
    def words(self) -> str | None:
        """Number and hash, "NUMBER:HASH", of the tokens that its output layer knows; None: all of them."""
        return None if isinstance(self.model, ServedModel) else known_words(self.model)


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """Target, draft and their tokenizer.

    Attributes:
        target: the target model.
        draft: the draft model; None for plain decoding with the target.
        tokenizer: the tokenizer of both.
        tokens: number of leading token ids that both models and the tokenizer share; None: their vocabularies are the
            same.
    """

    target: LoadedModel
    draft: LoadedModel | None
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    tokens: int | None = None

    @property
    def vocab_size(self) -> int:
        """Size of the common vocabulary. Logits beyond it belong to padding or to tokens that one model lacks; callers
        must slice them off."""
        sizes = [model.vocab_size for model in self.asked().values()]
        return min(sizes if self.tokens is None else [*sizes, self.tokens])

    @property
    def context(self) -> int:
        """Maximum number of tokens that both models can hold, prompt included."""
        return min(model.context for model in self.asked().values())

    @property
    def longest(self) -> int:
        """Maximum number of tokens that either model can hold; reached by methods that use only that model."""
        return max(model.context for model in self.asked().values())

    def asked(self, target: bool = True, draft: bool = True) -> dict[str, LoadedModel]:
        """The models that a request uses, by name ("target", "draft")."""
        both = {"target": self.target if target else None, "draft": self.draft if draft else None}
        return {which: model for which, model in both.items() if model is not None}

    def room(self, target: bool = True, draft: bool = True) -> int | None:
        """Maximum text length for a request that uses these models; None if their configs name no context."""
        least = min(model.context for model in self.asked(target, draft).values())
        return None if least == _NO_LIMIT else least


@torch.inference_mode(False)  # ordinary tensors, which can be trained, in a caller's inference mode too
@bars_on_terminals()
def load_models(
    target: Source,
    draft: Source | None = None,
    *,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    device_map: str | dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    trust_remote_code: bool = False,
    compile: bool | None = None,
    dequantise: bool = False,
    draft_vocabulary: int | str | Path | Sequence[int] | None = None,
    draft_dtype: str | torch.dtype | None = None,
    draft_dequantise: bool | None = None,
    cache_dtype: str | torch.dtype | None = None,
) -> LoadedPair:
    """Load a target, and a draft if there is one, from directories, from the hub, or from memory.

    Only safetensors and GGUF files are read. llama.cpp runs GGUF files and ignores ``dtype`` for them, unless they are
    dequantised; a GGUF file and a transformers model can form a pair if their tokenizers agree. Models in memory are
    used as they are: a ``device`` or ``dtype`` other than theirs is refused, and so is a ``device_map``.

    Args:
        target: directory, hub id, GGUF file or model.
        draft: directory, hub id, GGUF file or model; None: no draft.
        tokenizer: a tokenizer other than the target's own: directory, hub id, GGUF file or tokenizer. The models' own
            tokenizers must agree with it, except for trailing tokens that some of them lack; those are never written.
        device: "auto" (CUDA, else MPS, else CPU) or a torch device.
        dtype: "auto" (the checkpoint's dtype; on a CPU float32, which is faster there for one row, unless ``compile``
            lets our kernels read the checkpoint's, whose laws are those of float32), a torch.dtype, or one of
            "float32", "bfloat16", "float16", "float64"; also "fp32", "bf16", "fp16" and "half". On CPUs and CUDA also
            "int8", bits of a weight; on a CPU also "int4", and "gguf", the weights of a GGUF file as they are stored
            (see ``models.kernels``); PyTorch then runs GGUF files too.
        device_map: passed to transformers instead of ``device``, to spread large models over devices.
        attn_implementation, quantization_config: passed to transformers for both models; refused for GGUF files and
            models in memory.
        revision: branch, tag or commit of the target on the hub.
        draft_revision: branch, tag or commit of the draft on the hub.
        trust_remote_code: run model code that comes with a checkpoint.
        compile: None: on NVIDIA short forward passes are captured as CUDA graphs. True: and on a CPU our kernels run
            the layers of known families (``models.kernels``), of models in memory too; what cannot
            be made fast is refused. False: neither.
        dequantise: GGUF files become transformers models, with weights in ``dtype`` ("auto": as above; on other devices
            bfloat16, or float32 for a file in float32).
        draft_vocabulary: the draft's output layer knows these tokens alone, which makes its steps cheaper where the
            vocabulary is large; the others have a draft probability of 0, so exact methods stay exact. Their number,
            their ids, or the file of ``sprinter draft vocabulary``; None: all tokens. See ``kept_tokens``.
        cache_dtype: of keys and values where our kernels run the passes of both models: "float32", or "bfloat16", which
            takes half of the memory, and less time in long texts; texts may differ. On a CUDA GPU also "float16" and
            "float8_e4m3", no wider than the weights. None: "float32" for the kernels, else the dtype of the weights.
        draft_dtype, draft_dequantise: of the draft where it is to differ from the target; None: as the target's.

    Raises:
        UserError: one line that says what is wrong and how to fix it.
    """
    if compile is not None and not isinstance(compile, bool):
        raise UserError(f"compile={compile!r} is unknown: give True, False or None")
    own = {"draft_revision": draft_revision, "draft_vocabulary": draft_vocabulary, "draft_dtype": draft_dtype}
    for name, value in own.items():
        if draft is None and value is not None:
            raise UserError(f"{name} was given without a draft: give draft=..., or leave it out")
    if draft_vocabulary is not None:
        check_cut({"device_map": device_map, "quantization_config": quantization_config})

    def options_with(dtype: str | torch.dtype, dequantise: bool) -> LoadOptions:
        return load_options(
            dtype, device, device_map, attn_implementation, quantization_config, trust_remote_code, compile,
            dequantise, draft_vocabulary, cache_dtype,
        )  # fmt: skip

    options = options_with(dtype, dequantise)
    drafting = options_with(
        dtype if draft_dtype is None else draft_dtype,
        dequantise if draft_dequantise is None else draft_dequantise,
    )
    target_origin = find(target, "target", revision)
    draft_origin = None if draft is None else find(draft, "draft", draft_revision)
    for which, origin, given in (("target", target_origin, options), ("draft", draft_origin, drafting)):
        if origin is not None:
            check_options(origin, given)
            if (config := origin.config(trust_remote_code)) is not None:
                check_config(config, f"the {which} {origin.name}")
    speaker, tokens, foreign = common_tokenizer(tokenizer, target_origin, draft_origin, trust_remote_code)
    words = speaker.get_vocab()
    loaded = _load(target_origin, "target", options, speaker, words)
    if tokens is not None:
        _check_ends(loaded, tokens)
    drafter = None
    if draft_origin is not None:
        theirs, common = (speaker, None) if foreign is None else foreign
        drafter = _load(draft_origin, "draft", drafting, theirs, theirs.get_vocab() if common else words)
        drafter = drafter if common is None else _translated(drafter, loaded, common)
    forget_heads()
    return LoadedPair(loaded, drafter, speaker, tokens)


def _load(
    origin: Provenance, which: str, options: LoadOptions, speaker: PreTrainedTokenizerBase, words: Vocabulary
) -> LoadedModel:
    begun, stored, ends = time.perf_counter(), None, None
    cut = None if which == "target" or options.vocabulary is None else keeping(options.vocabulary, words)
    if cut is not None and (not isinstance(origin.at, Path) or (origin.gguf and not options.dequantise)):
        where = (
            "in memory already" if origin.gguf is None else "run by llama.cpp: give dtype=gguf or int8 too"
        )
        raise UserError(
            f"draft_vocabulary is for drafts that are loaded with PyTorch, and {origin.name} is {where}"
        )
    at = origin.at
    if origin.gguf is not None and not options.dequantise:
        at = GgufModel(origin.gguf, options.device_name)
    if isinstance(at, ServedModel):
        keep_cache_in(at, options.cache, origin.name)
        check_rows(words, at.vocab_size, which)
        if isinstance(at, RemoteModel):
            at.check_vocabulary(words)
        if options.compile:
            compile_model(at)
        return LoadedModel(
            at, origin.name, origin.revision, at.context, at.vocab_size, at.hidden_size, at.eos_ids,
            load_s=None if at is origin.at else time.perf_counter() - begun,
        )  # fmt: skip
    if isinstance(at, PreTrainedModel):
        if any(weight.is_meta for weight in at.parameters()):
            raise UserError(
                f"the {which} ({type(at).__name__}) has weights that are not in memory (offloaded by accelerate, or "
                "not loaded): load it with a device_map that fits, or smaller, for example dtype='int8'"
            )
        model = at
    elif origin.gguf is None:
        model = _checkpoint(at, origin.name, which, options, cut, speaker)
    else:
        kept = options.quantised if options.device.type == "cpu" else None
        read = dequantised(origin.gguf, options.dtype, kept, cut, **options.extra)
        model, stored, ends = read.model, read.stored, read.eos_ids
        model.to(options.device)  # type: ignore[arg-type]
    model.train(False)
    if isinstance(head := model.get_output_embeddings(), CutHead):  # type: ignore[no-untyped-call]
        check_map(head.ids, max(words.values(), default=-1) + 1)
    quantised = options.quantised if model is not origin.at else None
    if quantised and options.device.type != "cpu":
        round_linears(model)
    elif quantised and origin.gguf is None:
        quantise(model, quantised)
    vocab_size, hidden_size = head_sizes(model)
    check_rows(words, vocab_size, which)
    context = _served(model, which, origin.name, _context(model.config.get_text_config(decoder=True)))
    if options.compile:
        compile_model(model)
    keep_cache_in(model, options.cache, origin.name)
    return LoadedModel(
        model, origin.name, origin.revision, context, vocab_size, hidden_size,
        eos_ids_of(model, speaker) if ends is None else ends, options.compile, stored,
        None if model is origin.at else time.perf_counter() - begun,
        quantised,
    )  # fmt: skip


def _translated(draft: LoadedModel, target: LoadedModel, tokens: CommonTokens) -> LoadedModel:
    """A draft with another vocabulary, in the target's ids."""
    tokens.join_ends(target.eos_ids, draft.eos_ids)
    made = TranslatedModel(
        draft.model, draft.id, tokens, eos_ids=target.eos_ids, vocab_size=target.vocab_size, context=draft.context,
        hidden_size=draft.hidden_size, compile=draft.compile, weights=draft.weights, size=draft.size,
    )  # fmt: skip
    return replace(draft, model=made, vocab_size=target.vocab_size, eos_ids=target.eos_ids)


def in_memory(model: PreTrainedModel, which: str, eos_ids: tuple[int, ...]) -> LoadedModel:
    """A model in memory as it is, in evaluation mode and without a tokenizer.

    Args:
        which: "target" or "draft", for messages.
        eos_ids: token ids that end a text.

    Raises:
        UserError: a model that cannot be served.
    """
    name = model.name_or_path or type(model).__name__
    check_config(model.config, f"the {which} {name}", type(model))
    vocab_size, hidden_size = head_sizes(model)
    context = _served(model, which, name, _context(model.config.get_text_config(decoder=True)))
    return LoadedModel(model, name, None, context, vocab_size, hidden_size, eos_ids, None)


def _checkpoint(
    directory: Path,
    name: str,
    which: str,
    options: LoadOptions,
    cut: _Cut | None,
    speaker: PreTrainedTokenizerBase,
) -> PreTrainedModel:
    """A checkpoint of transformers, after ``cut``; in its own dtype where ``options.stored`` allows it."""

    def read(dtype: torch.dtype | str) -> PreTrainedModel:
        model = _weights(directory, name, which, options, dtype)
        if cut is not None:
            cut_output(model, cut(head_sizes(model)[0], eos_ids_of(model, speaker)))
        return model

    if options.stored:
        config, _ = PreTrainedConfig.get_config_dict(directory)
        known = config.get("model_type") == CUT_TYPE or knows(str(config.get("model_type")))
        if known and "quantization_config" not in config:
            model = read("auto")
            if model.dtype == torch.float32 or compile_layers(model.train(False)) is None:
                return model
    return read(options.dtype)


def _weights(
    directory: Path, name: str, which: str, options: LoadOptions, dtype: torch.dtype | str
) -> PreTrainedModel:
    place = {} if options.device_map is None else {"device_map": options.device_map}
    loaded: Any
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
            **place,
            **options.extra,
        )
    except Exception as error:
        raise load_error(error, name, which) from error
    model, info = loaded
    # transformers would initialise missing weights at random.
    if missing := sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"]):
        raise UserError(
            f"the {which} {name} lacks {len(missing)} of its weights ({missing[0]}, ...): "
            "fetch all its safetensors files again"
        )
    assert isinstance(model, PreTrainedModel)
    if not place:
        model.to(options.device)  # type: ignore[arg-type]
    return model


def _context(config: Any) -> int:
    return int(next(filter(None, (getattr(config, name, None) for name in _CONTEXT_NAMES)), _NO_LIMIT))


def _served(model: PreTrainedModel, which: str, name: str, context: int) -> int:
    """The part of a model's context for which its runner gives the right laws; logs a warning if that is not all."""
    longest = longest_text(model)
    if longest is None or longest >= context:
        return context
    _log.warning(
        "the %s %s is served up to %d of its %d tokens of context (%s)",
        which, name, longest, context, runner_kind(model)[1],
    )  # fmt: skip
    return longest


def _check_ends(target: LoadedModel, tokens: int) -> None:
    """Refuse a common vocabulary without an EOS token; log a warning if it lacks some of them."""
    lost = [id for id in target.eos_ids if id >= tokens]
    if lost and len(lost) == len(target.eos_ids):
        raise UserError(
            f"the target ends texts with token {lost[0]}, and the models have only the first {tokens} tokens "
            "in common: choose a draft that knows it"
        )
    if lost:
        _log.warning(
            "the target also ends texts with token %s, which is never written: the models have only the first %d "
            "tokens in common",
            ", ".join(map(str, lost)), tokens,
        )  # fmt: skip


def check_request(
    pair: LoadedPair,
    prompt_len: int,
    max_new_tokens: int,
    needs_target: bool = True,
    needs_draft: bool = True,
) -> None:
    """Refuse a request that does not fit into the context of a model that it uses.

    Args:
        pair: the loaded models.
        prompt_len: number of prompt tokens.
        max_new_tokens: maximum number of new tokens.
        needs_target, needs_draft: whether the request uses this model.

    Raises:
        UserError: names the model, its context and the largest ``max_new_tokens`` that fits.
    """
    asked = pair.asked(needs_target, needs_draft)
    for which, model in asked.items():
        if prompt_len + max_new_tokens <= model.context:
            continue
        room = min(one.context for one in asked.values()) - prompt_len
        fix = "shorten the prompt" if room < 1 else f"use max_new_tokens={room} or less"
        raise ContextLengthError(
            f"{prompt_len} prompt tokens and {max_new_tokens} new ones exceed the context of the {which} {model.id}, "
            f"{model.context} tokens: {fix}"
        )


def builtin_paths() -> dict[str, Path]:
    """Directories of the built-in pair and its gate: "target", "draft", "gate".

    Raises:
        UserError: the package was installed without them.
    """
    paths = {name: _BUILTIN / name for name in ("target", "draft", "gate")}
    for name, path in paths.items():
        if not (path / "config.json").is_file():
            raise UserError(
                f"the built-in {name} is not in this installation ({path}): "
                "reinstall sprinter-llm, or run scripts/cut_builtin.py and scripts/finish_builtin.py in a checkout"
            )
    return paths


def builtin_heads() -> list[Path]:
    """Directories of the built-in heads for the stop rules "specdec++" and "disco"."""
    return [_BUILTIN / name for name in ("specdec", "disco") if (_BUILTIN / name / "config.json").is_file()]
