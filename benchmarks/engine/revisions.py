"""Two checkouts of this repository side by side: the same texts and counts, and the speed of one over the other.

    git worktree add /tmp/before COMMIT
    python benchmarks/engine/revisions.py --before /tmp/before --prompts 12 --repeats 4
    python benchmarks/engine/revisions.py --before /tmp/before --ways eager --methods all --temperatures 1 0 --repeats 1

Each checkout runs in a process of its own, which generates one text at a time on request. The two take turns, text by
text, so that whatever slows the machine slows both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

METHODS = (
    "autoregressive", "speculative(gamma=3)", "sprinter(tau=0.7)", "svip(h=0.3)", "lookup", "fuzzy",
    "specinfer(gamma=3)",
)  # fmt: skip
COMPOSED = (
    "drafter=lookup(n=2,least=1,otherwise=model),stop=fixed(gamma=3)", "drafter=model(greedy=true),stop=fixed(gamma=3)",
    "trust=gate(tau=0.6),stop=svip(h=0.3)", "sprinter(tau=0.6,tail=3)", "batch(drafts=3,gamma=3)",
)  # fmt: skip
WAYS = {"eager": False, "captured": True}


def work() -> None:
    """The other end of ``Checkout``: reads one request a line, writes one answer a line."""
    import torch

    import sprinter

    torch.set_num_threads(1)
    pairs: dict[str, sprinter.Pair] = {}
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        way = asked.pop("way")
        if way not in pairs:
            pairs[way] = sprinter.load_pair(compile=WAYS[way])
        began = time.perf_counter()
        out = pairs[way].generate(**asked)
        seconds = time.perf_counter() - began
        stats = out.stats
        answer = {
            "ids": [token.id for token in out.tokens],
            "seconds": seconds,
            "mean_drift": round(stats.mean_drift or 0, 6),
            "target_calls": stats.target_calls,
            "draft_steps": stats.draft_steps,
            "rounds": stats.rounds,
            "read": [stats.target_tokens, stats.draft_tokens],
        }
        print(json.dumps(answer), file=answers, flush=True)


class Checkout:
    """A checkout in a process of its own."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
        self.commit = _git(folder, "rev-parse", "--short", "HEAD") + "+" * bool(
            _git(folder, "status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)benchmarks/results")
        )
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work"], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def generate(self, **asked: Any) -> dict[str, Any]:
        """One text, with its time and counts."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"error: the process of {self.commit} ended: see above")
        made: dict[str, Any] = json.loads(answer)
        return made

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def _git(folder: Path, *words: str) -> str:
    ended = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    return ended.stdout.strip()


def _cell(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def main() -> None:
    from benchmarks.common import ROOT, cells, grid, heldout_prompts, in_turn, interval, option_parser, save
    from benchmarks.smoke import sized

    parser = option_parser(__doc__)
    parser.add_argument("--before", type=Path, required=sized(True, False), default=ROOT)
    parser.add_argument("--after", type=Path, default=ROOT)
    parser.add_argument("--prompts", type=int, default=sized(12, 1))
    parser.add_argument("--repeats", type=int, default=sized(4, 1))
    parser.add_argument("--new-tokens", type=int, default=sized(128, 8))
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=sized([*WAYS], ["eager"]))
    parser.add_argument("--methods", nargs="+", default=sized([*METHODS], [*METHODS[:2]]), help="or: all")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0])
    chosen, began = parser.parse_args(), time.time()
    import numpy as np

    from sprinter.decode import METHODS as NAMED

    methods = [*NAMED.names(), *COMPOSED] if chosen.methods == ["all"] else chosen.methods

    prompts = heldout_prompts(chosen.data, chosen.prompts)
    sides = {"before": Checkout(chosen.before), "after": Checkout(chosen.after)}
    rows = []
    for way in chosen.ways:
        for method, temperature in product(methods, chosen.temperatures):
            asked = {
                "way": way,
                "method": method,
                "max_new_tokens": chosen.new_tokens,
                "temperature": temperature,
            }
            made: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
            for side in sides.values():
                side.generate(prompt=prompts[0], seed=0, **asked)  # loads, compiles what is missing
            for i, side in in_turn([*sides], chosen.repeats * len(prompts), f"{way} {method}"):
                n = i % len(prompts)
                made[side].append(sides[side].generate(prompt=prompts[n], seed=n, **asked))
            before, after = (
                np.array([one.pop("seconds") for one in made[side]]).reshape(chosen.repeats, -1).min(0)
                for side in sides
            )
            read = [np.array([one.pop("read") for one in made[side]]).sum(0) for side in ("after", "before")]
            target, draft = (float(x / y) if y else None for x, y in zip(*read, strict=True))
            same = [one == other for one, other in zip(*made.values(), strict=True)]
            rows.append(
                {
                    "way": way, "method": method, "temperature": temperature, "speed_ratio": interval(before, after),
                    "same_share": sum(same) / len(same), "target_tokens": target, "draft_tokens": draft,
                }
            )  # fmt: skip
    for side in sides.values():
        side.close()
    commits = {side: checkout.commit for side, checkout in sides.items()}
    shown = [
        f"{row['way']} | `{row['method']}` | {row['temperature']:g} | {cells(row['speed_ratio'], 3)} | "
        f"{row['same_share']:.0%} | {_cell(row['target_tokens'])} | {_cell(row['draft_tokens'])}"
        for row in rows
    ]
    lines = [
        f"Speed of {commits['after']} over {commits['before']}: of each text the fastest of {chosen.repeats} runs. "
        "The same: share of texts whose tokens, target calls, draft steps, rounds and drift are equal. Read: tokens "
        "that went through the target and the draft, after over before.",
        "",
        *grid("way | method | T | speed, after over before | the same | target read | draft read", shown),
    ]
    save(
        "engine/revisions",
        "\n".join(lines),
        began,
        len(prompts),
        new_tokens=chosen.new_tokens,
        commits=commits,
        revisions=rows,
    )


if __name__ == "__main__":
    work() if "--work" in sys.argv else main()
