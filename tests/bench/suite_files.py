"""Small files in the formats of the named suites."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def put(path: Path, content: str | bytes) -> Path:
    """Write a file, packed if its name says so."""
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)
    return path


def put_lines(path: Path, records: Iterable[Any]) -> Path:
    """One JSON record a line."""
    return put(path, "".join(json.dumps(record) + "\n" for record in records))


def put_tar(path: Path, members: dict[str, str]) -> Path:
    """A packed tar of text files."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def numbered(count: int, word: str = "word") -> str:
    """A text of ``count`` different words."""
    return " ".join(f"{word}{n}" for n in range(count))


def searched(wanted: bool, body: str) -> str:
    """The body with a number at its end, so that the document is held out (or is not)."""
    texts = (f"{body} {n}" for n in range(100_000))
    return next(t for t in texts if (int(hashlib.sha256(t.encode()).hexdigest(), 16) % 100 == 0) is wanted)


def article(title: str, wanted: bool, *paragraphs: str) -> str:
    """Text of a <doc> block with its title."""
    return searched(wanted, "\n\n".join([title, *paragraphs]))


def question(id: int, category: str, turns: list[str], **more: Any) -> dict[str, Any]:
    """A record of Spec-Bench, MT-bench or Vicuna-bench."""
    return {"question_id": id, "category": category, "turns": turns, **more}


SPEC_BENCH = [
    question(81, "writing", ["Write.", "Again."]),
    question(82, "writing", ["Write more.", "Again."]),
    question(101, "reasoning", ["Who?", "And now?"], reference=["Ann.", ""]),
    question(162, "translation", ["Translate: eins"], reference=["one"]),
    question(163, "translation", ["Translate: zwei"], reference=["two"]),
    question(241, "summarization", ["Summarize: x"], reference=["x"]),
    question(322, "qa", ["Where?"]),
    question(401, "math_reasoning", ["How many?"], reference=["500*2=<<500*2=1000>>1000\n#### 1,000"]),
    question(481, "rag", ["Passage. Question?"], reference=[["first", "second"]]),
]
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def one():\n",
    "entry_point": "one",
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}
COMMONSENSE = {
    "answerKey": "B",
    "id": "a7",
    "question": {
        "question_concept": "dog",
        "choices": [{"label": "A", "text": "bank"}, {"label": "B", "text": "kennel"}],
        "stem": "Where do dogs sleep?",
    },
}
GSM8K = {"question": "Ann has 2 and 3. How many?", "answer": "2+3=<<2+3=5>>5\n#### 5"}


def fill(folder: Path) -> Path:
    """All files of all named suites."""
    put(folder / "wikipedia_summary_1k.txt", f"{numbered(20)}\n{numbered(9)}\n{numbered(33, 'x')}\n")
    put(folder / "lm1b_sample_dev.txt.gz", f"{numbered(10)}\n{numbered(11)}\n")
    put_lines(folder / "specbench_question.jsonl", SPEC_BENCH)
    put_lines(folder / "mtbench_question.jsonl", SPEC_BENCH[:3])
    judged = {"question_id": 101, "choices": [{"index": 0, "turns": ["It is Ann.", "Bob."]}]}
    put_lines(folder / "mtbench_reference_gpt4.jsonl", [judged])
    put_lines(folder / "vicuna_bench_question.jsonl", [question(1, "generic", ["How?"])])
    put_lines(folder / "gsm8k_test.jsonl", [GSM8K, {"question": "Q?", "answer": "#### -1,234.5"}])
    put_lines(folder / "humaneval.jsonl", [HUMANEVAL])
    put_lines(folder / "commonsenseqa_dev.jsonl", [COMMONSENSE])
    row = '"What, {n}?",a,"b\nb",c,d,{letter}\n'
    rows = {
        s: "".join(row.format(n=n, letter="ABCD"[n % 4]) for n in range(7)) for s in ("algebra", "us_law")
    }
    put_tar(folder / "mmlu_dev.tar.gz", {f"mmlu_dev/{s}_dev.csv": rows[s] for s in ("us_law",)})
    put_tar(folder / "mmlu_test.tar.gz", {f"mmlu_test/{s}_test.csv": text for s, text in rows.items()})
    _fill_held_out(folder)
    return folder


def _fill_held_out(folder: Path) -> None:
    long, other = numbered(100), numbered(80, "y")
    for n in range(6):
        kept = article(f"T{n}", True, f"{long} {n} (1 May)", "short", other)
        # what a dropped template leaves is cleaned away before the hash is taken
        blocks = [kept.replace("(1 May)", "(; 1 May)"), article(f"U{n}", False, long)]
        text = "".join(
            f'<doc id="{10 * n + i}" url="u" title="t">\n{b}\n</doc>\n' for i, b in enumerate(blocks)
        )
        put(folder / f"wikipedia_en_2015_{n:02d}.txt.gz", text)
    for n in range(2):
        text = searched(True, f"News {n}\n\n{long} & more").partition("\n\n")[2]
        records = [
            {"id": "7", "title": "Redirect", "text": ""},
            {"id": str(n), "title": f"News {n}", "text": text.replace("& more", "&amp; more ()")},
        ]
        put_lines(folder / f"wikinews_en_2022_{n:02d}.jsonl.gz", records)
    told = [searched(wanted, f"Once\n{numbered(40)}") for wanted in (True, True, False, True)]
    put(folder / "tinystories_sample.txt.gz", "\n<|endoftext|>\n".join(told))
