"""The kernels of ``fused_layers`` for one model: tried once, and left out with a warning where they fail or differ."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.errors import first_line
from sprinter.models.capture.trace import RowPass
from sprinter.models.kernels import kernels, why_not_fused
from sprinter.models.runners.forward import head_sizes

__all__ = ["FAR", "forget_trial", "fused"]

FAR = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest distance of states from transformers', relative to their size, that rounding explains."""

_TOKENS, _KEYS = 5, 16
_tried: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
_log = logging.getLogger("sprinter")


@contextmanager
def fused(run: RowPass, buffers: Sequence[Tensor]) -> Iterator[bool]:
    """Context in which the model of a pass goes through the kernels, if they know it and agree with transformers:
    whether it does.

    Args:
        run: the pass that is captured. buffers: its keys and values, of whose shapes the trial has its own.
    """
    model = run.model
    if model not in _tried:
        why = why_not_fused(model) or _why_not(run, buffers)
        _tried[model] = why is None
        if why is not None:
            _log.warning(
                "%s is captured without fused layers, which is slower: %s", type(model).__name__, why
            )
    if not _tried[model]:
        yield False
        return
    with kernels("fused").fused_layers(model):
        yield True


def forget_trial(model: PreTrainedModel) -> None:
    """Have the kernels be tried again with a model."""
    _tried.pop(model, None)


def _rows() -> tuple[int, int]:
    """For few tokens and for many: their products differ."""
    return 1, kernels("fused_plan").MOST // _TOKENS + 1


def _why_not(run: RowPass, buffers: Sequence[Tensor]) -> str | None:
    """What is wrong with a pass through the kernels; None: it is that of transformers."""
    device, fusing, narrow = buffers[0].device, kernels("fused"), buffers[0].dtype != run.model.dtype
    if narrow and not getattr(fusing, "WIDENS", False):
        return "the kernels that are installed are too old for its cache_dtype"
    counted, keys = torch.arange(_TOKENS, device=device)[None], torch.arange(_KEYS, device=device)
    # From all over the vocabulary: the first ones are often special tokens that hardly occur in training, whose laws
    # change with rounding alone.
    tokens = (counted + 1) * (head_sizes(run.model)[0] // (_TOKENS + 2))

    def results() -> list[Tensor]:
        made: list[Tensor] = []
        for count in _rows():
            own = [one.new_zeros(count, one.shape[1], _KEYS + 1, one.shape[3]) for one in buffers]
            places, rows = counted.expand(count, -1).contiguous(), torch.arange(count, device=device)
            made += run(tokens.expand(count, -1).contiguous(), places, places, rows, keys, own)[:2]
        return [one.float() for one in made]

    try:
        with torch.inference_mode():
            expected = results()
            with fusing.fused_layers(run.model) as layers:
                given = results()
            norm = torch.linalg.norm
            far = [float(norm(one - two) / norm(two)) for one, two in zip(given, expected, strict=True)]
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernels
    except Exception as error:  # of a compiler, above all: the pass is captured without
        return first_line(error)
    if not all(layer.ran for layer in layers):
        return "its layers are not given what the kernels take"
    # A cache in fewer bits rounds numbers apart that differ in their last bits.
    allowed = max(FAR[run.model.dtype], FAR[torch.bfloat16] * narrow)
    agree = all(one <= allowed for one in far)  # not where one is no number
    return None if agree else f"its states differ by {max(far):.2g}"
