"""Texts in waves on a GPU: milliseconds a step by the number of rows, with fused layers and with transformers' own.

    python benchmarks/gpu/waves.py --out OUT [--rows 64 256 1024] [--profile]

Random weights of SmolLM2-135M's shape in bfloat16. A step gives each row a token: a captured pass, a draw, and the 64
most probable tokens of each law. Both arms take turns; timed is what is behind the first steps of a wave.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from sprinter_kernels import fused
from transformers import LlamaConfig, LlamaForCausalLM

import sprinter
from benchmarks.common import command, environment, grid
from benchmarks.gpu.latency import number_tokenizer
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.engine.pair import Pair
from sprinter.files import write_atomic
from sprinter.training.drafts.waves import WaveWriter

NAME = "gpu/waves"
PROMPT, FIRST, STEPS, TOP = sized(64, 4), sized(64, 2), sized(96, 2), sized(64, 4)
ARMS = {"fused layers": fused.LARGEST, "transformers' layers": 0}
"""Name -> most tokens of a pass that the kernels serve."""


def shape() -> LlamaConfig:
    """SmolLM2-135M's."""
    return LlamaConfig(
        vocab_size=sized(49152, 64), hidden_size=sized(576, 24), intermediate_size=sized(1536, 48),
        num_hidden_layers=sized(30, 2), num_attention_heads=sized(9, 3), num_key_value_heads=sized(3, 1),
        max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip


@contextmanager
def most(tokens: int) -> Iterator[None]:
    """Context in which passes of more tokens are captured without the kernels."""
    before, fused.LARGEST = fused.LARGEST, tokens
    kernels, fused.MOST = fused.MOST, min(fused.MOST, tokens)
    try:
        yield
    finally:
        fused.LARGEST, fused.MOST = before, kernels


class Arm:
    """Waves of some rows, whose passes are captured as ``ARMS`` says."""

    def __init__(self, pair: Pair, rows: int, tokens: int) -> None:
        self._rows, self._tokens = rows, tokens
        made = {"rows": rows, "prompt_tokens": PROMPT, "temperature": 1.0, "top": TOP, "ends": ()}
        self._writers = [
            WaveWriter(pair.models.target, pair.models.vocab_size, new_tokens=new, **made)  # type: ignore[arg-type]
            for new in (FIRST, FIRST + STEPS)
        ]
        chance = torch.Generator().manual_seed(rows)
        self._prompts = [
            torch.randint(
                1, pair.models.vocab_size, (PROMPT - row % (PROMPT // 2),), generator=chance
            ).tolist()
            for row in range(rows)
        ]

    def step_ms(self) -> float:
        """Milliseconds a step behind the first ones."""
        seconds = []
        for writer in self._writers:
            began = time.perf_counter()
            with most(self._tokens):
                writer.write(self._prompts, range(self._rows))
            seconds.append(time.perf_counter() - began)
        return 1000 * (seconds[1] - seconds[0]) / STEPS


def profiled(arm: Arm) -> str:
    """What the device does in two waves."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        arm.step_ms()
    return str(
        seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=24, max_name_column_width=60)
    )


def table(results: dict[str, Any]) -> str:
    """Milliseconds and tokens a second, in Markdown."""
    rows = [
        f"{one['rows']} | {one['arm']} | {one['ms']:.2f} | {one['rows'] / one['ms'] * 1000:,.0f}"
        for one in results["measured"]
    ]
    return "\n".join(grid("rows | layers | ms a step | tokens/s", rows))


def main() -> None:
    """Time; write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default=sized("cuda", "cpu"))
    parser.add_argument("--rows", type=int, nargs="+", default=sized([64, 256, 1024], [3]))
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--profile", action="store_true", help="print what the device does with most rows")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    chosen = parser.parse_args()
    chosen.out = chosen.out or scratch("waves")
    began = time.perf_counter()
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape()).eval().to(chosen.device, torch.float32 if SMOKE else torch.bfloat16)  # type: ignore[arg-type]
    speaker = number_tokenizer(model.config.vocab_size)
    pair = sprinter.load_pair(model, tokenizer=speaker, compile=False if SMOKE else None)
    measured = []
    for rows in chosen.rows:
        arms = {name: Arm(pair, rows, tokens) for name, tokens in ARMS.items()}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for i in range(chosen.rounds + 1):  # the first round captures
            for name, arm in arms.items():
                taken = arm.step_ms()
                if i:
                    times[name].append(taken)
        measured += [{"rows": rows, "arm": name, "ms": median(taken)} for name, taken in times.items()]
        print(measured[-2:], file=sys.stderr, flush=True)
    results = {
        "benchmark": NAME, "command": command(), **({"smoke": True} if SMOKE else {}), "environment": environment(),
        "seconds": round(time.perf_counter() - began, 1), "measured": measured,
    }  # fmt: skip
    chosen.out.mkdir(parents=True, exist_ok=True)
    write_atomic(chosen.out / "waves.json", json.dumps(results, indent=1) + "\n")
    write_atomic(chosen.out / "waves.md", table(results) + "\n")
    print(json.dumps(results))
    if chosen.profile:
        print(profiled(next(iter(arms.values()))), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
