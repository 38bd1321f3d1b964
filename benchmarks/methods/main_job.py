"""The main job on the built-in pair: autoregressive, speculative, sprinter at three drifts, coin at equal trust.

    python benchmarks/methods/main_job.py --data DIR

60 paragraphs that the pair was not trained on, 64 new tokens, temperatures 0, 0.7 and 1, meter complete. On 8 other
paragraphs γ is set for speed, τ for mean drift 0.05, 0.10 and 0.15, and the coin for the same share of trusted tokens
(7 values of τ and 6 rates, read off by interpolation). Arms interleaved prompt by prompt, 95 % bootstrap intervals
over prompts.
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
    arguments,
    best_gamma,
    cells,
    curve,
    heldout_prompts,
    interleave,
    method_arm,
    read_off,
    row,
    save,
)  # fmt: skip
from benchmarks.smoke import sized

DRIFTS = sized((0.05, 0.10, 0.15), (0.10,))
TAUS = sized((0.45, 0.6, 0.68, 0.74, 0.8, 0.86, 0.92), (0.45, 0.86))
RATES = sized((0.1, 0.3, 0.5, 0.7, 0.85, 0.95), (0.1, 0.95))


def tune(pair: sprinter.Pair, prompts: list[str], temperature: float) -> dict[str, Any]:
    """γ, τ for each drift, and the coin's rates, on prompts that are not measured later."""
    gamma, speeds = best_gamma(pair, prompts, temperature)
    gates = curve(pair, "sprinter(tau={})", TAUS, prompts, temperature)
    coins = curve(pair, "coin(rate={})", RATES, prompts, temperature)
    taus, rates = {}, {}
    for drift in DRIFTS:
        tau = read_off(drift, gates["drift"], TAUS)
        share = read_off(tau, TAUS, gates["trusted"])
        taus[drift], rates[drift] = round(tau, 4), round(read_off(share, coins["trusted"], RATES), 4)
    return {
        "gamma": gamma,
        "gamma_speeds": speeds,
        "tau": taus,
        "rate": rates,
        "gates": gates,
        "coins": coins,
    }


def measure(
    pair: sprinter.Pair, prompts: list[str], temperature: float, tuned: dict[str, Any], repeats: int
) -> list[Any]:
    """All arms of one temperature; one row an arm."""
    methods = {"autoregressive": "autoregressive", "speculative": f"speculative(gamma={tuned['gamma']})"}
    for drift in DRIFTS:
        methods[f"sprinter @ {drift:.2f}"] = f"sprinter(tau={tuned['tau'][drift]})"
        methods[f"coin @ {drift:.2f}"] = f"coin(rate={tuned['rate'][drift]})"
    arms = [method_arm(pair, method, temperature, name) for name, method in methods.items()]
    interleave(arms, prompts, repeats, note=f"T={temperature}")
    return [row(one, temperature, plain=arms[0], exact=arms[1]) for one in arms]


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    head = "| T | arm | method | tokens/s | ÷ autoregressive | ÷ speculative | target calls/token | drift | trusted |"
    lines = [head, "| --- " * 9 + "|"]
    lines += [
        f"| {row['temperature']} | {row['arm']} | `{row['method']}` | {row['tokens_per_s']:.0f} "
        f"| {cells(row['speed_over_autoregressive'])} | {cells(row['speed_over_speculative'])} "
        f"| {cells(row['target_calls_per_token'], 3)} | {cells(row['mean_drift'], 3)} "
        f"| {row['trusted_share']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Tune, measure, write."""
    args = arguments(__doc__, tuning_prompts=8)
    began = time.time()
    pair = sprinter.load_pair(compile=False)
    tuning = heldout_prompts(args.data, args.tuning_prompts, skip=args.prompts)
    prompts = heldout_prompts(args.data, args.prompts)
    rows: list[dict[str, Any]] = []
    settings = {}
    for temperature in TEMPERATURES:
        settings[temperature] = tune(pair, tuning, temperature)
        rows += measure(pair, prompts, temperature, settings[temperature], args.repeats)
        save("methods/main_job", table(rows), began, len(prompts), tuned=settings, rows=rows)


if __name__ == "__main__":
    main()
