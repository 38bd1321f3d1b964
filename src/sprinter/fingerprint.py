"""Which checkpoint a model was loaded from."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

__all__ = ["weights_fingerprint"]


def weights_fingerprint(model: Any) -> str:
    """SHA-256 over names, shapes and the first 64 values (as bfloat16) of every parameter.

    The same for one checkpoint wherever it lies and whichever dtype it is loaded in; cheap for any size. A model that
    is no ``nn.Module`` tells its own as ``fingerprint``: a GGUF file that of the checkpoint that it was made from.
    """
    if not isinstance(model, nn.Module):
        return str(model.fingerprint)
    digest = hashlib.sha256()
    for name, values in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.detach().flatten()[:64].to("cpu", torch.bfloat16).float().numpy().tobytes())
    return digest.hexdigest()
