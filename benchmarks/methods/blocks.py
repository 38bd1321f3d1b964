"""Block verification against exact acceptance: expected tokens of a round, by enumeration.

    python benchmarks/methods/blocks.py

Every draft of 3 tokens of 10,000 random pairs of chains over 3 words, with both rules, and drafts of 1 to 6 tokens of
100 pairs. A round's tokens are those that stay and the one that follows.
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

from benchmarks.common import grid, note_run, option_parser, write_results
from benchmarks.smoke import sized
from sprinter.decode.accept import Block, Exact
from sprinter.decode.enumerate import MarkovPair

NAME = "methods/blocks"


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


def table(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lengths = [f"{row['gamma']} | {row['gain']:+.2%}" for row in found["by_length"]]
    told = (
        f"{found['pairs']:,} random pairs of chains, 3 draft tokens: block keeps fewer tokens than exact in "
        f"{found['worse']}; gain of a round's tokens {found['least']:+.2%} to {found['most']:+.2%}, mean "
        f"{found['mean']:+.2%}."
    )
    return "\n".join([told, "", *grid("draft tokens | gain, mean over 100 pairs", lengths)])


def main() -> None:
    """Enumerate, write."""
    option_parser(__doc__, data=False).parse_args()
    began, results = time.time(), {"benchmark": NAME, "enumerated": enumerated()}
    note_run(results, "enumerated", began)
    write_results(NAME, results, table(results["enumerated"]))


if __name__ == "__main__":
    main()
