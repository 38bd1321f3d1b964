"""What stands in the place of a module's ``forward``, and the last norm of a model with joined layers."""

from __future__ import annotations

from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sprinter.models.quantised.layers import without_gradient
from sprinter.models.quantised.library import kernel

__all__ = ["ForwardOverride", "LastNorm", "is_last_norm"]

_KNOWN = (LlamaRMSNorm, MistralRMSNorm, Phi3RMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


class ForwardOverride:
    """``forward`` of a module. It holds the module weakly, and nothing else when copied.

    Args:
        layer: the module.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = ref(layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(memo[id(self._layer())])

    def __reduce__(self) -> Any:
        raise TypeError("a compiled model cannot be pickled: load it with compile=False")


def is_last_norm(part: object) -> bool:
    """Whether ``LastNorm`` computes what a module does."""
    return type(part) in _KNOWN


class LastNorm(ForwardOverride):
    """Of a norm: by our kernel, so that it is the same, to the bit, in a pass that is one call."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., d]`` -> ``[..., d]``, float32."""
        own: Any = self._layer()
        rows, weight = without_gradient(x).contiguous(), own.weight.detach().float()
        made, width = torch.empty_like(rows), len(weight)
        kernel().norm(
            rows.data_ptr(),
            weight.data_ptr(),
            rows.numel() // width,
            width,
            own.variance_epsilon,
            made.data_ptr(),
        )
        return made
