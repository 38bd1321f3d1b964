"""Checks of a model's logits."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from torch import Tensor

from sprinter.errors import SprinterError

__all__ = ["check_finite", "find_fault"]


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
