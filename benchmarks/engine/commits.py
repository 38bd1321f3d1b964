"""This checkout against another one: the same texts, in turn, by a process of each, alone and in batches.

    python benchmarks/engine/commits.py [--other DIR] [--pairs builtin qwen] [--rows 1 16 64] [--repeats 8]

DIR is a clean checkout of an older commit (``git worktree add DIR COMMIT``). Host time is what a token takes outside of
forward passes: the loop, laws, draws, rules and scheduling. Tokens are compared too: greedy texts must be the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

NAME = "engine/commits"
METHODS = ("autoregressive", "speculative(gamma=4)")
LOADS: dict[str, dict[str, Any]] = {
    "builtin, eager": {"compile": False},
    "builtin, kernels": {"compile": True},
    "qwen, kernels": {"target": "files of benchmarks.real.arms"},
}
ROOT = Path(__file__).resolve().parents[2]


def work() -> None:
    """A process of one checkout: a line of settings in, a line of figures out. It imports nothing of this one."""
    import sprinter
    from sprinter.models.runners import forward

    inside, extend = [0.0], forward.BaseRunner.extend

    def timed(self: Any, *args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        made = extend(self, *args, **named)
        inside[0] += time.perf_counter() - began
        return made

    forward.BaseRunner.extend = timed  # type: ignore[method-assign]
    pair: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "load" in asked:
            pair = sprinter.load_pair(prefix_cache_bytes=0, **asked["load"])
            print(json.dumps({}), flush=True)
            continue
        inside[0], began = 0.0, time.perf_counter()
        outs = pair.generate_batch(asked.pop("prompts"), never_slower=False, **asked)
        seconds = time.perf_counter() - began
        ids = [[token.id for token in out.tokens] for out in outs]
        print(json.dumps({"seconds": seconds, "host": seconds - inside[0], "ids": ids}), flush=True)


class Checkout:
    """A process that runs the source of one checkout."""

    def __init__(self, root: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(root / "src")}
        command = [sys.executable, __file__, "--work"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def ask(self, **asked: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


def main() -> None:
    from benchmarks.common import cells, grid, note_run, option_parser, write_results
    from benchmarks.real.arms import DRAFT, TARGET
    from benchmarks.smoke import SMOKE, sized
    from sprinter.bench.statistics import ratio_of_sums

    parser = option_parser(__doc__, data=False)
    parser.add_argument(
        "--other", type=Path, default=ROOT, help="a checkout of another commit; this one: the noise"
    )
    parser.add_argument("--pairs", nargs="+", default=sized(["builtin", "qwen"], ["builtin"]))
    parser.add_argument("--rows", nargs="+", type=int, default=sized([1, 16, 64], [2]))
    parser.add_argument("--repeats", type=int, default=sized(8, 1))
    options = parser.parse_args()
    began = time.time()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=options.other, capture_output=True, text=True
    )
    here, other = Checkout(ROOT), Checkout(options.other)
    rows_of_table: list[dict[str, Any]] = []
    for name, load in LOADS.items():
        if name.partition(",")[0] not in options.pairs:
            continue
        real = {"target": TARGET, "draft": DRAFT} if "target" in load else load
        for one in (here, other):
            one.ask(load=real)
        for rows in options.rows if "target" not in load else [n for n in options.rows if n <= 16]:
            prompts = [f"Chapter {i}: the river rises in the mountains and" for i in range(rows)]
            tokens = 4 if SMOKE else 64 if "target" not in load else 32
            for method in METHODS:
                asked = {
                    "prompts": prompts,
                    "rows": rows,
                    "method": method,
                    "max_new_tokens": tokens,
                    "temperature": 0.0,
                }
                seconds: dict[str, list[float]] = {"here": [], "other": []}
                host, counts, same = {"here": 0.0, "other": 0.0}, {"here": 0, "other": 0}, True
                for repeat in range(options.repeats + 1):
                    both = (("here", here), ("other", other))
                    made = {which: one.ask(**asked) for which, one in (both if repeat % 2 else both[::-1])}
                    if not repeat:
                        continue  # warms up
                    same &= made["here"]["ids"] == made["other"]["ids"]
                    for which, found in made.items():
                        seconds[which].append(found["seconds"])
                        host[which] += found["host"]
                        counts[which] += sum(map(len, found["ids"]))
                ratio = ratio_of_sums(seconds["other"], seconds["here"])
                rows_of_table.append({
                    "pair": name, "rows": rows, "method": method, "same": same, "seconds": seconds,
                    "tokens_per_s": counts["here"] / sum(seconds["here"]), "ratio": ratio,
                    "host_us": {which: 1e6 * host[which] / counts[which] for which in host},
                })  # fmt: skip
                print(json.dumps({k: v for k, v in rows_of_table[-1].items() if k != "seconds"}), flush=True)
    head = "pair | rows | method | tokens/s | ÷ the other | host, µs a token | the other's | same texts"
    lines = [
        f"{one['pair']} | {one['rows']} | `{one['method']}` | {one['tokens_per_s']:.0f} | {cells(one['ratio'])} | "
        f"{one['host_us']['here']:.0f} | {one['host_us']['other']:.0f} | {'yes' if one['same'] else 'no'}"
        for one in rows_of_table
    ]
    results: dict[str, Any] = {"benchmark": NAME, "other": commit.stdout.strip(), "measured": rows_of_table}
    note_run(results, "commits", began)
    write_results(NAME, results, "\n".join(grid(head, lines)))


if __name__ == "__main__":
    work() if "--work" in sys.argv else main()
