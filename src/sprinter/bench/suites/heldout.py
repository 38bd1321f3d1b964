"""Held-out texts of the files that the built-in pair was trained on.

A document is cleaned of remains of the wiki extractor. It is held out if the sha256 of its text, as a number, is
divisible by 100; the split depends on nothing else.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Callable, Iterable

from sprinter.bench.suites.entry import SuiteRows
from sprinter.training.sources import SourceRecord, read_lines, read_records, text_of

__all__ = ["clean_wiki", "held_out", "stories", "wikinews", "wikipedia"]

# The extractor removes pronunciation templates and leaves their separators: "Einstein (; ]; 14 March" and "()".
_ORPHANS = re.compile(r"\((?:[\s;,:\]\[]*[;,:\]\[])\s*")
_EMPTY = re.compile(r" ?\(\s*\)")
_END = "<|endoftext|>"


def held_out(text: str) -> bool:
    """Whether the built-in pair was not trained on this text, a cleaned document of its sources."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 100 == 0


def clean_wiki(text: str) -> str:
    """Remove escapes and the remains of templates."""
    return _EMPTY.sub("", _ORPHANS.sub("(", html.unescape(text))).strip()


KeepText = Callable[[str], bool]


def wikipedia(source: str, keep: KeepText = held_out) -> SuiteRows:
    """Articles to keep of a file of ``<doc>`` blocks: records with "id", "category" and "text"."""
    texts = ((where, r, clean_wiki(text_of(r, "text", where))) for where, r in read_records(source))
    return _kept("wikipedia", texts, keep)


def wikinews(source: str, keep: KeepText = held_out) -> SuiteRows:
    """Articles to keep of a file of JSON lines, each under its title; redirects have no text."""

    def text(record: SourceRecord, where: str) -> str:
        body = text_of(record, "text", where)
        return clean_wiki(f"{text_of(record, 'title', where)}\n\n{body}") if body.strip() else ""

    return _kept("wikinews", ((where, r, text(r, where)) for where, r in read_records(source)), keep)


def stories(source: str, keep: KeepText = held_out) -> SuiteRows:
    """Stories to keep of a file that separates them by ``<|endoftext|>``, without the first and last (truncated)."""
    whole = "\n".join(line for _, line in read_lines(source)).split(_END)[1:-1]
    named = ((f"story {n} of '{source}'", {"id": str(n)}, text.strip()) for n, text in enumerate(whole, 1))
    return _kept("tinystories", named, keep)


def _kept(name: str, texts: Iterable[tuple[str, SourceRecord, str]], keep: KeepText) -> SuiteRows:
    seen: set[str] = set()
    for where, record, text in texts:
        if text and text not in seen and keep(text):
            seen.add(text)
            yield where, {"id": f"{name}/{record.get('id')}", "category": name, "text": text}
