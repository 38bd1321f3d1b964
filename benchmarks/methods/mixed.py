"""Mixed traffic: code, maths, prose and chat in turn, one budget for all, against each fixed setting.

    python benchmarks/methods/mixed.py --data DIR [--pair qwen] [--texts 8] [--new-tokens 96] [--temperatures 0 1]
        [--fixed SPEC ...]

One text at a time; the arms take turns, text by text. A budget is asked as a user would: ``auto`` without a tuner, with
what it decides by itself. Beside it stand plain decoding, lookup and each lossless and lossy setting that a user might
have chosen for all. The best of them is chosen in hindsight, among those that drifted no more than the budget allows or
than ``auto`` did, whichever is more. Drifts are those of the same texts, metered outside the clock.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

import sprinter
from benchmarks.common import (
    cells,
    grid,
    in_turn,
    interval,
    note_run,
    option_parser,
    write_results,
)
from benchmarks.real.arms import DRAFT, RUNNING_TEXT, TARGET, questions
from benchmarks.smoke import sized
from sprinter.bench.arm import Ask
from sprinter.bench.arms import parse_arm
from sprinter.bench.statistics import BootstrapInterval, ratio_of_ratios
from sprinter.bench.suites import load_suite
from sprinter.laws import Sampling

NAME = "methods/mixed"
PLAIN = "autoregressive"
BUDGETS = sized((0.0, 0.02, 0.05), (0.05,))
FIXED = sized(
    (
        PLAIN, *(f"speculative(gamma={gamma})" for gamma in (2, 3, 5, 8)), "svip", "adaedl", "calibrated", "lookup",
        "hybrid", *(f"certain(threshold={entropy})" for entropy in (0.1, 0.3, 0.7)), "fuzzy(threshold=0.1)", "fuzzy",
    ),
    (PLAIN, "speculative(gamma=3)", "fuzzy"),
)  # fmt: skip
PAIRS: dict[str, dict[str, Any]] = {
    "builtin": {"suites": ("wikipedia", "wikinews", "lm1b", "tinystories"), "load": {}},
    "qwen": {
        "suites": ("humaneval", "gsm8k", "wiki-summary", "mt-bench"),
        "load": {"target": TARGET, "draft": DRAFT, "runner": "torch", "dtype": "gguf", "compile": False},
    },
}


@dataclass
class Timed:
    """What an arm gave, one entry a text."""

    kinds: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)

    def over(self, base: Timed, kind: str | None = None) -> BootstrapInterval:
        """Speed over that of another arm on the same texts."""
        rows = [i for i, one in enumerate(self.kinds) if kind in (None, one)]
        mine, theirs = (
            (np.array(one.tokens, dtype=float)[rows], np.array(one.seconds)[rows]) for one in (self, base)
        )
        return ratio_of_ratios(mine, theirs)


def budgeted(budget: float) -> str:
    """The arm that is asked by a budget."""
    return f"auto(budget={budget:g})"


def measure(pair: sprinter.Pair, chosen: Any, asked: Sequence[Any], temperature: float) -> dict[str, Timed]:
    """All arms in turn."""
    arms = {name: parse_arm(name) for name in [*chosen.fixed, *map(budgeted, BUDGETS)]}
    timed = {name: Timed() for name in arms}
    for arm in arms.values():
        arm.start(pair)
        first = asked[0]
        arm.answer(
            Ask(tuple(first.ids), 8, Sampling(temperature=temperature), 0, stop_token_ids=tuple(first.ends))
        )
    for i, name in in_turn([*arms], len(asked), f"T={temperature:g}"):
        made = arms[name].answer(
            Ask(
                tuple(asked[i].ids), chosen.new_tokens, Sampling(temperature=temperature), seed=i,
                stop_token_ids=tuple(asked[i].ends),
            )
        )  # fmt: skip
        one = timed[name]
        one.kinds.append(asked[i].suite)
        one.tokens.append(len(made.ids))
        one.seconds.append(made.wall_s)
        one.calls.append(int(made.target_calls or 0))
        one.drift.append(sum(made.drifts or ()))
    return timed


def rows_of(timed: Mapping[str, Timed], fixed: Sequence[str], temperature: float) -> list[dict[str, Any]]:
    """One row an arm, and for each budget the best fixed setting that drifted no more."""
    kinds = [*dict.fromkeys(timed[PLAIN].kinds)]
    rows = []
    for name, one in timed.items():
        tokens = np.array(one.tokens, dtype=float)
        rows.append(
            {
                "arm": name, "temperature": temperature, "texts": len(tokens),
                "tokens_per_s": float(tokens.sum() / sum(one.seconds)),
                "over_plain": one.over(timed[PLAIN]),
                "kinds": {kind: one.over(timed[PLAIN], kind)[0] for kind in kinds},
                "drift": interval(np.array(one.drift), tokens),
                "calls_per_token": float(sum(one.calls) / tokens.sum()),
            }
        )  # fmt: skip
    by_name = {row["arm"]: row for row in rows}
    for budget in BUDGETS:
        own = by_name[budgeted(budget)]
        allowed = [name for name in fixed if by_name[name]["drift"][0] <= max(budget, own["drift"][0])]
        best = max(allowed, key=lambda name: by_name[name]["tokens_per_s"])
        own |= {"best": best, "over_best": timed[own["arm"]].over(timed[best])}
    return rows


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines: list[str] = []
    for pair, of in results["pairs"].items():
        for temperature in dict.fromkeys(row["temperature"] for row in of["rows"]):
            rows = [row for row in of["rows"] if row["temperature"] == temperature]
            kinds = [*rows[0]["kinds"]]
            shown = [
                f"`{row['arm']}` | {row['tokens_per_s']:.1f} | {cells(row['over_plain'])} | "
                + " | ".join(f"{row['kinds'][kind]:.2f}" for kind in kinds)
                + f" | {cells(row['drift'], 4)} | {row['calls_per_token']:.3f} | "
                + (f"{cells(row['over_best'])} (`{row['best']}`)" if "best" in row else "–")
                for row in sorted(rows, key=lambda row: -row["tokens_per_s"])
            ]
            head = (
                f"arm | tokens/s | speed ÷ `{PLAIN}` | "
                + " | ".join(kinds)
                + " | drift | target calls/token | ÷ best fixed setting of no more drift"
            )
            lines += [
                f"**{pair}, temperature {temperature:g}**: {rows[0]['texts']} texts in turn",
                "",
                *grid(head, shown),
                "",
            ]
    return "\n".join(lines).strip()


def main() -> None:
    """Time; write after each temperature."""
    parser = option_parser(__doc__)
    parser.add_argument("--pair", choices=[*PAIRS], default=sized("qwen", "builtin"))
    parser.add_argument("--texts", type=int, default=sized(8, 1), help="of each kind")
    parser.add_argument("--new-tokens", type=int, default=sized(96, 6))
    parser.add_argument("--temperatures", nargs="+", type=float, default=sized([0.0, 1.0], [1.0]))
    parser.add_argument(
        "--fixed", nargs="+", default=FIXED, help="fixed settings to compare with; plain decoding too"
    )
    chosen = parser.parse_args()
    chosen.fixed = list(dict.fromkeys([PLAIN, *chosen.fixed]))
    settings = PAIRS[chosen.pair]
    load = dict(settings["load"])
    pair = sprinter.load_pair(load.pop("target", None), load.pop("draft", None), prefix_cache_bytes=0, **load)
    suites = [
        load_suite(
            name, chosen.data, limit=chosen.texts, new_tokens=chosen.new_tokens, tokenizer=pair.tokenizer,
            chat=chosen.pair != "builtin" and name not in RUNNING_TEXT,
        )
        for name in sized(settings["suites"], ("lm1b",))
    ]  # fmt: skip
    by_suite = [questions(pair, [suite])[: chosen.texts] for suite in suites]
    asked = [one for turn in zip(*by_suite, strict=True) for one in turn]
    results = {"benchmark": NAME}
    of = results.setdefault("pairs", {}).setdefault(chosen.pair, {"rows": []})
    for temperature in chosen.temperatures:
        began = time.time()
        rows = rows_of(measure(pair, chosen, asked, temperature), chosen.fixed, temperature)
        of["rows"] = [row for row in of["rows"] if row["temperature"] != temperature] + rows
        note_run(results, f"{chosen.pair}, temperature {temperature:g}", began)
        write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
