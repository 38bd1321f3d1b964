"""Latency of a stream against vLLM's and llama.cpp's servers, at 1, 4 and 16 streams, on one model and one thread.

    python benchmarks/serve/latency.py --data DIR [--arms ...]

SmolLM2-135M-Instruct, greedy, 64 new tokens after 30 % of held-out paragraphs. All servers run at the same time and
take turns: in each of three repeats every arm answers the same prompts at each number of streams. vLLM reads no GGUF
files of this kind: it and the bfloat16 arms have the dequantised weights, llama.cpp's server and the other arms the
file itself ("own kernels": our kernels on its blocks; "llama.cpp": llama.cpp as our runner).
``SPRINTER_VLLM_PYTHON`` and ``SPRINTER_LLAMA_SERVER`` name the other engines.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import command, environment, grid, heldout_prompts, option_parser, write_results
from benchmarks.real.arms import dequantised
from benchmarks.serve.clients import StreamTimes, latencies, stream
from benchmarks.serve.servers import (
    SMOLLM2,
    ServerProcess,
    free_port,
    llama_server,
    sprinter_server,
    started,
    vllm_server,
)  # fmt: skip
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.models.source import find

NAME = "serve/latency"
STREAMS = sized((1, 4, 16), (1, 2))
NEW_TOKENS = sized(64, 6)
MAX_LEN = 512
ROWS = max(STREAMS)
TORCH = ["--target", SMOLLM2, "--runner", "torch", "--dtype", "bfloat16"]
BLOCKS = ["--target", SMOLLM2, "--runner", "torch", "--dtype", "gguf"]
OURS: dict[str, tuple[list[str], str]] = {  # arm -> options of the server, method
    "sprinter, bfloat16": (TORCH, "autoregressive"),
    "sprinter, bfloat16, lookup": (TORCH, "lookup(n=3, gamma=5)"),
    "sprinter, own kernels": (BLOCKS, "autoregressive"),
    "sprinter, own kernels, lookup": (BLOCKS, "lookup(n=3, gamma=5)"),
    "sprinter, llama.cpp": (["--target", SMOLLM2], "autoregressive"),
    "sprinter, llama.cpp, lookup": (["--target", SMOLLM2], "lookup(n=3, gamma=5)"),
    "built-in": ([], "speculative(gamma=3)"),
}
THEIRS = ("vllm, bfloat16", "llama.cpp, file")


def open_servers(arms: list[str], stack: ExitStack, folder: Path) -> dict[str, ServerProcess]:
    """One server for every arm; arms with the same options share one."""
    found: dict[str, ServerProcess] = {}
    ours: dict[str, ServerProcess] = {}
    for arm in arms:
        port, log = free_port(), folder / f"{arm.replace(', ', '-')}.log"
        if arm in OURS:
            options = OURS[arm][0]
            key = " ".join(options)
            if key not in ours:
                line = sprinter_server(port, *options, "--rows", str(ROWS), "--max-len", str(MAX_LEN))
                ours[key] = stack.enter_context(started(arm, line, port, log))
            found[arm] = ours[key]
            continue
        if arm.startswith("vllm"):
            line = vllm_server(
                port,
                dequantised(folder / "smollm2", "bfloat16", SMOLLM2),
                rows=ROWS,
                max_len=MAX_LEN,
                dtype="bfloat16",
            )
            more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
            # It compiles when it starts, which takes minutes the first time.
            found[arm] = stack.enter_context(started(arm, line, port, log, seconds=1200, **more))
        else:
            file = find(SMOLLM2, "target").at
            line = llama_server(port, file, rows=ROWS, max_len=MAX_LEN, threads=1)
            found[arm] = stack.enter_context(started(arm, line, port, log))
    return found


async def ask(server: ServerProcess, arm: str, prompts: list[str]) -> tuple[list[StreamTimes], float]:
    """All prompts at once: their streams, and seconds until the last one ends."""
    body: dict[str, Any] = {
        "model": "model", "max_tokens": NEW_TOKENS, "temperature": 0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if arm in OURS:
        body["sprinter"] = {"method": OURS[arm][1]}
    async with server.client() as http:
        began = time.perf_counter()
        found = await asyncio.gather(*(stream(http, {**body, "prompt": prompt}) for prompt in prompts))
        return list(found), time.perf_counter() - began


def measure(
    servers: dict[str, ServerProcess],
    prompts: list[str],
    repeats: int,
    texts: int,
    write: Callable[[list[dict[str, Any]], int], None],
) -> None:
    """One row an arm and number of streams, written after each repeat: a run that is cut off keeps what it has."""
    kept: dict[tuple[str, int], tuple[list[StreamTimes], list[float]]] = {}
    left = iter(prompts)
    for repeat in range(-1, repeats):  # the first one warms up
        for count in STREAMS:
            for _ in range(max(1, texts // count) if repeat >= 0 else 1):
                mine = [next(left) for _ in range(count)]
                for arm, server in servers.items():
                    found, seconds = asyncio.run(ask(server, arm, mine))
                    wrong = [one.ended for one in found if one.ended != "done"]
                    if wrong:
                        sys.exit(f"error: {arm}: {wrong[0]}")
                    if repeat >= 0:
                        streams, times = kept.setdefault((arm, count), ([], []))
                        streams += found
                        times.append(seconds)
            print(f"repeat {repeat + 1}/{repeats}, {count} streams", file=sys.stderr, flush=True)
        if repeat >= 0:
            rows = [
                {"server": arm, "at_once": count, "texts": len(found), **latencies(found, sum(times))}
                for (arm, count), (found, times) in kept.items()
            ]
            write(rows, repeat + 1)


def table(rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    return "\n".join(
        grid(
            "streams | server | tokens/s | first text, ms (median) | (95 %) | between events, ms (median) | (95 %) "
            "| tokens an event",
            [
                f"{row['at_once']} | {row['server']} | {row['tokens_per_s']:.0f} | {row['first_ms'][0]:.0f} "
                f"| {row['first_ms'][1]:.0f} | {row['between_ms'][0]:.1f} | {row['between_ms'][1]:.1f} "
                f"| {row['tokens_per_event']:.2f}"
                for row in sorted(rows, key=lambda row: row["at_once"])
            ],
        )
    )


def main() -> None:
    """Start the servers, let them take turns, write."""
    parser = option_parser(__doc__)
    every = [*(arm for arm in OURS if arm != "built-in"), *THEIRS]
    parser.add_argument("--arms", nargs="+", choices=[*OURS, *THEIRS], default=sized(every, ["built-in"]))
    parser.add_argument("--repeats", type=int, default=sized(3, 1))
    parser.add_argument("--texts", type=int, default=sized(16, 2), help="a repeat, at each number of streams")
    args = parser.parse_args()
    began = time.time()
    per = sum(count * max(1, args.texts // count) for count in STREAMS)
    prompts = heldout_prompts(args.data, sum(STREAMS) + args.repeats * per)
    folder = scratch("latency") if SMOKE else Path(".work/latency")
    folder.mkdir(parents=True, exist_ok=True)

    def write(rows: list[dict[str, Any]], repeats: int) -> None:
        results = {
            "benchmark": NAME,
            "command": command(),
            "environment": environment(),
            "repeats": repeats,
            "new_tokens": NEW_TOKENS,
            "rows": rows,
            "seconds": round(time.time() - began, 1),
        }
        write_results(NAME, results, table(rows))

    with ExitStack() as stack:
        measure(open_servers(args.arms, stack, folder), prompts, args.repeats, args.texts, write)


if __name__ == "__main__":
    main()
