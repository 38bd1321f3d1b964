"""Measures of a text alone, by hand; right and wrong; means over prompts."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from importlib.util import find_spec

import pytest

from sprinter.bench.quality import rouge as rouge_module
from sprinter.bench.quality.checks import check_answer, first_choice, last_number, right
from sprinter.bench.quality.measure import distinct, longest_repeat, repeated
from sprinter.bench.quality.metrics import METRICS, intervals
from sprinter.bench.quality.rouge import check_rouge, rouge
from sprinter.bench.sample import SampleCheck
from sprinter.errors import UserError


def test_distinct_and_repeated_by_hand() -> None:
    ids = [1, 2, 1, 2, 1]
    assert distinct(ids, 1) == 2 / 5
    assert distinct(ids, 2) == 2 / 4
    assert repeated(ids, 2) == 1 - 2 / 4
    assert repeated([1, 2, 3, 4, 5], 4) == 0
    assert repeated([7] * 10, 4) == 1 - 1 / 7
    assert distinct([1], 2) is None
    assert repeated([], 4) is None


@pytest.mark.parametrize(
    ("ids", "longest"),
    [
        ([], 0),
        ([1], 0),
        ([1, 2, 3], 0),
        ([1, 2, 1], 1),
        ([1, 2, 3, 1, 2], 2),
        ([5, 5, 5, 5], 3),
        ([1, 2, 1, 2, 1], 3),
    ],
)
def test_longest_repeat_by_hand(ids: list[int], longest: int) -> None:
    assert longest_repeat(ids) == longest


def test_longest_repeat_is_the_plain_search() -> None:
    chance = random.Random(1)
    for _ in range(200):
        ids = [chance.randrange(3) - 1 for _ in range(chance.randrange(20))]
        lengths = [
            n
            for n in range(1, len(ids))
            if any(
                ids[i : i + n] == ids[j : j + n]
                for i in range(len(ids))
                for j in range(i + 1, len(ids) - n + 1)
            )
        ]
        assert longest_repeat(ids) == max(lengths, default=0)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 18.", "18"), ("#### 1,234", "1234"), ("$1,200.50 a week", "1200.50"), ("x = -4.0", "-4"),
        ("5-3", "3"), ("(2)-7", "7"), ("cost -$5", "-5"), ("$-5", "-5"), ("about .5", "0.5"), ("1,2,3", "3"),
        ("16 − 3 = 13 eggs", "13"), ("50%", "50"), ("it is −3", "-3"), ("12,3456", "3456"), ("007", "7"),
    ],
)  # fmt: skip
def test_last_number(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_no_number() -> None:
    assert last_number("none at all. - $") is None
    assert right("none", SampleCheck("number", "3")) is False


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (" B", "B"), ("(C) library", "C"), ("A", "A"), ("A door", "A"), ("The answer is A because", "A"),
        ("Hm. A door, so D.", "D"), ("Answer: E", "E"), ("A's and B's, D", "D"), ("ABC or D", "D"),
        ("b", None), ("", None), ("I think H", "H"),
    ],
)  # fmt: skip
def test_first_choice(text: str, letter: str | None) -> None:
    assert first_choice(text) == letter


def test_right_and_wrong() -> None:
    assert right("so she has 18.00 left", SampleCheck("number", "18"))
    assert not right("18 and then 19", SampleCheck("number", "18"))
    assert right("(B)", SampleCheck("choice", "B")) and not right("A, not B", SampleCheck("choice", "B"))


@pytest.mark.parametrize("text", ["Paris", " paris. ", "PARIS\n"])
def test_a_text_that_is_the_answer(text: str) -> None:
    assert right(text, SampleCheck("text", "Paris."))
    assert not right(f"It is {text}", SampleCheck("text", "Paris"))


@pytest.mark.parametrize(
    "check", [SampleCheck("number", "many"), SampleCheck("choice", "AB"), SampleCheck("choice", ""),
              SampleCheck("code", "x", ""),
              SampleCheck("code", "", "f"), SampleCheck("code", "x", "f()")],
)  # fmt: skip
def test_checks_that_nothing_can_answer(check: SampleCheck) -> None:
    with pytest.raises(UserError) as error:
        check_answer(check)
    assert "\n" not in str(error.value)


def test_rouge_by_hand() -> None:
    # 4 of 5 words of the answer, 4 of 6 of the reference; pairs: "the cat" and "on the" of 4 and 5.
    values = rouge("The cat lay on the!", "the cat sat on the mat")
    p, r = 4 / 5, 4 / 6
    assert values["rouge1_precision"] == pytest.approx(p) and values["rouge1_recall"] == pytest.approx(r)
    assert values["rouge1"] == pytest.approx(2 * p * r / (p + r))
    assert values["rouge2_precision"] == pytest.approx(2 / 4) and values["rouge2_recall"] == pytest.approx(
        2 / 5
    )
    assert values["rougeL_precision"] == pytest.approx(4 / 5)
    assert set(values) <= METRICS.keys()


def test_rouge_of_order() -> None:
    assert rouge("mat the on cat", "cat on the mat")["rougeL"] == pytest.approx(1 / 4)
    assert rouge("cats sitting", "cat sits")["rouge1"] == 0
    assert rouge("running dogs", "run dog")["rouge1"] == 0
    assert rouge("", "words")["rougeL"] == 0
    assert rouge("words", "…") == {}


def test_rouge_l_is_left_out_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rouge_module, "CELLS", 5)
    values = rouge("a b c", "a b")
    assert "rougeL" not in values and values["rouge1_recall"] == 1
    assert "rougeL" in rouge("a b", "a b")


def test_rouge_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rouge_module, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^ROUGE needs rouge-score: pip install '.\[bench\]' in.* 'rouge-score>="
    ):
        check_rouge()
    monkeypatch.undo()
    assert find_spec("rouge_score") is not None


def test_metrics_say_what_is_better() -> None:
    assert all(metric.name == name and len(metric.meaning) > 5 for name, metric in METRICS.items())
    assert METRICS["perplexity"].better == "lower" and METRICS["rougeL"].better == "higher"
    assert METRICS["scored_tokens"].better is None


def test_intervals_pool_likelihoods_and_skip_what_is_absent() -> None:
    prompts = [
        [
            {
                "log_likelihood": -2.0,
                "scored_tokens": 1.0,
                "perplexity": math.exp(2),
                "log_likelihood_per_token": -2.0,
            }
        ],
        [
            {
                "log_likelihood": -8.0,
                "scored_tokens": 8.0,
                "perplexity": math.e,
                "log_likelihood_per_token": -1.0,
            },
            {"exact_match": 1.0},
        ],
        [],
    ]
    means = intervals(prompts)
    assert means["perplexity"][0] == pytest.approx(math.exp(10 / 9))
    assert means["log_likelihood_per_token"][0] == pytest.approx(-10 / 9)
    assert means["exact_match"] == (1.0, None, None)  # one prompt has no interval
    value, low, high = means["perplexity"]
    assert math.e - 1e-9 <= low <= value <= high <= math.exp(2) + 1e-9
    assert list(means) == [name for name in METRICS if name in means]
    assert intervals([]) == {}


def test_intervals_are_never_infinite() -> None:
    worst = {
        "log_likelihood": -2e4,
        "scored_tokens": 2.0,
        "perplexity": 1.0,
        "log_likelihood_per_token": -1e4,
    }
    assert all(map(math.isfinite, intervals([[worst], [worst]])["perplexity"]))
