"""Quantises a loaded model in place: ``dtype="int8"``, ``"int4"``, and ``"gguf"`` for weights as a file stores them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter_kernels import layers as layers_module
from sprinter_kernels import layout
from sprinter_kernels.layers import (
    Matrix,
    QuantisedEmbedding,
    QuantisedLinear,
    RoundedLinear,
    Source,
    parameter_count,
    plain_matrix,
)  # fmt: skip
from sprinter_kernels.native import LAYOUT, native
from sprinter_kernels.unchanged import hooks_of

__all__ = ["SCALE", "Keep", "is_plain", "quantise", "quantise_linears", "replaceable", "round_linears"]

_BITS: Mapping[str, int | None] = {"int8": 8, "int4": 4, "gguf": None}
"""Names of dtypes -> bits of a weight; None: as it is stored."""
_LEAST_SHARE = 0.5  # of the parameters in linear layers and the input embedding
SCALE = "scalar_embed_scale"
"""Attribute of an embedding whose rows are all multiplied by a number, as in Gemma 3."""
Keep = Callable[[Sequence[str], Sequence[int], Callable[[int, Tensor], object]], Sequence[Tensor] | None]
"""Of the facts that packed matrices depend on, their sizes, and what packs one into memory of its size: the matrices,
kept from an earlier load or packed now; None: they are not kept."""


def quantise(
    model: PreTrainedModel, dtype: str, sources: Mapping[str, Source] | None = None, keep: Keep | None = None
) -> None:
    """Replace the linear layers and the input embedding of a model on a CPU, in place; what is left is in float32.

    With "int4" the input embedding and the output layer have 8 bits. The weights that it had are freed one by one.

    Args:
        dtype: "int8", "int4", or "gguf", of ``sources`` in blocks.
        sources: the matrices of all layers of ``replaceable``, by path; None: those of the model.
        keep: where packed matrices are kept.

    Raises:
        ValueError: the model is not on the CPU, or its weights are mostly not in linear layers or not finite.
    """
    name = model.name_or_path or type(model).__name__
    if model.device.type != "cpu":
        raise ValueError(f"dtype {dtype} is for CPUs, and {name} is on {model.device}: use bfloat16")
    native()
    size = parameter_count(model)
    layers = replaceable(model)
    share = sum({id(one.weight): one.weight.numel() for one in layers.values()}.values()) / size
    if share < _LEAST_SHARE:
        raise ValueError(
            f"dtype {dtype} is for models whose weights are in linear layers, and {share:.0%} of those of {name} are: "
            "use bfloat16"
        )
    model.float()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)  # what is left of it, norms for example, cannot be trained either
    found = {path: _source(layer) for path, layer in layers.items()} if sources is None else sources
    sharing: dict[str, list[str]] = {}  # layers whose weights are one
    for path in layers:
        sharing.setdefault(found[path].key, []).append(path)
    ends, wanted = _ends_of(model), list[tuple[Matrix, list[str]]]()
    for paths in sharing.values():
        bits = _BITS[dtype]
        if bits and any(id(layers[path]) in ends for path in paths):
            bits = 8
        wanted.append((Matrix(found[paths[0]], bits), paths))
    code = [Path(str(one.__file__)).read_bytes() for one in (layers_module, layout)]
    facts = [
        str(LAYOUT),
        *(hashlib.sha256(one).hexdigest() for one in code),
        *(one.facts for one, _ in wanted),
    ]

    def packed(i: int, made: Tensor | None = None) -> Tensor:
        matrix, paths = wanted[i]
        try:
            return matrix.pack(made)
        except ValueError as error:
            raise ValueError(f"{name} cannot be quantised: in {paths[0]}, {error}: use bfloat16") from error

    kept = None if keep is None else keep(facts, [one.size for one, _ in wanted], packed)
    for i, (matrix, paths) in enumerate(wanted):
        matrix.keep(packed(i) if kept is None else kept[i])
        made: dict[nn.Module, nn.Module] = {}  # a layer that stands in two places stays one
        for path in paths:
            layer = layers[path]
            if layer not in made:
                table = isinstance(layer, nn.Embedding)
                made[layer] = (
                    QuantisedEmbedding(matrix, getattr(layer, SCALE, 1.0)) if table
                    else QuantisedLinear(matrix, layer.bias)
                )  # fmt: skip
                layer.weight = None  # its memory is free for the next
            model.set_submodule(path, made[layer])


def quantise_linears(module: nn.Module) -> None:
    """Replace the linear layers of a module on a CPU by ones of 8 bits, in place; it need not be a model.

    Raises:
        ValueError: weights that are not finite.
    """
    made: list[tuple[nn.Module, str, QuantisedLinear]] = []
    for parent in module.modules():
        for name, layer in parent.named_children():
            if plain_matrix(layer) is not None:
                try:
                    matrix = Matrix(_source(layer), 8).keep()
                except ValueError as error:
                    raise ValueError(
                        f"layer {name} of {type(module).__name__} cannot be quantised: {error}"
                    ) from error
                made.append((parent, name, QuantisedLinear(matrix, layer.bias)))  # type: ignore[arg-type]
    for parent, name, quantised in made:  # all or none
        setattr(parent, name, quantised)


def round_linears(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model on a GPU by ones of 8 bits with a factor for each output, in place.

    The input embedding, norms and biases stay as they are, and so do layers with hooks or a ``forward`` of their own,
    which others in their place would not run. Nothing is calibrated. Short passes, captured as CUDA graphs, read the 8
    bits alone (``fused``); in long ones PyTorch multiplies by the numbers in the dtype of the states, where they are
    exact: both compute the same.

    Raises:
        ValueError: weights that are not finite.
    """
    name = model.name_or_path or type(model).__name__
    found: dict[nn.Module, list[str]] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        if plain_matrix(part) is not None and not hooks_of(part) and "forward" not in vars(part):
            found.setdefault(part, []).append(path)
    for part, paths in found.items():
        weight: Any = plain_matrix(part)
        try:
            rounded = RoundedLinear.of(weight, part.bias)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{name} cannot be quantised: in {paths[0]}, {error}: use bfloat16") from error
        for path in paths:
            model.set_submodule(path, rounded)
        del weight
        part._parameters.clear()  # its memory is free for the next, unless the embedding shares it
    model.requires_grad_(False)


def replaceable(model: PreTrainedModel) -> dict[str, Any]:
    """The linear layers (``Conv1D`` too) and the input embedding, by path; a layer in two places twice.

    Those with hooks or a ``forward`` of their own stay: others in their place would run neither.
    """
    embedding = model.get_input_embeddings()
    found = model.named_modules(remove_duplicate=False)
    return {
        path: part
        for path, part in found
        if (plain_matrix(part) is not None or (part is embedding and is_plain(part)))
        and not hooks_of(part) and "forward" not in vars(part)
    }  # fmt: skip


def _ends_of(model: PreTrainedModel) -> set[int]:
    """Ids of the modules that embed tokens and of those of the output layer, which may be cut (``CutHead``)."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    return {id(part) for end in ends if end is not None for part in end.modules()}


def is_plain(embedding: nn.Module) -> bool:
    """Whether it is a table of rows, which may all be multiplied by a number, as in Gemma."""
    own = type(embedding)
    return own is nn.Embedding or (isinstance(embedding, nn.Embedding) and hasattr(embedding, SCALE))


def _source(layer: Any) -> Source:
    """The weights of a layer, as long as it has them."""

    def weight() -> Tensor:
        own = plain_matrix(layer)
        return layer.weight if own is None else own

    high, width = weight().shape
    return Source(str(id(layer.weight)), high, width, lambda some: weight()[some])
