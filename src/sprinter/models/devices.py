"""Devices and dtypes by name."""

from __future__ import annotations

import torch

from sprinter.errors import UserError

__all__ = ["device_of", "dtype_name", "dtype_of"]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def dtype_name(dtype: str | torch.dtype) -> str:
    """Full name of a dtype: torch.bfloat16, "bf16" and "bfloat16" give "bfloat16". Unknown names are returned as is."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def device_of(name: str) -> torch.device:
    """A device by its name; "auto": CUDA, else MPS, else the CPU.

    Raises:
        UserError: there is none of this name, or it cannot be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"there is no device {name!r}: use auto, cpu, cuda or mps") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not available here: use cpu, or install a CUDA build of PyTorch")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device 'mps' is not available here: use device=cpu")
    try:  # torch accepts names of devices that this build or machine lacks; meta tensors hold no numbers
        usable = device.type != "meta" and torch.empty(0, device=device) is not None
    except Exception:  # each backend raises its own error
        usable = False
    if not usable:
        raise UserError(f"device {name!r} cannot be used here: use cpu, cuda or mps")
    return device


def dtype_of(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """A dtype by its name; "auto": float32 on a CPU, "auto" elsewhere.

    Raises:
        UserError: there is none of this name.
    """
    name = dtype_name(dtype)
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in _DTYPES:
        raise UserError(f"there is no dtype {name!r}: use auto, {', '.join(_DTYPES)}, int8, int4 or gguf")
    return _DTYPES[name]
