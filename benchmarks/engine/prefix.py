"""The prefix cache: prefill time of a conversation's turns and of a batch with one system prompt, and equal texts.

    python benchmarks/engine/prefix.py --data DIR [--parts turns batch split parted] [--target ID --draft ID]

Turns: a conversation of five turns, without the cache, with prefix_reuse="exact" and with "all". Batch: 32 prompts that
begin with the same 384 tokens. Split: what it costs that prefill is split at multiples of 128 tokens. Parted:
conversations whose texts differ from those without a cache. Temperature 1, held-out text, one thread unless --threads
says more, ids in and ids out; a part is saved when it is done, and parts that were measured before stay. The built-in
pair unless others are named, such as two GGUF files (--dtype gguf: by our own kernels).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import sprinter
from benchmarks.common import (
    grid,
    heldout_prompts,
    in_turn,
    note_run,
    option_parser,
    write_results,
)  # fmt: skip
from benchmarks.smoke import sized
from sprinter.engine import prefix

NAME = "engine/prefix"
PARTS = ("turns", "batch", "split", "parted")
CACHES: dict[str, dict[str, Any]] = {
    "off": {"prefix_cache_bytes": 0},
    "exact": {"prefix_reuse": "exact"},
    "all": {"prefix_reuse": "all"},
}
TURNS, SYSTEM, ASKED, ANSWER = 5, sized(150, 140), 40, sized(24, 4)
"""Turns; tokens of the system prompt, of each question and of each answer."""
ROWS, COMMON = sized(32, 3), sized(384, 140)
SPLITS = sized((512, 256, 128, 64, 32), (128, 64))
Rows = list[dict[str, Any]]
Ids = list[int]


def load(options: argparse.Namespace, cache: str, **changes: Any) -> sprinter.Pair:
    """The pair with one kind of cache."""
    models = [options.target, options.draft] if options.target else []
    weights = {"runner": "torch", "dtype": options.dtype} if options.dtype else {}
    return sprinter.load_pair(*models, compile=False, **CACHES[cache], **{**weights, **changes})


def conversation(pair: sprinter.Pair, words: Ids, seed: int, **settings: Any) -> list[sprinter.Generation]:
    """The answers of one conversation, whose prompts are the text so far and a question."""
    text, made = words[:SYSTEM], []
    for turn in range(TURNS):
        at = SYSTEM + turn * ASKED
        text = text + words[at : at + ASKED]
        made.append(pair.generate(text, seed=seed + turn, max_new_tokens=ANSWER, **settings))
        text = text + [token.id for token in made[-1].tokens]
    return made


def turns(options: argparse.Namespace, words: Ids) -> Rows:
    """One row a turn and a cache: median time of prefill in both models, and tokens that were reused."""
    pairs = {cache: load(options, cache) for cache in CACHES}
    made: dict[str, list[list[sprinter.Generation]]] = {cache: [] for cache in CACHES}
    for i, cache in in_turn(list(CACHES), options.repeats, "conversation"):
        pairs[cache].clear_prefix_cache()
        made[cache].append(conversation(pairs[cache], words, 100 * i))
    return [
        {
            "turn": turn + 1,
            "cache": cache,
            "prompt_tokens": median(one[turn].prompt_tokens for one in runs),
            "cached_tokens": median(one[turn].stats.cached_tokens for one in runs),
            "prefill_ms": 1e3 * median(one[turn].stats.prefill_s for one in runs),
        }
        for turn in range(TURNS)
        for cache, runs in made.items()
    ]


def batch(options: argparse.Namespace, words: Ids) -> Rows:
    """One row a cache: time of prefill of all prompts, and of the whole batch."""
    prompts = [[*words[:COMMON], *words[COMMON + 8 * i : COMMON + 8 * (i + 1)]] for i in range(ROWS)]
    made: dict[str, list[tuple[float, float, float]]] = {"off": [], "exact": []}
    pairs = {cache: load(options, cache) for cache in made}
    for _, cache in in_turn(list(made), options.repeats, "batch"):
        pairs[cache].clear_prefix_cache()
        began = time.perf_counter()
        outs = pairs[cache].generate_batch(prompts, max_new_tokens=ANSWER, seed=list(range(ROWS)))
        wall = time.perf_counter() - began
        reused = sum(out.stats.cached_tokens for out in outs) / sum(len(prompt) for prompt in prompts)
        made[cache].append((sum(out.stats.prefill_s for out in outs), wall, reused))
    return [
        {
            "cache": cache,
            "rows": ROWS,
            "prefill_s": median(run[0] for run in runs),
            "wall_s": median(run[1] for run in runs),
            "reused": median(run[2] for run in runs),
        }
        for cache, runs in made.items()
    ]


def split(options: argparse.Namespace, words: Ids) -> Rows:
    """One row a block size: time of prefill without a cache."""
    pair, prompt = load(options, "off"), words[: COMMON + 96]
    times: dict[int, list[float]] = {size: [] for size in SPLITS}
    kept = prefix.BLOCK
    try:
        for _, size in in_turn(SPLITS, 2 * options.repeats, "split"):
            prefix.BLOCK = size
            times[size].append(pair.generate(prompt, max_new_tokens=1).stats.prefill_s)
    finally:
        prefix.BLOCK = kept
    return [
        {"block": size, "prompt_tokens": len(prompt), "prefill_ms": 1e3 * min(each)}
        for size, each in times.items()
    ]


def parted(options: argparse.Namespace, words: Ids) -> Rows:
    """One row a kind of reuse and a dtype: conversations of which any text differs from that without a cache."""
    rows = []
    builtin = options.target is None and options.dtype is None
    for dtype in ("float32", "bfloat16") if builtin else (options.dtype or "auto",):
        pairs = {cache: load(options, cache, dtype=dtype) for cache in CACHES}
        counts, tokens = dict.fromkeys(("exact", "all"), 0), 0
        for i in range(options.chats):
            own = words[17 * i % (len(words) // 2) :]
            wanted = [[t.id for t in out.tokens] for out in conversation(pairs["off"], own, 1000 * i)]
            tokens += sum(map(len, wanted))
            for cache in counts:
                pairs[cache].clear_prefix_cache()
                made = conversation(pairs[cache], own, 1000 * i)
                counts[cache] += [[t.id for t in out.tokens] for out in made] != wanted
        rows += [
            {"dtype": dtype, "cache": cache, "chats": options.chats, "tokens": tokens, "parted": count}
            for cache, count in counts.items()
        ]
    return rows


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown tables."""
    lines = [
        "# The prefix cache",
        "",
        f"Answers of {ANSWER} tokens, system prompt {SYSTEM}, questions {ASKED}.",
    ]
    if "models" in results:
        target, draft, dtype = results["models"]
        lines += ["", f"{target}, {draft}, weights {dtype}.".replace(", ,", ",")]
    makers: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
        "turns": (
            "turn | cache | prompt tokens | reused | prefill, ms",
            lambda r: (
                f"{r['turn']} | {r['cache']} | {r['prompt_tokens']:.0f} | {r['cached_tokens']:.0f} "
                f"| {r['prefill_ms']:.1f}"
            ),
        ),
        "batch": (
            "cache | rows | reused | prefill, s | batch, s",
            lambda r: (
                f"{r['cache']} | {r['rows']} | {r['reused']:.0%} | {r['prefill_s']:.2f} | {r['wall_s']:.2f}"
            ),
        ),
        "split": (
            "block | prompt tokens | prefill, ms",
            lambda r: f"{r['block']} | {r['prompt_tokens']} | {r['prefill_ms']:.1f}",
        ),
        "parted": (
            "dtype | cache | conversations | tokens | parted",
            lambda r: f"{r['dtype']} | {r['cache']} | {r['chats']} | {r['tokens']} | {r['parted']}",
        ),
    }
    for part, (head, line) in makers.items():
        if part in results:
            lines += ["", *grid(head, [line(row) for row in results[part]])]
    return "\n".join(lines)


def held_out(pair: sprinter.Pair, options: argparse.Namespace, length: int) -> Ids:
    """Token ids of text that the pair was not trained on."""
    assert pair.tokenizer is not None
    ids: Ids = []
    for text in heldout_prompts(options.data, sized(64, 60)):
        ids += pair.tokenizer(text)["input_ids"]
    return (ids * (1 + length // len(ids)))[: max(length, len(ids))]


def main() -> None:
    """Measure the parts that were asked for; parts that were measured before are kept."""
    parser = option_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--target", help="directory, hub id or GGUF file; default: the built-in pair")
    parser.add_argument("--draft", help="as --target")
    parser.add_argument(
        "--dtype", help="of GGUF files' weights in PyTorch: gguf, int8, ...; default: llama.cpp"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=sized(5, 1))
    parser.add_argument("--chats", type=int, default=sized(200, 2), help="conversations of part parted")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name = NAME if options.target is None and options.dtype is None else f"{NAME}_pair"
    models = [options.target or "the built-in pair", options.draft or "", options.dtype or "as they are"]
    words = held_out(load(options, "off"), options, 4 * (SYSTEM + TURNS * ASKED + COMMON + 8 * ROWS))
    results = {"benchmark": name, **({} if name == NAME else {"models": models})}
    makers: dict[str, Callable[[argparse.Namespace, Sequence[int]], Rows]] = {
        "turns": turns, "batch": batch, "split": split, "parted": parted,
    }  # fmt: skip
    for part in options.parts:
        began = time.time()
        results[part] = makers[part](options, words)
        note_run(results, part, began)
        write_results(name, results, table(results))


if __name__ == "__main__":
    main()
