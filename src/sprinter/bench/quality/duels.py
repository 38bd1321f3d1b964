"""Compare each arm with a base arm: one duel per prompt, verdicts of a judge, win-tie rates.

The offline judge prefers the answer with the higher log-likelihood per token under the target; a difference within a
band is a tie. It needs no network. It measures how close an arm stays to the target, not how good a text is: likely
text may be dull.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sprinter.bench.sample import Sample
from sprinter.decode.checks import between
from sprinter.errors import SprinterError, UserError

__all__ = ["Duel", "DuelJudge", "DuelVerdict", "JudgeError", "LikelihoodJudge", "duels", "judge_rows"]

DuelVerdict = Literal["win", "tie", "loss"]
"""Result of the arm against the base arm."""
DuelRow = Mapping[str, Any]
"""A row of a results file."""

_SCORES: Mapping[DuelVerdict, dict[str, float]] = {
    "win": {"win": 1.0, "win_tie": 1.0},
    "tie": {"win": 0.0, "win_tie": 1.0},
    "loss": {"win": 0.0, "win_tie": 0.0},
}


class JudgeError(SprinterError):
    """The judge cannot continue; the message is one line."""


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


class DuelJudge(Protocol):
    """A judge of duels. Up to ``workers`` threads call ``decide`` concurrently."""

    @property
    def workers(self) -> int:
        """Number of concurrent duels."""
        ...

    def decide(self, duel: Duel) -> DuelVerdict | None:
        """Return the verdict; None if it could not be determined.

        Raises:
            JudgeError: no further duel can be decided.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """Facts for the results file: "judge", its settings and its cost."""
        ...


@dataclass(frozen=True, slots=True)
class LikelihoodJudge:
    """The offline judge.

    Attributes:
        band: difference in log-likelihood per token (nats) up to which two answers tie; 0.05 is 5 % of perplexity.
    """

    band: float = 0.05
    workers: int = 1

    def __post_init__(self) -> None:
        between("band", self.band, 0, 100)

    def decide(self, duel: Duel) -> DuelVerdict | None:
        """Prefer the answer with the higher log-likelihood per token."""
        if duel.mine_score is None or duel.base_score is None:
            return None
        ahead = duel.mine_score - duel.base_score
        return "tie" if abs(ahead) <= self.band else "win" if ahead > 0 else "loss"

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {"judge": "likelihood", "band": self.band}


def duels(
    rows: Sequence[DuelRow], samples: Mapping[tuple[str, str], Sample], base: str
) -> list[tuple[int, Duel]]:
    """(index of the row, duel) for each row of another arm whose sample, temperature and repeat the base arm answered.

    Args:
        rows: as in a results file, with "quality".
        samples: by suite and sample id.
        base: name of the base arm.

    Raises:
        UserError: the base arm has no row, or a row's sample is not there.
    """
    theirs = {_place(row): row for row in rows if row["model_id"] == base}
    if not theirs:
        raise UserError(f"there is no arm '{base}' to judge the others against: add it, or give another base")
    found = []
    for i, row in enumerate(rows):
        other = theirs.get(_place(row))
        if other is None or row["model_id"] == base:
            continue
        sample = samples.get((row["suite"], row["question_id"]))
        if sample is None:
            raise UserError(
                f"suite '{row['suite']}' has no sample '{row['question_id']}' any more: judge a new run"
            )
        found.append((i, Duel(sample, _texts(row), _texts(other), _score(row), _score(other))))
    return found


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

    Raises:
        UserError: see ``duels``.
    """
    wanted = duels(rows, samples, base)
    facts: dict[str, Any] = {"base": base, "status": "ok", "error": None, "duels": len(wanted)}
    verdicts: list[DuelVerdict | None] = []
    pool = ThreadPoolExecutor(judge.workers)
    try:
        for verdict in pool.map(lambda item: _decide(judge, item[1]), wanted):
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
            scores[i] = dict(_SCORES[verdict]) if verdict else {}
    return scores, facts | judge.facts()


def _decide(judge: DuelJudge, duel: Duel) -> DuelVerdict | None:
    return "tie" if duel.mine == duel.base else judge.decide(duel)


def _place(row: DuelRow) -> tuple[str, str, float, int]:
    return row["suite"], row["question_id"], row["temperature"], row["repeat"]


def _texts(row: DuelRow) -> tuple[str, ...]:
    return tuple(row["choices"][0]["turns"])


def _score(row: DuelRow) -> float | None:
    value = row.get("quality", {}).get("log_likelihood_per_token")
    return None if value is None else float(value)
