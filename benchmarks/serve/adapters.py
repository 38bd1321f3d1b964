"""Requests with a LoRA adapter that is not merged, and without one.

    python benchmarks/serve/adapters.py --data DIR [--prompts 10]

A pair of GGUF files of 4 bits, whose weights stay as they are: each forward pass of the target computes the adapter's
product beside them. The adapter has rank 16 and small random numbers, in q_proj and v_proj of all layers, as PEFT's
default is for such models. Plain decoding and a method that drafts, each without it and with it. Times are without the
prompt's, which have a column of their own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from safetensors.torch import save_file

import sprinter
from benchmarks.common import Arm, cells, grid, heldout_prompts, interleave, option_parser, save
from benchmarks.real.arms import DRAFT, TARGET
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.statistics import ratio_of_ratios
from sprinter.engine.generation import Generation

RANK, NAMES = 16, ("q_proj", "v_proj")
NEW_TOKENS = sized(32, 4)
METHODS = {"plain": "autoregressive", "svip": "svip"}


def write_adapter(folder: Path, model: torch.nn.Module) -> int:
    """Write an adapter of a model as PEFT does; returns the number of its layers."""
    chance, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for path, layer in model.named_modules():
        if path.endswith(NAMES):
            for name, shape in (("A", (RANK, layer.in_features)), ("B", (layer.out_features, RANK))):
                key = f"base_model.model.{path}.lora_{name}.weight"
                tensors[key] = torch.randn(*shape, generator=chance) / 1000  # type: ignore[arg-type]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*NAMES]}
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return len(tensors) // 2


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(10, 2), help="number of prompts")
    options = parser.parse_args()
    began, models = time.time(), () if SMOKE else (TARGET, DRAFT)
    pair = sprinter.load_pair(*models, prefix_cache_bytes=0, dtype="int8" if SMOKE else "gguf")
    with TemporaryDirectory() as folder:
        layers = write_adapter(Path(folder), pair.models.target.module("an adapter"))
        adapted = pair.with_lora(folder)

    def arm(name: str, method: str, of: sprinter.Pair) -> Arm:
        def run(prompt: str, seed: int) -> Generation:
            return of.generate(prompt, method=method, max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=seed)

        return Arm(name, run)

    arms = [
        arm(f"{name}{more}", method, of)
        for name, method in METHODS.items() for more, of in (("", pair), (", adapter", adapted))
    ]  # fmt: skip
    interleave(arms, heldout_prompts(options.data, options.prompts), note="texts")
    rows, lines = [], []
    for i, one in enumerate(arms):
        base = arms[i - i % 2]
        times, base_times = (x.busy_s - [out.stats.prefill_s for out in x.outs] for x in (one, base))
        speed = ratio_of_ratios((one.tokens, times), (base.tokens, base_times))
        each_ms, prompt_ms = (
            1000 * times.sum() / one.tokens.sum(),
            1000 * one.total("prefill_s") / len(one.outs),
        )
        rows.append({
            "arm": one.name, "ms_a_token": each_ms, "prompt_ms": prompt_ms, "speed_over_without": list(speed),
            "calls_a_token": one.calls.sum() / one.tokens.sum(),
        })  # fmt: skip
        lines.append(f"{one.name} | {each_ms:.1f} | {prompt_ms:.0f} | {cells(speed)}")
    head = "arm | ms/token | prompt, ms | speed over that without"
    save(
        "serve/adapters", "\n".join(grid(head, lines)), began, options.prompts, layers=layers, rank=RANK, rows=rows,
        new_tokens=NEW_TOKENS,
    )  # fmt: skip


if __name__ == "__main__":
    main()
