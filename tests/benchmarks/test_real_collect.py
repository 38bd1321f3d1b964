"""``benchmarks/real/collect.py``: how well measures of an answer foretell that it is wrong."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
from benchmarks.real import gate_prompts
from benchmarks.real.collect import area, collect, correlation
from benchmarks.real.quality import ANSWERS, NAMED, SAMPLED, by_group, part_of, trained_on
from benchmarks.smoke import made_up_data

from sprinter.bench.suites import load_suite


def text(arm: str, prompt: int, right: float, drift: float, **more: float) -> dict[str, Any]:
    return {
        "suite": "gsm8k", "question_id": str(prompt), "category": "", "temperature": 0.0, "model_id": arm,
        "right": right, "new_tokens": 10, "target_calls": 5, "draft_steps": 10, "trusted": 0,
        "drift_sum": drift, "drift_first": drift / 2, "drift_tokens": 10, **more,
    }  # fmt: skip


def answers() -> list[dict[str, Any]]:
    """Five lossy arms, each worse than the one before: the longer the drift of an answer, the likelier it is wrong."""
    chance = np.random.default_rng(1)
    found = [text("autoregressive", i, float(i % 4 != 0), 0.0) for i in range(40)]
    found += [text("speculative(gamma=5)", i, float(i % 4 != 0), 0.0) for i in range(40)]
    for arm in range(1, 6):
        for i in range(40):
            drift = arm * chance.random()
            found.append(text(f"certain(threshold={arm})", i, float(i % 4 != 0 and drift < 2), drift))
    return found


def test_area_is_the_chance_that_a_wrong_answer_has_the_larger_value() -> None:
    values, wrong = np.array([3.0, 1.0, 2.0, 2.0]), np.array([True, False, True, False])
    pairs = [(3, 1), (3, 2), (2, 1), (2, 2)]
    assert area(values, wrong) == pytest.approx(sum(1.0 if a > b else 0.5 * (a == b) for a, b in pairs) / 4)


def test_drift_that_causes_harm_foretells_it() -> None:
    found, table = collect(answers(), {})
    (link,) = found["correlation"]
    assert link["arms"] == 5 and link["answers"] == 5 * 30
    assert link["wrong"] == sum(one["right"] == 0 and int(one["question_id"]) % 4 != 0 for one in answers())
    assert link["spearman"]["mean drift"] < -0.9
    assert link["spearman"]["worst drift"] is None and "worst drift" not in link["auc"], "not measured here"
    value, low, high = link["auc"]["sum of drifts"]
    assert value == 1.0 and low == high == 1.0
    assert 0.4 < link["auc"]["length"][0] < 0.6
    assert "150 answers" in table and "| sum of drifts | -" in table


def test_no_correlation_without_arms_or_differences() -> None:
    assert correlation(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])) is None
    assert correlation(np.ones(5), np.arange(5.0)) is None
    assert correlation(np.arange(5.0), np.arange(5.0)) == pytest.approx(1.0)


def test_texts_of_spec_bench_count_for_the_suite_and_for_their_group() -> None:
    talk = {"suite": "spec-bench", "category": "roleplay", "right": None}
    assert [one["suite"] for one in by_group(talk)] == ["spec-bench", "spec-bench, mt_bench"]
    assert by_group({**talk, "suite": "gsm8k"}) == [{**talk, "suite": "gsm8k"}]


def test_a_suite_is_named_with_a_number_of_prompts_or_a_range() -> None:
    chosen = Namespace(data=made_up_data(), system=None, name=ANSWERS)
    whole, part = (part_of(f"gsm8k:{prompts}:8", chosen, False) for prompts in ("3", "1-3"))
    assert len(whole.samples) == 3
    assert part.samples == whole.samples[1:]


@pytest.mark.parametrize("suite", ["mt-bench", "spec-bench"])
@pytest.mark.parametrize("result", [NAMED, SAMPLED])
def test_named_and_sampled_arms_are_not_asked_what_gates_are_trained_on(suite: str, result: str) -> None:
    data = made_up_data()
    chosen = Namespace(data=data, system=None, name=result)
    whole = load_suite(suite, data).samples
    asked = part_of(f"{suite}:{len(whole)}:8", chosen, False).samples
    seen = set(gate_prompts.questions(data))
    assert asked == [one for one in whole if one.turns[0] not in seen]
    assert {(suite, one.id) for one in whole} - trained_on(data, result) == {(suite, one.id) for one in asked}
    assert suite != "spec-bench" or 0 < len(asked) < len(whole)
    assert not trained_on(data, "quality"), "HumanEval and GSM8K are apart"
