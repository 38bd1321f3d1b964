"""llama.cpp as a runner: our plain decoding against llama-cpp-python's own loop, and what the methods gain on it.

One run, all arms interleaved on the same prompts, for each way to store the weights:

* our plain decoding over llama-cpp-python's own loop (the first row; 0.95 is wanted);
* speed against drift: each method at several settings, over our plain decoding;
* what a pass over n tokens costs, target and draft, which is why a method wins or loses.

Run: python benchmarks/llamacpp.py --data DIR [--prompts 40] [--dtypes f32 f16 q8_0]
     [--target DIR --draft DIR --gate DIR]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from common import Arm, cells, heldout_prompts, interleave, interval, method_arm, save, speed_ratio

import sprinter
from sprinter.bench.arm import Ask
from sprinter.bench.arms.parse import parse_arm
from sprinter.engine.convert import convert_gguf
from sprinter.laws import Sampling
from sprinter.models.pair import builtin_paths
from sprinter.models.runner import make_runner

NAME = "llamacpp"
PLAIN, OWN = "autoregressive", ("llamacpp:plain", "llamacpp:lookup")
EXACT = [f"speculative(gamma={gamma})" for gamma in (1, 2, 3, 4)] + ["lookup"]
LOSSY = [
    *(f"sprinter(tau={tau})" for tau in (0.3, 0.5, 0.6, 0.7, 0.8)),
    *(f"opt(epsilon={slack})" for slack in (0.1, 0.3)),
    *(f"fuzzy(threshold={gap})" for gap in (0.2, 0.4)),
]
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT, PASSES = 200, 60
DRIFT = 0.15  # the bound for the goal


def own_arm(pair: sprinter.Pair, spec: str, temperature: float, new_tokens: int) -> Arm:
    """An arm of the bench beside our methods."""
    arm = parse_arm(spec)
    arm.start(pair)

    def run(prompt: str, seed: int) -> Any:
        ids = tuple(pair.tokenizer(prompt)["input_ids"])
        answer = arm.answer(Ask(ids, new_tokens, Sampling(temperature=temperature), seed))
        return SimpleNamespace(
            stats=SimpleNamespace(wall_s=answer.wall_s, closing_s=0.0, new_tokens=len(answer.ids))
        )

    return Arm(spec, run)


def passes(pair: sprinter.Pair) -> dict[str, dict[int, float]]:
    """Median ms of a pass over n tokens after ``CONTEXT`` others, sizes interleaved, target and draft."""
    found: dict[str, dict[int, float]] = {}
    for which, model in (("target", pair.models.target), ("draft", pair.models.draft)):
        assert model is not None
        runner = make_runner(model.model, max_len=256)
        tokens = torch.randint(
            1, pair.models.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(0)
        )
        runner.extend(tokens)
        times: dict[int, list[float]] = {n: [] for n in SIZES}
        for _ in range(PASSES):
            for n in SIZES:
                began = time.perf_counter()
                runner.extend(tokens[:, :n])
                times[n].append(time.perf_counter() - began)
                runner.rewind([CONTEXT])
        found[which] = {n: 1e3 * median(values) for n, values in times.items()}
    return found


def measure(
    pair: sprinter.Pair, prompts: list[str], repeats: int, temperature: float, note: str
) -> list[dict[str, Any]]:
    """One row an arm: speed over our plain decoding, drift, calls."""
    own = [own_arm(pair, spec, temperature, 64) for spec in OWN]
    methods = [method_arm(pair, spec, temperature) for spec in [PLAIN, *EXACT, *LOSSY]]
    interleave([*own, *methods], prompts, repeats, note)
    plain = methods[0]
    rows = []
    for arm in [*own, *methods]:
        row: dict[str, Any] = {
            "arm": arm.name,
            "tokens_per_s": float(arm.tokens.sum() / arm.busy_s.sum()),
            "over_plain": speed_ratio(arm, plain),
            "over_own_loop": speed_ratio(arm, own[0]),
        }
        if arm not in own:
            new = arm.total("new_tokens")
            row |= {
                "drift": interval(arm.drift, arm.tokens),
                "target_calls_per_token": arm.total("target_calls") / new,
                "draft_steps_per_token": arm.total("draft_steps") / new,
                "ms_per_token": {
                    part: 1e3 * arm.total(part) / new for part in ("draft_s", "gate_s", "target_s", "other_s")
                },
            }
        rows.append(row)
    return rows


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest method whose drift stays within the bound."""
    ours = [row for row in rows if "drift" in row and row["drift"][0] <= DRIFT and row["arm"] != PLAIN]
    fastest = max(ours, key=lambda row: row["tokens_per_s"])
    return {key: fastest[key] for key in ("arm", "over_plain", "drift")}


def table(results: dict[str, Any]) -> str:
    lines = []
    for key, part in results.items():
        lines += [
            f"### {key}", "",
            "| arm | tokens/s | over plain | over llama-cpp-python | drift | target calls | draft, target, other ms |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]  # fmt: skip
        for row in part["rows"]:
            ms = row.get("ms_per_token")
            told = [
                f"{row['tokens_per_s']:.0f}", cells(row["over_plain"]), cells(row["over_own_loop"]),
                cells(row["drift"], 3) if ms else "", f"{row['target_calls_per_token']:.2f}" if ms else "",
                f"{ms['draft_s'] + ms['gate_s']:.2f}, {ms['target_s']:.2f}, {ms['other_s']:.2f}" if ms else "",
            ]  # fmt: skip
            lines.append(f"| {row['arm']} | " + " | ".join(told) + " |")
        top = part["best"]
        lines += ["", f"Best within drift {DRIFT}: {top['arm']}, {cells(top['over_plain'])} times plain.", ""]
        lines += ["| ms a pass of n tokens | " + " | ".join(map(str, SIZES)) + " |"]
        lines += ["| --- |" + " --- |" * len(SIZES)]
        for which, costs in part["passes_ms"].items():
            lines.append(f"| {which} | " + " | ".join(f"{costs[n]:.2f}" for n in SIZES) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the text files")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["f32", "f16", "q8_0"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0])
    for role, path in builtin_paths().items():
        parser.add_argument(f"--{role}", type=Path, default=path)
    args = parser.parse_args()
    began, results = time.time(), {}
    prompts = heldout_prompts(args.data, args.prompts)
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtypes:
            files = [
                convert_gguf(source, Path(folder) / f"{role}-{dtype}.gguf", dtype)
                for role, source in (("target", args.target), ("draft", args.draft))
            ]
            pair = sprinter.load_pair(files[0], draft=files[1], gate=args.gate)
            for temperature in args.temperatures:
                key = f"{dtype}, temperature {temperature:g}"
                rows = measure(pair, prompts, args.repeats, temperature, key)
                results[key] = {"rows": rows, "best": best(rows), "passes_ms": passes(pair)}
                save(NAME, table(results), began, args.prompts, results=results)


if __name__ == "__main__":
    main()
