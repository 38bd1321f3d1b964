"""Reads the header of a GGUF file: its metadata, and where and how its tensors are stored.

transformers reads both. The package ``gguf`` makes arrays for every string: half a minute for 150,000 tokens.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from struct import error
from typing import Any, NamedTuple

from transformers.integrations.gguf.reader import _read_metadata, _read_tensor_table

from sprinter.errors import UserError
from sprinter.models.gguf.library import gguf_package

__all__ = ["GgufHead", "StoredTensor", "forget_heads", "gguf_head"]

_STRINGS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
"""Arrays of strings that are read; of others the metadata hold the length."""


class StoredTensor(NamedTuple):
    """Where and how a tensor is stored: shape in PyTorch's order, number of its GGML type, offset of its first byte."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """The header of a GGUF file.

    Attributes:
        metadata: values by key; arrays are lists, but see ``_STRINGS``.
        tensors: its tensors by name.
        types: names of the GGML types that its matrices are stored in, such as "F16", "Q4_K"; for a type that the
            package ``gguf`` does not know, its number.
    """

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    types: frozenset[str]


def gguf_head(path: Path) -> GgufHead:
    """Read the header of a file, and check that all tensors that it names are in the file.

    The headers of the last two files are kept until ``forget_heads``: several readers need a model's vocabulary while
    it is loaded.

    Raises:
        UserError: the file is damaged, truncated, a part of a model or no model, or the package ``gguf`` is not
            installed.
    """
    gguf_package()
    try:
        state = path.stat()
        head = _read(path, state.st_size, state.st_mtime_ns)
    except (OSError, ValueError, error) as cause:  # mmap refuses an empty file
        raise UserError(f"the GGUF file {path} is damaged or cut short: fetch it again") from cause
    if (parts := head.metadata.get("split.count", 0)) > 1:
        raise UserError(
            f"{path} is one of {parts} parts of a model: join them with llama.cpp's `llama-gguf-split --merge`"
        )
    if (kind := head.metadata.get("general.type", "model")) == "adapter":
        raise UserError(
            f"{path} is an adapter, which is served only once it is merged: llama.cpp's `llama-export-lora` writes it "
            "and its base into one file"
        )
    if kind != "model":
        raise UserError(f"{path} is a file of type {kind}, not a language model: give the model's own file")
    return head


def forget_heads() -> None:
    """Free the headers that ``gguf_head`` keeps, some 30 MB for a vocabulary of 150,000."""
    _read.cache_clear()


@lru_cache(maxsize=2)
def _read(path: Path, size: int, changed_ns: int) -> GgufHead:
    """The header of a file in this state.

    Raises:
        ValueError, struct.error: it is inconsistent.
    """
    gguf = gguf_package()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data: Any = mapped  # where the reader takes an array, whose slices are slow
        metadata, count, end = _read_metadata(data, str(path), _STRINGS)
        entries, end = _read_tensor_table(data, count, end)
    step = int(metadata.get("general.alignment", 32))
    begin = -(-end // step) * step
    stored = {name: StoredTensor(shape, kind, begin + start) for name, shape, kind, start in entries}
    names = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    for shape, kind, start in stored.values():
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind] if kind in names else (1, 0)
        if block_bytes and start + math.prod(shape) // block * block_bytes > size:
            raise ValueError("a tensor lies beyond the end")
    matrices = {tensor.kind for tensor in stored.values() if len(tensor.shape) > 1}
    return GgufHead(metadata, stored, frozenset(names.get(kind, str(kind)) for kind in matrices))
