"""Linear layers of float32 on a CPU by oneDNN, in place of the library that PyTorch's own call takes there.

That one, MKL, needs half as much time again for two to eight tokens as for one on AMD's processors: the passes of
speculative decoding. oneDNN reads a copy of the weights in an order of its own, made when a layer is first run, at
which a pass over eight tokens costs little more than one over one.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.models.twin import twin

__all__ = ["forget", "with_onednn"]

_MOST = 2 << 30
"""Bytes of a model's linear layers up to which they are copied; oneDNN reads those of larger models as they are."""
_log = logging.getLogger("sprinter")
_made: WeakKeyDictionary[PreTrainedModel, PreTrainedModel | None] = WeakKeyDictionary()


class _Linear(nn.Linear):
    """A linear layer whose products oneDNN computes while no gradients are asked for.

    The copy is made anew where the weights were changed in place or are others.
    """

    copies: bool
    _copy: tuple[tuple[int, int], Tensor] | None

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        weight = self.weight
        if torch.is_grad_enabled() or input.dtype != torch.float32 or weight.dtype != torch.float32:
            return nn.functional.linear(input, weight, self.bias)
        if self.copies:
            state = weight.data_ptr(), weight._version
            if self._copy is None or self._copy[0] != state:
                self._copy = state, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 4)
            weight = self._copy[1]
        made: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, self.bias, "none", [], "")
        return made


def with_onednn(model: PreTrainedModel) -> PreTrainedModel:
    """The model as runners are to call it: over the same weights, by ``_Linear`` where that is quicker.

    Models on other devices or in other dtypes, and where PyTorch has no oneDNN, are returned as they are.
    """
    if model not in _made:
        _made[model] = _with_onednn(model)
    return _made[model] or model


def forget(model: PreTrainedModel) -> None:
    """Take a model as it is now: copies of its weights are made anew."""
    _made.pop(model, None)


def _with_onednn(model: PreTrainedModel) -> PreTrainedModel | None:
    parts = [part for part in model.modules() if type(part) is nn.Linear]
    if not parts or not all(map(_fits, parts)) or not _available():
        return None
    try:
        made = twin(model)
    except UserError as error:
        _log.debug("%s runs without oneDNN: %s", type(model).__name__, error)
        return None
    size = sum(part.weight.nbytes for part in parts)
    for part in made.modules():
        if type(part) is nn.Linear:
            part.__class__ = _Linear
            changed: Any = part
            changed.copies, changed._copy = size <= _MOST, None
    return made


def _fits(part: nn.Linear) -> bool:
    weight = part.weight
    plain = type(weight.data) is Tensor and not weight.is_meta and not weight.is_inference()
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32


def _available() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and all(hasattr(torch.ops.mkldnn, name) for name in names)
