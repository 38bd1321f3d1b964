"""What the benchmark scripts share: options, prompts, interleaved runs, bootstrap intervals, the record of a run."""

from __future__ import annotations

import argparse
import csv
import gc
import io
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import sprinter
from benchmarks.smoke import SMOKE, made_up_data, scratch, sized
from sprinter.bench.environment import environment as present_environment
from sprinter.bench.statistics import BootstrapInterval, ratio_of_ratios
from sprinter.bench.suites import load_suite
from sprinter.engine.generation import Generation
from sprinter.errors import UserError
from sprinter.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT / "scripts"))  # some benchmarks read what the pair was trained on

T = TypeVar("T")
RESULTS = scratch("results") if SMOKE else ROOT / "benchmarks" / "results"
PROMPT_WORDS = 200
LONGEST = 20
"""Lines of a table that a page shows; a longer one is CSV."""
NEW_TOKENS = sized(64, 8)
STARTED = {key: value for key, value in present_environment().items() if key in ("commit", "dirty", "load")}
"""Commit of the code that runs, and the load before it does: read at the script's start."""


def environment() -> dict[str, Any]:
    """Machine, threads, versions; commit and load at the script's start, and the load now."""
    now = present_environment()
    return {**now, **STARTED, "load_at_end": now["load"]}


def heldout_prompts(data: Path, count: int, skip: int = 0, longest: int = PROMPT_WORDS) -> list[str]:
    """First 30 % of the words of paragraphs that the built-in pair was not trained on, one document after another."""
    try:
        samples = load_suite("heldout", data, limit=skip + count, rule=f"words={longest}").samples
    except UserError as error:
        sys.exit(f"error: {error}")
    if len(samples) < skip + count:
        sys.exit(f"error: only {len(samples)} held-out paragraphs, {skip + count} are needed")
    return [" ".join(sample.turns[0].split()) for sample in samples[skip:]]


@dataclass
class Arm:
    """One way to generate, and what it gave on each prompt (and repeat)."""

    name: str
    run: Callable[[Any, int], Generation]
    outs: list[Generation] = field(default_factory=list)

    def total(self, name: str) -> float:
        """Sum of a field of the stats."""
        return float(sum(getattr(out.stats, name) for out in self.outs))

    @property
    def busy_s(self) -> np.ndarray:
        """Seconds a prompt, closing passes of the meter apart."""
        return np.array([out.stats.wall_s - out.stats.closing_s for out in self.outs])

    @property
    def tokens(self) -> np.ndarray:
        """New tokens a prompt."""
        return np.array([out.stats.new_tokens for out in self.outs])

    @property
    def calls(self) -> np.ndarray:
        """Target calls a prompt."""
        return np.array([out.stats.target_calls for out in self.outs])

    @property
    def drift(self) -> np.ndarray:
        """Sum of drifts a prompt (meter complete)."""
        return np.array([sum(map(_distance, out.tokens)) for out in self.outs])


def _distance(token: sprinter.Token) -> float:
    if token.distance is None:
        raise ValueError("a token was not scored: give meter='complete'")
    return token.distance


def in_turn(arms: Sequence[T], rounds: int, note: str) -> Iterator[tuple[int, T]]:
    """(round, arm): every arm in every round, in a rotated order; no garbage is collected but between rounds."""
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            shift = (i + i // len(arms)) % len(arms)
            for arm in [*arms[shift:], *arms[:shift]]:
                yield i, arm
            gc.collect()
            print(f"\r{note} {i + 1}/{rounds}", end="", file=sys.stderr)
    finally:
        gc.enable()
        print(file=sys.stderr)


def interleave(arms: Sequence[Arm], prompts: Sequence[Any], repeats: int = 1, note: str = "") -> None:
    """Every arm on every prompt in turn; one warm-up prompt is discarded.

    Raises:
        ValueError: an arm did not read its prompt itself.
    """
    for arm in arms:
        arm.run(prompts[0], 0)
    for i, arm in in_turn(arms, repeats * len(prompts), note):
        arm.outs.append(arm.run(prompts[i % len(prompts)], i))
        if arm.outs[-1].stats.cached_tokens:
            raise ValueError(
                f"{arm.name} found its prompt in the cache: load the pair with prefix_cache_bytes=0"
            )


def speed_ratio(arm: Arm, base: Arm) -> BootstrapInterval:
    """Tokens/s of ``arm`` over tokens/s of ``base``, paired by prompt: (value, low, high)."""
    return ratio_of_ratios((arm.tokens, arm.busy_s), (base.tokens, base.busy_s))


def method_arm(
    pair: sprinter.Pair, method: str, temperature: float, name: str = "", new_tokens: int = NEW_TOKENS
) -> Arm:
    """An arm that generates with a method, meter complete; named after the method unless ``name`` is given."""

    def run(prompt: str | Sequence[int], seed: int) -> Generation:
        return pair.generate(
            prompt, method=method, max_new_tokens=new_tokens, temperature=temperature, seed=seed, meter="complete"
        )  # fmt: skip

    return Arm(name or method, run)


def option_parser(doc: str | None, data: bool = True) -> argparse.ArgumentParser:
    """The options that all scripts have; ``doc`` is the script's docstring.

    Args:
        data: whether the script reads the data folder; with ``--smoke`` made-up text stands in for one that is not
            given.
    """
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # ``SMOKE`` looks for the whole word
    )
    if data:
        folder = made_up_data() if SMOKE else None
        parser.add_argument(
            "--data", type=Path, required=not SMOKE, default=folder, help="folder with the text files"
        )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny counts, to see that everything runs; nothing is kept"
    )
    return parser


def save(name: str, table: str, began: float, prompts: int, **facts: Any) -> None:
    """Results and where they were made; called after each part, so that nothing measured is lost."""
    results = {
        "benchmark": name,
        "command": command(),
        "environment": environment(),
        "prompts": prompts,
        "new_tokens": NEW_TOKENS,
        **facts,
        "seconds": round(time.time() - began, 1),
    }
    write_results(name, results, table)


def command(words: Sequence[str] = sys.argv) -> str:
    """The command line, byte for byte; what is published names no absolute path (``scripts/records.py``)."""
    return shlex.join(["python", *words])


def lines_of(results: dict[str, Any]) -> str:
    """JSON with a line for each fact: indented numbers would take twice the bytes."""
    facts = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in results.items())
    return "{\n" + ",\n".join(facts) + "\n}\n"


def write_results(name: str, results: dict[str, Any], table: str, show: bool = True) -> None:
    """``benchmarks/results/NAME.json``, and its table beside it; the last line on stdout is the JSON object.

    One call of a script is one run: nothing of an earlier one stays. A table of more than ``LONGEST`` lines is
    ``NAME.csv``, another ``NAME.md``. With ``--smoke`` they go into a temporary directory and the JSON says
    ``"smoke": true``. ``show=False``: nothing is printed, more is to come.
    """
    results = {**results, "smoke": True} if SMOKE else results
    path = RESULTS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    long = len(table.splitlines()) > LONGEST
    texts = {
        ".json": lines_of(results),
        ".csv" if long else ".md": as_csv(table) if long else table,
    }
    path.with_name(path.name + (".md" if long else ".csv")).unlink(missing_ok=True)
    for suffix, text in texts.items():
        write_atomic(path.with_name(path.name + suffix), text.rstrip("\n") + "\n")
    if show:
        print(table, file=sys.stderr)
        print(json.dumps(results))


def as_csv(markdown: str) -> str:
    """The tables of a page as CSV: each with a line of its own heads; the first column is what stands above it."""
    text, title = io.StringIO(), ""
    writer, lines = csv.writer(text, lineterminator="\n"), markdown.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if not line.startswith("|"):
            title = title if line.startswith("- ") or not line else line.strip("#* ")
        elif not line.startswith("| ---"):
            found = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            writer.writerow(["table" if not before.startswith("|") else title, *found])
    return text.getvalue()


def print_written(name: str, *paths: Path) -> None:
    """The last line of a script that draws or converts: one JSON object with what it wrote."""
    written = [str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path) for path in paths]
    print(json.dumps({"benchmark": name, "written": written, **({"smoke": True} if SMOKE else {})}))


def note_run(results: dict[str, Any], part: str, began: float) -> None:
    """How and where a part was measured."""
    done = {"command": command(), "seconds": round(time.time() - began, 1)}
    results.setdefault("runs", {})[part] = {**done, "environment": environment()}


def grid(head: str, rows: Sequence[str]) -> list[str]:
    """A Markdown table."""
    return [f"| {head} |", "| --- " * (head.count("|") + 1) + "|", *(f"| {row} |" for row in rows)]


def cells(values: BootstrapInterval, digits: int = 2) -> str:
    """value [low, high], or the value of a single prompt."""
    if None in values:
        return f"{values[0]:.{digits}f} (n=1)"
    return f"{values[0]:.{digits}f} [{values[1]:.{digits}f}, {values[2]:.{digits}f}]"
