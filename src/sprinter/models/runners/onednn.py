"""Linear layers of float32 on a CPU by oneDNN, in place of the library that PyTorch's own call takes there.

That one, MKL, needs half as much time again for two to eight tokens as for one on AMD's processors: the passes of
speculative decoding. oneDNN reads a copy of the weights in an order of its own, at which a pass over eight tokens costs
little more than one over one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.models.twin import twin

__all__ = ["CopiedWeights", "copied_weights", "forget_copies"]

_MOST = 2 << 30
"""Bytes of a model's linear layers up to which they are copied; oneDNN reads those of larger models as they are."""
_log = logging.getLogger("sprinter")
_made: WeakKeyDictionary[PreTrainedModel, CopiedWeights | None] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class CopiedWeights:
    """A model by oneDNN.

    Attributes:
        model: over the same weights, with linear layers that read copies of them.
        copied: the weights of which there are copies, and what they were then: place and version. Others make new
            copies necessary.
    """

    model: PreTrainedModel
    copied: tuple[tuple[Tensor, int, int], ...]

    def again(self) -> CopiedWeights:
        """With copies of the weights as they are now."""
        return _copy(self.model)


def copied_weights(model: PreTrainedModel) -> CopiedWeights | None:
    """The model by oneDNN; None for models on other devices or in other dtypes, and where PyTorch has no oneDNN."""
    if model not in _made:
        parts = [part for part in model.modules() if type(part) is nn.Linear]
        _made[model] = None
        if parts and all(map(_fits, parts)) and _available():
            try:
                _made[model] = _copy(twin(model, same_hooks=True))
            except UserError as error:
                _log.debug("%s runs without oneDNN: %s", type(model).__name__, error)
    return _made[model]


def forget_copies(model: PreTrainedModel) -> None:
    """Take a model as it is now: copies of its weights are made anew."""
    _made.pop(model, None)


@torch.inference_mode(False)
@torch.no_grad()
def _copy(model: PreTrainedModel) -> CopiedWeights:
    """``model``: another one over the same weights, which is changed."""
    parts = [part for part in model.modules() if type(part) is nn.Linear]
    copies = sum(part.weight.nbytes for part in parts) <= _MOST
    ops = torch.ops.mkldnn
    for part in parts:
        weight = ops._reorder_linear_weight(part.weight.detach(), 4) if copies else part.weight.detach()
        product = partial(
            ops._linear_pointwise.default, W=weight, B=part.bias, attr="none", scalars=[], algorithm=""
        )
        part.__dict__["forward"] = product
    weights = [part.weight for part in parts] if copies else []
    return CopiedWeights(model, tuple((one, one.data_ptr(), one._version) for one in weights))


def _fits(part: nn.Linear) -> bool:
    weight = part.weight
    plain = type(weight.data) is Tensor and not weight.is_meta and not weight.is_inference()
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32


def _available() -> bool:
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return there and all(hasattr(torch.ops.mkldnn, name) for name in names)
