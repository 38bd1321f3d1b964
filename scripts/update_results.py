"""Write the tables of README.md, docs/results.md and docs/results/ from the records in benchmarks/results/.

python scripts/update_results.py           write
python scripts/update_results.py --check   exit 1 if a record may not be published or a file differs from its records

A table shows one run. Runs of ``sprinter bench`` are published by ``records.py``; a script of ``benchmarks/`` leaves
one JSON file a run with its table beside it, as Markdown, or as CSV if it is long. What may not be published
(``records.refusal``) or mixes runs is an error. A page of docs/results/ holds the tables of one topic between two
marks; the text outside them is written by hand.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
from records import ROOT, Run

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
LONGEST_PAGE = 150
SHOWN_ARMS = 16
"""A table of more arms is CSV alone."""


@dataclass(frozen=True)
class Topic:
    """One page of results.

    Attributes:
        about: what is measured, for the index.
        titles: result file of a script -> heading; runs of the bench need no entry.
    """

    about: str
    titles: dict[str, str]


TOPICS = {
    "real": Topic(
        "a pair of instruct models: signals, equal texts, costs of passes, many rows",
        {
            "real/probe": "Overlap and signals by kind of text",
            "real/equality_float32": "Greedy texts of lossless methods against plain decoding, float32",
            "real/equality_llamacpp": "Greedy texts of lossless methods against plain decoding, llama.cpp",
            "real/law": "Laws of weights of 4, 8 and 16 bits",
            "real/passes_avx512": "Cost of a forward pass, AVX-512",
            "real/passes_avx2": "Cost of a forward pass, AVX2",
            "real/rows_smollm2_avx2": "Many rows at once, beside vLLM: SmolLM2, AVX2",
            "real/rows_smollm2_avx512": "Many rows at once, beside vLLM: SmolLM2, AVX-512",
            "real/rows_builtin_avx512": "Many rows at once, beside vLLM: the built-in pair, AVX-512",
        },
    ),
    "drafts": Topic(
        "heads that draft, beside vLLM; other tables are withdrawn until each arm has read its own prompt",
        {
            "real/heads_in_vllm": "An EAGLE-3 head of ours in vLLM",
        },
    ),
    "methods": Topic(
        "methods on the built-in pair, and counts against transformers'",
        {
            "methods/defaults": "Defaults beside plain decoding, by pair and runner",
            "methods/tuner": "The tuner against an exhaustive grid",
            "methods/crosscheck": "Against transformers' assisted decoding",
            "methods/trees": "Trees against chains",
            "methods/blocks_enumerated": "Block verification against exact acceptance, enumerated",
            "methods/blocks_builtin": "Block verification against exact acceptance, the built-in pair",
        },
    ),
    "bench": Topic(
        "how far verdicts of `sprinter bench` can be trusted",
        {"bench/noise": "The same arm twice, and an arm made slower"},
    ),
    "gpu": Topic(
        "an H100: passes against a copy's bandwidth, plain and speculative decoding beside transformers; drafters "
        "trained on an H200",
        {
            "gpu/h100": "Real sizes with random weights, and a pair trained on the way",
            "gpu/h100_builtin": "Laws of captured passes",
            "gpu/drafts": "Drafters trained for SmolLM2-135M-Instruct",
        },
    ),
    "serve": Topic(
        "the server beside vLLM's and llama.cpp's, under load, and its log-likelihoods against transformers'",
        {
            "serve/latency": "Latency beside vLLM's and llama.cpp's servers",
            "serve/load_builtin": "Many streams for minutes: the built-in pair",
            "serve/load_smollm2": "Many streams for minutes: SmolLM2",
            "serve/evaluate": "lm-evaluation-harness through the server",
            "serve/crowd_builtin": "One seed alone and in a crowd: the built-in pair",
            "serve/crowd_smollm2": "One seed alone and in a crowd: SmolLM2",
            "serve/schema": "Requests made from the description",
            "serve/attacks": "The server under attack",
        },
    ),
    "llamacpp": Topic(
        "GGUF files through llama.cpp and through PyTorch",
        {
            "llamacpp/agreement": "One GGUF file through llama.cpp and through PyTorch",
            "llamacpp/tokenizers": "Tokenizers of GGUF files",
        },
    ),
    "gate": Topic(
        "which signal to learn, and transfer to other text",
        {
            "gate/study_builtin": "Gates: which signal is worth learning (built-in pair)",
            "gate/study_other": "Gates: which signal is worth learning (another pair)",
            "gate/transfer": "Gates: one kind of text to another",
        },
    ),
    "papers": Topic(
        "tables of four papers, re-run on the built-in pair",
        {
            "papers/sprinter": "SPRINTER's tables in kind",
            "papers/svip": "SVIP's tables in kind",
            "papers/fsd": "Fuzzy speculative decoding's tables in kind",
            "papers/fsd_laws": "Fuzzy speculative decoding: divergences in kind",
            "papers/theory": "OPT against UNO, target against draft, in kind",
        },
    ),
}


# --- results of scripts ----------------------------------------------------------------------------------------------
def load(name: str) -> dict[str, Any]:
    """Contents of a script's result file."""
    found: dict[str, Any] = json.loads((records.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def single_run(results: dict[str, Any]) -> dict[str, Any]:
    """How and where a script's results were made: {"command", "environment"}.

    Raises:
        MixedRecordsError: parts of it come from several runs.
        ValueError: it may not be published, or does not say how it was made.
    """
    made = list(_made(results, {}))
    if not made:
        raise ValueError("it does not say on which commit and machine it was made")
    described = [
        {
            "run": one["command"],
            "commit": one["environment"]["commit"],
            "machine": records.machine(one["environment"]),
        }
        for one in made
    ]
    records.one_run([*described, *({**described[0], "commit": commit} for commit in _commits(results))])
    environment = made[0]["environment"]
    commit = str(environment["commit"] or "")
    dirty = bool(environment.get("dirty")) or commit.endswith("+")
    where = {"commit": commit.rstrip("+"), "dirty": dirty}
    header = {"command": made[0]["command"], "environment": where, "arms": []}
    if (why := records.refusal(header)) is not None:
        raise ValueError(why)
    return made[0]


def _made(value: Any, above: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every environment in a result file, with the command that stands nearest above it."""
    if isinstance(value, list):
        for one in value:
            yield from _made(one, above)
    elif isinstance(value, dict):
        above = {**above, **({"command": value["command"]} if "command" in value else {})}
        if isinstance(value.get("environment"), dict):
            yield {"command": above.get("command", ""), "environment": value["environment"]}
        for key, one in value.items():
            if key != "environment":
                yield from _made(one, above)


def _commits(results: dict[str, Any]) -> list[str]:
    """Commits that parts of a result name beside those of their environments."""
    parts = results.get("parts")
    return [one["commit"] for one in parts.values() if "commit" in one] if isinstance(parts, dict) else []


def script_lines(name: str, title: str) -> list[str]:
    """Heading, how it was made, and the table, or a link to it if it is long."""
    made = single_run(load(name))
    env = made["environment"]
    load_told = f", load {env['load']} to {env['load_at_end']}" if "load" in env else ""
    where = (
        f"Run `{made['command'].strip()}` on {records.machine(env)}{load_told}; torch {env['torch']}, "
        f"transformers {env['transformers']}, commit {env['commit']}."
    )
    if (script := re.search(r"benchmarks/\S+\.py", made["command"])) and not (ROOT / script[0]).is_file():
        where = where.removesuffix(".") + ", which has the script."
    short = records.RESULTS / f"{name}.md"
    if short.is_file():
        return ["", f"## {title}", "", where, "", short.read_text(encoding="utf-8").strip()]
    link = f"[All numbers as CSV](../../benchmarks/results/{name}.csv)."
    told = verdicts(load(name))
    return ["", f"## {title}", "", *([where, "", *told, link] if told else [f"{where} {link}"])]


def verdicts(results: dict[str, Any]) -> list[str]:
    """Claims of a paper and what became of them, if the result has such."""
    found = results.get("verdicts")
    if not found:
        return []
    return [*(f"- {verdict}: {claim}" for claim, verdict in found.items()), ""]


# --- runs of the bench -----------------------------------------------------------------------------------------------
def run_lines(name: str, run: Run) -> list[str]:
    """Heading, how it was made, and a table a temperature: of all suites together, if there are several."""
    lines = ["", f"## Run: {name}", "", records.where(run)]
    if name.startswith("readme-"):
        lines[-1] += " Its table stands in [README](../../README.md#results)."
    elif len(run.header["arms"]) <= SHOWN_ARMS:
        for temperature in run.temperatures:
            told = f"**{run.suites[0]}, temperature {temperature:g}**"
            lines += ["", told, "", *records.table(run, temperature, run.suites[0])]
    return [*lines, "", f"All suites and temperatures: [CSV]({name}.csv)."]


def run_csv(run: Run) -> str:
    """Every table of a run."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for temperature in run.temperatures:
        for suite in run.suites:
            head, _, *rows = records.table(run, temperature, suite)
            writer.writerow(["run", "suite", "temperature", *_cells(head)])
            writer.writerows([run.header["run"], suite, temperature, *_cells(row)] for row in rows)
    return text.getvalue()


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split(" | ")]


# --- pages -----------------------------------------------------------------------------------------------------------
def page(topic: str) -> Path:
    """The page of a topic."""
    return ROOT / "docs" / "results" / f"{topic}.md"


def index_page() -> str:
    """docs/results.md."""
    lines = [
        "# Results",
        "",
        "A table shows one run: one command, one commit, one machine, named beside it. Speeds are ratios within the",
        "run, arms interleaved prompt by prompt, with 95 % bootstrap intervals over prompts; the meter is complete.",
        "Long tables are CSV files. How to repeat a number:",
        "[CONTRIBUTING](../CONTRIBUTING.md#reproducing-a-number).",
        "",
        "| topic | what is measured |",
        "| --- | --- |",
    ]
    for name, topic in TOPICS.items():
        heading = page(name).read_text(encoding="utf-8").splitlines()[0].removeprefix("# Results: ")
        lines.append(f"| [{heading}](results/{name}.md) | {topic.about} |")
    lines += ["", "Written by `scripts/update_results.py` from `benchmarks/results/`; do not edit by hand."]
    return "\n".join(lines) + "\n"


def wrapped(lines: Iterable[str]) -> str:
    """Lines as text, those of prose at most 120 characters long."""
    found: list[str] = []
    for line in "\n".join(lines).split("\n"):
        prose = len(line) > 120 and not line.startswith("|")
        found += textwrap.wrap(line, 120, break_long_words=False, break_on_hyphens=False) if prose else [line]
    return "\n".join(found)


def tables(name: str, topic: Topic) -> str:
    """The tables of a topic."""
    lines = [
        "Tables by `scripts/update_results.py` from `benchmarks/results/`; back to the [index](../results.md).",
        "Commands of results without a load were recorded without their folders (`--data`, `--gate`, `--out`).",
    ]
    for run_name, run in records.published(name).items():
        lines += run_lines(run_name, run)
    for result, title in topic.titles.items():
        lines += script_lines(result, title)
    return wrapped(lines)


def readme_block() -> str:
    """README's tables: the newest runs of ``readme-real`` and ``readme-builtin``, and nothing where there is none."""
    runs = {**records.published("real"), **records.published("methods")}
    shown = {
        "readme-real": "Qwen2.5-Coder-1.5B-Instruct with its 0.5B draft (Q4_K_M files) in chat, greedy, full answers "
        "of HumanEval and GSM8K; times include the prompt:",
        "readme-builtin": "The built-in pair at temperature 1, on text that it was not trained on:",
    }
    lines = []
    for name, about in shown.items():
        lines += ["", about, ""]
        if name not in runs:
            lines.append(f"No run of [{name}](benchmarks/configs/{name}.toml) is published yet.")
            continue
        (temperature,) = runs[name].temperatures
        lines += [
            *records.table(runs[name], temperature, runs[name].suites[0]),
            "",
            records.where(runs[name]),
        ]
    lines += ["", "All published runs: [results](docs/results.md)."]
    return wrapped(lines).strip()


def between_marks(path: Path, text: str) -> str:
    """The file with ``text`` between its marks."""
    head, rest = path.read_text(encoding="utf-8").split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def documents() -> dict[Path, str]:
    """What every document must hold.

    Raises:
        ValueError: a result may not be published, or a page is too long.
    """
    readme = ROOT / "README.md"
    wanted = {readme: between_marks(readme, readme_block()), ROOT / "docs" / "results.md": index_page()}
    for name, topic in TOPICS.items():
        try:
            wanted[page(name)] = between_marks(page(name), tables(name, topic))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for run_name, run in records.published(name).items():
            wanted[page(name).with_name(f"{run_name}.csv")] = run_csv(run)
        if (count := len(wanted[page(name)].splitlines())) > LONGEST_PAGE:
            raise ValueError(f"docs/results/{name}.md has {count} lines: leave tables to their CSV files")
    return wanted


def main() -> int:
    """Write the documents, or with --check compare them."""
    try:
        wanted = documents()
    except ValueError as error:
        print(f"error: {error}")
        return 1
    stale = [
        path
        for path, text in wanted.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} does not match benchmarks/results: run python scripts/update_results.py"
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
