"""Write the tables of README.md, docs/results.md, docs/results/ and docs/papers/ from benchmarks/results/.

    python scripts/update_results.py           write
    python scripts/update_results.py --check   exit 1 if a record may not be published or a file is not what it says

A table shows one run. Runs of ``sprinter bench`` are published by ``records.py``; a script of ``benchmarks/`` leaves
one JSON file a run with its table beside it, as Markdown, or as CSV if it is long. What may not be published
(``records.refusal``) or mixes runs is an error. A page of docs/results/ holds the tables of one topic of
``topics.toml`` between two marks; the text outside them is written by hand.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import records
from records import RESULTS, ROOT, Run
from sprinter.reproduce.claims import PaperTable
from sprinter.reproduce.papers import page as paper_page
from sprinter.reproduce.pictures import PaperPicture

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
LONGEST_PAGE = 150
SHOWN_ARMS = 16
"""A table of more arms is CSV alone."""
TOPICS: dict[str, dict[str, Any]] = tomllib.loads((RESULTS / "topics.toml").read_text(encoding="utf-8"))


# --- results of scripts ----------------------------------------------------------------------------------------------
def single_run(results: dict[str, Any]) -> dict[str, Any]:
    """How and where a script's results were made: {"command", "environment"}.

    Raises:
        MixedRecordsError: parts of it come from several runs.
        ValueError: it may not be published, or does not say how it was made.
    """
    made = list(_made(results, ""))
    if not made:
        raise ValueError("it does not say on which commit and machine it was made")
    first, environment = made[0], made[0]["environment"]
    told = [{"run": one["command"], "commit": one["environment"]["commit"],
             "machine": records.machine(one["environment"])} for one in made]  # fmt: skip
    if (calls := results.get("calls", 1)) > 1:
        raise ValueError(f"its answers come from {calls} calls: run it again in one, with --restart")
    parts = results.get("parts")
    named = [part["commit"] for part in parts.values() if "commit" in part] if isinstance(parts, dict) else []
    records.one_run([*told, *({**told[0], "commit": commit} for commit in named)])
    commit = str(environment["commit"] or "")
    where = {"commit": commit.rstrip("+"), "dirty": bool(environment.get("dirty")) or commit.endswith("+")}
    if (why := records.refusal({"command": first["command"], "environment": where, "arms": []})) is not None:
        raise ValueError(why)
    return first


def _made(value: Any, command: str) -> Iterator[dict[str, Any]]:
    """Every environment in a result file, with the command that stands nearest above it."""
    if isinstance(value, dict):
        command = value.get("command", command)
        if isinstance(value.get("environment"), dict):
            yield {"command": command, "environment": value["environment"]}
        value = [one for key, one in value.items() if key != "environment"]
    for one in value if isinstance(value, list) else ():
        yield from _made(one, command)


def script_lines(name: str, title: str) -> list[str]:
    """Heading, how it was made, and the table, or the verdicts on a paper's claims and a link if it is long."""
    results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    made = single_run(results)
    command, env = made["command"], made["environment"]
    load = f", load {env['load']} to {env['load_at_end']}" if "load_at_end" in env else ""
    script = re.search(r"benchmarks/\S+\.py", command)
    where = (
        f"Run `{command.strip()}` on {records.machine(env)}{load}; torch {env['torch']}, transformers "
        f"{env['transformers']}, commit {env['commit']}"
        f"{', which has the script' if script and not (ROOT / script[0]).is_file() else ''}."
    )
    short = RESULTS / f"{name}.md"
    if short.is_file():
        return ["", f"## {title}", "", where, "", short.read_text(encoding="utf-8").strip()]
    link = f"[All numbers as CSV](../../benchmarks/results/{name}.csv)."
    verdicts = [f"- {verdict}: {claim}" for claim, verdict in (results.get("verdicts") or {}).items()]
    return ["", f"## {title}", "", *([where, "", *verdicts, "", link] if verdicts else [f"{where} {link}"])]


# --- runs of the bench -----------------------------------------------------------------------------------------------
def run_lines(name: str, run: Run) -> list[str]:
    """Heading, how it was made, and a table a temperature: of all suites together, if there are several."""
    lines = ["", f"## Run: {name}", "", records.where(run)]
    if name == IN_README:
        lines[-1] += " Its table stands in [README](../../README.md#results)."
    elif len(run.header["arms"]) <= SHOWN_ARMS:
        for temperature in run.temperatures:
            told = f"**{run.suites[0]}, temperature {temperature:g}**"
            lines += ["", told, "", *records.table(run, temperature, run.suites[0])]
    return [*lines, "", f"All suites and temperatures: [CSV]({name}.csv)."]


def run_csv(run: Run) -> str:
    """Every table of a run."""

    def cells(row: str) -> list[str]:
        return [cell.strip() for cell in row.strip().strip("|").split(" | ")]

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for temperature in run.temperatures:
        for suite in run.suites:
            head, _, *rows = records.table(run, temperature, suite)
            writer.writerow(["run", "suite", "temperature", *cells(head)])
            writer.writerows([run.header["run"], suite, temperature, *cells(row)] for row in rows)
    return text.getvalue()


# --- pages -----------------------------------------------------------------------------------------------------------
INDEX = """# Results

A table shows one run: one command, one commit, one machine, named beside it. Speeds are ratios within the
run, arms interleaved prompt by prompt, with 95 % bootstrap intervals over prompts; the meter is complete.
Long tables are CSV files. How to repeat a number:
[CONTRIBUTING](../CONTRIBUTING.md#reproducing-a-number).

The built-in pair was replaced on 2026-11-29. Tables of earlier runs are of the pair before: a table's commit and date
say which.

| topic | what is measured |
| --- | --- |
{}

Written by `scripts/update_results.py` from `benchmarks/results/`; do not edit by hand.
"""
IN_README = "readme-real"
ABOUT_README = (
    "Qwen2.5-Coder-1.5B-Instruct with its 0.5B draft (Q4_K_M files) in chat, greedy, full answers of HumanEval and "
    "GSM8K; times include the prompt:"
)


def page(topic: str) -> Path:
    """The page of a topic."""
    return ROOT / "docs" / "results" / f"{topic}.md"


def index_page() -> str:
    """docs/results.md."""
    headings = {name: page(name).read_text(encoding="utf-8").splitlines()[0] for name in TOPICS}
    return INDEX.format(
        "\n".join(
            f"| [{heading.removeprefix('# Results: ')}](results/{name}.md) | {TOPICS[name]['about']} |"
            for name, heading in headings.items()
        )
    )


def wrapped(lines: Iterable[str]) -> str:
    """Lines as text, those of prose at most 120 characters long."""
    found: list[str] = []
    for line in "\n".join(lines).split("\n"):
        prose = len(line) > 120 and not line.startswith("|")
        found += textwrap.wrap(line, 120, break_long_words=False, break_on_hyphens=False) if prose else [line]
    return "\n".join(found)


def tables(topic: str) -> str:
    """The tables of a topic."""
    lines = [
        "Tables by `scripts/update_results.py` from `benchmarks/results/`; back to the [index](../results.md).",
        "Commands of results without a load were recorded without their folders (`--data`, `--gate`, `--out`).",
    ]
    for name, run in records.published(topic).items():
        lines += run_lines(name, run)
    for result, title in TOPICS[topic]["titles"].items():
        lines += script_lines(result, title)
    return wrapped(lines)


def readme_block() -> str:
    """README's table: the newest run of ``readme-real``."""
    run = records.published("real")[IN_README]
    (temperature,) = run.temperatures
    shown = records.table(run, temperature, run.suites[0])
    more = "All published runs: [results](docs/results.md)."
    return wrapped([ABOUT_README, "", *shown, "", records.where(run), "", more])


def between_marks(path: Path, text: str) -> str:
    """The file with ``text`` between its marks."""
    head, rest = path.read_text(encoding="utf-8").split(BEGIN)
    return f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def paper_pages() -> dict[Path, str]:
    """docs/papers/: a page a paper, from the runs of ``sprinter reproduce`` in papers/PAPER-PAIR.json.

    Raises:
        ValueError: a run may not be published.
    """
    pages: dict[Path, list[str]] = {}
    for path in sorted(RESULTS.glob("papers/*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        single_run(results)
        title, about, *rest = paper_page(results, path.stem).split("\n\n")
        lines = pages.setdefault(ROOT / "docs" / "papers" / f"{results['paper']}.md", [title, "", about])
        pair = path.stem.removeprefix(f"{results['paper']}-")
        lines += ["", f"## Pair: {pair}"]
        for part in rest:
            lines += ["", f"#{part}" if part.startswith("##") else part]
    return {path: wrapped(lines) + "\n" for path, lines in pages.items()}


def pictures() -> dict[Path, PaperPicture]:
    """Pictures of the pages of papers."""
    found: dict[Path, PaperPicture] = {}
    for path in sorted(RESULTS.glob("papers/*.json")):
        parts = json.loads(path.read_text(encoding="utf-8"))["parts"].values()
        for table in (PaperTable.of(one) for part in parts for one in part):
            if table.picture is not None:
                found[ROOT / "docs" / "papers" / f"{path.stem}-{table.picture.name}.png"] = table.picture
    return found


def documents() -> dict[Path, str]:
    """What every document must hold.

    Raises:
        ValueError: a result may not be published, or a page is too long.
    """
    readme = ROOT / "README.md"
    wanted = {readme: between_marks(readme, readme_block()), ROOT / "docs" / "results.md": index_page()}
    for topic in TOPICS:
        try:
            wanted[page(topic)] = between_marks(page(topic), tables(topic))
        except ValueError as error:
            raise ValueError(f"{topic}: {error}") from error
        for name, run in records.published(topic).items():
            wanted[page(topic).with_name(f"{name}.csv")] = run_csv(run)
        if (count := len(wanted[page(topic)].splitlines())) > LONGEST_PAGE:
            raise ValueError(f"docs/results/{topic}.md has {count} lines: leave tables to their CSV files")
    return wanted | paper_pages()


def main() -> int:
    """Write the documents, or with --check compare them."""
    try:
        wanted = documents()
    except ValueError as error:
        print(f"error: {error}")
        return 1
    stale = {
        path: text
        for path, text in wanted.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        if "--check" in sys.argv:
            print(
                f"{path.relative_to(ROOT)} differs from benchmarks/results: run python scripts/update_results.py"
            )
        else:
            path.write_text(text, encoding="utf-8")
    drawn = pictures()
    missing = [path for path in drawn if not path.is_file()]
    for path in missing if "--check" in sys.argv else drawn:
        if "--check" in sys.argv:
            print(f"{path.relative_to(ROOT)} is missing: run python scripts/update_results.py")
        else:
            path.write_bytes(drawn[path].png())
    return 1 if (stale or missing) and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
