"""Streams as a client sees them: time to the first text, times between events, tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

__all__ = ["StreamTimes", "latencies", "stream"]


@dataclass
class StreamTimes:
    """One streamed answer.

    Attributes:
        sent: seconds, of a monotonic clock.
        events: seconds from ``sent`` to each event that has text.
        tokens: of the text, as far as it was read.
        ids: of these tokens, if the request asks for the report of every token.
        ended: "done", "left" (by the client), or what went wrong.
        text: the text.
    """

    sent: float = field(default_factory=time.perf_counter)
    events: list[float] = field(default_factory=list)
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    ended: str = "closed early"
    text: str = ""

    def note(self, event: dict[str, Any]) -> None:
        """Read an event."""
        if "error" in event:
            self.ended = f"error: {event['error']}"
        for choice in event.get("choices", ()):
            if choice.get("text"):
                self.events.append(time.perf_counter() - self.sent)
                self.text += choice["text"]
        if told := event.get("sprinter"):
            self.tokens += len(told.get("tokens", ()))
            self.ids += [token["id"] for token in told.get("tokens", ())]
        if told := event.get("usage"):
            self.tokens = told["completion_tokens"]


async def stream(
    http: httpx2.AsyncClient, body: dict[str, Any], leave_after: int | None = None
) -> StreamTimes:
    """Stream one completion.

    Args:
        leave_after: close the connection after this many events with text; None: read to the end.
    """
    found = StreamTimes()
    try:
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                found.ended = f"status {answer.status_code}: {(await answer.aread())[:200]!r}"
                return found
            if leave_after == 0:
                found.ended = "left"
                return found
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    found.ended = "done" if found.ended == "closed early" else found.ended
                elif line.startswith("data: "):
                    found.note(json.loads(line[6:]))
                    if leave_after is not None and len(found.events) >= leave_after:
                        found.ended = "left"
                        return found
    except httpx2.HTTPError as error:
        found.ended = f"{type(error).__name__}: {error}"
    return found


def latencies(streams: Iterable[StreamTimes], seconds: float) -> dict[str, Any]:
    """Milliseconds to the first text and between events (median, 95th percentile), and tokens a second of all."""
    read = [one for one in streams if one.events]
    gaps = np.concatenate([np.diff(one.events) for one in read]) if read else np.array([])
    first = [one.events[0] for one in read]
    return {
        "streams": len(read),
        "first_ms": _middle_and_high(first),
        "between_ms": _middle_and_high(gaps),
        "tokens_per_event": sum(one.tokens for one in read) / max(1, sum(len(one.events) for one in read)),
        "tokens_per_s": sum(one.tokens for one in read) / seconds,
    }


def _middle_and_high(values: Sequence[float] | np.ndarray) -> list[float] | None:
    if len(values) == 0:
        return None
    return [round(1000 * float(value), 2) for value in np.percentile(values, [50, 95])]
