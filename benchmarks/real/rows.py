"""Many rows at once on real models: plain decoding against vLLM, and speculation and the dial against plain decoding.

    python benchmarks/real/rows.py --data DIR [--pair smollm2|qwen|built-in] [--weights float32] [--sizes 1 4 8]
        [--threads 2] [--no-vllm]

Batches of the ends of GSM8K's questions in the chat template (64 tokens, so that prefill takes little of the time: with
16 all have the same answer; the built-in pair: openings of stories, which it writes), greedy, 48 new tokens, ids in and
ids out. Arms take turns batch by batch, and each repeat has other questions (openings repeat in batches of 64); of an
earlier batch ``auto`` knows what its drafts gained, no more. vLLM reads the file's weights as a transformers model in
bfloat16 or float32, in a process of its own, by the interpreter that SPRINTER_VLLM_PYTHON names, with as many threads;
its own clock counts. Our arms read the file itself: its blocks, 8 bits, or its dequantised weights, through our
kernels, and what follows a pass is compiled. The built-in pair has no file: vLLM reads its target's folder.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import sprinter
from benchmarks.common import cells, grid, in_turn, note_run, option_parser, write_results
from benchmarks.real.arms import DRAFT, SMOLLM2, TARGET, dequantised
from benchmarks.real.weights import prompts_of
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.arm import Ask
from sprinter.bench.arms.peer_vllm import VllmPlain
from sprinter.bench.statistics import BootstrapInterval, ratio_of_ratios
from sprinter.laws import Sampling

NAME = "real/rows"
PLAIN = "autoregressive"
_ANSWERS = 60  # of each arm at each size, at least: as many as there are openings of stories
NEW, ENDS = sized((48, 64), (6, 8))
SIZES = sized((1, 4, 8, 16, 32, 64), (2,))
OPENINGS = str(Path(__file__).resolve().parents[1] / "configs" / "openings.jsonl")
FILES: Mapping[str, dict[str, Any]] = sized(
    {"smollm2": {"target": SMOLLM2}, "qwen": {"target": TARGET, "draft": DRAFT}, "built-in": {}},
    {"smollm2": {}, "qwen": {}, "built-in": {}},
)
WEIGHTS: Mapping[str, tuple[str, ...]] = sized(
    {
        "smollm2": ("gguf", "int8", "bfloat16", "float32"),
        "qwen": ("gguf", "int8"),
        "built-in": ("bfloat16", "float32", "int8"),
    },
    dict.fromkeys(("smollm2", "qwen", "built-in"), ("float32",)),
)
METHODS: Mapping[str, tuple[str, ...]] = {
    "smollm2": ("lookup", "auto"),
    "qwen": ("speculative(gamma=3)", "auto", "certain(budget=0.05)"),
    "built-in": (*(f"speculative(gamma={n})" for n in (1, 2, 4, 6)), "auto"),
}
"""Beside plain decoding, of the first kind of weights. Those that are not ``auto`` draft in each round."""
VLLM = ("bfloat16", "float32")
GREEDY = Sampling(temperature=0.0)
Ids = Sequence[int]
Work = Callable[[Sequence[Ids], Sequence[int]], tuple[int, float]]
"""Prompts and their seeds -> new tokens, seconds."""


@dataclass
class Arm:
    """One way to serve a batch; tokens and seconds of each repeat."""

    name: str
    work: Work
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Over all repeats."""
        return sum(self.tokens) / sum(self.seconds)

    def over(self, base: Arm) -> BootstrapInterval:
        """Ratio of tokens a second, with its 95 % interval over repeats."""
        return ratio_of_ratios((self.tokens, self.seconds), (base.tokens, base.seconds))


def batched(pair: sprinter.Pair, method: str) -> Work:
    """Serve all prompts at the same time."""

    def work(prompts: Sequence[Ids], seeds: Sequence[int]) -> tuple[int, float]:
        pair._runtime.forget_texts()  # other arms have written the same ones
        began = time.perf_counter()
        outs = pair.generate_batch(
            prompts,
            method=method,
            seed=list(seeds),
            max_new_tokens=NEW,
            rows=len(prompts),
            temperature=0.0,
            never_slower=method == "auto",
        )
        return sum(out.stats.new_tokens for out in outs), time.perf_counter() - began

    return work


def vllm_batched(pair: sprinter.Pair, arm: VllmPlain) -> Work:
    """vLLM with the target, by its worker's clock; the arm is started, and the caller's to close."""
    arm.start(pair)

    def work(prompts: Sequence[Ids], seeds: Sequence[int]) -> tuple[int, float]:
        made = arm.answer_all(
            [Ask(tuple(ids), NEW, GREEDY, seed) for ids, seed in zip(prompts, seeds, strict=True)]
        )
        return sum(len(one.ids) for one in made), max(one.wall_s for one in made)

    return work


def measure(arms: Sequence[Arm], prompts: Sequence[Ids], size: int, repeats: int) -> None:
    """Every arm on every batch in turn; one round before that is thrown away."""
    for arm in arms:
        arm.work([prompts[seed % len(prompts)] for seed in range(size)], range(size))
    for i, arm in in_turn(arms, repeats, f"batch {size}:"):
        seeds = range(i * size, (i + 1) * size)
        tokens, seconds = arm.work([prompts[seed % len(prompts)] for seed in seeds], seeds)
        arm.tokens.append(tokens)
        arm.seconds.append(seconds)


def loaded(files: Mapping[str, Any], kind: str) -> sprinter.Pair:
    """The pair with one kind of weights, run by our kernels."""
    runner = {} if SMOKE else {"runner": "torch"}
    return sprinter.load_pair(**files, **runner, dtype=kind, compile=not SMOKE, prefix_cache_bytes=0)


def measured(
    arms: Mapping[str, Work], base: str, prompts: Sequence[Ids], sizes: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Every arm at every size, over vLLM's arms, over plain decoding of the first kind of weights, and over the fastest
    of that and the methods with these weights that are not ``auto``."""
    rows = []
    for size in sizes:
        found = [Arm(name, work) for name, work in arms.items()]
        measure(found, prompts, size, max(repeats, sized(-(-_ANSWERS // size), 1)))
        by_name = {arm.name: arm for arm in found}
        theirs = [arm for arm in found if arm.name.startswith("vllm")]
        kind = base.partition(",")[0]
        fixed = [arm for arm in found if arm.name.startswith(kind) and not arm.name.endswith("auto")]
        best = max(fixed, key=lambda arm: arm.tokens_per_s)
        rows += [
            {
                "rows": size,
                "arm": arm.name,
                "batches": len(arm.tokens),
                "tokens_per_s": arm.tokens_per_s,
                "over_vllm": {peer.name: arm.over(peer) for peer in theirs if arm not in theirs},
                "over_plain": arm.over(by_name[base]),
                "over_best": arm.over(best) if arm.name.startswith(kind) else None,
            }
            for arm in found
        ]
    return rows


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown tables."""
    lines = [
        f"Greedy, {NEW} new tokens, with prefill; tokens a second of all rows together. Our plain: of the first kind."
    ]
    for pair, found in results["pairs"].items():
        peers = list(dict.fromkeys(name for row in found for name in row["over_vllm"]))
        shown = [
            f"{row['rows']} | {row['batches']} | `{row['arm']}` | {row['tokens_per_s']:.1f} | "
            + "".join(f"{cells(row['over_vllm'][peer]) if row['over_vllm'] else '–'} | " for peer in peers)
            + f"{cells(row['over_plain'])} | {cells(row['over_best']) if row['over_best'] else '–'}"
            for row in found
        ]
        head = " | ".join(
            [
                "rows",
                "batches",
                "arm",
                "tokens/s",
                *(f"÷ {peer}" for peer in peers),
                "÷ our plain",
                "÷ fastest but `auto`",
            ]
        )
        lines += ["", f"**{pair}**", "", *grid(head, shown)]
    return "\n".join(lines)


def main() -> None:
    """Load; measure; write."""
    parser = option_parser(__doc__)
    parser.add_argument("--pair", choices=[*FILES], default="smollm2")
    parser.add_argument("--weights", nargs="+", metavar="KIND", help="in place of all kinds that are usual")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="ROWS")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=sized(2, 1), help="at the least, of each size")
    parser.add_argument("--no-vllm", action="store_true", default=SMOKE, help="leave vLLM out")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    began, files = time.time(), FILES[chosen.pair]
    kinds = {kind: loaded(files, kind) for kind in chosen.weights or WEIGHTS[chosen.pair]}
    gc.collect()  # what loading left counts to no arm; the server does so too
    gc.freeze()
    first, pair = next(iter(kinds.items()))
    suite = OPENINGS if chosen.pair == "built-in" else "gsm8k"
    whole = prompts_of(
        pair, chosen.data, sized(max(_ANSWERS, chosen.repeats * max(chosen.sizes)), 2), [suite]
    )
    prompts = [ids[-ENDS:] for ids in whole]
    arms = {f"{kind}, {PLAIN}": batched(each, PLAIN) for kind, each in kinds.items()}
    arms |= {f"{first}, {method}": batched(pair, method) for method in METHODS[chosen.pair]}
    with ExitStack() as stack:
        if not chosen.no_vllm:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for dtype in VLLM:
                source = files.get("target")
                made = (
                    dequantised(folder / dtype, dtype, source)
                    if source
                    else sprinter.builtin_paths()["target"]
                )
                theirs = sprinter.load_pair(str(made), runner="torch", dtype=dtype, compile=False)
                arm = stack.enter_context(closing(VllmPlain(dtype=dtype, cache_gib=2.0)))
                arms[f"vllm, {dtype}"] = vllm_batched(theirs, arm)
        rows = measured(arms, f"{first}, {PLAIN}", prompts, chosen.sizes, chosen.repeats)
    part = f"{chosen.pair}, {torch.backends.cpu.get_cpu_capability()}"  # type: ignore[no-untyped-call]
    results: dict[str, Any] = {"benchmark": NAME, "pairs": {part: rows}}
    note_run(results, part, began)
    write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
