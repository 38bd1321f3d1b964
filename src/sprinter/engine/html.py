"""A generated text as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sprinter.decode.draft import Origin, Stats, Token

__all__ = ["to_html"]

# Tints of Okabe and Ito's palette, which all common kinds of colour vision can distinguish, under dark text.
_STYLES = {
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


def to_html(prompt: str | None, tokens: Sequence[Token], stats: Stats, ending: str) -> str:
    """Return HTML: a legend, the end of the prompt, each token in the colour of its origin, and the costs.

    All text is escaped. The tooltip of a token shows its id, origin, round and drift. Tokens without text are shown as
    ids.

    Args:
        prompt: None if it was given as token ids.
        ending: method and finish reason, shown before the costs.
    """
    origins = [origin for origin in Origin if any(token.origin is origin for token in tokens)]
    legend = " ".join(_span(_STYLES[origin], f" {_MEANINGS[origin]} ") for origin in origins)
    ids = not any(token.text for token in tokens)
    before = (prompt or "")[-_PROMPT_SHOWN:]
    words = [f"{token.id} " if ids else token.text for token in tokens]
    spans = [
        _span(_STYLES[token.origin], word, _facts(token))
        for token, word in zip(tokens, words, strict=True)
        if word
    ]
    calls = f"{stats.target_calls} target calls in {stats.rounds} rounds"
    end = f"{ending}: {stats.summary}; {calls}"
    return (
        f'<div><div style="font-size:85%">{legend}</div>'
        f'<pre style="white-space:pre-wrap;overflow-wrap:anywhere"><i>{escape(before)}</i>{"".join(spans)}</pre>'
        f'<div style="font-size:85%">{escape(end)}</div></div>'
    )


def _span(style: str, text: str, title: str = "") -> str:
    tooltip = f' title="{escape(title)}"' if title else ""
    return f'<span style="color:#111;{style}"{tooltip}>{escape(text)}</span>'


def _facts(token: Token) -> str:
    drift = "not measured" if token.drift is None else f"{token.drift:.4f}"
    return f"id {token.id}, {_MEANINGS[token.origin]}, round {token.round}, drift {drift}"
