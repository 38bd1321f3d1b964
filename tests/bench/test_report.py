"""The page of a run: well-formed, self-contained, complete, and true to the results."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.bench.fake_results import ARMS, CATEGORIES, FakeArm, FakeSuite, fake_results

from sprinter.bench.report import write_report

VOID = {"meta", "link", "br", "wbr", "input", "hr", "img"}
SOME = tuple(
    arm
    for arm in ARMS
    if arm.name
    in {
        "autoregressive", "draft-only", "speculative", "svip(h=0.3, c=0.15)", "sprinter(tau=0.5, cap=20, tail=0)",
        "sprinter(tau=0.8, cap=20, tail=0)", "uno(epsilon=0.01, gamma=5)", "uno(epsilon=0.03, gamma=5)",
        "transformers:plain", "transformers:assisted", "vllm:draft",
    }
)  # fmt: skip
SUITES = (FakeSuite("spec-bench", 4, 12, categories=CATEGORIES[:2]), FakeSuite("long", 2, 70))
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "{{ 7 * 7 }}",
    "'&amp;<b>",
    "]]></style>",
)


@dataclass
class Table:
    """Head and rows of one table, as text."""

    caption: str = ""
    rows: list[list[str]] = field(default_factory=list)


class Page(HTMLParser):
    """Checks that tags are balanced, and gathers what tests ask for."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[Table] = []
        self.text: list[str] = []
        self._cell: list[str] | None = None
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append(Table())
        if tag == "tr":
            self.tables[-1].rows.append([])
        if tag in ("td", "th", "caption"):
            self._cell = []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th", "caption") and self._cell is not None:
            text = "".join(self._cell).strip()
            if tag == "caption":
                self.tables[-1].caption = text
            else:
                self.tables[-1].rows[-1].append(text)
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)
        if self._cell is not None:
            self._cell.append(data)

    @property
    def words(self) -> str:
        return "".join(self.text)

    def table(self, caption: str) -> Table:
        return next(table for table in self.tables if table.caption.startswith(caption))


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return fake_results(SOME, SUITES, (0.0, 1.0))


@pytest.fixture(scope="module")
def fewer() -> dict[str, Any]:
    return fake_results((*SOME[:4], SOME[-1]), SUITES, (1.0,))


@pytest.fixture
def changed(fewer: dict[str, Any]) -> dict[str, Any]:
    """Results that a test may spoil."""
    return copy.deepcopy(fewer)


@pytest.fixture(scope="module")
def written(results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(results, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page(written.read_text(encoding="utf-8"))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, which takes most of the time of a page."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def page_of(results: dict[str, Any], folder: Path) -> Page:
    path = write_report(results, folder / "new" / "report.html")
    assert path == folder / "new" / "report.html"
    assert [file.name for file in path.parent.iterdir()] == ["report.html"], "no half file is left"
    return Page(path.read_text(encoding="utf-8"))


def references(page: Page) -> list[str]:
    """What the page would fetch."""
    names = (
        "src",
        "href",
        "xlink:href",
        "action",
        "data",
        "poster",
        "srcset",
        "background",
        "formaction",
        "ping",
    )
    return [told for _, attrs in page.tags for name in names if (told := attrs.get(name))]


def first_number(cell: str) -> float:
    found = re.match(r"[−-]?[\d,]+(\.\d+)?", cell)
    assert found, cell
    return float(found[0].replace(",", "").replace("−", "-"))


def test_the_page_asks_nobody_for_anything(page: Page, written: Path) -> None:
    assert [each for each in references(page) if not each.startswith("#")] == []
    html = written.read_text(encoding="utf-8")
    assert not re.search(r"url\((?!#)|@import|https?://|<link|<iframe|<object|<embed|fetch\(|XMLHttp", html)


def test_ids_are_unique_and_references_lead_somewhere(page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    aims = [each[1:] for each in references(page)]
    aims += re.findall(
        r"url\(#(\w+)\)", " ".join(str(each) for _, attrs in page.tags for each in attrs.values())
    )
    aims += [
        str(attrs[name]) for _, attrs in page.tags for name in ("for", "aria-labelledby") if name in attrs
    ]
    assert set(aims) - set(ids) == set()
    assert len(aims) > 50


def test_pictures_and_tables_can_be_read_aloud(page: Page) -> None:
    tags = [tag for tag, _ in page.tags]
    assert tags.count("h1") == tags.count("main") == 1
    areas = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("class") == "area"]
    names = [attrs["aria-label"] for attrs in areas]
    assert all(attrs["role"] == "img" for attrs in areas) and len({*names}) == len(names) > 30
    assert all(attrs.get("scope") for tag, attrs in page.tags if tag == "th")
    assert all(table.caption for table in page.tables)
    assert dict(page.tags)["html"] == {"lang": "en"}


def test_every_arm_is_in_every_place_that_tells_all(page: Page) -> None:
    names = {arm.name for arm in SOME}
    for temperature in ("0", "1"):
        told = {
            row[0].split("failed:")[0].rstrip("● ")
            for row in page.table(f"All arms at temperature {temperature}").rows[1:]
        }
        assert told == names
    assert page.words.count("vLLM is not installed: pip install vllm") >= 2
    assert all(heading in page.words for heading in (
        "Speed and drift", "Speed-up", "Dials", "Tokens a round", "Acceptance by place", "Long texts", "Latency",
        "Quality", "By category", "Entropy of the draft against acceptance", "Entropy ratio", "Bounds on acceptance",
        "All numbers", "What was run",
    ))  # fmt: skip


def test_numbers_are_those_of_the_results(results: dict[str, Any], page: Page) -> None:
    head, *rows = page.table("All arms at temperature 1").rows
    by_arm = {row[0].rstrip("● "): dict(zip(head, row, strict=True)) for row in rows}
    told = [s for s in results["summary"] if s["temperature"] == 1.0]
    assert len(told) == 3 * (len(SOME) - 1)
    for summary in told:
        row = by_arm[summary["arm"]]
        assert first_number(row[summary["suite"]]) == pytest.approx(
            summary["speed_over"]["autoregressive"][0], abs=0.0051
        )
        if summary["suite"] == "all":
            assert first_number(row["tokens/s"]) == pytest.approx(summary["tokens_per_s"], rel=0.01)
            drift = summary["mean_drift"][0] if summary["mean_drift"] else 0.0
            assert first_number(row["drift"]) == pytest.approx(drift, abs=6e-5)
            assert row["law"] == ("exact" if summary["lossless"] else "lossy")
    values = [first_number(row["all"]) for row in by_arm.values() if row["all"] != "–"]
    assert values == sorted(values, reverse=True)


def test_bars_are_as_long_as_their_numbers(written: Path) -> None:
    html = written.read_text(encoding="utf-8")
    section = html[html.index('<section id="speed"') : html.index('<section id="dials"')]
    block = section.split('<div class="block"')[1]
    told = [float(each) for each in re.findall(r"<td>(\d+\.\d+)×", block)]
    widths = [
        float(each) for each in re.findall(r'class="fill \w+" style="left:0.00%;width:([\d.]+)%', block)
    ]
    assert len(told) == len(widths) == len(SOME) - 1
    for number, width in zip(told, widths, strict=True):
        assert width / widths[0] == pytest.approx(number / told[0], abs=0.01)


def test_texts_of_others_stay_texts(changed: dict[str, Any], tmp_path: Path) -> None:
    old = [arm["name"] for arm in changed["arms"]]
    new = {name: f"{HOSTILE[i % len(HOSTILE)]} {i}" for i, name in enumerate(old)}
    spoiled = json.loads(json.dumps(changed))
    for arm in spoiled["arms"]:
        arm |= {"name": new[arm["name"]], "spec": HOSTILE[0], "error": arm["error"] and HOSTILE[0]}
    for summary in spoiled["summary"]:
        summary["arm"] = new[summary["arm"]]
        summary["speed_over"] = {new[base]: of for base, of in summary["speed_over"].items()}
        summary["quality"][HOSTILE[1]] = [0.5, 0.4, 0.6]
        summary["suite"] = summary["suite"].replace("long", HOSTILE[1])
    for row in spoiled["rows"]:
        row["model_id"] = new[row["model_id"]]
        row["category"] += HOSTILE[0]
        row["suite"] = row["suite"].replace("long", HOSTILE[1])
    spoiled["settings"]["bases"] = [new.get(base, base) for base in spoiled["settings"]["bases"]]
    for suite in spoiled["suites"]:
        suite |= {"name": suite["name"].replace("long", HOSTILE[1]), "rule": HOSTILE[0]}
    spoiled |= {"command": HOSTILE[0], "created": HOSTILE[1]}
    spoiled["pair"]["target"]["name"] = HOSTILE[2]
    spoiled["environment"][HOSTILE[0]] = HOSTILE[4]
    page = page_of(spoiled, tmp_path)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == tags.count("style") == 1
    assert "img" not in tags and "b" in tags
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert all(text in page.words for text in HOSTILE)
    told = {row[0].rstrip("● ") for row in page.table("every arm").rows[1:]}
    assert told == {new[name] for name in old if name != "vllm:draft"}


@pytest.mark.usefixtures("plain")
def test_without_matplotlib_a_line_says_how_to_get_the_pictures(
    fewer: dict[str, Any], tmp_path: Path
) -> None:
    page = page_of(fewer, tmp_path)
    assert page.words.count("Left out: pictures need matplotlib: pip install '.[") == 6
    assert [attrs for tag, attrs in page.tags if tag == "svg"] == []
    assert len(page.table("All arms at temperature 1").rows) == len(SOME[:4]) + 2


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("rows", "no answers of 64 tokens or more"),
        ("analysis", "the laws were not analysed in this run"),
        ("summary", "the run has no answer of any arm"),
        ("settings", ""),
        ("environment", ""),
        ("suites", ""),
        ("pair", "unknown pair"),
        ("arms", ""),
        ("judge", ""),
    ],
)
def test_what_is_missing_is_left_out_with_a_line(
    changed: dict[str, Any], tmp_path: Path, gone: str, said: str
) -> None:
    del changed[gone]
    assert said in page_of(changed, tmp_path / "without").words
    changed[gone] = None
    assert said in page_of(changed, tmp_path / "none").words


def test_an_empty_file_makes_a_page(tmp_path: Path) -> None:
    assert "the run has no answer of any arm" in page_of({}, tmp_path).words


def test_summaries_without_values_are_shown_as_such(changed: dict[str, Any], tmp_path: Path) -> None:
    kept = {"arm", "suite", "temperature", "engine"}
    for i, summary in enumerate(changed["summary"]):
        for key in set(summary) - kept:
            summary[key] = (None, math.nan, [math.nan] * 3, math.inf)[i % 4]
        summary["speed_over"], summary["quality"] = {"autoregressive": [math.nan, 1.0, 2.0]}, {"rougeL": None}
        summary["ttft_ms"] = summary["gap_ms"] = {"p50": math.nan, "p95": None}
        summary["round_histogram"] = []
    page = page_of(changed, tmp_path)
    assert not re.search(r"\b(nan|inf|None)\b", page.words)
    for reason in ("no arm knows both its speed and its drift", "no speed is known", "no quality was measured",
                   "no arm reported how many tokens its rounds added"):  # fmt: skip
        assert reason in page.words


def test_some_values_that_are_not_numbers_hide_nothing_else(changed: dict[str, Any], tmp_path: Path) -> None:
    spoiled = next(s for s in changed["summary"] if s["arm"] == "speculative" and s["suite"] == "all")
    spoiled["speed_over"]["autoregressive"] = [math.nan] * 3
    spoiled["tokens_per_s"] = math.inf
    page = page_of(changed, tmp_path)
    row = next(
        row for row in page.table("All arms at temperature 1").rows if row[0].startswith("speculative")
    )
    assert row[1] == "–" and row[2] != "–"
    assert "Not drawn, since speed or drift is not known: speculative." in page.words


def test_one_arm_alone(tmp_path: Path) -> None:
    page = page_of(fake_results(SOME[:1], SUITES[:1], (1.0,)), tmp_path)
    assert "autoregressive" in page.words
    assert [attrs for tag, attrs in page.tags if tag == "form"] == [], "nothing to choose"
    assert "no lossy method ran at two places of its dial" in page.words
    only_draft = page_of(fake_results(SOME[1:2], SUITES[:1], (1.0,)), tmp_path / "draft")
    assert "tokens a second" in only_draft.words, "without a base arm speeds are told as they are"


@pytest.mark.usefixtures("plain")
def test_an_arm_that_failed_half_way_keeps_its_numbers(changed: dict[str, Any], tmp_path: Path) -> None:
    for arm in changed["arms"]:
        if arm["name"] == "speculative":
            arm |= {"status": "failed", "error": "out of memory"}
    changed["summary"] = [
        s for s in changed["summary"] if s["arm"] != "speculative" or s["suite"] == "spec-bench"
    ]
    page = page_of(changed, tmp_path)
    row = next(row for row in page.table("All arms").rows if row[0].startswith("speculative"))
    assert "failed: out of memory" in row[0] and row[1] == "–" and row[2] != "–"
    assert "speculative: out of memory" in page.words


def test_the_first_table_is_sorted_and_marks_the_front(page: Page) -> None:
    for temperature in ("0", "1"):
        head, *rows = page.table(f"All arms at temperature {temperature}").rows
        assert head[:4] == ["arm", "all", "spec-bench", "long"]
        speeds = [first_number(row[1]) for row in rows if row[1] != "–"]
        assert len(speeds) == 10 and speeds == sorted(speeds, reverse=True)
        assert rows[-1][0] == "vllm:draftfailed: vLLM is not installed: pip install vllm"
        assert rows[0][0].endswith("●"), "nothing is faster than the fastest"
        drifts = [first_number(row[4]) for row in rows if "●" in row[0]]
        assert drifts == sorted(drifts, reverse=True) and drifts[-1] == 0.0


def test_the_same_results_make_the_same_page(fewer: dict[str, Any], tmp_path: Path) -> None:
    pages = [write_report(fewer, tmp_path / name).read_bytes() for name in ("a.html", "b.html")]
    assert pages[0] == pages[1]


@pytest.mark.usefixtures("plain")
def test_long_names_are_whole_in_tables(tmp_path: Path) -> None:
    long = FakeArm("x" * 200, kept=0.7, gamma=5)
    page = page_of(
        fake_results((SOME[0], long, replace(long, name="x" * 199 + "y")), SUITES[:1], (1.0,)), tmp_path
    )
    told = {row[0].rstrip("● ") for row in page.table("every arm").rows[1:]}
    assert told == {"autoregressive", "x" * 200, "x" * 199 + "y"}


@pytest.mark.slow
def test_a_large_run_stays_under_three_megabytes(tmp_path: Path) -> None:
    results = fake_results(ARMS[:44] + ARMS[-1:])
    path = write_report(results, tmp_path / "report.html")
    assert len(results["arms"]) == 45 and len(results["suites"]) == 3
    assert 1_000_000 < path.stat().st_size < 3_000_000
    Page(path.read_text(encoding="utf-8"))
