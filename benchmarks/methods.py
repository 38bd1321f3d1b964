"""Every method on the built-in pair: speed, target calls, draft steps, drift, acceptance.

    python benchmarks/methods.py --data DIR

Paragraphs that the pair was not trained on, 64 new tokens, temperatures 0, 0.7 and 1, meter complete, arms
interleaved prompt by prompt. γ, SVIP's h, AdaEDL's λ0, and the dials of opt, fuzzy, mentored and the gate (for mean
drift 0.05, 0.10 and 0.20) are set on other paragraphs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from common import (
    NEW_TOKENS,
    TEMPERATURES,
    best_gamma,
    cells,
    command,
    environment,
    fastest,
    heldout_prompts,
    interleave,
    measured,
    method_arm,
    row,
    solve,
    write_results,
)  # fmt: skip

import sprinter

DRIFTS = (0.05, 0.10, 0.20)
# name -> (spec with the dial's value, range, whether on a log scale); more of the dial is more drift
DIALS = {
    "opt": ("opt(epsilon={}, gamma={gamma})", 1e-4, 1.0, True),
    "fuzzy": ("fuzzy(threshold={}, gamma={gamma})", 0.01, 3.0, True),
    "mentored": ("mentored(kl={}, gamma={gamma})", 1e-3, 3.0, True),
    "sprinter": ("sprinter(tau={})", 0.0, 1.0, False),
}
FIXED = (
    "heuristic", "confidence(c=0.4)", "lookup(n=3, gamma=5)", "batch(drafts=2, gamma={gamma})",
    "specinfer(drafts=2, gamma={gamma})", "spectr(drafts=2, gamma={gamma})", "uno(epsilon=0.01, gamma={gamma})",
    "lenient(w=0.8, gamma={gamma})", "typical(gamma={gamma})", "bild", "random(rate=0.5, gamma={gamma})", "draft-only",
)  # fmt: skip


def tune(pair: sprinter.Pair, prompts: list[str], temperature: float) -> dict[str, Any]:
    """All settings of one temperature."""
    gamma, speeds = best_gamma(pair, prompts, temperature)
    svip = fastest(pair, [f"svip(h={h})" for h in (0.3, 0.45, 0.6, 0.75, 0.9, 1.1)], prompts, temperature)
    lambdas = (0.0, 0.15, 0.3, 0.4, 0.5)
    adaedl = fastest(pair, [f"stop=adaedl(threshold={v}),cap=40" for v in lambdas], prompts, temperature)
    settings: dict[str, Any] = {"gamma": gamma, "speeds": {**speeds, **svip, **adaedl}}
    settings |= {"svip": next(iter(svip)), "adaedl": next(iter(adaedl)), "dials": {}}
    for name, (spec, low, high, log) in DIALS.items():
        for drift in DRIFTS:

            def drifted(value: float, spec: str = spec, name: str = name) -> float:
                method = spec.format(1 - value if name == "sprinter" else value, gamma=gamma)
                return measured(pair, method, prompts, temperature, "drift")

            value = solve(drifted, drift, low, high, steps=6, log=log)
            settings["dials"][f"{name} @ {drift:.2f}"] = spec.format(
                round(1 - value if name == "sprinter" else value, 5), gamma=gamma
            )
    return settings


def arms_of(settings: dict[str, Any]) -> dict[str, str]:
    """Name -> spec."""
    gamma = settings["gamma"]
    arms = {"autoregressive": "autoregressive", "speculative": f"speculative(gamma={gamma})"}
    arms |= {"svip (tuned)": settings["svip"], "adaedl (tuned)": settings["adaedl"]}
    arms |= {spec.split("(")[0]: spec.format(gamma=gamma) for spec in FIXED} | settings["dials"]
    tau = settings["dials"]["sprinter @ 0.10"].removeprefix("sprinter(").removesuffix(")")
    return arms | {f"sprinter @ 0.10, tail {k}": f"sprinter({tau}, tail={k})" for k in (2, 4)}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = (
        "T",
        "arm",
        "method",
        "÷ autoregressive",
        "÷ speculative",
        "target calls/token",
        "draft steps/token",
    )
    head += ("drift", "accepted of checked", "lossless")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for r in rows:
        values = [
            str(r["temperature"]), r["arm"], f"`{r['method']}`", cells(r["speed_over_autoregressive"]),
            cells(r["speed_over_speculative"]), f"{r['target_calls_per_token'][0]:.3f}",
            f"{r['draft_steps_per_token']:.2f}", cells(r["mean_drift"], 3), f"{r['accepted_of_checked']:.2f}",
            "yes" if r["lossless"] else "no",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


def main() -> None:
    """Tune, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the text files")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--tuning-prompts", type=int, default=12)
    args = parser.parse_args()
    began = time.time()
    pair = sprinter.load_pair()
    tuning = heldout_prompts(args.data, args.tuning_prompts, skip=args.prompts)
    prompts = heldout_prompts(args.data, args.prompts)
    rows, settings = [], {}
    for temperature in TEMPERATURES:
        settings[temperature] = tune(pair, tuning, temperature)
        arms = [
            method_arm(pair, spec, temperature, name) for name, spec in arms_of(settings[temperature]).items()
        ]
        interleave(arms, prompts, note=f"T={temperature}")
        rows += [row(arm, temperature, arms[0], arms[1]) for arm in arms]
    results = {
        "benchmark": "methods",
        "command": command("methods"),
        "environment": environment(),
        "prompts": len(prompts),
        "new_tokens": NEW_TOKENS,
        "tuned": settings,
        "rows": rows,
        "seconds": round(time.time() - began, 1),
    }
    write_results("methods", results, table(rows))


if __name__ == "__main__":
    main()
