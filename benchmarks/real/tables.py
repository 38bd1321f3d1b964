"""The papers' methods on a real instruct pair, in chat: accuracy, drift, calls and speed.

    python benchmarks/real/tables.py --data DIR --part named [--suites humaneval:40 gsm8k:40] [--temperatures 0]

Target and draft are GGUF files, by default Qwen2.5-Coder-1.5B-Instruct and 0.5B-Instruct (Q4_K_M), found as
``sprinter.load_pair`` finds them. The arms of a part take turns, prompt by prompt; each part holds the bases. A run
goes on where it was interrupted: the journal stays in --out. ``benchmarks/results/real/parts/PART.json`` holds one
line a text, from which ``collect.py`` makes the tables over all parts. HumanEval's programs run in the sandbox.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import sprinter
from benchmarks.common import RESULTS, cells, command, grid, option_parser, write_results
from benchmarks.real.arms import BASES, PARTS, SMOKE_ARMS
from benchmarks.real.collect import collect, read_parts
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.arms import parse_arms
from sprinter.bench.quality.measure import QualitySettings
from sprinter.bench.run import Extras, run_bench
from sprinter.bench.settings import BenchSettings
from sprinter.bench.suites import load_suite

TARGET = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
DRAFT = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
MARKS = ("pass_at_1", "exact_match")
"""Measures that say whether an answer is right."""
KEPT = ("suite", "question_id", "category", "temperature", "model_id", "lossless")


def right(quality: dict[str, float]) -> float | None:
    """Whether an answer is right, as far as its suite can say."""
    return next((quality[name] for name in MARKS if name in quality), None)


def compact(row: dict[str, Any]) -> dict[str, Any]:
    """One text of a run in short: what was asked, counts, seconds and whether the answer is right."""
    choice, quality = row["choices"][0], row.get("quality") or {}
    calls, steps = (None if None in row[name] else sum(row[name]) for name in ("target_calls", "draft_steps"))
    return {
        **{name: row[name] for name in KEPT},
        "right": right(quality),
        "rouge1": quality.get("rouge1"),
        "log_likelihood": quality.get("log_likelihood_per_token"),
        "prompt_tokens": sum(row["prompt_tokens"]),
        "new_tokens": sum(choice["new_tokens"]),
        "seconds": round(sum(choice["wall_time"]), 4),
        "ttft_s": round(sum(row["ttft_s"]), 4),
        "target_calls": calls,
        "draft_steps": steps,
        "trusted": row["origins"].get("trusted", 0),
        "drift_sum": row["drift_sum"],
        "drift_tokens": row["drift_tokens"],
    }


def table(summary: list[dict[str, Any]], suites: list[str], temperatures: list[float]) -> str:
    """Markdown: one table a suite and temperature, fastest arm first."""
    parts: list[str] = []
    for suite in suites:
        for temperature in temperatures:
            rows = [row for row in summary if row["suite"] == suite and row["temperature"] == temperature]
            parts += ["", f"**{suite}, temperature {temperature:g}**", "", *lines(rows)]
    return "\n".join(parts).strip()


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """One table."""
    head = [
        "arm", "tokens/s", *(f"÷ `{base}`" for base in BASES), "right", "drift", "target calls/token",
        "draft steps/token", "trusted",
    ]  # fmt: skip
    shown = []
    for row in sorted(rows, key=lambda row: -row["tokens_per_s"]):
        quality, calls = row["quality"], row["target_calls_per_token"]
        accuracy = right(quality)
        speeds = [cells(row["speed_over"][base]) if base in row["speed_over"] else "–" for base in BASES]
        drift, steps, trusted = row["mean_drift"], row["draft_steps_per_token"], row["trusted_share"]
        shown.append(
            " | ".join(
                [
                    f"`{row['arm']}`", f"{row['tokens_per_s']:.1f}", *speeds, cells(accuracy) if accuracy else "–",
                    cells(drift, 3) if drift else "–", f"{calls[0]:.3f}" if calls else "–",
                    "–" if steps is None else f"{steps:.3f}", "–" if trusted is None else f"{trusted:.2f}",
                ]
            )
        )  # fmt: skip
    return grid(" | ".join(head), shown)


class Progress:
    """A line every half minute."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, wanted: int, note: str) -> None:
        if time.monotonic() - self._said > 30:
            self._said = time.monotonic()
            print(f"{time.strftime('%H:%M')} {done}/{wanted} {note}", file=sys.stderr, flush=True)


def main() -> None:
    """Run a part, or go on with it; write."""
    parser = option_parser(__doc__)
    parser.add_argument("--part", choices=[*PARTS], default="named")
    parser.add_argument("--arms", nargs="+", help="these arms instead of the part's")
    parser.add_argument("--suites", nargs="+", default=sized(["humaneval:40", "gsm8k:40"], ["gsm8k:2"]))
    parser.add_argument("--new-tokens", type=int, default=sized(256, 8))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--target", default=sized(TARGET, None))
    parser.add_argument("--draft", default=sized(DRAFT, None))
    parser.add_argument("--gate", help="directory of a gate for the draft")
    parser.add_argument("--heads", nargs="+", default=(), help="directories of other heads for the draft")
    parser.add_argument("--out", type=Path, default=scratch("real") if SMOKE else Path(".work/real"))
    chosen = parser.parse_args()
    pair = sprinter.load_pair(chosen.target, chosen.draft, gate=chosen.gate, heads=chosen.heads)
    chat = bool(pair.tokenizer is not None and pair.tokenizer.chat_template)
    suites = [
        load_suite(name, chosen.data, limit=int(limit or 40), new_tokens=chosen.new_tokens, chat=chat)
        for name, _, limit in (suite.partition(":") for suite in chosen.suites)
    ]
    arms = parse_arms(chosen.arms or SMOKE_ARMS or PARTS[chosen.part])
    results = run_bench(
        pair, arms, suites,
        BenchSettings(temperatures=tuple(chosen.temperatures), bases=BASES),
        chosen.out / chosen.part,
        Extras(quality=QualitySettings(run_code=not SMOKE, likelihood=False), analysis=False),
        progress=Progress(),
    )  # fmt: skip
    kept = {key: value for key, value in results.items() if key not in ("rows", "analysis", "judge")}
    kept |= {
        "benchmark": "real/tables",
        "part": chosen.part,
        "command": command("real/tables"),
        "prompts": sum(len(suite.samples) for suite in suites),
        "new_tokens": chosen.new_tokens,
        "texts": [compact(row) for row in results["rows"]],
    }
    names = [suite.name for suite in suites]
    write_results(f"real/parts/{chosen.part}", kept, table(results["summary"], names, chosen.temperatures))
    collected, shown = collect(read_parts(RESULTS / "real" / "parts"))
    facts = {
        name: kept[name]
        for name in ("benchmark", "command", "environment", "prompts", "new_tokens", "seconds")
    }
    write_results("real/tables", facts | collected, shown)


if __name__ == "__main__":
    main()
