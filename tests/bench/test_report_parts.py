"""Parts of the page: axes, labels, looks, dials, curves along texts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench.fake_results import ARMS, FakeSuite, fake_results
from tests.bench.rows import row

from sprinter.bench.report.breakdown import categories, longforms
from sprinter.bench.report.dials import allocation_line, dials, ends
from sprinter.bench.report.digest import digest, front
from sprinter.bench.report.label_layout import PlacedLabel, Taken, _box, _overlap, lane_rows, place
from sprinter.bench.report.looks import KINDS, MARKS, looks, read_spec
from sprinter.bench.report.numbers import (
    count,
    drift,
    duration,
    interval,
    multiple,
    number,
    percentage,
    text_of,
    value,
)
from sprinter.bench.report.svg import axis, tag

FINITE = st.floats(-1e6, 1e6, allow_nan=False)


def test_numbers_as_they_are_shown() -> None:
    assert [number(each) for each in (1234.6, 56.12, 1.617, 0.03124, 0, -0.5)] == [
        "1,235",
        "56.1",
        "1.62",
        "0.0312",
        "0",
        "−0.500",
    ]
    assert [number(each) for each in (None, math.nan, "7", True, [])] == ["–"] * 5
    assert (multiple([1.6, 1, 2]), drift(0.04), drift(0), percentage(0.123), count(12345)) == (
        "1.60×",
        "0.0400",
        "0",
        "12.3 %",
        "12,345",
    )
    assert [duration(s) for s in (5.0, 90, 7300, None)] == ["5.0 s", "1 min 30 s", "2 h 1 min", "–"]
    assert text_of({"a": [1, 2.5], "b": None, "c": True}) == "a 1, 2.5 · b – · c yes"


def test_intervals_of_anything() -> None:
    assert interval([1, 0.5, 2]) == (1, 0.5, 2) and interval(3) == (3, None, None)
    assert interval([1.0, None, math.nan]) == (1, None, None) and interval((2.0,)) == (2, None, None)
    assert interval([math.nan, 1, 2]) is None and interval(None) is None and value([]) is None


@settings(max_examples=60)
@given(st.lists(FINITE, min_size=1, max_size=20))
def test_an_axis_holds_its_values_and_has_a_few_ticks(values: list[float]) -> None:
    found = axis(values, "x")
    assert found.low < found.high and all(0 <= found.share(v) <= 1 for v in values)
    assert 2 <= len(found.ticks) <= 8 and all(found.low - 1e-6 <= t <= found.high + 1e-6 for t in found.ticks)
    places = [found.share(v) for v in sorted(values)]
    assert places == sorted(places)


def test_an_axis_of_ratios() -> None:
    found = axis([0.5, 8.0], "speed", log=True)
    assert found.share(1.0) - found.share(0.5) == pytest.approx(found.share(8.0) - found.share(4.0))
    assert {0.5, 1.0, 2.0, 5.0} <= set(found.ticks)
    assert axis([2.0], "speed", log=True).share(2.0) == pytest.approx(0.5)


def test_elements_are_escaped() -> None:
    told = str(tag("text", "<b>&", x=1.23456789, class_='"', data_arm=None, aria_label="a"))
    assert told == '<text x="1.2346" class="&#34;" aria-label="a">&lt;b&gt;&amp;</text>'


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.floats(0, 300), st.text("abc", min_size=1, max_size=20)), max_size=30
    )
)
def test_labels_never_overlap(points: list[tuple[float, float, str]]) -> None:
    labels = [PlacedLabel(x, y, text, i % 3, i) for i, (x, y, text) in enumerate(points)]
    marks = [Taken(x, y, 6.0) for x, y, _ in points]
    placed = place(labels, marks, 600, 300)
    boxes = [_box(label, spot, 600) for label, spot in placed]
    assert not any(_overlap(a, b) for a, b in itertools.combinations(boxes, 2))
    for mark in marks:
        x, y = 600 * mark.x, mark.y
        assert not any(_overlap(box, (x - 6, y - 6, x + 6, y + 6)) for box in boxes)
    if len(points) == 1:
        assert len(placed) == 1, "one label finds room"


def test_urgent_labels_go_first() -> None:
    labels = [PlacedLabel(0.5, 50, "a" * 60, 0, 0), PlacedLabel(0.5, 50, "b" * 60, 1, 1)]
    assert place(labels, [], 400, 60)[0][0].text[0] == "b"


@settings(max_examples=60)
@given(st.lists(st.floats(0, 1), max_size=40))
def test_marks_in_a_lane_do_not_overlap(places: list[float]) -> None:
    rows = lane_rows(places, width=300, size=14)
    for (a, row_a), (b, row_b) in itertools.combinations(zip(places, rows, strict=True), 2):
        assert row_a != row_b or abs(a - b) * 300 >= 14 - 1e-6


def test_specs_are_read_with_their_defaults() -> None:
    assert read_spec("fuzzy(threshold=0.5)") == (
        "fuzzy",
        {"divergence": "js_reference", "threshold": "0.5", "gamma": "5"},
    )
    assert read_spec("trust=gate(tau=0.5),stop=svip(h=0.3),accept=exact")[1] == {}
    assert read_spec("<no such>(a=1)") == ("<no such>(a=1)", {})


def test_looks_are_unique_by_label_and_steady_by_method() -> None:
    arms = [arm.facts for arm in ARMS]
    found = looks(arms, {arm.name: arm.lossless for arm in ARMS})
    assert len({look.label for look in found.values()}) == len(found) == len(arms)
    assert all(look.kind in KINDS and look.mark in MARKS for look in found.values())
    by_method: dict[tuple[str, str], set[str]] = {}
    for look in found.values():
        by_method.setdefault((look.kind, look.mark), set()).add(look.method)
    assert all(len(methods) == 1 for methods in by_method.values()), "one mark and colour, one method"
    assert found["sprinter(tau=0.8, cap=20, tail=0)"].label == "sprinter tau=0.8 tail=0"
    assert found["heuristic"].label == "heuristic"
    kinds = {
        name: found[name].kind for name in ("autoregressive", "transformers:plain", "lookup(n=3, gamma=5)")
    }
    assert list(kinds.values()) == ["target", "peer", "several"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=8))
def test_the_front_is_what_nothing_beats(pairs: list[tuple[int, int]]) -> None:
    points = {f"arm {i}": (float(x), float(y)) for i, (x, y) in enumerate(pairs)}
    best = set(front(points))
    for name, (speed, far) in points.items():
        others = [at for other, at in points.items() if other != name]
        beaten = any(s >= speed and d <= far and (s, d) != (speed, far) for s, d in others)
        assert not (beaten and name in best)
        assert beaten or any(points[other] == (speed, far) for other in best)
    assert len({points[name] for name in best}) == len(best), "of equal arms one is named"


def small(**options: Any) -> dict[str, Any]:
    return fake_results(ARMS, (FakeSuite("toy", 2, 12),), (1.0,), laws=False, **options)


def test_dials_are_the_lossy_methods_with_several_places() -> None:
    run = digest(small())
    found = {dial.name: dial for dial in dials(run, run.views["toy", 1.0])}
    assert {"fuzzy", "opt", "uno", "mentored", "lenient", "coin", "random", "allocation"} <= set(found)
    assert "speculative" not in found and "typical" not in found and "svip" not in found
    sprinter = next(dial for name, dial in found.items() if name.startswith("sprinter"))
    assert sprinter.parameter == "tau" and [place for place, _ in sprinter.points] == [
        0.3,
        0.5,
        0.6,
        0.7,
        0.8,
    ]
    assert found["opt"].parameter == "epsilon"
    told = ends(run, run.views["toy", 1.0])
    assert told is not None and [each["arm"] for each in told] == ["autoregressive", "draft-only"]


def test_a_mixture_of_texts_adds_times_not_speeds() -> None:
    line = allocation_line((1.0, 0.0), (4.0, 0.2), steps=2)
    assert line[0] == (1.0, 0.0) and line[-1] == pytest.approx((4.0, 0.2))
    assert line[1] == pytest.approx((1 / (0.5 / 1 + 0.5 / 4), 0.1))


def test_speed_along_a_text_is_tokens_over_time_in_each_part() -> None:
    def answer(arm: str, gap_ms: float) -> dict[str, Any]:
        times = list(np.cumsum(np.r_[50.0, np.full(63, gap_ms), np.full(64, 2 * gap_ms)]))
        return row(arm, "q0", times[-1] / 1000, tokens=128, suite="toy") | {
            "arrivals_ms": [times],
            "prompt_tokens": [0],
        }

    rows = [answer("slow", 10.0), answer("fast", 5.0)]
    told = {"speed_over": {"slow": [1.0, 1.0, 1.0]}, "engine": "sprinter", "suite": "toy", "temperature": 1.0}
    summary = [{"arm": name, **told} for name in ("slow", "fast")]
    found = longforms(digest({"rows": rows, "summary": summary, "settings": {"bases": ["slow"]}}))["toy", 1.0]
    assert found.edges[1] - found.edges[0] == 16
    speeds = found.tokens_per_s["slow"]
    assert [speeds[i] for i in (0, 3, 4, 7)] == pytest.approx([100, 100, 50, 50])
    assert [up[0] for up in found.speed_up["fast"] if up] == pytest.approx([2.0] * 8)


def test_short_answers_have_no_curve() -> None:
    assert longforms(digest(small())) == {}


def test_speed_by_category_is_that_of_its_prompts() -> None:
    rows = [
        row(arm, f"q{i}", seconds, suite="toy") | {"category": kind}
        for arm, times in (("plain", (1.0, 2.0, 4.0)), ("fast", (0.5, 1.0, 1.0)))
        for i, (seconds, kind) in enumerate(zip(times, ("qa", "qa", "math"), strict=True))
    ]
    told = {"speed_over": {"plain": [1, 1, 1]}, "engine": "sprinter", "suite": "toy", "temperature": 1.0}
    run = digest({"rows": rows, "summary": [{"arm": name, **told} for name in ("plain", "fast")]})
    found = categories(run)["toy", 1.0]
    assert list(found.names) == ["qa", "math"]
    assert found.speed_up["fast"]["qa"] == pytest.approx((2.0, 2.0, 2.0))
    assert found.speed_up["fast"]["math"][0] == pytest.approx(4.0)


def test_bases_are_those_that_took_part_in_the_order_of_the_settings() -> None:
    run = digest(small())
    assert run.bases == ["autoregressive", "speculative", "transformers:plain", "transformers:assisted"]
    assert run.base == "autoregressive" and list(run.suites) == ["toy"]
    assert run.failed == {"vllm:draft": "vLLM is not installed: pip install vllm"}
