"""New values for the weights of a loaded model, in place: a state dict, or the folder of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sprinter.errors import UserError
from sprinter.models.kernels import is_quantised
from sprinter.models.pair import LoadedModel

__all__ = ["Weights", "write_weights"]

Weights = Mapping[str, Tensor] | str | Path
"""A state dict as ``model.state_dict()`` gives it, or a folder with the safetensors files of ``save_pretrained``."""


@torch.no_grad()
def write_weights(loaded: LoadedModel, weights: Weights) -> None:
    """Write values into a model's own tensors, in their dtype and on their device; of tied ones one name is enough.

    Nothing is written unless all of it fits.

    Raises:
        UserError: another model's names or shapes, weights that are missing, a model whose weights are quantised or
            that transformers does not run, a folder that cannot be read.
    """
    module = loaded.module("new weights")
    if loaded.adapter is not None:
        raise UserError(
            f"{loaded.id} has an adapter, and shares weights with the pair it was made from: reload that one, then "
            "make this one anew with with_lora"
        )
    if loaded.quantised is not None or is_quantised(module):
        raise UserError(
            f"{loaded.id} has quantised weights, which new ones cannot replace: load it with dtype=float32 or bfloat16"
        )
    own = module.state_dict()
    given = _read(Path(weights)) if isinstance(weights, str | Path) else weights
    where = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in own.items()}  # the same: tied
    known = {where[name]: value for name, value in given.items() if name in own}
    wrong = [f"has no {name}" for name in given if name not in own]
    wrong += [f"needs {name} too" for name in own if where[name] not in known]
    wrong += [
        f"has {name} of shape {tuple(own[name].shape)}, not {tuple(value.shape)}"
        for name, value in given.items()
        if name in own and own[name].shape != value.shape
    ]
    if not wrong:
        wrong = [
            f"shares {name} with another weight, and these differ"
            for name, value in given.items()
            if value is not known[where[name]] and not torch.equal(value, known[where[name]])
        ]
    if wrong:
        raise UserError(
            f"these weights are not for {loaded.id}, which {wrong[0]}: give the state dict of the same architecture "
            "(adapters merged, no wrapper's prefixes)"
        )
    for name, tensor in own.items():
        tensor.copy_(known[where[name]])


def _read(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder} has no safetensors files: give the folder of save_pretrained, or a state dict"
        )
    try:
        return {name: value for file in files for name, value in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"the weights in {folder} cannot be read ({error}): save them again") from None
