"""A GGUF file as a transformers model: PyTorch runs the weights that llama.cpp serves.

Each weight becomes the number that llama.cpp multiplies with, rounded to the wanted dtype. The arithmetic differs: on a
CPU, llama.cpp rounds activations to eight bits before it multiplies them with quantised weights.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sprinter.errors import UserError
from sprinter.fingerprint import count_as
from sprinter.models.capture.marks import hash_file
from sprinter.models.cut import cut_output
from sprinter.models.gguf.config import Family, family_of, model_config, not_here
from sprinter.models.gguf.library import gguf_package, last_words, library, loading
from sprinter.models.gguf.load import EOS_KEY, FINGERPRINT_KEY, file_fingerprint
from sprinter.models.gguf.output_head import GgufHead, gguf_head
from sprinter.models.quantised.layers import Matrix
from sprinter.models.quantised.layout import FORMATS, Format
from sprinter.models.quantised.library import kernel
from sprinter.models.quantised.packed import packed_matrices
from sprinter.models.quantised.quantise import put_matrices, replaceable

__all__ = ["Dequantised", "dequantised"]

_PART, _WIDTH = 1 << 20, 1 << 12
"""Numbers that a thread dequantises at a time, and in a row: the package gguf works on 16 rows at a time, which may be
short in a model."""
_ROPE, _INPUT, _HEAD = "rope_freqs.weight", "token_embd.weight", "lm_head.weight"
_ends: dict[str, tuple[int, ...]] = {}
"""Hash of a vocabulary, which the files of a pair share as a rule -> the EOS ids that llama.cpp names."""
_ENDIAN = {"little": b"\x03\x00\x00\x00", "big": b"\x00\x00\x00\x03"}


@dataclass(frozen=True, slots=True)
class Dequantised:
    """A model whose weights come from a GGUF file.

    Attributes:
        model: the model, on the CPU.
        stored: storage type of the file's weights, e.g. "F16", "Q4_K_M".
        eos_ids: token ids that end a text, as ``GgufModel`` has them.
    """

    model: PreTrainedModel
    stored: str
    eos_ids: tuple[int, ...]


def dequantised(
    path: Path,
    dtype: torch.dtype | str,
    keep: bool = False,
    cut: Callable[[int, tuple[int, ...]], Tensor] | None = None,
    **options: Any,
) -> Dequantised:
    """Read a GGUF file into a transformers model.

    Takes the memory of the model in ``dtype``, and a few MB for what is being read. The model has the
    fingerprint of ``GgufModel``, so that heads fit both.

    Args:
        path: an existing file.
        dtype: of the weights; "auto": float32 if the file holds float32, else bfloat16.
        keep: keep matrices of 4 to 8 bits as they are stored (see ``models.quantised``); all else is in float32.
        cut: of the vocabulary's size and the tokens that end a text, the tokens that the output layer is to know;
            None: all.
        options: passed to transformers (attn_implementation).

    Raises:
        UserError: the file is damaged, or PyTorch cannot run its architecture or what its metadata says.
    """
    gguf, head = gguf_package(), gguf_head(path)
    family = family_of(head, path.name)
    eos_ids = _eos_ids(path, head)
    if keep:
        dtype = torch.float32
    elif not isinstance(dtype, torch.dtype):
        dtype = torch.float32 if head.types == {"F32"} else torch.bfloat16
    tensors = _Tensors(gguf, head, path)
    try:
        factors = tensors.read(_ROPE, torch.float32) if _ROPE in head.tensors else None
        config = model_config(head, eos_ids, factors)
        place = _Places(gguf, config, family, head)
        kept = _matrices(place, tensors, path) if keep else {}
        ids = None if cut is None else cut(config.vocab_size, eos_ids)
        known = None if ids is None or not keep else _known_words(place, tensors, ids)
        weights = dict(_weights(place, tensors, dtype, kept))
        if unread := head.tensors.keys() - tensors.seen:
            raise ValueError(f"its tensor {min(unread)} has no place in a {family.model_type} model")
    except UserError:  # of the cut: a line of its own
        raise
    except (ValueError, NotImplementedError) as error:
        raise not_here(path.name, error) from error
    model = _model(config, weights, dtype, options)
    if ids is not None:
        words = cut_output(model, ids)
        if known is not None:
            kept = {name: matrix for name, matrix in kept.items() if f"{name}.weight" != _HEAD} | {
                words: known
            }
    if kept:
        put_matrices(model, kept)
    model.name_or_path = str(path)
    count_as(model, head.metadata.get(FINGERPRINT_KEY) or file_fingerprint(path))
    return Dequantised(model, _stored(gguf, head), eos_ids)


class _Tensors:
    """Reads the tensors of a file. ``seen`` holds the names of those that were read."""

    def __init__(self, gguf: Any, head: GgufHead, path: Path) -> None:
        self._gguf, self._head = gguf, head
        self._data = np.memmap(path, np.uint8, "r")
        self.seen: set[str] = set()
        self._swapped = bytes(self._data[4:8]) == _ENDIAN["big" if sys.byteorder == "little" else "little"]

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

    def blocks(self, name: str, high: int, width: int) -> tuple[Format, NDArray[np.uint8]]:
        """A matrix ``[high, width]`` as it is stored: its kind and ``[high, bytes]``.

        Raises:
            ValueError: it cannot be read, or it is stored in another way.
        """
        kind, shape, stored = self._stored(name)
        if kind.name not in FORMATS:
            raise ValueError(
                f"its tensor {name} is stored as {kind.name}, not in 4 to 8 bits: use dtype=int8"
            )
        if list(shape) != [high, width]:
            raise ValueError(f"its tensor {name} has shape {list(shape)}, wanted {[high, width]}")
        return FORMATS[kind.name], stored.reshape(high, -1)

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
        return (
            kind,
            tensor.shape,
            self._data[tensor.start : tensor.start + blocks * size].reshape(blocks, size),
        )


class _Places:
    """Which tensor of a file holds a weight of the transformers model.

    Attributes:
        config: the model's. skeleton: the model without numbers.
    """

    def __init__(self, gguf: Any, config: PreTrainedConfig, family: Family, head: GgufHead) -> None:
        self.config, self._family, self._head = config, family, head
        with torch.device("meta"):
            self.skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        kinds = gguf.MODEL_ARCH_NAMES.items()
        architecture = next(kind for kind, name in kinds if name == family.architecture)
        self._names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)

    def stored(self, name: str) -> str:
        """The tensor's name. Tied, the output layer's weight is the input embedding's.

        Raises:
            ValueError: there is none.
        """
        if name == _HEAD and self.config.tie_word_embeddings:
            return _INPUT
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
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


def _matrices(place: _Places, tensors: _Tensors, path: Path) -> dict[str, Matrix]:
    """The quantised matrices by the paths of their layers; tied ones are shared.

    Raises:
        ValueError: a layer's matrix is stored in another way.
    """
    layers = replaceable(place.skeleton)
    stored = {layer: place.stored(f"{layer}.weight") for layer in layers}
    first = {name: layer for layer, name in reversed(stored.items())}  # the layer that says how it is read
    shapes = {name: tuple(layers[layer].weight.shape) for name, layer in first.items()}
    blocks = {name: tensors.blocks(name, *shape) for name, shape in shapes.items()}

    def pack(name: str, made: Tensor | None = None) -> Tensor:
        form, rows = blocks[name]
        order = place.in_order(first[name] + ".", torch.arange(len(rows)))
        return kernel().pack_stored(rows, form, order.numpy(), made)

    names = [*blocks]
    packed = packed_matrices(
        path, f"{file_fingerprint(path)} {hash_file(Path(__file__))} {stored}",
        [kernel().size(blocks[name][0], *shapes[name]) for name in names],
        lambda i, room: pack(names[i], room),
    )  # fmt: skip
    made = {
        name: Matrix.of_packed(pack(name) if packed is None else packed[i], blocks[name][0], *shapes[name])
        for i, name in enumerate(names)
    }
    return {layer: made[name] for layer, name in stored.items()}


def _known_words(place: _Places, tensors: _Tensors, ids: Tensor) -> Matrix:
    """The rows of the output layer for these tokens."""
    config = place.config
    form, rows = tensors.blocks(place.stored(_HEAD), config.vocab_size, config.hidden_size)
    return Matrix.of_stored(rows, form, ids.numpy())


def _weights(
    place: _Places, tensors: _Tensors, dtype: torch.dtype, kept: Mapping[str, Matrix]
) -> Iterator[tuple[str, Tensor]]:
    """All weights under transformers' names, tied embeddings once. Those of layers in ``kept`` take no memory."""
    for name, wanted in place.skeleton.named_parameters():
        if name.removesuffix(".weight") in kept:
            yield name, torch.zeros((), dtype=dtype).expand(wanted.shape)
            continue
        stored, offset = place.stored(name), place.offset(name)
        values = tensors.read(stored, torch.float32 if offset else dtype)
        if values.shape != wanted.shape:
            raise ValueError(
                f"its tensor {stored} has shape {list(values.shape)}, wanted {list(wanted.shape)}"
            )
        values = place.in_order(name, values)
        yield name, (values - offset).to(dtype) if offset else values


def _in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Permute the rows of each head from (first, second), (first, second), ... to (first halves, second halves)."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    halves: Tensor = pairs.transpose(1, 2).reshape(rows.shape)
    return halves


def _model(
    config: PreTrainedConfig, weights: dict[str, Tensor], dtype: torch.dtype, options: dict[str, Any]
) -> PreTrainedModel:
    """The model over these weights, which are not copied."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, info = kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True, **options
    )
    wrong = {
        kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    assert not any(wrong.values()), wrong
    assert isinstance(model, PreTrainedModel)
    return model


def _stored(gguf: Any, head: GgufHead) -> str:
    """Storage type of a file's weights: the type of the whole file if it names one, else those of its matrices."""
    names = {int(kind): kind.name for kind in gguf.LlamaFileType}
    name = names.get(head.metadata.get("general.file_type", -1), ", ".join(sorted(head.types)))
    return str(name).removeprefix("MOSTLY_").removeprefix("ALL_")


def _eos_ids(path: Path, head: GgufHead) -> tuple[int, ...]:
    """The EOS ids that our converter recorded, else those that llama.cpp names, which knows them by their texts."""
    if recorded := head.metadata.get(EOS_KEY):
        return tuple(int(part) for part in recorded.split(","))
    facts = [
        (key, value)
        for key, value in sorted(head.metadata.items())
        if key == "general.architecture" or key.startswith("tokenizer.ggml.")  # no chat template
    ]
    vocabulary = hashlib.sha256(repr(facts).encode()).hexdigest()
    if vocabulary not in _ends:
        _ends[vocabulary] = _llama_eos_ids(path)
    return _ends[vocabulary]


def _llama_eos_ids(path: Path) -> tuple[int, ...]:
    """The EOS ids that llama.cpp names."""
    llama = library()
    last_words("")
    with loading(False, False) as params:
        params.vocab_only = True
        handle = llama.llama_model_load_from_file(str(path).encode(), params)
    if not handle:
        raise UserError(
            f"llama.cpp cannot read the tokens of {path}: {last_words('it does not say why')[:300]}"
        )
    try:
        vocab = llama.llama_model_get_vocab(handle)
        ends, count = llama.llama_vocab_is_eog, llama.llama_vocab_n_tokens(vocab)
        return tuple(i for i in range(count) if ends(vocab, i))
    finally:
        llama.llama_model_free(handle)
