"""Names of the spans of a text that ``only=`` confines a lossy method to.

The loop asks ``Limits.lossy`` whether the next token may be lossy; ``sprinter.engine.spans`` answers from the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sprinter.errors import UserError, did_you_mean

__all__ = ["OUTSIDE", "SPANS", "TextSpan", "check_only"]


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A span of a text: what follows a match of ``opening``, up to the end of the next match of ``closing(match)``.

    The patterns match in a text that begins with a line feed, within ``reach`` characters or, with ``lines``, within a
    line of any length: what is behind its first ``reach`` characters may be blank, a backtick or something else.
    ``marks``: tokens that begin or end it, in tokenizers that have them as special tokens.
    """

    opening: re.Pattern[str]
    closing: Callable[[re.Match[str]], re.Pattern[str]]
    marks: tuple[str, ...] = ()
    reach: int = 128
    lines: bool = False

    def kept(self, text: str) -> str:
        """The end of a text in which no pattern matches, as short as a later match allows."""
        if not self.lines:
            return text[-self.reach :]
        line = text[text.rindex("\n") :]
        begin, rest = line[: self.reach], line[self.reach :]
        return begin + ("`" if "`" in rest else "x" if rest.strip(" \t") else rest[:1])


_FENCE = re.compile(r"\n[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)?(`{3,}(?=[^`\n]*\n)|~{3,})[^\n]*(?=\n)")


def _same_fence(opened: re.Match[str]) -> re.Pattern[str]:
    """A line with no more than this fence, or a longer one."""
    fence = opened[1]
    return re.compile(rf"\n[ \t>]*{fence[0]}{{{len(fence)},}}[ \t]*\r?(?=\n)")


SPANS: Mapping[str, TextSpan] = {
    "think": TextSpan(re.compile("<think>"), lambda opened: re.compile("</think>"), ("<think>", "</think>")),
    "code": TextSpan(_FENCE, _same_fence, lines=True),
}
"""By name: the thinking of a reasoning model, and fenced code blocks of Markdown, closing fence included."""

OUTSIDE = "not-"
"""Prefix of a name that stands for the text outside these spans."""


def check_only(only: str) -> None:
    """Raise a UserError unless this is the name of a span, or of the text outside one."""
    if not isinstance(only, str):
        raise UserError(f"only={only!r} is not a name of a span: give {', '.join(SPANS)}")
    if only.removeprefix(OUTSIDE) not in SPANS:
        raise did_you_mean("span", only, [*SPANS, *(OUTSIDE + name for name in SPANS)])
