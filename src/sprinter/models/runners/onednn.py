"""Linear layers of float32 on a CPU by oneDNN, in place of the library that PyTorch's own call takes there.

That one, MKL, needs half as much time again for two to eight tokens as for one on AMD's processors: the passes of
speculative decoding. oneDNN reads a copy of the weights in an order of its own, at which a pass over eight tokens costs
little more than one over one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from threading import Lock
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.models.twin import twin

__all__ = ["CopiedWeights", "copied_weights", "forget_copies"]

_MOST = 2 << 30
"""Bytes of a model's linear layers up to which they are copied; oneDNN reads those of larger models as they are."""
_log = logging.getLogger("sprinter")
_made: WeakKeyDictionary[PreTrainedModel, ReferenceType[CopiedWeights]] = WeakKeyDictionary()
"""Weak values: a hook of the model, which its copy shares, may name the model. Runners keep them."""
_making = Lock()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CopiedWeights:
    """A model by oneDNN.

    Attributes:
        model: over the same weights, with linear layers that read copies of them.
        read: the weights of these layers, and what they were then: place and version. Others make new copies necessary.
        mark: what tells the given model from what it was then.
    """

    model: PreTrainedModel
    read: tuple[tuple[Tensor, int, int], ...]
    mark: object = None

    def again(self) -> CopiedWeights:
        """With copies of the weights as they are now."""
        return _copy(self.model, None)


def copied_weights(model: PreTrainedModel) -> CopiedWeights | None:
    """The model by oneDNN, as it is now; None for other devices or dtypes, and where PyTorch has no oneDNN."""
    parts = [part for part in model.modules() if type(part) is nn.Linear]
    if not parts or not all(map(_fits, parts)) or not _available():
        return None
    with _making:
        mark, kept = _mark(model), _made.get(model)
        found = None if kept is None else kept()
        if found is None or found.mark != mark:
            try:
                found = _copy(twin(model, same_hooks=True), mark)
            except UserError as error:
                _log.debug("%s runs without oneDNN: %s", type(model).__name__, error)
                return None
            _made[model] = ref(found)
    return found


def forget_copies(model: PreTrainedModel) -> None:
    """Take a model as it is now: copies of its weights are made anew."""
    _made.pop(model, None)


def _mark(model: PreTrainedModel) -> object:
    """Its modules and parameters, where these are, and how often they were changed."""
    return [
        (id(part), [(id(one), *_state(one)) for one in part._parameters.values() if one is not None])
        for part in model.modules()
    ]


def _state(weight: Tensor) -> tuple[int, int]:
    plain = type(weight.data) is Tensor and not weight.is_inference()
    return (weight.data_ptr(), weight._version) if plain else (0, 0)


@torch.inference_mode(False)
@torch.no_grad()
def _copy(model: PreTrainedModel, mark: object) -> CopiedWeights:
    """``model``: another one over the same weights, which is changed."""
    parts = [part for part in model.modules() if type(part) is nn.Linear]
    copies = sum(part.weight.nbytes for part in parts) <= _MOST
    ops, read = torch.ops.mkldnn, tuple((part.weight, *_state(part.weight)) for part in parts)
    for part in parts:
        weight = ops._reorder_linear_weight(part.weight.detach(), 4) if copies else part.weight.detach()
        product = partial(
            ops._linear_pointwise.default, W=weight, B=part.bias, attr="none", scalars=[], algorithm=""
        )
        part.__dict__["forward"] = product
    return CopiedWeights(model, read, mark)


def _fits(part: nn.Linear) -> bool:
    """Whether its weights are its own, not made by a hook, and plain numbers of float32 in memory."""
    weight = part._parameters.get("weight")
    if weight is None or "bias" not in part._parameters:
        return False
    plain = type(weight.data) is Tensor and not weight.is_meta and not weight.is_inference()
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32


def _available() -> bool:
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return there and all(hasattr(torch.ops.mkldnn, name) for name in names)
