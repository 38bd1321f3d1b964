from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.bench.rows import results_of, rows_of

from sprinter.bench.results import write_spec_bench
from sprinter.errors import UserError

TIMES = np.full(3, 0.1)


def speed(path: Path, task: str = "overall") -> tuple[float, float]:
    """Mean speed and mean accepted length, read as Spec-Bench's ``evaluation/speed.py`` reads them."""
    speeds, lengths = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        point: dict[str, Any] = json.loads(line)
        if task in ("overall", point["category"]):
            choice = point["choices"][0]
            speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
            lengths += choice["accept_lengths"]
            assert all(isinstance(turn, str) for turn in choice["turns"])
    return float(np.mean(speeds)), float(np.mean(lengths))


def test_spec_bench_reads_the_rows(tmp_path: Path) -> None:
    (path,) = write_spec_bench(tmp_path, results_of(rows_of("svip", TIMES)))
    assert path.name == "toy-svip-temp-1.jsonl"
    assert speed(path) == speed(path, "c") == pytest.approx((200.0, 2.0))
    keys = {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
    assert {frozenset(json.loads(line)) for line in path.read_text().splitlines()} == {frozenset(keys)}


def test_each_arm_has_a_file_of_its_own_whatever_its_name(tmp_path: Path) -> None:
    names = ["a b", "a_b", "a/b", "x" * 300, "x" * 299 + "y", "../up", "\u00e9" * 200, "a_b-2", "A_B"]
    rows = [one for name in names for one in rows_of(name, TIMES)]
    paths = write_spec_bench(tmp_path / "rows", results_of(rows))
    assert len(set(paths)) == len(names) and {path.parent for path in paths} == {tmp_path / "rows"}
    found = [{json.loads(line)["model_id"] for line in path.read_text().splitlines()} for path in paths]
    assert found == [{name} for name in names]


def test_files_of_an_earlier_run_are_gone(tmp_path: Path) -> None:
    write_spec_bench(tmp_path, results_of(rows_of("before", TIMES)))
    (path,) = write_spec_bench(tmp_path, results_of(rows_of("after", TIMES)))
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_spec_bench(tmp_path / "file", results_of(rows_of("a", TIMES)))
