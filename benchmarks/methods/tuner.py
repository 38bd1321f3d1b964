"""The tuner against an exhaustive grid: how near its choice comes, in what share of the time.

    python benchmarks/methods/tuner.py --data DIR [--prompts 12]

Built-in pair, temperature 1, 64 new tokens. First the tuner runs on the prompts, then every one of its candidates on
every one of these prompts, interleaved: the grid. The tuner's choice and the grid's best, each exact and within a drift
of 0.05, then run against each other on other prompts, because the best of many noisy measurements is partly luck.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import sprinter
from benchmarks.common import NEW_TOKENS, cells, heldout_prompts, option_parser, save, scratch
from benchmarks.smoke import sized
from sprinter.bench.arms import parse_arm
from sprinter.bench.harness import Harness
from sprinter.bench.journal import Memory
from sprinter.bench.sample import Sample, Suite
from sprinter.bench.settings import BenchSettings
from sprinter.tuning import TuneSettings, tune
from sprinter.tuning.candidates import PLAIN
from sprinter.tuning.race import grouped, speed_over

BUDGET = 0.05
FRESH = sized(24, 1)
MOST = sized(1000, 4)


def suite_of(prompts: Sequence[str]) -> Suite:
    """Prompts as a suite."""
    samples = tuple(Sample(str(n), "heldout", (prompt,)) for n, prompt in enumerate(prompts))
    return Suite("heldout", samples, NEW_TOKENS)


def run_all(
    pair: sprinter.Pair, specs: Sequence[str], prompts: Sequence[str], note: str
) -> tuple[Any, float]:
    """Groups of rows by spec, and the seconds that it took: all methods on all prompts, interleaved."""
    began, rows = time.monotonic(), Memory()

    def shown(done: int, wanted: int, what: str) -> None:
        print(f"\r{note} {done}/{wanted}", end="", file=sys.stderr)

    settings = BenchSettings((1.0,), NEW_TOKENS)
    harness = Harness(pair, [parse_arm(spec) for spec in specs], [suite_of(prompts)], settings, rows, shown)
    try:
        harness.run()
    finally:
        harness.close()
        print(file=sys.stderr)
    return grouped(rows.rows, specs), time.monotonic() - began


def best_of(found: Any, front: Sequence[dict[str, Any]], budget: float) -> str:
    """The fastest candidate of a grid whose measured drift is within a budget; 0: the fastest exact one."""

    def fits(one: dict[str, Any]) -> bool:
        group = found[one["spec"]]
        return one["lossless"] or (budget > 0 and group.drifts.sum() / group.scored.sum() <= budget)

    return max((one["spec"] for one in front if fits(one)), key=lambda spec: speed_over(found, spec)[0])


def compare(pair: sprinter.Pair, prompts: Sequence[str], fresh: Sequence[str]) -> dict[str, Any]:
    """Tuner, grid, and both choices on fresh prompts."""
    settings = TuneSettings(budgets=(BUDGET,), time_s=None, new_tokens=NEW_TOKENS)
    began = time.monotonic()
    profile = tune(pair, suite_of(prompts), scratch("tuner") / "profile.json", settings)
    tuner_s = time.monotonic() - began
    front = profile["front"][:MOST]
    chosen = {one["goal"]: one["spec"] for one in profile["chosen"]}
    specs = list(dict.fromkeys([PLAIN, *chosen.values(), *(one["spec"] for one in front)]))
    found, grid_s = run_all(pair, specs, prompts, "grid")
    front = [one for one in profile["front"] if one["spec"] in specs]
    best = {"exact": best_of(found, front, 0.0), f"drift<={BUDGET:g}": best_of(found, front, BUDGET)}
    finals = list(dict.fromkeys([PLAIN, *chosen.values(), *best.values()]))
    again, _ = run_all(pair, finals, fresh, "choices on fresh prompts")
    rows = [
        {
            "goal": goal,
            "tuner": chosen[goal],
            "grid": best[goal],
            "in_grid": speed_over(found, chosen[goal], best[goal]),
            "on_fresh_prompts": speed_over(again, chosen[goal], best[goal]),
            "tuner_speed_up": speed_over(again, chosen[goal]),
            "grid_speed_up": speed_over(again, best[goal]),
        }
        for goal in best
    ]
    return {
        "rows": rows,
        "time": {"tuner_s": tuner_s, "grid_s": grid_s, "share": tuner_s / grid_s, "candidates": len(specs)},
        "rounds": profile["race"]["rounds"],
    }


def table(found: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    spent = found["time"]
    lines = [
        f"{spent['candidates']} candidates: the tuner took {spent['tuner_s']:.0f} s, the grid {spent['grid_s']:.0f} s "
        f"({spent['share']:.0%}). Speeds of the tuner's choice divided by those of the grid's best; 95 % intervals.",
        "",
        "| goal | the tuner's choice | the grid's best | in the grid | on other prompts |",
        "| --- " * 5 + "|",
    ]
    lines += [
        f"| {row['goal']} | `{row['tuner']}` | `{row['grid']}` | {cells(row['in_grid'])} "
        f"| {cells(row['on_fresh_prompts'])} |"
        for row in found["rows"]
    ]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(12, 2))
    return parser.parse_args()


def main() -> None:
    """Tune, run the grid, compare, write."""
    args, began = parse(), time.time()
    pair = sprinter.load_pair(compile=False)
    prompts = heldout_prompts(args.data, args.prompts + FRESH)
    found = compare(pair, prompts[: args.prompts], prompts[args.prompts :])
    save("methods/tuner", table(found), began, args.prompts, **found)


if __name__ == "__main__":
    main()
