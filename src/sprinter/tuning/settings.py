"""What is asked of the tuner."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from sprinter.decode.checks import between
from sprinter.decode.registry import did_you_mean
from sprinter.errors import UserError
from sprinter.parameters import (
    LISTED,
    Natural,
    Positive,
    RealNumber,
    Sampling,
    WholeNumber,
    checked,
    like,
    stated,
)

__all__ = ["BUDGET_UNITS", "LADDER", "BudgetUnit", "Goal", "TuneSettings"]

_SAMPLING = Sampling.model_fields
BudgetUnit = Literal["drift", "changed", "kl"]
BUDGET_UNITS: dict[str, str] = {
    "drift": "mean TV(π, p) a token",
    "changed": "expected changed tokens a text",
    "kl": "mean KL(p‖π) a token, nats",
}
"""What a budget is counted in."""
LADDER = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Budgets on drift that are tried where the asked limit is not one on drift."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit on a measure of answers, relative to the target's own: ``exact_match>=0.98``.

    Attributes:
        metric: name of a measure of which more is better. least: least ratio to the target's own mean, above 0.

    Raises:
        UserError: an unknown measure, one of which less is better, or a ratio out of range.
    """

    metric: str
    least: float

    def __post_init__(self) -> None:
        from sprinter.bench.quality.metrics import METRICS  # imports torch

        goals = [name for name, metric in METRICS.items() if metric.better == "higher"]
        goals = [name for name in goals if not name.startswith(("win", "log_"))]
        if self.metric not in goals:
            raise did_you_mean("measure to ask for", self.metric, goals)
        between("the ratio of a quality goal", self.least, 0.01, 2.0)

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Parse ``NAME>=RATIO``.

        Raises:
            UserError: another form; see the class.
        """
        found = re.fullmatch(r"\s*(\w+)\s*>=\s*(\d+(?:\.\d+)?|\.\d+)\s*", text)
        if found is None:
            raise UserError(f"quality '{text}' is not NAME>=RATIO: give for example 'exact_match>=0.98'")
        return cls(found[1], float(found[2]))

    def __str__(self) -> str:
        return f"{self.metric}>={self.least:g}"


@checked
class TuneSettings:
    """Settings of a tuning.

    Raises:
        UserError: a value out of range.
    """

    budgets: Annotated[tuple[RealNumber, ...], LISTED] = stated(
        (0.05,), "Limit of a lossy setting, in --budget-unit; 0: exact methods alone. None with ``quality``: any.",
    )  # fmt: skip
    budget_unit: BudgetUnit = stated(
        "drift", "drift: mean TV a token; changed: expected changed tokens a text; kl: KL(p‖π) a token, nats."
    )
    quality: tuple[Goal, ...] = stated(
        (), "A measure that a lossy setting must keep, relative to the target's own and at 95 %: 'exact_match>=0.98'."
    )  # fmt: skip
    time_s: Annotated[RealNumber, Field(gt=0)] | None = stated(
        600.0, "When to stop: 90s, 10m, 1h; none: no limit."
    )
    temperature: RealNumber = like(_SAMPLING["temperature"])
    top_k: WholeNumber = like(_SAMPLING["top_k"])
    top_p: RealNumber = like(_SAMPLING["top_p"])
    min_p: RealNumber = like(_SAMPLING["min_p"])
    new_tokens: Positive | None = stated(None, "Tokens per text. None: by data.")
    seed: Natural = stated(0, "Random seed.")
    probe_texts: Positive = stated(8, "Prompts of the probe.")
    keep: Positive = stated(
        6, "Candidates per class (exact methods; each budget) that go on after the replay."
    )
    first: Positive = stated(2, "Prompts of the first round.")
    repeats: Positive = stated(
        2, "How often finalists answer a prompt, at most. More than once only if the prompts do not tell them apart."
    )  # fmt: skip
    finalists: Positive = stated(2, "Candidates per class that are left at the end.")
    run_code: bool = stated(False, "Run generated code, in a subprocess with limits.")

    def __post_init__(self) -> None:
        most = 1.0 if self.budget_unit == "drift" else 1e6
        for budget in self.budgets:
            if not 0 <= budget <= most:
                raise UserError(
                    f"budget={budget} is out of range: give 0 to {most:g}, in {BUDGET_UNITS[self.budget_unit]}"
                )
        if len(set(self.budgets)) < len(self.budgets):
            raise UserError("a budget was given twice: give each once")
        if not self.run_code and any(goal.metric == "pass_at_1" for goal in self.quality):
            raise UserError("pass_at_1 runs the generated programs: give --run-code too, or another measure")

    @property
    def sampling(self) -> Sampling:
        """Temperature and truncation."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def levels(self, mean_tokens: float) -> tuple[float, ...]:
        """Budgets on mean drift that lossy candidates are held to, ascending.

        Args:
            mean_tokens: mean number of new tokens a text, which turns changed tokens into drift.
        """
        if self.budget_unit == "drift" and self.budgets:
            found = self.budgets
        elif self.budget_unit == "changed" and self.budgets:
            found = tuple(min(1.0, budget / max(1.0, mean_tokens)) for budget in self.budgets)
        else:
            found = LADDER if self.quality or any(self.budgets) else ()
        return tuple(sorted({round(level, 6) for level in found if level > 0}))

    def facts(self) -> dict[str, Any]:
        """As JSON values, without ``time_s``, on which no measurement depends."""
        values = asdict(self) | {"quality": [str(goal) for goal in self.quality]}
        del values["time_s"]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
