"""This checkout against another one: the same texts, in turn, by a process of each, alone and in batches.

    python benchmarks/engine/commits.py [--other DIR] [--pairs builtin qwen opt] [--rows 1 16 64] [--repeats 8]

A pair is named alone, with all its arms, or with one: "qwen, eager". The pair "opt" has 100 M and 15 M random weights
and is of a family that the kernels do not know. DIR is a clean checkout of an older commit (``git worktree add DIR
COMMIT``). Host time is what a token takes outside of forward passes and of draft runs in one call: the loop, laws,
draws, rules and scheduling, as processor time of the thread that runs them. A profile says where it goes; it is taken
apart, and costs some itself. Garbage of loading is collected before.
Tokens are compared too: greedy texts must be the same.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import pstats
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

NAME = "engine/commits"
METHODS = ("autoregressive", "speculative(gamma=4)")
GATED = "sprinter"  # of the pair that has a gate
ARMS: dict[str, dict[str, Any]] = {
    "builtin, eager": {"compile": False},
    "builtin, kernels": {"compile": True},
    "qwen, kernels": {},
    "qwen, eager": {"runner": "torch", "dtype": "float32", "compile": False},
    "opt, eager": {"compile": False},
}
ROOT = Path(__file__).resolve().parents[2]


def work() -> None:
    """A process of one checkout: a line of settings in, a line of figures out. It imports nothing of this one."""
    import sprinter
    from sprinter.models.runners import forward, row

    inside = [0.0]

    def timed(call: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            made = call(*args, **named)
            inside[0] += time.thread_time() - began
            return made

        return run

    forward.BaseRunner.extend = timed(forward.BaseRunner.extend)  # type: ignore[method-assign]
    if hasattr(row.RowRunner, "draft"):  # an older commit has none
        row.RowRunner.draft = timed(row.RowRunner.draft)  # type: ignore[method-assign]
    pair: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "load" in asked:
            pair = sprinter.load_pair(prefix_cache_bytes=0, **asked["load"])
            gc.collect()  # what loading left: one collection, which would count to whatever text comes then
            print(json.dumps({}), flush=True)
            continue
        profile = cProfile.Profile(time.thread_time) if asked.pop("profile", False) else None
        inside[0], began, host = 0.0, time.perf_counter(), time.thread_time()
        with profile or nullcontext():
            outs = pair.generate_batch(asked.pop("prompts"), never_slower=False, **asked)
        seconds, host = time.perf_counter() - began, time.thread_time() - host - inside[0]
        ids = [[token.id for token in out.tokens] for out in outs]
        found = {"seconds": seconds, "host": host, "ids": ids, "areas": areas(profile) if profile else {}}
        print(json.dumps(found), flush=True)


def areas(profile: cProfile.Profile) -> dict[str, float]:
    """Seconds of a profile in each part of the package; calls of PyTorch and the like count to the caller."""

    def area(at: tuple[str, int, str]) -> str:
        path = at[0].replace(os.sep, "/")
        if "sprinter_kernels" in path or "sprinter/models/" in path:
            return "passes"
        return path.rpartition("/sprinter/")[2].partition("/")[0] if "/sprinter/" in path else ""

    made: dict[str, float] = {}
    for at, (_, _, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        parts = {area(at): own} if area(at) else {}
        for caller, (_, _, spent, _) in ({} if parts else callers).items():
            parts[area(caller)] = parts.get(area(caller), 0.0) + spent
        for name, spent in parts.items():
            made[name or "elsewhere"] = made.get(name or "elsewhere", 0.0) + spent
    return made


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


def opt_pair() -> dict[str, str]:
    """Two OPT models with random weights, and the built-in pair's tokenizer, in a folder that goes at the end."""
    from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM, set_seed

    from benchmarks.smoke import scratch, sized
    from sprinter.models.pair import builtin_paths

    speaker, made = AutoTokenizer.from_pretrained(builtin_paths()["target"]), {}
    for name, layers, width in (("target", 14, sized(768, 64)), ("draft", 2, sized(768, 64))):
        set_seed(0)  # both begin with the same embedding, so that some drafts are accepted
        model = OPTForCausalLM(OPTConfig(
            vocab_size=len(speaker), hidden_size=width, ffn_dim=4 * width, num_hidden_layers=layers,
            num_attention_heads=width // 64, max_position_embeddings=1024, word_embed_proj_dim=width,
            pad_token_id=speaker.eos_token_id, bos_token_id=None, eos_token_id=speaker.eos_token_id,
        ))  # fmt: skip
        made[name] = str(scratch(f"opt-{name}"))
        model.save_pretrained(made[name])
        speaker.save_pretrained(made[name])
    return made


def main() -> None:
    from benchmarks.common import cells, grid, note_run, option_parser, write_results
    from benchmarks.real.arms import DRAFT, TARGET
    from benchmarks.smoke import SMOKE, sized
    from sprinter.bench.statistics import ratio_of_sums

    parser = option_parser(__doc__, data=False)
    parser.add_argument(
        "--other", type=Path, default=ROOT, help="a checkout of another commit; this one: the noise"
    )
    parser.add_argument("--pairs", nargs="+", default=sized(["builtin", "qwen"], ["opt"]))
    parser.add_argument("--rows", nargs="+", type=int, default=sized([1, 16, 64], [2]))
    parser.add_argument("--repeats", type=int, default=sized(8, 1))
    options = parser.parse_args()
    began = time.time()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=options.other, capture_output=True, text=True
    )
    here = Checkout(ROOT)
    other = here if SMOKE else Checkout(options.other)
    rows_of_table: list[dict[str, Any]] = []
    models: dict[str, Any] = {
        "builtin": dict,
        "qwen": lambda: {"target": TARGET, "draft": DRAFT},
        "opt": opt_pair,
    }
    for name, load in ARMS.items():
        which = name.partition(",")[0]
        if which not in options.pairs and name not in options.pairs:
            continue
        load = {**models[which](), **load}
        for one in (here, other):
            one.ask(load=load)
        for rows in options.rows:
            prompts = [f"Chapter {i}: the river rises in the mountains and" for i in range(rows)]
            tokens = 4 if SMOKE else 64 if which == "builtin" else 32 if rows <= 16 else 16
            for method in (*METHODS, GATED) if which == "builtin" else METHODS:
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
                    made = {side: one.ask(**asked) for side, one in (both if repeat % 2 else both[::-1])}
                    if not repeat:
                        continue  # warms up
                    same &= made["here"]["ids"] == made["other"]["ids"]
                    for side, found in made.items():
                        seconds[side].append(found["seconds"])
                        host[side] += found["host"]
                        counts[side] += sum(map(len, found["ids"]))
                ratio = ratio_of_sums(seconds["other"], seconds["here"])
                profiled = here.ask(**asked, profile=True)
                each = 1e6 / sum(map(len, profiled["ids"]))
                parts = {area: each * spent for area, spent in sorted(profiled["areas"].items())}
                rows_of_table.append({
                    "pair": name, "rows": rows, "method": method, "same": same, "seconds": seconds,
                    "tokens_per_s": counts["here"] / sum(seconds["here"]), "ratio": ratio,
                    "host_us": {side: 1e6 * host[side] / counts[side] for side in host}, "profile_us": parts,
                })  # fmt: skip
                print(json.dumps({k: v for k, v in rows_of_table[-1].items() if k != "seconds"}), flush=True)
    head = "pair | rows | method | tokens/s | ÷ the other | host, µs a token | the other's | same texts"
    lines = [
        f"{one['pair']} | {one['rows']} | `{one['method']}` | {one['tokens_per_s']:.0f} | {cells(one['ratio'])} | "
        f"{one['host_us']['here']:.0f} | {one['host_us']['other']:.0f} | {'yes' if one['same'] else 'no'}"
        for one in rows_of_table
    ]
    shown = sorted({area for one in rows_of_table for area in one["profile_us"]} - {"passes"})
    lines = [
        *grid(head, lines),
        "",
        "**Profile of this commit: processor time of a token outside of passes, µs**",
        "",
    ]
    lines += grid(f"pair | rows | method | {' | '.join(shown)}", [
        f"{one['pair']} | {one['rows']} | `{one['method']}` | "
        + " | ".join(f"{one['profile_us'].get(area, 0.0):.0f}" for area in shown)
        for one in rows_of_table
    ])  # fmt: skip
    results: dict[str, Any] = {"benchmark": NAME, "other": commit.stdout.strip(), "measured": rows_of_table}
    note_run(results, "commits", began)
    write_results(NAME, results, "\n".join(lines))


if __name__ == "__main__":
    work() if "--work" in sys.argv else main()
