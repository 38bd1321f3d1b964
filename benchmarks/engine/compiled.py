"""``compile=True`` on the built-in pair: how long its first text takes, what lies on the disk, and how fast it is then.

    python benchmarks/engine/compiled.py --data DIR [--prompts 12] [--threads 2] [--real]

Two ways: "kernels", as a checkpoint is loaded, whose passes are one call of our kernels; and "captured", as a model in
memory is, where AOTInductor compiles each shape with the weights in it. First texts are timed in processes of their
own with an empty cache, from the import to the last of 32 tokens. Then both, and the pair step by step, take turns
prompt by prompt in one process. ``--real``: the first text of the Qwen pair's 4-bit files too, packing included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from transformers import AutoModelForCausalLM

import sprinter
from benchmarks.common import (
    cells,
    grid,
    heldout_prompts,
    interleave,
    method_arm,
    note_run,
    option_parser,
    speed_ratio,
    write_results,
)  # fmt: skip
from benchmarks.real.arms import DRAFT, TARGET
from benchmarks.smoke import SMOKE, sized
from sprinter.models.capture.compiled import cache_dir
from sprinter.models.pair import builtin_paths

NAME = "engine/compiled"
METHODS = sized(("autoregressive", "speculative(gamma=5)", "sprinter"), ("speculative(gamma=2)",))
TEMPERATURES = sized((0.0, 1.0), (1.0,))
FIRST = sized(32, 4)
WAYS = ("kernels", "captured")


def loaded(way: str) -> sprinter.Pair:
    """The built-in pair; "step by step": not compiled. The Qwen pair's 4-bit files for "real"."""
    if way == "real":
        return sprinter.load_pair(TARGET, DRAFT, runner="torch", dtype="gguf", compile=True)
    if way != "captured":
        return sprinter.load_pair(compile=way == "kernels")
    paths = builtin_paths()
    models = {
        which: AutoModelForCausalLM.from_pretrained(paths[which], dtype=torch.float32)
        for which in ("target", "draft")
    }
    return sprinter.load_pair(**models, tokenizer=str(paths["target"]), gate=paths["gate"], compile=True)


def first_text(way: str, method: str) -> dict[str, Any]:
    """Load a pair and generate, in this process; seconds since its start, and what the cache holds then."""
    pair = loaded(way)
    ready = time.perf_counter()
    pair.generate("The river rises in", method=method, max_new_tokens=FIRST)
    done = time.perf_counter()
    files = [path for path in cache_dir().glob("*") if path.suffix in (".pt2", ".so")]
    return {
        "load_s": ready - BEGAN, "first_text_s": done - BEGAN, "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }  # fmt: skip


def in_a_process(way: str, method: str, threads: int) -> dict[str, Any]:
    """``first_text`` with an empty cache; with ``--smoke`` in this process."""
    if SMOKE:
        return {"way": way, "method": method, **first_text(way, method)}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--first",
            way,
            method,
            "--threads",
            str(threads),
        ]
        more = {"SPRINTER_CACHE": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            command, env={**os.environ, **more}, capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(f"error: the first text failed: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"way": way, "method": method, **found}


def speeds(data: Path, prompts: int) -> list[dict[str, Any]]:
    """Both ways and the pair step by step, over it."""
    pairs = {"step by step": loaded("step by step"), **{way: loaded(way) for way in WAYS}}
    texts, rows = heldout_prompts(data, prompts), []
    for temperature in TEMPERATURES:
        for method in METHODS:
            arms = {way: method_arm(pair, method, temperature, way) for way, pair in pairs.items()}
            interleave([*arms.values()], texts, note=f"T={temperature} {method}")
            rows += [
                {
                    "temperature": temperature, "method": method, "way": way,
                    "tokens_per_s": float(arm.tokens.sum() / arm.busy_s.sum()),
                    "over_captured": speed_ratio(arm, arms["captured"]),
                }
                for way, arm in arms.items()
            ]  # fmt: skip
    return rows


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown tables."""
    first = [
        f"{row['way']} | `{row['method']}` | {row['load_s']:.1f} | {row['first_text_s']:.1f} | {row['files']} | "
        f"{row['bytes'] / 2**20:.1f}"
        for row in results["first"]
    ]
    shown = [
        f"{row['temperature']} | `{row['method']}` | {row['way']} | {row['tokens_per_s']:.0f} | "
        + cells(row["over_captured"])
        for row in results["speeds"]
    ]
    head = "way | method | loaded, s | first text, s | files | MiB on the disk"
    return "\n".join(
        [
            f"From an empty cache, the first text of {FIRST} tokens, in seconds since the start of the process. "
            "real: Qwen2.5-Coder 1.5B and 0.5B from 4-bit files, packing included.",
            "", *grid(head, first), "",
            "Afterwards, the built-in pair, 64 tokens with prefill:", "",
            *grid("temperature | method | way | tokens/s | ÷ captured", shown),
        ]
    )  # fmt: skip


def main() -> None:
    """Time first texts; measure; write."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(12, 2))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--real", action="store_true", help="the Qwen pair's first text too")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    began, results = time.time(), {"benchmark": NAME}
    asked = [(way, method) for way in WAYS for method in METHODS[1:] or METHODS]
    asked += [("real", "speculative(gamma=5)")] if chosen.real else []
    results["benchmark"] = NAME
    results["first"] = [in_a_process(way, method, chosen.threads) for way, method in asked]
    results["speeds"] = speeds(chosen.data, chosen.prompts)
    note_run(results, "compiled", began)
    write_results(NAME, results, table(results))


if __name__ == "__main__":
    BEGAN = time.perf_counter()
    if "--first" in sys.argv:
        at = sys.argv.index("--first")
        torch.set_num_threads(int(sys.argv[sys.argv.index("--threads") + 1]))
        print(json.dumps(first_text(*sys.argv[at + 1 : at + 3])))
    else:
        main()
