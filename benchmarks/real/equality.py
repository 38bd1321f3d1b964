"""Greedy texts of every lossless method on a real pair, against plain decoding's.

    python benchmarks/real/equality.py --data DIR --runner torch --dtype float32 [--prompts 50] [--new-tokens 48]
    python benchmarks/real/equality.py --data DIR --runner llamacpp

In exact arithmetic all texts are the same. Rounding errors may part two where the target's two first choices are
nearly tied: the table counts how often, and gives the largest gap between the two at a parting, in nats. A run goes on
where it was interrupted: the texts stay in --out. With --rows several texts are decoded at the same time, which saves
most of the time where a pass is bound by reading the weights. Methods can be measured one after another; with --heads
also the stop rules that read them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import sprinter
from benchmarks.common import environment, grid, note_run, option_parser, write_results
from benchmarks.real.arms import DRAFT, TARGET
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.suites import load_suite, turn_ids
from sprinter.files import write_atomic

PLAIN = "autoregressive"
METHODS = (
    PLAIN, "speculative(gamma=3)", "speculative(gamma=8)", "svip", "adaedl", "confidence", "heuristic", "calibrated",
    "optimal", "block(gamma=5)", "lookup", "hybrid", "auto",
    "drafter=lookup(n=2,least=1,otherwise=model),stop=fixed(gamma=5)",
)  # fmt: skip
TREES = (
    "batch(drafts=2,gamma=3)", "specinfer(drafts=2,gamma=3)", "spectr(drafts=2,gamma=3)", "tree", "static-tree", "cape",
    "traversal", "threshold",
)  # fmt: skip
"""Methods that read several drafts or a tree, and ``threshold``, whose settings are lossless: not for llama.cpp."""
STOPS = ("specdec++", "disco")
"""Stop rules that read heads of their own."""
NAME = "real/equality"


class Texts:
    """Token ids of each (method, prompt) and, for plain decoding, the gap of the two first choices; kept in a file.

    ``known``: whether a file that is there is gone on with; not where the code has changes that no commit names.
    """

    def __init__(self, path: Path, known: bool) -> None:
        self._path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if known and path.is_file() else {}

    def make(
        self, pair: sprinter.Pair, method: str, prompts: dict[str, list[int]], new_tokens: int, rows: int
    ) -> dict[str, dict[str, Any]]:
        """One text a prompt, ``rows`` at a time; those that the file has are not generated again."""
        more: dict[str, Any] = {"logprobs": 2} if method == PLAIN else {}
        lacking = [name for name in prompts if f"{method} {name}" not in self.found]
        for first in range(0, len(lacking), rows):
            names = lacking[first : first + rows]
            outs = pair.generate_batch(
                [prompts[name] for name in names], rows=rows, method=method,
                max_new_tokens=new_tokens, temperature=0.0, **more,
            )  # fmt: skip
            for name, out in zip(names, outs, strict=True):
                made: dict[str, Any] = {"ids": [token.id for token in out.tokens]}
                if more:
                    tops = [token.top_logprobs or () for token in out.tokens]
                    made["gaps"] = [round(top[0].logprob - top[1].logprob, 6) for top in tops]
                self.found[f"{method} {name}"] = made
            write_atomic(self._path, json.dumps(self.found))
            print(
                f"{time.strftime('%H:%M')} {method}: {first + len(names)}/{len(lacking)} prompts",
                file=sys.stderr,
                flush=True,
            )
        return {name: dict(self.found[f"{method} {name}"]) for name in prompts}


def hash_of(heads: Sequence[str]) -> str:
    """Hash of the files of these heads: settings and weights."""
    digest = hashlib.sha256()
    for head in heads:
        for path in sorted(Path(head).iterdir()):
            if path.name in ("config.json", "model.safetensors"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


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
    parser.add_argument("--heads", nargs="+", default=(), help="directories of heads for the draft")
    parser.add_argument("--rows", type=int, default=1, help="texts that are decoded at the same time")
    parser.add_argument(
        "--methods", nargs="+", help="default: all that the runner can run; plain decoding always"
    )
    parser.add_argument("--out", type=Path, default=scratch("equality") if SMOKE else Path(".work/equality"))
    chosen, began = parser.parse_args(), time.time()
    # All methods read the same prompts: from the second one on they come from the cache.
    pair = sprinter.load_pair(
        chosen.target, chosen.draft, runner=chosen.runner, dtype=chosen.dtype,
        prefix_cache_bytes=4 << 30, prefix_reuse="all", heads=chosen.heads,
    )  # fmt: skip
    target = pair.models.target
    chat = bool(pair.tokenizer is not None and pair.tokenizer.chat_template)
    prompts = {}
    for suite in ("humaneval", "gsm8k"):
        loaded = load_suite(suite, chosen.data, limit=max(1, chosen.prompts // 2), chat=chat)
        for sample in loaded.samples:
            prompts[f"{suite} {sample.id}"] = turn_ids(pair, sample, 0, [], chat=loaded.chat)
    kind = sprinter.models.choose.runner_kind(target.model)[0]
    runnable = (*METHODS, *(() if kind == "llamacpp" else TREES), *(STOPS if chosen.heads else ()))
    methods = dict.fromkeys([PLAIN, *(chosen.methods or runnable)])
    chosen.out.mkdir(parents=True, exist_ok=True)
    dtype = str(target.weights)
    models = "-".join(Path(name or "builtin").name for name in (chosen.target, chosen.draft))
    # Texts of other heads or of another version of the code are not gone on with.
    commit = str(environment()["commit"])
    state = f"{hash_of(chosen.heads)[:8]}-{commit}"
    settings = f"{kind}-{dtype}-{models}-{chosen.new_tokens}-{chosen.rows}-{state}"
    kept = Texts(chosen.out / f"{settings}.json", known=not environment()["dirty"])
    texts = {method: kept.make(pair, method, prompts, chosen.new_tokens, chosen.rows) for method in methods}
    names = [Path(name).name for name in (chosen.target, chosen.draft) if name]
    part = f"{' with '.join(names) or 'built-in pair'}: {kind}, {dtype}, greedy, {len(prompts)} prompts, "
    part += f"up to {chosen.new_tokens} tokens"
    rows = compare(texts)
    for row in rows:
        row["texts_at_a_time"] = chosen.rows
    results = {"benchmark": NAME, "parts": {part: rows}}
    note_run(results, part, began)
    write_results(NAME, results, table(results["parts"]))


def table(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown: a table for each runner and weights."""
    lines: list[str] = []
    for part, rows in parts.items():
        shown = [
            f"`{row['method']}` | {row['texts']} | {row['parted']} | "
            f"{'–' if row['largest_gap_nats'] is None else row['largest_gap_nats']} | {row['texts_at_a_time']}"
            for row in rows
        ]
        head = "method | texts | parted from plain | largest gap at a parting, nats | texts at a time"
        lines += ["", f"**{part}**", "", *grid(head, shown)]
    return "\n".join(lines).strip()


if __name__ == "__main__":
    main()
