"""Checks of a model's logits, and of whether a model can be decoded with a cache that is rewound."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PreTrainedConfig,
)

from sprinter.errors import SprinterError, UserError

__all__ = ["check_config", "check_finite", "distance", "find_fault", "rounding_bound"]

_CROPPABLE = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_INSTEAD = "give a decoder with attention in all layers"


def check_finite(logits: Tensor, which: str, position: int) -> None:
    """Raise if a row of logits holds NaN or +inf, or only −inf. Costs one maximum per row and one host synchronisation.

    Args:
        logits: ``[..., n, vocab]``.
        which: the model that they come from, "target" or "draft".
        position: position in the text of the first row's token.

    Raises:
        SprinterError: names the model and the position.
    """
    peaks = logits.amax(-1)  # the maximum of a row with a NaN is NaN
    if peaks.isfinite().all():
        return
    columns = zip(*peaks.reshape(-1, peaks.shape[-1]).tolist(), strict=True)
    worst = [next((peak for peak in column if not isfinite(peak)), 0.0) for column in columns]
    error = find_fault(worst, which, position)
    assert error is not None
    raise error


def find_fault(peaks: Sequence[float], which: str, position: int) -> SprinterError | None:
    """The error for one row's logits, judged by the maximum at each position; None if all are finite.

    Args:
        peaks: the largest logit at each position of the row.
        which, position: see ``check_finite``.
    """
    at = next((i for i, peak in enumerate(peaks) if not isfinite(peak)), None)
    if at is None:
        return None
    what = "NaN" if peaks[at] != peaks[at] else "+inf" if peaks[at] > 0 else "-inf for every token"
    return SprinterError(
        f"the {which} model's logits are {what} at position {position + at}: "
        "try dtype=float32, and check the weights if that does not help"
    )


def check_config(config: PreTrainedConfig, name: str, kind: Any = None) -> None:
    """Refuse a model whose config shows that no runner can serve it, before its weights are read.

    Args:
        config: the model's.
        name: what it is called in the message.
        kind: its class; None: that of a causal language model with this config.

    Raises:
        UserError: says why.
    """
    if kind is None:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if why := _why_unservable(kind, config):
        raise UserError(f"{name} cannot be served: {why}; {_INSTEAD}")


def _why_unservable(kind: Any, config: PreTrainedConfig) -> str | None:
    """Why a model of this class cannot be decoded with a cache that is rewound; None: it can."""
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if getattr(kind, "_is_stateful", False):
        return "it holds a recurrent state, which cannot be rewound"
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    if masked and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "is_decoder", False):
        return "its tokens attend to later ones, as in an encoder (is_decoder is not set in its config)"
    types = getattr(config.get_text_config(decoder=True), "layer_types", None)
    if others := sorted(set(types or ()) - _CROPPABLE):
        return f"it has layers of type {', '.join(others)}, whose state cannot be rewound"
    return None


def rounding_bound(logits: Tensor) -> float:
    """Largest ``distance`` that rounding explains."""
    return 1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.1


def distance(logits: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the expected logits' standard deviation; NaN counts as infinite."""
    difference = (logits.double() - expected.double()).abs().max() / (expected.double().std() + 1e-9)
    return float(difference.nan_to_num(nan=float("inf")))
