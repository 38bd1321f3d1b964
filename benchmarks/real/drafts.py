"""Drafters made for a real target: accepted tokens a call by task, and speed next to lookup and plain decoding.

    python benchmarks/real/drafts.py --data DIR --draft-folder FOLDER [--gate GATE] --heads FOLDER ... [--prompts 4]

The folders come from ``sprinter draft distill`` and ``sprinter draft train`` on the prompts of ``gate_prompts.py``; the
prompts here are others: GSM8K's test set, HumanEval, the second half of Spec-Bench and Wikinews' second file. All arms
answer the same prompts in turn. The draft model's arms are those of SPRINTER's table 3 too: exact speculation, mentored
decoding and SPRINTER itself, whose gate is trained on that draft; the drift is the meter's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import sprinter
from benchmarks.common import (
    Arm,
    cells,
    command,
    environment,
    grid,
    interleave,
    option_parser,
    speed_ratio,
    write_results,
)
from benchmarks.real.gate_prompts import LONGEST, records
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.statistics import ratio_of_sums
from sprinter.bench.suites.chat import ask_for_code, ask_for_number
from sprinter.engine.prefix import OFF
from sprinter.heads.load import load_any_head
from sprinter.models.pair import LoadedPair, builtin_paths, load_models

NAME = "real/drafts"
TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct-GGUF/smollm2-135m-instruct-q4_1.gguf"
BASES = sized(("autoregressive", "lookup"), ("autoregressive",))
WITH_DRAFT = sized(
    ("speculative(gamma=2)", "speculative(gamma=4)", "svip", "mentored", "certain(threshold=0.3)"),
    ("speculative(gamma=2)",),
)
CHAINS = ("heads(gamma=2)", "heads(gamma=4)", "trust=nobody,stop=svip,drafter=heads,cap=6")
_DYNAMIC = (
    "eagle(expand=2, depth=2, nodes=3)",
    "eagle(expand=3, depth=3, nodes=6)",
    "trust=nobody,stop=svip,drafter=heads(grow=dynamic(expand=3,depth=3,nodes=6)),accept=onehot",
    "eagle(expand=8, depth=5, nodes=24)",
)
TREES = {
    "medusa": ("medusa(nodes=3)", "medusa(nodes=6)", "medusa(nodes=24)", "medusa(nodes=60)"),
    "eagle": (*_DYNAMIC, "eagle(expand=10, depth=6, nodes=60)"),
    "eagle3": (*_DYNAMIC, "eagle(expand=10, depth=6, nodes=60)"),
    "glide": (
        _DYNAMIC[1],
        "trust=nobody,stop=fixed(gamma=3),drafter=heads(grow=widened),accept=without",
        "trust=nobody,stop=svip,drafter=heads(grow=widened),accept=without,cap=3",
    ),
}
"""Trees of few nodes, which cost little in a forward pass on a CPU, of the presets' number and of EAGLE-2's paper's;
with SVIP's stops as in its tables 3 and 4 (GliDe's widened chains are CaPE's)."""

SHARING = ("eagle", "glide")
"""Kinds of heads that draft with the target's output layer."""
MADE_UP = {
    "made": "the built-in draft", "parameters": 1, "vocabulary": None, "train_tokens": 1, "training_s": 0.0,
    "beta": 0.5, "temperature": 1.0,
}  # fmt: skip
"""What a smoke run says of its drafter."""


def prompts_of(data: Path) -> dict[str, Iterator[str]]:
    """Prompts by task, none of which a draft was trained on."""
    return {
        "gsm8k": (ask_for_number(one["question"]) for one in records(data / "gsm8k_test.jsonl")),
        "code": (ask_for_code(one["prompt"]) for one in records(data / "humaneval.jsonl")),
        "spec-bench": (
            one["turns"][0] for one in islice(records(data / "specbench_question.jsonl"), 1, None, 2)
        ),
        "wikinews": (
            f"Summarise this article in three sentences.\n\n{one['title']}\n\n{one['text']}"
            for one in records(data / "wikinews_en_2022_01.jsonl.gz")
            if len(one["text"]) > 400
        ),
    }


def arms_of(pair: sprinter.Pair) -> list[tuple[str, sprinter.Pair, str]]:
    """Name, pair and method of the arms of one drafter."""
    if pair.drafting is None:
        return [(method, pair, method) for method in (*WITH_DRAFT, *(["sprinter"] if pair.gate else []))]
    kind = pair.drafting.kind
    return [(f"{kind}: {method}", pair, method) for method in (*CHAINS, *TREES[kind])]


def has_chat(pair: sprinter.Pair) -> bool:
    """Whether the target has a chat template; else it continues the prompt."""
    return pair.tokenizer is not None and bool(pair.tokenizer.chat_template)


def arm(name: str, pair: sprinter.Pair, method: str, temperature: float, new_tokens: int) -> Arm:
    """A method, in chat form if the target knows one. Every token is metered: lossy methods have their closing pass in
    their time."""

    def run(prompt: str, seed: int) -> Any:
        messages = [{"role": "user", "content": prompt}]
        return pair.generate(
            messages if has_chat(pair) else prompt,
            method=method,
            max_new_tokens=new_tokens,
            temperature=temperature,
            seed=seed,
            meter="complete",
        )

    return Arm(name, run)


def measure(
    pairs: list[sprinter.Pair], data: Path, count: int, new_tokens: int, temperature: float
) -> list[dict[str, Any]]:
    """One row an arm and task, and of all tasks."""
    chosen = [
        (task, text)
        for task, texts in prompts_of(data).items()
        for text in islice((text for text in texts if len(text) <= LONGEST), count)
    ]
    every = [*((base, pairs[0], base) for base in BASES), *(each for pair in pairs for each in arms_of(pair))]
    arms = [arm(*each, temperature, new_tokens) for each in every]
    interleave(arms, [text for _, text in chosen], note=f"T={temperature:g}")
    rows = []
    for task in [*dict.fromkeys(task for task, _ in chosen), "all"]:
        places = [i for i, (own, _) in enumerate(chosen) if task in (own, "all")]
        parts = [Arm(one.name, one.run, [one.outs[i] for i in places]) for one in arms]
        rows += [
            {
                "task": task, "method": part.name, "temperature": temperature, "prompts": len(places),
                "tokens_per_call": ratio_of_sums(part.tokens, part.calls),
                "acceptance": part.total("accepted") / part.total("drafted") if part.total("drafted") else None,
                "speed_over_plain": speed_ratio(part, parts[0]),
                "drift": ratio_of_sums(part.drift, part.tokens),
                "tokens_per_s": float(part.tokens.sum() / part.busy_s.sum()),
                "same_as_plain": sum(
                    [token.id for token in own.tokens] == [token.id for token in plain.tokens]
                    for own, plain in zip(part.outs, parts[0].outs, strict=True)
                ) if temperature == 0 else None,
            }
            for part in parts
        ]  # fmt: skip
    return rows


def table(results: dict[str, Any]) -> str:
    """What was measured, in Markdown."""
    lines = [f"- {told(one)}" for one in results["drafters"]] + [""]
    head = (
        "temperature | task | method | tokens/target call | accepted of drafted | ÷ plain | tokens/s | drift"
    )
    head += " | as plain"
    rows = [
        f"{row['temperature']:g} | {row['task']} | `{row['method']}` | {cells(row['tokens_per_call'])} | "
        f"{_share(row['acceptance'])} | {cells(row['speed_over_plain'])} | "
        f"{row['tokens_per_s']:.1f} | {cells(row['drift'], 4)} | "
        + ("–" if row["same_as_plain"] is None else f"{row['same_as_plain']} of {row['prompts']}")
        for row in results["rows"]
    ]
    return "\n".join([*lines, *grid(head, rows)])


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def told(facts: dict[str, Any]) -> str:
    """A line about a drafter."""
    made = facts["made"]
    size = f"{facts['parameters']:,} parameters" + (
        f", vocabulary {facts['vocabulary']}" if facts["vocabulary"] else ""
    )
    if facts["train_tokens"] is None:
        return f"{made}: {size}; without a record of its training."
    return (
        f"{made}: {size}; trained on {facts['train_tokens']:,} tokens of the target in {facts['training_s']:.0f} s; "
        f"on held-out texts β is {facts['beta']:.3f} at temperature {facts['temperature']:g}."
    )


def facts_of(folder: Path) -> dict[str, Any]:
    """What draft.json says about a draft model or heads, and their training; little of heads where it is not there."""
    if not (folder / "draft.json").exists():
        heads: Any = load_any_head(folder)
        parameters = sum(one.numel() for one in heads.parameters())
        return {
            "made": f"{heads.kind} heads", "parameters": parameters, "vocabulary": None, "train_tokens": None
        }  # fmt: skip
    facts = json.loads((folder / "draft.json").read_text(encoding="utf-8"))
    own, training = facts.get("student") or facts["heads"], facts["training"]
    layers = (
        f"draft of {own['layers']} layers, width {own['width']}"
        if "student" in facts
        else f"{own['kind']} heads"
    )
    return {
        "made": layers,
        "parameters": own["parameters"],
        "vocabulary": own["vocabulary"],
        "train_tokens": facts["texts"]["train_tokens"],
        "temperature": training["temperature"],
        "loss": training["loss"],
        "training_s": training["seconds"],
        "positions": training["tokens"],
        "beta": 1 - training["history"][-1]["held_out"]["tv"],
        "accuracies": own.get("accuracies"),
    }


def main() -> None:
    """Load, measure, write."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--target", default=TARGET, help="a model, or 'builtin': the target of the built-in pair"
    )
    parser.add_argument("--draft-folder", type=Path, help="of 'sprinter draft distill'")
    parser.add_argument("--gate", type=Path, help="of 'sprinter gate train' on that draft")
    parser.add_argument("--heads", type=Path, nargs="+", default=[], help="of 'sprinter draft train'")
    parser.add_argument("--dtype", default="gguf", help="of the target")
    parser.add_argument("--draft-dtype", default="int8")
    parser.add_argument(
        "--vocabulary", type=int, help="number of tokens that EAGLE's and GliDe's heads draft"
    )
    parser.add_argument("--prompts", type=int, default=sized(4, 1), help="of each task")
    parser.add_argument("--new-tokens", type=int, default=sized(96, 8))
    parser.add_argument("--temperatures", type=float, nargs="+", default=sized([0.0, 0.6], [0.0]))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="as small models need it")
    parser.add_argument("--record", default=NAME, help="name of the results, for drafters of other origin")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    began = time.time()
    folders = [*([chosen.draft_folder] if chosen.draft_folder else []), *chosen.heads]
    if not folders and not SMOKE:
        parser.error("give --draft-folder, --heads or both")
    drafters = [MADE_UP] if SMOKE else [facts_of(folder) for folder in folders]
    pairs = [sprinter.load_pair(prefix_cache_bytes=0)] if SMOKE else [*loaded(chosen)]
    rows = [
        row
        for temperature in chosen.temperatures
        for row in measure(pairs, chosen.data, chosen.prompts, chosen.new_tokens, temperature)
    ]
    results = {
        "benchmark": chosen.record,
        "command": command(),
        "environment": environment(),
        "new_tokens": chosen.new_tokens,
        "dtypes": [chosen.dtype, chosen.draft_dtype],
        "draft_vocabulary": chosen.vocabulary,
        "drafters": drafters,
        "rows": rows,
        "seconds": round(time.time() - began, 1),
    }
    write_results(chosen.record, results, table(results))


def loaded(chosen: Any) -> Iterator[sprinter.Pair]:
    """A pair for each drafter, all with one copy of the target; each arm reads its own prompt."""
    source = builtin_paths()["target"] if chosen.target == "builtin" else chosen.target
    capture = True if chosen.compile else None
    target = load_models(source, device="cpu", dtype=chosen.dtype, compile=capture)
    if chosen.draft_folder:
        student = load_models(chosen.draft_folder, device="cpu", dtype=chosen.draft_dtype, compile=capture)
        gate = None if chosen.gate is None else load_any_head(chosen.gate)
        yield sprinter.Pair(
            LoadedPair(target.target, student.target, target.tokenizer), gate, prefix_cache=OFF
        )
    for folder in chosen.heads:
        heads: Any = load_any_head(folder)
        words = chosen.vocabulary if heads.kind in SHARING else None
        models = LoadedPair(target.target, None, target.tokenizer)
        yield sprinter.Pair(models, heads=[heads], prefix_cache=OFF, draft_vocabulary=words)


if __name__ == "__main__":
    main()
