"""What a result is recorded with, so that it can be made again: models, heads and versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import sprinter
from sprinter.heads.head import Head
from sprinter.models.choose import runner_kind
from sprinter.models.gguf import GgufModel
from sprinter.models.pair import LoadedModel, LoadedPair

__all__ = ["models_record", "versions"]


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "sprinter": sprinter.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def models_record(models: LoadedPair, heads: Mapping[str, Head]) -> dict[str, Any]:
    """What ``load_pair`` made the pair of: target, draft, gate, other heads, tokenizer; None for what it has not.

    An id is a directory, a file or a hub id; of a gate or tokenizer that was given in memory it is None.
    """
    others = [head for kind, head in heads.items() if kind != "gate"]
    name = getattr(models.tokenizer, "name_or_path", None)
    return {
        "target": _model(models.target),
        "draft": None if models.draft is None else _model(models.draft),
        "gate": _head(heads["gate"]) if "gate" in heads else None,
        "heads": [_head(head) for head in others],
        "tokenizer": None if models.tokenizer is None else {"id": name or None},
    }


def _model(model: LoadedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "revision": model.revision,
        "dtype": model.weights,
        "device": str(model.model.device),
        "runner": runner_kind(model.model)[0],
        "compile": model.compile,
        **_loading(model.model),
    }


def _loading(model: PreTrainedModel | GgufModel) -> dict[str, Any]:
    """Keywords of ``load_pair`` that change the law, as transformers keeps them; None and False of a GGUF file."""
    config: Any = model.config
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    return {
        "attn_implementation": getattr(config, "_attn_implementation", None)
        if isinstance(model, PreTrainedModel)
        else None,
        "quantization_config": json.loads(json.dumps(quantization, default=str)),
        "trust_remote_code": type(model).__module__.startswith("transformers_modules."),
    }


def _head(head: Head) -> dict[str, Any]:
    return {"kind": head.config.kind, "id": head.id, "revision": head.revision}
