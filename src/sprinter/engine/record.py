"""The record of models, heads and package versions that makes a result reproducible."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from sprinter.fingerprint import ids_name, weights_fingerprint
from sprinter.heads.drafting import TokenHeads
from sprinter.heads.head import Head
from sprinter.models.choose import exactness, runner_kind
from sprinter.models.interface import ServedModel
from sprinter.models.kernels import cache_dtype_of, is_quantised, runs
from sprinter.models.pair import LoadedModel, LoadedPair
from sprinter.version import __version__

__all__ = ["cpu_name", "drafting_record", "fingerprints", "model_facts", "models_record", "versions"]

_READ = (".safetensors", ".bin", ".gguf", ".json", ".model", ".jinja")
"""Suffixes of the files that a model is loaded from."""


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    return {
        "sprinter": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cpu_name() -> str:
    """Name of the processor; "unknown" if the system does not tell."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def models_record(
    models: LoadedPair, heads: Mapping[str, Head], drafting: TokenHeads | None = None
) -> dict[str, Any]:
    """Target, draft, gate, other heads and tokenizer of a pair; None for missing ones.

    An id is a directory, a file or a hub id; None for a gate or tokenizer that was given as an object.
    """
    others = [_head(head) for kind, head in heads.items() if kind != "gate"]
    name = getattr(models.tokenizer, "name_or_path", None)
    return {
        "target": _model(models.target),
        "draft": None if models.draft is None else _model(models.draft),
        "gate": _head(heads["gate"]) if "gate" in heads else None,
        "heads": [*others, *([drafting_record(drafting)] if drafting else [])],
        "tokenizer": None if models.tokenizer is None else {"id": name or None},
    }


def fingerprints(
    models: LoadedPair, heads: Mapping[str, Head], drafting: TokenHeads | None = None
) -> dict[str, Any]:
    """``models_record`` with fingerprints of the contents: results can be continued if they are equal.

    For models and tokenizer these are sizes and modification times of their files, as hashing is slow (a hub id has its
    revision); for heads, the SHA-256.
    """
    found = models_record(models, heads, drafting)
    for name in ("target", "draft", "tokenizer"):
        if (about := found[name]) is not None and about["id"] is not None:
            about["files"] = _files(Path(about["id"]).expanduser())
    others: list[Head | TokenHeads] = [head for kind, head in heads.items() if kind != "gate"]
    if "gate" in heads:
        found["gate"]["sha256"] = heads["gate"].fingerprint
    for about, head in zip(found["heads"], [*others, drafting] if drafting else others, strict=True):
        about["sha256"] = head.fingerprint
    return dict(json.loads(json.dumps(found)))


def _files(place: Path) -> dict[str, tuple[int, int]]:
    """Size (bytes) and modification time (ns) of a model's files, by name; {} for a hub id."""
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    stats = {file.name: file.stat() for file in files if file.suffix in _READ and file.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def _model(model: LoadedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "revision": model.revision,
        "dtype": model.quantised or model.weights,
        **({} if model.words is None else {"draft_vocabulary": model.words}),
        **({} if model.adapter is None else {"adapter": model.adapter}),
        **_cache(model),
        "device": str(model.model.device),
        "runner": runner_kind(model.model)[0],
        "exactness": exactness(model.model),
        "compile": model.compile,
        **({"kernels": version("sprinter-kernels")} if _by_kernels(model.model) else {}),
        **_loading(model.model),
    }


def model_facts(model: LoadedModel) -> dict[str, Any]:
    """What tells a model from others, wherever it lies: name, hash of the weights, size, dtype, runner; no path."""
    return {
        "name": Path(model.id).name if Path(model.id).exists() else model.id,
        "revision": model.revision,
        **({} if model.compile is None else {"compile": model.compile}),
        "sha256": weights_fingerprint(model.model),
        "parameters": model.size,
        "dtype": model.weights,
        **({} if model.words is None else {"draft_vocabulary": model.words}),
        **_cache(model),
        "context": model.context,
        "vocab_size": model.vocab_size,
        "runner": runner_kind(model.model)[0],
    }


def _cache(model: LoadedModel) -> dict[str, str]:
    """The dtype of keys and values, where it is not what such a model has by default."""
    dtype = cache_dtype_of(model.model)
    return {} if dtype in (None, "float32") else {"cache_dtype": dtype}


def _by_kernels(model: PreTrainedModel | ServedModel) -> bool:
    return runs(model) or (isinstance(model, PreTrainedModel) and is_quantised(model))


def _loading(model: PreTrainedModel | ServedModel) -> dict[str, Any]:
    """Keywords of ``load_pair`` that change the law, as stored by transformers; None and False for a GGUF file."""
    config: Any = model.config
    quantization = getattr(config, "quantization_config", None)
    attention = getattr(config, "_attn_implementation", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    own = isinstance(model, PreTrainedModel) and not is_quantised(model)
    return {
        # That of quantised layers comes with them.
        "attn_implementation": attention if own else None,
        "quantization_config": json.loads(json.dumps(quantization, default=str)),
        "trust_remote_code": type(model).__module__.startswith("transformers_modules."),
    }


def _head(head: Head) -> dict[str, Any]:
    return {"kind": head.config.kind, "id": head.id, "revision": head.revision}


def drafting_record(heads: TokenHeads) -> dict[str, Any]:
    """What identifies heads that draft, as they were loaded."""
    found: dict[str, Any] = {"kind": heads.kind, "id": heads.id, "revision": heads.revision}
    if is_quantised(heads):
        found["dtype"] = "int8"
    if heads.output is not None and heads.output.ids is not None:
        found["draft_vocabulary"] = ids_name(heads.output.ids)
    return found
