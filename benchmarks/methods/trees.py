"""Trees against chains on the built-in pair: tokens per target call, nodes per call and speed.

    python benchmarks/methods/trees.py --data DIR [--prompts 60]

Paragraphs that the pair was not trained on, 64 new tokens each, temperatures 1, 0.7 and 0, all methods interleaved.
Every method is exact. ``against`` compares rules on the same drafter: traversal on drawn trees, block on chains.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import sprinter
from benchmarks.common import (
    TEMPERATURES,
    Arm,
    cells,
    grid,
    heldout_prompts,
    interleave,
    interval,
    method_arm,
    note_run,
    option_parser,
    speed_ratio,
    write_results,
)  # fmt: skip
from benchmarks.smoke import sized
from sprinter.bench.statistics import ratio_of_ratios

NAME = "methods/trees"
PLAIN, CHAIN = "autoregressive", "speculative(gamma=4)"
METHODS = (
    PLAIN, CHAIN, "block(gamma=4)", "specinfer(drafts=4, gamma=4)", "tree(expand=4, depth=4, nodes=8)",
    "tree(expand=8, depth=5, nodes=24)", "static-tree(widths=4x2x2)", "static-tree(widths=3x1x1x1)",
    "cape(counts=7x5x3x1, gamma=4)", "drafter=drawn(widths=3x2x1x1),accept=without,stop=never",
    "traversal(widths=3x2x1x1)",
)  # fmt: skip
AGAINST = (
    ("traversal(widths=3x2x1x1)", "drafter=drawn(widths=3x2x1x1),accept=without,stop=never"),
    ("block(gamma=4)", CHAIN),
)
"""(rule, other rule on the same drafter)."""


def measured(data: Path, prompts: int) -> dict[str, Any]:
    """One row a temperature and method, and the comparisons."""
    pair, texts = sprinter.load_pair(compile=False), heldout_prompts(data, prompts)
    rows: list[dict[str, Any]] = []
    against: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        arms: dict[str, Arm] = {
            name: method_arm(pair, name, temperature) for name in sized(METHODS, METHODS[:5])
        }
        interleave([*arms.values()], texts, note=f"T={temperature}")
        for name, arm in arms.items():
            rows.append(
                {
                    "temperature": temperature,
                    "method": name,
                    "tokens_per_call": interval(arm.tokens, arm.calls),
                    "nodes_per_call": arm.total("drafted") / arm.total("target_calls"),
                    "draft_steps_per_token": arm.total("draft_steps") / arm.total("new_tokens"),
                    "tokens_per_s": float(arm.tokens.sum() / arm.busy_s.sum()),
                    "speed_over_autoregressive": speed_ratio(arm, arms[PLAIN]),
                    "speed_over_speculative": speed_ratio(arm, arms[CHAIN]),
                }
            )
        for one, other in AGAINST:
            if one in arms and other in arms:
                own, base = arms[one], arms[other]
                gain = ratio_of_ratios((own.tokens, own.calls), (base.tokens, base.calls))
                against.append(
                    {"temperature": temperature, "rule": one, "other": other, "gain_in_tokens": gain}
                )
    return {"rows": rows, "against": against}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    shown = [
        f"{row['temperature']:g} | `{row['method']}` | {cells(row['tokens_per_call'])} | {row['nodes_per_call']:.1f} "
        f"| {row['draft_steps_per_token']:.2f} | {row['tokens_per_s']:.0f} | {cells(row['speed_over_autoregressive'])} "
        f"| {cells(row['speed_over_speculative'])}"
        for row in results["rows"]
    ]
    gains = [
        f"{row['temperature']:g} | `{row['rule']}` | `{row['other']}` | {cells(row['gain_in_tokens'], 3)}"
        for row in results["against"]
    ]
    head = "T | method | tokens/target call | nodes/call | draft steps/token | tokens/s"
    head += " | ÷ autoregressive | ÷ speculative"
    return "\n".join([*grid(head, shown), "", *grid("T | rule | ÷ | tokens/target call", gains)])


def main() -> None:
    """Measure, write."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(60, 2))
    args = parser.parse_args()
    began, results = time.time(), {"benchmark": NAME}
    results |= measured(args.data, args.prompts) | {"prompts": args.prompts}
    note_run(results, "builtin", began)
    write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
