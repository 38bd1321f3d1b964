"""What is asked of the tuner."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sprinter.bench.quality.metrics import METRICS
from sprinter.decode.checks import at_least, between
from sprinter.decode.registry import did_you_mean
from sprinter.errors import UserError
from sprinter.laws import Sampling

__all__ = ["BUDGET_UNITS", "LADDER", "BudgetUnit", "Goal", "TuneSettings"]

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


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """Settings of a tuning.

    Attributes:
        budgets: limits in ``budget_unit``; none: exact methods alone, or with ``quality`` any drift of ``LADDER``.
        budget_unit: what budgets are counted in, see ``BUDGET_UNITS``.
        quality: measures of answers that a lossy setting must keep.
        time_s: seconds after which it ends with what it knows; None: no limit.
        temperature, top_k, top_p, min_p: as in ``Sampling``.
        new_tokens: maximum number of new tokens per text; None: the suite's own.
        seed: base seed.
        probe_texts: number of prompts of the probe.
        keep: candidates per class (exact methods; each budget on drift) that go on after the replay.
        first: prompts of the first round. repeats: how often finalists answer a prompt, at most, with another seed each
            time; more than once only if the prompts do not tell them apart.
        finalists: candidates per class that are left at the end.
        run_code: run generated programs, for pass_at_1.

    Raises:
        UserError: a value out of range.
    """

    budgets: tuple[float, ...] = (0.05,)
    budget_unit: BudgetUnit = "drift"
    quality: tuple[Goal, ...] = ()
    time_s: float | None = 600.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    new_tokens: int | None = None
    seed: int = 0
    probe_texts: int = 8
    keep: int = 6
    first: int = 2
    repeats: int = 2
    finalists: int = 2
    run_code: bool = False

    def __post_init__(self) -> None:
        if self.budget_unit not in BUDGET_UNITS:
            raise UserError(f"budget_unit='{self.budget_unit}' is unknown: give {', '.join(BUDGET_UNITS)}")
        most = 1.0 if self.budget_unit == "drift" else 1e6
        for budget in self.budgets:
            if not 0 <= budget <= most:
                raise UserError(
                    f"budget={budget} is out of range: give 0 to {most:g}, in {BUDGET_UNITS[self.budget_unit]}"
                )
        if len(set(self.budgets)) < len(self.budgets):
            raise UserError("a budget was given twice: give each once")
        if self.time_s is not None and not self.time_s > 0:
            raise UserError(f"time={self.time_s} is out of range: give seconds above 0")
        for name in ("probe_texts", "keep", "first", "repeats", "finalists"):
            at_least(name, getattr(self, name), 1)
        at_least("seed", self.seed, 0)
        if self.new_tokens is not None:
            at_least("new_tokens", self.new_tokens, 1)
        if not self.run_code and any(goal.metric == "pass_at_1" for goal in self.quality):
            raise UserError("pass_at_1 runs the generated programs: give --run-code too, or another measure")
        _ = self.sampling

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
