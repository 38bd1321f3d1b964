"""Settings of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sprinter.decode.checks import at_least
from sprinter.errors import UserError
from sprinter.laws import Sampling

__all__ = ["BenchSettings"]


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of a run, the same for all arms.

    Attributes:
        temperatures: each suite is run at each of them.
        new_tokens: maximum number of new tokens per turn; None: the suite's own; 0: up to the context limit.
        repeats: how often each prompt is asked, with a different seed each time.
        seed: base seed; prompt and repeat are added to it.
        top_k, top_p, min_p: truncation, as in ``Sampling``.
        warmup: number of prompts that each arm answers first, at each temperature, without being timed.
        bases: arms that speeds are reported relative to, if they take part.

    Raises:
        UserError: a value out of range.
    """

    temperatures: tuple[float, ...] = (1.0,)
    new_tokens: int | None = None
    repeats: int = 1
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    warmup: int = 1
    bases: tuple[str, ...] = ("autoregressive", "speculative", "transformers:plain", "transformers:assisted")

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("warmup", 0), ("seed", 0)):
            at_least(name, getattr(self, name), least)
        if self.new_tokens is not None:
            at_least("new_tokens", self.new_tokens, 0)
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            given = ", ".join(f"{temperature:g}" for temperature in self.temperatures) or "none"
            raise UserError(f"temperature={given} is out of range: give at least one, and each once")
        for temperature in self.temperatures:
            self.sampling(temperature)

    def sampling(self, temperature: float) -> Sampling:
        """Sampling parameters at a temperature of the run."""
        return Sampling(temperature=temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}
