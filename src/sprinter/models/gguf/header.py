"""Reads the header of a GGUF file: its metadata, and where and how its tensors are stored.

The package ``gguf`` can read it too, but makes arrays for every string: half a minute for a vocabulary of 150,000.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from struct import Struct, error, unpack_from
from typing import Any, NamedTuple

from sprinter.errors import UserError
from sprinter.models.gguf.library import gguf_package

__all__ = ["GgufHead", "StoredTensor", "forget_heads", "gguf_head"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value → its code in ``struct``."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_LONG = 1000
_long_arrays: deque[tuple[str, bytes, list[str]]] = deque(maxlen=2)
"""Byte order, bytes and strings of the last arrays of at least ``_LONG`` strings: tokens and merges, which the files of
a pair share as a rule."""


class StoredTensor(NamedTuple):
    """Where and how a tensor is stored: shape in PyTorch's order, number of its GGML type, offset of its first byte."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """The header of a GGUF file.

    Attributes:
        metadata: values by key; arrays are lists.
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
    _long_arrays.clear()


@lru_cache(maxsize=2)
def _read(path: Path, size: int, changed_ns: int) -> GgufHead:
    """The header of a file in this state."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _GgufReader(data).head(gguf_package())


class _GgufReader:
    """Reads a file sequentially. Raises ValueError or struct.error if the file is inconsistent."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 8
        orders = [order for order in "<>" if unpack_from(f"{order}I", data, 4)[0] in _VERSIONS]
        if data[:4] != b"GGUF" or not orders:
            raise ValueError("not a GGUF file of a known version")
        self._order = orders[0]

    def head(self, gguf: Any) -> GgufHead:
        """The whole header."""
        tensors, keys = self._numbers("Q", 2)
        metadata = {self._strings(1)[0]: self._value(self._number("I")) for _ in range(keys)}
        named = {self._strings(1)[0]: self._tensor() for _ in range(tensors)}
        step = int(metadata.get("general.alignment", 32))
        begin = -(-self._at // step) * step
        stored = {name: one._replace(start=begin + one.start) for name, one in named.items()}
        names = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
        for shape, kind, start in stored.values():
            block, size = gguf.GGML_QUANT_SIZES[kind] if kind in names else (1, 0)
            if size and start + math.prod(shape) // block * size > len(self._data):
                raise ValueError("a tensor lies beyond the end")
        matrices = {tensor.kind for tensor in stored.values() if len(tensor.shape) > 1}
        return GgufHead(metadata, stored, frozenset(names.get(kind, str(kind)) for kind in matrices))

    def _tensor(self) -> StoredTensor:
        """The next tensor; ``start`` counts from the beginning of the data."""
        sizes = self._numbers("Q", self._number("I"))  # the row length comes first
        return StoredTensor(sizes[::-1], self._number("I"), self._number("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind != _ARRAY:
            return self._number(_NUMBERS.get(kind, "no such type"))
        kind, count = self._number("I"), self._number("Q")
        if kind in _NUMBERS:
            return list(self._numbers(_NUMBERS[kind], count))
        return self._strings(count) if kind == _STRING else [self._value(kind) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        data, begin, at, end = self._data, self._at, self._at, len(self._data)
        for order, raw, strings in _long_arrays if count >= _LONG else ():
            if (order, len(strings)) == (self._order, count) and data[at : at + len(raw)] == raw:
                self._at += len(raw)
                return strings
        found, length = [], Struct(f"{self._order}Q").unpack_from
        for _ in range(count):
            first = at + 8
            at = first + int(length(data, at)[0])
            if at > end:
                raise ValueError("a string goes beyond the end")
            found.append(data[first:at].decode())
        self._at = at
        if count >= _LONG:
            _long_arrays.append((self._order, data[begin:at], found))
        return found

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        kind = Struct(f"{self._order}{count}{code}")
        values = kind.unpack_from(self._data, self._at)
        self._at += kind.size
        return values
