"""The four papers, and how one is run and written."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from sprinter.bench.environment import BusyCores, environment, pair_facts
from sprinter.decode.checks import one_of
from sprinter.errors import UserError
from sprinter.files import write_atomic, writing
from sprinter.models.pair import builtin_paths
from sprinter.plots import no_plots
from sprinter.reproduce.claims import PaperTable
from sprinter.reproduce.fsd import FSD
from sprinter.reproduce.sprinter import SPRINTER
from sprinter.reproduce.study import Paper, Study
from sprinter.reproduce.svip import SVIP
from sprinter.reproduce.yin import YIN

__all__ = ["PAPERS", "check_suites", "page", "reproduce", "trials"]

QUIET = 0.2
"""Cores that other programs may keep busy without a word."""
BUILTIN = "the built-in pair, which has learned stories alone; these prompts are of other kinds"
KEY = (
    "Each claim has a verdict, and its checks: the measured value with its 95 % interval over prompts, the bound, and "
    "whether the whole interval passes it."
)
PAPERS: Mapping[str, Paper] = {"sprinter": SPRINTER, "svip": SVIP, "fsd": FSD, "yin": YIN}


def reproduce(name: str, study: Study, parts: Sequence[str] = (), command: str = "") -> dict[str, Any]:
    """Run parts of a paper's protocol and write ``NAME.json`` and ``NAME.md`` into the study's directory, after each.

    Args:
        name: key of ``PAPERS``.
        parts: some of the paper's parts; (): all.
        command: command line, stored with the results.

    Returns:
        The content of the JSON: {"paper", "command", "environment", "pair", "settings", "verdicts", "parts",
        "seconds"}.

    Raises:
        UserError: no such part or suite, and whatever a run of the bench refuses.
    """
    paper, began = PAPERS[name], time.time()
    for part in parts:
        one_of("part", part, paper.parts)
    check_suites(name, study.suites)
    before, busy, results, file = environment(), BusyCores(), dict[str, Any](), study.out / f"{name}.json"
    there = json.loads(file.read_text(encoding="utf-8")) if file.is_file() and not study.restart else {}
    own = study.pair.models.target.id == str(builtin_paths()["target"])
    named = {role: one["name"] for role, one in pair_facts(study.pair).items() if "name" in one}
    names = BUILTIN if own else ", ".join(f"{role} {name}" for role, name in named.items())
    done: dict[str, list[PaperTable]] = {}
    for part in parts or paper.parts:
        done[part] = paper.parts[part](study)
        tables = [table for part in done.values() for table in part]
        where = {**before, "load_at_end": environment()["load"], "busy_with_others": busy.others()}
        seconds = round(time.time() - began, 1)
        if there and not study.asked:  # tables anew, of answers that an earlier call asked for
            where = {
                **there["environment"], "commit_of_tables": before["commit"],
                "dirty": there["environment"]["dirty"] or before["dirty"],
            }  # fmt: skip
            seconds = there["seconds"]
        results = {
            "paper": name, "command": command, "environment": where, "models": names, "pair": pair_facts(study.pair),
            "settings": {
                "prompts": study.prompts, "tuning_prompts": study.tuning, "new_tokens": study.new_tokens,
                "repeats": study.repeats, "gate_texts": study.settings.gate_texts,
                "suites": [*study.suites],
            },
            "verdicts": {
                f"{table.title}: {claim.says}": table.verdict(claim) for table in tables for claim in table.claims
            },
            "parts": {part: [table.facts() for table in made] for part, made in done.items()},
            "calls": study.calls,
            "seconds": seconds,
        }  # fmt: skip
        pictures = [table.picture for table in tables if table.picture is not None and no_plots() is None]
        with writing(file):
            write_atomic(file, json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            for one in pictures:
                write_atomic(study.out / f"{name}-{one.name}.png", one.png())
            write_atomic(study.out / f"{name}.md", page(results, name) + "\n")
    return results


def check_suites(paper: str, suites: Sequence[str]) -> None:
    """Raise a UserError where a paper cannot be measured on these suites alone."""
    if suites and not PAPERS[paper].suites:
        raise UserError(f"{paper} needs all of its prompts: leave --suite out")
    for suite in suites:
        one_of("suite", suite, PAPERS[paper].suites)


def page(results: Mapping[str, Any], pictures: str) -> str:
    """The page of a run: the paper, how it was run, each table with its claims.

    Args:
        results: as ``reproduce`` returns them.
        pictures: what the names of their files begin with.
    """
    paper, where = PAPERS[results["paper"]], results["environment"]
    machine = f"{where['cpu']}, {where['threads']} of {where['cores']} cores"
    load = f"load {where['load']} to {where['load_at_end']}"
    load += f" in the last of {results['calls']} calls" if results.get("calls", 1) > 1 else ""
    tables = where.get("commit_of_tables", where["commit"])
    anew = "" if tables == where["commit"] else f" (tables: {tables})"
    pair = "" if "--target" in results["command"] else f" Pair: {results['models']}."
    run = f"`{results['command']}` on {machine}, {load}, commit {where['commit']}{anew}.{pair}"
    if (others := where.get("busy_with_others") or 0) > QUIET:
        run += (
            f" Other programs kept {others:.1f} cores busy meanwhile. The arms took turns, so ratios of speeds compare "
            "like with like; times are longer than on a quiet machine."
        )
    made = [PaperTable.of(one).markdown(pictures) for part in results["parts"].values() for one in part]
    parts = [f"# {paper.title}, measured again", f"{paper.about} {KEY}", run, *made]
    return "\n".join(line for text in "\n\n".join(parts).split("\n") for line in _wrapped(text))


def trials(results: Mapping[str, Any]) -> list[str]:
    """Titles of the tables that rest on too few prompts."""
    made = (PaperTable.of(one) for part in results["parts"].values() for one in part)
    return [table.title for table in made if table.trial]


def _wrapped(line: str) -> list[str]:
    """A line of prose in lines of at most 120 characters; rows of tables stay."""
    if line.startswith("|") or len(line) <= 120:
        return [line]
    more = "  " if line.startswith("- ") else "      " if line.startswith("    - ") else ""
    return wrap(line, 120, subsequent_indent=more, break_long_words=False, break_on_hyphens=False)
