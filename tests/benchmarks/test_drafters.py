"""benchmarks/methods/drafters.py: an interrupted run goes on, and only the same run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.methods.drafters import row_of, table
from tests.benchmarks.as_script import ROOT, Ended, run_script

SCRIPT = ROOT / "benchmarks" / "methods" / "drafters.py"


def run(folder: Path, *more: str) -> Ended:
    rows = "--rows", str(folder / "rows.jsonl")
    return run_script(
        SCRIPT, "--smoke", "--temperatures", "0", "--methods", "suffix", *rows, *more, folder=folder
    )


def test_an_interrupted_run_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    first = json.loads(run(tmp_path).out)
    path = tmp_path / "rows.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == 1 + 5 * 2  # the session, and two prompts of each set
    path.write_text("".join(lines[:-1]), encoding="utf-8")
    second = json.loads(run(tmp_path).out)
    assert (len(first["resumed"]), len(second["resumed"])) == (0, 1)
    for one, other in zip(first["rows"][:-2], second["rows"][:-2], strict=True):
        assert one == other, "a finished set was asked again"
    for one, other in zip(first["rows"][-2:], second["rows"][-2:], strict=True):
        assert one["decoding_s"][0] == other["decoding_s"][0] and one["decoding_s"] != other["decoding_s"]
        assert one["new_tokens"] == other["new_tokens"] and one["target_calls"] == other["target_calls"]


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "--new-tokens", "2", "--prompts", "1").status == 0
    other = run(tmp_path, "--new-tokens", "3", "--prompts", "1")
    assert other.status == 1 and "is of another command" in other.err


def answer(tokens: int, wall_s: float, ids: list[int]) -> dict[str, Any]:
    times = {"wall_s": wall_s, "closing_s": 0.5, "prefill_s": 1.0, "draft_s": 0.25}
    return {**times, "new_tokens": tokens, "target_calls": tokens / 2, "rounds": 5, "turns": [[[1], ids]]}


def test_speed_is_that_of_decoding_and_the_fastest_arm_is_bold() -> None:
    answers = [{"plain": answer(10, 11.5, [3]), "suffix": answer(10, 6.5, [3])},
               {"plain": answer(20, 21.5, [4]), "suffix": answer(20, 11.5, [5])}]  # fmt: skip
    rows = [row_of("edits", 0.0, arm, answers) for arm in ("plain", "suffix")]
    assert rows[0]["over_plain"] == [1.0, 1.0, 1.0] and rows[1]["over_plain"] == [2.0, 2.0, 2.0]
    assert rows[1]["over_plain_with_prompt"][0] == 32 / 17
    assert (
        rows[1]["as_plain"] == 1 and rows[1]["tokens_a_call"][0] == 2 and rows[1]["draft_us_a_round"] == 5e4
    )
    assert table(rows).splitlines()[2:] == ["| 0 | suffix | **2.00 [2.00, 2.00]** |"]
