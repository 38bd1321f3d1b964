"""Keys and values in bfloat16 against float32 on a CPU: time of a pass of one token, memory, and laws.

    python benchmarks/engine/cache.py [--models builtin smollm2] [--rows 1 16 64] [--held 128 512 2048] [--repeats 8]

Rows hold so many tokens of this repository's pages, as far as the model's context goes; then each reads one token, by
runners of both dtypes in turn. What would take more than 2 GB is left out. Laws are compared at all positions of one
row: their mean distance (total variation, temperature 1), and how often the largest probability is another token's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.common import ROOT, cells, grid, in_turn, note_run, option_parser, write_results
from benchmarks.real.arms import SMOLLM2
from benchmarks.smoke import sized
from sprinter.bench.statistics import ratio_of_sums
from sprinter.laws import raw_law, tv_distance
from sprinter.models import kernels
from sprinter.models.choose import make_runner
from sprinter.models.pair import builtin_paths, load_models

NAME = "engine/cache"
DTYPES = ("float32", "bfloat16")
MODELS: dict[str, dict[str, Any]] = {
    "builtin": {"target": builtin_paths()["target"], "compile": True},
    "smollm2": {"target": SMOLLM2, "dequantise": True, "dtype": "int8"},
}
LARGEST = 2e9  # bytes of a cache


def runner_of(model: Any, dtype: str, rows: int, held: int) -> Any:
    """A runner of so many rows with room for one token more than they hold."""
    kernels.set_cache_dtype(model, dtype)
    return make_runner(model, batch=rows, max_len=held + 1, compile=True)


def compared(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Mean distance of laws over a text, and share of positions at which the most probable token differs."""
    float_laws, half_laws = (
        raw_law(runner_of(model, dtype, 1, len(ids)).extend(ids[None]).logits[0]) for dtype in DTYPES
    )
    other = float_laws.argmax(-1) != half_laws.argmax(-1)
    return float(tv_distance(float_laws, half_laws).mean()), float(other.float().mean())


def timed(
    model: Any, ids: torch.Tensor, rows: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of passes over one token in each row, by dtype; bytes of the caches."""
    runners, n = {dtype: runner_of(model, dtype, rows, len(ids) - 1) for dtype in DTYPES}, len(ids) - 1
    for runner in runners.values():
        runner.extend(ids[None, :n], rows=[0], logits=False)
        runner.copy(0, range(1, rows))
    last, seconds = ids[None, n:].expand(rows, 1), {dtype: list[float]() for dtype in DTYPES}
    for turn, dtype in in_turn(DTYPES, repeats + 2, f"{rows} rows of {n} tokens"):
        began = time.perf_counter()
        runners[dtype].extend(last)
        taken = time.perf_counter() - began
        runners[dtype].rewind([n] * rows)
        if turn >= 2:
            seconds[dtype].append(taken)
    return seconds, {dtype: runner.cache_bytes for dtype, runner in runners.items()}


def main() -> None:
    parser = option_parser(__doc__, data=False)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=sized([*MODELS], ["builtin"]))
    parser.add_argument("--rows", nargs="+", type=int, default=sized([1, 16, 64], [2]))
    parser.add_argument("--held", nargs="+", type=int, default=sized([128, 512, 2048], [20]))
    parser.add_argument("--repeats", type=int, default=sized(8, 2))
    options = parser.parse_args()
    began, measured, laws = time.time(), list[dict[str, Any]](), list[dict[str, Any]]()
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))[:40_000]
    for name in options.models:
        loaded = load_models(**MODELS[name])
        assert loaded.tokenizer is not None
        model, context = loaded.target.model, loaded.target.context
        ids = torch.tensor(loaded.tokenizer(text, verbose=False)["input_ids"][: max(options.held) + 1])
        with torch.inference_mode():
            for held in sorted({min(held, context - 1) for held in options.held}):
                distance, other = compared(model, ids[:held])
                laws.append({"model": name, "held": held, "distance": distance, "other": other})
                print(json.dumps(laws[-1]), flush=True)
                for rows in options.rows:
                    kernels.set_cache_dtype(model, "float32")
                    if rows * (held + 2) * (kernels.cache_token_bytes(model) or 0) > LARGEST:
                        continue
                    seconds, size = timed(model, ids[: held + 1], rows, options.repeats)
                    ratio = ratio_of_sums(seconds["float32"], seconds["bfloat16"])
                    measured.append({
                        "model": name, "rows": rows, "held": held, "seconds": seconds, "bytes": size, "ratio": ratio
                    })  # fmt: skip
                    print(json.dumps({k: v for k, v in measured[-1].items() if k != "seconds"}), flush=True)
    head = "model | rows | tokens held | float32, ms | bfloat16, ms | ÷ | float32, MB | bfloat16, MB"
    means = [{dtype: 1e3 * sum(own) / len(own) for dtype, own in one["seconds"].items()} for one in measured]
    lines = grid(head, [
        f"{one['model']} | {one['rows']} | {one['held']} | {mean['float32']:.2f} | {mean['bfloat16']:.2f} | "
        f"{cells(one['ratio'])} | {one['bytes']['float32'] / 1e6:.1f} | {one['bytes']['bfloat16'] / 1e6:.1f}"
        for one, mean in zip(measured, means, strict=True)
    ])  # fmt: skip
    lines += ["", "**Laws of float32 against bfloat16**", ""]
    lines += grid("model | tokens | mean TV | another most probable token", [
        f"{one['model']} | {one['held']} | {one['distance']:.5f} | {100 * one['other']:.2f} %" for one in laws
    ])  # fmt: skip
    results: dict[str, Any] = {"benchmark": NAME, "measured": measured, "laws": laws}
    note_run(results, "cache", began)
    write_results(NAME, results, "\n".join(lines))


if __name__ == "__main__":
    main()
