"""JSON by a schema: what the masks cost, and speculation with and without drafts of forced tokens.

    python benchmarks/methods/json_speed.py --data DIR [--prompts 20] [--method svip] [--peers]

Paragraphs are described as JSON by one of three schemas, greedily. Arms: plain decoding and the method, each without a
schema, with it, and the method with drafts of what the schema forces. Times are without the prompt's, and in the column
*with the prompt* with it. *masks*: seconds of computing masks, in a thread beside the passes, over seconds of the text.

With ``--peers``, all with the schema: plain decoding, the method, speculative and auto, and llama.cpp's server on the
same files, alone and with its draft model (``SPRINTER_LLAMA_SERVER`` names the program); one thread each. Its times are
its own, and with the prompt a client's; its target calls are its tokens without the accepted ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx2
import jsonschema
import numpy as np

import sprinter
from benchmarks.common import Arm, cells, grid, interleave, option_parser, save
from benchmarks.real.arms import DRAFT, TARGET
from benchmarks.serve.servers import free_port, llama_server, started
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.statistics import ratio_of_ratios
from sprinter.bench.suites import load_suite
from sprinter.engine.generation import Generation
from sprinter.engine.grammar import TextGrammar
from sprinter.models.source import find

NAME = "methods/json_speed"
NEW_TOKENS = sized(160, 8)
WORDS = 80  # of a paragraph


def _schema(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


TEXT, NAMES = (
    {"type": "string", "maxLength": 120},
    {"type": "array", "items": {"type": "string"}, "maxItems": 5},
)
KINDS = {"enum": ["person", "place", "event", "work", "science", "other"]}
SCHEMAS = (
    _schema(title=TEXT, kind=KINDS, names=NAMES, summary=TEXT),
    _schema(subject=TEXT, place={"type": ["string", "null"]}, year={"type": ["integer", "null"]},
            important={"type": "boolean"}, keywords=NAMES),
    _schema(sentiment={"enum": ["positive", "neutral", "negative"]}, confidence={"enum": ["low", "medium", "high"]},
            question=TEXT, answer=TEXT),
)  # fmt: skip


def prompts_of(data: Path, count: int) -> list[tuple[list[dict[str, str]], dict[str, Any]]]:
    """Messages with their schemas."""
    made = []
    for i, sample in enumerate(load_suite("wiki-summary", data, limit=count).samples):
        schema, text = SCHEMAS[i % len(SCHEMAS)], " ".join(sample.turns[0].split()[:WORDS])
        fields = ", ".join(schema["properties"])
        ask = f"{text}\n\nDescribe this text as one JSON object with the fields {fields}. Answer with the object alone."
        made.append(([{"role": "user", "content": ask}], schema))
    return made


def decoding_s(arm: Arm) -> np.ndarray:
    """Seconds a prompt, without those of reading it."""
    return arm.busy_s - np.array([out.stats.prefill_s for out in arm.outs])


def llama_arm(name: str, http: httpx2.Client) -> Arm:
    """llama.cpp's server; what it gave in the fields of a generation that are read here."""

    def run(prompt: Any, seed: int) -> Generation:
        messages, schema = prompt
        form = {"type": "json_schema", "json_schema": {"name": "text", "schema": schema}}
        body = {
            "messages": messages,
            "response_format": form,
            "temperature": 0,
            "seed": seed,
            "max_tokens": NEW_TOKENS,
        }
        at = time.perf_counter()
        answer = http.post("/v1/chat/completions", json={**body, "cache_prompt": False})
        wall_s = time.perf_counter() - at
        answer.raise_for_status()
        (choice,), times = answer.json()["choices"], answer.json()["timings"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema)
        tokens = times["predicted_n"]
        stats = SimpleNamespace(
            wall_s=wall_s, closing_s=0.0, prefill_s=wall_s - times["predicted_ms"] / 1000, new_tokens=tokens,
            target_calls=tokens - times.get("draft_n_accepted", 0), draft_steps=times.get("draft_n", 0),
            cached_tokens=times["cache_n"],
        )  # fmt: skip
        return cast(
            Generation,
            SimpleNamespace(stats=stats, text=text, finish_reason="eos" if reason == "stop" else reason),
        )

    return Arm(name, run)


def _nothing() -> Future[list[int]]:
    """The answer of a grammar that forces no token."""
    found: Future[list[int]] = Future()
    found.set_result([])
    return found


def llama_arms(stack: ExitStack, folder: Path) -> list[Arm]:
    """llama.cpp's server without and with its draft model, each a process until the stack is left."""
    draft = ["--spec-type", "draft-simple", "--spec-draft-model", str(find(DRAFT, "draft").at)]
    draft += ["--spec-draft-p-min", "0.75"]  # without it drafts of free text cost more than they bring
    made: list[Arm] = []
    for name, more in (("llama.cpp", []), ("llama.cpp, draft model", draft)):
        port = free_port()
        line = llama_server(port, Path(str(find(TARGET, "target").at)), rows=1, max_len=1024, threads=1)
        server = stack.enter_context(started(name, [*line, *more], port, folder / f"{len(made)}.log"))
        http = httpx2.Client(base_url=server.url, timeout=600, trust_env=False)
        made.append(llama_arm(name, stack.enter_context(http)))
    return made


def main() -> None:
    """Time the arms in turn."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(20, 3), help="number of prompts")
    parser.add_argument("--method", default="svip", help="an exact method that drafts")
    parser.add_argument(
        "--peers", action="store_true", help="other methods and llama.cpp's server, all with the schema"
    )
    options = parser.parse_args()
    began, masks = time.time(), {"seconds": 0.0, "count": 0.0}
    models = () if SMOKE else (TARGET, DRAFT)
    pair = sprinter.load_pair(*models, prefix_cache_bytes=0, **({} if SMOKE else {"dtype": "gguf"}))
    chat = bool(pair.tokenizer is not None and pair.tokenizer.chat_template)
    shares: dict[str, list[float]] = {}
    computed = TextGrammar._masks

    def timed(self: TextGrammar, texts: Any) -> Any:
        at = time.perf_counter()
        found = computed(self, texts)
        masks["seconds"] += time.perf_counter() - at
        masks["count"] += len(texts)
        return found

    def arm(name: str, method: str, follows: bool, forced: bool = True) -> Arm:
        def run(prompt: Any, seed: int) -> Generation:
            messages, schema = prompt
            more = {"json_schema": {"schema": schema}, "type": "json_schema"} if follows else {"type": "text"}
            masks.update(seconds=0.0, count=0.0)
            own: Callable[..., Any] = TextGrammar.forced if forced else lambda self, text: _nothing()
            with patch.object(TextGrammar, "forced", own), patch.object(TextGrammar, "_masks", timed):
                out = pair.generate(
                    messages if chat else messages[0]["content"], method=method, response_format=more, seed=seed,
                    temperature=0.0, max_new_tokens=NEW_TOKENS,
                )  # fmt: skip
            shares.setdefault(name, []).append(masks["seconds"] / out.stats.wall_s)
            if follows and out.finish_reason == "eos":
                jsonschema.validate(json.loads(out.text), schema)
            return out

        return Arm(name, run)

    plain = arm("plain, schema", "autoregressive", True)
    with ExitStack() as stack:
        if options.peers:
            arms = [plain, *(arm(one, one, True) for one in (options.method, "speculative", "auto"))]
            arms += llama_arms(stack, Path(stack.enter_context(TemporaryDirectory())))
            base = arms[-2]
        else:
            base = arm(options.method, options.method, False)
            arms = [
                arm("plain", "autoregressive", False), plain, base,
                arm(f"{options.method}, schema", options.method, True, False),
                arm(f"{options.method}, schema, forced drafts", options.method, True),
            ]  # fmt: skip
        interleave(arms, prompts_of(options.data, options.prompts), note="texts")
    rows, lines = [], []
    for one in arms:
        each_ms = 1000 * decoding_s(one).sum() / one.tokens.sum()
        calls = one.calls.sum() / one.tokens.sum()
        over, own = (
            ratio_of_ratios((one.tokens, decoding_s(one)), (other.tokens, decoding_s(other)))
            for other in (plain, base)
        )
        whole = ratio_of_ratios((one.tokens, one.busy_s), (plain.tokens, plain.busy_s))
        share = np.mean(shares[one.name][1:]) if one.name in shares else None
        equal = sum(out.text == other.text for out, other in zip(one.outs, plain.outs, strict=True))
        ended = sum(out.finish_reason == "eos" for out in one.outs)
        rows.append({
            "arm": one.name, "ms_a_token": each_ms, "calls_a_token": calls, "over_plain_schema": list(over),
            f"over_{base.name}": list(own), "over_plain_schema_with_prompt": list(whole),
            "masks": share if share is None else float(share), "ended": ended, "texts": len(one.outs),
            "draft_steps": one.total("draft_steps"),
            "prefill_s": one.total("prefill_s"), "texts_of_plain": equal, "tokens": int(one.tokens.sum()),
        })  # fmt: skip
        lines.append(
            f"{one.name} | {each_ms:.1f} | {calls:.2f} | {cells(over)} | {cells(whole)} | {cells(own)} | "
            f"{'–' if share is None else f'{share:.1%}'} | {ended}/{len(one.outs)}"
        )
    head = (
        f"arm | ms/token | calls/token | over plain, schema | with the prompt | over {base.name} alone | masks | "
        "ended, valid"
    )
    table = "\n".join(grid(head, lines))
    facts = {
        "method": options.method,
        "vocabulary": pair.models.vocab_size,
        "rows": rows,
    }
    save(
        "methods/json_peers" if options.peers else NAME,
        table,
        began,
        options.prompts,
        **{"new_tokens": NEW_TOKENS, **facts},
    )


if __name__ == "__main__":
    main()
