"""Which checkpoint a model was loaded from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

__all__ = ["count_as", "ids_name", "weights_fingerprint", "words_fingerprint"]

_files: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()
"""Model → hash of its weights when it was read from a file, and the fingerprint of that file."""


def weights_fingerprint(model: Any) -> str:
    """SHA-256 over names, shapes and the first 64 values (as bfloat16) of every parameter.

    It depends neither on the checkpoint's path nor on the dtype that it is loaded in, and is cheap for any size. A
    model that is not an ``nn.Module`` has it as an attribute ``fingerprint``; that of a GGUF file is the fingerprint
    of the checkpoint that the file was converted from. A GGUF file that PyTorch runs has the same one, until its
    weights change.
    """
    if not isinstance(model, nn.Module):
        return str(model.fingerprint)
    own = _of_weights(model)
    loaded, file = _files.get(model, (None, own))
    return file if own == loaded else own


def ids_name(ids: Tensor) -> str:
    """Number and hash of token ids, "NUMBER:HASH", for records."""
    return f"{len(ids)}:{hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:12]}"


def words_fingerprint(words: Mapping[str, int]) -> str:
    """SHA-256 over the tokens of a vocabulary, in the order of their ids."""
    ordered = sorted(words.items(), key=lambda one: (one[1], one[0]))
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()


def count_as(model: nn.Module, fingerprint: str) -> None:
    """Give a model the fingerprint of the file that it was read from, for as long as its weights stay as they are."""
    _files[model] = _of_weights(model), fingerprint


def _of_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, values in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.detach().flatten()[:64].to("cpu", torch.bfloat16).float().numpy().tobytes())
    return digest.hexdigest()
