"""Every method and transformers' own generation on three suites: one table with 95 % intervals.

    python benchmarks/bench/table.py --data DIR [--out DIR] [--more vllm:plain ...]

What ``sprinter bench -s spec-bench:60 -s wiki-summary:100 -s lm1b:100 -a methods -a peers -t 1 -t 0`` does, on the
built-in pair, with 64 new tokens a turn of spec-bench: arms interleaved prompt by prompt, meter complete, texts
judged. The whole results.json and the report stay in --out;
the summary goes to ``benchmarks/results``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import sprinter
from benchmarks.common import cells, command, option_parser, write_results
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.arms import parse_arms
from sprinter.bench.run import run_bench
from sprinter.bench.settings import BenchSettings
from sprinter.bench.suites import load_suite

ARMS = sized(("methods", "peers"), ("autoregressive", "speculative", "sprinter", "transformers:plain"))
SUITES = {
    "spec-bench": (60, sized(64, 8)),
    "wiki-summary": (100, sized(20, 8)),
    "lm1b": (100, sized(20, 8)),
}  # prompts, new tokens
BASES = ("autoregressive", "speculative", "transformers:plain", *sized(("transformers:assisted",), ()))


def table(summary: list[dict[str, Any]], temperatures: list[float]) -> str:
    """Markdown: all suites together, then each suite."""
    parts = []
    for suite in ("all", *SUITES):
        for temperature in temperatures:
            rows = [s for s in summary if s["suite"] == suite and s["temperature"] == temperature]
            parts += ["", f"**{suite}, temperature {temperature:g}**", "", *lines(rows)]
    return "\n".join(parts).strip()


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """One table, fastest arm first."""
    head = [
        "arm",
        "tokens/s",
        *(f"÷ {base}" for base in BASES[:3]),
        "target calls/token",
        "drift",
        "ROUGE-1",
        "log-likelihood a token",
        "wins or ties",
    ]
    found = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for s in sorted(rows, key=lambda s: -s["tokens_per_s"]):
        speeds = (cells(s["speed_over"][base]) if base in s["speed_over"] else "–" for base in BASES[:3])
        calls, drift = s["target_calls_per_token"], s["mean_drift"]
        quality = (s["quality"].get(name) for name in ("rouge1", "log_likelihood_per_token", "win_tie"))
        values = [f"`{s['arm']}`", f"{s['tokens_per_s']:.0f}", *speeds]
        values += [f"{calls[0]:.3f}" if calls else "–", cells(drift, 3) if drift else "–"]
        values += [f"{value[0]:.3f}" if value else "–" for value in quality]
        found.append(f"| {' | '.join(values)} |")
    return found


class Progress:
    """A line now and then."""

    def __init__(self) -> None:
        self._said = 0.0

    def __call__(self, done: int, wanted: int, note: str) -> None:
        if time.monotonic() - self._said > 30:
            self._said = time.monotonic()
            print(f"{done}/{wanted} {note}", file=sys.stderr, flush=True)


def main() -> None:
    """Run, or go on; write."""
    parser = option_parser(__doc__)
    parser.add_argument("--out", type=Path, default=scratch("bench") if SMOKE else Path("bench-results"))
    parser.add_argument(
        "--prompts", type=float, default=sized(1.0, 0.0), help="share of each suite's prompts, for a trial"
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=sized([1.0, 0.0], [1.0]))
    parser.add_argument("--more", nargs="+", default=[], metavar="ARM", help="more arms, such as vllm:plain")
    args = parser.parse_args()
    suites = [
        load_suite(name, args.data, limit=max(2, int(args.prompts * limit)), new_tokens=new_tokens)
        for name, (limit, new_tokens) in SUITES.items()
    ]
    settings = BenchSettings(temperatures=tuple(args.temperatures), bases=BASES)
    results = run_bench(
        sprinter.load_pair(compile=False),
        parse_arms([*ARMS, *args.more]),
        suites,
        settings,
        args.out,
        progress=Progress(),
    )
    kept = {key: value for key, value in results.items() if key not in ("rows", "analysis")}
    texts = sum(len(suite.samples) for suite in suites)
    facts = {
        "benchmark": "bench/table",
        "command": command("bench/table"),
        "prompts": texts,
        "new_tokens": "20 or 64",
    }
    write_results("bench/table", kept | facts, table(results["summary"], args.temperatures))


if __name__ == "__main__":
    main()
