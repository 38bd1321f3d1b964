"""Settings of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

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

__all__ = ["BenchSettings"]

_SAMPLING = Sampling.model_fields


@checked
class BenchSettings:
    """Settings of a run, the same for all arms.

    Raises:
        UserError: a value out of range.
    """

    temperatures: Annotated[tuple[RealNumber, ...], LISTED] = stated(
        (1.0,), "0 is greedy. Each suite is run at each of them."
    )
    new_tokens: Natural | None = stated(None, "Tokens per turn; 0: up to the context limit. None: by suite.")
    repeats: Positive = stated(1, "Number of runs of each prompt. Each with another seed.")
    seed: Natural = stated(0, "Random seed. Prompt and repeat are added to it.")
    top_k: WholeNumber = like(_SAMPLING["top_k"])
    top_p: RealNumber = like(_SAMPLING["top_p"])
    min_p: RealNumber = like(_SAMPLING["min_p"])
    warmup: Natural = stated(1, "Prompts that each arm runs first, not measured. At each temperature.")
    bases: Annotated[tuple[str, ...], LISTED] = stated(
        ("autoregressive", "speculative", "transformers:plain", "transformers:assisted"),
        "Arm that speeds are relative to. If they take part.",
    )

    def __post_init__(self) -> None:
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
