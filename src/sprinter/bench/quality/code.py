"""Right or wrong: programs (HumanEval, Chen et al. 2021, pass@1 of one sample)."""

from __future__ import annotations

from sprinter.bench.quality.exact import check_answer
from sprinter.bench.quality.sandbox import Outcome, SandboxLimits, run_code
from sprinter.bench.sample import SampleCheck

__all__ = ["STOP_STRINGS", "cut_code", "passes", "program_of"]

STOP_STRINGS = ("\nclass", "\ndef", "\n#", "\n@", "\nif", "\nprint", "\n```")
"""Strings that end the function in an answer: the paper's five, decorators and the end of a Markdown block."""


def cut_code(text: str) -> str:
    """The text up to the first of ``STOP_STRINGS``."""
    return text[: min((at for stop in STOP_STRINGS if (at := text.find(stop)) >= 0), default=len(text))]


def program_of(prompt: str, text: str, check: SampleCheck) -> str:
    """Source code of prompt, answer, test, and the call of the test."""
    return f"{prompt}{cut_code(text)}\n{check.answer}\ncheck({check.entry_point})\n"


def passes(prompt: str, text: str, check: SampleCheck, limits: SandboxLimits | None = None) -> Outcome:
    """Run an answer against its test. This runs generated code, in the sandbox of ``sandbox``.

    Raises:
        UserError: this machine has no sandbox, or the check is not one of code.
    """
    check_answer(check)
    return run_code(program_of(prompt, text, check), limits or SandboxLimits())
