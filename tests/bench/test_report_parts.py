"""Parts of the page: labels, styles, dials, curves along texts."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench.fake_results import ARMS, FakeSuite, fake_results
from tests.bench.rows import row

from sprinter.bench.report.arm_style import KINDS, MARKERS, arm_styles, read_spec
from sprinter.bench.report.breakdown import allocation_line, categories, dials, ends, longforms
from sprinter.bench.report.digest import digest, front
from sprinter.bench.report.drawing import Picture
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
from sprinter.plots import page_style, svg


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


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 9), st.text("abc", min_size=1)), min_size=1, max_size=12
    )
)
def test_labels_cover_no_mark_and_no_other_label(points: list[tuple[int, int, str]]) -> None:
    with page_style():
        picture = Picture(600, [200], "x", "y")
        (panel,) = picture.panels
        for x, y, text in points:
            panel.line([(x, y)], "blue", label=text, marker="o", ms=8)
        panel.write_labels()
    written = [text.get_window_extent() for text in panel.ax.texts]
    boxes = [box.padded(-1.5) for box in written]  # letters have room above and below
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    marks = panel.ax.transData.transform([(x, y) for x, y, _ in points])
    assert not any(box.contains(*at) for box in written for at in marks)
    assert written or len(points) > 1, "one label finds room"


def test_a_picture_has_the_pages_colours_and_keeps_what_it_says_of_its_marks() -> None:
    with page_style():
        picture = Picture(600, [200], "time", "$speed$")
        picture.panels[0].line([(0, 0), (1, 2)], "blue", tip='a "tip" <b>\nof \x07two lines')
        made = svg(picture._figure, "a <name>")
    assert made.startswith('<svg class="area" role="img" aria-label="a &lt;name&gt;"')
    assert '<g class="tip"><title>a "tip" &lt;b&gt;\nof two lines</title>' in made
    assert "var(--blue)" in made and not re.search("#[0-9a-f]{6}|matplotlib|DejaVu", made)
    assert "↑ $speed$" in made and "time →" in made


def test_specs_are_read_with_their_defaults() -> None:
    assert read_spec("fuzzy(threshold=0.5)") == (
        "fuzzy",
        {"divergence": "js_reference", "threshold": "0.5", "gamma": "5"},
    )
    assert read_spec("trust=gate(tau=0.5),stop=svip(h=0.3),accept=exact")[1] == {}
    assert read_spec("<no such>(a=1)") == ("<no such>(a=1)", {})


def test_styles_are_unique_by_label_and_steady_by_method() -> None:
    arms = [arm.facts for arm in ARMS]
    found = arm_styles(arms, {arm.name: arm.lossless for arm in ARMS})
    assert len({style.label for style in found.values()}) == len(found) == len(arms)
    assert all(style.kind in KINDS and style.marker in MARKERS for style in found.values())
    by_method: dict[tuple[str, str], set[str]] = {}
    for style in found.values():
        by_method.setdefault((style.kind, style.marker), set()).add(style.method)
    assert all(len(methods) == 1 for methods in by_method.values()), "one marker and colour, one method"
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
    assert list(found["fast"]) == ["qa", "math"]
    assert found["fast"]["qa"] == pytest.approx((2.0, 2.0, 2.0))
    assert found["fast"]["math"][0] == pytest.approx(4.0)


def test_bases_are_those_that_took_part_in_the_order_of_the_settings() -> None:
    run = digest(small())
    assert run.bases == ["autoregressive", "speculative", "transformers:plain", "transformers:assisted"]
    assert run.base == "autoregressive" and list(run.suites) == ["toy"]
    assert run.failed == {"vllm:draft": "vLLM is not installed: pip install vllm"}
