"""A language model as judge (Zheng et al. 2023), asked in both orders; a verdict counts only if both orders agree."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Literal

from sprinter.bench.quality.duels import Duel, DuelVerdict
from sprinter.bench.quality.endpoint import Endpoint, Refused
from sprinter.bench.quality.replies import Replies, key_of
from sprinter.decode.checks import at_least, between

__all__ = ["LlmJudge", "combine", "messages_of", "verdict_of"]

Choice = Literal["A", "B", "C"]

_SYSTEM = """\
You compare two answers to the same request, A and B, and say which is better. Look at accuracy first, then at the \
level of detail, then at clarity. If a request is the beginning of a text, the answers go on from it. Neither the \
order of the answers nor their length makes one better. Both may have been cut off at the same limit: do not mind that.
Give your reason in at most two sentences. Then end with [[A]] if A is better, [[B]] if B is better, [[C]] if they \
are equally good or bad."""
_MARK = re.compile(r"\[\[\s*([ABC])\s*\]\]")


def messages_of(duel: Duel, swapped: bool) -> list[dict[str, str]]:
    """Messages for the judge; A is the arm's answer, or the base arm's if ``swapped``."""
    texts = (duel.base, duel.mine) if swapped else (duel.mine, duel.base)
    turns = duel.sample.turns
    parts = []
    for i in range(min(len(turns), max(map(len, texts)))):
        parts.append(f"<request>\n{turns[i]}\n</request>")
        for name, text in zip("AB", texts, strict=True):
            answer = text[i] if i < len(text) else ""
            parts.append(f"<answer {name}>\n{answer}\n</answer {name}>")
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "\n\n".join(parts)}]


def verdict_of(text: str) -> Choice | None:
    """Last mark ([[A]], [[B]] or [[C]]) in a reply; None: there is none."""
    marks = _MARK.findall(text)
    return marks[-1] if marks else None


def combine(straight: Choice, swapped: Choice) -> DuelVerdict:
    """Combine both orders: A is the arm in the first and the base arm in the second. A disagreement is a tie."""
    if straight == "A" and swapped == "B":
        return "win"
    return "loss" if straight == "B" and swapped == "A" else "tie"


@dataclass
class LlmJudge:
    """Judge that asks a model behind an endpoint. Call ``close`` after use.

    Attributes:
        endpoint: the endpoint.
        replies: where replies are stored; a question with a stored reply is not asked again.
        price_in, price_out: prices per million tokens, in any currency; None: costs are not reported.
        workers: number of concurrent questions.

    Raises:
        UserError: a number out of range.
    """

    endpoint: Endpoint
    replies: Replies
    price_in: float | None = None
    price_out: float | None = None
    workers: int = 4
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)
    _turns: dict[str, Lock] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 1)
        for name in ("price_in", "price_out"):
            if getattr(self, name) is not None:
                between(name, getattr(self, name), 0, 1e6)

    def decide(self, duel: Duel) -> DuelVerdict | None:
        """Ask in both orders.

        Raises:
            JudgeError: the endpoint is down.
            UserError: the replies cannot be stored.
        """
        straight, swapped = (self._ask(messages_of(duel, turned)) for turned in (False, True))
        if straight is None or swapped is None:
            return None
        self._count(decided=1, swayed=int(straight == swapped != "C"))
        return combine(straight, swapped)

    def facts(self) -> dict[str, Any]:
        """As JSON values: tokens, cost (of this run, and of all replies used), how often the orders disagreed."""
        counts = self._counts
        return {
            "judge": "llm",
            "model": self.endpoint.model,
            "url": self.endpoint.url,
            "asked": counts["asked"],
            "reused": counts["reused"],
            "refused": counts["refused"],
            "unreadable": counts["unreadable"],
            "order_swayed": counts["swayed"] / counts["decided"] if counts["decided"] else None,
            "prompt_tokens": counts["new_prompt_tokens"],
            "completion_tokens": counts["new_completion_tokens"],
            "uncounted": counts["uncounted"],
            "cost": self._cost("new_"),
            "cost_with_reused": self._cost("new_", "old_"),
            "replies": self.replies.path.name,
        }

    def close(self) -> None:
        """Close the replies' file."""
        self.replies.close()

    def _ask(self, messages: list[dict[str, str]]) -> Choice | None:
        key = key_of([self.endpoint.model, messages])
        with self._lock:
            turn = self._turns.setdefault(key, Lock())
        with turn:  # two arms may have given the same answer
            return self._ask_once(key, messages)

    def _ask_once(self, key: str, messages: list[dict[str, str]]) -> Choice | None:
        record = self.replies.get(key)
        if record is None:
            try:
                reply = self.endpoint.ask(messages)
            except Refused:
                self._count(refused=1)
                return None
            record = {
                "key": key,
                "model": self.endpoint.model,
                "messages": messages,
                "reply": reply.text,
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": reply.completion_tokens,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            self.replies.add(record)
            self._count(asked=1, uncounted=int(reply.prompt_tokens is None))
            self._spend(record, "new_")
        else:
            self._count(reused=1)
            self._spend(record, "old_")
        choice = verdict_of(record["reply"])
        if choice is None:
            self._count(unreadable=1)
        return choice

    def _spend(self, record: dict[str, Any], when: str) -> None:
        self._count(**{when + name: record.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")})

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def _cost(self, *parts: str) -> float | None:
        if self.price_in is None or self.price_out is None:
            return None
        tokens = [
            sum(self._counts[part + name] for part in parts)
            for name in ("prompt_tokens", "completion_tokens")
        ]
        return (tokens[0] * self.price_in + tokens[1] * self.price_out) / 1e6
