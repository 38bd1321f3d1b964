"""Which size of draft pays: short trainings of several shapes, a fit of β by size and tokens, measured costs.

The rest of the overlap is fitted as a power law, ln(1 − β) = a + b ln N + c ln D, with N parameters that a draft step
multiplies with and D positions trained on. The speed to expect follows from it as for independent positions (Leviathan
et al. 2023, arXiv 2211.17192, theorem 3.8), with costs that were measured: a draft of γ tokens costs γ draft steps and
one target pass over γ + 1 tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from sprinter.decode.costs import PassCosts
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.training.drafts.data import Texts
from sprinter.training.drafts.distill import fresh_student
from sprinter.training.drafts.folder import training_key
from sprinter.training.drafts.run import LossPoint
from sprinter.training.drafts.settings import StudentSettings, TrainingSettings
from sprinter.training.drafts.student import size_of
from sprinter.training.drafts.train import train

__all__ = [
    "Measured", "OverlapFit", "check_plan", "fit_overlap", "parse_shape", "table_of", "try_shapes",
]  # fmt: skip

_SHAPE = re.compile(r"(\d+)(?:x(\d+))?(?:/(\d+))?")
_SETTLED = 0.3
"""Share of a short training whose points are left out of the fit: they show the start, not the size."""


def parse_shape(text: str) -> StudentSettings:
    """``2``, ``2x256`` or ``2x256/8192``: layers, width, vocabulary.

    Raises:
        UserError: another form.
    """
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"shape '{text}' is none: give LAYERS, LAYERSxWIDTH or LAYERS/VOCABULARY, such as 2x256/8192"
        )
    layers, width, vocabulary = (None if one is None else int(one) for one in match.groups())
    return StudentSettings(layers=layers or 0, width=width, vocabulary=vocabulary)


@dataclass(frozen=True, slots=True)
class Measured:
    """One shape after its short training: parameters a step, points of the training, seconds of it, costs."""

    shape: str
    parameters: int
    history: tuple[LossPoint, ...]
    seconds: float
    costs: PassCosts

    @property
    def beta(self) -> float:
        """β on the held-out texts at the end of the short training."""
        return 1 - self.history[-1].held_out["tv"]


@dataclass(frozen=True, slots=True)
class OverlapFit:
    """ln(1 − β) = ``level`` + ``size`` · ln N + ``tokens`` · ln D; ``error``: root mean square of β's residuals."""

    level: float
    size: float
    tokens: float
    error: float

    def beta(self, parameters: float, tokens: float) -> float:
        """β of a draft with these parameters after training on so many positions."""
        rest = math.exp(self.level + self.size * math.log(parameters) + self.tokens * math.log(tokens))
        return 1 - min(1.0, rest)


def fit_overlap(points: Sequence[tuple[float, float, float]]) -> OverlapFit:
    """Fit the power law by least squares.

    Args:
        points: (parameters, positions trained on, β).

    Raises:
        UserError: fewer than two sizes or two numbers of tokens.
    """
    table = np.array(points, dtype=float)
    if len({size for size, _, _ in points}) < 2 or len({tokens for _, tokens, _ in points}) < 2:
        raise UserError(
            "a fit by size and tokens needs two shapes and two checkpoints of each: give more --shape"
        )
    columns = np.stack([np.ones(len(table)), np.log(table[:, 0]), np.log(table[:, 1])], 1)
    level, size, tokens = np.linalg.lstsq(columns, np.log(np.clip(1 - table[:, 2], 1e-6, 1)), rcond=None)[0]
    fit = OverlapFit(float(level), float(size), float(tokens), 0.0)
    residuals = [fit.beta(size, tokens) - beta for size, tokens, beta in points]
    return replace(fit, error=float(np.sqrt(np.mean(np.square(residuals)))))


def check_plan(shapes: Sequence[str], steps: int, positions: float) -> None:
    """Refuse a comparison that could not be fitted or read off at the end.

    Raises:
        UserError: one shape alone, too few steps, or a number of positions that is none.
    """
    if len({parse_shape(shape) for shape in shapes}) < 2:
        raise UserError("sizes are compared, and here is one shape: give --shape twice or more")
    if steps < 2:
        raise UserError(f"steps={steps} leaves one checkpoint of each shape: give 2 or more")
    if not 0 < positions < math.inf:
        raise UserError(f"positions={positions} is not a number of positions: give one above 0")


def try_shapes(
    pair: Pair,
    weights: PreTrainedModel,
    texts: Texts,
    shapes: Sequence[str],
    training: TrainingSettings,
    out: Path,
    measure: Callable[[PreTrainedModel, str], PassCosts],
    progress: Callable[[str, LossPoint, int], None] = lambda shape, point, steps: None,
) -> list[Measured]:
    """Train each shape for a short while and measure its costs; an interrupted run continues.

    Args:
        pair: the target. weights: the target in a floating-point dtype.
        texts: of the target.
        shapes: as ``parse_shape`` reads them.
        training: how long and how each is trained.
        out: directory of the checkpoints.
        measure: costs of a student on this machine.
        progress: called at each checkpoint with the shape, the newest point and the number of steps.

    Raises:
        UserError: no held-out texts, or a shape that cannot be built.
    """
    if not texts.part(True):
        raise UserError(
            "β is measured on held-out texts, and there is none: give more texts, or a larger --held-out"
        )
    students = {shape: fresh_student(pair, weights, texts, parse_shape(shape)) for shape in shapes}
    found = []
    for shape, student in students.items():
        place = out / training_key(texts, parse_shape(shape), training)
        run = train(student, texts, training, place, progress=partial(progress, shape))
        costs = measure(student, shape)
        found.append(Measured(shape, size_of(student), tuple(run.history), run.seconds, costs))
    return found


def table_of(found: Sequence[Measured], tokens: float) -> dict[str, Any]:
    """What ``sprinter draft sizes`` prints, as a JSON object.

    Args:
        found: the shapes.
        tokens: positions that a full training would see.
    """
    points = [
        (one.parameters, point.tokens, 1 - point.held_out["tv"])
        for one in found
        for point in one.history
        if point.step > _SETTLED * one.history[-1].step
    ]
    fit = fit_overlap(points)
    rows = []
    for one in found:
        expected = fit.beta(one.parameters, tokens)
        speed, gamma = max((1.0, 0), one.costs.best_run(expected))  # no length: plain decoding
        rows.append(
            {
                "shape": one.shape, "parameters": one.parameters, "draft_step_s": one.costs.draft_s(1),
                "beta": one.beta, "trained_on": one.history[-1].tokens, "expected_beta": expected,
                "gamma": gamma, "expected_speed": speed,
                "training_s": one.seconds * tokens / one.history[-1].tokens,
            }
        )  # fmt: skip
    best = max(rows, key=lambda row: float(str(row["expected_speed"])))
    return {
        "tokens": tokens, "fit": asdict(fit), "shapes": rows, "best": best["shape"] if best["gamma"] else None,
        "target_pass_s": {str(n): seconds for n, seconds in found[0].costs.target},
    }  # fmt: skip
