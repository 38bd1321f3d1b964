"""What a limit of the tokens of prompts in a step costs and brings: prompts of a crowd beside texts that are written.

    python benchmarks/serve/step_tokens.py

The built-in pair in one thread, 8 rows of an engine under a server's policy. One owner's text is written, plainly, and
six prompts of another owner are read, each with one new token; a third owner's short prompt comes every few steps. By
limit: tokens of long prompts a second, milliseconds between the tokens of the text, and to the first token of short
prompts (median, 95th percentile). 24 and 64 are the server's with and without keys; none: each row reads 128.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

import sprinter
from benchmarks.common import grid, in_turn, option_parser, save
from benchmarks.smoke import sized
from sprinter.engine.options import GenerationOptions
from sprinter.engine.policy import Policy

LIMITS = (24, 32, 64, 128, None)
ROUNDS, PROMPTS, LONG, SHORT = sized(6, 1), sized(12, 2), sized(384, 40), 5
AT_ONCE, EVERY = 6, 7  # long prompts; steps between short ones
ROWS, MAX_LEN = 8, 1024


class Crowd:
    """The load at one limit, and what was measured of it."""

    def __init__(self, pair: sprinter.Pair, limit: int | None) -> None:
        self._pair, self.limit = pair, limit
        self._policy = Policy(first=True, prompt_piece=min(128, limit or 128), prompt_tokens=limit)
        self._numbers = np.random.default_rng(0)
        self.tokens, self.seconds = 0, 0.0
        self.between, self.firsts = list[float](), list[float]()

    def run(self) -> None:
        """Read ``PROMPTS`` long prompts."""
        with sprinter.Engine(self._pair, ROWS, self._policy, MAX_LEN) as engine:

            def put(tokens: int, owner: str, new: int) -> int:
                prompt = self._numbers.integers(1, 2000, tokens).tolist()
                asked = {"method": "autoregressive", "max_new_tokens": new, "ignore_eos": True}
                return engine.put(
                    engine._task(prompt, GenerationOptions.of(None, asked), engine.unfinished, owner)
                )

            writes = put(SHORT, "text", MAX_LEN - SHORT)
            engine.step()
            began = last = time.perf_counter()
            left, reads, asked, steps = PROMPTS, set[int](), dict[int, float](), 0
            while left or reads:
                while left and len(reads) < AT_ONCE:
                    reads.add(put(LONG, "long", 1))
                    left -= 1
                if steps % EVERY == 0 and not asked:
                    asked[put(SHORT, "short", 1)] = time.perf_counter()
                steps += 1
                events = engine.step()
                now = time.perf_counter()
                for event in events:
                    if event.error is not None:
                        raise event.error
                    if event.id == writes and event.tokens:
                        self.between.append(now - last)
                        last = now
                    elif event.id in asked and event.tokens:
                        self.firsts.append(now - asked.pop(event.id))
                    if event.id in reads and event.generation is not None:
                        reads.remove(event.id)
                        self.tokens += LONG
            self.seconds += time.perf_counter() - began


def main() -> None:
    option_parser(__doc__, data=False).parse_args()
    torch.set_num_threads(1)
    began, pair = time.time(), sprinter.load_pair(prefix_cache_bytes=0)
    crowds = [Crowd(pair, limit) for limit in LIMITS]
    Crowd(pair, None).run()  # warm
    for _, crowd in in_turn(crowds, ROUNDS, "rounds"):
        crowd.run()
    rows, lines = list[dict[str, Any]](), list[str]()
    for crowd in crowds:
        speed = crowd.tokens / crowd.seconds
        times = [
            np.percentile(1e3 * np.array(one), [50, 95]).round(1).tolist()
            for one in (crowd.between, crowd.firsts)
        ]
        rows.append({
            "step_tokens": crowd.limit, "prompt_tokens_per_s": speed, "between_ms": times[0], "first_ms": times[1],
        })  # fmt: skip
    for row in rows:
        share = row["prompt_tokens_per_s"] / rows[-1]["prompt_tokens_per_s"]
        (between, slow), (first, late) = row["between_ms"], row["first_ms"]
        lines.append(
            f"{row['step_tokens'] or 'none'} | {row['prompt_tokens_per_s']:.0f} | {share:.2f} | {between}, {slow} | "
            f"{first}, {late}"
        )
    head = "tokens in a step | prompts, tokens/s | over none | between tokens, ms | first token of short prompts, ms"
    facts = {"rounds": ROUNDS, "long": LONG, "short": SHORT, "rows": rows}
    save("serve/step_tokens", "\n".join(grid(head, lines)), began, PROMPTS, **facts)


if __name__ == "__main__":
    main()
