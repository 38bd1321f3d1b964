"""Sprinter inside ``model.generate`` of transformers, as its ``custom_generate``.

    >>> from sprinter.doors.transformers import generate  # doctest: +SKIP
    >>> model.generate(**inputs, custom_generate=generate, draft_model=draft, method="sprinter")  # doctest: +SKIP

transformers prepares what it prepares for every call (generation config, logits processors, stopping criteria,
expanded rows), and hands it over; this module says it in Sprinter's options, or refuses by name what has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from sprinter.decode.draft import Token
from sprinter.engine.engine import Engine
from sprinter.engine.generation import Generation
from sprinter.engine.pair import Pair
from sprinter.engine.prefix import PrefixCache
from sprinter.errors import UserError
from sprinter.heads.head import Head
from sprinter.heads.load import load_any_head
from sprinter.models.choose import runner_kind
from sprinter.models.pair import LoadedPair, in_memory

__all__ = ["SprinterOutput", "generate", "hub_generate"]

_ROWS = 32
"""The most rows that share passes; further ones follow as others end."""
_NO_REUSE = PrefixCache(0)
"""``generate`` begins each text anew: weights may have changed in between."""


@dataclass
class SprinterOutput(GenerateDecoderOnlyOutput):
    """What ``generate`` returns with ``return_dict_in_generate=True``.

    Attributes:
        sequences: token ids ``[rows, longest]``, prompts included, padded as transformers pads them.
        generations: of each row, the text's tokens with origin and drift, and its counts (``Generation``).
    """

    generations: list[Generation] | None = None


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    draft_model: PreTrainedModel | None = None,
    method: str | None = None,
    gate: str | Path | Head | None = None,
    heads: Sequence[str | Path | Head] = (),
    budget: float | None = None,
    require_lossless: bool = False,
    seed: int | None = None,
    token_streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | SprinterOutput:
    """A decoding loop for ``model.generate(..., custom_generate=generate)``.

    transformers passes the first five arguments and ``model_kwargs``; keywords reach this function by their names
    alone, so that ``streamer``, ``assistant_model`` and ``tokenizer`` do not: give ``token_streamer`` and
    ``draft_model``, and stop strings as ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]``.

    Args:
        input_ids: prompts ``[rows, width]``, padded on the left where ``attention_mask`` says so.
        draft_model: drafts; None: heads do, or plain decoding.
        method: as in ``GenerationOptions``; None: the default, exact and never slower than plain decoding.
        gate, heads: as in ``load_pair``.
        budget, require_lossless: as in ``GenerationOptions``.
        seed: of the draws; None: one drawn from torch's generator, so that ``set_seed`` reproduces the text.
        token_streamer: a streamer of transformers, for one row. It is given the prompt, then each token.

    Returns:
        Token ids ``[rows, longest]``, or a ``SprinterOutput``.

    Raises:
        UserError: an argument that cannot be honoured, by its name.
    """
    _refuse(model, generation_config, model_kwargs)
    prompts = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    ends, criteria = _ends(stopping_criteria)
    options = _options(logits_processor, input_ids.shape[1])
    room = min(one.max_length for one in stopping_criteria if isinstance(one, MaxLengthCriteria))
    if not generation_config.do_sample:
        options["temperature"] = 0.0
    options["max_new_tokens"] = room - input_ids.shape[1]
    if "min_new_tokens" in options:
        options["min_new_tokens"] = min(options["min_new_tokens"], options["max_new_tokens"])
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    if token_streamer is not None:
        if len(prompts) > 1:
            raise UserError(f"token_streamer is for one row, and there are {len(prompts)}: leave it out")
        token_streamer.put(input_ids.cpu())
    pair = _pair(model, draft_model, gate, heads, ends)
    texts = _decode(
        pair, prompts, input_ids, criteria, token_streamer, seed,
        {**options, "method": method, "budget": budget, "require_lossless": require_lossless},
    )  # fmt: skip
    if token_streamer is not None:
        token_streamer.end()
    sequences = _padded(input_ids, texts, generation_config.pad_token_id, ends)
    if not generation_config.return_dict_in_generate:
        return sequences
    return SprinterOutput(sequences=cast(Any, sequences), generations=texts)


def hub_generate(model: PreTrainedModel, inputs: Tensor | None = None, **arguments: Any) -> Any:
    """``generate`` for a hub repository's ``custom_generate/generate.py``, which receives all that a user gives.

    ``tokenizer``, ``stop_strings``, ``streamer`` and ``assistant_model`` are honoured here: see ``generate``.
    """
    config, given = arguments.pop("generation_config", None), dict(arguments)
    tokenizer, streamer = given.pop("tokenizer", None), given.pop("streamer", None)
    assistant = given.pop("assistant_model", None)
    strings = given.pop("stop_strings", None)
    if strings is None and config is not None and config.stop_strings is not None:
        strings = config.stop_strings
        config = GenerationConfig.from_dict({**config.to_dict(), "stop_strings": None})
    if strings is not None:
        if tokenizer is None:
            raise UserError("stop_strings needs the tokenizer: give tokenizer=... too")
        criterion = StopStringCriteria(tokenizer, strings)
        given["stopping_criteria"] = [*(given.get("stopping_criteria") or ()), criterion]
    if assistant is not None:
        given["draft_model"] = assistant
    if streamer is not None:
        given["token_streamer"] = streamer
    given = {name: value for name, value in given.items() if value is not None}
    if "stopping_criteria" in given:
        given["stopping_criteria"] = StoppingCriteriaList(given["stopping_criteria"])
    generating: Any = model.generate
    return generating(inputs, generation_config=config, custom_generate=generate, **given)


# --- what transformers says, in our options ---------------------------------------------------------------------------
def _words(processor: Any) -> dict[str, Any]:
    return {"bad_words": [list(word) for word in processor.bad_word_ids]}


def _suppressed(processor: Any) -> dict[str, Any]:
    return {"bad_words": [[int(id)] for id in processor.suppress_tokens]}


def _bias(processor: Any) -> dict[str, Any]:
    if long := [list(ids) for ids in processor.sequence_bias if len(ids) > 1]:
        raise UserError(
            f"sequence_bias of several tokens, such as {long[0]}, is not honoured: give single tokens"
        )
    return {"logit_bias": {ids[0]: bias for ids, bias in processor.sequence_bias.items()}}


def _penalty(processor: Any) -> dict[str, Any]:
    if isinstance(processor.prompt_ignore_length, int) and processor.prompt_ignore_length > 0:
        raise UserError(
            "a repetition penalty that ignores the prompt is not honoured: leave prompt_ignore_length out"
        )
    return {"repetition_penalty": processor.penalty}


_PROCESSORS: Mapping[type, Callable[[Any], dict[str, Any]]] = {
    TemperatureLogitsWarper: lambda processor: {"temperature": processor.temperature},
    TopKLogitsWarper: lambda processor: {"top_k": processor.top_k},
    TopPLogitsWarper: lambda processor: {"top_p": processor.top_p},
    MinPLogitsWarper: lambda processor: {"min_p": processor.min_p},
    RepetitionPenaltyLogitsProcessor: _penalty,
    SequenceBiasLogitsProcessor: _bias,
    NoBadWordsLogitsProcessor: _words,
    SuppressTokensLogitsProcessor: _suppressed,
    MinNewTokensLengthLogitsProcessor: lambda processor: {"min_new_tokens": processor.min_new_tokens},
    MinLengthLogitsProcessor: lambda processor: {"min_length": processor.min_length},
    LogitNormalization: lambda processor: {},  # laws are normalised
}
"""Class of a processor → the options that do the same. Each is used in the same order as there (docs/sampling.md)."""


def _options(processors: LogitsProcessorList, width: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for one in processors:
        if (said := _PROCESSORS.get(type(one))) is None:
            raise UserError(
                f"the logits processor {type(one).__name__} is not honoured: it would have to change draft and target "
                f"alike; known are {', '.join(kind.__name__ for kind in _PROCESSORS)}"
            )
        for name, value in said(one).items():
            if name == "min_length":
                name, value = "min_new_tokens", max(value - width, 0)
            if name == "bad_words":
                value = [*options.get(name, ()), *value]
            elif name in options:
                value = max(options[name], value) if name == "min_new_tokens" else _twice(one, name)
            options[name] = value
    return options


def _twice(processor: Any, name: str) -> Any:
    raise UserError(f"two logits processors set {name} ({type(processor).__name__}): give one")


def _ends(criteria: StoppingCriteriaList) -> tuple[tuple[int, ...], list[Any]]:
    """The tokens that end a text, and the criteria that are asked after each token."""
    ends: dict[int, None] = {}
    for one in criteria:
        if isinstance(one, EosTokenCriteria):
            ends.update(dict.fromkeys(one.eos_token_id.tolist()))
    return tuple(ends), [one for one in criteria if not isinstance(one, EosTokenCriteria | MaxLengthCriteria)]


_REFUSED = {
    "output_scores": "our results have drift, not scores: read logits by one pass over .sequences",
    "output_logits": "our results have drift, not logits: read them by one pass over .sequences",
    "output_attentions": "leave it out",
    "output_hidden_states": "leave it out",
    "token_healing": "leave it out",
}


def _refuse(model: PreTrainedModel, config: GenerationConfig, kwargs: Mapping[str, Any]) -> None:
    if model.training:
        raise UserError("the model is in training mode: call model.eval() first")
    if (config.num_beams or 1) > 1:
        raise UserError(
            "num_beams > 1 is not honoured: drafts are judged by the law of one text; leave it out"
        )
    for name, why in _REFUSED.items():
        if getattr(config, name, None):
            raise UserError(f"{name} is not honoured: {why}")
    if kwargs.get("inputs_embeds") is not None:
        raise UserError("inputs_embeds is not honoured: give input_ids")
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length():
        raise UserError("a cache that holds text is not honoured: leave it out, the prompt is read here")
    known = (
        "attention_mask",
        "position_ids",
        "cache",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "inputs_embeds",
    )
    for name, value in kwargs.items():
        if value is not None and name not in known:
            raise UserError(f"{name}= is not honoured: the models are given token ids alone; leave it out")


# --- rows -------------------------------------------------------------------------------------------------------------
def _unpadded(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    rows: list[list[int]] = input_ids.tolist()
    if mask is None:
        return rows
    kept = mask.bool().tolist()
    for number, one in enumerate(kept):
        if False in one[one.index(True) if True in one else 0 :]:
            raise UserError(f"row {number} is not padded on the left: set tokenizer.padding_side = 'left'")
    return [
        [id for id, keep in zip(row, one, strict=True) if keep] for row, one in zip(rows, kept, strict=True)
    ]


def _padded(prompts: Tensor, texts: list[Generation], pad: int | None, ends: tuple[int, ...]) -> Tensor:
    filler = pad if pad is not None else ends[0] if ends else 0
    longest = max(len(one.tokens) for one in texts)
    new = [[token.id for token in one.tokens] for one in texts]
    rows = [[*row, *[filler] * (longest - len(row))] for row in new]
    return torch.cat([prompts, torch.tensor(rows, dtype=prompts.dtype, device=prompts.device)], 1)


def _decode(
    pair: Pair,
    prompts: list[list[int]],
    input_ids: Tensor,
    criteria: list[Any],
    streamer: Any,
    seed: int,
    options: dict[str, Any],
) -> list[Generation]:
    """All rows to their ends, in the order of the prompts."""
    results: dict[int, Generation] = {}
    written = [input_ids[row : row + 1] for row in range(len(prompts))]
    with (
        _One(pair, prompts[0], seed, options)
        if len(prompts) == 1
        else _Rows(pair, prompts, seed, options) as rows
    ):
        for row, tokens, ended in rows:
            for token in tokens:
                if streamer is not None:
                    streamer.put(torch.tensor([token.id]))
                if not criteria:
                    continue
                written[row] = torch.cat([written[row], input_ids.new_tensor([[token.id]])], 1)
                if any(bool(torch.as_tensor(one(written[row], None)).all()) for one in criteria):
                    whole = rows.cancel(row) if ended is None else ended
                    kept = whole.tokens[: written[row].shape[1] - input_ids.shape[1]]
                    results[row] = replace(whole, tokens=kept, finish_reason="stop")
                    break
            if ended is not None:
                results.setdefault(row, ended)
    return [results[row] for row in range(len(prompts))]


class _One:
    """One row, in the caches of its pair."""

    def __init__(self, pair: Pair, prompt: list[int], seed: int, options: dict[str, Any]) -> None:
        self._stream = pair.stream(prompt, seed=seed, **options)

    def __enter__(self) -> _One:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()

    def __iter__(self) -> Iterator[tuple[int, list[Token], Generation | None]]:
        for token in self._stream:
            yield 0, [token], None
        yield 0, [], self._stream.generation

    def cancel(self, row: int) -> Generation:
        self._stream.close()
        return self._stream.generation


class _Rows:
    """Several rows, which share passes."""

    def __init__(self, pair: Pair, prompts: list[list[int]], seed: int, options: dict[str, Any]) -> None:
        longest = max(len(one) for one in prompts) + options["max_new_tokens"]
        loaded = pair.models.asked().values()
        alone = any(
            runner_kind(one.model)[0] == "crop" for one in loaded
        )  # such models decode one row at a time
        rows = 1 if alone else min(len(prompts), _ROWS)
        self._engine = Engine(pair, rows=rows, max_len=min(longest, pair.models.longest))
        self._ids = [self._engine.add(ids, seed=seed + row, **options) for row, ids in enumerate(prompts)]

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.close()

    def __iter__(self) -> Iterator[tuple[int, list[Token], Generation | None]]:
        row_of = {id: row for row, id in enumerate(self._ids)}
        while self._engine.unfinished:
            for event in self._engine.step():
                if event.error is not None:
                    raise event.error
                yield row_of[event.id], event.tokens, event.generation

    def cancel(self, row: int) -> Generation:
        return self._engine.cancel(self._ids[row])


# --- pairs ------------------------------------------------------------------------------------------------------------
class _Held:
    """The last pair of a target, kept in the target itself, so that both go together; never copied with it."""

    def __init__(self, key: Any = None, pair: Pair | None = None, stamp: Any = None) -> None:
        self.key, self.pair, self.stamp = key, pair, stamp

    def __reduce__(self) -> Any:
        return _Held, ()


def _pair(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    gate: str | Path | Head | None,
    heads: Sequence[str | Path | Head],
    ends: tuple[int, ...],
) -> Pair:
    """A pair of these models; the last one, loaded anew where weights have changed since."""
    key = (None if draft is None else id(draft), _named(gate), tuple(map(_named, heads)), ends)
    stamp = tuple(_stamp(one) for one in (model, draft) if one is not None)
    held: _Held = vars(model).setdefault("_sprinter_pair", _Held())
    if held.pair is None or held.key != key:
        given = [
            load_any_head(one) if isinstance(one, str | Path) else one
            for one in (gate, *heads)
            if one is not None
        ]
        target = in_memory(model, "target", ends)
        drafter = None if draft is None else in_memory(draft, "draft", ends)
        held.pair, held.key = Pair(LoadedPair(target, drafter, None), None, given, _NO_REUSE), key
    elif held.stamp != stamp:
        held.pair.reload()
    held.stamp = stamp
    return held.pair


def _named(head: Any) -> Any:
    return str(head) if isinstance(head, str | Path) else id(head)


def _stamp(model: PreTrainedModel) -> tuple[Any, ...]:
    """Changes with weights, dtype, device, adapters and hooks."""
    weights = tuple(
        (one.data_ptr(), 0 if one.is_inference() else one._version)  # inference tensors count no versions
        for one in model.parameters()
    )
    hooks = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())
    return hash(weights), hooks, model.device, model.dtype
