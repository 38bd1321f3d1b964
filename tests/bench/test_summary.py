from __future__ import annotations

import json

import numpy as np
import pytest
from tests.bench.rows import row, rows_of

from sprinter.bench.statistics import ratio_of_ratios, ratio_of_sums
from sprinter.bench.summary import ALL, groups, summarise

RNG = np.random.default_rng(3)


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """95 % intervals of a ratio of means, 300 data sets of 60: outside 88-99 % with chance < 1e-4 if they are right."""
    hits = 0
    for _ in range(300):
        work = RNG.gamma(4.0, size=60)
        top, bottom = work * RNG.normal(2.0, 0.2, 60), work
        value, low, high = ratio_of_sums(top, bottom)
        assert low <= value <= high
        hits += low <= 2.0 <= high
    assert 0.88 <= hits / 300 <= 0.99


def test_pairing_by_prompt_makes_the_interval_narrow() -> None:
    work = RNG.gamma(2.0, size=50)
    tokens = np.full(50, 20.0)
    _, low, high = ratio_of_ratios((tokens, work * 0.8), (tokens, work))
    assert (low, high) == pytest.approx((1.25, 1.25))
    _, low, high = ratio_of_ratios((tokens, RNG.permutation(work) * 0.8), (tokens, work))
    assert high - low > 0.2


def test_what_a_summary_says() -> None:
    rows = rows_of("plain", np.full(8, 0.4), calls=20) + rows_of("fast", np.full(8, 0.2), drift=0.1)
    plain, fast = summarise(rows, {"plain": "sprinter", "fast": "sprinter"}, bases=("plain", "absent"))
    assert plain["tokens_per_s"] == pytest.approx(50)
    assert fast["tokens_per_s"] == pytest.approx(100)
    assert fast["speed_over"] == {"plain": pytest.approx((2.0, 2.0, 2.0))}
    assert fast["target_calls_per_token"] == pytest.approx((0.5, 0.5, 0.5))
    assert fast["mean_drift"] == pytest.approx((0.1, 0.1, 0.1))
    assert fast["drift_coverage"] == 1
    assert fast["tokens_per_round"][0] == 2
    assert fast["round_histogram"] == [0, 0, 80]
    assert fast["accepted_of_checked"] == pytest.approx(2 / 3)
    assert fast["ttft_ms"] == pytest.approx({"p50": 10.0, "p95": 10.0})
    assert fast["gap_ms"] == pytest.approx({"p50": 10.0, "p95": 10.0})
    assert fast["lossless"] is False and plain["lossless"] is True


def test_arms_are_summarised_over_the_prompts_that_all_answered() -> None:
    rows = rows_of("a", np.full(6, 0.4)) + rows_of("b", np.full(6, 0.2))[:4]
    rows += rows_of("c", np.full(6, 0.1))
    found = groups(rows)
    assert [len(found[arm, "toy", 1.0].tokens) for arm in ("a", "b", "c")] == [6, 4, 6]  # b failed half-way
    assert {s["arm"]: s["speed_over"].keys() for s in summarise(rows, {}, ("a",))}["b"] == set()


def test_two_suites_give_a_third_summary_over_both() -> None:
    rows = rows_of("a", np.full(3, 0.4)) + rows_of("a", np.full(5, 0.1), suite="other")
    found = {key[1]: group for key, group in groups(rows).items()}
    assert {name: len(group.tokens) for name, group in found.items()} == {"toy": 3, ALL: 8, "other": 5}


def test_repeats_of_a_prompt_are_one_unit() -> None:
    rows = [row("a", "q0", 0.1, repeat=r) for r in range(4)]
    (group,) = groups(rows).values()
    assert group.tokens.tolist() == [80.0]


def test_what_an_engine_does_not_know_is_none() -> None:
    rows = rows_of("peer", np.full(3, 0.4))
    for one in rows:
        one |= {
            "target_calls": [None],
            "draft_steps": [None],
            "drift_sum": None,
            "drift_tokens": 0,
            "origins": {},
        }
        one |= {"ttft_s": [None], "arrivals_ms": [[]]}
        one["choices"][0]["accept_lengths"] = []
    (summary,) = summarise(rows, {})
    names = ("target_calls_per_token", "draft_steps_per_token", "mean_drift", "tokens_per_round", "ttft_ms")
    assert all(summary[name] is None for name in (*names, "gap_ms", "accepted_of_checked", "drafted_share"))
    assert summary["round_histogram"] == []


def test_what_few_prompts_have_gives_an_interval_that_can_be_written() -> None:
    """In a third of the draws none of 20 prompts is the one that was metered: those draws are left out."""
    rows = rows_of("a", np.full(20, 0.1), drift=0.2)
    for one in rows[1:]:
        one |= {"drift_sum": 0.0, "drift_tokens": 0}
        one["choices"][0]["accept_lengths"] = []
    (summary,) = summarise(rows, {})
    assert summary["mean_drift"] == pytest.approx((0.2, 0.2, 0.2))
    json.dumps(summary, allow_nan=False)


def test_answers_without_a_token_have_no_rate() -> None:
    rows = rows_of("silent", np.full(3, 0.1)) + rows_of("plain", np.full(3, 0.1))
    for one in rows[:3]:
        one |= {"drift_sum": 0.0, "drift_tokens": 0, "origins": {}, "ttft_s": [None], "arrivals_ms": [[]]}
        one["choices"][0] |= {"new_tokens": [0], "accept_lengths": []}
    silent, plain = summarise(rows, {}, bases=("plain", "silent"))
    assert silent["tokens_per_s"] == 0 and silent["target_calls_per_token"] is None
    assert silent["speed_over"] == {} and set(plain["speed_over"]) == {"plain"}
    json.dumps([silent, plain], allow_nan=False)


def test_an_arm_that_failed_in_a_repeat_is_not_paired_with_one_that_did_not() -> None:
    times = np.full(4, 0.2)
    whole = [one for repeat in range(2) for one in rows_of("plain", times, repeat=repeat)]
    half = [one for repeat in range(2) for one in rows_of("half", times, repeat=repeat)][:6]
    plain, failed = summarise(whole + half, {}, bases=("plain",))
    assert failed["answers"] == 6 and failed["speed_over"] == {} and set(plain["speed_over"]) == {"plain"}


def test_the_mean_of_a_quality_counts_only_answers_that_have_it() -> None:
    rows = rows_of("a", np.full(4, 0.1))
    for i, one in enumerate(rows[:3]):
        one["quality"] = {"rouge1": float(i)}
    (summary,) = summarise(rows, {})
    assert summary["quality"]["rouge1"][0] == pytest.approx(1.0)


def test_one_prompt_has_no_interval() -> None:
    """Repeats of one prompt stay one prompt."""
    rows = [row(arm, "q0", seconds, repeat=i, drift=0.1) | {"quality": {"rougeL": 0.5}}
            for arm, seconds in (("plain", 0.2), ("fast", 0.1)) for i in range(3)]  # fmt: skip
    _, fast = summarise(rows, {}, bases=("plain",))
    assert fast["speed_over"]["plain"] == pytest.approx((2.0, None, None))
    for name in ("target_calls_per_token", "mean_drift", "tokens_per_round"):
        assert fast[name][0] > 0 and fast[name][1:] == (None, None)
    assert fast["quality"]["rougeL"] == (0.5, None, None)
    both = summarise([*rows, row("plain", "q1", 0.3), row("fast", "q1", 0.1)], {}, bases=("plain",))
    assert None not in both[1]["speed_over"]["plain"]
