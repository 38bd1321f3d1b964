"""Compare each arm with a base arm: one duel per prompt, verdicts of a judge, win-tie rates.

The offline judge prefers the answer with the higher log-likelihood per token under the target; a difference within a
band is a tie. It needs no network. It measures how close an arm stays to the target, not how good a text is: likely
text may be dull. A language model as judge (Zheng et al. 2023) is asked in both orders; a verdict counts only if both
orders agree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Literal

from sprinter.bench.journal import KeptLines, hash_of
from sprinter.bench.quality.endpoint import Endpoint, JudgeError, Refused
from sprinter.bench.sample import Sample

__all__ = ["Duel", "DuelJudge", "LikelihoodJudge", "LlmJudge", "combine", "duels", "judge_rows", "messages_of",
           "verdict_of"]  # fmt: skip

DuelVerdict = Literal["win", "tie", "loss"]
"""Result of the arm against the base arm."""
Choice = Literal["A", "B", "C"]
DuelRow = Mapping[str, Any]
"""A row of a results file."""


@dataclass(frozen=True, slots=True)
class Duel:
    """Two answers to one sample.

    Attributes:
        sample: the question.
        mine, base: texts of the arm and of the base arm, one per turn.
        mine_score, base_score: log-likelihood per token under the target; None: not measured.
    """

    sample: Sample
    mine: tuple[str, ...]
    base: tuple[str, ...]
    mine_score: float | None = None
    base_score: float | None = None


@dataclass(frozen=True, slots=True)
class LikelihoodJudge:
    """The offline judge.

    Attributes:
        band: difference in log-likelihood per token (nats) up to which two answers tie; 0.05 is 5 % of perplexity.
    """

    band: float = 0.05
    workers: int = 1

    def decide(self, duel: Duel) -> DuelVerdict | None:
        """Prefer the answer with the higher log-likelihood per token; None: not both were measured."""
        if duel.mine_score is None or duel.base_score is None:
            return None
        ahead = duel.mine_score - duel.base_score
        return "tie" if abs(ahead) <= self.band else "win" if ahead > 0 else "loss"

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {"judge": "likelihood", "band": self.band}

    def close(self) -> None:
        """Do nothing: no file is open."""


# --- a language model ---
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
    """

    endpoint: Endpoint
    replies: KeptLines
    price_in: float | None = None
    price_out: float | None = None
    workers: int = 4
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)
    _turns: dict[str, Lock] = field(default_factory=dict, init=False, repr=False)

    def decide(self, duel: Duel) -> DuelVerdict | None:
        """Ask in both orders; None: a reply could not be read or had.

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
            "judge": "llm", "model": self.endpoint.model, "url": self.endpoint.url, "replies": self.replies.path.name,
            **{name: counts[name] for name in ("asked", "reused", "refused", "unreadable", "uncounted")},
            "order_swayed": counts["swayed"] / counts["decided"] if counts["decided"] else None,
            **{name: counts[f"new_{name}"] for name in ("prompt_tokens", "completion_tokens")},
            "cost": self._cost("new_"), "cost_with_reused": self._cost("new_", "old_"),
        }  # fmt: skip

    def close(self) -> None:
        """Close the replies' file."""
        self.replies.close()

    def _ask(self, messages: list[dict[str, str]]) -> Choice | None:
        key = hash_of([self.endpoint.model, messages])
        with self._lock:
            turn = self._turns.setdefault(key, Lock())
        with turn:  # two arms may have given the same answer
            record = self.replies.get(key)
            self._count(reused=int(record is not None))
            when = "new_" if record is None else "old_"
            if record is None:
                try:
                    reply = self.endpoint.ask(messages)
                except Refused:
                    self._count(refused=1)
                    return None
                record = {
                    "key": key, "model": self.endpoint.model, "messages": messages, "reply": reply.text,
                    "prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens,
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                }  # fmt: skip
                self.replies.add(record)
                self._count(asked=1, uncounted=int(reply.prompt_tokens is None))
        tokens = {when + name: record.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")}
        choice = verdict_of(record["reply"])
        self._count(**tokens, unreadable=int(choice is None))
        return choice

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def _cost(self, *parts: str) -> float | None:
        if self.price_in is None or self.price_out is None:
            return None
        price = {"prompt_tokens": self.price_in, "completion_tokens": self.price_out}
        return sum(self._counts[part + name] * each for part in parts for name, each in price.items()) / 1e6


# --- all duels of a run ---
DuelJudge = LikelihoodJudge | LlmJudge
"""Up to ``workers`` threads call ``decide``, which raises a ``JudgeError`` if no further duel can be decided."""


def duels(
    rows: Sequence[DuelRow], samples: Mapping[tuple[str, str], Sample], base: str
) -> list[tuple[int, Duel]]:
    """(index of the row, duel) for each row of another arm whose sample, temperature and repeat the base arm answered.

    Args:
        rows: as in a results file, with "quality".
        samples: by suite and sample id.
        base: name of the base arm.
    """
    places = ("suite", "question_id", "temperature", "repeat")
    theirs = {tuple(row[name] for name in places): row for row in rows if row["model_id"] == base}
    found = []
    for i, row in enumerate(rows):
        other = theirs.get(tuple(row[name] for name in places))
        if other is not None and row["model_id"] != base:
            sample = samples[row["suite"], row["question_id"]]
            (mine, score), (base_texts, base_score) = _answer(row), _answer(other)
            found.append((i, Duel(sample, mine, base_texts, score, base_score)))
    return found


def _answer(row: DuelRow) -> tuple[tuple[str, ...], float | None]:
    return tuple(row["choices"][0]["turns"]), row.get("quality", {}).get("log_likelihood_per_token")


def judge_rows(
    rows: Sequence[DuelRow],
    samples: Mapping[tuple[str, str], Sample],
    base: str,
    judge: DuelJudge,
    progress: Callable[[int, int], None] = lambda done, wanted: None,
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Verdicts of all duels.

    Equal answers tie without being judged. A judge that cannot continue is marked as failed, and no row gets a score,
    because the rows judged first would not be a fair sample.

    Args:
        judge: decides the duels.
        progress: called with (duels done, duels in total).

    Returns:
        For each row {"win", "win_tie"} (each 0 or 1; empty without a verdict), to be added to its "quality"; and facts
        for the results file: "base", "status" ("ok" or "failed"), "error" (one line or None), "duels", "equal",
        "undecided", and the judge's own.
    """
    wanted = duels(rows, samples, base)
    facts: dict[str, Any] = {"base": base, "status": "ok", "error": None, "duels": len(wanted)}
    verdicts: list[DuelVerdict | None] = []
    pool = ThreadPoolExecutor(judge.workers)
    try:
        decide = lambda item: "tie" if item[1].mine == item[1].base else judge.decide(item[1])  # noqa: E731
        for verdict in pool.map(decide, wanted):
            verdicts.append(verdict)
            progress(len(verdicts), len(wanted))
    except JudgeError as error:
        facts |= {"status": "failed", "error": str(error)}
    finally:
        pool.shutdown(cancel_futures=True)
    facts |= {"equal": sum(duel.mine == duel.base for _, duel in wanted), "undecided": verdicts.count(None)}
    scores: list[dict[str, float]] = [{} for _ in rows]
    if facts["status"] == "ok":
        for (i, _), verdict in zip(wanted, verdicts, strict=True):
            if verdict:
                scores[i] = {"win": float(verdict == "win"), "win_tie": float(verdict != "loss")}
    return scores, facts | judge.facts()
