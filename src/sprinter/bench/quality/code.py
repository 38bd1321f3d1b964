"""Right or wrong: programs (HumanEval, Chen et al. 2021, pass@1 of one sample)."""

from __future__ import annotations

import re
from textwrap import dedent, indent

from sprinter.bench.quality.exact import check_answer
from sprinter.bench.quality.sandbox import Outcome, SandboxLimits, run_code
from sprinter.bench.sample import SampleCheck

__all__ = ["STOP_STRINGS", "code_of", "cut_code", "passes", "program_of"]

STOP_STRINGS = ("\nclass", "\ndef", "\n#", "\n@", "\nif", "\nprint", "\n```")
"""Strings that end the function in an answer: the paper's five, decorators and the end of a Markdown block."""

_BLOCK = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_CODE_LINE = re.compile(r"^[ \t]*(?:from|import|def|async def|class|@)\b|^@", re.MULTILINE)


def cut_code(text: str) -> str:
    """The text up to the first of ``STOP_STRINGS``."""
    return text[: min((at for stop in STOP_STRINGS if (at := text.find(stop)) >= 0), default=len(text))]


def code_of(text: str, name: str) -> str:
    """The code of a chat answer: its first Markdown block that defines ``name``, else its first block, else the text.

    A block that the end of the text cuts short counts as well.
    """
    blocks = [match[1] for match in _BLOCK.finditer(text)]
    return next((block for block in blocks if _defines(block, name)), blocks[0] if blocks else text)


def program_of(prompt: str, text: str, check: SampleCheck) -> str:
    """Source code of prompt, answer, test, and the call of the test.

    In chat form (``check.code``) the answer may repeat the function, whose definition then replaces the prompt's, or be
    its body alone.
    """
    test = f"{check.answer}\ncheck({check.entry_point})\n"
    if not check.code:
        return f"{prompt}{cut_code(text)}\n{test}"
    code, begun = code_of(text, check.entry_point), check.code.rstrip() + "\n"
    if _defines(code, check.entry_point):
        if code is text:  # prose around code without a block
            code = code[_CODE_LINE.search(code).start() :]  # type: ignore[union-attr]
        return f"{begun}    pass\n\n{dedent(code)}\n{test}"
    body = dedent(cut_code(code.strip("\n")))
    return f"{begun}{indent(body, '    ')}\n{test}"


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^[ \t]*(?:async )?def {re.escape(name)}\b", code, re.MULTILINE) is not None


def passes(prompt: str, text: str, check: SampleCheck, limits: SandboxLimits | None = None) -> Outcome:
    """Run an answer against its test. This runs generated code, in the sandbox of ``sandbox``.

    Raises:
        UserError: this machine has no sandbox, or the check is not one of code.
    """
    check_answer(check)
    return run_code(program_of(prompt, text, check), limits or SandboxLimits())
