"""Prompts in chat form: what a user asks, and conversations that records hold as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sprinter.errors import UserError

__all__ = [
    "CHOICE_RULE",
    "CODE_RULE",
    "MATHS_RULE",
    "ask_for_choice",
    "ask_for_code",
    "ask_for_number",
    "turns_of",
]

MATHS_RULE = "the question, to be answered step by step with '#### NUMBER' at the end"
CHOICE_RULE = "the question and its choices, to be answered with a letter first and a sentence why"
CODE_RULE = "the function in a code block, to be completed"


def ask_for_number(question: str) -> str:
    """What a user asks about a word problem (GSM8K), so that the answer can be found."""
    return f"{question.strip()}\n\nThink step by step, and end your answer with a line '#### ' and the number alone."


def ask_for_choice(question: str, *, after_others: bool = False) -> str:
    """What a user asks about a question with choices, so that a short answer holds the letter."""
    asked = question.strip().removesuffix("Answer:").strip()
    last = "Answer the last question. " if after_others else ""
    return f"{asked}\n\n{last}Begin your answer with the letter of the right choice, then say in one sentence why."


def ask_for_code(prompt: str) -> str:
    """What a user asks about the beginning of a function (HumanEval)."""
    return (
        "Complete this Python function. Answer with the whole function in one code block.\n\n"
        f"```python\n{prompt.strip()}\n```"
    )


def turns_of(messages: Sequence[Any], where: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """System text, turns of the user, and the assistant's answers as references (for all turns, or none).

    Raises:
        UserError: messages without a user, out of order, or whose content is not text.
    """
    said: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(
                f'message {number} of {where} is not {{"role": ..., "content": TEXT}}: fix the record'
            )
        said.append((role, content))
    system = said.pop(0)[1] if said and said[0][0] == "system" else ""
    for number, (role, _) in enumerate(said):
        if role != (due := ("user", "assistant")[number % 2]):
            raise UserError(
                f"the messages of {where} have the role '{role}' where '{due}' is due: give a system message or none, "
                "then user and assistant in turn"
            )
    turns, answers = said[::2], said[1::2]
    if not turns or any(not content.strip() for _, content in turns):
        raise UserError(f"the messages of {where} have no text of the user: fix the record")
    references = tuple(content for _, content in answers)
    return system, tuple(content for _, content in turns), references if len(references) == len(turns) else ()
