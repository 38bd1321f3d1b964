"""The front, the methods' points, and every figure."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from typing import Any

import pytest
import torch
from PIL import Image
from tests.theory.tools import record_chain

from sprinter.decode.accept import Asd
from sprinter.decode.draft import Control
from sprinter.errors import UserError
from sprinter.laws import tv_distance
from sprinter.plots import check_plots, png
from sprinter.theory.chains import MarkovChain
from sprinter.theory.figures import SIMULATIONS, draw_pareto
from sprinter.theory.pareto import LOOP, OneToken, gate_curve, oracle_curve, pareto
from sprinter.theory.simulation import Setting, run_all

ON_THE_LINE = {"opt", "mentored", "lenient", "cascade", "diversed"}
ABOVE = {"uno", "fuzzy", "random", "typical", "bild", "relaxed", "margin", "threshold", "asd"}


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    chain = MarkovChain.random(6, 8, seed=2)
    exact = [record_chain(chain, 40, writer, gate=True) for writer in ("target", "draft")]
    # laws are recorded in float32, which the points must not show
    recordings = [
        dataclasses.replace(
            one, **{name: getattr(one, name).float() for name in ("p", "q", "raw_p", "raw_q")}
        )
        for one in exact
    ]
    said: list[str] = []
    loop = {name: LOOP[name] for name in ("speculative", "batch", "uno", "coin", "sprinter", "draft-only")}
    found = pareto(recordings, loop=loop, progress=said.append)
    assert len(said) >= 8 and json.dumps(found, allow_nan=False)
    return found


@pytest.fixture(scope="module")
def simulated() -> dict[str, Any]:
    setting = Setting(states=3, horizon=6, drafts=(2,), runs=30, long=8)
    found = run_all(setting)
    json.dumps(found, allow_nan=False)
    return found


# --- the picture's numbers -------------------------------------------------------------------------------------------
def test_rules_lie_where_theorem_5_puts_them(data: dict[str, Any]) -> None:
    for curve in data["rules"]:
        gaps = [point["above_front"] for point in curve["points"]]
        if curve["name"] in ON_THE_LINE:
            assert max(abs(gap) for gap in gaps) <= 1e-9, curve["name"]
        else:
            assert curve["name"] in ABOVE and min(gaps) >= -1e-9 and max(gaps) > 0.01, curve["name"]
    assert {curve["name"] for curve in data["rules"]} == ON_THE_LINE | ABOVE


def test_the_ends_of_the_curves(data: dict[str, Any]) -> None:
    tv = data["front"]["tv"]
    for curve in data["rules"]:
        first = curve["points"][0]
        if curve["name"] in ("opt", "mentored", "lenient"):
            assert (first["x"], first["y"]) == pytest.approx((tv, 0.0), abs=1e-9)
        if curve["name"] in ("fuzzy", "random"):
            assert (first["x"], first["y"]) == pytest.approx((1.0, 0.0), abs=1e-9)
    last = next(c for c in data["rules"] if c["name"] == "random")["points"][-1]
    assert (last["x"], last["y"]) == pytest.approx((0.0, tv), abs=1e-9)


@pytest.mark.parametrize(
    "rule", [Asd(), Asd(share=0.0), Asd(total=0.1, share=2.0), Asd(share=3.0), Asd(most=0)]
)
def test_the_law_of_asd_on_one_token_is_the_rule_of_chains(rule: Asd) -> None:
    """q(x) times what the rule does with a draft of x alone, summed over x."""
    chance = torch.Generator().manual_seed(3)
    p, q = (torch.rand(20, 7, generator=chance, dtype=torch.float64).pow(2) for _ in range(2))
    p, q = (law / law.sum(-1, keepdim=True) for law in (p, q))
    raw = Control(p.sqrt() / p.sqrt().sum(-1, keepdim=True), q)
    found = OneToken(rule).law(p, q, raw)
    for row in range(len(p)):
        laws = torch.stack([p[row], p[row]])  # after the token any law: it is not judged
        control = Control(raw.p[[row, row]], q[[row]])
        wanted = torch.zeros(7, dtype=torch.float64)
        for x in range(7):
            ending, law_after = rule.ends([x], laws, q[[row]], control)
            wanted[x] += q[row, x] * ending[1]
            wanted += q[row, x] * ending[0] * law_after(0)
        torch.testing.assert_close(found[row], wanted)


def test_gates_lie_between_the_coin_and_the_best_of_their_class(data: dict[str, Any]) -> None:
    """The recorded gate is the overlap itself: it is the best gate there is."""
    tv = data["front"]["tv"]
    curves = {curve["name"]: [(p["x"], p["y"]) for p in curve["points"]] for curve in data["gates"]}
    assert curves.keys() == {"coin", "best prefix-only gate", "sprinter"}
    for x, y in curves["coin"]:
        assert y == pytest.approx((1 - x) * tv)
    for x, y in curves["sprinter"]:
        assert y <= (1 - x) * tv + 1e-9
        assert min(abs(x - a) + abs(y - b) for a, b in curves["best prefix-only gate"]) < 0.04


def test_gate_curves_by_hand() -> None:
    tv, scores = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.9, 0.1, 0.6, 0.7]], dtype=torch.float64)
    points = gate_curve(scores, tv, [0.0, 0.65, 0.95])
    assert [(p.x, round(p.y, 12)) for p in points] == [(0.0, 0.25), (0.5, 0.1), (1.0, 0.0)]
    oracle = oracle_curve(tv, points=5)
    assert [(p.x, round(p.y, 12)) for p in oracle] == [
        (1, 0),
        (0.75, 0.025),
        (0.5, 0.075),
        (0.25, 0.15),
        (0, 0.25),
    ]


def test_the_loop_stays_above_the_front(data: dict[str, Any]) -> None:
    for curve in data["loop"]:
        if curve["name"] not in ("batch",):
            assert min(point["above_front"] for point in curve["points"]) > -0.03, curve["name"]
    exact = next(curve for curve in data["loop"] if curve["name"] == "speculative")
    calls = [point["x"] for point in exact["points"]]
    assert exact["lossless"] and calls[0] == max(calls) and calls[0] > 1.2 * calls[-1]
    assert data["front"]["tv"] > 0 and data["positions"] == 320


def test_without_a_gate_its_methods_are_left_out() -> None:
    one = record_chain(MarkovChain.random(4, 4, seed=1), 10, "target")
    found = pareto([one], loop={name: LOOP[name] for name in ("speculative", "sprinter")})
    assert [curve["name"] for curve in found["loop"]] == ["speculative"]
    assert "sprinter" not in {curve["name"] for curve in found["gates"]}
    assert found["front"]["tv"] == pytest.approx(float(tv_distance(one.p, one.q).mean()))


# --- simulations -----------------------------------------------------------------------------------------------------
@pytest.mark.statistical
def test_simulations_hold_their_closed_forms(simulated: dict[str, Any]) -> None:
    """About 27 comparisons at 99 %: five outside happen with probability below 1e-5."""
    assert simulated["comparisons"] >= 25
    assert simulated["within_interval"] >= simulated["comparisons"] - 4


def test_scaling_and_short_drafts(simulated: dict[str, Any]) -> None:
    part = simulated["rejections"]
    assert part["scaling"]["rejections"] == sorted(part["scaling"]["rejections"], reverse=True)
    assert 0 < part["scaling"]["limit"] < part["scaling"]["rejections"][-1]
    assert part["short"]["gamma"][-1] == 6 and part["short"]["gamma_5"]["calls_over_theorem_1"] >= 1


def test_settings_out_of_range_are_named() -> None:
    for wrong in ({"runs": 2}, {"states": 1}, {"horizon": 1}, {"drafts": (9,)}, {"long": -1}):
        with pytest.raises(UserError, match="give"):
            Setting(**wrong)  # type: ignore[arg-type]


# --- figures ---------------------------------------------------------------------------------------------------------
def check_picture(content: bytes) -> None:
    with Image.open(io.BytesIO(content)) as picture:
        assert 900 <= picture.width <= 1100 and picture.height >= 300
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 50


@pytest.mark.parametrize("name", list(SIMULATIONS))
def test_every_simulation_is_drawn(simulated: dict[str, Any], name: str) -> None:
    part, draw = SIMULATIONS[name]
    check_picture(png(lambda: draw(simulated[part])))


def test_the_front_is_drawn(data: dict[str, Any]) -> None:
    check_picture(png(lambda: draw_pareto(data)))


def test_without_matplotlib_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'matplotlib>=.*--no-figures"):
        check_plots("give --no-figures")
    with pytest.raises(UserError, match="pictures need matplotlib"):
        png(lambda: pytest.fail("nothing can be drawn"))
