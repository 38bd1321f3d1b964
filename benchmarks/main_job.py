"""The main job on the built-in pair: autoregressive, speculative, sprinter at three drifts, coin at equal trust.

    python benchmarks/main_job.py --data DIR

60 paragraphs that the pair was not trained on, 64 new tokens, temperatures 0, 0.7 and 1, meter complete. γ, τ and the
coin's rate are set on 30 other paragraphs: γ for speed, τ for mean drift 0.05, 0.10, 0.15, the coin for the same share
of trusted tokens. Arms interleaved prompt by prompt, 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Arm, cells, environment, heldout_prompts, interleave, interval, speed_ratio, write_results

import sprinter

NEW_TOKENS = 64
DRIFTS = (0.05, 0.10, 0.15)
TEMPERATURES = (0.0, 0.7, 1.0)
GAMMAS = (1, 2, 3, 4, 5, 6)


def runner(pair: sprinter.Pair, method: str, temperature: float) -> Callable[[str, int], sprinter.Generation]:
    """What an arm does with a prompt and a seed."""

    def run(prompt: str, seed: int) -> sprinter.Generation:
        return pair.generate(
            prompt,
            method=method,
            max_new_tokens=NEW_TOKENS,
            temperature=temperature,
            seed=seed,
            meter="complete",
        )

    return run


def arm(pair: sprinter.Pair, method: str, temperature: float, name: str = "") -> Arm:
    """An arm named after its method."""
    return Arm(name or method, runner(pair, method, temperature))


def solve(measure: Callable[[float], float], wanted: float, low: float, high: float, steps: int = 7) -> float:
    """Where an increasing, noisy function reaches ``wanted``; the same seeds make it a function."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if measure(middle) < wanted else (low, middle)
    return (low + high) / 2


def tune(pair: sprinter.Pair, prompts: list[str], temperature: float) -> dict[str, Any]:
    """γ, τ for each drift, and the coin's rates, on prompts that are not measured later."""
    candidates = [arm(pair, f"speculative(gamma={g})", temperature) for g in GAMMAS]
    interleave(candidates, prompts[:15], note=f"T={temperature} gamma")
    speeds = {g: float(a.tokens.sum() / a.busy_s.sum()) for g, a in zip(GAMMAS, candidates, strict=True)}
    gamma = max(speeds, key=lambda g: speeds[g])

    def measured(method: str, what: str) -> float:
        one = arm(pair, method, temperature)
        interleave([one], prompts, note=f"T={temperature} {method}")
        if what == "drift":
            return float(one.drift.sum() / one.tokens.sum())
        return one.total("trusted") / one.total("new_tokens")

    taus, rates = {}, {}
    for drift in DRIFTS:
        distrust = solve(lambda d: measured(f"sprinter(tau={1 - d})", "drift"), drift, 0.0, 1.0)
        taus[drift] = round(1 - distrust, 4)
        share = measured(f"sprinter(tau={taus[drift]})", "trusted")
        rates[drift] = round(solve(lambda r: measured(f"coin(rate={r})", "trusted"), share, 0.0, 1.0, 6), 4)
    return {"gamma": gamma, "gamma_speeds": speeds, "tau": taus, "rate": rates}


def measure(
    pair: sprinter.Pair, prompts: list[str], temperature: float, tuned: dict[str, Any], repeats: int
) -> list[Any]:
    """All arms of one temperature; one row an arm."""
    methods = {"autoregressive": "autoregressive", "speculative": f"speculative(gamma={tuned['gamma']})"}
    for drift in DRIFTS:
        methods[f"sprinter @ {drift:.2f}"] = f"sprinter(tau={tuned['tau'][drift]})"
        methods[f"coin @ {drift:.2f}"] = f"coin(rate={tuned['rate'][drift]})"
    arms = [arm(pair, method, temperature, name) for name, method in methods.items()]
    interleave(arms, prompts, repeats, note=f"T={temperature}")
    plain, exact = arms[0], arms[1]
    return [
        {
            "temperature": temperature,
            "arm": one.name,
            "method": one.outs[0].method,
            "tokens_per_s": float(one.tokens.sum() / one.busy_s.sum()),
            "speed_over_autoregressive": speed_ratio(one, plain),
            "speed_over_speculative": speed_ratio(one, exact),
            "target_calls_per_token": interval(one.calls, one.tokens),
            "draft_steps_per_token": one.total("draft_steps") / one.total("new_tokens"),
            "mean_drift": interval(one.drift, one.tokens),
            "trusted_share": one.total("trusted") / one.total("new_tokens"),
            "accepted_of_checked": one.total("accepted") / max(1.0, one.total("checked")),
            "share_of_time": {
                part: one.total(part) / float(one.busy_s.sum())
                for part in ("prefill_s", "draft_s", "gate_s", "target_s", "other_s")
            },
        }
        for one in arms
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the text files")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--tuning-prompts", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    began = time.time()
    pair = sprinter.load_pair()
    tuning = heldout_prompts(args.data, args.tuning_prompts, skip=args.prompts)
    prompts = heldout_prompts(args.data, args.prompts)
    rows: list[dict[str, Any]] = []
    settings = {}
    for temperature in TEMPERATURES:
        settings[temperature] = tune(pair, tuning, temperature)
        rows += measure(pair, prompts, temperature, settings[temperature], args.repeats)
    results = {
        "benchmark": "main_job",
        "command": "python benchmarks/main_job.py " + " ".join(a for a in sys.argv[1:] if "/" not in a),
        "environment": environment(),
        "prompts": len(prompts),
        "new_tokens": NEW_TOKENS,
        "tuned": settings,
        "rows": rows,
        "seconds": round(time.time() - began, 1),
    }
    write_results("main_job", results, table(rows))


if __name__ == "__main__":
    main()
