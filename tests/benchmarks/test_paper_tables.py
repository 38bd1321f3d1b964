"""benchmarks/papers: what turns measured numbers into verdicts, win rates and thresholds."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


def load(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def check(low: float, high: float, bound: float, above: bool = True) -> Any:
    return load("papers.report").Check("x", ((low + high) / 2, low, high), bound, above)


@pytest.mark.parametrize(
    ("low", "high", "above", "outcome"),
    [
        (1.1, 1.3, True, True),
        (0.9, 1.1, True, None),
        (0.7, 0.9, True, False),
        (1.0, 1.0, True, False),  # as large is not larger
        (0.7, 0.9, False, True),
        (0.9, 1.1, False, None),
        (1.1, 1.3, False, False),
        (1.0, 1.0, False, False),
    ],
)
def test_a_check_is_decided_by_its_whole_interval(
    low: float, high: float, above: bool, outcome: bool | None
) -> None:
    assert check(low, high, 1.0, above).outcome is outcome


def test_a_claim_is_as_good_as_its_checks() -> None:
    claim = load("papers.report").Claim
    yes, no, open_ = check(2, 3, 1), check(0, 0.5, 1), check(0, 3, 1)
    assert claim("", (yes, yes)).verdict == "holds"
    assert claim("", (yes, no)).verdict == "holds in part"
    assert claim("", (yes, open_)).verdict == "holds in part"
    assert claim("", (no, open_)).verdict == "does not hold"
    assert claim("", (open_,)).verdict == "undecided"
    told = claim("It is faster.", (yes, no, open_)).line()
    assert "**Holds in part** (1 shown, 1 refuted, 1 undecided)" in told
    assert "x 2.50 [2.00, 3.00] > 1: yes" in told


def test_a_table_tells_its_numbers_and_verdicts() -> None:
    report = load("papers.report")
    table = report.Table("T", "How.", ("a", "b"), [["1", "2"]], [report.Claim("So.", (check(2, 3, 1),))])
    assert table.markdown().startswith(
        "### T\n\nHow.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n- So. **Holds**"
    )
    assert json.loads(json.dumps(table.json()))["claims"][0]["verdict"] == "holds"


def test_a_docstring_is_told_without_its_command_line() -> None:
    assert load("papers.report").about("One.\n\n    python x.py\n\nTwo.\n") == "One.\n\nTwo."


def test_parts_are_measured_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, common = load("papers.report"), load("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(report.sprinter, "load_pair", lambda **_: None)
    monkeypatch.setattr(report, "environment", lambda: {"commit": "c"})
    monkeypatch.setattr(sys, "argv", ["x.py", "--data", "d", "--prompts", "4"])

    def part(name: str) -> Any:
        return lambda pair, args: [report.Table(name, "", ("n",), [[str(args.prompts)]])]

    report.run_parts("x", "X.", {"one": part("one"), "two": part("two")}, 20, prompts=3)
    told = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert list(told["parts"]) == ["one", "two"] and told["parts"]["two"]["tables"][0]["rows"] == [["4"]]


def test_every_answer_meets_every_answer_and_near_ones_tie() -> None:
    common = load("papers.arms")
    ours, theirs = np.array([[1.0, 1.0], [3.0, 1.0]]), np.array([[2.0, 1.01], [2.0, 0.0]])
    assert common.win_shares(ours, theirs).tolist() == [0.5, 1.0]
    assert common.win_shares(ours, theirs, ties=0.5).tolist() == [0.5, 0.75]


def test_a_group_folds_repeats_into_their_prompt() -> None:
    common, arms = load("papers.arms"), load("common")
    prompts = [common.Ask((1,), group) for group in ("a", "b", "a")]
    outs = [SimpleNamespace(stats=SimpleNamespace(new_tokens=n)) for n in (1, 2, 3, 10, 20, 30)]
    arm = arms.Arm("x", lambda prompt, seed: None, outs)
    assert common.Group(arm, prompts).tokens.tolist() == [11, 22, 33]
    assert common.Group(arm, prompts, "a").tokens.tolist() == [11, 33]


def laws(loss: Any, divergence: Any) -> Any:
    """Laws of one text."""
    values = np.array(divergence)
    ones = np.ones(len(values))
    return load("papers.fsd_laws").Laws(
        np.zeros(len(values), int), np.array(loss), ones, 0.5 * ones, {"js_reference": values}
    )


def test_thresholds_rise_from_what_exact_decoding_accepts_to_a_fifth_of_the_gap() -> None:
    fsd = load("papers.fsd")
    even = np.linspace(0.005, 0.995, 100)
    flat = laws(np.ones(100), even)  # each kept position costs the same: T keeps T and loses T
    assert list(fsd.levels(flat).values()) == [0.5, 0.7, 1.0]
    late = laws(
        even**8, even
    )  # what is close costs nearly nothing: 0.7 of the positions lose 0.04 of the gap
    assert list(fsd.levels(late).values()) == [0.5, 0.7, 1.0]
    assert fsd.one_threshold([flat]) == 0.1 and fsd.one_threshold([late, late]) == 0.7


def test_what_is_kept_of_the_least_divergence() -> None:
    module = load("papers.fsd_laws")
    one = laws([1.0, 2.0, 3.0, 4.0], [0.4, 0.3, 0.2, 0.1])
    assert module.kept(one, "js_reference", 0.5).tolist() == [0, 0, 1, 1]
    assert module.kept(one, "chance", 0.5).tolist() == [0.5] * 4
    assert [part.tolist() for part in one.lost(module.kept(one, "js_reference", 0.5))] == [[7.0], [10.0]]


def test_the_mixture_of_whole_texts_that_is_as_fast() -> None:
    scores = load("papers.fsd_scores")

    def arm(score: float, seconds: float) -> Any:
        ones = np.ones(4)
        return scores.Numbers(score * ones, ones, seconds * ones, ones, ones, ones)

    target, draft = arm(-3.0, 4.0), arm(-5.0, 2.0)
    assert scores.over_allocation(arm(-3.5, 3.0), target, draft)[0] == pytest.approx(0.5)
    assert scores.over_allocation(arm(-3.5, 9.0), target, draft)[0] == pytest.approx(-0.5)
    assert scores.of_gap(arm(-3.5, 3.0), target, target, draft)[0] == pytest.approx(0.25)
