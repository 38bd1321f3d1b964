"""Held-out texts of the files that the built-in pair was trained on.

A document is cleaned of remains of the wiki extractor. It is held out if the sha256 of its text, as a number, is
divisible by 100; the split depends on nothing else.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Callable, Iterator

from sprinter.bench.suites.entry import SuiteRows
from sprinter.training.sources import SourceRecord, read_lines, read_records, text_of

__all__ = ["MODULUS", "clean_wiki", "held_out", "stories", "wikinews", "wikipedia"]

MODULUS = 100

# The extractor removes pronunciation templates and leaves their separators: "Einstein (; ]; 14 March" and "()".
_ORPHANS = re.compile(r"\((?:[\s;,:\]\[]*[;,:\]\[])\s*")
_EMPTY = re.compile(r" ?\(\s*\)")
_END = "<|endoftext|>"


def held_out(text: str) -> bool:
    """Whether the built-in pair was not trained on this text, a cleaned document of its sources."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % MODULUS == 0


def clean_wiki(text: str) -> str:
    """Remove escapes and the remains of templates."""
    return _EMPTY.sub("", _ORPHANS.sub("(", html.unescape(text))).strip()


def wikipedia(source: str) -> SuiteRows:
    """Held-out articles of a file of ``<doc>`` blocks: records with "id", "category" and "text"."""
    return _kept("wikipedia", read_records(source), lambda r, where: clean_wiki(text_of(r, "text", where)))


def wikinews(source: str) -> SuiteRows:
    """Held-out articles of a file of JSON lines, each under its title; redirects have no text."""

    def text(record: SourceRecord, where: str) -> str:
        body = text_of(record, "text", where)
        return clean_wiki(f"{text_of(record, 'title', where)}\n\n{body}") if body.strip() else ""

    return _kept("wikinews", read_records(source), text)


def stories(source: str) -> SuiteRows:
    """Held-out stories of a file that separates them by ``<|endoftext|>``, without the first and last (truncated)."""
    return _kept("tinystories", _stories(source), lambda record, where: str(record["text"]))


def _stories(source: str) -> Iterator[tuple[str, SourceRecord]]:
    story: list[str] = []
    number = 0
    for _, line in read_lines(source):
        before, end, after = line.partition(_END)
        story.append(before)
        if end:
            if number:
                yield f"story {number} of '{source}'", {"id": str(number), "text": "\n".join(story).strip()}
            story, number = [after], number + 1


def _kept(name: str, rows: SuiteRows, text: Callable[[SourceRecord, str], str]) -> SuiteRows:
    seen: set[str] = set()
    for where, record in rows:
        whole = text(record, where)
        if whole and held_out(whole) and whole not in seen:
            seen.add(whole)
            yield where, {"id": f"{name}/{record.get('id')}", "category": name, "text": whole}
