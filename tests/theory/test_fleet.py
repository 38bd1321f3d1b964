"""The simulation of a fleet against closed forms: one row, M/D/1, Little's law, tokens a call, conservation."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import places, run
from tests.cli.tiny import Run

from sprinter.engine.pair import load_pair
from sprinter.errors import UserError
from sprinter.theory.fleet import METHODS, forecast, needed
from sprinter.theory.load_costs import LoadCosts, fit, known, measure_load, weights
from sprinter.theory.machines import MeasuredPasses, Roofline, draft_lengths
from sprinter.theory.settings import FleetSettings
from sprinter.theory.speculation import expected_tokens

__all__ = ["places", "run"]  # fixtures
# 10 ms and 0.1 a token of a row; a draft step 2 ms, a row 1 ms more; nothing on the host
PASS, PROMPT, STEP = ((0.0101, 0.0105),) * 2, ((0.0101, 0.0116, 0.0164),) * 2, ((0.002,) * 2, (0.005,) * 2)
COSTS = LoadCosts((1, 4), (1, 16, 64), PASS, PASS, PROMPT, PROMPT, STEP, STEP, (0.0, 0.0, 0.0))
GPU = FleetSettings(parameters=8.0, prompt_tokens=1.0, answer_tokens=50.0, texts=40)


def test_one_row_has_the_latency_of_its_passes() -> None:
    asked = FleetSettings(prompt_tokens=65.0, answer_tokens=10.0, texts=3, rows=1, step_ms=0.5, event_ms=1.0)
    found = forecast(asked, MeasuredPasses(COSTS), "plain", 1)
    assert found.first_ms[0] == pytest.approx(16.4 + 10.1 + 1.5)
    assert found.between_ms == pytest.approx((11.6, 11.6))
    assert found.text_ms == pytest.approx(16.4 + 10 * 10.1 + 15) and found.tokens_per_s == pytest.approx(
        10e3 / found.text_ms
    )
    away = forecast(replace(asked, round_trip_ms=20.0), MeasuredPasses(COSTS), "plain", 1)
    assert away.text_ms == pytest.approx(found.text_ms + 11 * 20)
    slowed = forecast(replace(asked, slowdown=1.5), MeasuredPasses(COSTS), "plain", 1)
    assert slowed.text_ms == pytest.approx(found.text_ms + 0.5 * (16.4 + 10 * 10.1))
    both = forecast(replace(asked, slowdown=1.5, round_trip_ms=20.0), MeasuredPasses(COSTS), "plain", 1)
    assert both.text_ms == pytest.approx(slowed.text_ms + 11 * 20), "the network is no slower for it"


def test_the_host_works_for_steps_events_and_texts() -> None:
    asked = FleetSettings(prompt_tokens=65.0, answer_tokens=10.0, texts=3, rows=1)
    free, costs = (replace(COSTS, host=host) for host in ((0.0, 0.0, 0.0), (0.001, 0.002, 0.05)))
    took = [forecast(asked, MeasuredPasses(one), "plain", 1).text_ms for one in (free, costs)]
    assert took[1] - took[0] == pytest.approx(10 * 3 + 50)


def test_a_draft_reads_two_tokens_after_all_of_its_tokens_were_kept() -> None:
    costs = MeasuredPasses(replace(COSTS, draft=((0.002, 0.003), (0.005, 0.006))))
    asked = FleetSettings(prompt_tokens=1.0, answer_tokens=50.0, texts=1, rows=1, gamma=4)
    kept = forecast(replace(asked, accept=1.0), costs, "exact", 1)  # ten rounds of five tokens
    assert kept.text_ms == pytest.approx(10 * 10.5 + 4 * 2 + 9 * 4 * 3)
    refused = forecast(replace(asked, accept=0.0), costs, "exact", 1)  # the last rounds draft 3, 2 and 1
    assert refused.text_ms == pytest.approx(
        46 * 10.5 + 10.4 + 10.3 + 10.2 + 10.1 + 2 * (46 * 4 + 3 + 2 + 1), rel=0.01
    )


@pytest.mark.parametrize(("x", "value"), [(1, 5.0), (2, 6.0), (4, 8.0), (10, 14.0), (16, 20.0), (22, 26.0)])
def test_weights_are_exact_on_lines(x: float, value: float) -> None:
    assert weights((1, 4, 16), x) @ np.array([5.0, 8.0, 20.0]) == pytest.approx(value)


def test_passes_beyond_measured_ones_take_no_less() -> None:
    falling = replace(COSTS, target=((0.0101, 0.0090),) * 2, draft=((0.002,) * 2, (0.001,) * 2))
    assert falling.seconds("target", 1, 60) == pytest.approx(0.0090)
    assert falling.seconds("draft", 64, 1) == pytest.approx(0.001)
    assert COSTS.seconds("prompts", 1, 112) == pytest.approx(0.0212)


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": [[0.1, 0.2]]},
        {"rows": [1, math.nan]},
        {"host": [math.inf, 0, 0]},
        {"rows": [2, 4]},
        {"new": 1},
    ],
)
def test_costs_that_are_none_are_refused_in_one_line(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError) as refused:
        LoadCosts.from_json({**asdict(COSTS), **wrong})
    assert str(refused.value).count("costs: ") == str(refused.value).count(": give ") == 1


def test_fits_have_no_negative_part() -> None:
    facts = [[1.0, 2.0], [2.0, 1.0], [3.0, 5.0]]
    assert fit(facts, [4.0, 5.0, 11.0]) == pytest.approx([2.0, 1.0])
    assert fit(facts, [-1.0, 4.0, -2.0])[1] == 0.0 and fit(facts, [-1.0, -2.0, -3.0]) == pytest.approx(
        [0.0, 0.0]
    )


def test_what_was_not_seen_costs_as_much_as_a_smaller_pass() -> None:
    assert known([[1.0, 0.0], [0.0, 3.0]]).tolist() == [[1.0, 1.0], [1.0, 3.0]]
    assert known([[0.0, 2.0], [0.0, 3.0]]).tolist() == [[2.0, 2.0], [2.0, 3.0]]


def test_costs_are_measured_in_an_engine() -> None:
    found = measure_load(load_pair(), 2, seconds=0)
    for table in (found.target, found.checks, found.prompts, found.draft_prompts, found.draft, found.gated):
        assert np.array(table).shape[0] == 2 and (np.array(table) > 0).all()
    one, four = np.array(found.prompts)
    for _ in range(4):  # other work may turn round the times of one call
        if one[2] > one[0] and four[2] > four[0] and four[2] > one[2]:
            break
        one, four = np.array(measure_load(load_pair(), 2, seconds=0).prompts)
    assert one[2] > one[0] and four[2] > four[0] and four[2] > one[2] and found.host[0] + found.host[2] > 0
    assert LoadCosts.from_json(json.loads(json.dumps(asdict(found)))) == found
    assert LoadCosts.mean([found, found]).target == found.target


def test_random_arrivals_wait_as_in_m_d_1() -> None:
    asked = FleetSettings(rate=50.0, prompt_tokens=1.0, answer_tokens=1.0, texts=1500, rows=1)
    found, busy = forecast(asked, MeasuredPasses(COSTS), "plain"), 50 * 0.0101
    wait = 1e3 * busy * 0.0101 / (2 * (1 - busy))
    assert found.text_ms == pytest.approx(10.1 + wait, rel=0.12) and found.busy == pytest.approx(
        busy, rel=0.05
    )
    assert found.in_system == pytest.approx(50 * found.text_ms / 1e3, rel=0.05)  # Little


@pytest.mark.parametrize("accept", [0.0, 0.6, 0.9, 1.0])
def test_tokens_a_call_are_those_of_the_closed_form(accept: float) -> None:
    asked = FleetSettings(prompt_tokens=1.0, answer_tokens=3000.0, texts=1, rows=1, accept=accept, gamma=3)
    found = forecast(asked, MeasuredPasses(COSTS), "exact", 1)
    assert found.tokens_per_call == pytest.approx(float(expected_tokens(accept, 3)), rel=0.03)


def test_trust_of_nothing_is_exact_and_of_everything_needs_a_call_a_run() -> None:
    asked = replace(GPU, answer_tokens=2000.0, texts=1, trust=0.0, keep=0.7, tail=3)
    same = [forecast(asked, Roofline(asked), method, 1).tokens_per_call for method in ("exact", "trust")]
    assert same[0] == pytest.approx(same[1], rel=0.05)
    asked = replace(asked, trust=1.0, keep=1.0, tail=0, cap=20)
    assert forecast(asked, Roofline(asked), "trust", 1).tokens_per_call == pytest.approx(21.0, rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_all_tokens_are_written_and_more_streams_are_no_slower_in_all(method: str) -> None:
    asked = replace(GPU, spread=1.0, prompt_tokens=300.0)
    found = [forecast(asked, Roofline(asked), method, n) for n in (1, 4, 16)]
    assert len({one.tokens for one in found}) == 1 and found[0].tokens > 1000
    assert found[0].tokens_per_s < found[1].tokens_per_s < found[2].tokens_per_s
    assert found[0].token_ms and found[2].token_ms and found[0].token_ms[0] <= found[2].token_ms[0]
    two = forecast(asked, Roofline(asked), method, 32, replicas=2)
    assert two.tokens_per_s == pytest.approx(2 * found[2].tokens_per_s)


def test_a_fleet_is_as_small_as_the_rate_allows() -> None:
    asked = replace(GPU, rate=40.0, rows=8, first_ms=200.0)
    found = needed(asked, Roofline(asked), "plain")
    assert found is not None and found.replicas > 1 and found.texts_per_s == pytest.approx(40, rel=0.15)
    fewer = forecast(asked, Roofline(asked), "plain", replicas=found.replicas - 1)
    assert fewer.first_ms[1] > 200 or fewer.texts_per_s < 0.85 * 40
    asked = replace(asked, first_ms=1.0)
    assert needed(asked, Roofline(asked), "plain") is None


def test_drafts_are_as_long_as_pays_among_so_many_rows() -> None:
    asked = FleetSettings(rows=4, accept=0.8)

    def lengths(*target: tuple[float, float], draft: float) -> list[tuple[int, int, int]]:
        free = replace(COSTS, target=target, draft=((draft,) * 2,) * 2)
        return draft_lengths(asked, MeasuredPasses(free))

    flat, by_tokens = (0.01, 0.01), (0.01, 0.16)
    assert lengths(flat, flat, draft=1e-6) == [(1, 4, 16)], "the longest, where tokens cost nothing"
    assert lengths(by_tokens, by_tokens, draft=1e-6) == [(1, 4, 0)], "none, where a token costs a pass"
    # 1 + 0.8 + 0.64 tokens for a pass and two steps: more than with one step or three
    assert lengths(flat, flat, draft=0.004) == [(1, 4, 2)]
    assert lengths(flat, by_tokens, draft=0.001)[0][2] > lengths(flat, by_tokens, draft=0.001)[-1][2] == 0


def test_lengths_are_as_vllm_takes_them() -> None:
    """Ranges from one row on, with no gap."""
    asked = replace(GPU, rows=200, answer_tokens=400.0, prompt_tokens=400.0)
    found = draft_lengths(asked, Roofline(asked))
    assert [first for first, *_ in found] == [1, *(last + 1 for _, last, _ in found[:-1])]
    assert found[-1][1] == 200 and [one[2] for one in found] == sorted(
        (one[2] for one in found), reverse=True
    )


def test_memory_limits_rows_and_weights_must_fit() -> None:
    asked = replace(GPU, rows=4096, prompt_tokens=1950.0, kv_kib=1024.0)
    assert forecast(asked, Roofline(asked), "plain", 4).rows == int((72e9 - 18e9) / (2**20 * 2000))
    with pytest.raises(UserError, match=r"do not fit into 1 x 80 GB: give more gpus"):
        forecast(replace(asked, parameters=70.0), Roofline(replace(asked, parameters=70.0)), "plain", 1)


def test_the_command_predicts_and_reads_its_own_costs(run: Run, tmp_path: Path) -> None:
    asked = ("theory", "fleet", "--streams", "2", "--texts", "4", "--answer-tokens", "8")
    status, out, err = run(*asked, "--parameters", "8", "--out", str(tmp_path / "new"))
    assert (status, out.count("plain")) == (0, 1) and (tmp_path / "new" / "fleet.png").stat().st_size > 3000
    kept = tmp_path / "costs.json"
    kept.write_text(json.dumps({"costs": {name: getattr(COSTS, name) for name in COSTS.__slots__}}))
    status, out, err = run(*asked, "--costs", str(kept), "--json")
    assert status == 0 and [one["method"] for one in json.loads(out)["forecasts"]] == list(METHODS), err
    assert json.loads(out)["draft_tokens"][0][0] == 1


@pytest.mark.parametrize(("args", "words"), [
    (("--streams", "0"), "--streams"), (("--trust", "2"), "--trust"), (("--rate", "0"), "--rate"),
    (("--costs", "none.json"), "none.json"), (("--parameters", "8", "--lengths", "none"), "none"),
    (("--parameters", "8", "--target", "x"), "leave out"), (("--parameters", "70"), "give more gpus"),
    (("--parameters", "8", "--rate", "9", "--first-ms", "1"), "--first-ms"),
])  # fmt: skip
def test_bad_input_is_one_line(run: Run, args: tuple[str, ...], words: str) -> None:
    status, out, err = run("theory", "fleet", "--texts", "5", *args)
    assert (status, out) == (2, "") and words in err.splitlines()[-1] and "Traceback" not in err
