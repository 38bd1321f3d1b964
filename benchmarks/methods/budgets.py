"""Budgets on drift: what a text really drifts, what it costs, and the best fixed setting at the same drift.

    python benchmarks/methods/budgets.py --data DIR [--pair builtin|qwen|smollm2] [--texts 50] [--methods ...]

Every method of ``BUDGETED`` runs within each budget, every one of ``FIXED`` at each setting of its dial, on the same
texts of several tasks, in batches, meter complete. Counts and drifts do not depend on the batch; costs are those of
forward passes alone on this machine (``pair.pass_costs``), as a batch has no time of single texts. A fixed setting is
read off by interpolation at the drift that a budget really had; so the comparison grants it hindsight. Arms that the
results hold already are kept: a run goes on where it was interrupted. The draft of SmolLM2 is a folder that
``sprinter draft distill`` made (``--draft``).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

import sprinter
from benchmarks.common import (
    RESULTS,
    cells,
    grid,
    interval,
    note_run,
    option_parser,
    read_off,
    write_results,
)
from benchmarks.real.arms import DRAFT, SMOLLM2, TARGET, questions
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.suites import load_suite
from sprinter.decode.costs import PassCosts
from sprinter.engine.generation import Generation
from sprinter.files import write_atomic

NAME = "methods/budgets"
BUDGETS = sized((0.0, 0.01, 0.02, 0.05, 0.1, 0.2), (0.0, 0.1))
BUDGETED = sized(
    ("auto", "sprinter(tail=3)", "certain(tail=3)", "opt(epsilon=0.4)", "fuzzy(threshold=0.6)"),
    ("auto", "opt(epsilon=0.4)"),
)
FIXED: dict[str, tuple[str, Sequence[float]]] = sized(
    {
        "sprinter": ("sprinter(tau={})", (0.95, 0.9, 0.85, 0.8, 0.74, 0.68, 0.6, 0.45)),
        "certain": ("certain(threshold={})", (0.02, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0)),
        "opt": ("opt(epsilon={})", (0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8)),
        "fuzzy": ("fuzzy(threshold={})", (0.01, 0.035, 0.1, 0.2, 0.4, 0.8)),
        "lenient": ("lenient(w={})", (0.98, 0.95, 0.9, 0.8, 0.6)),
    },
    {"opt": ("opt(epsilon={})", (0.1, 0.4))},
)
EXACT = sized(
    ("speculative(gamma=3)", "speculative(gamma=5)", "svip", "calibrated", "auto"), ("speculative(gamma=3)",)
)
PAIRS: dict[str, dict[str, Any]] = {
    "builtin": {"suites": ("wikipedia", "wikinews", "lm1b", "tinystories"), "load": {}, "tokens": 96},
    "qwen": {
        "suites": ("humaneval", "gsm8k", "mt-bench"),
        "load": {
            "target": TARGET,
            "draft": DRAFT,
            "runner": "torch",
            "dtype": "gguf",
            "compile": False,
            "prefix_cache_bytes": 4 << 30,
        },
        "tokens": 128,
    },
    "smollm2": {
        "suites": ("humaneval", "gsm8k", "mt-bench"),
        "load": {
            "target": SMOLLM2,
            "runner": "torch",
            "dtype": "gguf",
            "draft_dtype": "int8",
            "compile": False,
            "prefix_cache_bytes": 4 << 30,
        },
        "tokens": 128,
    },
}
NEW_TOKENS, TEXTS = sized(None, 8), sized(50, 2)


def short(one: Generation, suite: str) -> dict[str, Any]:
    """One text: counts and drift."""
    stats = one.stats
    drifts = [token.distance or 0.0 for token in one.tokens]
    return {
        "suite": suite, "tokens": stats.new_tokens, "calls": stats.target_calls, "steps": stats.draft_steps,
        "read": stats.target_tokens, "drift": sum(drifts), "trusted": stats.trusted,
    }  # fmt: skip


def columns(texts: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The texts of an arm, one list a value."""
    return {
        name: [round(text[name], 5) if isinstance(text[name], float) else text[name] for text in texts]
        for name in texts[0]
    }


def summary(arm: dict[str, Any], costs: PassCosts) -> dict[str, Any]:
    """Means over the texts of an arm, and how far single texts are over the budget.

    ``cost``: of a token, in plain decoding's, of the passes alone.
    """
    budget, suites = arm["budget"], arm["texts"]["suite"]
    tokens, drift, calls, steps, read = (
        np.array(arm["texts"][name], dtype=float) for name in ("tokens", "drift", "calls", "steps", "read")
    )
    passes = [n * costs.target_s(max(1.0, m / n)) if n else 0.0 for n, m in zip(calls, read, strict=True)]
    cost = (np.array(passes) + steps * costs.draft_s(1)) / costs.target_s(1)
    each = drift / tokens
    over = each[each > budget + 1e-9] - budget if budget is not None else np.zeros(0)
    return {
        "drift": interval(drift, tokens),
        "calls": interval(calls, tokens),
        "steps": float(steps.sum() / tokens.sum()),
        "cost": interval(cost, tokens),
        "worst": float(each.max()),
        "over": len(over) / len(each),
        "over_by": float(over.max()) if len(over) else 0.0,
        "tasks": {
            suite: [float(drift[rows].sum() / tokens[rows].sum()), float(each[rows].max())]
            for suite in dict.fromkeys(suites)
            if (rows := [i for i, one in enumerate(suites) if one == suite])
        },
    }


def compared(arms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each arm with a budget beside the best fixed setting, and the paper's SPRINTER, at the drift that it had."""
    rows = []
    fixed: dict[str, list[dict[str, Any]]] = {}
    for arm in arms:
        if arm["budget"] is None:
            fixed.setdefault(arm["dial"], []).append(arm["summary"])
    for arm in arms:
        if arm["budget"] is None:
            continue
        drift, own = arm["summary"]["drift"][0], arm["summary"]
        at: dict[str, dict[str, float]] = {}
        for dial, settings in fixed.items():
            if dial == "exact":
                best = min(settings, key=lambda one: one["cost"][0])
                at[dial] = {name: best[name][0] for name in ("cost", "calls")}
                continue
            drifts = [one["drift"][0] for one in settings]
            if len(drifts) > 1 and min(drifts) <= drift <= max(drifts):
                at[dial] = {
                    name: read_off(drift, drifts, [one[name][0] for one in settings])
                    for name in ("cost", "calls")
                }
        if not at:  # no fixed setting was run
            continue
        best = min(at, key=lambda dial: at[dial]["cost"])
        rows.append(
            {
                "temperature": arm["temperature"], "method": arm["method"], "budget": arm["budget"], "best": best,
                "cost_over_best": own["cost"][0] / at[best]["cost"],
                "calls_over_sprinter": own["calls"][0] / at["sprinter"]["calls"] if "sprinter" in at else None,
            }
        )  # fmt: skip
    return rows


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    parts = []
    for name, of in results["pairs"].items():
        beside = {(row["temperature"], row["method"], row["budget"]): row for row in of["compared"]}
        rows = []
        for arm in of["arms"]:
            if arm["budget"] is None:
                continue
            own, with_best = arm["summary"], beside.get((arm["temperature"], arm["method"], arm["budget"]))
            calls = with_best and with_best["calls_over_sprinter"]
            best = f"{1 / with_best['cost_over_best']:.2f} ({with_best['best']})" if with_best else "–"
            rows.append(
                f"{arm['temperature']:g} | `{arm['method']}` | {arm['budget']:g} | {cells(own['drift'], 4)} | "
                f"{own['worst']:.3f} | "
                f"{own['over']:.0%} | {own['over_by']:.4f} | {cells(own['calls'], 3)} | {own['steps']:.2f} | "
                f"{1 / own['cost'][0]:.2f} | {best} | "
                f"{'–' if calls is None else f'{calls:.2f}'}"
            )
        head = (
            "T | method | budget | drift | worst text | texts over | over by at most | target calls/token | "
            "draft steps/token | "
            "expected speed ÷ plain | ÷ best fixed setting at this drift | calls ÷ those of `sprinter` at this drift"
        )
        parts += [
            f"**{name}**: {of['texts']} texts of {', '.join(of['suites'])}, {of['tokens']} tokens",
            "",
            *grid(head, rows),
            "",
        ]
    return "\n".join(parts).strip()


def main() -> None:
    """Run what is missing; write after every arm."""
    parser = option_parser(__doc__)
    parser.add_argument("--pair", choices=[*PAIRS], default="builtin")
    parser.add_argument("--texts", type=int, default=TEXTS, help="of each task")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--draft", help="folder of the draft of SmolLM2")
    parser.add_argument("--gate", help="directory of a gate for the draft")
    parser.add_argument(
        "--methods", nargs="+", help="of those with a budget, dials of fixed settings, 'exact'"
    )
    parser.add_argument("--again", action="store_true", help="leave out what the results hold")
    chosen = parser.parse_args()
    settings = PAIRS[chosen.pair]
    load = {} if SMOKE else dict(settings["load"])
    if chosen.draft is not None:
        load["draft"] = chosen.draft
    pair = sprinter.load_pair(load.pop("target", None), load.pop("draft", None), gate=chosen.gate, **load)
    costs, new_tokens = pair.pass_costs, NEW_TOKENS or settings["tokens"]
    chat = chosen.pair != "builtin"
    suites = [
        load_suite(
            name, chosen.data, limit=chosen.texts, new_tokens=new_tokens, tokenizer=pair.tokenizer, chat=chat
        )
        for name in sized(settings["suites"], ("lm1b",))
    ]
    asked = questions(pair, suites)
    results, start = {"benchmark": NAME}, time.time()
    of = results.setdefault("pairs", {}).setdefault(chosen.pair, {})
    same = of.get("texts") == len(asked) and of.get("tokens") == new_tokens and not chosen.again
    arms: list[dict[str, Any]] = of["arms"] if same else []
    if not same:
        of |= {
            "arms": arms,
            "texts": len(asked),
            "tokens": new_tokens,
            "suites": [suite.name for suite in suites],
        }
    of["costs"] = [costs.target, costs.draft]
    for arm in arms:
        arm["summary"] = summary(arm, costs)
    wanted: list[tuple[str, str, float | None]] = [("exact", spec, None) for spec in EXACT]
    heads = pair.gate is not None
    wanted += [
        (dial, spec.format(value), None)
        for dial, (spec, values) in FIXED.items() if heads or dial != "sprinter" for value in values
    ]  # fmt: skip
    wanted += [
        ("", spec, budget) for spec in BUDGETED if heads or "sprinter" not in spec for budget in BUDGETS
    ]
    if chosen.methods is not None:
        wanted = [one for name in chosen.methods for one in wanted if name == (one[0] or one[1])]
    for temperature in chosen.temperatures:
        for dial, spec, budget in wanted:
            key = (temperature, spec, budget)
            if any((arm["temperature"], arm["method"], arm["budget"]) == key for arm in arms):
                continue
            began = time.time()
            made = pair.generate_batch(
                [one.ids for one in asked], rows=min(chosen.rows, len(asked)), method=spec, budget=budget,
                temperature=temperature, seed=list(range(len(asked))), meter="complete", never_slower=False,
                max_new_tokens=new_tokens, stop_token_ids=[list(one.ends) for one in asked],
            )  # fmt: skip
            texts = [short(one, question.suite) for one, question in zip(made, asked, strict=True)]
            arm = {
                "temperature": temperature,
                "dial": dial,
                "method": spec,
                "budget": budget,
                "texts": columns(texts),
            }
            arms.append(arm | {"summary": summary(arm, costs), "seconds": round(time.time() - began, 1)})
            print(
                f"{time.strftime('%H:%M')} {spec} {budget} {arms[-1]['summary']['drift'][0]:.4f}",
                file=sys.stderr,
                flush=True,
            )
            of["compared"] = compared(arms)
            note_run(results, chosen.pair, start)
            write_kept(results)
    of["compared"] = compared(arms)
    write_results(NAME, results, table(results))


def write_kept(results: dict[str, Any]) -> None:
    """What was measured so far, without saying it on the terminal."""
    path = RESULTS / f"{NAME}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
