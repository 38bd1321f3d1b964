"""``dtype="int8"`` on a GPU: linear layers whose weights are whole numbers of 8 bits, with a factor for each output.

Nothing is calibrated. Short passes, captured as CUDA graphs, read the 8 bits alone (``models.quantised.fused``); in
long ones PyTorch multiplies by the numbers in the dtype of the states, where they are exact: both compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.fingerprint import count_as, weights_fingerprint
from sprinter.models.quantised.layers import RoundedLinear, plain_matrix
from sprinter.models.quantised.unchanged import hooks_of

__all__ = ["round_linears"]

_TRIED = 8  # tokens of a trial pass


def round_linears(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model, in place; the input embedding, norms and biases stay as they are,
    and so do layers with hooks or a ``forward`` of their own, which others in their place would not run.

    The model keeps its fingerprint, so that gates and heads for it load.

    Raises:
        UserError: weights that are not finite, or a model that does not run with such layers.
    """
    name, fingerprint = model.name_or_path or type(model).__name__, weights_fingerprint(model)
    found: dict[nn.Module, list[str]] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        if plain_matrix(part) is not None and not hooks_of(part) and "forward" not in vars(part):
            found.setdefault(part, []).append(path)
    for part, paths in found.items():
        weight: Any = plain_matrix(part)
        try:
            rounded = RoundedLinear.of(weight, part.bias)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"{name} cannot be quantised: in {paths[0]}, {error}: use bfloat16") from error
        for path in paths:
            model.set_submodule(path, rounded)
        del weight
        part._parameters.clear()  # its memory is free for the next, unless the embedding shares it
    model.requires_grad_(False)
    ids = (
        torch.arange(_TRIED, device=model.device)[None]
        % model.config.get_text_config(decoder=True).vocab_size
    )
    try:
        with torch.inference_mode():
            made = model(ids).logits
    except Exception as error:  # models' own code may read what is gone
        raise UserError(
            f"{name} does not run with layers of 8 bits ({type(error).__name__}: {error}): use bfloat16"
        ) from error
    if not bool(torch.isfinite(made).all()):
        raise UserError(f"{name} gives no numbers with layers of 8 bits: use bfloat16")
    count_as(model, fingerprint)
