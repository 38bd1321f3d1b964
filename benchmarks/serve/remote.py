"""A target on a server, the draft here: tokens/s and target calls of plain, exact and lossy methods by round trip.

    python benchmarks/serve/remote.py --data DIR [--pair builtin|qwen] [--delays 0 20 100] [--prompts 20]

The server runs the target alone, on this machine; each request waits the delay (milliseconds) before it is sent. One
pair a delay, so that `auto` measures its own costs; all methods and delays in turn, prompt by prompt, greedily. The
server has read each prompt before. Round trips and bytes are those of answers, with the meter's closing passes.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx2

import sprinter
from benchmarks.common import (
    Arm,
    cells,
    grid,
    heldout_prompts,
    interleave,
    method_arm,
    option_parser,
    save,
    speed_ratio,
)
from benchmarks.serve.servers import free_port, sprinter_server, started
from benchmarks.smoke import scratch, sized
from sprinter.engine.generation import Generation
from sprinter.engine.prompt import encode
from sprinter.models.remote import RemoteModel

NAME = "serve/remote"
EXACT = sized(("speculative(gamma=5)", "speculative(gamma=15)", "svip", "auto"), ("svip",))
QWEN = "Qwen/Qwen2.5-Coder-{0}B-Instruct-GGUF/Qwen2.5-Coder-{0}B-Instruct.Q4_K_M.gguf"
PAIRS: dict[str, tuple[list[str], tuple[str, ...]]] = {  # the server's options, lossy methods
    "builtin": (
        [],
        ("sprinter(tail=0, budget=0.05)", "sprinter(tail=3, budget=0.05)", "sprinter(tail=3, budget=0.1)"),
    ),
    "qwen": (
        ["--target", QWEN.format(1.5), "--runner", "torch", "--dtype", "gguf"],
        ("certain(tail=0, budget=0.05)", "certain(tail=3, budget=0.05)", "certain(tail=3, budget=0.1)"),
    ),
}


class Delayed(httpx2.HTTPTransport):
    """A network with a delay, in seconds."""

    def __init__(self, delay: float) -> None:
        super().__init__()
        self.delay = delay

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        time.sleep(self.delay)
        return super().handle_request(request)


def load(name: str, url: str, delay: float) -> sprinter.Pair:
    """The draft here, and the server's target."""
    target = RemoteModel(url, transport=Delayed(delay))
    if name == "builtin":
        paths = sprinter.builtin_paths()
        return sprinter.load_pair(target, paths["draft"], gate=paths["gate"], prefix_cache_bytes=0)
    return sprinter.load_pair(
        target, QWEN.format(0.5), draft_runner="torch", draft_dtype="gguf", prefix_cache_bytes=0
    )


def counted(pair: sprinter.Pair, arm: Arm, kept: list[dict[str, float]]) -> Arm:
    """The arm on a prompt that the server has read; what an answer asked is kept, closing passes of the meter too."""
    run, target = arm.run, pair.models.target.model
    assert isinstance(target, RemoteModel)

    def counting(prompt: str, seed: int) -> Generation:
        target.laws([(ids := encode(prompt, pair.models), len(ids) - 1)])  # or one arm reads it for all
        before = dataclasses.asdict(target.usage)
        out = run(prompt, seed)
        kept.append({key: value - before[key] for key, value in dataclasses.asdict(target.usage).items()})
        return out

    return Arm(arm.name, counting)


def main() -> None:
    """Start the server, load a pair for each delay, run all methods."""
    parser = option_parser(__doc__)
    parser.add_argument("--pair", choices=PAIRS, default="builtin")
    parser.add_argument(
        "--delays", type=int, nargs="+", default=sized([0, 20, 100], [0, 5]), help="milliseconds"
    )
    parser.add_argument("--prompts", type=int, default=sized(20, 1))
    parser.add_argument("--new-tokens", type=int, default=sized(48, 6))
    args = parser.parse_args()
    began, (options, lossy) = time.time(), PAIRS[args.pair]
    asked: dict[str, list[dict[str, float]]] = {}
    prompts = heldout_prompts(args.data, args.prompts)
    port = free_port()
    line = sprinter_server(port, *options, "--max-len", "1024")
    with started("sprinter", line, port, scratch("remote") / "log"):
        arms: dict[int, list[Arm]] = {}
        for delay in args.delays:
            pair = load(args.pair, f"http://127.0.0.1:{port}/v1", delay / 1000)
            plain = [
                method_arm(pair, method, 0.0, f"{method}, {delay} ms", args.new_tokens)
                for method in ("autoregressive", *EXACT, *sized(lossy, lossy[:1]))
            ]
            arms[delay] = [counted(pair, arm, asked.setdefault(arm.name, [])) for arm in plain]
        interleave([arm for group in arms.values() for arm in group], prompts, note=args.pair)
    rows, shown = [], []
    for delay, group in arms.items():
        for arm in group:
            speed, tokens = speed_ratio(arm, group[0]), float(arm.tokens.sum())
            usage = {key: sum(one[key] for one in asked[arm.name][1:]) for key in asked[arm.name][0]}
            row = {
                "method": arm.name.rpartition(",")[0], "delay_ms": delay, "speed_up": list(speed),
                "tokens_per_s": tokens / float(arm.busy_s.sum()), "calls_per_token": float(arm.calls.sum()) / tokens,
                "drift": float(arm.drift.sum()) / tokens, "tokens": tokens, **usage,
                "same_text": sum(
                    [t.id for t in one.tokens] == [t.id for t in base.tokens]
                    for one, base in zip(arm.outs, group[0].outs, strict=True)
                ),
            }  # fmt: skip
            rows.append(row)
            shown.append(
                f"{delay} | {row['method']} | {row['tokens_per_s']:.1f} | {cells(speed)} | "
                f"{row['calls_per_token']:.2f} | {usage['round_trips'] / tokens:.2f} | "
                f"{usage['received_bytes'] / tokens / 1024:.0f} | {row['drift']:.3f} | {row['same_text']}"
            )
    table = grid(
        "delay, ms | method | tokens/s | over plain | calls/token | trips/token | KiB/token | drift | texts as plain",
        shown,
    )
    save(
        NAME + ("" if args.pair == "builtin" else f"-{args.pair}"),
        "\n".join(table),
        began,
        len(prompts),
        rows=rows,
        new_tokens=args.new_tokens,
    )


if __name__ == "__main__":
    main()
