"""Models in float32 and bfloat16 whose layers our kernels run, over the weights as they are.

Nothing is compiled for a model or a shape, and no weight is copied but those of norms and biases in bfloat16.
Activations are in float32, also where weights are in bfloat16, so that laws are nearer to those of the weights than
PyTorch's; and a token has the same law in every forward pass, to the bit, as with quantised weights.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sprinter.models.quantised.attention import attend_in_order
from sprinter.models.quantised.fused_layers import join_layers, joinable, part_layers, reads_in_place
from sprinter.models.quantised.layers import is_quantised, plain_matrix, without_gradient
from sprinter.models.quantised.library import FLOATS, kernel
from sprinter.models.quantised.norm import ForwardOverride
from sprinter.models.quantised.quantise import SCALE, is_plain, join_quantised, try_joined
from sprinter.models.quantised.unchanged import changed_layer
from sprinter.models.runners.masks import ORDERED

__all__ = ["renew_layers", "run_in_place"]

_log = logging.getLogger("sprinter")

_FAR = 1e-3
"""Largest distance of logits that come from the order of sums alone; nothing is rounded."""
_run: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
"""Models that the kernels have run in place, with the attention of before; since a reload, some may run without."""


def run_in_place(model: PreTrainedModel) -> str | None:
    """Have the kernels run a model's decoder layers and output layer; why they cannot, in words, and then nothing has
    changed, or None.

    Its modules and weights stay. Gradients, other dtypes and pickling are refused from then on.

    Raises:
        UserError: the kernels cannot be compiled, or the model computes something else with them.
    """
    strange = next(
        (one for one in model.parameters() if one.dtype not in FLOATS or one.device.type != "cpu"), None
    )
    if strange is not None:
        kind = str(strange.dtype).removeprefix("torch.")
        return f"its weights are in {kind} on {strange.device}, and our kernels read float32 and bfloat16 on a CPU"
    convolutions = [part for part in model.modules() if type(part) is Conv1D]
    for part in convolutions:  # the same weights in the order of a linear layer's
        part.weight.data = part.weight.data.t().contiguous().t()
    if (why := _why_not(model)) is not None:
        for part in convolutions:
            part.weight.data = part.weight.data.contiguous()
        return why
    kernel()
    _run[model] = model.config._attn_implementation
    attend_in_order(model)
    model.requires_grad_(False)
    embedding: Any = model.get_input_embeddings()
    embedding.forward = _Rows(embedding)
    own: Any
    for own in model.modules():
        instead = _Product if reads_in_place(own) else _Norm if type(own) is nn.LayerNorm else None
        if instead is not None:
            own.forward = instead(own)
    try:
        try_joined(model, lambda: join_layers(model, in_place=True), "compiled", "compile=False", _FAR)
    except BaseException:
        _leave(model)
        raise
    return None


def _leave(model: PreTrainedModel) -> None:
    """Undo ``run_in_place``: the model runs as transformers wrote it."""
    for part in model.modules():
        if isinstance(vars(part).get("forward"), ForwardOverride):
            del part.forward
        if type(part) is Conv1D:
            part.weight.data = part.weight.data.contiguous()
    if model.config._attn_implementation == ORDERED:
        model.config._attn_implementation = _run[model]


def renew_layers(model: PreTrainedModel) -> None:
    """After a change of a model, see anew which of its layers the kernels can run; a warning names one that they no
    longer can. Of a model with weights in place the kernels run all layers or none.

    Raises:
        UserError: as ``run_in_place``.
    """
    if is_quantised(model):
        part_layers(model)
        join_quantised(model)
    elif model in _run:
        _leave(model)
        if (why := run_in_place(model)) is not None:
            _log.warning("our kernels no longer run %s, which is slower: %s", type(model).__name__, why)


def _why_not(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config(decoder=True)
    if len(joinable(model, True)) != getattr(config, "num_hidden_layers", -1):
        return changed_layer(model) or "they are built otherwise than the kernels know"
    if model.config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is {model.config._attn_implementation!r}, not 'sdpa'"
    if any("forward" in vars(part) for part in model.modules()):  # another library's
        return "a module has a forward of its own"
    if not is_plain(model.get_input_embeddings()) or len(_outputs(model)) != 1:
        return "its embedding or output layer is built otherwise than the kernels know"
    return None


def _outputs(model: PreTrainedModel) -> list[nn.Module]:
    """The linear layers of the output layer that the kernels can read; one, also where it is cut (``CutHead``)."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [] if head is None else [part for part in head.modules() if reads_in_place(part)]


class _Rows(ForwardOverride):
    """Of an embedding: in float32, as rotary embeddings and norms take their dtype from it, and so scaled."""

    def __call__(self, ids: Tensor) -> Tensor:
        """``[...]`` -> ``[..., d]``."""
        own: Any = self._layer()
        rows = nn.functional.embedding(ids, own.weight).float()
        scale: float = getattr(own, SCALE, 1.0)
        return rows if scale == 1.0 else rows * scale


class _Norm(ForwardOverride):
    """Of a layer norm: in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., d]`` -> ``[..., d]``."""
        own: Any = self._layer()
        weight, bias = (None if one is None else one.float() for one in (own.weight, own.bias))
        return nn.functional.layer_norm(x.float(), own.normalized_shape, weight, bias, own.eps)


class _Product(ForwardOverride):
    """Of a linear layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        own: Any = self._layer()
        if not reads_in_place(own):
            raise RuntimeError("a model that is compiled stays as it is, on the CPU")
        matrix: Any = plain_matrix(own)
        rows = without_gradient(x).reshape(-1, matrix.shape[1]).contiguous()
        bias = None if own.bias is None else own.bias.detach().float()
        return kernel().product_in_place(matrix, rows, bias).view(*x.shape[:-1], len(matrix))
