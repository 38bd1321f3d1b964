"""What ``--smoke`` runs on: tiny counts, made-up text in the formats of the data folder, nothing kept."""

from __future__ import annotations

import atexit
import csv
import functools
import gzip
import io
import json
import random
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from sprinter.bench.suites.heldout import held_out
from sprinter.cli.demo import PROMPTS

T = TypeVar("T")
SMOKE = "--smoke" in sys.argv[1:]
"""Read when the module is imported, because the scripts' constants depend on it."""
_WORDS = " ".join(PROMPTS).split()
_GROUPS = ("writing", "translation", "summarization", "qa", "math_reasoning", "rag")  # of Spec-Bench
_SUBJECTS = ("algebra", "us_law")


def sized(full: T, tiny: T) -> T:
    """A constant of a benchmark: its full size, or a tiny one with ``--smoke``."""
    return tiny if SMOKE else full


@functools.cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="sprinter-smoke-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def scratch(name: str) -> Path:
    """A new directory that is removed when the script ends."""
    folder = _scratch() / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def made_up_data() -> Path:
    """A data folder with a small file of made-up text in place of each real one."""
    folder, chance = scratch("data"), random.Random(0)
    for name in [*(f"wikipedia_en_2015_{n:02d}.txt.gz" for n in range(6)), "wikinews_en_2022_00.jsonl.gz"]:
        _pack(folder / name, _articles(name, chance))
    _pack(folder / "wikinews_en_2022_01.jsonl.gz", _articles("wikinews 2", chance))
    sentences = [_sentence(chance, 30) for _ in range(160)]
    _pack(folder / "lm1b_sample_dev.txt.gz", "\n".join(sentences))
    (folder / "wikipedia_summary_1k.txt").write_text("\n".join(reversed(sentences)), encoding="utf-8")
    _pack(folder / "tinystories_sample.txt.gz", "\n<|endoftext|>\n".join(sentences[:9]))
    sums = [{"question": text, "answer": f"{text}\n#### {n}"} for n, text in enumerate(sentences[:80])]
    _pack(folder / "gsm8k_train.jsonl.gz", _lines(sums))
    talks = [
        {"question_id": n, "category": _GROUPS[n % len(_GROUPS)], "turns": [_sentence(chance, 20)]}
        for n in range(36)
    ]
    choices = [{"label": label, "text": _sentence(chance, 2)} for label in "ABCDE"]
    questions = [
        {"id": str(n), "question": {"stem": _sentence(chance, 9), "choices": choices}, "answerKey": "A"}
        for n in range(8)
    ]
    functions = [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": f'def f{n}():\n    """{_sentence(chance, 12)}"""\n',
            "entry_point": f"f{n}",
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
        }
        for n in range(8)
    ]
    for name, records in {
        "specbench_question": talks,
        "mtbench_question": talks[:12],
        "vicuna_bench_question": talks[12:24],
        "mtbench_reference_gpt4": [],
        "gsm8k_test": sums[:40],
        "commonsenseqa_dev": questions,
        "humaneval": functions,
    }.items():
        (folder / f"{name}.jsonl").write_text(_lines(records), encoding="utf-8")
    for part in ("dev", "test"):
        _tar(folder / f"mmlu_{part}.tar.gz", part, chance)
    return folder


def made_up_text(path: Path, paragraphs: int = 900) -> Path:
    """A text file over 400 words, some far commoner than others: enough to train tiny models on."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 6))) for _ in range(400)]
    weights = [1 / (i + 1) for i in range(400)]
    lines = [" ".join(chance.choices(words, weights, k=70)) + ".\n" for _ in range(paragraphs)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _sentence(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=words)).capitalize() + "."


def _articles(name: str, chance: random.Random) -> str:
    """Two articles of a file, each with some paragraphs: one held out of the pair's training, one not."""
    number = chance.randrange(10**9)
    told = []
    for wanted in (True, False):
        paragraphs = [_sentence(chance, 64) for _ in range(20)]
        bodies = ("\n".join([*paragraphs, f"{name} {n}"]) for n in range(100_000))
        title = f"Title {wanted}"
        told.append(next((title, b) for b in bodies if held_out(f"{title}\n\n{b}") is wanted))
    if "wikinews" in name:
        return _lines({"id": str(n), "title": t, "text": body} for n, (t, body) in enumerate(told, number))
    return "".join(
        f'<doc id="{n}" url="u" title="t">\n{t}\n\n{body}\n</doc>\n'
        for n, (t, body) in enumerate(told, number)
    )


def _lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _pack(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))


def _tar(path: Path, part: str, chance: random.Random) -> None:
    """MMLU's questions: a CSV file a subject."""
    with tarfile.open(path, "w:gz") as tar:
        for subject in _SUBJECTS:
            text = io.StringIO()
            csv.writer(text).writerows([[_sentence(chance, 8), *"wxyz", "A"] for _ in range(6)])
            info = tarfile.TarInfo(f"mmlu_{part}/{subject}_{part}.csv")
            info.size = len(text.getvalue())
            tar.addfile(info, io.BytesIO(text.getvalue().encode()))
