"""transformers' decoder layers, run by the kernels while a CUDA graph is captured.

A layer of 40 small operators costs a GPU more than its weights do. Inside ``fused_layers`` the decoder layers of
``FAMILIES``, the norm behind them and the output layer have another ``forward``, which starts nine kernels for each
layer. It serves passes over caches whose ``layers`` have ``rows``, ``slots`` and ``seen``; very long ones, and those of
other threads, take the usual way.
Weights stay where they are: matrices that read the same input are one product, wherever each lies. With many tokens,
as of many rows, products are the library's, and what is left, attention without copies of the keys above all, is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import repeat
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from sprinter_kernels.families import (
    ACTIVATIONS,
    FAMILIES,
    LayerFamily,
    LayerShape,
    MatrixPart,
    Norms,
)
from sprinter_kernels.fused_plan import (
    CHUNK,
    COLUMNS,
    LARGEST,
    MOST,
    QUERIES,
    ROWS,
    WARPS,
    Plan,
    attention_chunks,
    device_facts,
    product_plan,
    stages,
    tokens_block,
)
from sprinter_kernels.layers import RoundedLinear, plain_matrix
from sprinter_kernels.unchanged import changed_layer, hooks_everywhere, hooks_of

__all__ = ["WIDENS", "fused_layers", "why_not_fused"]

WIDENS = True
"""Attention reads keys and values of fewer bits than queries."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NORM_NAMES = ("norm", "ln_f", "final_layer_norm")  # of what is behind the layers
_NEXT = "_sprinter_next"  # of states: the norm that reads them, and its result
_OLDEST = (8, 0)  # compute capability


def why_not_fused(model: PreTrainedModel) -> str | None:
    """Why the kernels do not run a model's layers; None: they do."""
    if find_spec("triton") is None:
        return "triton is not installed"
    weights = list(model.parameters())
    device = weights[0].device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST:
        return "the GPU is older than Ampere"
    if len({(one.dtype, one.device) for one in weights}) > 1 or weights[0].dtype not in _DTYPES:
        return "its weights are of several types"
    if (
        any(type(one.data) is not Tensor for one in weights)
        or getattr(model, "hf_quantizer", None) is not None
    ):
        return "its weights are quantised"
    if model.config._attn_implementation != "sdpa":
        return f"its attention is {model.config._attn_implementation!r}, not 'sdpa'"
    if hooks_everywhere() or any("forward" in vars(part) or hooks_of(part) for part in model.modules()):
        return "its modules have hooks or a forward of their own"
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "pretraining_tp", 1) != 1 or getattr(config, "use_bidirectional_attention", False):
        return "its layers compute more than the kernels do"
    try:
        layers = decoder_layers(model)
    except NotImplementedError as error:
        return str(error)
    if strange := next((layer for layer in layers if not _fits(layer)), None):
        return f"the kernels do not know {type(strange).__name__}"
    return changed_layer(model)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers, first to last.

    Raises:
        NotImplementedError: they are not found.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    raise NotImplementedError(f"the decoder layers of {type(model).__name__} are not found")


def _fits(layer: nn.Module) -> bool:
    family = FAMILIES.get(type(layer))
    if family is None or any(_weights(one)[0] is None for one in family.holders(layer)):
        return False
    shape, parts = family.shape(layer), family.parts(layer)
    return (
        shape.activation is not None
        and not shape.parallel
        and not shape.cap  # which scaled_dot_product_attention leaves out
        and not any(part.run or part.step for part in parts.values())
        and parts["k"].rows == parts["v"].rows
        and parts.get("gate", parts["up"]).rows == parts["up"].rows
    )


@contextmanager
def fused_layers(model: PreTrainedModel) -> Iterator[list[_Layer]]:
    """Context in which short passes of a model, for which ``why_not_fused`` gives None, go through the kernels; what
    runs each layer."""
    layers, parent = list(decoder_layers(model)), _parent(model)
    last = next(
        (parent._modules[name] for name in _NORM_NAMES if parent._modules.get(name) is not None), None
    )
    norms = [FAMILIES[type(layer)].norms(layer) for layer in layers]
    behind = _final(last, layers[-1])
    forwards: list[tuple[nn.Module, Any]] = []
    own: list[_Layer] = []
    for i, layer in enumerate(layers):
        following = (norms[i + 1].norm, norms[i + 1].norm_bias) if i + 1 < len(layers) else behind
        own.append(_Layer(layer, norms[i], following))
        forwards.append((layer, own[-1]))
    if last is not None and behind is not None:
        forwards.append((last, _FinalNorm(last, behind[0])))
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    head = getattr(head, "words", head)  # of one that is cut
    if type(head) in (nn.Linear, RoundedLinear) and head.bias is None:
        forwards.append((head, _Output(head)))
    try:
        for part, forward in forwards:
            part.forward = forward
        yield own
    finally:
        for part, _ in forwards:
            part.__dict__.pop("forward", None)


def _parent(model: PreTrainedModel) -> Any:
    """What holds the decoder layers."""
    layers = decoder_layers(model)
    return next(part for part in model.modules() if any(child is layers for child in part._modules.values()))


def _final(norm: Any, layer: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of the norm behind the layers, if it is like theirs."""
    family: LayerFamily = FAMILIES[type(layer)]
    centred = family.shape(layer).centred
    first = layer._modules.get("ln_1" if centred else "input_layernorm")
    if norm is None or type(norm) is not type(first) or norm.weight is None:
        return None
    if _eps(norm) != _eps(first):
        return None
    return norm.weight, getattr(norm, "bias", None)


def _eps(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", None) or norm.eps


class _Matrices(NamedTuple):
    """Up to three matrices ``[rows, columns]`` that read the same input.

    Attributes:
        weight: the first. rows: of each; 0: there is none. offsets: of the second and third behind it, in elements.
        steps: from row to row and from column to column. scale: of the first's rows, if it has 8 bits, and where the
        others' begin. bias: so too.
    """

    weight: Tensor
    rows: tuple[int, int, int]
    offsets: tuple[int, int]
    steps: tuple[int, int]
    scale: Tensor | None
    scale_offsets: tuple[int, int]
    bias: Tensor | None
    bias_offsets: tuple[int, int]
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, *parts: MatrixPart) -> _Matrices:
        found = [_weights(part.linear) for part in parts]
        weights = [_rows(part, weight) for part, (weight, _) in zip(parts, found, strict=True)]
        scales = [_rows(part, scale) for part, (_, scale) in zip(parts, found, strict=True)]
        biases = [_rows(part, part.linear.bias) for part in parts]
        first, second, third = (*(part.rows for part in parts), 0, 0)[:3]
        if len({(one.stride(), one.dtype) for one in weights}) > 1:
            raise ValueError("matrices that read one input lie or are stored differently")
        row, column = weights[0].stride()
        return cls(
            weights[0], (first, second, third), _offsets(weights), (row, column), scales[0], _offsets(scales),
            biases[0], _offsets(biases), tuple(weights), tuple(biases),
        )  # fmt: skip


def _weights(linear: nn.Module) -> tuple[Any, Tensor | None]:
    """Matrix ``[out, in]`` of a linear layer (None: it is another layer), and its rows' scales if it has 8 bits."""
    if type(linear) is RoundedLinear:
        return linear.codes, linear.scale
    return plain_matrix(linear), None


def _rows(part: MatrixPart, whole: Tensor | None) -> Any:
    return None if whole is None else whole.detach()[part.first : part.first + part.rows]


def _offsets(tensors: list[Any]) -> tuple[int, int]:
    """How far the second and third begin behind the first, in elements, wherever each was allocated."""
    if all(one is None for one in tensors):
        return 0, 0
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    second, third = (*((one.data_ptr() - first) // size for one in tensors[1:]), 0, 0)[:2]
    return second, third


def _multiply(x: Tensor, matrix: _Matrices, split: bool = True) -> Tensor:
    """``x [M, columns]`` -> ``[splits, M, rows]`` in float32; without splits, or with more than ``MOST`` tokens,
    ``[1, M, rows]`` in the dtype of x."""
    from sprinter_kernels import fused_kernels as kernels

    (tokens, columns), rows = x.shape, matrix.rows
    if tokens > MOST:
        made = [x @ weight.mT for weight in matrix.weights]
        return (made[0] if len(made) == 1 else torch.cat(made, -1))[None]
    plan = product_plan(sum(rows), columns, device_facts(x.device).processors) if split else Plan(1, columns)
    dtype = torch.float32 if split else x.dtype
    out = torch.empty(plan.splits, tokens, sum(rows), dtype=dtype, device=x.device)
    tiles = sum(-(-count // ROWS) for count in rows)
    kernels.multiply[(tiles, plan.splits)](
        x, matrix.weight, _given(matrix.scale, x), out, tokens, columns, *rows, *matrix.offsets, *matrix.scale_offsets,
        *matrix.steps, plan.each, **_compiled(x, matrix),
    )  # fmt: skip
    return out


def _given(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """What a kernel is given for a tensor; one that there is not, it does not read."""
    return instead if tensor is None else tensor.detach()


def _compiled(x: Tensor, matrix: _Matrices) -> dict[str, Any]:
    """How a product with ``x [M, columns]`` is compiled."""
    tokens, memory = len(x), device_facts(x.device).memory
    return {
        "BLOCK_N": ROWS, "BLOCK_K": COLUMNS, "TOKENS": tokens_block(tokens), "EXACT": x.dtype == torch.float32,
        "SCALED": matrix.scale is not None, "num_warps": WARPS,
        "num_stages": stages(tokens, matrix.weight.element_size(), x.element_size(), memory),
    }  # fmt: skip


class _Own:
    """``forward`` of a module in the thread that captures; in others the module's own.

    Args:
        module: the module.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._thread = module, get_ident()

    def _is_here(self) -> bool:
        return get_ident() == self._thread

    def _usual(self, *given: Any, **named: Any) -> Any:
        return type(self._module).forward(self._module, *given, **named)


class _Layer(_Own):
    """``forward`` of a decoder layer.

    Args:
        layer: the layer. norms: its norms.
        following: weight and bias of the norm that reads its result; None: none does.

    Attributes:
        ran: whether the kernels ever ran it.
    """

    ran = False

    def __init__(
        self, layer: Any, norms: Norms, following: tuple[Tensor | None, Tensor | None] | None
    ) -> None:
        super().__init__(layer)
        self._family = family = FAMILIES[type(layer)]
        self._norms, self._following = norms, following
        self._shape: LayerShape = family.shape(layer)
        self._number = family.attends(layer).layer_idx
        parts = family.parts(layer)
        self._heads, self._kv = (parts[name].rows // self._shape.d for name in "qk")
        self._qkv = _Matrices.of(parts["q"], parts["k"], parts["v"])
        self._out, self._down = _Matrices.of(parts["o"]), _Matrices.of(parts["down"])
        self._feed = _Matrices.of(parts["up"], *([parts["gate"]] if "gate" in parts else []))
        matrices = (self._qkv, self._out, self._feed, self._down)
        # the library has no product of eight bits that reads scales
        self._largest = MOST if any(one.scale is not None for one in matrices) else LARGEST

    def __call__(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        """``[batch, n, d]`` -> ``[batch, n, d]``."""
        by_name = self._family.arguments(self._module, given, named)
        cache, mask = by_name["cache"], by_name.get("attention_mask")
        batch, n, width = hidden_states.shape
        if (
            not self._is_here()
            or not hasattr(next(iter(getattr(cache, "layers", ())), None), "seen")
            or batch * n > self._largest
            or mask is None
            or mask.dtype != torch.bool
            or by_name.get("encoder_hidden_states") is not None
        ):
            return self._usual(hidden_states, *given, **named)
        self.ran = True
        x = hidden_states.reshape(-1, width).contiguous()
        norms = self._norms
        read, normed = getattr(hidden_states, _NEXT, (None, None))
        if read is not norms.norm or normed is None:
            normed = self._add(x, None, None, None, norms.norm, norms.norm_bias)[1]
        made = self._attention(normed, batch, cache, mask, by_name.get("position_embeddings"))
        x, normed = self._add(
            x, _multiply(made, self._out), self._out.bias, norms.after_attention, norms.second_norm, norms.second_bias
        )  # fmt: skip
        parts = _multiply(self._inner(normed), self._down)
        weight, bias = self._following or (None, None)
        x, normed = self._add(x, parts, self._down.bias, norms.after_mlp, weight, bias)
        states = x.view(batch, n, width)
        setattr(states, _NEXT, (weight, normed))
        return states

    def _attention(
        self,
        normed: Tensor,
        batch: int,
        cache: Any,
        mask: Tensor,
        positions: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """``[M, width]`` -> ``[M, heads * d]``."""
        from sprinter_kernels import fused_kernels as kernels

        shape, heads, kv, tokens = self._shape, self._heads, self._kv, len(normed)
        n, norms, buffers = tokens // batch, self._norms, cache.layers[self._number]
        parts = _multiply(normed, self._qkv)
        block = max(16, 1 << (shape.d - 1).bit_length())
        cosine = sine = normed
        if shape.turned:
            assert positions is not None
            cosine, sine = (part.expand(batch, n, shape.turned).contiguous() for part in positions)
        query_norm, key_norm = norms.query_norm, norms.key_norm
        query = normed.new_empty(tokens, heads, shape.d)
        keys, values = buffers.keys, buffers.values
        kernels.place[(tokens, heads + 2 * kv)](
            parts, _given(self._qkv.bias, normed), _given(query_norm, normed), cosine, sine, buffers.rows,
            buffers.slots, query, keys, values, tokens, n, heads, kv, *self._qkv.bias_offsets,
            0 if query_norm is None else _offsets([query_norm, key_norm])[0],
            *keys.stride()[:3], *values.stride()[:3], shape.eps, shape.offset,
            D=shape.d, TURNED=shape.turned, BLOCK_D=block, SPLITS=len(parts), BIASED=self._qkv.bias is not None,
            NORMED=query_norm is not None, num_warps=1,
        )  # fmt: skip
        seen = buffers.seen
        chunks = attention_chunks(seen)
        made = torch.empty(chunks, tokens, heads, shape.d, dtype=torch.float32, device=query.device)
        sums = torch.empty(chunks, tokens, heads, 2, dtype=torch.float32, device=query.device)
        visible = mask[:, 0].expand(batch, n, seen).view(torch.uint8)
        kernels.attend[(batch * kv, -(-n * (heads // kv) // QUERIES), chunks)](
            query, keys, values, buffers.rows, visible, made, sums, n, heads, kv, seen, shape.scaling,
            *keys.stride()[:3], *values.stride()[:3], *visible.stride()[:2],
            D=shape.d, BLOCK_D=block, QUERIES=QUERIES, CHUNK=CHUNK,
            EXACT=query.dtype == torch.float32, num_warps=4, num_stages=1,
        )  # fmt: skip
        out = normed.new_empty(tokens, heads * shape.d)
        kernels.merge[(tokens * heads,)](
            made, sums, out, tokens * heads, chunks, D=shape.d, BLOCK_D=block, num_warps=1
        )
        return out

    def _inner(self, normed: Tensor) -> Tensor:
        """``[M, width]`` -> ``[M, inner]``."""
        from sprinter_kernels import fused_kernels as kernels

        matrix, (tokens, columns) = self._feed, normed.shape
        rows, gated = matrix.rows[0], matrix.rows[1] > 0
        if tokens > MOST:
            return self._inner_of_many(normed)
        out = normed.new_empty(tokens, rows)
        kernels.feed[(-(-rows // ROWS),)](
            normed, matrix.weight, _given(matrix.scale, normed), _given(matrix.bias, normed), out, tokens, columns,
            rows, matrix.offsets[0], matrix.scale_offsets[0], matrix.bias_offsets[0], *matrix.steps,
            KIND=self._shape.activation, GATED=gated, BIASED=matrix.bias is not None,
            **_compiled(normed, matrix),
        )  # fmt: skip
        return out

    def _inner_of_many(self, normed: Tensor) -> Tensor:
        """``_inner`` with the library's products."""
        matrix, kind = self._feed, self._shape.activation
        up, *gate = map(functional.linear, repeat(normed), matrix.weights, matrix.biases)
        opened = gate[0] if gate else up
        if kind == ACTIVATIONS["silu"]:
            opened = functional.silu(opened)
        else:
            opened = functional.gelu(opened, approximate="none" if kind == ACTIVATIONS["gelu"] else "tanh")
        return opened * up if gate else opened

    def _add(
        self,
        x: Tensor,
        parts: Tensor | None,
        bias: Tensor | None,
        after: Tensor | None,
        weight: Tensor | None,
        norm_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """x plus the sum of the parts (which ``after`` norms), and the norm of that (or, without a weight, x again)."""
        from sprinter_kernels import fused_kernels as kernels

        tokens, width = x.shape
        states = x if parts is None else torch.empty_like(x)
        normed = x if weight is None else torch.empty_like(x)
        kernels.add_norm[(tokens,)](
            x, _given(parts, x), _given(bias, x), _given(after, x), _given(weight, x), _given(norm_bias, x), states,
            normed, tokens, width, self._shape.eps, self._shape.offset,
            BLOCK=1 << (width - 1).bit_length(), SPLITS=0 if parts is None else len(parts), BIASED=bias is not None,
            AFTER=after is not None, NORMED=weight is not None, CENTRED=self._shape.centred,
            NORM_BIASED=norm_bias is not None, num_warps=8,
        )  # fmt: skip
        return states, normed


class _FinalNorm(_Own):
    """``forward`` of the norm behind the layers: what the last layer has made, if that is what it is given."""

    def __init__(self, norm: nn.Module, weight: Tensor) -> None:
        super().__init__(norm)
        self._weight = weight

    def __call__(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        read, normed = getattr(hidden_states, _NEXT, (None, None))
        if self._is_here() and read is self._weight and normed is not None:
            return normed.view(hidden_states.shape)
        return self._usual(hidden_states, *given, **named)


class _Output(_Own):
    """``forward`` of the output layer."""

    def __init__(self, head: Any) -> None:
        super().__init__(head)
        self._matrix = _Matrices.of(MatrixPart(head, 0, 0, head.out_features))

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not self._is_here() or len(rows) > MOST:
            usual: Tensor = self._usual(x)
            return usual
        made = _multiply(rows.contiguous(), self._matrix, split=False)
        return made.view(*x.shape[:-1], -1)
