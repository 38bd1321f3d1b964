"""The report page: facts about the run, tables and figures by suite and temperature, in one file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sprinter.bench.report.arm_style import KINDS, ArmStyle
from sprinter.bench.report.breakdown import LONG, LongForm, categories, longforms
from sprinter.bench.report.digest import Digest, SuiteView, Summary, digest, drift_of, speed_of
from sprinter.bench.report.drawing import PagePart
from sprinter.bench.report.lawpictures import LAW_PICTURES
from sprinter.bench.report.numbers import drift, duration, multiple, number, text_of
from sprinter.bench.report.pictures import acceptance, dial_pictures, longform_picture, plane, rounds
from sprinter.bench.report.tables import (
    Table,
    category_table,
    full_table,
    headline_table,
    latency_table,
    longform_table,
    quality_table,
    speed_table,
)
from sprinter.bench.statistics import BootstrapInterval
from sprinter.files import write_atomic
from sprinter.plots import no_plots, page_style

__all__ = ["write_report"]

PageParts = Sequence[PagePart | Table]

_FOLDER = Path(__file__).parent
_DRIFTS = (0.0, 0.02, 0.1)
"""Drift limits for which the page's first lines name the fastest arm."""


class PageBlock(NamedTuple):
    """Tables and figures for a suite and a temperature (indices; None: all), in order."""

    parts: PageParts
    suite: int | None = None
    temperature: int | None = None


class Section(NamedTuple):
    """A heading, one line of explanation, and blocks."""

    id: str
    title: str
    lead: str
    blocks: Sequence[PageBlock]


def write_report(results: Mapping[str, Any], path: Path) -> Path:
    """Write the report of a run, atomically.

    Args:
        results: content of a ``results.json``; see ``sprinter.bench.results``. For missing parts the page has a line
            that gives the reason.
        path: path of the HTML file; its directory is created.

    Returns:
        ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with page_style():
        return write_atomic(path, _page(results))


def _page(results: Mapping[str, Any]) -> str:
    run = digest(results)
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    style, script = (Markup((_FOLDER / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    return environment.get_template("page.html.jinja").render(
        run=run, style=style, script=script, pair=_pair(results), facts=_facts(run), details=_details(results),
        temperatures=[f"{temperature:g}" for temperature in run.temperatures],
        highlights=[(i, _highlights(run, t)) for i, t in enumerate(run.temperatures)],
        legend=_legend(run), sections=[_merged(section) for section in _sections(run)],
        is_table=lambda part: isinstance(part, Table), breakable=_breakable, multiple=multiple, drift=drift,
        text_of=text_of,
    )  # fmt: skip


def _breakable(name: str) -> Markup:
    """An arm's name with optional line breaks after punctuation."""
    return Markup(re.sub(r"([(=,:])(?=\S)", r"\1<wbr>", str(escape(name))))


# --- what was run ----------------------------------------------------------------------------------------------------
def _pair(results: Mapping[str, Any]) -> str:
    pair = results.get("pair") or {}
    names = [str((pair.get(role) or {}).get("name") or "?") for role in ("target", "draft") if role in pair]
    return " + ".join(names) or "unknown pair"


def _facts(run: Digest) -> list[tuple[str, str]]:
    results = run.results
    environment, settings = results.get("environment") or {}, results.get("settings") or {}
    facts = [
        ("command", results.get("command")),
        ("made", results.get("created")),
        ("took", duration(results.get("seconds"))),
        (
            "commit",
            f"{environment.get('commit')}{' with uncommitted changes' * bool(environment.get('dirty'))}",
        ),
        ("machine", environment.get("gpu") or environment.get("cpu")),
        ("temperatures", ", ".join(f"{t:g}" for t in run.temperatures)),
        ("new tokens", settings.get("new_tokens") or "the suites' own"),
        ("repeats", settings.get("repeats")),
        ("arms", f"{len(run.arms)}, {len(run.failed)} failed" if run.failed else len(run.arms)),
    ]
    return [(key, text_of(each)) for key, each in facts]


def _details(results: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Every fact of the environment, the settings, the pair, the judge and the arms' software."""
    pair = results.get("pair") or {}
    parts: list[tuple[str, Mapping[str, Any]]] = [
        *((f"pair: {role}", facts) for role, facts in pair.items() if isinstance(facts, Mapping)),
        ("environment", results.get("environment") or {}),
        ("settings", results.get("settings") or {}),
        ("judge", results.get("judge") or {}),
        (
            "versions of arms",
            {arm["name"]: of for arm in results.get("arms") or [] if (of := arm.get("versions"))},
        ),
    ]
    return [(title, [(str(k), text_of(v)) for k, v in facts.items()]) for title, facts in parts if facts]


def _highlights(run: Digest, temperature: float) -> list[dict[str, Any]]:
    """The fastest arm for each limit of drift, each arm only once."""
    rows = next((view for suite in run.suites if (view := run.views.get((suite, temperature)))), ())
    known = [(s, speed_of(s, run.base), drift_of(s)) for s in rows if run.base]
    found: dict[str, dict[str, Any]] = {}
    for most in _DRIFTS:
        fit = [
            (speed[0], s["arm"], speed, far)
            for s, speed, far in known
            if speed and far and far[0] <= most and (most > 0 or s.get("lossless") is True)
        ]
        if fit:
            _, arm, speed, far = max(fit, key=lambda each: each[0])
            title = f"fastest with drift up to {most:g}" if most else "fastest exact arm"
            found.setdefault(arm, {"title": title, "speed": speed, "drift": far, "style": run.styles[arm]})
    return list(found.values())


def _legend(run: Digest) -> list[tuple[str, list[ArmStyle]]]:
    """Kinds and their methods, with one style per method."""
    kinds: dict[str, dict[str, ArmStyle]] = {}
    for style in run.styles.values():
        kinds.setdefault(style.kind, {}).setdefault(style.method, style)
    return [(KINDS[kind][1], list(kinds[kind].values())) for kind in KINDS if kind in kinds]


# --- sections --------------------------------------------------------------------------------------------------------
_SECTIONS = {
    "plane": ("Speed and drift", "Right is faster, down is nearer to the target. Bars are 95 % intervals."),
    "speed": ("Speed-up", "Bars with 95 % bootstrap intervals over prompts; other bases: see All numbers."),
    "dials": ("Dials", "What a method gains as its dial is turned, and what it loses."),
    "rounds": ("Tokens a round", "How many tokens one target call yields."),
    "acceptance": ("Acceptance by place in the draft", ""),
    "long": ("Long texts", "Speed as the context grows."),
    "latency": ("Latency", "Times to the first token and between tokens; bars: median to 95th percentile."),
    "quality": ("Quality", ""),
    "categories": ("By category", ""),
    "numbers": ("All numbers", "Every arm, by suite and temperature."),
}
"""Sections with a block for each suite and temperature: title and lead."""


def _sections(run: Digest) -> list[Section]:
    if not run.views:
        missing = PageBlock([PagePart(None, ["the run has no answer of any arm"])])
        return [Section("headline", "Headline", "", [missing])]
    blocks: dict[str, list[PageBlock]] = {id: [] for id in _SECTIONS}
    long, kinds = longforms(run), categories(run)
    for s, suite in enumerate(run.suites):
        for t, temperature in enumerate(run.temperatures):
            view = suite, temperature
            parts = _parts(run, run.views[view], view, long, kinds) if view in run.views else {}
            unasked = [PagePart(None, [f"{suite} was not asked at temperature {temperature:g}"])]
            for id, found in blocks.items():
                found.append(PageBlock(parts.get(id, unasked), s, t))
    sections = [Section(id, *_SECTIONS[id], found) for id, found in blocks.items()]
    lead = (
        "Speed of every arm over all prompts and by suite, and what it cost: drift from the target's law. "
        "A dot marks arms on the front of speed and drift."
    )
    tables = [PageBlock([headline_table(run, of)], temperature=t) for t, of in enumerate(run.temperatures)]
    sections.insert(0, Section("headline", "All arms", lead, tables))
    sections.insert(-1, _law_section(run))
    return sections


def _parts(
    run: Digest,
    rows: Sequence[Summary],
    view: SuiteView,
    long: Mapping[SuiteView, LongForm],
    kinds: Mapping[SuiteView, Mapping[str, Mapping[str, BootstrapInterval]]],
) -> dict[str, PageParts]:
    """What a suite and a temperature add to each section."""
    no_long = f"no answers of {LONG} tokens or more whose tokens' arrivals are known"
    no_kinds = "no suite has several categories and a base arm to compare with"
    return {
        "plane": [_picture(plane, run, rows, view)],
        "speed": [_else(speed_table(run, rows), "no speed is known")],
        "dials": [_picture(dial_pictures, run, rows, view)],
        "rounds": [_picture(rounds, run, rows, view)],
        "acceptance": [_picture(acceptance, run, rows, view, _positions(run, view[1]))],
        "long": [_picture(longform_picture, run, long[view], view), longform_table(run, long[view])]
        if view in long
        else _elsewhere(long, no_long),
        "latency": [_else(latency_table(run, rows), "no arm reported when its tokens came")],
        "quality": [_else(quality_table(run, rows), "no quality was measured")],
        "categories": [category_table(run, kinds[view])] if view in kinds else _elsewhere(kinds, no_kinds),
        "numbers": [full_table(run, rows)],
    }


def _picture(make: Callable[..., PagePart], *of: Any) -> PagePart:
    """A picture, or the line that says how to get it."""
    reason = no_plots()
    return make(*of) if reason is None else PagePart(None, [reason])


def _else(table: Table | None, reason: str) -> PagePart | Table:
    return table if table is not None and table.rows else PagePart(None, [reason])


def _elsewhere(found: Iterable[SuiteView], nowhere: str) -> PageParts:
    """Why a view lacks a part that only some suites have."""
    suites = ", ".join(dict.fromkeys(suite for suite, _ in found))
    return [PagePart(None, [f"shown for {suites} only (choose it above)" if suites else nowhere])]


def _positions(run: Digest, temperature: float) -> Mapping[str, Any] | None:
    """Acceptance by position from the laws, if they were analysed at this temperature."""
    analysis = run.results.get("analysis") or {}
    if (analysis.get("sampling") or {}).get("temperature") != temperature:
        return None
    found: Mapping[str, Any] | None = analysis.get("position")
    return found


def _law_section(run: Digest) -> Section:
    analysis = run.results.get("analysis")
    if not analysis:
        missing = PageBlock([PagePart(None, ["the laws were not analysed in this run"])])
        return Section("laws", "Laws of the pair", "", [missing])
    temperature = (analysis.get("sampling") or {}).get("temperature")
    lead = (
        f"Both models' laws at {text_of(analysis.get('positions'))} positions of {text_of(analysis.get('texts'))} "
        f"texts that the target wrote at temperature {text_of(temperature)}; mean acceptance rate "
        f"{number(analysis.get('overlap'))}."
    )
    parts = [_picture(make, analysis) for make in LAW_PICTURES]
    return Section("laws", "Laws of the pair", lead, [PageBlock(parts)])


def _merged(section: Section) -> Section:
    """Replace the blocks by one line if all are missing for the same reason."""
    parts = [part for block in section.blocks for part in block.parts]
    reasons = {tuple(part.notes) for part in parts if isinstance(part, PagePart) and part.body is None}
    if len(reasons) != 1 or any(isinstance(part, Table) or part.body is not None for part in parts):
        return section
    return Section(section.id, section.title, "", [PageBlock(section.blocks[0].parts[:1])])
