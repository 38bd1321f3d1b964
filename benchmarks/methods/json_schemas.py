"""Answers by published JSON schemas: is every one valid?

    python benchmarks/methods/json_schemas.py --schemas DIR [--count 300] [--target MODEL] [--method SPEC]

``DIR`` is the folder ``data`` of JSONSchemaBench (github.com/guidance-ai/jsonschemabench): files in folders, of which
every n-th is taken. Answers are written in batches. A schema that cannot be followed exactly is refused in one line; an
answer that its limit of tokens ends is no JSON and is counted apart; others are checked by ``jsonschema``. Tokens of
JSON's punctuation are made likelier, so that answers of a small model come to an end.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import jsonschema

import sprinter
from benchmarks.common import grid, option_parser, save
from benchmarks.smoke import SMOKE, sized
from sprinter.errors import UserError

NAME = "methods/json_schemas"
NEW_TOKENS = sized(192, 48)
ROWS, BIAS = 8, 8.0
MADE_UP: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {"enum": ["x", "y"]}, {"not": {}},
]  # fmt: skip


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
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return "valid" if kind(schema).is_valid(json.loads(out.text)) else "invalid"


def main() -> None:
    """Write the answers, check them."""
    parser = option_parser(__doc__, data=False)
    parser.add_argument("--schemas", type=Path, required=not SMOKE, help="folder of schemas")
    parser.add_argument("--count", type=int, default=sized(300, 3), help="number of schemas")
    parser.add_argument("--target", help="model; none: the built-in pair")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--method", default="speculative(gamma=3)", help="an exact method that drafts")
    options = parser.parse_args()
    began = time.time()
    pair = sprinter.load_pair(options.target, options.draft)
    taken = (
        [("made up", one) for one in MADE_UP] if SMOKE else list(schemas_of(options.schemas, options.count))
    )
    found: dict[str, Counter[str]] = {}
    reasons, wrong, asked = Counter[str](), list[Any](), list[tuple[str, Any, Any]]()
    chat, biases = bool(pair.tokenizer is not None and pair.tokenizer.chat_template), closing(pair)
    for part, schema in taken:
        made = sprinter.GenerationOptions(
            response_format={"type": "json_schema", "json_schema": {"schema": schema}}, method=options.method,
            max_new_tokens=NEW_TOKENS, never_slower=False, seed=len(asked), logit_bias=biases,
        )  # fmt: skip
        about = schema.get("title") or schema.get("description") or part if isinstance(schema, dict) else part
        text = f"Write a short example of a JSON document: {str(about)[:100]}."
        prompt: Any = [{"role": "user", "content": text}] if chat else text
        try:
            pair.stream(prompt, made).close()
        except UserError as error:
            found.setdefault(part, Counter())["refused"] += 1
            reasons[str(error)[:90]] += 1
        else:
            asked.append((part, schema, (prompt, made)))
    stats = Counter[str]()
    for i in range(0, len(asked), ROWS):
        group = asked[i : i + ROWS]
        outs = pair.generate([one[0] for *_, one in group], [one[1] for *_, one in group], rows=ROWS)
        for (part, schema, _), out in zip(group, outs, strict=True):
            how = outcome(out, schema)
            found.setdefault(part, Counter())[how] += 1
            stats.update(tokens=out.stats.new_tokens, calls=out.stats.target_calls)
            if how not in ("valid", "cut"):
                wrong.append({"part": part, "how": how, "schema": schema, "text": out.text})
        print(f"\r{i + len(group)}/{len(asked)}", end="", file=sys.stderr)
    kinds = ("valid", "invalid", "cut", "refused", "error")
    total = sum(found.values(), Counter[str]())
    table = "\n".join(grid(
        "schemas | " + " | ".join(kinds),
        [f"{name} | " + " | ".join(str(own[kind]) for kind in kinds) for name, own in
         [*sorted(found.items()), ("all", total)]],
    ))  # fmt: skip
    facts = {
        "rows": [{"schemas": name, **own} for name, own in sorted(found.items())], "all": dict(total),
        "refused": reasons.most_common(20), "wrong": wrong, "method": options.method,
        "tokens_a_call": stats["tokens"] / max(1, stats["calls"]), "model": options.target or "the built-in pair",
    }  # fmt: skip
    save(NAME, table, began, len(taken), **{"new_tokens": NEW_TOKENS, **facts})


if __name__ == "__main__":
    main()
