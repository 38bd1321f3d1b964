"""Write the tables of README.md, docs/results.md, docs/results/ and docs/papers/ from benchmarks/results/.

    python scripts/update_results.py           write
    python scripts/update_results.py --check   exit 1 if a record may not be published or a file is not what it says

A table shows one run. Runs of ``sprinter bench`` are published by ``records.py``; a script of ``benchmarks/`` leaves
one JSON file a run with its table beside it, as Markdown, or as CSV if it is long. What may not be published
(``records.refusal``) or mixes runs is an error. A page of docs/results/ holds, between two marks, the summary table of
one topic of ``topics.toml`` and links to the data of all its runs; the text outside them is written by hand.
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


def script_where(results: dict[str, Any]) -> str:
    """Command, machine, versions and commit of a script's run: one line."""
    made = single_run(results)
    command, env = made["command"], made["environment"]
    load = f", load {env['load']} to {env['load_at_end']}" if "load_at_end" in env else ""
    script = re.search(r"benchmarks/\S+\.py", command)
    return (
        f"Run `{command.strip()}` on {records.machine(env)}{load}; torch {env['torch']}, transformers "
        f"{env['transformers']}, commit {env['commit']}"
        f"{'. The script was removed after this commit' if script and not (ROOT / script[0]).is_file() else ''}."
    )


def cells(row: str) -> list[str]:
    """The cells of a row of a Markdown table."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def script_csv(name: str, results: dict[str, Any]) -> str:
    """A short table as CSV; how it was made and what stands around it are comments (#)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    text.write(f"# {script_where(results)}\n")
    for line in (RESULTS / f"{name}.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            text.write(f"# {line}\n" if line.strip() else "")
        elif not line.startswith("| ---"):
            writer.writerow(cells(line))
    return text.getvalue()


def script_table(name: str, only: dict[str, list[str]]) -> list[str]:
    """The table of a script's result; of one that is CSV the rows that ``only`` names by column."""
    short = RESULTS / f"{name}.md"
    if short.is_file():
        return [short.read_text(encoding="utf-8").strip()]
    head, *rows = csv.reader((RESULTS / f"{name}.csv").read_text(encoding="utf-8").splitlines())
    rows = [row for row in rows if all(row[head.index(key)] in kept for key, kept in only.items())]
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return [f"| {' | '.join(row[i] for i in used)} |" for row in (head, ["---"] * len(head), *rows)]


# --- runs of the bench -----------------------------------------------------------------------------------------------
def run_table(run: Run) -> list[str]:
    """A table a temperature: of all suites together, if there are several."""
    lines = list[str]()
    for temperature in run.temperatures:
        told = f"**{run.suites[0]}, temperature {temperature:g}**"
        lines += ["", told, "", *records.table(run, temperature, run.suites[0])]
    return lines[1:]


def run_csv(run: Run) -> str:
    """Every table of a run."""
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

A page shows one summary table a topic, and the data of all its runs as CSV. A table shows one run: one command, one
commit, one machine, named next to it or in the record next to its data. Speeds are ratios within the run, arms
interleaved prompt by prompt, with 95 % bootstrap intervals over prompts; the meter is complete. How to repeat a number:
[CONTRIBUTING](../CONTRIBUTING.md#reproducing-a-number).

The built-in pair was replaced on 2026-11-29. Tables of earlier runs are of the pair before: a table's commit and date
say which.

| topic | what is measured |
| --- | --- |
{}

Tables that were here before 28 November 2026: [where removed tables went](removed-tables.md). What a record holds:
[records](reference/records.md#published-results).

Written by `scripts/update_results.py` from `benchmarks/results/`; do not edit by hand.
"""
RECORDS = (
    "A record has the command, the machine and every number of its run. Older records, which name no load, leave "
    "folders out of the command (`--data`, `--gate`, `--out`)."
)
IN_README = "readme-real"
README_LEAVES_OUT = ("trusted", "text as plain")
ABOUT_README = (
    "Qwen2.5-Coder-1.5B-Instruct with its 0.5B draft (Q4_K_M files) in chat, greedy, full answers of HumanEval and "
    "GSM8K; times include the prompt. Brackets are 95 % intervals over prompts."
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


def anchor(title: str) -> str:
    """A target for links to a result, as its heading had."""
    slug = re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-")
    return f'<a id="{slug}"></a>'


def tables(topic: str) -> str:
    """The summary table of a topic, and links to the data of all its runs."""
    told = TOPICS[topic]
    lines = [
        "Back to the [index](../results.md); written by `scripts/update_results.py`.",
        "",
        "## Summary",
        "",
    ]
    rows = ["| result | data | commit |", "| --- | --- | --- |"]
    for name, run in records.published(topic).items():
        if name == told["summary"]:
            lines += [records.where(run), "", *run_table(run)]
        rows.append(f"| {anchor(f'Run: {name}')}Run {name} | [CSV]({name}.csv) | {run.header['commit']} |")
    for name, title in told["titles"].items():
        results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        if name == told["summary"]:
            lines += [f"{title}. {script_where(results)}", "", *script_table(name, told.get("only", {}))]
        data = (
            f"data/{name}.csv"
            if (RESULTS / f"{name}.md").is_file()
            else f"../../benchmarks/results/{name}.csv"
        )
        links = f"[CSV]({data}), [record](../../benchmarks/results/{name}.json)"
        rows.append(f"| {anchor(title)}{title} | {links} | {single_run(results)['environment']['commit']} |")
    return wrapped([*lines, "", "## All data", "", *rows, "", RECORDS])


def readme_block() -> str:
    """README's table: the newest run of ``readme-real``."""
    run = records.published("real")[IN_README]
    (temperature,) = run.temperatures
    rows = [cells(row) for row in records.table(run, temperature, run.suites[0])]
    kept = [i for i, name in enumerate(rows[0]) if name not in README_LEAVES_OUT]
    shown = [f"| {' | '.join(row[i] for i in kept)} |" for row in rows]
    more = (
        f"Run `{run.header['run']}`: its [command, machine and data](docs/results/real.md#summary). All others: "
        "[results](docs/results.md)."
    )
    return wrapped([ABOUT_README, "", *shown, "", more])


def between_marks(path: Path, text: str) -> str:
    """The file with ``text`` between its marks."""
    head, rest = path.read_text(encoding="utf-8").split(BEGIN)
    return f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def reworded(text: str) -> str:
    """A record of ``sprinter reproduce`` with the plainer sentences of papers/wording.toml."""
    for old, new in tomllib.loads((RESULTS / "papers" / "wording.toml").read_text(encoding="utf-8")).items():
        text = text.replace(old, new)
    return text


def paper_pages() -> dict[Path, str]:
    """docs/papers/: a page a paper, its errata and the runs of ``sprinter reproduce`` in papers/PAPER-PAIR.json.

    Raises:
        ValueError: a run may not be published.
    """
    pages: dict[Path, list[str]] = {}
    errata = tomllib.loads((RESULTS / "papers" / "errata.toml").read_text(encoding="utf-8"))
    for path in sorted(RESULTS.glob("papers/*.json")):
        results = json.loads(reworded(path.read_text(encoding="utf-8")))
        single_run(results)
        title, about, *rest = paper_page(results, path.stem).split("\n\n")
        page = ROOT / "docs" / "papers" / f"{results['paper']}.md"
        if page not in pages:
            items = [textwrap.fill(f"- {one}", 120, subsequent_indent="  ") for one in errata[page.stem]]
            pages[page] = [title, "", about, "", "## Errata", "", *items]
        lines = pages[page]
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
        for name in TOPICS[topic]["titles"]:
            if (RESULTS / f"{name}.md").is_file():
                results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
                wanted[ROOT / "docs" / "results" / "data" / f"{name}.csv"] = script_csv(name, results)
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
            path.parent.mkdir(parents=True, exist_ok=True)
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
