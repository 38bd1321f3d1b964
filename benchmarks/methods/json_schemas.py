"""Answers by published JSON schemas: is every one valid, and what does a token cost with the schema and without?

    python benchmarks/methods/json_schemas.py --schemas DIR [--count 300] [--rows 1 8] [--method SPEC]

``DIR`` is the folder ``data`` of JSONSchemaBench (github.com/guidance-ai/jsonschemabench): files in folders, of which
every n-th is taken. A schema that cannot be followed exactly is refused in one line; an answer that its limit of tokens
ends is no JSON and is counted apart; others are checked by ``jsonschema``. Tokens of JSON's punctuation are made
likelier, so that answers of a small model come to an end.

Answers are written alone and in batches; after each, the same prompts are answered without the schema, in as many
tokens. *calls* are the target's for a token. *over no schema*: seconds a token with the schema over those without; *for
a call*: seconds a target call, since the texts are others and so is what the target accepts of their drafts. The time
in which a schema is compiled is apart. *masks*: seconds of computing masks, beside the passes, over seconds of the
texts.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import jsonschema
import numpy as np

import sprinter
from benchmarks.common import cells, grid, option_parser, save
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.statistics import ratio_of_ratios
from sprinter.engine.grammar import TextGrammar
from sprinter.errors import BatchError, UserError

NAME = "methods/json_schemas"
NEW_TOKENS = sized(512, 48)
ROWS, BIAS = 8, 8.0
KINDS = ("valid", "invalid", "cut", "refused", "error")
MADE_UP: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {"enum": ["x", "y"]}, {"not": {}},
]  # fmt: skip
Asked = tuple[str, Any, Any, sprinter.GenerationOptions]
"""Part of the set, schema, prompt, options."""


def schemas_of(folder: Path, count: int) -> Iterator[tuple[str, Any]]:
    """(part of the set, schema) of every n-th file."""
    files = sorted(folder.glob("*/*.json"))
    for i in range(min(count, len(files))):
        file = files[i * len(files) // count]
        yield file.parent.name, json.loads(file.read_text(encoding="utf-8"))


def closing(pair: sprinter.Pair) -> dict[int, float]:
    """Biases of the tokens that are punctuation of JSON, and of EOS tokens."""
    tokenizer = pair.tokenizer
    assert tokenizer is not None
    ids = [id for id in range(pair.models.vocab_size) if set(tokenizer.decode([id])) <= set('",]}: ')]
    return dict.fromkeys([*ids, *pair.models.target.eos_ids], BIAS)


def outcome(out: sprinter.Generation, schema: Any) -> str:
    """ "valid", "invalid" or "cut"."""
    if out.finish_reason != "eos":
        return "cut" if out.finish_reason == "length" else out.finish_reason
    exact = json.loads(
        json.dumps(schema), parse_float=Decimal
    )  # 2.36 is a multiple of 0.01, but not of floats
    kind = jsonschema.validators.validator_for(exact, default=jsonschema.Draft202012Validator)
    try:
        return "valid" if kind(exact).is_valid(json.loads(out.text, parse_float=Decimal)) else "invalid"
    except json.JSONDecodeError:
        return "invalid"


@dataclass
class Timed:
    """Texts at once, with their schemas or without: sums of each group."""

    rows: int
    tokens: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    masks_s: float = 0.0

    def run(self, pair: sprinter.Pair, asked: Sequence[Asked]) -> list[sprinter.Generation]:
        """The texts of a group; one that failed has the finish reason "error"."""
        computed = TextGrammar._masks

        def timed(grammar: TextGrammar, texts: Any) -> Any:
            at = time.perf_counter()
            found = computed(grammar, texts)
            self.masks_s += time.perf_counter() - at
            return found

        began = time.perf_counter()
        with patch.object(TextGrammar, "_masks", timed):
            try:
                outs = pair.generate(
                    [prompt for _, _, prompt, _ in asked], [each for *_, each in asked], rows=self.rows
                )
            except BatchError as error:
                outs = [(error.done | error.partial)[i] for i in range(len(asked))]
        self.seconds.append(time.perf_counter() - began)
        self.tokens.append(sum(out.stats.new_tokens for out in outs))
        self.calls.append(sum(out.stats.target_calls for out in outs))
        return outs


def without_schema(asked: Asked, tokens: int) -> Asked:
    """The same text of as many tokens without its schema."""
    part, schema, prompt, options = asked
    free = options.replace(response_format=None, max_new_tokens=tokens, min_new_tokens=tokens)
    return part, schema, prompt, free


def rows_of(timed: dict[str, Timed], rows: int) -> tuple[list[str], list[dict[str, Any]]]:
    """Lines of the table, and what the record has, for one number of texts at once."""
    own, free = timed["schema"], timed["none"]
    lines, facts = [], []
    for name, one in (("no schema", free), ("schema", own)):
        ms = 1000 * sum(one.seconds) / sum(one.tokens)
        calls = sum(one.calls) / sum(one.tokens)
        over = ratio_of_ratios((one.seconds, one.tokens), (free.seconds, free.tokens))
        call = ratio_of_ratios((one.seconds, one.calls), (free.seconds, free.calls))
        masks = one.masks_s / sum(one.seconds)
        shown = f"{cells(over)} | {cells(call)} | {masks:.1%}" if one is own else "1 | 1 | –"
        lines.append(f"{name} | {rows} | {ms:.2f} | {calls:.3f} | {shown}")
        facts.append({
            "arm": name, "texts_at_once": rows, "ms_a_token": ms, "calls_a_token": calls, "masks": masks,
            "tokens": sum(one.tokens), "seconds": sum(one.seconds), "over_no_schema": list(over),
            "over_no_schema_for_a_call": list(call),
        })  # fmt: skip
    return lines, facts


def main() -> None:
    """Write the answers, check and time them."""
    parser = option_parser(__doc__, data=False)
    parser.add_argument("--schemas", type=Path, required=not SMOKE, help="folder of schemas")
    parser.add_argument("--count", type=int, default=sized(300, 3), help="number of schemas")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, ROWS], help="texts at once")
    parser.add_argument("--target", help="model; none: the built-in pair")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--method", default="speculative(gamma=3)", help="an exact method that drafts")
    options = parser.parse_args()
    began = time.time()
    pair = sprinter.load_pair(options.target, options.draft, prefix_cache_bytes=0)
    taken = (
        [("made up", one) for one in MADE_UP] if SMOKE else list(schemas_of(options.schemas, options.count))
    )
    if not taken:
        raise UserError(f"{options.schemas} has no schemas: give the folder data of JSONSchemaBench")
    found: dict[str, Counter[str]] = {}
    reasons, wrong, compile_s, group = Counter[str](), list[Any](), list[float](), list[Asked]()
    chat, biases = bool(pair.tokenizer is not None and pair.tokenizer.chat_template), closing(pair)
    timed = {rows: {name: Timed(rows) for name in ("schema", "none")} for rows in options.rows}

    def write() -> None:
        for rows, arms in timed.items():
            for i in range(0, len(group), rows):
                some = group[i : i + rows]
                outs = arms["schema"].run(pair, some)
                arms["none"].run(pair, [
                    without_schema(asked, out.stats.new_tokens) for asked, out in zip(some, outs, strict=True)
                ])  # fmt: skip
                for (part, schema, *_), out in zip(some, outs, strict=True):
                    how = outcome(out, schema)
                    if rows == options.rows[-1]:
                        found.setdefault(part, Counter())[how] += 1
                    if how not in ("valid", "cut"):
                        wrong.append(
                            {"part": part, "how": how, "schema": schema, "text": out.text, "rows": rows}
                        )
        group.clear()

    pair.generate(["A", "B"], response_format={"type": "json_object"}, max_new_tokens=8)  # all is loaded
    for number, (part, schema) in enumerate(taken):
        made = sprinter.GenerationOptions(
            response_format={"type": "json_schema", "json_schema": {"schema": schema}}, method=options.method,
            max_new_tokens=NEW_TOKENS, never_slower=False, seed=number, logit_bias=biases,
        )  # fmt: skip
        about = schema.get("title") or schema.get("description") or part if isinstance(schema, dict) else part
        text = f"Write a short example of a JSON document: {str(about)[:100]}."
        prompt: Any = [{"role": "user", "content": text}] if chat else text
        at = time.perf_counter()
        try:
            pair.stream(prompt, made).close()
        except UserError as error:
            found.setdefault(part, Counter())["refused"] += 1
            reasons[str(error)[:90]] += 1
        else:
            compile_s.append(time.perf_counter() - at)
            group.append((part, schema, prompt, made))
        if len(group) == ROWS or number == len(taken) - 1:
            write()
        print(f"\r{number + 1}/{len(taken)}", end="", file=sys.stderr)
    total = sum(found.values(), Counter[str]())
    table = grid(
        "schemas | " + " | ".join(KINDS),
        [f"{name} | " + " | ".join(str(own[kind]) for kind in KINDS) for name, own in
         [*sorted(found.items()), ("all", total)]],
    )  # fmt: skip
    lines, facts = [], []
    for rows, arms in timed.items():
        more, told = rows_of(arms, rows)
        lines += more
        facts += told
    head = "arm | texts at once | ms/token | calls/token | over no schema | for a call | masks"
    table = [*grid(head, lines), "", *table]
    compiling = {f"p{p}": float(np.percentile(compile_s, p)) for p in (50, 90, 100)}
    save(
        NAME, "\n".join(table), began, len(taken), new_tokens=NEW_TOKENS,
        rows=[{"schemas": name, **own} for name, own in sorted(found.items())], all=dict(total), times=facts,
        compile_s=compiling, refused=reasons.most_common(20), wrong=wrong, method=options.method,
        model=options.target or "the built-in pair",
    )  # fmt: skip


if __name__ == "__main__":
    main()
