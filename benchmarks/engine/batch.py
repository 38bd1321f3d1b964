"""Many rows at once on the built-in pair: against separate runs, transformers' batched generation and vLLM.

    python benchmarks/engine/batch.py --data DIR --compile [--parts speeds policies parted] [--sizes 1 10 32]

Batches of paragraphs that the pair was not trained on, 64 new tokens, temperature 1, ids in and ids out; each repeat
takes other prompts, arms interleaved. Small batches are repeated more often. vLLM runs in a process of its own, by the
interpreter that SPRINTER_VLLM_PYTHON names; --no-vllm leaves it out. Then policies at two batch sizes, and the share of
texts that are not those of separate runs with the same seeds, in float32 and bfloat16. One thread; a part is saved when
it is done, and parts that were measured before stay.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

import sprinter
from benchmarks.common import (
    NEW_TOKENS,
    cells,
    grid,
    heldout_prompts,
    in_turn,
    note_run,
    option_parser,
    write_results,
)  # fmt: skip
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.arm import Ask
from sprinter.bench.arms.peer_vllm import VllmPlain
from sprinter.bench.statistics import BootstrapInterval, ratio_of_ratios
from sprinter.engine.parts import Parts
from sprinter.laws import Sampling

SIZES = sized((1, 2, 4, 8, 10, 16, 32), (2,))
PLAIN = "autoregressive"
METHODS = sized((PLAIN, "speculative(gamma=4)", "sprinter(tau=0.5)"), (PLAIN, "sprinter(tau=0.5)"))
POLICIES = (
    sprinter.Policy(share=0.0), sprinter.Policy(share=0.25), sprinter.Policy(share=0.5), sprinter.Policy(share=0.75),
    sprinter.Policy(share=1.0), sprinter.Policy(share=1.0, age=4), sprinter.Policy(share=1.0, age=8),
)  # fmt: skip
POLICIES = sized(POLICIES, POLICIES[2:5:2])
_AS_IS = Sampling()
_DEFAULT, POLICY_SIZES = sprinter.Policy(), sized((8, 32), (2,))
DTYPES = ("float32", "bfloat16")
NAME = "engine/batch"
PARTS = ("speeds", "policies", "parted")
Rows = list[dict[str, Any]]
Ids = Sequence[int]
Work = Callable[[Sequence[Ids], Sequence[int]], tuple[int, float]]  # prompts, seeds -> new tokens, seconds


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


def timed(work: Callable[[Sequence[Ids], Sequence[int]], int]) -> Work:
    """By the clock here."""

    def run(prompts: Sequence[Ids], seeds: Sequence[int]) -> tuple[int, float]:
        began = time.perf_counter()
        tokens = work(prompts, seeds)
        return tokens, time.perf_counter() - began

    return run


def load(dtype: str, compile: bool | None) -> sprinter.Pair:
    """The built-in pair, text left out: all arms give ids."""
    pair = sprinter.load_pair(dtype=dtype, compile=compile)
    pair._parts = Parts(pair.models, pair.heads).without_text()
    return pair


def warm(pair: sprinter.Pair, methods: Sequence[str] = METHODS) -> sprinter.Pair:
    """The pair, when its captured code is ready: texts that end one after another meet every shape."""
    prompts = [list(range(5, 5 + n)) for n in (60, 45, 20, 5)]
    for method in methods:
        pair.generate(prompts[0], method=method, max_new_tokens=16)
        pair.generate_batch(prompts, method=method, max_new_tokens=[4, 8, 16, 24])
    return pair


def batched(
    pair: sprinter.Pair,
    method: str,
    policy: sprinter.Policy = _DEFAULT,
    new_tokens: int = NEW_TOKENS,
    temperature: float | None = None,
) -> Work:
    """Serve all prompts with one engine, at the same time; ``temperature``: None, the pair's own."""
    sampling = {} if temperature is None else {"temperature": temperature}

    def work(prompts: Sequence[Ids], seeds: Sequence[int]) -> int:
        outs = pair.generate_batch(
            prompts,
            method=method,
            seed=list(seeds),
            max_new_tokens=new_tokens,
            policy=policy,
            rows=len(prompts),
            **sampling,
        )
        return sum(out.stats.new_tokens for out in outs)

    return timed(work)


def separate(pair: sprinter.Pair, method: str) -> Work:
    """As many runs one after another."""

    def work(prompts: Sequence[Ids], seeds: Sequence[int]) -> int:
        outs = [
            pair.generate(p, method=method, seed=s, max_new_tokens=NEW_TOKENS)
            for p, s in zip(prompts, seeds, strict=True)
        ]
        return sum(out.stats.new_tokens for out in outs)

    return timed(work)


def transformers_batched(pair: sprinter.Pair) -> Work:
    """``generate`` of transformers with the target, prompts padded on the left."""
    model: Any = pair.models.target.model
    ends = set(pair.models.target.eos_ids)
    pad = next(iter(pair.models.target.eos_ids))

    def work(prompts: Sequence[Ids], seeds: Sequence[int]) -> int:
        longest = max(map(len, prompts))
        tokens = torch.tensor([[pad] * (longest - len(ids)) + list(ids) for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        torch.manual_seed(seeds[0])
        out = model.generate(
            input_ids=tokens, attention_mask=mask, do_sample=True, top_k=0, temperature=1.0,
            max_new_tokens=NEW_TOKENS, pad_token_id=pad,
        )[:, longest:].tolist()  # fmt: skip
        return sum(next((i + 1 for i, token in enumerate(text) if token in ends), len(text)) for text in out)

    return timed(work)


def vllm_batched(
    pair: sprinter.Pair, arm: VllmPlain, new_tokens: int = NEW_TOKENS, sampling: Sampling = _AS_IS
) -> Work:
    """vLLM with the target, by its worker's clock; the arm is started, and the caller's to close."""
    arm.start(pair)

    def work(prompts: Sequence[Ids], seeds: Sequence[int]) -> tuple[int, float]:
        asks = [Ask(tuple(ids), new_tokens, sampling, seed) for ids, seed in zip(prompts, seeds, strict=True)]
        made = arm.answer_all(asks)
        return sum(len(one.ids) for one in made), max(one.wall_s for one in made)

    return work


def measure(arms: Sequence[Arm], prompts: Sequence[Ids], size: int, repeats: int) -> None:
    """Every arm on every batch in turn; one round before that is thrown away."""
    for arm in arms:
        arm.work(prompts[:size], range(size))
    for i, arm in in_turn(arms, repeats, f"batch {size}:"):
        seeds = range(i * size, (i + 1) * size)
        tokens, seconds = arm.work([prompts[seed % len(prompts)] for seed in seeds], seeds)
        arm.tokens.append(tokens)
        arm.seconds.append(seconds)


class Speeds:
    """Arms on both copies of the pair, and vLLM's processes where they are wanted."""

    def __init__(self, pair: sprinter.Pair, half: sprinter.Pair, vllm: bool) -> None:
        self._pair, self._half = pair, half
        self._vllm = {dtype: vllm_batched(pair, VllmPlain(dtype=dtype)) for dtype in DTYPES if vllm}
        self._theirs = transformers_batched(pair)

    def rows(self, prompts: Sequence[Ids], size: int, repeats: int) -> Rows:
        """One row an arm at one batch size."""
        ours = [Arm(method, batched(self._pair, method)) for method in METHODS]
        ours.append(Arm(f"{PLAIN}, bfloat16", batched(self._half, PLAIN)))
        alone = [Arm("separate", separate(self._pair, method)) for method in METHODS]
        alone.append(Arm("separate", separate(self._half, PLAIN)))
        peers = [Arm("transformers", self._theirs)]
        peers += [Arm(f"vllm {dtype}", work) for dtype, work in self._vllm.items()]
        measure([*ours, *alone, *peers], prompts, size, repeats)
        rows: Rows = [
            {
                "batch": size,
                "arm": arm.name,
                "tokens_per_s": arm.tokens_per_s,
                "separate_tokens_per_s": base.tokens_per_s,
                "over_separate": arm.over(base),
                "over": {peer.name: arm.over(peer) for peer in peers},
            }
            for arm, base in zip(ours, alone, strict=True)
        ]
        return rows + [{"batch": size, "arm": peer.name, "tokens_per_s": peer.tokens_per_s} for peer in peers]


def speeds(
    pair: sprinter.Pair, prompts: Sequence[Ids], options: argparse.Namespace, half: sprinter.Pair
) -> Rows:
    """All sizes that were asked for."""
    arms = Speeds(warm(pair), warm(half, [PLAIN]), not options.no_vllm)
    rows = Rows()
    for size in options.sizes:
        more = sized(min(4, max(1, 16 // size)), 1)
        rows += arms.rows(prompts, size, options.repeats * more)
    return rows


def policies(pair: sprinter.Pair, prompts: Sequence[Ids], repeats: int) -> Rows:
    """One row a policy, a method and a batch size; the base is that which waits for all."""
    rows = Rows()
    warm(pair)
    for size in POLICY_SIZES:
        for method in METHODS[1:]:
            arms = [Arm(repr(policy), batched(pair, method, policy)) for policy in POLICIES]
            measure(arms, prompts, size, repeats)
            base = next(
                arm for arm, policy in zip(arms, POLICIES, strict=True) if policy == sprinter.Policy(1.0)
            )
            rows += [
                {
                    "batch": size,
                    "method": method,
                    "share": policy.share,
                    "age": policy.age,
                    "tokens_per_s": arm.tokens_per_s,
                    "over_all_waiting": arm.over(base),
                }
                for arm, policy in zip(arms, POLICIES, strict=True)
            ]
    return rows


def parted(dtype: str, pair: sprinter.Pair, prompts: Sequence[Ids], size: int = 8) -> Rows:
    """Texts of a batch that are not those of separate runs with the same seeds, and where they part."""
    rows = []
    warm(pair)
    for method in METHODS:
        kept: dict[str, Any] = {"method": method, "max_new_tokens": NEW_TOKENS}
        places = []
        for at in range(0, len(prompts), size):
            some = list(prompts[at : at + size])
            seeds = list(range(at, at + len(some)))
            for i, out in enumerate(pair.generate_batch(some, seed=seeds, **kept)):
                own = pair.generate(some[i], seed=seeds[i], **kept)
                a, b = ([token.id for token in one.tokens] for one in (out, own))
                if a != b:
                    both = enumerate(zip(a, b, strict=False))
                    places.append(next((k for k, (x, y) in both if x != y), min(len(a), len(b))))
        rows.append(
            {
                "dtype": dtype,
                "method": method,
                "batch": size,
                "texts": len(prompts),
                "parted": len(places),
                "share": len(places) / len(prompts),
                "median_token": float(np.median(places)) if places else None,
            }
        )
    return rows


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown tables."""
    lines = ["# Many rows at once", "", f"Temperature 1, {NEW_TOKENS} new tokens, tokens a second."]
    for part, make in {"speeds": _speeds_table, "policies": _policies_table, "parted": _parted_table}.items():
        if part in results:
            lines += ["", *make(results[part])]
    return "\n".join(lines)


def _speeds_table(part: Rows) -> list[str]:
    peers = list(dict.fromkeys(name for r in part for name in r.get("over", ())))
    rows = [
        " | ".join(
            [
                f"{r['batch']} | {r['arm']} | {r['tokens_per_s']:.0f}",
                f"{r['separate_tokens_per_s']:.0f}" if "over" in r else "–",
                cells(r["over_separate"]) if "over" in r else "–",
                *(cells(r["over"][peer]) if "over" in r else "–" for peer in peers),
            ]
        )
        for r in part
    ]
    return grid(
        " | ".join(["batch", "arm", "tokens/s", "separate runs", "÷ separate", *(f"÷ {p}" for p in peers)]),
        rows,
    )


def _policies_table(part: Rows) -> list[str]:
    rows = [
        f"{r['batch']} | `{r['method']}` | {r['share']:g} | {'–' if r['age'] is None else r['age']} "
        f"| {r['tokens_per_s']:.0f} | {cells(r['over_all_waiting'])}"
        for r in part
    ]
    return grid("batch | method | share | age | tokens/s | ÷ all waiting", rows)


def _parted_table(part: Rows) -> list[str]:
    rows = [
        f"{r['dtype']} | `{r['method']}` | {r['batch']} | {r['texts']} | {r['parted']} ({r['share']:.0%}) "
        f"| {'–' if r['median_token'] is None else r['median_token']}"
        for r in part
    ]
    return grid("dtype | method | batch | texts | parted | median token", rows)


def main() -> None:
    """Measure the parts that were asked for; parts that were measured before are kept."""
    parser = option_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="ROWS")
    parser.add_argument("--prompts", type=int, default=sized(64, 4))
    parser.add_argument("--repeats", type=int, default=sized(5, 1), help="of the largest batches")
    parser.add_argument("--compile", action="store_true", help="compile what is not on the disk")
    parser.add_argument("--no-vllm", action="store_true", default=SMOKE, help="leave vLLM out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = {dtype: load(dtype, options.compile or None) for dtype in DTYPES}
    pair, half = pairs["float32"], pairs["bfloat16"]
    assert pair.tokenizer is not None
    prompts = [pair.tokenizer(text)["input_ids"] for text in heldout_prompts(options.data, options.prompts)]
    results = {"benchmark": NAME}
    makers: dict[str, Callable[[], Rows]] = {
        "speeds": lambda: speeds(pair, prompts, options, half),
        "policies": lambda: policies(pair, prompts, options.repeats),
        "parted": lambda: [row for dtype in DTYPES for row in parted(dtype, pairs[dtype], prompts)],
    }
    for part in options.parts:
        began = time.time()
        results[part] = makers[part]()
        note_run(results, part, began)
        write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
