"""Which checkpoint a model was loaded from."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

__all__ = ["weights_fingerprint"]


def weights_fingerprint(model: Any) -> str:
    """SHA-256 over names, shapes and the first 64 values (as bfloat16) of every parameter.

    It depends neither on the checkpoint's path nor on the dtype that it is loaded in, and is cheap for any size. A
    model that is not an ``nn.Module`` has it as an attribute ``fingerprint``; that of a GGUF file is the fingerprint
    of the checkpoint that the file was converted from.
    """
    if not isinstance(model, nn.Module):
        return str(model.fingerprint)
    digest = hashlib.sha256()
    for name, values in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.detach().flatten()[:64].to("cpu", torch.bfloat16).float().numpy().tobytes())
    return digest.hexdigest()
