"""Many rows at once on the built-in pair: the engine against separate runs and transformers' batched generation.

    python benchmarks/batch.py --data DIR --repeats 5

Batches of 1 to 32 paragraphs that the pair was not trained on, 64 new tokens, temperature 1, three methods; each repeat
takes other prompts, arms interleaved. Then policies at two batch sizes, and the share of texts that are not those of
separate runs with the same seeds, in float32 and bfloat16.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from common import NEW_TOKENS, arguments, cells, heldout_prompts, interval, save

import sprinter

SIZES = (1, 2, 4, 8, 16, 32)
METHODS = ("autoregressive", "speculative(gamma=4)", "sprinter")
POLICIES = (
    sprinter.Policy(share=0.0), sprinter.Policy(share=0.25), sprinter.Policy(share=0.5), sprinter.Policy(share=0.75),
    sprinter.Policy(share=1.0), sprinter.Policy(share=1.0, age=4), sprinter.Policy(share=1.0, age=8),
)  # fmt: skip
_DEFAULT, POLICY_SIZES = sprinter.Policy(), (8, 32)
DTYPES = ("float32", "bfloat16")
Rows = list[dict[str, Any]]
Work = Callable[[Sequence[str], Sequence[int]], int]  # prompts, seeds -> new tokens


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

    @property
    def pace(self) -> np.ndarray:
        """Seconds a token, one number a repeat."""
        return np.array(self.seconds) / np.array(self.tokens)


def batched(pair: sprinter.Pair, method: str, policy: sprinter.Policy = _DEFAULT) -> Work:
    """The engine."""

    def work(prompts: Sequence[str], seeds: Sequence[int]) -> int:
        outs = pair.generate_batch(
            prompts, method=method, seed=list(seeds), max_new_tokens=NEW_TOKENS, policy=policy
        )
        return sum(out.stats.new_tokens for out in outs)

    return work


def separate(pair: sprinter.Pair, method: str) -> Work:
    """As many runs one after another."""

    def work(prompts: Sequence[str], seeds: Sequence[int]) -> int:
        outs = [
            pair.generate(p, method=method, seed=s, max_new_tokens=NEW_TOKENS)
            for p, s in zip(prompts, seeds, strict=True)
        ]
        return sum(out.stats.new_tokens for out in outs)

    return work


def transformers_batched(pair: sprinter.Pair) -> Work:
    """``generate`` of transformers with the target, prompts padded on the left."""
    model: Any = pair.models.target.model
    ends = set(pair.models.target.eos_ids)
    pad = next(iter(pair.models.target.eos_ids))

    def work(prompts: Sequence[str], seeds: Sequence[int]) -> int:
        assert pair.tokenizer is not None
        ids = [pair.tokenizer(prompt)["input_ids"] for prompt in prompts]
        longest = max(map(len, ids))
        tokens = torch.tensor([[pad] * (longest - len(one)) + one for one in ids], device=model.device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in ids], device=model.device)
        torch.manual_seed(seeds[0])
        out = model.generate(
            input_ids=tokens, attention_mask=mask, do_sample=True, top_k=0, temperature=1.0,
            max_new_tokens=NEW_TOKENS, pad_token_id=pad,
        )[:, longest:].tolist()  # fmt: skip
        return sum(next((i + 1 for i, token in enumerate(text) if token in ends), len(text)) for text in out)

    return work


def measure(arms: Sequence[Arm], prompts: Sequence[str], size: int, repeats: int) -> None:
    """Every arm on every batch in turn, the order of arms rotated; one round before that is thrown away."""
    for arm in arms:
        arm.work(prompts[:size], range(size))
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            chosen = [prompts[(repeat * size + i) % len(prompts)] for i in range(size)]
            seeds = range(repeat * size, (repeat + 1) * size)
            for arm in [*arms[repeat % len(arms) :], *arms[: repeat % len(arms)]]:
                began = time.perf_counter()
                arm.tokens.append(arm.work(chosen, seeds))
                arm.seconds.append(time.perf_counter() - began)
            gc.collect()
            print(f"\rbatch {size}: {repeat + 1}/{repeats}", end="", file=sys.stderr)
    finally:
        gc.enable()
        print(file=sys.stderr)


def speeds(pair: sprinter.Pair, prompts: Sequence[str], size: int, repeats: int) -> Rows:
    """One row a method at one batch size."""
    together = {method: Arm(method, batched(pair, method)) for method in METHODS}
    alone = {method: Arm(method, separate(pair, method)) for method in METHODS}
    theirs = Arm("transformers", transformers_batched(pair))
    measure([*together.values(), *alone.values(), theirs], prompts, size, repeats)
    return [
        {
            "batch": size,
            "method": method,
            "tokens_per_s": together[method].tokens_per_s,
            "separate_tokens_per_s": alone[method].tokens_per_s,
            "transformers_tokens_per_s": theirs.tokens_per_s,
            "over_separate": interval(alone[method].pace, together[method].pace),
            "over_transformers": interval(theirs.pace, together[method].pace),
        }
        for method in METHODS
    ]


def policies(pair: sprinter.Pair, prompts: Sequence[str], size: int, repeats: int) -> Rows:
    """One row a policy and a method; the base is that which waits for all."""
    rows = []
    for method in METHODS[1:]:
        arms = [Arm(repr(policy), batched(pair, method, policy)) for policy in POLICIES]
        measure(arms, prompts, size, repeats)
        base = next(arm for arm, policy in zip(arms, POLICIES, strict=True) if policy == sprinter.Policy(1.0))
        rows += [
            {
                "batch": size,
                "method": method,
                "share": policy.share,
                "age": policy.age,
                "tokens_per_s": arm.tokens_per_s,
                "over_all_waiting": interval(base.pace, arm.pace),
            }
            for arm, policy in zip(arms, POLICIES, strict=True)
        ]
    return rows


def parted(dtype: str, prompts: Sequence[str], size: int) -> Rows:
    """Texts of a batch that are not those of separate runs with the same seeds, and where they part."""
    pair = sprinter.load_pair(dtype=dtype)
    rows = []
    for method in METHODS:
        kept: dict[str, Any] = {"method": method, "max_new_tokens": NEW_TOKENS}
        places = []
        for at in range(0, len(prompts), size):
            some = list(prompts[at : at + size])
            seeds = list(range(at, at + len(some)))
            for i, out in enumerate(pair.generate_batch(some, seed=seeds, **kept)):
                own = pair.generate(some[i], seed=seeds[i], **kept)
                a, b = ([token.id for token in one.tokens] for one in (out, own))
                places += (
                    [next(k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)] if a != b else []
                )
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


def table(rows: Rows, chosen: Rows, lost: Rows) -> str:
    """Markdown: speeds, policies, texts that part."""
    lines = [
        "| batch | method | tokens/s | separate runs | ÷ separate | transformers, plain | ÷ transformers |",
        "| --- " * 7 + "|",
    ]
    lines += [
        f"| {r['batch']} | `{r['method']}` | {r['tokens_per_s']:.0f} | {r['separate_tokens_per_s']:.0f} "
        f"| {cells(r['over_separate'])} | {r['transformers_tokens_per_s']:.0f} | {cells(r['over_transformers'])} |"
        for r in rows
    ]
    lines += ["", "| batch | method | share | age | tokens/s | ÷ all waiting |", "| --- " * 6 + "|"]
    lines += [
        f"| {r['batch']} | `{r['method']}` | {r['share']:g} | {'–' if r['age'] is None else r['age']} "
        f"| {r['tokens_per_s']:.0f} | {cells(r['over_all_waiting'])} |"
        for r in chosen
    ]
    lines += ["", "| dtype | method | batch | texts | parted | median token |", "| --- " * 6 + "|"]
    lines += [
        f"| {r['dtype']} | `{r['method']}` | {r['batch']} | {r['texts']} | {r['parted']} ({r['share']:.0%}) "
        f"| {'–' if r['median_token'] is None else r['median_token']} |"
        for r in lost
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, write after each part."""
    args = arguments(__doc__, tuning_prompts=0)
    began, prompts = time.time(), heldout_prompts(args.data, args.prompts)
    pair = sprinter.load_pair()
    rows, chosen, lost = Rows(), Rows(), Rows()

    def keep() -> None:
        text = table(rows, chosen, lost)
        save(
            "batch", text, began, len(prompts), rows=rows, policies=chosen, parted=lost, repeats=args.repeats
        )

    for size in SIZES:
        rows += speeds(pair, prompts, size, args.repeats)
        keep()
    for size in POLICY_SIZES:
        chosen += policies(pair, prompts, size, args.repeats)
        keep()
    for dtype in DTYPES:
        lost += parted(dtype, prompts, size=8)
        keep()


if __name__ == "__main__":
    main()
