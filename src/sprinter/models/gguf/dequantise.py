"""A GGUF file as a transformers model: PyTorch runs the weights that llama.cpp serves.

Each weight becomes the number that llama.cpp multiplies with, rounded to the wanted dtype. The arithmetic differs: on a
CPU, llama.cpp rounds activations to eight bits before it multiplies them with quantised weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from sprinter.errors import UserError, first_line
from sprinter.fingerprint import count_as
from sprinter.models.cachedir import hash_file
from sprinter.models.gguf import tensors as tensors_module
from sprinter.models.gguf.config import family_of, model_config, not_here
from sprinter.models.gguf.header import GgufHead, gguf_head
from sprinter.models.gguf.library import gguf_package
from sprinter.models.gguf.load import EOS_KEY, FINGERPRINT_KEY
from sprinter.models.gguf.packed import packed_matrices
from sprinter.models.gguf.tensors import HEAD, Places, Tensors
from sprinter.models.kernels import kernels, knows, quantise
from sprinter.models.reduced_vocab import cut_output

__all__ = ["Dequantised", "dequantised", "nextn_weights", "why_not_as_stored"]

_ROPE = "rope_freqs.weight"
_NEXTN, _COPIES = ("enorm", "hnorm", "shared_head.norm"), ("embed_tokens", "shared_head.head")
_END_TEXTS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>",
        "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<|end_of_text|>", "<end_of_utterance>",
    }
)  # fmt: skip
_END_ROLES = {
    "eos": (), "eot": (), "eom": (), "fim_sep": ("<|file_sep|>",),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
}  # fmt: skip
"""Roles of tokens that end a text, as GGUF's keys name them -> their texts, where the file has no key."""


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
    quantised: str | None = None,
    cut: Callable[[int, tuple[int, ...]], Tensor] | None = None,
    **options: Any,
) -> Dequantised:
    """Read a GGUF file into a transformers model.

    Takes the memory of the model in ``dtype``, and a few MB for what is being read. The model has the
    fingerprint of ``GgufModel``, so that heads fit both.

    Args:
        path: an existing file.
        dtype: of the weights; "auto": float32 if the file holds float32, else bfloat16.
        quantised: "gguf": matrices of 4 to 8 bits stay as they are stored, "int8", "int4": they are rounded (see
            ``models.kernels``); all else is in float32.
        cut: of the vocabulary's size and the tokens that end a text, the tokens that the output layer is to know;
            None: all.
        options: passed to transformers (attn_implementation).

    Raises:
        UserError: the file is damaged, changes while it is read, or PyTorch cannot run its architecture or what its
            metadata says.
    """
    gguf, head = gguf_package(), gguf_head(path)
    family = family_of(head, path.name)
    eos_ids = _eos_ids(head)
    if quantised:
        dtype = torch.float32
    elif not isinstance(dtype, torch.dtype):
        dtype = torch.float32 if head.types == {"F32"} else torch.bfloat16
    tensors = Tensors(gguf, head, path)
    try:
        factors = tensors.read(_ROPE, torch.float32) if _ROPE in head.tensors else None
        config = model_config(head, eos_ids, factors)
        place = Places(gguf, config, family, head)
        ids = None if cut is None else cut(config.vocab_size, eos_ids)
        sources = _sources(place, tensors, ids, quantised) if quantised else {}
        weights = dict(_weights(place, tensors, dtype, place.wanted, sources))
        if unread := {name for name in head.tensors.keys() - tensors.seen if not place.in_nextn(name)}:
            raise ValueError(f"its tensor {min(unread)} has no place in a {family.model_type} model")
    except UserError:  # of the cut: a line of its own
        raise
    except (ValueError, NotImplementedError) as error:
        raise not_here(path.name, error) from error
    model = _model(config, weights, dtype, options)
    model.name_or_path = str(path)
    if ids is not None:
        words = cut_output(model, ids)
        if quantised:
            sources[words] = sources.pop(HEAD)
    if quantised:
        read = [tensors.fingerprint(), version("gguf"), hash_file(Path(tensors_module.__file__))]
        quantise(
            model, quantised, sources,
            lambda facts, sizes, pack: packed_matrices(tensors.source, quantised, [*read, *facts], sizes, pack),
        )  # fmt: skip
    count_as(model, head.metadata.get(FINGERPRINT_KEY) or tensors.fingerprint())
    tensors.source.check()
    return Dequantised(model, _stored(gguf, head), eos_ids)


def why_not_as_stored(path: Path) -> str | None:
    """Why our kernels cannot run this file's blocks as they are stored (``dtype="gguf"``); None: they can.

    The header decides, and whether the kernels are installed.
    """
    try:
        head = gguf_head(path)
        family = family_of(head, path.name)
        kernels()
        if not knows(family.model_type):
            return f"our kernels do not run the architecture {family.architecture}"
        if others := sorted(head.types - kernels().FORMATS.keys()):
            return (
                f"{path.name} holds matrices in {', '.join(others)}, which our kernels do not read as stored"
            )
        factors = (
            Tensors(gguf_package(), head, path).read(_ROPE, torch.float32) if _ROPE in head.tensors else None
        )
        model_config(head, (), factors)
    except (UserError, ValueError, NotImplementedError) as error:
        return first_line(error)
    return None


def nextn_weights(path: Path, config: PreTrainedConfig) -> dict[str, Tensor]:
    """The float32 weights of a file's first module of multi-token prediction, under the names that checkpoints have
    behind ``model.layers.N.``; empty: the file holds none. Copies of embeddings and output layer are left out.

    Args:
        path: a file that ``dequantised`` has read. config: of its model.

    Raises:
        UserError: the module is in a form that is not known.
    """
    gguf, head = gguf_package(), gguf_head(path)
    place = Places(gguf, config, family_of(head, path.name), head)
    last, number = (f"model.layers.{config.num_hidden_layers - i}." for i in (1, 0))
    if not place.nextn or place.stored(f"{number}eh_proj.weight") not in head.tensors:
        return {}
    size = config.hidden_size
    wanted = {f"{number}{name}.weight": torch.empty(size, device="meta") for name in _NEXTN}
    wanted[f"{number}eh_proj.weight"] = torch.empty(size, 2 * size, device="meta")
    for name, values in place.wanted.items():
        if name.startswith(last):
            wanted[name.replace(last, number)] = values
    tensors = Tensors(gguf, head, path)
    tensors.seen |= {place.stored(f"{number}{name}.weight") for name in _COPIES}
    try:
        weights = dict(_weights(place, tensors, torch.float32, wanted))
        block = f"blk.{config.num_hidden_layers}."
        if unread := {name for name in head.tensors.keys() - tensors.seen if name.startswith(block)}:
            raise ValueError(f"its tensor {min(unread)} is not known")
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"the heads of multi-token prediction in {path} cannot draft ({first_line(error)}); the target runs "
            "without them"
        ) from error
    tensors.source.check()
    return {name.removeprefix(number): values for name, values in weights.items()}


def _sources(place: Places, tensors: Tensors, ids: Tensor | None, dtype: str) -> dict[str, Any]:
    """The matrices that are to be quantised, by the paths of their layers; of the output layer the rows ``ids``."""
    found = {}
    for path, layer in kernels().replaceable(place.skeleton).items():
        order = place.in_order(f"{path}.", torch.arange(len(layer.weight)))
        order = ids if ids is not None and path == HEAD else order
        name = place.stored(f"{path}.weight")
        found[path] = tensors.matrix(name, tuple(layer.weight.shape), order.numpy(), dtype)
    return found


def _weights(
    place: Places,
    tensors: Tensors,
    dtype: torch.dtype,
    wanted_by_name: Mapping[str, Tensor],
    sources: Container[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Weights under transformers' names. Those of ``sources`` take no memory."""
    for name, wanted in wanted_by_name.items():
        if name.removesuffix(".weight") in sources:
            yield name, torch.zeros((), dtype=dtype).expand(wanted.shape)
            continue
        stored, offset = place.parts(name), place.offset(name)
        exact = bool(offset) or any(part in name for part in place.in_float32)
        read = [tensors.read(part, torch.float32 if exact else dtype) for part in stored]
        values = read[0] if len(read) == 1 else torch.cat(read, 1)
        if values.shape != wanted.shape:
            raise ValueError(
                f"its tensor {stored[0]} has shape {list(values.shape)}, wanted {list(wanted.shape)}"
            )
        values = place.in_order(name, values)
        yield name, (values - offset).to(dtype) if offset else values


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


def _eos_ids(head: GgufHead) -> tuple[int, ...]:
    """The EOS ids that our converter recorded, else by llama.cpp's rule those that the file names, and known texts."""
    if recorded := head.metadata.get(EOS_KEY):
        return tuple(int(part) for part in recorded.split(","))
    given = head.metadata.get
    tokens = given("tokenizer.ggml.tokens") or ()
    ids = {text: id for id, text in enumerate(tokens)}
    ends = {ids[text] for text in _END_TEXTS & ids.keys()}
    for role, texts in _END_ROLES.items():
        named = int(given(f"tokenizer.ggml.{role}_token_id", -1))
        known = 0 <= named < len(tokens)  # files write 2**32 - 1 for none
        ends |= {named} if known else {ids[text] for text in texts if text in ids}
    return tuple(sorted(ends))
