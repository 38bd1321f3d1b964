"""How much of a paper's protocol is run; the command line reads the settings before it imports torch."""

from __future__ import annotations

from sprinter.parameters import Positive, checked, stated

__all__ = ["ReproduceSettings"]


@checked
class ReproduceSettings:
    """How much of a paper's protocol is run. None: the paper's usual amount here, which ``--help`` names."""

    prompts: Positive | None = stated(
        None, "Prompts per data set, or per group of Spec-Bench. None: by paper."
    )
    tuning_prompts: Positive | None = stated(
        None, "Other prompts, on which draft lengths and thresholds are chosen. None: by paper."
    )
    gate_texts: Positive = stated(500, "Texts that each of SPRINTER's gates is trained on.")
    new_tokens: Positive | None = stated(None, "Longest answer. None: by paper.")
    repeats: Positive | None = stated(None, "Answers per prompt at temperatures above 0. None: by paper.")
    run_code: bool = stated(False, "Run HumanEval's answers in a sandbox, for their accuracy.")
