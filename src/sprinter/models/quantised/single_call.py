"""A forward pass of a model with joined layers that goes straight to its parts.

In a small model what transformers does between them (masks, lists of layers, outputs of many kinds) takes longer than
the layers. Here a pass is one call of the kernels, from token ids to logits. Where a part is another than the kernels
know, is watched by a hook, or a state in between is wanted, the model's own modules are called one after the other, as
its ``forward`` would; a pass that is anything more than that, or a model that is, takes the usual way. What a model is
is looked at when a runner is made, what its parts are at the runner's first pass.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
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
from sprinter.models.quantised.fused_layers import _Call, _Forward, is_joined, reads_in_place
from sprinter.models.quantised.layers import QuantisedEmbedding, QuantisedLinear, plain_matrix
from sprinter.models.quantised.library import FLOATS, NUMBER, MatrixFacts, floats, kernel
from sprinter.models.quantised.norm import ForwardOverride, LastNorm
from sprinter.models.quantised.unchanged import hooks_of
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
        self._runtime: _OneCall | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """None: its passes take the usual way."""
        if not is_joined(model):
            return None
        why: str | None = None
        if not goes_straight(model):
            if not isinstance(model, _CLASSES):
                return None
            why = "its class has a forward of its own"
        elif _watched(model) or _watched(model.model):
            why = "it has hooks or a forward of its own"
        if why is None:
            return cls(model)
        _tell(model, f"{_USUAL} {why}")
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
        if isinstance(attention_mask, Mapping):
            if len(attention_mask) != 1:
                _tell(model, f"{_USUAL} its layers need several masks")
                return None
            (attention_mask,) = attention_mask.values()
        inner = model.model
        member = next(iter(inner.layers._modules.values())).__dict__.get("forward")
        call = member.call_of_all(cache) if type(member) is _Forward else None
        if call is None:
            _tell(model, f"{_USUAL} its layers have hooks, or are of several shapes")
            return None
        if not layers and (parts := self._parts_of(model, call)) is not None:
            return parts.outputs(model, tokens, position_ids, attention_mask, cache, logits)
        embedded = inner.embed_tokens(tokens)
        positions = inner.rotary_emb(embedded, position_ids=position_ids)
        *states, last = member.whole(call, cache)(embedded, positions, attention_mask, layers)
        hidden = inner.norm(last)
        return (model.lm_head(hidden) if logits else None), hidden, tuple(states)

    def _parts_of(self, model: Any, call: _Call) -> _OneCall | None:
        """What one call of the kernels takes; None: not in one call."""
        if self._runtime is None or self._runtime.call is not call:
            self._runtime = _OneCall(model, call)
        if not self._runtime.fit:
            why = "its embedding, last norm or rotary embedding is not known"
            _tell(model, f"a pass is several calls of the kernels: {why}")
            return None
        return self._runtime


_USUAL = "transformers runs what is between its layers, because"
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
        self.call, parts = call, model.model._modules
        embedding, norm, rotary = (parts[name] for name in ("embed_tokens", "norm", "rotary_emb"))
        head = model._modules["lm_head"]
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
        # What the facts point to lives as long as they do.
        own = [one for part in (embedding, head) for one in (*part.parameters(), *part.buffers())]
        self._held: list[Any] = [embedding, head, weight, *(one.detach() for one in own)]
        facts.embedding, facts.scale = rows
        if matrix is not None and matrix[0].width == width:
            facts.head, bias = matrix
            self._held.append(bias)
        self._angles = _angles(rotary, 0)
        facts.layers, facts.count = ctypes.addressof(call.facts), len(call.numbers)
        facts.norm, facts.eps = weight.data_ptr(), norm.variance_epsilon
        facts.scaling, facts.cap = call.shape.scaling, call.shape.cap
        self._facts, self._width, self._vocab = facts, width, facts.head.high

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
        span, (keys, _, rows) = cache.span, cache.visible(self.call.numbers[0])
        states = floats(batch, n, self._width)
        said = floats(batch, n, self._vocab) if logits and self._vocab else None
        held: list[Tensor | None] = [None, None, None]  # position, row, slot
        last = span.start + n
        if span.index is not None:
            row, slot = cache.places(batch, n)
            place = positions.expand(batch, n).contiguous()
            held, last = [place, row, slot], int(place.max()) + 1
        if len(self._angles[0]) < last:
            self._angles = _angles(self._rotary, last)
        cosine, sine = self._angles
        seen, steps = None, (0, 0)
        if mask is not None:
            seen = visible(mask)[:, 0]
            if span.flat:
                seen = seen.transpose(0, 1)
            seen = seen if seen.stride(-1) == 1 else seen.contiguous()
            steps = tuple(0 if seen.shape[axis] == 1 else seen.stride(axis) for axis in (0, 1))  # type: ignore[assignment]
        ids, buffers = tokens.to(torch.int64).contiguous(), cache.addresses(self.call.numbers)
        kernel().run_pass(
            ctypes.byref(self._facts), ids.data_ptr(), *((n, batch) if span.flat else (batch, n)), span.start,
            *map(_at, held), cosine.data_ptr(), sine.data_ptr(), (ctypes.c_void_p * len(buffers))(*buffers),
            keys.stride(1) // keys.stride(2), keys.shape[2], _at(seen), *steps, _at(rows), states.data_ptr(), _at(said),
            torch.get_num_threads(),
        )  # fmt: skip
        return states, said


def _at(given: Tensor | None) -> int | None:
    return None if given is None else given.data_ptr()


def _is_ours(part: Any) -> bool:
    """Whether nothing watches a module, and what stands in the place of its ``forward`` is ours."""
    return not hooks_of(part) and isinstance(part.__dict__.get("forward"), ForwardOverride)


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


def _angles(rotary: Any, last: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[at least last, turned]`` of all positions, as the rotary embedding has them."""
    places = torch.arange(max(256, 1 << max(last - 1, 0).bit_length()), device="cpu")[None]
    cosine, sine = (part[0].float().contiguous() for part in rotary(floats(1), position_ids=places))
    return cosine, sine


def _watched(module: Any) -> bool:
    """Whether it has hooks, or another ``forward`` than its class."""
    return bool(hooks_of(module)) or "forward" in module.__dict__
