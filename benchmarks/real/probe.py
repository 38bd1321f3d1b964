"""How far the draft of a real instruct pair agrees with its target, by kind of text: what ``doctor --probe`` reports.

    python benchmarks/real/probe.py --data DIR [--target TARGET --draft DRAFT]

Both models read reference texts, at temperature 1: HumanEval's solutions (without the header that the prompt gives) and
GSM8K's answers after the question in chat form, paragraphs of Wikipedia without one. Overlap, first choices, AUC of the
draft's own signals, and what ``certain`` would trust. PyTorch runs GGUF files (dequantised, bfloat16).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import sprinter
from benchmarks.common import command, environment, grid, heldout_prompts, option_parser, write_results
from benchmarks.real.arms import DRAFT, TARGET
from benchmarks.real.gate_prompts import records
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.agreement import CLOSE, SIGNS, agreement, certain_positions
from sprinter.bench.suites.chat import ask_for_code, ask_for_number
from sprinter.theory.given import Passage, read_passages


def solutions(pair: sprinter.Pair, data: Path) -> Iterator[Passage]:
    """Solutions of HumanEval, after the question and the function's header in a code block."""
    for record in records(data / "humaneval.jsonl"):
        header = f"```python\n{record['prompt']}"
        yield _answer(pair, ask_for_code(record["prompt"]), header, record["canonical_solution"].rstrip())


def answers(pair: sprinter.Pair, data: Path) -> Iterator[Passage]:
    """Worked answers of GSM8K's test questions."""
    for record in records(data / "gsm8k_test.jsonl"):
        yield _answer(pair, ask_for_number(record["question"]), "", record["answer"])


def paragraphs(pair: sprinter.Pair, data: Path) -> Iterator[Passage]:
    """Paragraphs of Wikipedia."""
    assert pair.tokenizer is not None
    for text in heldout_prompts(data, sized(40, 2)):
        first, *rest = pair.tokenizer(text)["input_ids"]
        if rest:
            yield Passage((first,), tuple(rest))


def _answer(pair: sprinter.Pair, question: str, begun: str, answer: str) -> Passage:
    tokenizer = pair.tokenizer
    assert tokenizer is not None
    if tokenizer.chat_template:
        before = pair.render_chat([{"role": "user", "content": question}]).ids
    else:
        before = tokenizer(question)["input_ids"]
    begun_ids, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (begun, answer))
    return Passage((*before, *begun_ids), tuple(ids))


def main() -> None:
    """Read the texts of each kind, print and write."""
    parser = option_parser(__doc__)
    parser.add_argument("--target", default=sized(TARGET, None))
    parser.add_argument("--draft", default=sized(DRAFT, None))
    parser.add_argument("--texts", type=int, default=sized(24, 2), help="texts of each kind")
    parser.add_argument("--longest", type=int, default=sized(128, 16), help="tokens that are read of a text")
    chosen = parser.parse_args()
    weights: dict[str, Any] = {} if SMOKE else {"runner": "torch", "dtype": "bfloat16", "compile": False}
    pair, began = sprinter.load_pair(chosen.target, chosen.draft, **weights), time.time()
    rows = []
    for kind, texts in (("HumanEval", solutions), ("GSM8K", answers), ("Wikipedia", paragraphs)):
        passages = [
            Passage(passage.prompt, passage.ids[: chosen.longest])
            for passage in islice(texts(pair, chosen.data), chosen.texts)
        ]
        recording = read_passages(pair, passages)
        positions = sum(recording.lengths)
        rows.append(
            {"kind": kind, "texts": len(passages), "positions": positions, **agreement(recording),
             "certain": certain_positions(recording)}
        )  # fmt: skip
        print(f"{kind}: {positions} positions, {time.time() - began:.0f} s", file=sys.stderr)
    results = {
        "benchmark": "real/probe",
        "command": command(),
        "environment": environment(),
        "target": pair.models.target.id,
        "weights": weights,
        "rows": rows,
        "seconds": round(time.time() - began, 1),
    }
    write_results("real/probe", results, "\n".join([*agreement_table(rows), "", *certain_table(rows)]))


def agreement_table(rows: list[dict[str, Any]]) -> list[str]:
    """Overlap, first choices and AUCs, a line a kind of text."""
    names = " / ".join(SIGNS)
    head = (
        f"text | positions | mean β | β > {CLOSE:g} | same first choice | AUC of {names} for β above its median | "
        "the same for agreement"
    )
    return grid(
        head,
        [
            f"{row['kind']} | {row['positions']} | {row['overlap'][0]:.3f} | {row[f'overlap_above_{CLOSE:g}']:.0%} | "
            f"{row['agreement'][0]:.3f} | {_areas(row, 'overlap_above_median')} | {_areas(row, 'agreement')}"
            for row in rows
        ],
    )


def _areas(row: dict[str, Any], what: str) -> str:
    found = (row["auc"][name][what] for name in SIGNS)
    return " / ".join("–" if area is None else f"{area:.3f}" for area in found)


def certain_table(rows: list[dict[str, Any]]) -> list[str]:
    """What ``certain`` would trust, and the drift of it, a line a threshold."""
    lines = []
    for settings in zip(*(row["certain"] for row in rows), strict=True):
        one = settings[0]
        sign = "≤" if SIGNS[one["signal"]] < 0 else "≥"
        shares = (f"{each['trusted']:.0%}, {each['drift']:.3f}" for each in settings)
        lines.append(" | ".join([f"{one['signal']} {sign} {one['threshold']:g}", *shares]))
    return grid(" | ".join(["threshold", *(row["kind"] for row in rows)]), lines)


if __name__ == "__main__":
    main()
