"""Decoder layers of known families in one call for all, or in two for each, around its cache.

Their weights are quantised, or in float32 or bfloat16 where they are (``in_place``).

The step of a small model spends as much time in Python and in small operators as in its products. The layers stay what
they are, modules of transformers; only their ``forward`` is another, which does not call those of their children. So a
layer joins only if its parts are what its class makes of the config, without hooks (``changed_part``), and none does
where there are hooks for all modules. Hooks on the layer itself run. Over the cache of the row runner, the first layer
runs those behind it too, up to one whose states a hook wants to see, or that did not join; each of these then returns
what it is given. What the kernels read of a layer is noted at its first pass, and stays so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.models.quantised.attention import Attention
from sprinter.models.quantised.families import FAMILIES, MATRICES, NORMS, LayerShape, MatrixPart
from sprinter.models.quantised.layers import QuantisedLinear, plain_matrix, without_gradient
from sprinter.models.quantised.library import CHANNELS, FLOATS, MatrixFacts, floats, kernel
from sprinter.models.quantised.norm import ForwardOverride, LastNorm, is_last_norm
from sprinter.models.quantised.unchanged import changed_part, hooks_everywhere
from sprinter.models.runners.forward import NOTING
from sprinter.models.runners.row_cache import RowCache

__all__ = ["is_joined", "join_layers", "joinable", "part_layers", "reads_in_place"]

_COLUMNS = 16  # of which rows in place are multiples
_DONE = "_sprinter_layers_done"  # of states: by which stack, up to which layer


class _Facts(ctypes.Structure):
    """``Layer`` in kernels.cpp."""

    _fields_ = (
        *((name, MatrixFacts) for name in MATRICES),
        *((name, ctypes.c_void_p) for name in NORMS),
        *(
            (name, ctypes.c_int64)
            for name in ("width", "heads", "kv", "d", "turned", "activation", "centred", "parallel")
        ),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
    )


def join_layers(model: PreTrainedModel, in_place: bool = False) -> int:
    """Give the decoder layers of ``FAMILIES`` the fast ``forward``, and return their number.

    Args:
        in_place: those of plain linear layers; else those of quantised ones.
    """
    known = joinable(model, in_place)
    stacks: dict[nn.Module, _Stack] = {}
    for parent, place, layer in known:
        if parent not in stacks:
            stacks[parent] = _Stack(parent, FAMILIES[type(layer)].layers)
            norm = parent._modules.get("norm")
            if is_last_norm(norm) and "forward" not in vars(norm):
                norm.forward = LastNorm(norm)  # type: ignore[arg-type,union-attr]
        layer.forward = _Forward(layer, stacks[parent], place, in_place)
    return len(known)


def part_layers(model: nn.Module) -> None:
    """Give joined layers their own ``forward`` back."""
    for part in model.modules():
        if isinstance(vars(part).get("forward"), _Forward):
            del part.forward


def joinable(model: PreTrainedModel, in_place: bool) -> list[tuple[nn.Module, int, nn.Module]]:
    """The layers that ``join_layers`` knows: where they stand, their numbers there, and they."""
    config = model.config.get_text_config(decoder=True)
    unlike = getattr(config, "pretraining_tp", 1) != 1 or getattr(
        config, "use_bidirectional_attention", False
    )
    if unlike or hooks_everywhere():
        return []
    found: list[tuple[nn.Module, int, nn.Module]] = []
    for parent in list(model.modules()):
        for name in {family.layers for family in FAMILIES.values()}:
            layers = parent._modules.get(name)
            if not isinstance(layers, nn.ModuleList) or len(set(layers)) < len(
                layers
            ):  # one stands there twice
                continue
            found += [(parent, i, layer) for i, layer in enumerate(layers) if _fits(layer, name, in_place)]
    return found


def is_joined(model: object) -> bool:
    """Whether all decoder layers have it. Then a token is the same, to the bit, in every forward pass over a chain."""
    if not isinstance(model, nn.Module):
        return False
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    depth = getattr(config, "num_hidden_layers", 0)
    return 0 < depth == sum(isinstance(vars(part).get("forward"), _Forward) for part in model.modules())


def _fits(layer: nn.Module, list_name: str, in_place: bool) -> bool:
    """Whether the kernels know the layer and can read its matrices: plain ones, or quantised ones of whole groups."""
    family = FAMILIES.get(type(layer))
    if family is None or family.layers != list_name or not family.is_whole(layer):
        return False
    if "forward" in vars(layer) or changed_part(layer, family.usual(layer)) is not None:
        return False
    parts, readable = family.parts(layer), reads_in_place if in_place else _has_whole_groups
    if not all(map(readable, family.holders(layer))):
        return False
    # Rows of blocks are read together, in place too where they are not all in one run.
    if any(
        (not in_place and one.first % CHANNELS) or one.run % CHANNELS or one.step % CHANNELS
        for one in parts.values()
    ):
        return False
    return (
        family.shape(layer).activation is not None
        and parts["up"].rows == _columns(parts["down"])
        and parts.get("gate", parts["up"]).rows == parts["up"].rows
        and parts["q"].rows == _columns(parts["o"])
        and parts["k"].rows == parts["v"].rows
    )


def _has_whole_groups(part: nn.Module) -> bool:
    return isinstance(part, QuantisedLinear) and part._matrix.padded == part._matrix.width


def _columns(part: MatrixPart) -> int:
    matrix = plain_matrix(part.linear)
    return part.linear.in_features if matrix is None else matrix.shape[1]


def reads_in_place(part: nn.Module) -> bool:
    """Whether the kernels can read the weights of a layer where they are."""
    weight = plain_matrix(part)
    if weight is None or type(part.weight.data) is not Tensor:
        return False
    fits = weight.dtype in FLOATS and weight.device.type == "cpu" and weight.is_contiguous()
    return fits and weight.shape[1] % _COLUMNS == 0


def _facts_of(part: MatrixPart, bias: Tensor | None) -> MatrixFacts:
    """Of a matrix, with the bias of the whole linear layer in float32; quantised layers have their own."""
    run, step = part.run or part.rows, part.step or part.rows
    if isinstance(part.linear, QuantisedLinear):
        return part.linear.facts(part.first, part.rows, run, step)
    weight: Any = plain_matrix(part.linear)
    at = weight.data_ptr() + part.first * weight.shape[1] * weight.element_size()
    more = None if bias is None else bias.data_ptr() + part.first * bias.element_size()
    return MatrixFacts(FLOATS[weight.dtype], at, part.rows, weight.shape[1], more, run, step)


class _Forward(ForwardOverride):
    """``forward`` of a decoder layer. It holds nothing else when copied: a copy's weights are elsewhere.

    Args:
        layer: the layer. stack: of all such layers of its model. place: its number in the model.
        in_place: its matrices are plain linear layers.

    Attributes:
        family: how the layer is built. held: what the facts point to, as long as they do.
        shape: what layers that run in one call have in common; set with the facts.
    """

    def __init__(self, layer: nn.Module, stack: _Stack, place: int, in_place: bool) -> None:
        super().__init__(layer)
        self.layer, self._stack, self._place, self._in_place = self._layer, stack, place, in_place
        self.family = FAMILIES[type(layer)]
        self._facts: _Facts | None = None
        self.held: list[Any] = []
        self.shape: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        stack = memo.get(id(self._stack))
        if stack is None:
            own = self._stack
            stack = memo[id(own)] = _Stack(memo.get(id(own.parent())), own.name)
        return _Forward(memo[id(self.layer())], stack, self._place, self._in_place)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model with joined layers cannot be pickled: save the one that it was made from, or load it with "
            "compile=False"
        )

    def __call__(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        """``[batch, n, d]`` -> ``[batch, n, d]``, as transformers' decoder layers have it."""
        layer, family = self.layer(), self.family
        if (last := self._stack.done(hidden_states)) is not None and self._place <= last:
            return hidden_states if self._place < last else self._stack.taken(hidden_states)
        if len(given) > len(family.given):
            raise TypeError(
                f"a joined layer is given its arguments by name, and here are {len(given)} without"
            )
        named = family.arguments(layer, given, named)
        if named.get("encoder_hidden_states") is not None:
            raise ValueError("joined layers have no cross-attention")
        batch, n, _ = hidden_states.shape
        x = without_gradient(hidden_states).contiguous()
        shape, cache, mask = family.shape(layer), named["cache"], named.get("attention_mask")
        positions = named.get("position_embeddings") if shape.turned else (floats(1, 1, 0), floats(1, 1, 0))
        assert positions is not None
        cosine, sine = (part.float().expand(batch, n, shape.turned).contiguous() for part in positions)
        if isinstance(cache, RowCache) and (call := self._stack.together(self._place, cache)) is not None:
            last = self._place + len(call.numbers) - 1
            made = self._stack.run(self._place, last, call, x, cosine, sine, mask, cache)
            return self._stack.taken(made) if last == self._place else made
        return self._alone(layer, shape, x, cosine, sine, mask, cache)

    def call_of_all(self, cache: RowCache) -> _Call | None:
        """The call of all layers of the model, if this is the first; None: not in one call."""
        call = self._stack.together(0, cache) if self._place == 0 else None
        return call if call is not None and self._stack.ends_with(call) else None

    def whole(
        self, call: _Call, cache: RowCache
    ) -> Callable[[Tensor, tuple[Tensor, Tensor], Tensor | None, Sequence[int]], list[Tensor]]:
        """What runs ``call_of_all`` over ``x [batch, n, d]``, with the positions' cosines and sines, and a mask, and
        returns the outputs of some layers, then of the last."""

        def run(
            x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None, layers: Sequence[int]
        ) -> list[Tensor]:
            batch, n, _ = x.shape
            cosine, sine = (
                part.float().expand(batch, n, call.shape.turned).contiguous() for part in positions
            )
            made, states = without_gradient(x).contiguous(), dict[int, Tensor]()
            last = len(call.numbers) - 1
            for begin, end in pairwise([-1, *sorted({*layers, last})]):  # a call up to each
                made = self._stack.run(begin + 1, end, call, made, cosine, sine, mask, cache)
                states[end] = self._stack.taken(made)
            return [states[layer] for layer in (*layers, last)]

        return run

    def _alone(
        self,
        layer: Any,
        shape: LayerShape,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        mask: Tensor | None,
        cache: Any,
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
        number = self.family.attends(layer).layer_idx
        if isinstance(cache, RowCache):  # gathering some rows' keys would cost more than attention does
            keys, values, rows = cache.update_in_place(keys, values, number)
        elif cache is not None:
            keys, values = cache.update(keys, values, number)
        flat = isinstance(cache, RowCache) and cache.span.flat
        attention = _attention(query, keys.float(), values.float(), mask, shape, rows, flat)
        made = floats(batch, n, width)
        kernel().after(
            ctypes.byref(facts), ctypes.byref(attention), x.data_ptr(), batch * n, made.data_ptr(), threads
        )
        return made

    def stands(self, stack: _Stack, place: int) -> bool:
        """Whether it is of this stack, with this number."""
        return self._stack is stack and self._place == place

    def facts(self) -> _Facts:
        """The facts, made at the first call."""
        if self._facts is None:
            self._facts = self._made()
        return self._facts

    def _made(self) -> _Facts:
        norms, holders = [*self.family.norms(self.layer())], self.family.holders(self.layer())
        names = ("bias", "weight") if self._in_place else ()
        own = [*norms, *(linear._parameters.get(name) for name in names for linear in holders)]
        own += () if self._in_place else [linear._buffers.get("bias") for linear in holders]
        held = [None if one is None else one.detach() for one in own]
        dtypes = [*FLOATS] if self._in_place else [torch.float32]
        if any(one is not None and (one.dtype not in dtypes or one.device.type != "cpu") for one in held):
            kind = "is compiled stays as it is" if self._in_place else "has quantised layers stays in float32"
            raise RuntimeError(f"a model that {kind}, on the CPU")
        small = [None if one is None else one.float() for one in held[: len(norms) + len(holders)]]
        self.held = [*small, *held, *holders]
        facts, layer, biases = _Facts(), self.layer(), small[len(NORMS) :]
        parts, shape = self.family.parts(layer), self.family.shape(layer)
        for name, part in parts.items():
            if not (reads_in_place if self._in_place else _has_whole_groups)(part.linear):
                raise RuntimeError(f"{name} is another than when the model was loaded: load it anew")
            setattr(facts, name, _facts_of(part, biases[part.number] if self._in_place else None))
        for name, weight in zip(NORMS, small, strict=False):
            setattr(facts, name, None if weight is None else weight.data_ptr())
        facts.width, facts.d, facts.turned = _columns(parts["q"]), shape.d, shape.turned
        facts.heads, facts.kv = parts["q"].rows // shape.d, parts["k"].rows // shape.d
        facts.activation, facts.centred, facts.parallel = shape.activation, shape.centred, shape.parallel
        facts.eps, facts.offset = shape.eps, shape.offset
        self.shape = (facts.width, facts.heads, facts.kv, facts.down.width, shape)
        return facts


class _Call:
    """Layers that run in one call, and what that rests on.

    Args:
        first: number of the first one. layers: they. members: their ``forward``. shape: of each.

    Attributes:
        facts: an array, as the kernels take them. numbers: of the layers in the cache. shape: of each.
        hooks: on the layers, which come and go where a runner notes states.
    """

    def __init__(self, first: int, layers: list[Any], members: list[_Forward], shape: LayerShape) -> None:
        self.first = first
        each = [member.facts() for member in members]
        self.facts, self.shape = (_Facts * len(each))(*each), shape
        self._held = [member.held for member in members]  # what the facts point to
        self.numbers = [FAMILIES[type(layer)].attends(layer).layer_idx for layer in layers]
        self.hooks = [table for layer in layers for table in (layer._forward_hooks, layer._forward_pre_hooks)]


class _Stack:
    """The joined layers of a model.

    Args:
        parent: the module that holds them; None if a layer was copied without it, which then runs alone.
        name: of their list there.
    """

    def __init__(self, parent: nn.Module | None, name: str) -> None:
        self.name = name
        self.parent: Callable[[], nn.Module | None] = ref(parent) if parent is not None else lambda: None
        self._calls: dict[int, _Call] = {}  # of all layers from this number on

    def done(self, states: Tensor) -> int | None:
        """The last of the layers that one call has run, if these states are its result; None: they are of no call."""
        stack, last = getattr(states, _DONE, (None, None))
        return last if stack is self else None

    @staticmethod
    def taken(states: Tensor) -> Tensor:
        """The same states, which are no longer those of a call."""
        delattr(states, _DONE)
        return states

    def together(self, first: int, cache: RowCache) -> _Call | None:
        """The layers that can run in one call, from the first on: of one shape and mask, with a place in the cache, and
        without a hook between; None if that is one of several."""
        call = self._calls.get(first)
        if call is not None and not any(call.hooks) and _has_room(cache, call):
            return call
        layers = self._layers(first)
        found: list[Any] = []
        members: list[_Forward] = []
        shape: tuple[Any, ...] = ()
        for place, layer in enumerate(layers, first):
            if not self._own(place, [layer]):
                break
            member = layer.__dict__["forward"]
            facts, number = member.facts(), [member.family.attends(layer).layer_idx]
            if not cache.holds(number) and not cache.reserve(number, facts.kv, facts.d):
                break
            if found and (member.shape != shape or _reads_input(layer)):
                break
            shape = member.shape
            found.append(layer)
            members.append(member)
            if layer._forward_hooks:
                break
        if not found or (len(found) < 2 and len(layers) > 1):
            return None
        call = _Call(first, found, members, shape[-1])
        if len(found) == len(layers) and not any(call.hooks):
            self._calls[first] = call
        return call

    def ends_with(self, call: _Call) -> bool:
        """Whether a call from the first layer on is of all layers, and no hook notes what one returns."""
        return self._calls.get(0) is call

    def _own(self, first: int, layers: list[Any]) -> bool:
        """Whether the fast ``forward`` of these layers is that of this stack, from number ``first`` on."""
        return all(
            type(member := layer.__dict__.get("forward")) is _Forward and member.stands(self, place)
            for place, layer in enumerate(layers, first)
        )

    def _layers(self, first: int) -> list[Any]:
        """The model's layers from number ``first`` on, as far as it runs them."""
        parent: Any = self.parent()
        layers = None if parent is None else parent._modules.get(self.name)
        if layers is None:
            return []
        depth = getattr(getattr(parent, "config", None), "num_hidden_layers", len(layers))
        return list(layers._modules.values())[first:depth]

    def run(
        self,
        first: int,
        last: int,
        call: _Call,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        mask: Tensor | None,
        cache: RowCache,
    ) -> Tensor:
        """The layers from number ``first`` to ``last`` of a call, in one go; shapes as in ``_Forward``, x float32."""
        batch, n, _ = x.shape
        begin, end = first - call.first, last - call.first + 1
        numbers, facts = call.numbers[begin:end], call.facts[begin]
        query = floats(batch, n, facts.heads, facts.d)
        keys, values, rows = cache.visible(numbers[0])
        attention = _attention(query, keys, values, mask, call.shape, rows, cache.span.flat)
        row, slot = cache.places(batch, n)
        buffers = cache.addresses(numbers)
        made = x.clone()
        kernel().layers(
            ctypes.byref(facts), len(numbers), ctypes.byref(attention), (ctypes.c_void_p * len(buffers))(*buffers),
            row.data_ptr(), slot.data_ptr(), keys.stride(1) // keys.stride(2), made.data_ptr(), batch * n,
            cosine.data_ptr(), sine.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        setattr(made, _DONE, (self, last))
        return made


def _has_room(cache: RowCache, call: _Call) -> bool:
    return cache.holds(call.numbers) or cache.reserve(call.numbers, call.facts[0].kv, call.facts[0].d)


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
    shape: LayerShape,
    rows: Tensor | None,
    flat: bool,
) -> Attention:
    """Attention of ``query [batch, n, heads, d]`` in a layer.

    ``flat``: each token attends in a row of its own.
    """
    if flat:
        query = query.transpose(0, 1)
        mask = None if mask is None else mask.transpose(0, 2)
    return Attention.of(query.transpose(1, 2), keys, values, mask, shape.scaling, shape.cap, rows)
