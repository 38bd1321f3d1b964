"""A forward pass of a model with joined layers that goes straight to its parts.

In a small model what transformers does between them (masks, lists of layers, outputs of many kinds) takes longer than
the layers. Here a pass is one call of the kernels, from token ids to logits. Where a part is another than the kernels
know, is watched by a hook, or a state in between is wanted, the model's own modules are called one after the other, as
its ``forward`` would; a pass that is anything more than that, or a model that is, takes the usual way.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    Phi3ForCausalLM,
    Phi3Model,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sprinter.models.quantised.attention import visible
from sprinter.models.quantised.layers import QuantisedEmbedding, QuantisedLinear, plain_matrix
from sprinter.models.quantised.library import FLOATS, NUMBER, MatrixFacts, floats, kernel
from sprinter.models.quantised.norm import Instead, LastNorm
from sprinter.models.quantised.unchanged import place_of
from sprinter.models.quantised.whole import _Call, _Forward, is_joined, reads_in_place
from sprinter.models.runners.row_cache import RowCache

__all__ = ["Straight", "goes_straight"]

_log = logging.getLogger("sprinter")

_KNOWN: dict[Callable[..., Any], Callable[..., Any]] = {
    model.forward: inner.forward
    for model, inner in (
        (LlamaForCausalLM, LlamaModel),
        (MistralForCausalLM, MistralModel),
        (Phi3ForCausalLM, Phi3Model),
        (Qwen2ForCausalLM, Qwen2Model),
        (Qwen3ForCausalLM, Qwen3Model),
    )
}
"""``forward`` of models that do nothing more than here, and of the models in them."""
_CLASSES = (LlamaForCausalLM, MistralForCausalLM, Phi3ForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_ROTARY = (
    LlamaRotaryEmbedding,
    MistralRotaryEmbedding,
    Phi3RotaryEmbedding,
    Qwen2RotaryEmbedding,
    Qwen3RotaryEmbedding,
)
_STEADY = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embeddings whose angles depend on a token's position alone."""


class _ModelFacts(ctypes.Structure):
    """``Model`` in kernels.cpp."""

    _fields_ = (
        ("embedding", MatrixFacts),
        ("head", MatrixFacts),
        ("layers", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("norm", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("eps", "scale", "scaling", "cap")),
    )


def goes_straight(model: PreTrainedModel) -> bool:
    """Whether a model, once its layers are joined, needs none of transformers' code between them."""
    inner = getattr(model, "model", None)
    return inner is not None and _KNOWN.get(type(model).forward) is type(inner).forward


class Straight:
    """Forward passes of one model, which it holds weakly.

    Args:
        model: a model for which ``of`` made it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = ref(model)
        self._parts: _OneCall | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """None: its passes take the usual way."""
        if not is_joined(model):
            return None
        if goes_straight(model):
            return cls(model)
        if isinstance(model, _CLASSES):
            _tell(model, "its class has a forward of its own, which runs what is between its layers")
        return None

    def __call__(
        self,
        tokens: Tensor,
        logits: bool,
        position_ids: Tensor,
        attention_mask: Tensor | Mapping[str, Tensor | None] | None,
        cache: RowCache,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor | None, Tensor, tuple[Tensor, ...]] | None:
        """Logits, if they are wanted, the states that they are made of, and those of some decoder layers; None: this
        pass takes the usual way.

        Args:
            tokens: ``[batch, n]``. layers: numbers from 0. The others as transformers has them.
        """
        model: Any = self._model()
        made = self._pass(model, tokens, logits, position_ids, attention_mask, cache, layers)
        if isinstance(made, str):
            _tell(model, f"transformers runs what is between its layers, because {made}")
            return None
        return made

    def _pass(
        self,
        model: Any,
        tokens: Tensor,
        logits: bool,
        position_ids: Tensor,
        attention_mask: Tensor | Mapping[str, Tensor | None] | None,
        cache: RowCache,
        layers: Sequence[int],
    ) -> tuple[Tensor | None, Tensor, tuple[Tensor, ...]] | str:
        """What a call returns; why it takes the usual way."""
        if isinstance(attention_mask, Mapping):
            if len(attention_mask) != 1:
                return "its layers need several masks"
            (attention_mask,) = attention_mask.values()
        inner = model.model
        if _KNOWN.get(type(model).forward) is not type(inner).forward:
            return "its class has another forward than it had"
        if _watched(model) or _watched(inner) or _global_forward_hooks or _global_forward_pre_hooks:
            return "it has hooks or a forward of its own"
        first = next(iter(inner.layers._modules.values()))
        member = first.__dict__.get("forward")
        if type(member) is not _Forward or first._forward_hooks or first._forward_pre_hooks:
            return "its first layer is another than it was, or has hooks"
        call = member.call_of_all(cache)
        if call is None:
            return "a layer is another than it was, or has hooks"
        if not layers and (parts := self._parts_of(model, call)) is not None:
            return parts.outputs(model, tokens, position_ids, attention_mask, cache, logits)
        embedded = inner.embed_tokens(tokens)
        positions = inner.rotary_emb(embedded, position_ids=position_ids)
        *states, last = member.whole(call, cache)(embedded, positions, attention_mask, layers)
        hidden = inner.norm(last)
        return (model.lm_head(hidden) if logits else None), hidden, tuple(states)

    def _parts_of(self, model: Any, call: _Call) -> _OneCall | None:
        """What one call of the kernels takes, made again where something has changed; None: not in one call."""
        if self._parts is None or not self._parts.hold(model, call):
            self._parts = _OneCall(model, call)
        if not self._parts.fit:
            _tell(
                model,
                "a pass is several calls of the kernels: its embedding, last norm or rotary embedding is not known",
            )
            return None
        return self._parts


_told: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


def _tell(model: PreTrainedModel, why: str) -> None:
    """Say, once for a model, why its passes are slower than they could be."""
    if why not in _told.setdefault(model, set()):
        _told[model].add(why)
        _log.warning("forward passes of %s are slower than they could be: %s", type(model).__name__, why)


class _OneCall:
    """The parts of a model around its layers, as the kernels take them.

    Args:
        model: the model. call: of all its layers.

    Attributes:
        fit: whether the kernels know them; all else is undefined if not.
    """

    def __init__(self, model: Any, call: _Call) -> None:
        self._call, self._known = call, _modules_of(model)
        self._places = [*map(_state_of, self._known)]
        embedding, norm, head, rotary = self._known
        self._rotary: Any = rotary
        rows, weight, width = _embedding_facts(embedding), _norm_weight(norm), call.facts[0].width
        steady = type(rotary) in _ROTARY and rotary.rope_type in _STEADY and not _watched(rotary)
        self.fit = (
            rows is not None and weight is not None and steady and rows[0].width == len(weight) == width
        )
        if not self.fit:
            return
        assert rows is not None and weight is not None
        facts, matrix = _ModelFacts(), _head_facts(head)
        # What the facts point to lives as long as they do, also where another thread replaces it.
        self._held: list[Tensor | None] = [*self._weights(), weight]
        facts.embedding, facts.scale = rows
        if matrix is not None and matrix[0].width == width:
            facts.head, bias = matrix
            self._held.append(bias)
        facts.layers, facts.count = ctypes.addressof(call.facts), len(call.numbers)
        facts.norm, facts.eps = weight.data_ptr(), norm.variance_epsilon
        facts.scaling, facts.cap = call.shape.scaling, call.shape.cap
        self._facts, self._width, self._vocab = facts, width, facts.head.high

    def _weights(self) -> list[Tensor]:
        return [one.detach() for part in self._known for one in _weights_of(part) if one is not None]

    def hold(self, model: Any, call: _Call) -> bool:
        """Whether all is as it was."""
        now = _modules_of(model)
        return (
            call is self._call
            and all(one is other for one, other in zip(now, self._known, strict=True))
            and [*map(_state_of, now)] == self._places
        )

    def outputs(
        self,
        model: Any,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: RowCache,
        logits: bool,
    ) -> tuple[Tensor | None, Tensor, tuple[Tensor, ...]]:
        """What ``Straight`` returns of a pass; arguments as there."""
        hidden, said = self.run(tokens, positions, mask, cache, logits)
        return (model.lm_head(hidden) if logits and said is None else said), hidden, ()

    def run(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: RowCache, logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """States ``[batch, n, d]``, and logits ``[batch, n, vocab]`` if they are wanted and the output layer is known;
        arguments as for ``Straight``."""
        batch, n = tokens.shape
        span, (keys, _, rows) = cache.span, cache.visible(self._call.numbers[0])
        states = floats(batch, n, self._width)
        said = floats(batch, n, self._vocab) if logits and self._vocab else None
        held: list[Tensor | None] = [None, None, None]  # position, row, slot
        last = span.start + n
        if span.index is not None:
            row, slot = cache.places(batch, n)
            place = positions.expand(batch, n).contiguous()
            held, last = [place, row, slot], int(place.max()) + 1
        cosine, sine = _angles(self._rotary, last)
        seen, steps = None, (0, 0)
        if mask is not None:
            seen = visible(mask)[:, 0]
            if span.flat:
                seen = seen.transpose(0, 1)
            seen = seen if seen.stride(-1) == 1 else seen.contiguous()
            steps = tuple(0 if seen.shape[axis] == 1 else seen.stride(axis) for axis in (0, 1))  # type: ignore[assignment]
        ids, buffers = tokens.to(torch.int64).contiguous(), cache.addresses(self._call.numbers)
        kernel().run_pass(
            ctypes.byref(self._facts), ids.data_ptr(), *((n, batch) if span.flat else (batch, n)), span.start,
            *map(_at, held), cosine.data_ptr(), sine.data_ptr(), (ctypes.c_void_p * len(buffers))(*buffers),
            keys.stride(1) // keys.stride(2), keys.shape[2], _at(seen), *steps, _at(rows), states.data_ptr(), _at(said),
            torch.get_num_threads(),
        )  # fmt: skip
        return states, said


def _at(given: Tensor | None) -> int | None:
    return None if given is None else given.data_ptr()


def _modules_of(model: Any) -> tuple[Any, ...]:
    """Embedding, last norm, output layer and rotary embedding."""
    parts = model.model._modules
    return parts["embed_tokens"], parts["norm"], model._modules["lm_head"], parts["rotary_emb"]


def _state_of(part: Any) -> list[Any]:
    """What changes if a module becomes another: its hooks, ``forward``, weights."""
    own, weights = part.__dict__, _weights_of(part)
    places = [None if one is None else (place_of(one), one.shape, one.stride()) for one in weights]
    return [_has_hooks(part), own.get("forward"), own.get("_matrix"), places]


def _weights_of(part: Any) -> list[Tensor | None]:
    return [*part._parameters.values(), *part._buffers.values()]


def _is_ours(part: Any) -> bool:
    """Whether nothing watches a module, and what stands in the place of its ``forward`` is ours."""
    return not _has_hooks(part) and isinstance(part.__dict__.get("forward"), Instead)


def _norm_weight(part: Any) -> Tensor | None:
    """Of the last norm, in float32; None: the kernels do not know it."""
    weight = part._parameters.get("weight")
    ours = _is_ours(part) and type(part.__dict__["forward"]) is LastNorm
    return weight.detach().float() if ours and weight is not None and weight.device.type == "cpu" else None


def _embedding_facts(part: Any) -> tuple[MatrixFacts, float] | None:
    """Facts and scale of an embedding; None: the kernels do not know it."""
    if type(part) is QuantisedEmbedding and not _watched(part):
        matrix = part._matrix
        if matrix.padded != matrix.width:
            return None
        high, kind = matrix.high, NUMBER[matrix.form.name]
        return MatrixFacts(kind, matrix.packed.data_ptr(), high, matrix.width, None, high, high), part._scale
    weight = part._parameters.get("weight")
    if type(part) is not nn.Embedding or not _is_ours(part) or weight is None or part.max_norm is not None:
        return None
    plain = type(weight.data) is Tensor and weight.device.type == "cpu" and weight.is_contiguous()
    if not plain or weight.dtype not in FLOATS:
        return None
    high, width = weight.shape
    return MatrixFacts(FLOATS[weight.dtype], weight.data_ptr(), high, width, None, high, high), 1.0


def _head_facts(part: Any) -> tuple[MatrixFacts, Tensor | None] | None:
    """Facts of an output layer, and its bias in float32; None: it is called."""
    if type(part) is QuantisedLinear and not _watched(part):
        matrix = part._matrix
        whole = matrix.padded == matrix.width
        return (part.facts(0, matrix.high, matrix.high, matrix.high), part.bias) if whole else None
    if not reads_in_place(part) or not _is_ours(part):
        return None
    weight: Any = plain_matrix(part)
    bias = None if part.bias is None else part.bias.detach().float()
    high, width = weight.shape
    return MatrixFacts(FLOATS[weight.dtype], weight.data_ptr(), high, width, _at(bias), high, high), bias


_tables: WeakKeyDictionary[nn.Module, tuple[float, Tensor, Tensor, Tensor]] = WeakKeyDictionary()


def _angles(rotary: Any, last: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[at least last, turned]`` of all positions, as the rotary embedding has them."""
    sizes, scaling = rotary.inv_freq, rotary.attention_scaling
    held = _tables.get(rotary)
    if held is None or held[0] != scaling or not torch.equal(held[1], sizes) or len(held[2]) < last:
        count = max(256, 1 << (last - 1).bit_length())
        places = torch.arange(count, device="cpu")[None]
        cosine, sine = (part[0].float().contiguous() for part in rotary(floats(1), position_ids=places))
        held = _tables[rotary] = (scaling, sizes.clone(), cosine, sine)
    return held[2], held[3]


def _watched(module: Any) -> bool:
    """Whether it has hooks, or another ``forward`` than its class."""
    return _has_hooks(module) or "forward" in module.__dict__


def _has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
