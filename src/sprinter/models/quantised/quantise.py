"""Quantises a loaded model in place: ``dtype="int8"`` and ``"int4"``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from sprinter.errors import UserError
from sprinter.fingerprint import count_as, weights_fingerprint
from sprinter.models.cache_name import with_cache
from sprinter.models.quantised.attention import attend_in_order
from sprinter.models.quantised.families import TYPES
from sprinter.models.quantised.fused_layers import is_joined, join_layers
from sprinter.models.quantised.layers import (
    ROWS,
    Matrix,
    QuantisedEmbedding,
    QuantisedLinear,
    parameter_count,
    plain_matrix,
)
from sprinter.models.quantised.layout import GROUP, Codes, eight_bits, four_bits, joined
from sprinter.models.quantised.library import kernel
from sprinter.models.quantised.unchanged import changed_layer, hooks_of
from sprinter.models.runners.row_cache import RowCache

__all__ = [
    "BITS",
    "GGUF",
    "ROUND",
    "SCALE",
    "ends_of",
    "is_plain",
    "join_quantised",
    "padded",
    "put_matrices",
    "quantise",
    "quantise_linears",
    "replaceable",
    "try_joined",
]

BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Names of dtypes -> bits of a weight."""
GGUF = "gguf"
"""The dtype of the weights of a GGUF file as they are stored."""
ROUND: Mapping[int, Callable[..., Codes]] = {8: eight_bits, 4: four_bits}
"""Bits of a weight -> what rounds a matrix to them."""
_log = logging.getLogger("sprinter")
_LEAST_SHARE = 0.5  # of the parameters in linear layers and the input embedding
SCALE = "scalar_embed_scale"
"""Attribute of an embedding whose rows are all multiplied by a number, as in Gemma 3."""
_TRIED = 12  # tokens of a trial pass
_FAR = 0.1
"""Largest distance of logits that come from the order of sums alone, which moves rounded activations."""


def quantise(model: PreTrainedModel, dtype: str) -> None:
    """Replace the linear layers and the input embedding of a model on a CPU, in place; what is left is in float32.

    With "int4" the input embedding and the output layer have 8 bits. The model keeps its fingerprint, so that gates and
    heads for it load. The weights that it had are freed one by one.

    Raises:
        UserError: the kernel cannot be compiled or its products are wrong, the model is not on the CPU, its weights are
            mostly not in linear layers, or it does not run with them replaced.
    """
    name = model.name_or_path or type(model).__name__
    if model.device.type != "cpu":
        raise UserError(f"dtype {dtype} is for CPUs, and {name} is on {model.device}: use bfloat16")
    kernel()
    fingerprint, size = weights_fingerprint(model), parameter_count(model)
    layers = replaceable(model)
    share = sum({id(one.weight): one.weight.numel() for one in layers.values()}.values()) / size
    if share < _LEAST_SHARE:
        raise UserError(
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
            raise UserError(f"{name} cannot be quantised: in {paths[0]}, {error}: use bfloat16") from error
        for path in paths:
            layers[path].weight = None
            matrices[path] = matrix
        del weight  # its memory is free for the next
    put_matrices(model, matrices)
    count_as(model, fingerprint)


def quantise_linears(module: nn.Module) -> None:
    """Replace the linear layers of a module on a CPU by ones of 8 bits, in place; it need not be a model.

    Raises:
        UserError: weights that are not finite; as ``kernel``.
    """
    made: list[tuple[nn.Module, str, QuantisedLinear]] = []
    for parent in module.modules():
        for name, layer in parent.named_children():
            if (weight := plain_matrix(layer)) is not None:
                try:
                    matrix = _matrix(weight, ROUND[8])
                except ValueError as error:
                    raise UserError(
                        f"layer {name} of {type(module).__name__} cannot be quantised: {error}"
                    ) from error
                made.append((parent, name, QuantisedLinear(matrix, layer.bias)))  # type: ignore[arg-type]
    for parent, name, quantised in made:  # all or none
        setattr(parent, name, quantised)


def put_matrices(model: PreTrainedModel, matrices: Mapping[str, Matrix]) -> None:
    """Replace the layers at these paths by quantised ones, and try whether the model runs.

    Raises:
        UserError: it does not, because its code reads the weights of a layer, for example.
    """
    attend_in_order(model)
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
    join_quantised(model)


def join_quantised(model: PreTrainedModel) -> None:
    """Join the quantised layers of a model that are what their classes make; a warning names one that is not.

    Raises:
        UserError: the model does not run, or computes something else.
    """
    try_joined(model, lambda: join_layers(model), "quantised", "bfloat16", _FAR)
    why, known = changed_layer(model), model.config.get_text_config(decoder=True).model_type in TYPES
    if why is not None or (known and not is_joined(model)):
        _log.warning(
            "the kernels do not run whole layers of %s, which is slower: %s",
            model.name_or_path or type(model).__name__,
            why or "their shapes are others than they know",
        )


def try_joined(model: PreTrainedModel, join: Callable[[], int], kind: str, instead: str, far: float) -> None:
    """Join a model's layers by ``join``, which returns their number, and compare passes with those before.

    Args:
        kind: of the layers. instead: what to use where they fail; both for messages.
        far: largest distance of the logits from those before, relative to these.

    Raises:
        UserError: the model does not run, or computes something else.
    """
    ids = torch.arange(_TRIED)[None] % model.config.get_text_config(decoder=True).vocab_size
    name = model.name_or_path or type(model).__name__
    try:
        with torch.inference_mode():
            one_by_one = model(ids).logits.float()
            known = join()
            whole = model(ids, use_cache=known > 0)
            parts = [whole.logits]
            if known:
                given = with_cache(model, DynamicCache(config=model.config))
                halves = torch.split(ids, _TRIED // 2, 1)
                parts = [model(half, use_cache=True, **given).logits for half in halves]
                over_rows = _over_rows(model, ids)
    except Exception as error:  # models' own code may read the weights that are gone
        raise UserError(
            f"{name} does not run with {kind} layers ({type(error).__name__}: {error}): use {instead}"
        ) from error
    if not known or not torch.isfinite(one_by_one).all():
        return
    if not bool((whole.logits - one_by_one).norm() <= far * one_by_one.norm()):
        raise UserError(f"the joined layers of {name} differ from its own: use {instead}")
    if not all(torch.equal(one, whole.logits) for one in (torch.cat(parts, 1), over_rows)):
        raise UserError(f"tokens of {name} differ between forward passes: use {instead}")


def _over_rows(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of several passes over the row runner's cache, where layers run in one call."""
    cache, made = RowCache(_TRIED, torch.zeros(1, 1, dtype=torch.int64)), []
    for part in torch.split(ids, _TRIED // 3, 1):
        cache.span.start, cache.span.keys = cache.span.keys, cache.span.keys + part.shape[1]
        made.append(model(part, use_cache=True, **with_cache(model, cache)).logits)
    return torch.cat(made, 1)


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
