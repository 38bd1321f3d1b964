from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.bench.rows import results_of, rows_of

from sprinter.bench.compare import compare
from sprinter.errors import UserError

RNG = np.random.default_rng(5)


def run(factor: float = 1.0, drift: float = 0.1, machine: float = 1.0) -> dict[str, Any]:
    """Two arms on 60 prompts of different length, 3 % noise; ``factor`` slows the second one."""
    work = np.random.default_rng(0).gamma(4.0, 0.05, 60) * machine

    def times(scale: float) -> np.ndarray:
        return work * scale * RNG.normal(1.0, 0.03, 60)

    drifts = np.clip(RNG.normal(drift, 0.02, 60), 0, 1)
    fast = [
        one | {"drift_sum": 20 * d}
        for one, d in zip(rows_of("fast", times(0.5 * factor)), drifts, strict=True)
    ]
    return results_of(rows_of("plain", times(1.0)) + fast)


def verdicts(before: dict[str, Any], after: dict[str, Any], **options: Any) -> dict[str, str]:
    return {c.measure: c.verdict for c in compare(before, after, **options) if c.arm == "fast"}


def test_a_slowdown_of_five_percent_is_flagged_and_a_gain_too() -> None:
    assert verdicts(run(), run(1.05))["speed over plain"] == "worse"
    assert verdicts(run(1.05), run())["speed over plain"] == "better"


def test_equal_runs_are_the_same_on_another_machine_too() -> None:
    """A 95 % interval misses in 1 of 20 equal runs: at most 5 of 40 here (chance of more: 1.4 %; the seed is fixed)."""
    missed = sum(verdicts(run(), run(machine=3.0))["speed over plain"] != "same" for _ in range(40))
    assert missed <= 5
    assert verdicts(run(), run(machine=3.0))["tokens/s"] == "told"


def test_without_a_base_tokens_per_second_are_judged() -> None:
    before, after = run(), run(machine=1.1)
    for results in (before, after):
        results["settings"]["bases"] = []
    assert verdicts(before, after)["tokens/s"] == "worse"


def test_a_tolerance_lets_a_small_loss_pass() -> None:
    assert verdicts(run(), run(1.05), tolerance=0.1)["speed over plain"] == "same"


def test_more_drift_is_flagged() -> None:
    found = verdicts(run(), run(drift=0.15))
    assert found["mean drift"] == "worse"
    assert found["target calls/token"] == "same"


def test_an_arm_that_failed_in_the_later_run_is_worse() -> None:
    before, after = run(), run()
    after["rows"] = [one for one in after["rows"] if one["model_id"] == "plain" or one["question_id"] < "q3"]
    after["arms"] = [{"name": "plain", "status": "ok"}, {"name": "fast", "status": "failed"}]
    (lost,) = (c for c in compare(before, after) if c.measure == "answers")
    assert (lost.arm, lost.before, lost.verdict) == ("fast", 60, "worse") and 0 < lost.after < 60
    after["rows"] = [one for one in after["rows"] if one["model_id"] == "plain"]
    assert ("fast", 0, "worse") in {(c.arm, c.after, c.verdict) for c in compare(before, after)}
    after["arms"].pop()  # not asked for again is no failure
    assert all(c.arm == "plain" for c in compare(before, after))


def test_a_base_that_failed_half_way_is_compared_over_its_own_prompts() -> None:
    before, after = run(), run(machine=3.0)
    seconds = {one["question_id"]: one["choices"][0]["wall_time"][0] for one in before["rows"]}
    slow = sorted(seconds, key=lambda question: seconds[question])[-10:]  # not like the others
    after["rows"] = [one for one in after["rows"] if one["model_id"] == "fast" or one["question_id"] in slow]
    found = verdicts(before, after)
    assert found["speed over plain"] == "same" and found["tokens/s"] == "told"


def test_a_suite_without_the_base_arm_is_judged_by_tokens_per_second() -> None:
    times = np.full(5, 0.1)
    before, after = (
        results_of([*rows_of("plain", times, suite="one"), *rows_of("fast", times, suite="one"),
                    *rows_of("fast", times * factor, suite="two")])
        for factor in (1.0, 1.5)
    )  # fmt: skip
    found = {
        (c.suite, c.verdict) for c in compare(before, after) if (c.arm, c.measure) == ("fast", "tokens/s")
    }
    assert ("one", "told") in found and ("two", "worse") in found


def test_equal_numbers_that_few_prompts_have_are_the_same() -> None:
    rows = rows_of("fast", np.linspace(0.1, 0.3, 20), calls=0)
    rows[3] |= {"target_calls": [2]}
    rows += rows_of("plain", np.linspace(0.2, 0.3, 20))
    for change in compare(results_of(rows), results_of(rows)):
        assert change.verdict in ("same", "told") and np.isfinite(change.ratio).all()


def test_runs_that_share_nothing_are_refused() -> None:
    other = results_of(rows_of("else", np.full(3, 0.1)))
    with pytest.raises(UserError, match="no arm"):
        compare(run(), other)
    with pytest.raises(UserError, match="did not take part"):
        compare(run(), run(), base="absent")
    with pytest.raises(UserError, match="not a results"):
        compare({"schema": "x"}, run())


def whole(factor: float = 1.0) -> dict[str, Any]:
    """A run that says what it was of."""
    suite = {
        "name": "toy",
        "sources": [{"name": "toy.jsonl", "sha256": "a"}],
        "rule": "",
        "chat": False,
        "new_tokens": 20,
    }
    return run(factor) | {
        "pair": {
            "target": {"name": "big", "sha256": "a" * 64},
            "draft": {"name": "small", "sha256": "b" * 64},
            "gate": {"sha256": "c" * 64},
            "tokenizer": {"sha256": "d" * 64},
        },
        "suites": [suite],
        "arms": [{"name": name, "spec": name, "status": "ok"} for name in ("plain", "fast")],
        "settings": {
            "bases": ["plain"],
            "new_tokens": None,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
        },
    }


OTHERS = [
    (("pair", "target"), {"name": "huge", "sha256": "e"}, r"the target \(big, huge\)"),
    (("pair", "draft"), {"name": "small", "sha256": "e"}, "the draft"),
    (("pair", "gate"), {"sha256": "e" * 64}, "the gate"),
    (("pair", "tokenizer"), {"sha256": "e"}, "the tokenizer"),
    (("suites", 0, "sources"), [{"name": "toy.jsonl", "sha256": "e"}], "suite toy: sources"),
    (("suites", 0, "new_tokens"), 30, "suite toy: new_tokens"),
    (("arms", 1, "spec"), "faster", r"arm fast \(fast, faster\)"),
    (("settings", "top_k"), 5, r"top_k \(0, 5\)"),
]


@pytest.mark.parametrize(
    ("path", "value", "words"), OTHERS, ids=lambda value: value[-1] if type(value) is tuple else ""
)
def test_runs_of_other_things_are_refused(path: tuple[Any, ...], value: Any, words: str) -> None:
    before, after = whole(), whole(1.05)
    assert verdicts(before, after)["speed over plain"] == "worse"
    place: Any = after
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UserError, match=f"they differ in {words}: compare runs of one pair"):
        compare(before, after)
    assert verdicts(before, after, across=True)["speed over plain"] == "worse"


def test_what_only_one_run_has_and_other_machines_do_not_stop_a_comparison() -> None:
    before, after = whole(), whole()
    del before["pair"]["gate"]
    after["arms"].append({"name": "new", "spec": "new", "status": "ok"})
    after["suites"].append({"name": "another"})
    after["environment"] = {"cpu": "another"}
    assert compare(before, after)


def test_a_single_prompt_in_common_has_no_verdict() -> None:
    before, after = (
        results_of([*rows_of("plain", np.array([0.1])), *rows_of("fast", np.array([seconds]))])
        for seconds in (0.05, 0.2)
    )
    changes = compare(before, after)
    assert {change.verdict for change in changes} == {"told"}
    assert all(change.ratio[1:] == (None, None) for change in changes)
    (speed,) = (change for change in changes if change.measure == "speed over plain")
    assert speed.ratio[0] == pytest.approx(0.25)
