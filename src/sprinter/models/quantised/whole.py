"""Decoder layers of the Llama family in two calls: up to the cache, and from attention to the end.

The step of a small model spends as much time in Python and in small operators as in its products. The layers stay what
they are, modules of transformers; only their ``forward`` is another, which does not call those of their children:
hooks on a layer run, hooks on its parts do not.
"""

from __future__ import annotations

import ctypes
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from sprinter.models.quantised.attention import Attention
from sprinter.models.quantised.layers import QuantisedLinear, without_gradient
from sprinter.models.quantised.library import MatrixFacts, floats, kernel
from sprinter.models.runners.row_cache import RowCache

__all__ = ["is_joined", "join_layers"]

_LAYERS = (LlamaDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_MATRICES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
_NORMS = ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")


class _Facts(ctypes.Structure):
    """``Layer`` in kernels.cpp."""

    _fields_ = (
        *((path.rpartition(".")[2], MatrixFacts) for path in _MATRICES),
        *((path.replace(".", "_"), ctypes.c_void_p) for path in _NORMS),
        *((name, ctypes.c_int64) for name in ("width", "heads", "kv", "d")),
        ("eps", ctypes.c_double),
    )


def join_layers(model: PreTrainedModel) -> int:
    """Give the decoder layers that this module knows the fast ``forward``, and return their number."""
    config = model.config
    if getattr(config, "hidden_act", None) != "silu" or getattr(config, "pretraining_tp", 1) != 1:
        return 0
    known = [layer for layer in model.modules() if type(layer) in _LAYERS and _fits(layer)]
    for layer in known:
        layer.forward = _Forward(layer)
    return len(known)


def is_joined(model: nn.Module) -> bool:
    """Whether all decoder layers have it. Then a token is the same, to the bit, in every forward pass over a chain."""
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", 0)
    return 0 < depth == sum(isinstance(vars(part).get("forward"), _Forward) for part in model.modules())


def _fits(layer: nn.Module) -> bool:
    """Whether all matrices are quantised and have whole groups."""
    parts: list[Any] = [layer.get_submodule(path) for path in _MATRICES]
    if not all(isinstance(one, QuantisedLinear) and one._matrix.padded == one._matrix.width for one in parts):
        return False
    query, key, value, out, gate, up, down = parts
    return bool(
        gate.out_features == up.out_features == down.in_features
        and query.out_features == out.in_features
        and key.out_features == value.out_features
    )


class _Forward:
    """``forward`` of a decoder layer. It holds the layer weakly, and nothing else when copied: a copy's weights are
    elsewhere."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = ref(layer)
        self._facts: _Facts | None = None
        self._places: list[int] = []  # of the norms' weights
        self._held: list[Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(memo[id(self._layer())])

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model with joined quantised layers cannot be pickled: save the one that it was made from"
        )

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """``[batch, n, d]`` -> ``[batch, n, d]``, as transformers' decoder layers have it."""
        own: Any = self._layer()
        assert position_embeddings is not None
        facts, threads = self._made(own), torch.get_num_threads()
        batch, n, width = hidden_states.shape
        x = without_gradient(hidden_states).contiguous()
        cosine, sine = (part.float().expand(batch, n, facts.d).contiguous() for part in position_embeddings)
        query = floats(batch, n, facts.heads, facts.d)
        key, value = floats(2, batch, n, facts.kv, facts.d).unbind()
        kernel().before(
            ctypes.byref(facts), x.data_ptr(), batch * n, cosine.data_ptr(), sine.data_ptr(), query.data_ptr(),
            key.data_ptr(), value.data_ptr(), threads,
        )  # fmt: skip
        keys, values, rows = key.transpose(1, 2), value.transpose(1, 2), None
        if isinstance(
            past_key_values, RowCache
        ):  # gathering some rows' keys would cost more than attention does
            keys, values, rows = past_key_values.update_in_place(keys, values, own.self_attn.layer_idx)
            if past_key_values.span.flat:  # each token attends in a row of its own
                query = query.transpose(0, 1)
                attention_mask = None if attention_mask is None else attention_mask.transpose(0, 2)
        elif past_key_values is not None:
            keys, values = past_key_values.update(keys, values, own.self_attn.layer_idx)
        attention = Attention.of(
            query.transpose(1, 2),
            keys.float(),
            values.float(),
            attention_mask,
            own.self_attn.scaling,
            0.0,
            rows,
        )
        made = floats(batch, n, width)
        kernel().after(
            ctypes.byref(facts), ctypes.byref(attention), x.data_ptr(), batch * n, made.data_ptr(), threads
        )
        return made

    def _made(self, layer: Any) -> _Facts:
        """The facts, made again where a norm's weights are others than before."""
        norms = {path: layer.get_submodule(path).weight for path in _NORMS if _has(layer, path)}
        places = [weight.data_ptr() for weight in norms.values()]
        if self._facts is None or places != self._places:
            if any(weight.dtype != torch.float32 or weight.device.type != "cpu" for weight in norms.values()):
                raise RuntimeError("a model with quantised layers stays in float32, on the CPU")
            facts, attention = _Facts(), layer.self_attn
            for path in _MATRICES:
                setattr(facts, path.rpartition(".")[2], layer.get_submodule(path).facts())
            for path, weight in norms.items():
                setattr(facts, path.replace(".", "_"), weight.data_ptr())
            facts.width, facts.d = attention.q_proj.in_features, attention.head_dim
            facts.heads = attention.q_proj.out_features // facts.d
            facts.kv = attention.k_proj.out_features // facts.d
            facts.eps = layer.input_layernorm.variance_epsilon
            self._facts, self._places = facts, places
            self._held = [weight.detach() for weight in norms.values()]
        return self._facts


def _has(layer: nn.Module, path: str) -> bool:
    parent, _, child = path.rpartition(".")
    return hasattr(layer.get_submodule(parent), child)
