"""LoRA adapters of a loaded model, from PEFT's folders: a second model that shares all weights which do not change.

The product of an adapter's matrices is added to weights of floating-point numbers, of which the second model has a copy
of its own. Weights of 4 to 8 bits stay as they are, and the product is computed in each forward pass.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sprinter.errors import UserError, first_line
from sprinter.fingerprint import count_as, weights_fingerprint
from sprinter.models.interface import ServedModel
from sprinter.models.kernels import cache_dtype_of, compile_layers, is_quantised, renew, runs, set_cache_dtype
from sprinter.models.pair import LoadedModel
from sprinter.models.twin import twin

__all__ = ["LoraLinear", "adapted"]

_READ = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "peft_type", "peft_version", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Fields of a config that are read here, or that only training reads."""
_UNREAD = {"megatron_core": "megatron.core", "qalora_group_size": 16}
"""Defaults of fields that belong to others; all further fields are to be off."""
_INITS = (True, False, "gaussian", "orthogonal")
"""How matrices may have begun: others change the base."""
_KEY = re.compile(r"base_model\.model\.(.+)\.(?:lora_(A|B)(?:\.default)?|base_layer)\.weight")
_QUANTISED = ("QuantisedLinear", "RoundedLinear")


class _Product(NamedTuple):
    """What an adapter has of a layer: matrices ``[r, in]`` and ``[out, r]``, their factor, and the layer's weights."""

    down: Tensor
    up: Tensor
    scale: float
    base: Tensor | None


class LoraLinear(nn.Module):
    """A linear layer and a product of low rank beside it.

    Args:
        base: the layer. down: ``[r, in]``. up: ``[out, r]``, scaled.
    """

    def __init__(self, base: nn.Module, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.base, self.in_features, self.out_features = base, down.shape[1], up.shape[0]
        self.down, self.up = nn.Parameter(down, False), nn.Parameter(up, False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        made: Tensor = self.base(x)
        return made + (x.to(self.down.dtype) @ self.down.T @ self.up.T).to(made.dtype)


@torch.inference_mode(False)
@torch.no_grad()
def adapted(loaded: LoadedModel, folder: str | Path) -> LoadedModel:
    """The model with an adapter; the one that is given stays as it is.

    Args:
        folder: PEFT's, with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        UserError: an adapter that is not one of LoRA, not supported, or of another model.
    """
    folder = Path(folder).expanduser()
    model = loaded.model
    if isinstance(model, ServedModel):
        raise UserError(
            f"an adapter is for a model that PyTorch runs, and {loaded.id} is run by {model.runner}: load it with "
            "runner='torch'"
        )
    if getattr(model, "hf_quantizer", None) is not None or hasattr(model, "hf_device_map"):
        raise UserError(f"{loaded.id} is quantised or placed by another library: merge the adapter {folder}")
    products, digest = _read(folder)
    made = twin(model)
    for path, product in products.items():
        try:
            layer = made.get_submodule(path)
        except AttributeError:
            raise UserError(
                f"the adapter {folder} changes {path}, which {loaded.id} does not have: it is for another model"
            ) from None
        what = f"the adapter {folder} changes {path}, which"
        made.set_submodule(path, _changed(layer, product, what))
    if is_quantised(model):
        renew(made)
    elif runs(model) and (why := compile_layers(made)) is not None:
        raise UserError(f"{loaded.id} with the adapter {folder} cannot be compiled: {why}; use compile=False")
    if runs(made) == runs(model) and (cache := cache_dtype_of(model)) is not None:
        set_cache_dtype(made, cache)
    count_as(made, hashlib.sha256(f"{weights_fingerprint(model)}{digest}".encode()).hexdigest())
    return replace(loaded, model=made, adapter=str(folder))


def _read(folder: Path) -> tuple[dict[str, _Product], str]:
    """The product of each layer, and a hash of all."""
    try:
        config: Any = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        stored = (folder / "adapter_model.safetensors").read_bytes()
        tensors = load_tensors(stored)
        _check(config, folder)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{folder} is not a folder of PEFT with adapter_config.json and adapter_model.safetensors: "
            f"{first_line(error)}"
        ) from error
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if (match := _KEY.fullmatch(key)) is None or tensor.dim() != 2:
            raise UserError(f"the adapter {folder} has {key}, which is not a matrix of LoRA: merge it")
        found.setdefault(match[1], {})[match[2] or "base"] = tensor
    whole: dict[str, _Product] = {}
    for path, both in found.items():
        if both.keys() - {"base"} != {"A", "B"} or both["A"].shape[0] != both["B"].shape[1]:
            raise UserError(f"the adapter {folder} is damaged at {path}: fetch it again")
        whole[path] = _Product(
            both["A"], both["B"], _scale(config, path, both["A"].shape[0]), both.get("base")
        )
    if not whole:
        raise UserError(f"the adapter {folder} has no matrices: fetch it again")
    return whole, hashlib.sha256(json.dumps(config, sort_keys=True).encode() + stored).hexdigest()


def _check(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse what is more than products of two matrices."""
    if config["peft_type"] != "LORA":
        raise UserError(f"the adapter {folder} is of type {config['peft_type']}: only LORA is supported")
    wrong = [
        name for name, value in config.items() if value and name not in _READ and value != _UNREAD.get(name)
    ]
    wrong += ["bias"] if config.get("bias", "none") != "none" else []
    wrong += ["init_lora_weights"] if config.get("init_lora_weights", True) not in _INITS else []
    if wrong:
        raise UserError(
            f"the adapter {folder} has {wrong[0]}={config[wrong[0]]!r}, which is not supported: merge it into its base "
            "with PEFT's merge_and_unload()"
        )


def _scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    """The factor of a layer's product, as PEFT has it."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    alphas = (alpha for name, alpha in patterns.items() if re.match(rf"(.*\.)?({name})$", path))
    alpha = next(alphas, config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _changed(layer: nn.Module, product: _Product, what: str) -> nn.Module:
    """A layer like this one, with the product; it shares what does not change."""
    quantised = type(layer).__name__ in _QUANTISED
    if not quantised and type(layer) not in (nn.Linear, Conv1D):
        raise UserError(f"{what} is of class {type(layer).__name__}: adapters of linear layers are supported")
    own: Any = layer
    shape = (own.out_features, own.in_features) if type(layer) is not Conv1D else tuple(own.weight.T.shape)
    if (given := (product.up.shape[0], product.down.shape[1])) != shape:
        raise UserError(
            f"{what} has {shape[0]} × {shape[1]} weights, not {given[0]} × {given[1]}: check its base"
        )
    if (base := product.base) is not None and not quantised:  # PEFT stores those of an output layer
        same = base.shape == own.weight.shape and torch.equal(base.bfloat16(), own.weight.bfloat16().cpu())
        if not same:
            raise UserError(
                f"{what} had other weights when it was trained: merge the adapter into its own base"
            )
    dtype = torch.float32 if quantised else torch.promote_types(own.weight.dtype, torch.float32)
    device = (
        own.codes.device if hasattr(own, "codes") else torch.device("cpu") if quantised else own.weight.device
    )
    down, up = (one.to(device, dtype) for one in (product.down, product.up))
    if quantised:
        return LoraLinear(layer, down, product.scale * up)
    made, more = twin(layer), product.scale * (up @ down)
    more = more.T if type(layer) is Conv1D else more
    made._parameters["weight"] = nn.Parameter((own.weight.to(dtype) + more).to(own.weight.dtype), False)
    return made
