"""The report page: facts about the run, tables and figures by suite and temperature, in one file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sprinter.bench.report.breakdown import LONG, categories, longforms
from sprinter.bench.report.digest import Digest, Summary, digest, headline
from sprinter.bench.report.lawpictures import law_parts
from sprinter.bench.report.looks import KINDS, Look
from sprinter.bench.report.numbers import drift, duration, multiple, number, text_of
from sprinter.bench.report.pictures import BarPart, acceptance, dial_pictures, longform_picture, plane, rounds
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
from sprinter.files import write_atomic

__all__ = ["write_report"]

_FOLDER = Path(__file__).parent
_DRIFTS = (0.0, 0.02, 0.1)
"""Drift limits for which the page's first lines name the fastest arm."""


@dataclass(frozen=True, slots=True)
class PageBlock:
    """Tables and figures for a suite and a temperature (indices; None: all), in order."""

    parts: Sequence[BarPart | Table]
    suite: int | None = None
    temperature: int | None = None


@dataclass(frozen=True, slots=True)
class Section:
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
    return write_atomic(path, _page(results))


def _page(results: Mapping[str, Any]) -> str:
    run = digest(results)
    loader = FileSystemLoader(_FOLDER)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style, script = (Markup((_FOLDER / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    return environment.get_template("page.html.jinja").render(
        run=run,
        style=style,
        script=script,
        pair=_pair(results),
        facts=_facts(run),
        details=_details(results),
        suites=_suites(run),
        temperatures=[f"{temperature:g}" for temperature in run.temperatures],
        highlights=[(i, _highlights(run, t)) for i, t in enumerate(run.temperatures)],
        legend=_legend(run),
        sections=[_merged(section) for section in _sections(run)],
        is_table=lambda part: isinstance(part, Table),
        breakable=_breakable,
        multiple=multiple,
        drift=drift,
    )


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
            f"{environment.get('commit')}{' with uncommitted changes' if environment.get('dirty') else ''}",
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
            {arm["name"]: arm["versions"] for arm in results.get("arms") or [] if arm.get("versions")},
        ),
    ]
    return [(title, [(str(k), text_of(v)) for k, v in facts.items()]) for title, facts in parts if facts]


def _suites(run: Digest) -> list[dict[str, str]]:
    shown = []
    for suite in run.results.get("suites") or []:
        sources = [f"{s.get('name')} ({str(s.get('sha256'))[:12]})" for s in suite.get("sources") or []]
        shown.append(
            {
                "name": str(suite.get("name")),
                "samples": text_of(suite.get("samples")),
                "new_tokens": text_of(suite.get("new_tokens")),
                "asked": text_of(suite.get("asked")),
                "skipped": text_of({**(suite.get("skipped") or {}), **(suite.get("left_out") or {})}),
                "rule": text_of(suite.get("rule")),
                "sources": ", ".join(sources) or "–",
            }
        )
    return shown


def _highlights(run: Digest, temperature: float) -> list[dict[str, Any]]:
    """The fastest arm for each limit of drift, each arm only once."""
    rows = [
        r
        for r in headline(run.results)
        if r["temperature"] == temperature and r["speed_up"] and r["mean_drift"]
    ]
    rows.sort(key=lambda row: -row["speed_up"][0])
    found: dict[str, dict[str, Any]] = {}
    for most in _DRIFTS:
        row = next(
            (r for r in rows if r["mean_drift"][0] <= most and (most > 0 or r["lossless"] is True)), None
        )
        if row is not None:
            title = f"fastest with drift up to {most:g}" if most else "fastest exact arm"
            found.setdefault(row["arm"], {"title": title, "row": row, "look": run.looks[row["arm"]]})
    return list(found.values())


def _legend(run: Digest) -> list[tuple[str, list[Look]]]:
    """Kinds and their methods, with one look per method."""
    kinds: dict[str, dict[str, Look]] = {}
    for look in run.looks.values():
        kinds.setdefault(look.kind, {}).setdefault(look.method, look)
    return [(KINDS[kind][1], list(kinds[kind].values())) for kind in KINDS if kind in kinds]


# --- sections --------------------------------------------------------------------------------------------------------
def _views(
    run: Digest, make: Callable[[Digest, Sequence[Summary], tuple[str, float]], Sequence[BarPart | Table]]
) -> Iterator[PageBlock]:
    """One block per suite and temperature."""
    for s, suite in enumerate(run.suites):
        for t, temperature in enumerate(run.temperatures):
            summaries = run.views.get((suite, temperature))
            if summaries:
                yield PageBlock(make(run, summaries, (suite, temperature)), s, t)
            else:
                yield PageBlock(
                    [BarPart(None, [f"{suite} was not asked at temperature {temperature:g}"])], s, t
                )


def _sections(run: Digest) -> list[Section]:
    if not run.views:
        missing = PageBlock([BarPart(None, ["the run has no answer of any arm"])])
        return [Section("headline", "Headline", "", [missing])]
    return [
        Section(
            "headline",
            "All arms",
            "Speed of every arm over all prompts and by suite, and what it cost: drift from the target's law. "
            "A dot marks arms on the front of speed and drift.",
            [
                PageBlock([headline_table(run, temp)], temperature=t)
                for t, temp in enumerate(run.temperatures)
            ],
        ),
        Section(
            "plane",
            "Speed and drift",
            "Right is faster, down is nearer to the target. Bars through marks are 95 % intervals.",
            list(_views(run, lambda run, rows, view: [plane(run, rows)])),
        ),
        Section(
            "speed",
            "Speed-up",
            "Bars with 95 % bootstrap intervals over prompts; speed over other arms is under All numbers.",
            list(_views(run, lambda run, rows, view: [_else(speed_table(run, rows), "no speed is known")])),
        ),
        Section(
            "dials",
            "Dials",
            "What a method gains as its dial is turned, and what it loses.",
            list(_views(run, lambda run, rows, view: [dial_pictures(run, rows)])),
        ),
        Section(
            "rounds",
            "Tokens a round",
            "How many tokens one target call yields.",
            list(_views(run, lambda run, rows, view: [rounds(run, rows)])),
        ),
        Section(
            "acceptance",
            "Acceptance by place in the draft",
            "",
            list(_views(run, lambda run, rows, view: [acceptance(run, rows, _positions(run, view[1]))])),
        ),
        _longform_section(run),
        Section(
            "latency",
            "Latency",
            "Time to the first token and between tokens; bars go from the median to the 95th percentile.",
            list(
                _views(
                    run,
                    lambda run, rows, view: [
                        _else(latency_table(run, rows), "no arm reported when its tokens came")
                    ],
                )
            ),
        ),
        Section(
            "quality",
            "Quality",
            "",
            list(
                _views(
                    run,
                    lambda run, rows, view: [_else(quality_table(run, rows), "no quality was measured")],
                )
            ),
        ),
        _category_section(run),
        _law_section(run),
        Section(
            "numbers",
            "All numbers",
            "Every arm, by suite and temperature.",
            list(_views(run, lambda run, rows, view: [full_table(run, rows)])),
        ),
    ]


def _else(table: Table | None, reason: str) -> BarPart | Table:
    return table if table is not None and table.rows else BarPart(None, [reason])


def _positions(run: Digest, temperature: float) -> Mapping[str, Any] | None:
    """Acceptance by position from the laws, if they were analysed at this temperature."""
    analysis = run.results.get("analysis") or {}
    if (analysis.get("sampling") or {}).get("temperature") != temperature:
        return None
    found: Mapping[str, Any] | None = analysis.get("position")
    return found


def _longform_section(run: Digest) -> Section:
    found = longforms(run)

    def make(run: Digest, rows: Sequence[Summary], view: tuple[str, float]) -> Sequence[BarPart | Table]:
        if view in found:
            return [longform_picture(run, found[view]), longform_table(run, found[view])]
        return [
            BarPart(
                None,
                [_elsewhere(found, f"no answers of {LONG} tokens or more whose tokens' arrivals are known")],
            )
        ]

    return Section("long", "Long texts", "Speed as the context grows.", list(_views(run, make)))


def _category_section(run: Digest) -> Section:
    found = categories(run)

    def make(run: Digest, rows: Sequence[Summary], view: tuple[str, float]) -> Sequence[BarPart | Table]:
        if view in found:
            return [category_table(run, found[view])]
        return [
            BarPart(
                None, [_elsewhere(found, "no suite has several categories and a base arm to compare with")]
            )
        ]

    return Section("categories", "By category", "", list(_views(run, make)))


def _elsewhere(found: Iterable[tuple[str, float]], nowhere: str) -> str:
    """Why a view lacks a part that only some suites have."""
    suites = ", ".join(dict.fromkeys(suite for suite, _ in found))
    return f"shown for {suites} only (choose it above)" if suites else nowhere


def _law_section(run: Digest) -> Section:
    analysis = run.results.get("analysis")
    parts = law_parts(analysis)
    lead = ""
    if analysis:
        temperature = (analysis.get("sampling") or {}).get("temperature")
        lead = (
            f"Both models' laws at {text_of(analysis.get('positions'))} positions of {text_of(analysis.get('texts'))} "
            f"texts that the target wrote at temperature {text_of(temperature)}; mean acceptance rate "
            f"{number(analysis.get('overlap'))}."
        )
    missing: list[BarPart | Table] = [BarPart(None, ["the laws were not analysed in this run"])]
    shown = [BarPart(part.body and _titled(title, part.body), part.notes) for title, part in parts.items()]
    return Section("laws", "Laws of the pair", lead, [PageBlock(shown or missing)])


def _titled(title: str, body: Markup) -> Markup:
    return Markup("<h3>{}</h3>{}").format(title, body)


def _merged(section: Section) -> Section:
    """Replace the blocks by one line if all are missing for the same reason."""
    parts = [part for block in section.blocks for part in block.parts]
    reasons = {tuple(part.notes) for part in parts if isinstance(part, BarPart) and part.body is None}
    if len(reasons) != 1 or any(isinstance(part, Table) or part.body is not None for part in parts):
        return section
    return Section(section.id, section.title, "", [PageBlock(section.blocks[0].parts)])
