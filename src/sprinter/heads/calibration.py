"""Turn a network's logit into a score that is a probability. ``sprinter.training.calibrate`` fits the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from sprinter.errors import UserError, did_you_mean

__all__ = ["CALIBRATIONS", "Calibration", "Isotonic", "Temperature", "read_calibration"]

CALIBRATIONS = ("none", "temperature", "isotonic")


class Calibration(nn.Module):
    """No calibration: score = sigmoid(logit)."""

    kind = "none"

    def forward(self, logits: Tensor) -> Tensor:
        """``[...]`` -> scores ``[...]`` in [0, 1]."""
        return torch.sigmoid(logits)

    def to_dict(self) -> dict[str, Any]:
        """Fields for config.json; tensors are saved with the weights."""
        return {"kind": self.kind}


class Temperature(Calibration):
    """score = sigmoid(logit / temperature + shift) (Guo et al. 2017, with Platt's shift: class weights move the logit).

    Args:
        temperature: divides the logit, above 0.
        shift: added to the logit, in nats.

    Raises:
        UserError: a number is out of range or not finite.
    """

    kind = "temperature"

    def __init__(self, temperature: float = 1.0, shift: float = 0.0) -> None:
        super().__init__()
        if not (0 < temperature < float("inf") and isfinite(shift)):
            raise UserError(
                f"temperature={temperature}, shift={shift} is not a calibration: make the gate again"
            )
        self.temperature, self.shift = float(temperature), float(shift)

    def forward(self, logits: Tensor) -> Tensor:
        """``[...]`` -> scores ``[...]`` in [0, 1]."""
        return torch.sigmoid(logits / self.temperature + self.shift)

    def to_dict(self) -> dict[str, Any]:
        """Kind, temperature and shift."""
        return {"kind": self.kind, "temperature": self.temperature, "shift": self.shift}


class Isotonic(Calibration):
    """A non-decreasing curve through knots, linear between them and constant outside (Zadrozny and Elkan 2002).

    Args:
        logits: ``[k]``, finite and strictly increasing, k >= 2.
        scores: ``[k]``, non-decreasing, in [0, 1].

    Raises:
        UserError: the knots do not have these properties.
    """

    kind = "isotonic"
    logits: Tensor
    scores: Tensor

    def __init__(self, logits: Tensor, scores: Tensor) -> None:
        super().__init__()
        logits, scores = logits.float(), scores.float()  # check the values that ``forward`` uses
        fits = logits.dim() == 1 and logits.shape == scores.shape and len(logits) >= 2
        if not (
            fits
            and bool(logits.isfinite().all())
            and bool((logits.diff() > 0).all())
            and bool((scores.diff() >= 0).all())
            and 0 <= float(scores[0]) <= float(scores[-1]) <= 1
        ):
            raise UserError(
                "the isotonic curve does not rise through at least two knots: make the gate again"
            )
        self.register_buffer("logits", logits)
        self.register_buffer("scores", scores)

    def forward(self, logits: Tensor) -> Tensor:
        """``[...]`` -> scores ``[...]`` in [0, 1]."""
        right = torch.searchsorted(self.logits, logits.detach().contiguous()).clamp(1, len(self.logits) - 1)
        low, high = self.logits[right - 1], self.logits[right]
        share = ((logits - low) / (high - low)).clamp(0, 1)
        return torch.lerp(self.scores[right - 1], self.scores[right], share)


def read_calibration(fields: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> Calibration:
    """Read the calibration of an artifact; without ``fields`` there is none.

    Raises:
        UserError: unknown kind, or numbers out of range.
        KeyError: a number or a tensor is missing.
    """
    kind = "none" if fields is None else fields["kind"]
    if kind == "none":
        return Calibration()
    if kind == "isotonic":
        return Isotonic(tensors["calibration.logits"], tensors["calibration.scores"])
    if kind == "temperature":
        assert fields is not None
        return Temperature(float(fields["temperature"]), float(fields["shift"]))
    raise did_you_mean("calibration", kind, CALIBRATIONS)
