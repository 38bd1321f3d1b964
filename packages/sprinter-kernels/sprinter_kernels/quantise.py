"""Quantises a loaded model in place: ``dtype="int8"`` and ``"int4"``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter_kernels.layers import (
    ROWS,
    Matrix,
    QuantisedEmbedding,
    QuantisedLinear,
    RoundedLinear,
    parameter_count,
    plain_matrix,
)  # fmt: skip
from sprinter_kernels.layout import GROUP, Codes, eight_bits, four_bits, joined
from sprinter_kernels.native import native
from sprinter_kernels.unchanged import hooks_of

__all__ = [
    "BITS", "ROUND", "SCALE", "ends_of", "is_plain", "padded", "put_matrices", "quantise", "quantise_linears",
    "replaceable", "round_linears",
]  # fmt: skip

BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Names of dtypes -> bits of a weight."""
ROUND: Mapping[int, Callable[..., Codes]] = {8: eight_bits, 4: four_bits}
"""Bits of a weight -> what rounds a matrix to them."""
_LEAST_SHARE = 0.5  # of the parameters in linear layers and the input embedding
SCALE = "scalar_embed_scale"
"""Attribute of an embedding whose rows are all multiplied by a number, as in Gemma 3."""


def quantise(model: PreTrainedModel, dtype: str) -> None:
    """Replace the linear layers and the input embedding of a model on a CPU, in place; what is left is in float32.

    With "int4" the input embedding and the output layer have 8 bits. The weights that it had are freed one by one.

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
    ends = ends_of(model)
    sharing: dict[int, list[str]] = {}  # layers whose weights are one
    for path, layer in layers.items():
        sharing.setdefault(id(layer.weight), []).append(path)
    matrices = {}
    for paths in sharing.values():
        weight = plain_matrix(layers[paths[0]])
        weight = layers[paths[0]].weight if weight is None else weight
        bits = 8 if any(id(layers[path]) in ends for path in paths) else BITS[dtype]
        try:
            matrix = _matrix(weight, ROUND[bits])
        except ValueError as error:
            raise ValueError(f"{name} cannot be quantised: in {paths[0]}, {error}: use bfloat16") from error
        for path in paths:
            layers[path].weight = None
            matrices[path] = matrix
        del weight  # its memory is free for the next
    put_matrices(model, matrices)


def quantise_linears(module: nn.Module) -> None:
    """Replace the linear layers of a module on a CPU by ones of 8 bits, in place; it need not be a model.

    Raises:
        ValueError: weights that are not finite.
    """
    made: list[tuple[nn.Module, str, QuantisedLinear]] = []
    for parent in module.modules():
        for name, layer in parent.named_children():
            if (weight := plain_matrix(layer)) is not None:
                try:
                    matrix = _matrix(weight, ROUND[8])
                except ValueError as error:
                    raise ValueError(
                        f"layer {name} of {type(module).__name__} cannot be quantised: {error}"
                    ) from error
                made.append((parent, name, QuantisedLinear(matrix, layer.bias)))  # type: ignore[arg-type]
    for parent, name, quantised in made:  # all or none
        setattr(parent, name, quantised)


def put_matrices(model: PreTrainedModel, matrices: Mapping[str, Matrix]) -> None:
    """Replace the layers at these paths by quantised ones."""
    model.requires_grad_(False)  # what is left of it, norms for example, cannot be trained either
    made: dict[nn.Module, nn.Module] = {}  # a layer that stands in two places stays one
    for path, matrix in matrices.items():
        layer = model.get_submodule(path)
        if layer not in made:
            if isinstance(layer, nn.Embedding):
                made[layer] = QuantisedEmbedding(matrix, getattr(layer, SCALE, 1.0))
            else:
                made[layer] = QuantisedLinear(matrix, layer.bias)  # type: ignore[arg-type]
            layer.weight = None  # type: ignore[assignment]
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, made[layer])


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


def ends_of(model: PreTrainedModel) -> set[int]:
    """Ids of the modules that embed tokens and of those of the output layer, which may be cut (``CutHead``)."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    return {id(part) for end in ends if end is not None for part in end.modules()}


def is_plain(embedding: nn.Module) -> bool:
    """Whether it is a table of rows, which may all be multiplied by a number, as in Gemma."""
    own = type(embedding)
    return own is nn.Embedding or (isinstance(embedding, nn.Embedding) and hasattr(embedding, SCALE))


def padded(width: int) -> int:
    """Columns of a matrix whose rows are whole groups."""
    return width + -width % GROUP


def _matrix(weight: Tensor, rounded: Callable[..., Codes]) -> Matrix:
    """A weight matrix rounded, a chunk of rows at a time to save memory."""
    with torch.no_grad():
        more = padded(weight.shape[1]) - weight.shape[1]
        parts = [
            rounded(nn.functional.pad(rows.float(), (0, more)).numpy())
            for rows in torch.split(weight.detach(), ROWS)
        ]
    return Matrix.of_codes(joined(parts), weight.shape[1])
