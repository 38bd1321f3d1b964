"""Greedy texts of every lossless method on a real pair, against plain decoding's.

    python benchmarks/real/equality.py --data DIR --runner torch --dtype float32 [--prompts 50] [--new-tokens 48]
    python benchmarks/real/equality.py --data DIR --runner llamacpp

In exact arithmetic all texts are the same. Rounding errors may part two where the target's two first choices are
nearly tied: the table counts how often, and gives the largest gap between the two at a parting, in nats. A run goes on
where it was interrupted: the texts stay in --out.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import sprinter
from benchmarks.common import command, grid, option_parser, write_results
from benchmarks.real.arms import DRAFT, TARGET
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.environment import environment
from sprinter.bench.suites import load_suite, turn_ids
from sprinter.files import write_atomic

PLAIN = "autoregressive"
METHODS = (
    PLAIN, "speculative(gamma=3)", "speculative(gamma=8)", "svip", "adaedl", "confidence", "heuristic", "lookup",
    "hybrid", "drafter=lookup(n=2,least=1,otherwise=model),stop=fixed(gamma=5)",
)  # fmt: skip
TREES = ("batch(drafts=2,gamma=3)", "specinfer(drafts=2,gamma=3)", "spectr(drafts=2,gamma=3)")
"""Methods that a runner must read trees for."""


class Texts:
    """Token ids of each (method, prompt) and, for plain decoding, the gap of the two first choices; kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def make(
        self, pair: sprinter.Pair, method: str, name: str, ids: list[int], new_tokens: int
    ) -> dict[str, Any]:
        """Generate a text unless the file has it."""
        key = f"{method} {name}"
        if key not in self.found:
            more: dict[str, Any] = {"logprobs": 2} if method == PLAIN else {}
            out = pair.generate(ids, method=method, max_new_tokens=new_tokens, temperature=0.0, **more)
            made: dict[str, Any] = {"ids": [token.id for token in out.tokens]}
            if more:
                tops = [token.top_logprobs or () for token in out.tokens]
                made["gaps"] = [round(top[0].logprob - top[1].logprob, 4) for top in tops]
            self.found[key] = made
            write_atomic(self._path, json.dumps(self.found))
        return dict(self.found[key])


def compare(texts: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """How many texts of each method part from plain decoding's."""
    rows, plain = [], texts[PLAIN]
    for method, made in texts.items():
        gaps = []
        for name, one in made.items():
            ours, theirs = one["ids"], plain[name]["ids"]
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if place is not None:
                gaps.append(plain[name]["gaps"][place])
            elif len(ours) != len(theirs):
                gaps.append(None)
        known = [gap for gap in gaps if gap is not None]
        rows.append(
            {
                "method": method, "texts": len(made), "parted": len(gaps),
                "largest_gap_nats": max(known) if known else None,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Generate, compare, write."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(50, 2), help="half of HumanEval, half of GSM8K")
    parser.add_argument("--new-tokens", type=int, default=sized(48, 8))
    parser.add_argument("--target", default=sized(TARGET, None))
    parser.add_argument("--draft", default=sized(DRAFT, None))
    parser.add_argument("--runner", choices=["torch", "llamacpp"], default="llamacpp")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=scratch("equality") if SMOKE else Path(".work/equality"))
    chosen, began = parser.parse_args(), time.time()
    pair = sprinter.load_pair(chosen.target, chosen.draft, runner=chosen.runner, dtype=chosen.dtype)
    target = pair.models.target
    chat = bool(pair.tokenizer is not None and pair.tokenizer.chat_template)
    prompts = {}
    for suite in ("humaneval", "gsm8k"):
        loaded = load_suite(suite, chosen.data, limit=max(1, chosen.prompts // 2), chat=chat)
        for sample in loaded.samples:
            prompts[f"{suite} {sample.id}"] = turn_ids(pair, sample, 0, [], chat=loaded.chat)
    kind = sprinter.models.choose.runner_kind(target.model)[0]
    methods = METHODS if kind == "llamacpp" else METHODS + TREES
    chosen.out.mkdir(parents=True, exist_ok=True)
    dtype = str(target.weights)
    kept = Texts(chosen.out / f"{kind}-{dtype}.json")
    texts: dict[str, dict[str, dict[str, Any]]] = {method: {} for method in methods}
    for n, (name, ids) in enumerate(prompts.items(), 1):
        for method in methods:
            texts[method][name] = kept.make(pair, method, name, ids, chosen.new_tokens)
        print(f"\r{n}/{len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    rows = compare(texts)
    shown = [
        f"`{row['method']}` | {row['texts']} | {row['parted']} | "
        f"{'–' if row['largest_gap_nats'] is None else row['largest_gap_nats']}"
        for row in rows
    ]
    lines = [
        f"Runner {kind}, {dtype}; greedy, up to {chosen.new_tokens} tokens.", "",
        *grid("method | texts | parted from plain | largest gap at a parting, nats", shown),
    ]  # fmt: skip
    results = {
        "benchmark": "real/equality",
        "command": command("real/equality"),
        "environment": environment(),
        "prompts": len(prompts),
        "new_tokens": chosen.new_tokens,
        "runner": kind,
        "weights": dtype,
        "rows": rows,
        "seconds": round(time.time() - began, 1),
    }
    write_results(f"real/equality-{kind}", results, "\n".join(lines))


if __name__ == "__main__":
    main()
