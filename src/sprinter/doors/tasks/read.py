"""Reads the harness's offline tasks from the files in ``SPRINTER_DATA``; the harness loads this file by its path."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sprinter.errors import UserError

__all__ = ["commonsenseqa", "gsm8k", "humaneval", "mmlu", "passed"]

_LETTERS = "ABCD"


def _file(name: str) -> Path:
    if (folder := os.environ.get("SPRINTER_DATA")) is None:
        raise UserError("offline tasks read files: give --data DIR, or set SPRINTER_DATA to the directory")
    path = Path(folder) / name
    if not path.is_file():
        raise UserError(
            f"there is no file {path}: give the directory with {name} as --data DIR (SPRINTER_DATA)"
        )
    return path


def _records(name: str) -> list[dict[str, Any]]:
    path = _file(name)
    with (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8") as lines
    ):
        return [json.loads(line) for line in lines if line.strip()]


def _splits(**splits: Iterable[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset

    return {name: Dataset.from_list(list(rows)) for name, rows in splits.items()}


def gsm8k(**_: Any) -> dict[str, Any]:
    """Questions and worked answers."""
    return _splits(train=_records("gsm8k_train.jsonl.gz"), test=_records("gsm8k_test.jsonl"))


def commonsenseqa(**_: Any) -> dict[str, Any]:
    """Questions with five choices; the letter of the right one is ``answerKey``."""
    return _splits(
        validation=(
            {
                "question": one["question"]["stem"],
                "choices": [choice["text"] for choice in one["question"]["choices"]],
                "answerKey": one["answerKey"],
            }
            for one in _records("commonsenseqa_dev.jsonl")
        )
    )


def mmlu(**_: Any) -> dict[str, Any]:
    """Questions of all subjects, in turn by subject, so that a limit takes some of each; ``answer`` is an index."""
    return _splits(dev=_mmlu("mmlu_dev.tar.gz"), test=_mmlu("mmlu_test.tar.gz"))


def _mmlu(name: str) -> list[dict[str, Any]]:
    subjects = []
    with tarfile.open(_file(name)) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            if (file := archive.extractfile(member)) is None:
                continue
            subject = Path(member.name).stem.rsplit("_", 1)[0].replace("_", " ")
            rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8"))
            subjects.append([
                {"subject": subject, "question": row[0], "choices": row[1:5], "answer": _LETTERS.index(row[5])}
                for row in rows
            ])  # fmt: skip
    longest = max(map(len, subjects))
    return [rows[at] for at in range(longest) for rows in subjects if at < len(rows)]


def humaneval(**_: Any) -> dict[str, Any]:
    """Programs to complete, with their tests."""
    return _splits(test=_records("humaneval.jsonl"))


def passed(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """pass@1 of one answer: the program is run in our sandbox, against its test."""
    from sprinter.bench.quality.sandbox import SandboxLimits, run_code

    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass_at_1": float(run_code(program, SandboxLimits()).passed)}
