"""Checks on what a model puts out."""

from __future__ import annotations

import torch
from torch import Tensor

from sprinter.errors import SprinterError

__all__ = ["check_finite"]


def check_finite(logits: Tensor, which: str, position: int) -> None:
    """Raise if a row of logits holds NaN or +inf, or only −inf: one maximum a row, one synchronisation.

    Args:
        logits: ``[..., n, vocab]``.
        which: whose they are, "target" or "draft".
        position: position in the text of the first row's token.

    Raises:
        SprinterError: names the model and the position.
    """
    peaks = logits.amax(-1)  # NaN wins a maximum, so that it shows here.
    fine = torch.isfinite(peaks)
    if fine.all():
        return
    at = int((~fine.reshape(-1, fine.shape[-1]).all(0)).nonzero()[0, 0])
    bad = float(peaks[..., at][~fine[..., at]].reshape(-1)[0])
    what = "NaN" if bad != bad else "+inf" if bad > 0 else "-inf for every token"
    raise SprinterError(
        f"the {which} model's logits are {what} at position {position + at}: "
        "try dtype=float32, and check the weights if that does not help"
    )
