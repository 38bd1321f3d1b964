"""Decoder layers of Llama, Mistral, Phi-3, Qwen and Gemma in one call for all, or in two for each, around its cache.

Their weights are quantised, or in float32 or bfloat16 where they are (``in_place``).

The step of a small model spends as much time in Python and in small operators as in its products. The layers stay what
they are, modules of transformers; only their ``forward`` is another, which does not call those of their children:
hooks on a layer run, hooks on its parts do not. Over the cache of the row runner, the first layer runs those behind it
too, up to one whose states a hook wants to see; each of these then returns what it is given. What the first runs are
the layers that its model holds behind it at that time: one that is wrapped, replaced or left out ends the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2DecoderLayer
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3DecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from sprinter.models.quantised.attention import Attention
from sprinter.models.quantised.layers import QuantisedLinear, without_gradient
from sprinter.models.quantised.library import CHANNELS, FLOATS, MatrixFacts, floats, kernel
from sprinter.models.runners.forward import NOTING
from sprinter.models.runners.row_cache import RowCache

__all__ = ["is_joined", "join_layers", "joinable", "reads_in_place"]

_GEMMA = (Gemma2DecoderLayer, Gemma3DecoderLayer)
_LAYERS = (
    LlamaDecoderLayer, MistralDecoderLayer, Phi3DecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer, *_GEMMA,
)  # fmt: skip
_GELU = "gelu_pytorch_tanh"
_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION, _MLP = "self_attn", "mlp"
_USUAL = [*((_ATTENTION, name) for name in _NAMES[:4]), *((_MLP, name) for name in _NAMES[4:])]
_FUSED = [(_ATTENTION, "qkv_proj"), (_ATTENTION, "o_proj"), (_MLP, "gate_up_proj"), (_MLP, "down_proj")]
_COLUMNS = 16  # of which rows in place are multiples
_LIST = "layers"  # where a model of transformers has its decoder layers
_DONE = "_sprinter_layers_done"  # of states: by which stack, up to which layer
_NORMS = ("norm", "query_norm", "key_norm", "second_norm", "after_attention", "after_mlp")


class _Facts(ctypes.Structure):
    """``Layer`` in kernels.cpp."""

    _fields_ = (
        *((name, MatrixFacts) for name in _NAMES),
        *((name, ctypes.c_void_p) for name in _NORMS),
        *((name, ctypes.c_int64) for name in ("width", "heads", "kv", "d", "turned", "gelu")),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
    )


def join_layers(model: PreTrainedModel, in_place: bool = False) -> int:
    """Give the decoder layers that this module knows the fast ``forward``, and return their number.

    Args:
        in_place: those of plain linear layers; else those of quantised ones.
    """
    known = joinable(model, in_place)
    stacks: dict[nn.Module, _Stack] = {}
    for parent, place, layer in known:
        stack = stacks.setdefault(parent, _Stack(parent))
        layer.forward = _Forward(layer, stack, place, in_place)
    return len(known)


def joinable(model: PreTrainedModel, in_place: bool) -> list[tuple[nn.Module, int, nn.Module]]:
    """The layers that ``join_layers`` knows: where they stand, their numbers there, and they."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "pretraining_tp", 1) != 1 or getattr(config, "use_bidirectional_attention", False):
        return []
    found: list[tuple[nn.Module, int, nn.Module]] = []
    for parent in list(model.modules()):
        layers = parent._modules.get(_LIST)
        if isinstance(layers, nn.ModuleList) and len(set(layers)) == len(
            layers
        ):  # none of them stands there twice
            found += [
                (parent, place, layer)
                for place, layer in enumerate(layers)
                if type(layer) in _LAYERS and _fits(layer, in_place)
            ]
    return found


def is_joined(model: object) -> bool:
    """Whether all decoder layers have it. Then a token is the same, to the bit, in every forward pass over a chain."""
    if not isinstance(model, nn.Module):
        return False
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", 0)
    return 0 < depth == sum(isinstance(vars(part).get("forward"), _Forward) for part in model.modules())


class _Part(NamedTuple):
    """Rows of a linear layer that are one of ``_NAMES``.

    Attributes:
        linear: the layer. first: its first row that belongs to the matrix. rows: how many do.
        number: of the linear layer in its decoder layer.
    """

    linear: Any
    first: int
    rows: int
    number: int

    def facts(self, bias: Tensor | None) -> MatrixFacts:
        """For the kernels, with the bias of the whole layer in float32; quantised layers have their own."""
        if isinstance(self.linear, QuantisedLinear):
            return self.linear.facts(self.first, self.rows)
        weight = self.linear.weight
        at = weight.data_ptr() + self.first * weight.shape[1] * weight.element_size()
        more = None if bias is None else bias.data_ptr() + self.first * bias.element_size()
        return MatrixFacts(FLOATS[weight.dtype], at, self.rows, weight.shape[1], more)


def _parts(layer: Any) -> list[_Part]:
    """Those of ``_NAMES``; several may be in one linear layer, one below the other."""
    made: list[_Part] = []
    for number, (owner, name) in enumerate(_owned(layer)):
        linear = layer._modules[owner]._modules[name]
        high = getattr(linear, "out_features", 0)
        rows = [high]
        if name == "qkv_proj":
            kv = layer.self_attn.num_key_value_heads * layer.self_attn.head_dim
            rows = [high - 2 * kv, kv, kv]
        elif name == "gate_up_proj":
            rows = [high // 2, high // 2]
        made += [_Part(linear, sum(rows[:i]), many, number) for i, many in enumerate(rows)]
    return made


def _owned(layer: nn.Module) -> list[tuple[str, str]]:
    """The linear layers with the matrices, in their order: which part of the layer has it, and its name there."""
    return _FUSED if isinstance(layer, Phi3DecoderLayer) else _USUAL


def _fits(layer: nn.Module, in_place: bool) -> bool:
    """Whether the kernels can read all matrices: plain ones, or quantised ones of whole groups."""
    parts = _parts(layer)
    if not all(reads_in_place(one.linear) if in_place else _has_whole_groups(one) for one in parts):
        return False
    query, key, value, out, gate, up, down = parts
    return bool(
        _activation(layer) == (_GELU if isinstance(layer, _GEMMA) else "silu")
        and gate.rows == up.rows == down.linear.in_features
        and query.rows == out.linear.in_features
        and key.rows == value.rows
    )


def _has_whole_groups(part: _Part) -> bool:
    linear = part.linear
    whole = isinstance(linear, QuantisedLinear) and linear._matrix.padded == linear._matrix.width
    return whole and part.first % CHANNELS == 0


def reads_in_place(part: nn.Module) -> bool:
    """Whether the kernels can read the weights of a layer where they are."""
    if type(part) is not nn.Linear:
        return False
    weight = part.weight
    fits = type(weight.data) is Tensor and weight.dtype in FLOATS and weight.device.type == "cpu"
    return fits and weight.is_contiguous() and weight.shape[1] % _COLUMNS == 0


def _activation(layer: Any) -> str | None:
    config = layer.self_attn.config
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


class _Forward:
    """``forward`` of a decoder layer. It holds the layer weakly, and nothing else when copied: a copy's weights are
    elsewhere.

    Args:
        layer: the layer. stack: of all such layers of its model. place: its number in the model.
        in_place: its matrices are plain linear layers.

    Attributes:
        shape: what layers that run in one call have in common; set with the facts.
    """

    def __init__(self, layer: nn.Module, stack: _Stack, place: int, in_place: bool) -> None:
        self.layer, self._stack, self._place, self._in_place = ref(layer), stack, place, in_place
        self._facts: _Facts | None = None
        self._places: list[Any] = []  # of the norms' weights, and of others that are read in place
        self._held: list[Tensor | None] = []
        self.shape: tuple[Any, ...] = ()
        stack.members[place] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        stack = memo.get(id(self._stack))
        if stack is None:
            stack = memo[id(self._stack)] = _Stack(memo.get(id(self._stack.parent())))
        return _Forward(memo[id(self.layer())], stack, self._place, self._in_place)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model with joined layers cannot be pickled: save the one that it was made from, or load it with "
            "compile=False"
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
        own: Any = self.layer()
        if (last := self._stack.done(hidden_states)) is not None and self._place <= last:
            return hidden_states if self._place < last else self._stack.taken(hidden_states)
        assert position_embeddings is not None
        batch, n, _ = hidden_states.shape
        x = without_gradient(hidden_states).contiguous()
        turned = _turned(own.self_attn)
        cosine, sine = (part.float().expand(batch, n, turned).contiguous() for part in position_embeddings)
        cache = past_key_values
        if isinstance(cache, RowCache) and len(together := self._stack.together(self._place, cache)) > 1:
            return self._stack.run(self._place, together, x, cosine, sine, attention_mask, cache)
        return self._alone(own, x, cosine, sine, attention_mask, cache)

    def _alone(
        self, own: Any, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """This layer, over any cache."""
        facts, threads = self.facts(), torch.get_num_threads()
        batch, n, width = x.shape
        query = floats(batch, n, facts.heads, facts.d)
        key, value = floats(2, batch, n, facts.kv, facts.d).unbind()
        kernel().before(
            ctypes.byref(facts), x.data_ptr(), batch * n, cosine.data_ptr(), sine.data_ptr(), query.data_ptr(),
            key.data_ptr(), value.data_ptr(), threads,
        )  # fmt: skip
        keys, values, rows = key.transpose(1, 2), value.transpose(1, 2), None
        if isinstance(cache, RowCache):  # gathering some rows' keys would cost more than attention does
            keys, values, rows = cache.update_in_place(keys, values, own.self_attn.layer_idx)
        elif cache is not None:
            keys, values = cache.update(keys, values, own.self_attn.layer_idx)
        flat = isinstance(cache, RowCache) and cache.span.flat
        attention = _attention(query, keys.float(), values.float(), mask, own.self_attn, rows, flat)
        made = floats(batch, n, width)
        kernel().after(
            ctypes.byref(facts), ctypes.byref(attention), x.data_ptr(), batch * n, made.data_ptr(), threads
        )
        return made

    def facts(self) -> _Facts:
        """The facts, made again where weights are others than before."""
        layer = self.layer()
        norms, linear = _norms(layer), _linears(layer) if self._in_place else []
        places = [_place(weight) for weight in (*norms, *linear) if weight is not None]
        if self._facts is None or places != self._places:
            self._facts, self._places = self._made(norms, linear), places
        return self._facts

    def _made(self, norms: list[Tensor | None], linear: list[Tensor | None]) -> _Facts:
        """Args: as ``_norms`` and ``_linears`` return them."""
        held = [None if weight is None else weight.detach() for weight in (*norms, *linear[1::2])]
        dtypes = [*FLOATS] if self._in_place else [torch.float32]
        if any(one is not None and (one.dtype not in dtypes or one.device.type != "cpu") for one in held):
            stays = (
                "that is compiled stays as it is"
                if self._in_place
                else "with quantised layers stays in float32"
            )
            raise RuntimeError(f"a model {stays}, on the CPU")
        self._held = [None if one is None else one.float() for one in held]
        layer: Any = self.layer()
        facts, attention, biases = _Facts(), layer.self_attn, self._held[len(_NORMS) :]
        for name, part in zip(_NAMES, parts := _parts(layer), strict=True):
            if self._in_place and not reads_in_place(part.linear):
                raise RuntimeError(
                    f"{name} of a compiled model is another than it was: load with compile=False"
                )
            setattr(facts, name, part.facts(biases[part.number] if self._in_place else None))
        for name, weight in zip(_NORMS, self._held, strict=False):
            setattr(facts, name, None if weight is None else weight.data_ptr())
        facts.width, facts.d = parts[0].linear.in_features, attention.head_dim
        facts.heads, facts.kv = parts[0].rows // facts.d, parts[1].rows // facts.d
        facts.turned = _turned(attention)
        gemma, norm = isinstance(layer, _GEMMA), layer.input_layernorm
        facts.gelu, facts.offset = gemma, float(gemma)
        facts.eps = norm.eps if gemma else norm.variance_epsilon
        sizes = (facts.width, facts.heads, facts.kv, facts.d, facts.down_proj.width)
        self.shape = (*sizes, attention.scaling, _cap(attention), getattr(attention, "layer_type", None))
        return facts


class _Stack:
    """The joined layers of a model.

    Args:
        parent: the module that holds them; None if a layer was copied without it, which then runs alone.

    Attributes:
        members: their ``forward``, by number.
    """

    def __init__(self, parent: nn.Module | None) -> None:
        self.parent: Callable[[], nn.Module | None] = ref(parent) if parent is not None else lambda: None
        self.members: dict[int, _Forward] = {}
        self._facts: dict[tuple[int, int], tuple[list[_Facts], Any]] = {}  # of the layers of a call

    def done(self, states: Tensor) -> int | None:
        """The last of the layers that one call has run, if these states are its result; None: they are of no call."""
        stack, last = getattr(states, _DONE, (None, None))
        return last if stack is self else None

    @staticmethod
    def taken(states: Tensor) -> Tensor:
        """The same states, which are no longer those of a call."""
        delattr(states, _DONE)
        return states

    def together(self, first: int, cache: RowCache) -> list[tuple[_Facts, Any]]:
        """The layers, and their facts, that can run in one call, from the first on: as the model holds them now, of one
        shape and mask, with a place in the cache, and without a hook between; empty if the first has no place yet."""
        found: list[tuple[_Facts, Any]] = []
        shape: tuple[Any, ...] = ()
        for place, layer in self._layers(first):
            member = layer.__dict__.get("forward")
            if not isinstance(member, _Forward) or self.members.get(place) is not member:
                break
            if not cache.holds(layer.self_attn.layer_idx):
                break
            facts = member.facts()
            if found and (member.shape != shape or _reads_input(layer)):
                break
            shape = member.shape
            found.append((facts, layer))
            if layer._forward_hooks:
                break
        return found

    def _layers(self, first: int) -> list[tuple[int, Any]]:
        """The model's layers from number ``first`` on, as far as it runs them, with their numbers."""
        parent: Any = self.parent()
        layers = None if parent is None else parent._modules.get(_LIST)
        if layers is None or _global_forward_hooks or _global_forward_pre_hooks:
            return []
        depth = getattr(getattr(parent, "config", None), "num_hidden_layers", len(layers))
        return list(enumerate(layers))[first:depth]

    def run(
        self,
        first: int,
        together: list[tuple[_Facts, Any]],
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        mask: Tensor | None,
        cache: RowCache,
    ) -> Tensor:
        """These layers, from number ``first`` on, in one call; shapes as in ``_Forward``, x float32."""
        each = [facts for facts, _ in together]
        numbers = [layer.self_attn.layer_idx for _, layer in together]
        held = self._facts.get((first, len(each)))
        if held is None or any(one is not other for one, other in zip(held[0], each, strict=True)):
            held = self._facts[first, len(each)] = each, (_Facts * len(each))(*each)
        batch, n, _ = x.shape
        query = floats(batch, n, each[0].heads, each[0].d)
        keys, values, rows = cache.visible(numbers[0])
        attention = _attention(query, keys, values, mask, together[0][1].self_attn, rows, cache.span.flat)
        row, slot = cache.places(batch, n)
        buffers = cache.addresses(numbers)
        made = x.clone()
        kernel().layers(
            held[1], len(each), ctypes.byref(attention), (ctypes.c_void_p * len(buffers))(*buffers), row.data_ptr(),
            slot.data_ptr(), keys.stride(1) // keys.stride(2), made.data_ptr(), batch * n, cosine.data_ptr(),
            sine.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        setattr(made, _DONE, (self, first + len(each) - 1))
        return made


def _reads_input(layer: nn.Module) -> bool:
    """Whether a hook wants to see what the layer is given."""
    # Hooks that note a state read what a layer returns.
    noting = (getattr(hook, "__module__", None) in NOTING for hook in layer._forward_hooks.values())
    return bool(layer._forward_pre_hooks) or not all(noting)


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    module: Any,
    rows: Tensor | None,
    flat: bool,
) -> Attention:
    """Attention of ``query [batch, n, heads, d]`` as a layer's ``module`` has it.

    ``flat``: each token attends in a row of its own.
    """
    if flat:
        query = query.transpose(0, 1)
        mask = None if mask is None else mask.transpose(0, 2)
    return Attention.of(query.transpose(1, 2), keys, values, mask, module.scaling, _cap(module), rows)


def _turned(attention: Any) -> int:
    """Numbers of a head that a position rotates; the others stay."""
    rope = getattr(attention.config, "rope_parameters", None) or {}
    part = rope.get("partial_rotary_factor") or 1.0 if isinstance(attention, Phi3Attention) else 1.0
    return int(attention.head_dim * part)


def _cap(attention: Any) -> float:
    """Bound of the scores; 0 for none. Gemma 3 has the attribute too, and does not use it."""
    return (isinstance(attention, Gemma2Attention) and attention.attn_logit_softcapping) or 0.0


def _norms(layer: Any) -> list[Tensor | None]:
    """The weights of a layer's norms, as ``_NORMS``; looked up where modules keep them, for each layer in each pass."""
    parts = layer._modules
    attention, behind = parts["self_attn"]._modules, parts["post_attention_layernorm"]
    before_mlp = parts.get("pre_feedforward_layernorm")
    norms = [parts["input_layernorm"], *map(attention.get, ("q_norm", "k_norm"))]
    norms += [behind, None] if before_mlp is None else [before_mlp, behind]
    norms.append(parts.get("post_feedforward_layernorm"))
    return [None if norm is None else norm._parameters["weight"] for norm in norms]


def _linears(layer: Any) -> list[Tensor | None]:
    """Weight and bias of each linear layer with matrices, looked up likewise."""
    made: list[Tensor | None] = []
    for owner, name in _owned(layer):
        own = layer._modules[owner]._modules[name]._parameters
        made += [own.get("weight"), own.get("bias")]
    return made


def _place(weight: Tensor) -> tuple[int, int]:
    """Where it is, and how often it was written, as far as PyTorch counts that: what is not in float32 is copied."""
    return weight.data_ptr(), 0 if weight.dtype == torch.float32 or weight.is_inference() else weight._version
