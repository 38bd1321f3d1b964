"""What the decoder layers of each family are built of, for the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2Attention,
    Gemma2DecoderLayer,
    Gemma2ForCausalLM,
    Gemma2Model,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3ForCausalLM, Gemma3TextModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2LMHeadModel, GPT2Model
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXForCausalLM, GPTNeoXLayer, GPTNeoXModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralForCausalLM, MistralModel
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer, Phi3ForCausalLM, Phi3Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3Model

__all__ = [
    "ACTIVATIONS", "FAMILIES", "MATRICES", "MODELS", "TYPES", "LayerFamily", "LayerShape", "MatrixPart", "ModelParts",
    "Norms",
]  # fmt: skip

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
"""Matrices of a layer, as layers.h has them."""
_CACHES = ("past_key_values", "layer_past")
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu": 2}
"""Name in a config -> number in layers.h."""


class MatrixPart(NamedTuple):
    """Rows of a linear layer that are one of ``MATRICES``.

    Attributes:
        linear: the layer. number: its place in ``LayerFamily.linears``.
        first: its first row that belongs to the matrix. rows: how many do.
        run, step: they come in runs of so many, which begin so many apart; 0: all together.
    """

    linear: Any
    number: int
    first: int
    rows: int
    run: int = 0
    step: int = 0


class Norms(NamedTuple):
    """Weights and biases of a layer's norms, as layers.h has them; None: there is none."""

    norm: Tensor | None
    norm_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    second_norm: Tensor | None
    second_bias: Tensor | None
    after_attention: Tensor | None
    after_mlp: Tensor | None


class LayerShape(NamedTuple):
    """Numbers of a layer.

    Attributes:
        d: of a head. turned: those of a head that a position rotates. activation: in ``ACTIVATIONS``.
        centred: whether norms take the mean off. parallel: whether the feed-forward part reads the layer's input.
        eps: of the norms. offset: what is added to their weights.
        scaling: of attention's scores. cap: their bound, 0 for none.
    """

    d: int
    turned: int
    activation: int | None
    centred: bool
    parallel: bool
    eps: float
    offset: float
    scaling: float
    cap: float


class LayerFamily:
    """Llama's layers, and those that are built alike.

    Attributes:
        layers: name of the list of layers in a model. attention: of attention in a layer.
        linears: the linear layers with the matrices, in their order: the part of the layer that has it, its name there.
        given: names of what layers are given by position, behind the hidden states.
    """

    layers: ClassVar[str] = "layers"
    attention: ClassVar[str] = "self_attn"
    linears: ClassVar[Sequence[tuple[str, str]]] = (
        *(("self_attn", f"{name}_proj") for name in MATRICES[:4]),
        *(("mlp", f"{name}_proj") for name in MATRICES[4:]),
    )
    given: ClassVar[Sequence[str]] = ()

    def arguments(self, layer: Any, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """What a layer is given behind the hidden states, by name; its cache is "cache", whatever it is called there.

        Its name is ``past_key_values`` until transformers 5.23, ``layer_past`` in GPT-NeoX.
        """
        made = {**named, **dict(zip(self.given, given, strict=False))}
        made.setdefault("cache", next((made[name] for name in _CACHES if name in made), None))
        return made

    def attends(self, layer: Any) -> Any:
        """The module of attention."""
        return layer._modules[self.attention]

    def holders(self, layer: Any) -> list[Any]:
        """The linear layers, as ``linears``."""
        return [layer._modules[owner]._modules[name] for owner, name in self.linears]

    def parts(self, layer: Any) -> dict[str, MatrixPart]:
        """The matrices; without a gate where there is none."""
        made = zip(MATRICES, self.holders(layer), strict=True)
        return {name: _whole(one, i) for i, (name, one) in enumerate(made)}

    def norms(self, layer: Any) -> Norms:
        """Their weights and biases."""
        parts, attention = layer._modules, self.attends(layer)._modules
        query, key = (_weight(attention.get(name)) for name in ("q_norm", "k_norm"))
        first, second = _weight(parts["input_layernorm"]), _weight(parts["post_attention_layernorm"])
        return Norms(first, None, query, key, second, None, None, None)

    def is_whole(self, layer: Any) -> bool:
        """Whether the layer has attention as its class makes it, which knows its config and its number."""
        own = layer._modules.get(self.attention)
        return own is not None and hasattr(own, "config") and hasattr(own, "layer_idx")

    def usual(self, layer: Any) -> nn.Module:
        """A layer as its class makes it of the same config, without memory for weights."""
        own = self.attends(layer)
        with torch.device("meta"):
            return type(layer)(own.config, own.layer_idx)  # type: ignore[no-any-return]

    def shape(self, layer: Any) -> LayerShape:
        """Its numbers."""
        own = self.attends(layer)
        return LayerShape(
            own.head_dim, own.head_dim, _activation(own.config, "hidden_act"), False, False,
            layer.input_layernorm.variance_epsilon, 0.0, own.scaling, 0.0,
        )  # fmt: skip


class _Gemma(LayerFamily):
    def norms(self, layer: Any) -> Norms:
        parts = layer._modules
        second, after = parts["pre_feedforward_layernorm"], parts["post_feedforward_layernorm"]
        usual = super().norms(layer)
        return usual._replace(
            second_norm=_weight(second), after_attention=usual.second_norm, after_mlp=_weight(after)
        )

    def shape(self, layer: Any) -> LayerShape:
        own = self.attends(layer)
        # Gemma 3 has the attribute too, and does not use it.
        cap = (isinstance(own, Gemma2Attention) and own.attn_logit_softcapping) or 0.0
        return LayerShape(
            own.head_dim, own.head_dim, _activation(own.config, "hidden_activation"), False, False,
            layer.input_layernorm.eps, 1.0, own.scaling, cap,
        )  # fmt: skip


class _Phi3(LayerFamily):
    linears = (
        ("self_attn", "qkv_proj"),
        ("self_attn", "o_proj"),
        ("mlp", "gate_up_proj"),
        ("mlp", "down_proj"),
    )

    def parts(self, layer: Any) -> dict[str, MatrixPart]:
        own = self.attends(layer)
        qkv, out, gate_up, down = self.holders(layer)
        kv, inner = own.num_key_value_heads * own.head_dim, _high(gate_up) // 2
        heads = _high(qkv) - 2 * kv
        return {
            "q": MatrixPart(qkv, 0, 0, heads), "k": MatrixPart(qkv, 0, heads, kv),
            "v": MatrixPart(qkv, 0, heads + kv, kv), "o": _whole(out, 1),
            "gate": MatrixPart(gate_up, 2, 0, inner), "up": MatrixPart(gate_up, 2, inner, inner),
            "down": _whole(down, 3),
        }  # fmt: skip

    def shape(self, layer: Any) -> LayerShape:
        usual, rope = super().shape(layer), self.attends(layer).config.rope_parameters
        return usual._replace(turned=int(usual.d * rope.get("partial_rotary_factor", 1.0)))


class _Ungated(LayerFamily):
    """Layers of four linear layers: one of q, k and v, one behind attention, two of the feed-forward part."""

    def parts(self, layer: Any) -> dict[str, MatrixPart]:
        qkv, out, up, down = self.holders(layer)
        heads = {name: self.heads(layer, qkv, i) for i, name in enumerate("qkv")}
        return {**heads, "o": _whole(out, 1), "up": _whole(up, 2), "down": _whole(down, 3)}

    def heads(self, layer: Any, qkv: Any, i: int) -> MatrixPart:
        """q, k or v, by number: one below the other."""
        own = _high(qkv) // 3
        return MatrixPart(qkv, 0, i * own, own)


class _Gpt2(_Ungated):
    layers = "h"
    attention = "attn"
    linears = (("attn", "c_attn"), ("attn", "c_proj"), ("mlp", "c_fc"), ("mlp", "c_proj"))
    given = ("cache", "attention_mask", "encoder_hidden_states")

    def norms(self, layer: Any) -> Norms:
        return _centred(layer._modules["ln_1"], layer._modules["ln_2"])

    def shape(self, layer: Any) -> LayerShape:
        own = self.attends(layer)
        # With cross-attention the layer has more parts than these.
        activation = (
            _activation(own.config, "activation_function") if "crossattention" not in layer._modules else None
        )
        eps = layer.ln_1.eps
        return LayerShape(own.head_dim, 0, activation, True, False, eps, 0.0, own.scaling, 0.0)


class _NeoX(_Ungated):
    attention = "attention"
    linears = (
        ("attention", "query_key_value"), ("attention", "dense"), ("mlp", "dense_h_to_4h"), ("mlp", "dense_4h_to_h")
    )  # fmt: skip

    def heads(self, layer: Any, qkv: Any, i: int) -> MatrixPart:
        """Head by head."""
        d = self.attends(layer).head_size
        return MatrixPart(qkv, 0, i * d, _high(qkv) // 3, d, 3 * d)

    def norms(self, layer: Any) -> Norms:
        return _centred(layer._modules["input_layernorm"], layer._modules["post_attention_layernorm"])

    def shape(self, layer: Any) -> LayerShape:
        own = self.attends(layer)
        return LayerShape(
            own.head_size, own.rotary_ndims, _activation(own.config, "hidden_act"), True,
            layer.use_parallel_residual, layer.input_layernorm.eps, 0.0, own.scaling, 0.0,
        )  # fmt: skip


def _high(linear: Any) -> int:
    """Number of outputs; 0 of something else than a linear layer."""
    return int(getattr(linear, "out_features", 0) or getattr(linear, "nf", 0))


def _whole(linear: Any, number: int) -> MatrixPart:
    return MatrixPart(linear, number, 0, _high(linear))


def _weight(norm: Any) -> Tensor | None:
    return None if norm is None else norm._parameters["weight"]


def _centred(first: Any, second: Any) -> Norms:
    biases = first._parameters.get("bias"), second._parameters.get("bias")
    return Norms(_weight(first), biases[0], None, None, _weight(second), biases[1], None, None)


def _activation(config: Any, name: str) -> int | None:
    return ACTIVATIONS.get(getattr(config, name, None) or getattr(config, "hidden_act", None) or "")


TYPES = frozenset({"llama", "mistral", "phi3", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox"})
"""Types of models, as configs name them, that are made of these layers."""
FAMILIES: dict[type[nn.Module], LayerFamily] = {
    **dict.fromkeys(
        (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer), LayerFamily()
    ),
    **dict.fromkeys((Gemma2DecoderLayer, Gemma3DecoderLayer), _Gemma()),
    Phi3DecoderLayer: _Phi3(),
    GPT2Block: _Gpt2(),
    GPTNeoXLayer: _NeoX(),
}
"""Classes of decoder layers, themselves and none that are made from them -> how they are built."""


class ModelParts(NamedTuple):
    """Names of what a model of these layers holds.

    Attributes:
        inner: in the model, the module that holds the others. inner_class: its class.
        embedding, norm: of tokens, and the last norm. positions: another embedding, if there is one.
        rotary: what makes angles of positions; None: the layers need none.
    """

    inner: str
    inner_class: type[nn.Module]
    embedding: str = "embed_tokens"
    norm: str = "norm"
    rotary: str | None = "rotary_emb"
    positions: str | None = None


MODELS: dict[Any, ModelParts] = {
    LlamaForCausalLM.forward: ModelParts("model", LlamaModel),
    MistralForCausalLM.forward: ModelParts("model", MistralModel),
    Phi3ForCausalLM.forward: ModelParts("model", Phi3Model),
    Qwen2ForCausalLM.forward: ModelParts("model", Qwen2Model),
    Qwen3ForCausalLM.forward: ModelParts("model", Qwen3Model),
    Gemma2ForCausalLM.forward: ModelParts("model", Gemma2Model),
    Gemma3ForCausalLM.forward: ModelParts("model", Gemma3TextModel),
    GPT2LMHeadModel.forward: ModelParts("transformer", GPT2Model, "wte", "ln_f", None, "wpe"),
    GPTNeoXForCausalLM.forward: ModelParts("gpt_neox", GPTNeoXModel, "embed_in", "final_layer_norm"),
}
"""``forward`` of models that do nothing more than the kernels -> their parts."""
