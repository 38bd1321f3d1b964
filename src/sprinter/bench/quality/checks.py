"""Right or wrong: a text's last number (GSM8K), its first choice letter (MMLU, CommonsenseQA), a program (HumanEval).

A program is one sample of pass@1 (Chen et al. 2021); ``sandbox`` runs it.
"""

from __future__ import annotations

import re
from decimal import Decimal
from textwrap import dedent, indent

from sprinter.bench.quality.sandbox import Outcome, SandboxLimits, run_code
from sprinter.bench.sample import SampleCheck
from sprinter.errors import UserError

__all__ = ["check_answer", "code_of", "cut_code", "final_number", "first_choice", "last_number", "passes", "program_of",
           "right"]  # fmt: skip

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w.)\]])-)?(?<![\w.])\.\d+"
)
_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_CHOICE = re.compile(r"(?<![\w'’])[A-H](?![\w'’])")
_LETTERS = "ABCDEFGH"


def last_number(text: str) -> Decimal | None:
    """Last number of a text. Thousands separators and a dollar sign are allowed; "5-3" gives 3, "is -3" gives -3.

    >>> last_number("She pays 3 * $1,200.50 and is left with -4.0.")
    Decimal('-4.0')
    """
    found = _NUMBER.findall(text.replace("−", "-"))
    return Decimal(found[-1].replace("$", "").replace(",", "")) if found else None


def final_number(text: str) -> Decimal | None:
    """Number of the first line "#### NUMBER" (GSM8K's form of an answer), else the last number of a text.

    >>> final_number("2 + 3 = 5\\n#### 5\\nThese are 2 numbers."), final_number("It is 7.")
    (Decimal('5'), Decimal('7'))
    """
    marked = _MARKED.search(text)
    found = None if marked is None else last_number(marked[1])
    return last_number(text) if found is None else found


def first_choice(text: str) -> str | None:
    """First letter from A to H that is a word by itself; an "A" that begins a later sentence is taken as an article.

    >>> first_choice("(B) bank"), first_choice("Look. A door is no library, so C."), first_choice("It is A because")
    ('B', 'C', 'A')
    """
    body = text.strip()
    for match in _CHOICE.finditer(body):
        begins = re.search(r"[.!?]\s+$", body[: match.start()])
        if not (match[0] == "A" and begins and re.match(r" [a-z]", body[match.end() :])):
            return match[0]
    return None


def right(text: str, check: SampleCheck) -> bool:
    """Whether a text answers a check of kind "number", "choice" or "text".

    Raises:
        UserError: see ``check_answer``.
    """
    check_answer(check)
    if check.kind == "number":
        return final_number(text) == last_number(check.answer)
    if check.kind == "text":
        return _plain(text) == _plain(check.answer)
    return first_choice(text) == check.answer.strip()


def _plain(text: str) -> str:
    """A text without case, space around words, and final full stop."""
    return " ".join(text.casefold().split()).removesuffix(".")


def check_answer(check: SampleCheck) -> None:
    """Raise a UserError if no text can satisfy a check."""
    if check.kind == "number" and last_number(check.answer) is None:
        raise UserError(
            f"the right answer '{check.answer[:40]}' holds no number: give a number, or another check"
        )
    if check.kind == "choice" and (len(check.answer.strip()) != 1 or check.answer.strip() not in _LETTERS):
        raise UserError(f"the right answer '{check.answer[:40]}' is not a choice: give a letter from A to H")
    if check.kind == "text" and not _plain(check.answer):
        raise UserError("the right answer of a check is empty: give its text, or leave the check away")
    if check.kind == "code" and not (check.answer.strip() and check.entry_point.isidentifier()):
        raise UserError(
            f"a check of code needs a test and the name of a function, not '{check.entry_point[:40]}'"
        )


# --- programs ---
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
