"""What loading a model needs of the arguments of ``load_models``: the draft's may differ from the target's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.models.devices import device_of, dtype_name, dtype_of
from sprinter.models.kernels import BITS, CACHES, GGUF
from sprinter.models.source import Provenance

__all__ = ["LoadOptions", "check_options", "load_options"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What loading a model needs of the arguments of ``load_models``.

    ``stored``: a checkpoint's own dtype is kept where the kernels read weights in place, which gives the same laws.
    ``cache``: the dtype of keys and values, of ``kernels.CACHES``; None: it was not given.
    """

    device: torch.device
    dtype: torch.dtype | str
    device_map: str | dict[str, Any] | None
    trust_remote_code: bool
    compile: bool | None
    device_name: str
    dtype_name: str
    extra: Mapping[str, Any]
    dequantise: bool
    quantised: str | None = None
    stored: bool = False
    vocabulary: int | str | Path | Sequence[int] | None = None
    cache: str | None = None


def load_options(
    dtype: str | torch.dtype,
    device: str,
    device_map: str | dict[str, Any] | None,
    attn_implementation: str | None,
    quantization_config: Any,
    trust_remote_code: bool,
    compile: bool | None,
    dequantise: bool,
    vocabulary: int | str | Path | Sequence[int] | None,
    cache_dtype: str | torch.dtype | None,
) -> LoadOptions:
    """What loading a model needs of the arguments of ``load_models``.

    Raises:
        UserError: arguments exclude each other.
    """
    where = device_of(device)  # a GGUF file gets the name instead: "auto" differs from "cpu" there
    quantised = name if (name := dtype_name(dtype)) in (*BITS, GGUF) else None
    on_gpu = where.type == "cuda"
    if quantised and (device_map is not None or quantization_config is not None):
        raise UserError(
            f"dtype {name} says how weights are stored: leave device_map and quantization_config out"
        )
    if quantised and where.type != "cpu" and not (on_gpu and quantised == "int8"):
        instead = "dtype=int8" if on_gpu else "dtype=float16"
        raise UserError(
            f"dtype {name} is for models on a CPU: give device=cpu, or {instead} for {where.type}"
        )
    if quantised and not on_gpu and attn_implementation is not None:
        raise UserError(f"dtype {name} comes with attention of its own: leave attn_implementation out")
    if quantization_config is not None and device_map is None:
        device_map = {"": where}  # quantised weights cannot be moved afterwards
    if device_map is not None and find_spec("accelerate") is None:
        what = "device_map" if quantization_config is None else "quantization_config"
        raise UserError(f"{what} needs the accelerate package: pip install accelerate, or leave {what} out")
    given = {"attn_implementation": attn_implementation, "quantization_config": quantization_config}
    stored = bool(compile) and name == "auto" and where.type == "cpu" and device_map is None
    return LoadOptions(
        where, _float_of(quantised, dtype, where), device_map, trust_remote_code, compile, device,
        name, {name: value for name, value in given.items() if value is not None}, dequantise or quantised is not None,
        quantised, stored, vocabulary, None if cache_dtype is None else _cache_dtype(cache_dtype),
    )  # fmt: skip


def _cache_dtype(dtype: str | torch.dtype) -> str:
    if (name := dtype_name(dtype).removesuffix("fn")) not in CACHES:
        raise UserError(f"cache_dtype={name} is unknown: give {', '.join(CACHES)}")
    return name


def _float_of(quantised: str | None, dtype: str | torch.dtype, where: torch.device) -> torch.dtype | str:
    """What is not quantised: float32 for our kernels on CPUs; on a GPU bfloat16, in which 8-bit codes are exact."""
    if quantised is None:
        return dtype_of(dtype, where)
    return torch.float32 if where.type == "cpu" else torch.bfloat16


def check_options(origin: Provenance, options: LoadOptions) -> None:
    """Refuse options for loading with transformers that do not apply to a model in memory or to a GGUF file."""
    if isinstance(origin.at, PreTrainedModel):
        _check_in_memory(origin.at, origin.name, options)
    given = dict(options.extra)
    if options.quantised == GGUF and origin.gguf is None and isinstance(origin.at, Path):
        raise UserError(f"dtype gguf is for GGUF files, and {origin.name} is none: use int4 or int8")
    if origin.gguf is None:
        kind = "in memory already"
        given = given if not isinstance(origin.at, Path) else {}
    elif options.dequantise:
        kind = "a GGUF file"
        given = {**given, "device_map": options.device_map}
        given.pop("attn_implementation", None)
    else:
        kind = "a GGUF file, which llama.cpp runs"
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"{name}= is for models that transformers loads, and {origin.name} is {kind}: leave {name} out"
            )


def _check_in_memory(model: PreTrainedModel, name: str, options: LoadOptions) -> None:
    """Refuse a device or a dtype other than the model's own: a user's model is not changed."""
    own, asked = dtype_name(model.dtype), options.dtype_name
    if asked not in ("auto", own):
        fix = (
            "save it and give its directory" if options.quantised else f"call model.to(torch.{asked}) before"
        )
        raise UserError(
            f"dtype={asked} is for models that are loaded, and {name} is in memory, in {own}: {fix}, or leave dtype "
            "out (draft_dtype is the draft's alone)"
        )
    where, wanted = model.device, options.device
    if options.device_name != "auto" and (
        wanted.type != where.type or (wanted.index is not None and wanted.index != where.index)
    ):
        raise UserError(
            f"device={options.device_name} is for models that are loaded, and {name} is in memory, on {where}: call "
            f"model.to('{options.device_name}') before, or leave device out"
        )
    if options.device_map is not None and "quantization_config" not in options.extra:
        raise UserError(f"device_map is for models that are loaded, and {name} is in memory: leave it out")
