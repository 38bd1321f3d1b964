"""The tensors of a GGUF file, and where a transformers model has them."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sprinter.errors import UserError
from sprinter.models.gguf.config import Family
from sprinter.models.gguf.header import GgufHead, gguf_head
from sprinter.models.gguf.load import content_fingerprint
from sprinter.models.gguf.packed import SourceFile
from sprinter.models.kernels import GGUF, kernels

__all__ = ["HEAD", "Places", "Tensors"]

_PART, _WIDTH = 1 << 20, 1 << 12
"""Numbers that a thread dequantises at a time, and in a row: the package gguf works on 16 rows at a time, which may be
short in a model."""
_INPUT, HEAD = "token_embd.weight", "lm_head"
_ENDIAN = {"little": b"\x03\x00\x00\x00", "big": b"\x00\x00\x00\x03"}


class Tensors:
    """Reads the tensors of a file, ``source``. ``seen`` holds the names of those that were read.

    Args:
        head: the file's header, as ``gguf_head`` gives it.

    Raises:
        UserError: the file is another than the one with this header.
    """

    def __init__(self, gguf: Any, head: GgufHead, path: Path) -> None:
        self._gguf, self._head = gguf, head
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            self._data = np.memmap(file, np.uint8, "r")
        self.source = SourceFile(path, state.st_size, state.st_mtime_ns)
        if gguf_head(path).tensors != head.tensors:
            raise UserError(f"{path} changed while it was read: load it again")
        self.source.check()
        self.seen: set[str] = set()
        self._swapped = bytes(self._data[4:8]) == _ENDIAN["big" if sys.byteorder == "little" else "little"]

    def fingerprint(self) -> str:
        """``content_fingerprint`` of the file that is open."""
        return content_fingerprint(self._data)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor in ``dtype``, dequantised in parts.

        Raises:
            ValueError, NotImplementedError: it cannot be read.
        """
        kind, shape, stored = self._stored(name)
        (blocks, block_bytes), block = stored.shape, self._gguf.GGML_QUANT_SIZES[kind][0]
        values = torch.empty(shape, dtype=dtype)
        numbers = values.view(-1)

        def convert(at: int) -> None:
            part = np.array(stored[at : at + _PART // block])
            wide = (
                part.reshape(-1, _WIDTH // block * block_bytes) if len(part) * block % _WIDTH == 0 else part
            )
            plain = np.asarray(self._gguf.dequantize(wide, kind), np.float32)
            numbers[at * block : at * block + plain.size] = torch.from_numpy(plain).view(-1)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # NumPy works without the lock
            list(pool.map(convert, range(0, blocks, _PART // block)))
        return values

    def matrix(self, name: str, shape: tuple[int, int], order: NDArray[np.int64], dtype: str) -> Any:
        """These rows of a matrix, in this order, as a ``Source`` of our kernels.

        Args:
            shape: of the matrix, all its rows. dtype: "gguf": its blocks stay as they are stored.

        Raises:
            ValueError: it cannot be read, has another shape, or is to stay in blocks of another kind.
        """
        kind, found, stored = self._stored(name)
        if list(found) != list(shape):
            raise ValueError(f"its tensor {name} has shape {list(found)}, wanted {list(shape)}")
        if dtype == GGUF and kind.name not in kernels().FORMATS:
            raise ValueError(
                f"its tensor {name} is stored as {kind.name}, not in 4 to 8 bits: use dtype=int8"
            )
        rows = stored.reshape(shape[0], -1)

        def read(some: slice) -> Tensor:  # whole rows: the package gguf loops over some of them at a time
            plain = np.asarray(self._gguf.dequantize(rows[order[some]], kind), np.float32)
            return torch.from_numpy(plain.reshape(-1, shape[1]))

        tensor = self._head.tensors[name]
        key = f"{name} {tensor.kind} {tensor.start} {hashlib.sha256(order.tobytes()).hexdigest()}"
        return kernels().Source(key, len(order), shape[1], read, kind.name, lambda: (rows, order))

    def _stored(self, name: str) -> tuple[Any, Sequence[int], NDArray[np.uint8]]:
        """A tensor's kind, shape, and blocks ``[blocks, bytes]``.

        Raises:
            ValueError: it cannot be read.
        """
        if name not in self._head.tensors:
            raise ValueError(f"it lacks the tensor {name}")
        if self._swapped:
            raise ValueError("it is for machines with another byte order")
        self.seen.add(name)
        tensor = self._head.tensors[name]
        kind = self._gguf.GGMLQuantizationType(tensor.kind)  # raises ValueError: unknown
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        blocks = math.prod(tensor.shape) // block
        stored = self._data[tensor.start : tensor.start + blocks * size]
        return kind, tensor.shape, stored.reshape(blocks, size)


class Places:
    """Which tensors of a file hold a weight of the transformers model.

    Attributes:
        config: the model's. skeleton: the model without numbers.
        nextn: number of the file's last blocks that are modules of multi-token prediction.
        in_float32: parts of names of weights that the model keeps in float32.
    """

    def __init__(self, gguf: Any, config: PreTrainedConfig, family: Family, head: GgufHead) -> None:
        self.config, self._family, self._head = config, family, head
        with torch.device("meta"):
            self.skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        kinds = gguf.MODEL_ARCH_NAMES.items()
        architecture = next(kind for kind, name in kinds if name == family.architecture)
        self.in_float32 = tuple(self.skeleton._keep_in_fp32_modules_strict or ())
        self.nextn = int(getattr(config, "num_mtp_layers", 0))
        self._names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers + self.nextn)

    @property
    def wanted(self) -> dict[str, Tensor]:
        """The weights of the skeleton by name, tied embeddings once."""
        kept = self.skeleton.state_dict().keys()
        buffers = {name: values for name, values in self.skeleton.named_buffers() if name in kept}
        return {**dict(self.skeleton.named_parameters()), **buffers}

    def in_nextn(self, stored: str) -> bool:
        """Whether a tensor belongs to a module of multi-token prediction."""
        first, block = self.config.num_hidden_layers, stored.split(".")[1:2]
        return stored.startswith("blk.") and first <= int(block[0]) < first + self.nextn

    def parts(self, name: str) -> list[str]:
        """The names of the tensors whose rows make up a weight, for each expert if it has several.

        Raises:
            ValueError: there is none.
        """
        if not name.endswith("experts.gate_up_proj"):
            return [self.stored(name)]
        return [self.stored(name.replace("gate_up_proj", part)) for part in ("gate_proj", "up_proj")]

    def stored(self, name: str) -> str:
        """The tensor's name. Tied, the output layer's weight is the input embedding's.

        Raises:
            ValueError: there is none.
        """
        if name == f"{HEAD}.weight" and self.config.tie_word_embeddings:
            return _INPUT
        known = name.replace("e_score_correction_bias", "e_score_correction.bias")
        found = self._names.get_name(known, try_suffixes=(".weight", ".bias"))
        if found is not None and ".experts." in name:
            found += ".weight"
        if found is None:
            raise ValueError(f"the package gguf has no name for its weight {name}")
        return str(found)

    def offset(self, name: str) -> float:
        """What the file adds to a weight."""
        return self._family.norm_offset if name.endswith("norm.weight") else 0.0

    def in_order(self, name: str, rows: Tensor) -> Tensor:
        """The rows of a weight in the order that transformers wants."""
        if self._family.paired and (".q_proj." in name or ".k_proj." in name):
            return _in_halves(rows, self.config.head_dim)
        return rows


def _in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Permute the rows of each head from (first, second), (first, second), ... to (first halves, second halves)."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    halves: Tensor = pairs.transpose(1, 2).reshape(rows.shape)
    return halves
