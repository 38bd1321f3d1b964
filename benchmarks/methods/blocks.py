"""Block verification against exact acceptance: expected tokens of a round by enumeration, then speed.

    python benchmarks/methods/blocks.py --data DIR [--parts enumerated builtin]

Enumerated: every draft of 3 tokens of 10,000 random pairs of chains over 3 words, with both rules, and drafts of 1 to 6
tokens of 100 pairs. A round's tokens are those that stay and the one that follows. Built-in: 60 paragraphs that the
pair was not trained on, 64 new tokens, temperatures 1 and 0.7, both rules at the same draft lengths, interleaved.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

import sprinter
from benchmarks.common import (
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
from sprinter.decode.accept import Block, Exact
from sprinter.decode.enumerate import MarkovPair

NAME = "methods/blocks"
GAMMAS = sized((2, 4, 6, 8), (2,))
TEMPERATURES = (1.0, 0.7)


def chains(seed: int) -> MarkovPair:
    """A random pair: sharp and flat laws, every second one with zeros, every third with laws that are close."""
    return MarkovPair(
        3, seed, sharp=0.5 + seed % 4, zeros=0.3 * (seed % 2), distance=0.3 if seed % 3 == 0 else 1.0
    )


def expected_tokens(pair: MarkovPair, gamma: int) -> tuple[float, float]:
    """Tokens of a round in expectation over every draft: with exact acceptance, with block verification."""
    exact = block = 1.0  # the token that follows
    for tokens in itertools.product(range(pair.vocab), repeat=gamma):
        q = torch.stack([pair.q((0, *tokens[:i])) for i in range(gamma)])
        drawn = math.prod(float(q[i, x]) for i, x in enumerate(tokens))
        if drawn == 0:
            continue
        p = torch.stack([pair.p((0, *tokens[:i])) for i in range(gamma + 1)])
        keep = Exact().keep(p[:gamma], q).gather(-1, torch.tensor(tokens)[:, None])
        exact += drawn * float(keep.cumprod(0).sum())
        ending, _ = Block().ends(tokens, p, q)
        block += drawn * float(ending @ torch.arange(gamma + 1.0, dtype=ending.dtype))
    return exact, block


def enumerated() -> dict[str, Any]:
    """Least, mean and largest gain over many pairs, and the gain by draft length."""
    began = time.monotonic()
    many = []
    for seed in range(sized(10_000, 20)):
        many.append(expected_tokens(chains(seed), 3))
        if time.monotonic() - began > 30:
            began = time.monotonic()
            print(f"{seed + 1} pairs", file=sys.stderr, flush=True)
    exact, block = np.array(many).T
    by_length = []
    for gamma in sized((1, 2, 3, 4, 5, 6), (1, 2)):
        one, other = np.array([expected_tokens(chains(seed), gamma) for seed in range(sized(100, 4))]).T
        by_length.append({"gamma": gamma, "gain": float(other.sum() / one.sum() - 1)})
    return {
        "pairs": len(many),
        "worse": int((block - exact < -1e-12).sum()),
        "least": float((block / exact - 1).min()),
        "mean": float(block.sum() / exact.sum() - 1),
        "most": float((block / exact - 1).max()),
        "by_length": by_length,
    }


def builtin(data: Path, prompts: int) -> list[dict[str, Any]]:
    """One row a temperature and draft length: block over exact."""
    pair, texts, rows = sprinter.load_pair(compile=False), heldout_prompts(data, prompts), []
    for temperature in TEMPERATURES:
        arms: dict[str, Arm] = {}
        for gamma in GAMMAS:
            for rule in ("speculative", "block"):
                name = f"{rule}(gamma={gamma})"
                arms[name] = method_arm(pair, name, temperature)
        interleave([*arms.values()], texts, note=f"T={temperature}")
        for gamma in GAMMAS:
            exact, block = arms[f"speculative(gamma={gamma})"], arms[f"block(gamma={gamma})"]
            rows.append(
                {
                    "temperature": temperature,
                    "gamma": gamma,
                    "exact_tokens_per_call": interval(exact.tokens, exact.calls),
                    "block_tokens_per_call": interval(block.tokens, block.calls),
                    "gain_in_tokens": ratio_of_ratios(
                        (block.tokens, block.calls), (exact.tokens, exact.calls)
                    ),
                    "gain_in_speed": speed_ratio(block, exact),
                }
            )
    return rows


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines: list[str] = []
    if found := results.get("enumerated"):
        lengths = [f"{row['gamma']} | {row['gain']:+.2%}" for row in found["by_length"]]
        lines += [
            f"{found['pairs']:,} random pairs of chains, 3 draft tokens: block keeps fewer tokens than exact in "
            f"{found['worse']}; gain of a round's tokens {found['least']:+.2%} to {found['most']:+.2%}, mean "
            f"{found['mean']:+.2%}.",
            "",
            *grid("draft tokens | gain, mean over 100 pairs", lengths),
        ]
    if rows := results.get("builtin"):
        shown = [
            f"{row['temperature']:g} | {row['gamma']} | {cells(row['exact_tokens_per_call'])} "
            f"| {cells(row['block_tokens_per_call'])} | {cells(row['gain_in_tokens'], 3)} "
            f"| {cells(row['gain_in_speed'], 3)}"
            for row in rows
        ]
        lines += [
            "",
            *grid(
                "T | γ | tokens/target call, exact | block | block ÷ exact, tokens/call | block ÷ exact, speed",
                shown,
            ),
        ]
    return "\n".join(lines).strip()


def main() -> None:
    """Measure the parts, write."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=("enumerated", "builtin"), default=["enumerated", "builtin"]
    )
    parser.add_argument("--prompts", type=int, default=sized(60, 2))
    args = parser.parse_args()
    results = {"benchmark": NAME}
    for part in args.parts:
        began = time.time()
        results[part] = enumerated() if part == "enumerated" else builtin(args.data, args.prompts)
        note_run(results, part, began)
        write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
