"""A generation as a piece of HTML, for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from sprinter.decode.draft import Origin, Token

if TYPE_CHECKING:
    from sprinter.engine.generation import Generation

__all__ = ["to_html"]

# Tints of Okabe and Ito's colours, told apart by all common kinds of colour vision, under text that is always dark.
_LOOKS = {
    Origin.TRUSTED: "background:#f7d98c;text-decoration:underline",
    Origin.ACCEPTED: "background:#bfe2f6",
    Origin.REPLACEMENT: "background:#f0b090;font-weight:bold",
    Origin.BONUS: "background:#9fdcc5",
    Origin.TARGET: "background:#e4e4e4",
}
_MEANINGS = {
    Origin.TRUSTED: "trusted (unchecked)",
    Origin.ACCEPTED: "accepted",
    Origin.REPLACEMENT: "replacement",
    Origin.BONUS: "bonus",
    Origin.TARGET: "target",
}
_PROMPT_SHOWN = 400  # characters


def to_html(out: Generation) -> str:
    """The end of the prompt, then each token in the colour of its origin; a legend above, the costs below.

    All text is escaped. A token tells its id, origin, round and drift when it is pointed at. Of a generation without
    text the ids are shown.
    """
    origins = [origin for origin in Origin if any(token.origin is origin for token in out.tokens)]
    legend = " ".join(_span(_LOOKS[origin], f" {_MEANINGS[origin]} ") for origin in origins)
    ids = not any(token.text for token in out.tokens)
    prompt = (out.prompt or "")[-_PROMPT_SHOWN:]
    words = [f"{token.id} " if ids else token.text for token in out.tokens]
    tokens = [
        _span(_LOOKS[token.origin], word, _facts(token))
        for token, word in zip(out.tokens, words, strict=True)
        if word
    ]
    stats = out.stats
    calls = f"{stats.target_calls} target calls in {stats.rounds} rounds"
    end = f"{out.method}, {out.finish_reason}: {stats.summary}; {calls}"
    return (
        f'<div><div style="font-size:85%">{legend}</div>'
        f'<pre style="white-space:pre-wrap;overflow-wrap:anywhere"><i>{escape(prompt)}</i>{"".join(tokens)}</pre>'
        f'<div style="font-size:85%">{escape(end)}</div></div>'
    )


def _span(look: str, text: str, title: str = "") -> str:
    told = f' title="{escape(title)}"' if title else ""
    return f'<span style="color:#111;{look}"{told}>{escape(text)}</span>'


def _facts(token: Token) -> str:
    drift = "not measured" if token.drift is None else f"{token.drift:.4f}"
    return f"id {token.id}, {_MEANINGS[token.origin]}, round {token.round}, drift {drift}"
