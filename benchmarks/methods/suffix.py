"""Drafts from suffixes against prompt lookup and plain decoding: requests that repeat each other, and others.

    python benchmarks/methods/suffix.py --data DIR [--prompts 20] [--pair smollm2|qwen]

Two sets of chat prompts: *edits*, functions of this repository, each asked about four times in a row, with another edit
(the first ones of ``src/sprinter/decode``, by name, that have 8 to 24 lines), and *summaries* of encyclopaedia
articles, each greedy and at temperature 0.7. All arms have the target alone; each has a cache of earlier texts of its
own, which is empty before each set. Speed is without the prompt's time. *index*: what the index of suffixes costs, on
tokens with Zipf's frequencies in texts of 500.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

import sprinter
from benchmarks.common import Arm, cells, grid, in_turn, option_parser, save
from benchmarks.real.arms import SMOLLM2, TARGET
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.statistics import ratio_of_ratios, ratio_of_sums
from sprinter.bench.suites import load_suite
from sprinter.decode.suffix_index import SuffixIndex
from sprinter.engine.generation import Generation
from sprinter.engine.prefix import OFF

NAME, ROOT = "methods/suffix", Path(__file__).resolve().parents[2]
NEW_TOKENS = sized(96, 8)
WORDS = 160  # of an article
TEMPERATURES = (0.0, 0.7)
EDITS = (
    "Add a comment above each line that is not obvious.", "Rename its first parameter to `given`.",
    "Write its docstring anew, in one sentence.", "Raise a ValueError at its beginning if its first argument is None.",
)  # fmt: skip
METHODS = {
    "plain": "autoregressive", "lookup": "lookup", "suffix": "suffix", "auto": "auto",
    "suffix, then recycle": "drafter=suffix(otherwise=recycle),stop=never,accept=match,cap=15",
}  # fmt: skip
STORED, QUERIES = sized((100_000, 1_000_000), (2_000,)), sized(1000, 20)


def edits(count: int) -> list[str]:
    """Requests to edit functions, those about one function in a row."""
    found: list[str] = []
    for path in sorted((ROOT / "src/sprinter/decode").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            lines = ast.get_source_segment(text, node) or ""
            if isinstance(node, ast.FunctionDef) and 8 <= len(lines.splitlines()) <= 24:
                found += [
                    f"```python\n{lines}\n```\n\n{edit} Answer with the whole function." for edit in EDITS
                ]
    return found[:count]


def summaries(data: Path, count: int) -> list[str]:
    """Requests to summarise articles."""
    samples = load_suite("wiki-summary", data, limit=count).samples
    return [f"{' '.join(one.turns[0].split()[:WORDS])}\n\nSummarise this text." for one in samples]


def index_costs() -> list[dict[str, Any]]:
    """Microseconds and bytes of the index, at numbers of stored tokens."""
    chance, rows = np.random.default_rng(0), list[dict[str, Any]]()
    for stored in STORED:
        ids, index = chance.zipf(1.3, stored) % 50_000, SuffixIndex(stored)
        began = time.perf_counter()
        for first in range(0, stored, 500):
            index.extend(ids[first : first + 499])
            index.end_text()
        added, asked = time.perf_counter() - began, list[float]()
        for at in chance.integers(100, stored, QUERIES).tolist():
            ending = ids[at - 100 : at].tolist()
            began = time.perf_counter()
            index.find(ending, 15)
            asked.append(time.perf_counter() - began)
        rows.append({
            "stored": stored, "add_us_a_token": 1e6 * added / stored, "bytes_a_token": index.nbytes / stored,
            "find_us": 1e6 * float(np.median(asked)),
        })  # fmt: skip
    return rows


def arm_of(name: str, pair: sprinter.Pair, temperature: float) -> Arm:
    """A method of ``METHODS`` on the target alone."""
    chat = bool(pair.tokenizer is not None and pair.tokenizer.chat_template)

    def run(prompt: str, seed: int) -> Generation:
        messages: Any = [{"role": "user", "content": prompt}]
        return pair.generate(
            messages if chat else prompt, method=METHODS[name], seed=seed, temperature=temperature,
            max_new_tokens=NEW_TOKENS,
        )  # fmt: skip

    return Arm(name, run)


def texts(arm: Arm) -> list[list[int]]:
    """Token ids of each text."""
    return [[token.id for token in out.tokens] for out in arm.outs]


def decoding_s(arm: Arm) -> np.ndarray:
    """Seconds a prompt, without those of reading it."""
    return arm.busy_s - np.array([out.stats.prefill_s for out in arm.outs])


def main() -> None:
    """Time the arms in turn, set by set, greedy and sampled."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(20, 4), help="prompts of each set")
    parser.add_argument("--pair", choices=("smollm2", "qwen"), default="smollm2", help="whose target")
    options = parser.parse_args()
    began, rows, lines = time.time(), list[dict[str, Any]](), list[str]()
    index = index_costs()
    models = () if SMOKE else ({"smollm2": SMOLLM2, "qwen": TARGET}[options.pair],)
    loaded = sprinter.load_pair(*models, prefix_cache_bytes=0, **({} if SMOKE else {"dtype": "gguf"}))
    alone = dataclasses.replace(loaded.models, draft=None)
    pairs = {name: sprinter.Pair(alone, prefix_cache=OFF) for name in METHODS}
    asked = {"edits": edits(options.prompts), "summaries": summaries(options.data, options.prompts)}
    for (name, prompts), temperature in product(asked.items(), TEMPERATURES):
        arms = [arm_of(arm, pair, temperature) for arm, pair in pairs.items()]
        for one in arms:
            one.run(prompts[-1], 0)
            pairs[one.name].clear_suffix_cache()
        for i, one in in_turn(arms, len(prompts), f"{name} at {temperature:g}"):
            one.outs.append(one.run(prompts[i], i))
        plain = texts(arms[0])
        for one in arms:
            speed = ratio_of_ratios((one.tokens, decoding_s(one)), (arms[0].tokens, decoding_s(arms[0])))
            a_call = ratio_of_sums(one.tokens, one.calls)
            rows.append({
                "set": name, "temperature": temperature, "arm": one.name, "over_plain": list(speed),
                "tokens_a_call": list(a_call), "draft_us_a_round": 1e6 * one.total("draft_s") / one.total("rounds"),
                "texts": len(one.outs), "tokens": int(one.tokens.sum()),
                "as_plain": sum(text == other for text, other in zip(texts(one), plain, strict=True)),
            })  # fmt: skip
            last = f"{rows[-1]['draft_us_a_round']:.0f} | {rows[-1]['as_plain']}"
            lines.append(f"{name} | {temperature:g} | {one.name} | {cells(speed)} | {cells(a_call)} | {last}")
    heads = (
        "prompts | temperature | arm | over plain | tokens/target call | drafting, µs/round | texts as plain"
    )
    table = "\n".join([
        *grid(heads, lines), "",
        *grid("stored tokens | added, µs/token | bytes/token | found, µs", [
            f"{one['stored']} | {one['add_us_a_token']:.1f} | {one['bytes_a_token']:.0f} | {one['find_us']:.0f}"
            for one in index]),
    ])  # fmt: skip
    facts = {"rows": rows, "index": index, "new_tokens": NEW_TOKENS}
    save(NAME, table, began, options.prompts, **facts)


if __name__ == "__main__":
    main()
