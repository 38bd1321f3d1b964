"""Never slower: a useless draft, and a good one in batches, against plain decoding and the method without it.

    python benchmarks/methods/never_slower.py --data DIR [--pair builtin|smollm2|qwen] [--prompts 12]

Arms take turns, prompt by prompt (in batches: batch by batch). A useless draft has random weights. Timed is what
follows the first 32 tokens of each text, which leaves the first trial out (of batches: the time of a batch less that of
one that ends there), and texts as a whole, prompts included.

    python benchmarks/methods/never_slower.py --data DIR --default qwen qwen-llamacpp smollm2 smollm2-llamacpp

instead times what runs where nothing is chosen, on answers to chat prompts as a whole, greedy, against plain decoding
with the same runner: --prompts of them one by one, and in batches of --rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sprinter
from benchmarks.common import cells, grid, in_turn, note_run, option_parser, write_results
from benchmarks.real.arms import DRAFT, SMOLLM2, TARGET
from benchmarks.smoke import sized
from sprinter.bench.statistics import ratio_of_ratios, ratio_of_sums
from sprinter.bench.suites import load_suite
from sprinter.decode.spec import parse_method

NAME, OF_DEFAULTS = "methods/never_slower", "methods/defaults"
FIRST, NEW_TOKENS = sized(32, 2), sized(160, 8)
PAIRS: dict[str, dict[str, Any]] = {
    "builtin": {"compile": False},
    "smollm2": {"target": SMOLLM2, "runner": "torch", "dtype": "float32", "compile": False},
    "qwen": {"target": TARGET, "draft": DRAFT, "runner": "torch", "dtype": "gguf"},
}
_QWEN, _SMOLLM2 = {"target": TARGET, "draft": DRAFT}, {"target": SMOLLM2}
DEFAULTS: dict[str, dict[str, Any]] = {  # without options but the runner's, where it is not the default
    "builtin": {},
    "qwen": _QWEN,
    "qwen-llamacpp": {**_QWEN, "runner": "llamacpp"},
    "smollm2": _SMOLLM2,
    "smollm2-llamacpp": {**_SMOLLM2, "runner": "llamacpp"},
}
DRAFTS = ("random weights", "trained")
PLAIN, METHOD = "autoregressive", "speculative(gamma=5)"
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"method": PLAIN},
    METHOD: {"method": METHOD},
    f"{METHOD}, never slower": {"method": METHOD, "never_slower": True},
    "auto": {"method": "auto"},
}


def useless(target: sprinter.Pair) -> LlamaForCausalLM:
    """A small draft with random weights."""
    config: Any = target.models.target.model.config
    torch.manual_seed(0)
    made = LlamaConfig(
        vocab_size=target.models.target.vocab_size, hidden_size=96, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=config.max_position_embeddings,
        eos_token_id=config.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(made).eval()


class Timed(NamedTuple):
    """Seconds a token after the first ones, and of all; number of switches."""

    late: float
    whole: float
    switches: int


def text_s(pair: sprinter.Pair, prompt: str, seed: int, options: dict[str, Any]) -> Timed:
    """One text."""
    at, began, start = 0.0, 0, time.perf_counter()
    with pair.stream(prompt, max_new_tokens=NEW_TOKENS, seed=seed, **options) as stream:
        for count, _ in enumerate(stream, 1):
            if count == FIRST:
                at, began = time.perf_counter(), count
        ended, total = time.perf_counter(), count
        made = stream.finish()
    return Timed((ended - at) / (total - began), (ended - start) / total, len(made.stats.switches))


def batch_s(pair: sprinter.Pair, prompts: Sequence[str], seed: int, options: dict[str, Any]) -> Timed:
    """A batch, of which no row ends early and leaves fewer: after the same first tokens, and whole."""
    seconds, made = [], []
    for count in (FIRST, NEW_TOKENS):
        began = time.perf_counter()
        made = pair.generate_batch(
            list(prompts), max_new_tokens=count, min_new_tokens=count,
            seed=[seed + i for i in range(len(prompts))], **options,
        )  # fmt: skip
        seconds.append(time.perf_counter() - began)
    rows, (first, whole) = len(prompts), seconds
    switches = sum(len(one.stats.switches) for one in made)
    return Timed((whole - first) / (NEW_TOKENS - FIRST) / rows, whole / NEW_TOKENS / rows, switches)


def timed(run: Callable[[int, dict[str, Any]], Timed], rounds: int, note: str) -> list[dict[str, Any]]:
    """All arms in turn: seconds a token over those of plain decoding, paired by round."""
    names = list(ARMS)
    found: dict[str, list[Timed]] = {name: [] for name in names}
    for name in names:
        run(0, ARMS[name])
    for i, name in in_turn(names, rounds, note):
        found[name].append(run(i, ARMS[name]))
    each = {name: np.array([one.late for one in made]) for name, made in found.items()}
    whole = {name: np.array([one.whole for one in made]) for name, made in found.items()}
    return [
        {
            "arm": name,
            "ms": float(1000 * each[name].mean()),
            "speed_over_plain": ratio_of_sums(each["plain"], each[name]),
            "speed_over_method": ratio_of_sums(each[METHOD], each[name]),
            "whole_over_plain": ratio_of_sums(whole["plain"], whole[name]),
            "switches": sum(one.switches for one in found[name]),
        }
        for name in names
    ]


class Answers(NamedTuple):
    """Seconds and tokens of an answer, or of a batch of them; names of the methods."""

    seconds: float
    tokens: int
    methods: set[str]


def answers(pair: sprinter.Pair, prompts: Sequence[Any], new: int, options: dict[str, Any]) -> Answers:
    """Greedy answers to these prompts in one batch, prompts included."""
    began = time.perf_counter()
    made = pair.generate_batch(
        list(prompts), max_new_tokens=new, temperature=0.0, rows=len(prompts), **options
    )
    seconds = time.perf_counter() - began
    return Answers(
        seconds, sum(one.stats.new_tokens for one in made), {one.method.partition("(")[0] for one in made}
    )


def defaults(chosen: Any) -> list[dict[str, Any]]:
    """The default against plain decoding, interleaved by prompt or batch, for each pair and number of rows."""
    sample = load_suite("vicuna", chosen.data, limit=chosen.prompts or max(chosen.rows)).samples
    measured = []
    for name in chosen.default:
        pair = sprinter.load_pair(prefix_cache_bytes=0, **DEFAULTS[name])  # each text reads its own prompt
        chat = getattr(pair.tokenizer, "chat_template", None) is not None
        prompts = [[{"role": "user", "content": one.turns[0]}] if chat else one.turns[0] for one in sample]
        for rows in [*([1] if chosen.prompts else []), *chosen.rows]:
            groups = [prompts[i : i + rows] for i in range(0, len(prompts) - rows + 1, rows)]
            arms: dict[str, dict[str, Any]] = {"plain": {"method": PLAIN}, "default": {}}
            found: dict[str, list[Answers]] = {arm: [] for arm in arms}
            for options in arms.values():
                answers(pair, groups[0], FIRST, options)  # warms up; the first time costs are measured
            for i, arm in in_turn([*arms], len(groups), f"{name}, {rows} rows"):
                found[arm].append(answers(pair, groups[i], chosen.new_tokens, arms[arm]))
            tokens, seconds = (
                {arm: np.array([getattr(one, what) for one in made]) for arm, made in found.items()}
                for what in ("tokens", "seconds")
            )
            ratio = ratio_of_ratios(
                (tokens["default"], seconds["default"]), (tokens["plain"], seconds["plain"])
            )
            measured.append(
                {
                    "pair": name, "rows": rows, "prompts": rows * len(groups), "runner": pair.runner_reason,
                    "methods": sorted(set.union(*(one.methods for one in found["default"]))),
                    "tokens_per_s": {arm: float(tokens[arm].sum() / seconds[arm].sum()) for arm in arms},
                    "tokens": {arm: tokens[arm].tolist() for arm in arms},
                    "seconds": {arm: seconds[arm].round(4).tolist() for arm in arms},
                    "default_over_plain": ratio, "costs": asdict(pair._runtime.costs_of(parse_method("auto"), rows)),
                }
            )  # fmt: skip
        del pair
    return measured


def default_table(results: dict[str, Any]) -> str:
    """Speed of the default over plain decoding."""
    rows = [
        f"{run['pair']} | {run['rows']} | {run['prompts']} | {', '.join(run['methods'])} | "
        f"{run['tokens_per_s']['plain']:.1f} | {run['tokens_per_s']['default']:.1f} | "
        f"{cells(run['default_over_plain'])}"
        for run in results["measured"]
    ]
    head = "pair | rows | prompts | default | plain, tokens/s | default, tokens/s | default ÷ plain"
    return "\n".join(grid(head, rows))


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = [
        f"{run['pair']} | {run['draft']} | {run['rows']} | {arm['arm']} | "
        f"{arm['ms']:.2f} | {cells(arm['speed_over_plain'])} | {cells(arm['speed_over_method'])} | "
        f"{cells(arm['whole_over_plain'])} | {arm['switches']}"
        for run in results["measured"] for arm in run["arms"]
    ]  # fmt: skip
    head = (
        f"target | draft | rows | arm | ms a token | speed ÷ plain | ÷ `{METHOD}` | whole ÷ plain | switches"
    )
    return "\n".join(grid(head, rows))


def main() -> None:
    """Time; write."""
    parser = option_parser(__doc__)
    parser.add_argument("--pair", choices=[*PAIRS], default="builtin")
    parser.add_argument("--draft", help="folder of a draft for SmolLM2")
    parser.add_argument("--prompts", type=int, default=sized(12, 2), help="one by one; 0: batches alone")
    parser.add_argument("--rows", type=int, nargs="*", default=sized([4, 16, 32], [2]), help="of the batches")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=DRAFTS)
    parser.add_argument("--batches", type=int, default=sized(4, 1), help="of each number of rows")
    parser.add_argument("--default", nargs="+", choices=[*DEFAULTS], help="time what runs by default")
    parser.add_argument(
        "--new-tokens", type=int, default=sized(96, 8), help="of an answer at most, with --default"
    )
    chosen = parser.parse_args()
    if chosen.default:
        began, results = time.time(), {"benchmark": OF_DEFAULTS, "measured": defaults(chosen)}
        note_run(results, ", ".join(chosen.default), began)
        write_results(OF_DEFAULTS, results, default_table(results))
        return
    began, loading = time.time(), dict(PAIRS[chosen.pair])
    if chosen.draft is not None:
        loading["draft"] = chosen.draft
    good = sprinter.load_pair(**loading)
    target: Any = good.models.target.model
    bad = sprinter.load_pair(target, useless(good), tokenizer=good.tokenizer, compile=False)
    texts = [
        sample.turns[0]
        for sample in load_suite("wikipedia", chosen.data, limit=max(chosen.prompts, *chosen.rows, 1)).samples
    ]
    results = {"benchmark": NAME}
    # Other numbers of rows stay as they were measured.
    anew = [*([1] if chosen.prompts else []), *chosen.rows]
    drafts = {"random weights": bad} | ({"trained": good} if good.models.draft is not None else {})
    drafts = {name: pair for name, pair in drafts.items() if name in chosen.drafts}
    if not drafts:
        parser.error(f"the pair {chosen.pair} has no trained draft: give --draft FOLDER")
    measured: list[dict[str, Any]] = [
        run
        for run in results.get("measured", [])
        if run["pair"] != chosen.pair or run["rows"] not in anew or run["draft"] not in drafts
    ]
    for draft, pair in drafts.items():
        facts = {"pair": chosen.pair, "draft": draft, "costs": asdict(pair.pass_costs)}
        if chosen.prompts:
            alone = timed(
                lambda i, options, pair=pair: text_s(pair, texts[i % chosen.prompts], i, options),  # type: ignore[misc]
                chosen.prompts, f"{draft}, one text",
            )  # fmt: skip
            measured.append({**facts, "rows": 1, "arms": alone})
        for rows in chosen.rows:
            together = timed(
                lambda i, options, pair=pair, rows=rows: batch_s(pair, texts[:rows], 1000 * i, options),  # type: ignore[misc]
                chosen.batches, f"{draft}, {rows} rows",
            )  # fmt: skip
            measured.append({**facts, "rows": rows, "arms": together})
    results |= {"benchmark": NAME, "measured": measured}
    part = chosen.pair if chosen.prompts else f"{chosen.pair}, {'+'.join(map(str, chosen.rows))} rows"
    some = "" if len(chosen.drafts) == len(DRAFTS) else f", {chosen.drafts[0]}"
    note_run(results, part + some, began)
    write_results(NAME, results, table(results))


if __name__ == "__main__":
    main()
