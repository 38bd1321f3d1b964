"""How re-run tables of papers are reported: claims that numbers decide, tables, parts that can be resumed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sprinter
from benchmarks.common import cells, command, environment, option_parser, write_results
from benchmarks.smoke import sized
from sprinter.bench.statistics import BootstrapInterval
from sprinter.errors import UserError


@dataclass(frozen=True, slots=True)
class Check:
    """A measured number that ought to lie above (or below) a bound.

    Attributes:
        what: in a few words.
        value: with its interval.
        bound: what the claim needs.
        above: whether the value ought to be larger.
    """

    what: str
    value: BootstrapInterval
    bound: float
    above: bool = True

    @property
    def outcome(self) -> bool | None:
        """True or False where the whole interval lies on one side of the bound, else None."""
        _, low, high = self.value
        if low is None or high is None:
            return None
        if not self.above:
            return True if high < self.bound else False if low >= self.bound else None
        return True if low > self.bound else False if high <= self.bound else None

    def line(self) -> str:
        """What was measured, what was asked, whether it is so."""
        digits = 3 if abs(self.value[0]) < 1 else 2 if abs(self.value[0]) < 10 else 1
        answer = {True: "yes", False: "no", None: "undecided"}[self.outcome]
        return (
            f"{self.what} {cells(self.value, digits)} {'>' if self.above else '<'} {self.bound:g}: {answer}"
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper says, with its numbers, and the checks that it is broken into."""

    says: str
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        """Holds (all checks), does not hold (none shown, some refuted), holds in part, or undecided."""
        outcomes = [check.outcome for check in self.checks]
        if all(outcome is True for outcome in outcomes):
            return "holds"
        if True in outcomes:
            return "holds in part"
        return "does not hold" if False in outcomes else "undecided"

    def line(self) -> str:
        """Markdown: claim, verdict, and what the numbers say."""
        outcomes = [check.outcome for check in self.checks]
        counts = (
            f"{outcomes.count(True)} shown, {outcomes.count(False)} refuted, {outcomes.count(None)} undecided"
        )
        told = "; ".join(check.line() for check in self.checks)
        return f"- {self.says} **{self.verdict[0].upper()}{self.verdict[1:]}** ({counts}): {told}."

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {"verdict": self.verdict, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Table:
    """One re-run table.

    Attributes:
        title: paper and table.
        rerun: what is re-run: data set, methods, settings, and the proxy, if any.
        head, rows: of the Markdown table.
        claims: what is claimed of it, with the paper's numbers.
    """

    title: str
    rerun: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    claims: Sequence[Claim] = ()

    def markdown(self) -> str:
        """Heading, text, table, verdicts."""
        lines = [f"| {' | '.join(self.head)} |", "| --- " * len(self.head) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        parts = [f"### {self.title}", self.rerun, "\n".join(lines)]
        parts += ["\n".join(claim.line() for claim in self.claims)] if self.claims else []
        return "\n\n".join(parts)

    def json(self) -> dict[str, Any]:
        """As JSON values."""
        plain = {
            "title": self.title,
            "rerun": self.rerun,
            "head": list(self.head),
            "rows": [*map(list, self.rows)],
        }
        claims = [claim.facts() for claim in self.claims]
        return {**plain, "claims": claims, "markdown": self.markdown()}


TINY = {"gate_texts": 40, "tuning_prompts": 1}  # counts with --smoke; 2 of all else
Part = Callable[[sprinter.Pair, argparse.Namespace], list[Table]]


def run_parts(name: str, doc: str, parts: Mapping[str, Part], new_tokens: int, **counts: int) -> None:
    """Command line, parts in turn, results saved after each.

    Args:
        name: of the script and its results.
        doc: its docstring.
        parts: by name; each gives its tables.
        new_tokens: what the results file says of the texts' length.
        counts: options that are whole numbers, with their defaults.
    """
    parser = option_parser(doc)
    for option, default in counts.items():
        tiny = min(default, TINY.get(option, 2))
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, default=sized(default, tiny))
    args = parser.parse_args()
    began, settings = time.time(), {option: getattr(args, option) for option in counts}
    done: dict[str, Any] = {}
    pair = sprinter.load_pair(compile=False, prefix_cache_bytes=0)
    for part, work in parts.items():
        started = time.time()
        try:
            tables = work(pair, args)
        except UserError as error:
            sys.exit(f"error: {error}")
        seconds = round(time.time() - started, 1)
        done[part] = {"settings": settings, "seconds": seconds, "tables": [table.json() for table in tables]}
        _save(name, doc, done, new_tokens, began)


def about(doc: str) -> str:
    """A script's docstring as Markdown, without its command line."""
    return "\n\n".join(part for part in doc.strip().split("\n\n") if not part.startswith("    "))


def _save(name: str, doc: str, parts: Mapping[str, Any], new_tokens: int, began: float) -> None:
    tables = [table for part in parts.values() for table in part["tables"]]
    results = {
        "benchmark": name,
        "command": command(),
        "environment": environment(),
        "new_tokens": new_tokens,
        "verdicts": {f"{t['title']} / {c['says']}": c["verdict"] for t in tables for c in t["claims"]},
        "parts": dict(parts),
        "seconds": round(time.time() - began, 1),
    }
    write_results(name, results, "\n\n".join([about(doc), *(table["markdown"] for table in tables)]))
