"""Verdicts on claims, win shares, thresholds: what turns measured numbers into a paper's table."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sprinter.errors import SprinterError, UserError
from sprinter.reproduce.answers import Answers, difference, duel, win_shares
from sprinter.reproduce.claims import Check, Claim, PaperTable
from sprinter.reproduce.fsd import (
    Laws,
    _apart,
    amount,
    levels,
    longer,
    of_gap,
    one_threshold,
    over_allocation,
    score,
    with_scores,
)
from sprinter.reproduce.fsd import laws as fsd_laws
from sprinter.reproduce.pictures import PaperPicture
from sprinter.reproduce.settings import ReproduceSettings
from sprinter.reproduce.sprinter import apart
from sprinter.reproduce.svip import accepted_run
from sprinter.training.metrics import Interval


def check(low: float, high: float, bound: float, above: bool = True) -> Check:
    return Check("x", ((low + high) / 2, low, high), bound, above)


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
    assert Check("x", (1.2, None, None), 1.0, above).outcome is None  # a single prompt decides nothing


def test_a_claim_is_as_good_as_its_checks() -> None:
    yes, no, open_ = check(2, 3, 1), check(0, 0.5, 1), check(0, 3, 1)
    verdicts = {
        (yes, yes): "held", (yes, no): "held in part", (yes, open_): "held in part", (no, open_): "not held",
        (open_,): "undecided", (): "not testable here",
    }  # fmt: skip
    for checks, verdict in verdicts.items():
        assert Claim("", checks).verdict == verdict
    assert Claim("", (yes,), "no heads").verdict == "not testable here"
    told = Claim("It is faster.", (yes, no, open_)).line("held in part")
    assert told.startswith(
        "- **Held in part.** It is faster.\n    - x: 2.50 [2.00, 3.00], above 1: yes\n    - x: "
    )


def test_a_table_tells_its_numbers_and_verdicts() -> None:
    table = PaperTable("T", "How.", ("a", "b"), [["1", "2"]], [Claim("So.", (check(2, 3, 1),))])
    assert table.markdown("x").startswith(
        "## T\n\nHow.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n- **Held.** So. x: "
    )
    assert json.loads(json.dumps(table.facts()))["claims"][0]["verdict"] == "held"


def test_few_prompts_decide_nothing() -> None:
    claims = [Claim("So.", (check(2, 3, 1),)), Claim("No.", (), "no heads")]
    for prompts, verdicts in ((5, ["undecided", "not testable here"]), (6, ["held", "not testable here"])):
        table = PaperTable("T", "How.", ("a",), [["1"]], claims, prompts)
        assert [table.verdict(claim) for claim in claims] == verdicts
        assert [claim["verdict"] for claim in table.facts()["claims"]] == verdicts
        assert ("**Undecided.** So." in table.markdown("x")) == (prompts == 5)
        assert ("decide nothing" in table.markdown("x")) == (prompts == 5)


def test_a_table_is_read_back_from_its_facts() -> None:
    claims = [
        Claim("So.", (check(2, 3, 1), Check("y", (math.nan, 0.0, 0.1), 0.2, False))),
        Claim("No.", (), "no heads"),
    ]
    picture = PaperPicture("roc", "Curves", "x", "y", {"data": {"gate": [[0.0, 1.0], [0.0, 1.0]]}})
    table = PaperTable("T", "How.", ("a",), [["1"]], claims, 19, picture)
    again = PaperTable.of(json.loads(json.dumps(table.facts(), allow_nan=False)))
    assert again.markdown("x") == table.markdown("x") and again.facts() == table.facts()
    assert "How. **A trial: 19 prompts, fewer than 20.**" in table.markdown("x") and table.trial
    assert "![Curves](x-roc.png)" in table.markdown("x") and picture.png().startswith(b"\x89PNG")
    assert not PaperTable("T", "", (), [], prompts=20).trial and not PaperTable("T", "", (), []).trial


def answer(question: str, repeat: int = 0, **values: Any) -> dict[str, Any]:
    """A row of the bench with a few values."""
    tokens, seconds = values.pop("tokens", 1), values.pop("seconds", 1.0)
    choice = {"new_tokens": [tokens], "wall_time": [seconds], "accept_lengths": [1] * values.pop("rounds", 1)}
    usual = {
        "suite": "s",
        "category": "qa",
        "origins": {},
        "quality": {},
        "drift_sum": 0.0,
        "drift_tokens": tokens,
    }
    return {**usual, "question_id": question, "repeat": repeat, "choices": [choice], **values}


def scored(*scores: list[float]) -> Answers:
    rows = [
        answer(str(prompt), repeat, quality={"log_likelihood_per_token": score})
        for prompt, each in enumerate(scores) for repeat, score in enumerate(each)
    ]  # fmt: skip
    return Answers("x", rows)


def test_every_answer_meets_every_answer_and_near_ones_tie() -> None:
    ours, theirs = scored([1.0, 3.0], [1.0, 1.0]), scored([2.0, 2.0], [1.01, 0.0])
    assert win_shares(ours, theirs).tolist() == [0.5, 1.0]
    assert win_shares(ours, theirs, ties=0.5).tolist() == [0.5, 0.75]
    won, compared = duel(ours, theirs)  # a draw of the first prompt counts half
    assert won[0] == 75.0 and compared[0] == 62.5


def test_answers_are_paired_by_prompt_and_repeats_are_added_up() -> None:
    rows = [
        answer("b", tokens=2, rounds=2),
        answer("a", 1, tokens=10),
        answer("a", 0, tokens=1, category="rag"),
    ]
    answers = Answers("x", rows)
    assert answers.tokens.tolist() == [11, 2] and answers.rounds.tolist() == [2, 2]
    assert answers.group("rag").tokens.tolist() == [1]
    shuffled = Answers("x", rows[::-1])
    assert difference((answers.tokens, answers.rounds), (shuffled.tokens, shuffled.rounds)) == (0.0, 0.0, 0.0)


def test_what_comes_after_the_first_token_takes_no_prompt() -> None:
    rows = [answer("a", arrivals_ms=[[500.0, 500.0, 600.0, 900.0]]), answer("b", arrivals_ms=[[70.0]])]
    tokens, seconds = Answers("x", rows).after_the_first  # two tokens of the first round came at once
    assert tokens.tolist() == [2.0, 0.0] and seconds.tolist() == pytest.approx([0.4, 0.0])


def test_a_measure_that_no_answer_has_is_none_and_empty_references_are_left_out() -> None:
    answers = Answers("x", [answer("a", quality={"rouge1": 0.5}), answer("b")])
    top, bottom = answers.quality("rouge1") or (np.zeros(1), np.zeros(1))
    assert (top.tolist(), bottom.tolist()) == ([0.5], [1.0]) and answers.quality("exact_match") is None


def laws(loss: Any, divergence: Any) -> Laws:
    """Laws of one text."""
    values, ones = np.array(divergence), np.ones(len(divergence))
    return Laws(np.zeros(len(values), np.int64), np.array(loss), ones, 0.5 * ones, {"js_reference": values})


def test_thresholds_rise_from_what_exact_decoding_accepts_to_a_fifth_of_the_gap() -> None:
    even = np.linspace(0.005, 0.995, 100)
    flat = laws(np.ones(100), even)  # each kept position costs the same: T keeps T and loses T
    low, middle, high = levels(flat).values()
    assert low == 0.5 and low < middle < high  # SD's acceptance costs more than a fifth: the next two
    late = laws(
        even**8, even
    )  # what is close costs nearly nothing: 0.8 of the positions lose 0.13 of the gap
    assert list(levels(late).values()) == [0.5, 0.6, 0.8]
    assert one_threshold([flat]) == 0.1 and one_threshold([late, late]) == 0.7


def test_what_is_kept_of_the_least_divergence() -> None:
    one = laws([1.0, 2.0, 3.0, 4.0], [0.4, 0.3, 0.2, 0.1])
    assert one.keeping("js_reference", 0.5).tolist() == [0, 0, 1, 1]
    assert one.keeping("chance", 0.5).tolist() == [0.5] * 4
    assert [part.tolist() for part in one.lost(one.keeping("js_reference", 0.5))] == [[7.0], [10.0]]


def test_the_mixture_of_whole_texts_that_is_as_fast() -> None:
    ones = np.ones(4)

    def arm(score: float, seconds: float) -> Any:
        return (score * ones, ones), (seconds * ones, ones)

    target, draft = arm(-3.0, 4.0), arm(-5.0, 2.0)
    assert over_allocation(arm(-3.5, 3.0), target, draft)[0] == pytest.approx(0.5)
    assert over_allocation(arm(-3.5, 9.0), target, draft)[0] == pytest.approx(-0.5)
    assert of_gap(arm(-3.5, 3.0)[0], target[0], target[0], draft[0])[0] == pytest.approx(0.25)


def study(template: str | None, **settings: Any) -> Any:
    return SimpleNamespace(
        chats=template is not None, suites=(), settings=ReproduceSettings(**settings), new_tokens=48
    )


def test_accuracies_and_log_likelihoods_are_not_mixed() -> None:
    answers = Answers("x", [answer("a", tokens=4, quality={"log_likelihood": -6.0, "exact_match": 0.0})])
    assert [part.tolist() for part in score(study("{}"), answers)] == [[0.0], [1.0]]
    assert [part.tolist() for part in score(study(None), answers)] == [[-6.0], [4.0]]
    assert "HumanEval" not in with_scores(study("{}")) and "HumanEval" in with_scores(study(None))
    assert "HumanEval" in with_scores(study("{}", run_code=True))
    alone = SimpleNamespace(chats=True, suites=("humaneval",), settings=ReproduceSettings())
    with pytest.raises(UserError, match="give --run-code"):
        with_scores(alone)  # type: ignore[arg-type]
    with pytest.raises(SprinterError, match="no answer by x has an accuracy"):
        score(study("{}"), Answers("x", [answer("a", quality={"log_likelihood": -6.0})]))


def test_a_division_by_zero_is_undecided_and_its_facts_are_json() -> None:
    ones, zeros = np.ones(3), np.zeros(3)
    nothing = of_gap(
        (ones, ones), (ones, ones), (ones, ones), (ones, ones)
    )  # no gap between target and draft
    for value in (nothing, (float("nan"), 0.0, 0.1)):
        claim = Claim("So.", (Check("loss", value, 0.2, above=False),))
        assert claim.verdict == "undecided" and "loss: –, below 0.2" in claim.line(claim.verdict)
        facts = json.loads(json.dumps(claim.facts(claim.verdict), allow_nan=False))
        assert facts["checks"][0]["value"][0] is None and facts["says"] == "So."
    assert difference((zeros, ones), (zeros, ones)) == (0.0, 0.0, 0.0)


def test_sds_acceptance_is_that_of_the_drafts_that_it_judges() -> None:
    p, q = torch.tensor([[0.5, 0.4, 0.1]] * 4), torch.tensor([[0.4, 0.6, 0.0]] * 4)
    recording = SimpleNamespace(raw_p=p, raw_q=q, lengths=(3, 1), outcomes=None)
    suite = SimpleNamespace(samples=[1, 2])

    def found(chats: bool) -> Laws:
        one = SimpleNamespace(
            chats=chats, suites=(), prompts=2, tuning=1, suite=lambda *_: suite, laws=lambda *_: recording,
            once=lambda _, make: make(),
        )  # fmt: skip
        return fsd_laws(one, "CSQA")  # type: ignore[arg-type]

    drawn, greedy = found(False), found(True)
    assert drawn.overlap == pytest.approx([0.8] * 4) and drawn.tv == pytest.approx([0.2] * 4)
    assert greedy.overlap == pytest.approx([0.4] * 4) and greedy.tv == pytest.approx([0.6] * 4)
    assert greedy.loss.tolist() == drawn.loss.tolist()  # a likeliest token would be a gain


def test_drafts_are_longer_where_nearly_all_is_kept() -> None:
    assert [longer(5, 0.94), longer(5, 0.96), longer(15, 0.96), longer(20, 1.0)] == [5, 10, 20, 20]


def test_the_length_of_answers_is_told_as_it_was() -> None:
    assert amount(study("{}")) == "answers as long as the suite's"
    assert amount(study("{}", new_tokens=48)) == amount(study(None)) == "48 new tokens"


def test_data_sets_of_other_sizes_are_compared_whole() -> None:
    value, low, high = _apart((np.array([1.0, 3.0]), np.ones(2)), (np.array([1.0, 1.0, 4.0]), np.ones(3)))
    assert value == 0.0 and low is not None and high is not None and low < -1 < 1 < high


def test_areas_on_other_labels_differ_by_the_ends_of_their_intervals() -> None:
    found = apart(Interval(0.8, 0.7, 0.9), Interval(0.75, 0.7, 0.8))
    assert found == pytest.approx((0.05, -0.1, 0.2)) and Check("x", found, 0.0).outcome is None


def test_a_run_of_accepted_tokens_ends_with_its_text() -> None:
    run = accepted_run(np.array([0.5, 1.0, 0.5, 1.0]), (3, 1))
    assert run.tolist() == [0.5 * (1 + 1.5), 1.5, 0.5, 1.0]
