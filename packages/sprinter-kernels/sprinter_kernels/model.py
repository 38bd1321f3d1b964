"""Forward passes of whole models on a CPU, each in one call of the kernels, from token ids to logits.

A model stays what it is, one of transformers, whose modules hold the weights: quantised ones, or in float32 or
bfloat16 where they are. The kernels read them there, and run no code of its parts; so ``supports`` compares these with
what their classes make, and ``pack`` compares a pass with the model's own. From then on nothing may change: norms and
biases are copied where they are not in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sprinter_kernels.families import FAMILIES, MODELS, MatrixPart, ModelParts
from sprinter_kernels.layers import (
    QuantisedEmbedding,
    QuantisedLinear,
    parameter_count,
    plain_matrix,
    reads_in_place,
)
from sprinter_kernels.native import FLOATS, floats, native
from sprinter_kernels.quantise import SCALE, is_plain
from sprinter_kernels.unchanged import changed_layer, hooks_everywhere, hooks_of

__all__ = ["Packed", "Slots", "Writers", "pack", "supports"]

_TRIED = 12  # tokens of a trial pass
_FAR = {"float32": 1e-3, "bfloat16": 0.1, "quantised": 0.1}
"""Largest distance of logits from the model's own, relative to these; activations of the latter two are rounded."""
_HIDDEN = -1e4  # additive masks hold less for keys that a query does not see
_STEADY = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embeddings whose angles depend on a token's position alone."""


class Slots(NamedTuple):
    """Where the tokens of a pass ``[batch, n]`` go in a cache.

    Attributes:
        buffers: addresses of the keys and values of each layer in turn, ``[rows, kv, slots, d]``.
        slots: of a row. keys: so many slots may be seen.
        start: slot and position of the first token, where rows 0, 1, ... go on together.
        position, row, slot: of each token, int64 ``[batch * n]``, else.
        seen: which rows the batch sees, int64 ``[batch]``; None: its own numbers.
        half: whether keys and values are in bfloat16, to which they are rounded; else in float32.
    """

    buffers: Sequence[int]
    slots: int
    keys: int
    start: int = 0
    position: Tensor | None = None
    row: Tensor | None = None
    slot: Tensor | None = None
    seen: Tensor | None = None
    half: bool = False


class Writers(NamedTuple):
    """Rows that draft tokens, those with most of them first.

    Attributes:
        rows, starts, counts: of each, its number, the tokens that it holds and those to draw.
        temperatures: of laws. truncations: of each, top_k (0: none), the number of parts of 2^-50 that its tokens
            reach together (0: all), and min_p (0: none): see ``sprinter.laws.process``.
        keys: addresses of the draws, ``[rows][most tokens]``, in 64 bits.
        words: high and low half of a word for each token of the laws, uint32, for whole blocks of 64 tokens: see
            ``sprinter.random``.
        ids: int64, of the tokens of the laws, where the output layer knows some alone; None: 0, 1, ...
    """

    rows: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    temperatures: Sequence[float]
    truncations: Sequence[tuple[int, float, float]]
    keys: Sequence[Sequence[int]]
    words: tuple[NDArray[np.uint32], NDArray[np.uint32]]
    ids: NDArray[np.int64] | None = None


Masks = Tensor | None | Mapping[str, Tensor | None]
"""``[1 or batch, 1, n, keys]``, bool or added to scores; None: all keys up to a query's own; or by layers' types."""


def supports(model: PreTrainedModel) -> str | None:
    """Why the kernels cannot run a model, in words; None: they can."""
    if hooks_everywhere():
        return "there is a hook for all modules"
    parts = MODELS.get(type(model).forward)
    inner: Any = None if parts is None else getattr(model, parts.inner, None)
    if parts is None or type(inner).forward is not parts.inner_class.forward:
        return f"the kernels do not know {type(model).__name__}"
    for one in model.parameters():
        if not _is_float(one):
            kind = str(one.dtype).removeprefix("torch.")
            return f"its weights are in {kind} on {one.device}, and our kernels read float32 and bfloat16 on a CPU"
    if (why := changed_layer(model)) is not None:
        return why
    ends = _ends(model, inner, parts)
    for name, part in {type(model).__name__: model, parts.inner: inner, **ends}.items():
        if part is None or hooks_of(part) or "forward" in vars(part):
            return f"{name} has a hook or a forward of its own" if part is not None else f"{name} is gone"
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "pretraining_tp", 1) != 1 or getattr(config, "use_bidirectional_attention", False):
        return "its layers compute more than the kernels do"
    layers = _layers(inner)
    if not layers or len(layers) != config.num_hidden_layers or len(set(layers)) != len(layers):
        return "its list of layers is another than its config says"
    for i, layer in enumerate(layers):
        if (why := _why_not_layer(layer)) is not None:
            return f"layer {i} is built otherwise than the kernels know: {why}"
    if len({_common(layer) for layer in layers}) > 1:
        return "its layers are of several shapes"
    width, norm, first = _common(layers[0])[0], ends[parts.norm], _first_norm(layers[0])
    tables = [ends[name] for name in (parts.embedding, parts.positions) if name is not None]
    if not all(map(_is_table, tables)) or not _is_readable(ends["the output layer"]):
        return "its embedding or output layer is built otherwise than the kernels know"
    if type(norm) is not type(first) or not _is_float(norm.weight):
        return "its last norm is built otherwise than the kernels know"
    return None if len(norm.weight) == width else "its last norm has another width than its layers"


def _ends(model: Any, inner: Any, parts: ModelParts) -> dict[str, Any]:
    """What stands around the layers, by name; None: it is not there."""
    names = [
        name for name in (parts.embedding, parts.norm, parts.rotary, parts.positions) if name is not None
    ]
    head = model.get_output_embeddings()
    found = {name: inner._modules.get(name) for name in names}
    return {**found, "the output layer": getattr(head, "words", head)}  # of one that is cut


def _layers(inner: Any) -> list[Any]:
    names = {family.layers for family in FAMILIES.values()}
    found = (inner._modules.get(name) for name in names)
    return next((list(one) for one in found if isinstance(one, nn.ModuleList)), [])


def _first_norm(layer: Any) -> Any:
    return layer._modules.get("ln_1") or layer._modules.get("input_layernorm")


def _is_float(weight: Any) -> bool:
    return (
        weight is not None
        and type(weight.data) is Tensor
        and weight.dtype in FLOATS
        and weight.device.type == "cpu"
    )


def _is_readable(part: Any) -> bool:
    """Whether the kernels can read a linear layer: quantised in whole groups, or plain."""
    if isinstance(part, QuantisedLinear):
        return part._matrix.padded == part._matrix.width
    if type(part) is Conv1D:  # ``pack`` puts its weights in the order of a linear layer's
        return _is_float(part.weight) and part.weight.shape[0] % 16 == 0
    return reads_in_place(part)


def _is_table(part: Any) -> bool:
    if isinstance(part, QuantisedEmbedding):
        return part._matrix.padded == part._matrix.width
    return is_plain(part) and part.max_norm is None and _is_float(part.weight) and part.weight.is_contiguous()


def _why_not_layer(layer: Any) -> str | None:
    family = FAMILIES.get(type(layer))
    if family is None:
        return f"it is of class {type(layer).__name__}"
    holders, parts = family.holders(layer), family.parts(layer)
    if not all(map(_is_readable, holders)):
        return "its weights are of another type, width or device"
    weights = [one for one in family.norms(layer) if one is not None]
    if not all(map(_is_float, weights)):
        return "its norms are of another type or device"
    in_place = not any(isinstance(one, QuantisedLinear) for one in holders)
    blocks = [*(one.run for one in parts.values()), *(one.step for one in parts.values())]
    blocks += [] if in_place else [one.first for one in parts.values()]
    if any(number % native().CHANNELS for number in blocks):  # rows of a block are read together
        return "its heads are no whole blocks"
    fits = (
        family.shape(layer).activation is not None
        and parts["up"].rows == _columns(parts["down"])
        and parts.get("gate", parts["up"]).rows == parts["up"].rows
        and parts["q"].rows == _columns(parts["o"])
        and parts["k"].rows == parts["v"].rows
    )
    return None if fits else "its activation or the shapes of its matrices are others"


def _columns(part: MatrixPart) -> int:
    matrix = plain_matrix(part.linear)
    return int(part.linear.in_features if matrix is None else matrix.shape[1])


def _common(layer: Any) -> tuple[Any, ...]:
    """What all layers of a model must have in common, its width first."""
    family = FAMILIES[type(layer)]
    parts, shape = family.parts(layer), family.shape(layer)
    sizes = (_columns(parts["q"]), parts["q"].rows, parts["k"].rows, parts["up"].rows)
    return *sizes, shape.d, shape.turned


def pack(model: PreTrainedModel, longest: int | None = None) -> Packed:
    """What runs a model's passes from then on. Its weights stay where they are.

    Args:
        longest: beyond that length of a text its rotary embedding would change; None: it never does.

    Raises:
        ValueError: ``supports`` says why not, or a pass differs from the model's own.
    """
    if (why := supports(model)) is not None:
        raise ValueError(why)
    made = Packed(model, longest)
    _try(model, made)
    return made


@torch.inference_mode()
def _try(model: PreTrainedModel, made: Packed) -> None:
    """Compare a pass with the model's own, and with passes over a token or more each."""
    config = model.config.get_text_config(decoder=True)
    count = min(_TRIED, getattr(config, "sliding_window", None) or _TRIED)  # masks that all layers share
    ids = torch.arange(count)[None] % config.vocab_size
    buffers = [torch.zeros(1, made.kv, count, made.d) for _ in range(2 * made.depth)]

    def logits(starts: Sequence[int]) -> Tensor:
        found = []
        for start, end in pairwise([*starts, count]):
            slots = Slots([one.data_ptr() for one in buffers], count, end, start)
            mask = torch.ones(end - start, end, dtype=torch.bool).tril(start)[None, None]
            found.append(made.forward(ids[:, start:end], slots, mask)[0])
        return torch.cat([one for one in found if one is not None], 1)

    name, whole, wanted = model.name_or_path or type(model).__name__, logits([0]), model(ids).logits.float()
    known = getattr(model.get_output_embeddings(), "ids", None)  # type: ignore[no-untyped-call]
    wanted = wanted if known is None else wanted[..., known]
    far = _FAR["quantised" if made.quantised else str(model.dtype).removeprefix("torch.")]
    if not torch.isfinite(wanted).all():
        return
    if not bool((whole - wanted).norm() <= far * wanted.norm()):
        raise ValueError(f"the kernels' logits of {name} differ from its own")
    if not torch.equal(logits(range(0, count, max(1, count // 3))), whole):
        raise ValueError(f"tokens of {name} differ between forward passes")


class Packed:
    """A model for the kernels, see ``pack``.

    Attributes:
        depth: number of layers. kv, d: heads of keys, and their size. numbers: of the layers in the cache. width,
            vocab: sizes of states and logits. quantised: whether its layers have fewer than 16 bits.
        size: number of parameters.
    """

    def __init__(self, model: PreTrainedModel, longest: int | None) -> None:
        for part in model.modules():  # the same weights in the order of a linear layer's
            if type(part) is Conv1D and not part.weight.t().is_contiguous():
                part.weight.data = part.weight.data.t().contiguous().t()
        names = MODELS[type(model).forward]
        inner: Any = getattr(model, names.inner)
        ends, layers = _ends(model, inner, names), _layers(inner)
        self._held: list[Any] = []  # what the kernels point to, as long as this lives
        self._facts = facts = native().Model()
        self._rotary: Any = None if names.rotary is None else ends[names.rotary]
        self._longest, self._tables = longest, dict[str, tuple[Tensor, Tensor]]()
        config = model.config.get_text_config(decoder=True)
        types = getattr(config, "layer_types", None) or [""] * len(layers)
        self._kinds = list(dict.fromkeys(types))
        facts.set_layers([self._layer(layer, types[i]) for i, layer in enumerate(layers)])
        embedding, norm, head = ends[names.embedding], ends[names.norm], ends["the output layer"]
        family, shape = FAMILIES[type(layers[0])], FAMILIES[type(layers[0])].shape(layers[0])
        facts.embedding, facts.scale = self._table(embedding), getattr(embedding, SCALE, 1.0)
        if isinstance(embedding, QuantisedEmbedding):
            facts.scale = embedding._scale
        if names.positions is not None:
            facts.positions = self._table(ends[names.positions])
        facts.head = self._matrix(MatrixPart(head, 0, 0, head.out_features))
        facts.norm = self._norm(norm.weight, getattr(norm, "bias", None))
        facts.eps, facts.offset, facts.centred = _eps(norm), shape.offset, shape.centred
        facts.cap = getattr(config, "final_logit_softcapping", None) or 0.0
        parts = family.parts(layers[0])
        self.depth, self.kv, self.d = len(layers), parts["k"].rows // shape.d, shape.d
        self.numbers = [family.attends(layer).layer_idx for layer in layers]
        self.width, self.vocab = facts.embedding.width, facts.head.high
        self.size = parameter_count(model)
        self.quantised = any(isinstance(part, QuantisedLinear) for part in model.modules())
        steady = self._rotary is None or longest is not None or _rope_types(self._rotary) <= _STEADY
        if not steady:
            raise ValueError(f"its rotary embedding is {', '.join(_rope_types(self._rotary))}")

    def forward(
        self, ids: Tensor, slots: Slots, mask: Masks = None, layers: Sequence[int] = (), logits: bool = True
    ) -> tuple[Tensor | None, Tensor, tuple[Tensor, ...]]:
        """A pass over tokens ``[batch, n]``: logits ``[batch, n, vocab]`` or None, the states ``[batch, n, d]`` that
        they are made of, and those behind some layers, by their numbers from 0.

        Raises:
            IndexError: a token id has no row, or the text is too long.
        """
        batch, n = ids.shape
        states, said = floats(batch, n, self.width), floats(batch, n, self.vocab) if logits else None
        taken = {layer: floats(batch, n, self.width) for layer in layers}
        last = slots.start + n if slots.position is None else int(slots.position.max()) + 1
        ids, kinds, held = ids.to(torch.int64).contiguous(), [], []
        for kind in self._kinds:
            own = mask[kind] if isinstance(mask, Mapping) else mask
            seen, steps = None, (0, 0)
            if own is not None:
                seen = _visible(own)
                steps = tuple(0 if seen.shape[axis] == 1 else seen.stride(axis) for axis in (0, 1))  # type: ignore[assignment]
            cosine, sine = self._angles(kind, last)
            held.append((seen, cosine, sine))
            kinds.append((cosine.data_ptr(), sine.data_ptr(), _at(seen), *steps))
        native().forward(
            self._facts, ids.data_ptr(), batch, n, slots.start, _at(slots.position), _at(slots.row), _at(slots.slot),
            slots.buffers, slots.half, slots.slots, slots.keys, _at(slots.seen), kinds,
            [(layer, to.data_ptr()) for layer, to in taken.items()], states.data_ptr(), _at(said),
            torch.get_num_threads(),
        )  # fmt: skip
        return said, states, tuple(taken[layer] for layer in layers)

    def draft(
        self,
        first: Tensor,
        states: Tensor,
        writers: Writers,
        buffers: Sequence[int],
        slots: int,
        vocab: int,
        half: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draft steps in one call: of the logits after a text a law, of this a token, a pass over the token, and so on.

        The tokens drawn last are not read.

        Args:
            first: logits ``[rows, vocab]`` after the texts. states: ``[rows, d]`` that they are made of.
            buffers, slots, half: as of ``Slots``. vocab: size of the laws, of the first logits.

        Returns:
            Logits, states, laws ``[steps, rows, ...]`` and tokens ``[steps, rows]``; those beyond a row's count are
            not written.

        Raises:
            IndexError: a text is too long.
        """
        steps, rows = max(writers.counts), len(writers.rows)
        said, seen = floats(steps, rows, self.vocab), floats(steps, rows, self.width)
        said[0, :, : first.shape[-1]], seen[0] = first, states
        laws, tokens = floats(steps, rows, vocab), torch.empty(steps, rows, dtype=torch.int64)
        longest = max(map(add, writers.starts, writers.counts)) - 1  # the last tokens are not read
        held = [self._angles(kind, longest) for kind in self._kinds]
        angles = [(cosine.data_ptr(), sine.data_ptr()) for cosine, sine in held]
        where = np.array([writers.rows, writers.starts, writers.counts], np.int64)
        heats, keys = np.array(writers.temperatures, np.float32), np.array(writers.keys, np.uint64)
        kinds = zip(zip(*writers.truncations, strict=True), (np.int64, np.float64, np.float32), strict=True)
        cuts = [np.array(values, kind) for values, kind in kinds]
        given = [one.ctypes.data for one in (*where, heats, *cuts, keys, *writers.words)]
        ids = 0 if writers.ids is None else writers.ids.ctypes.data
        native().draft(
            self._facts, rows, steps, *given, vocab, ids, buffers, half, slots, angles,
            *map(_at, (said, seen, laws, tokens)), torch.get_num_threads(),
        )  # fmt: skip
        return said, seen, laws, tokens

    def _angles(self, kind: str, last: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[at least last, turned]`` of all positions, as the rotary embedding has them."""
        found = self._tables.get(kind)
        if found is None or (self._rotary is not None and len(found[0]) < last):
            found = self._tables[kind] = self._made_angles(kind, last)
        return found

    def _made_angles(self, kind: str, last: int) -> tuple[Tensor, Tensor]:
        if self._rotary is None:
            return floats(0), floats(0)
        if last > (self._longest or last):
            raise IndexError(
                f"the text is longer than {self._longest} tokens, where its rotary embedding changes"
            )
        count = max(256, 1 << max(last - 1, 0).bit_length())
        places = torch.arange(min(count, self._longest or count), device="cpu")[None]
        more = {"layer_type": kind} if isinstance(self._rotary.rope_type, dict) else {}
        cosine, sine = (
            part[0].float().contiguous() for part in self._rotary(floats(1), position_ids=places, **more)
        )
        return cosine, sine

    def _layer(self, layer: Any, kind: str) -> Any:
        family = FAMILIES[type(layer)]
        made, parts, shape, norms = (
            native().Layer(),
            family.parts(layer),
            family.shape(layer),
            family.norms(layer),
        )
        for name, part in parts.items():
            setattr(made, name, self._matrix(part))
        for name in ("norm", "query_norm", "key_norm", "second_norm", "after_attention", "after_mlp"):
            bias = {"norm": norms.norm_bias, "second_norm": norms.second_bias}.get(name)
            setattr(made, name, self._norm(getattr(norms, name), bias))
        made.width, made.d, made.turned = _columns(parts["q"]), shape.d, shape.turned
        made.heads, made.kv = parts["q"].rows // shape.d, parts["k"].rows // shape.d
        made.kind = self._kinds.index(kind)
        for name in ("activation", "centred", "parallel", "eps", "offset", "scaling", "cap"):
            setattr(made, name, getattr(shape, name))
        return made

    def _norm(self, weight: Tensor | None, bias: Tensor | None) -> Any:
        own = [None if one is None else one.detach().float().contiguous() for one in (weight, bias)]
        self._held += own
        return native().Norm(*map(_at, own))

    def _matrix(self, part: MatrixPart) -> Any:
        linear, run, step = part.linear, part.run or part.rows, part.step or part.rows
        bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        if isinstance(linear, QuantisedLinear):
            self._held += [linear._matrix, bias]
            return linear._matrix.native(part.first, part.rows, run, step, bias)
        weight: Any = plain_matrix(linear)
        self._held += [weight.detach(), bias]
        at = weight.data_ptr() + part.first * weight.shape[1] * weight.element_size()
        more = 0 if bias is None else bias.data_ptr() + part.first * bias.element_size()
        return native().Matrix(FLOATS[weight.dtype], at, part.rows, weight.shape[1], more, run, step)

    def _table(self, part: Any) -> Any:
        if isinstance(part, QuantisedEmbedding):
            self._held.append(part._matrix)
            return part._matrix.native()
        weight = part.weight.detach()
        self._held.append(weight)
        high, width = weight.shape
        return native().Matrix(FLOATS[weight.dtype], weight.data_ptr(), high, width, 0, high, high)


def _rope_types(rotary: Any) -> set[str]:
    own = rotary.rope_type
    return set(own.values()) if isinstance(own, dict) else {own}


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _visible(mask: Tensor) -> Tensor:
    """Which keys a query sees, bool ``[1 or batch, n, keys]``."""
    if mask.shape[1] != 1:
        raise NotImplementedError("a mask for each head")
    seen = (mask if mask.dtype == torch.bool else mask > _HIDDEN)[:, 0]
    return seen if seen.stride(-1) == 1 else seen.contiguous()


def _at(given: Tensor | None) -> int:
    return 0 if given is None else given.data_ptr()
