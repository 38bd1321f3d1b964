"""Published runs of ``sprinter bench``: one file a run, which is never changed, and tables that show one run.

python scripts/records.py publish RUN TOPIC [--name NAME] [--failed ARM ...]
    the run in the folder RUN becomes benchmarks/results/TOPIC/NAME.RUN-ID.jsonl.gz

The first line describes the run: id, command byte for byte, commit, machine with instruction sets and load, versions,
models, settings, suites, arms. Every other line is one answer, a row of ``rows.jsonl`` with the ids of run and commit
and the machine, and with a hash in place of its text. A run is refused if it was resumed, if it was made on
uncommitted changes or on a commit that is not in history, if its command or an arm names an absolute path, or if an
arm has failed that is not named as such.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sprinter.bench.results import read_results
from sprinter.bench.summary import ALL, summarise
from sprinter.errors import UserError
from sprinter.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = "sprinter-run/1"
SUFFIX = ".jsonl.gz"
OF_A_RUN = ("run", "commit", "machine")
"""Fields of a record that must be the same in all that a table shows."""
_ABSOLUTE = re.compile(r"(^|^-[A-Za-z]|[^\w.\-/~*?\]})])[/~]|\bfile:|\$\{?\w|\b[A-Za-z]:\\", re.IGNORECASE)
"""In one word: /data, -o/data, --out=~/data, arm(head=/data), file:data, $HOME, C:\\data; not a/b, and no URL."""
_LEFT_OUT = ("token_ids", "arrivals_ms", "choices")
_ACCURACY = ("pass_at_1", "exact_match")


class MixedRecordsError(ValueError):
    """Records of several runs, machines, commits or temperatures in one table."""


@dataclass(frozen=True)
class Run:
    """A published run: its first line, and its records."""

    header: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]

    @property
    def temperatures(self) -> list[float]:
        """Temperatures, in the order of the run."""
        return list(dict.fromkeys(record["temperature"] for record in self.records))

    @property
    def suites(self) -> list[str]:
        """Names of the suites, and ``ALL`` if there are several."""
        names = list(dict.fromkeys(record["suite"] for record in self.records))
        return [ALL, *names] if len(names) > 1 else names


def machine(environment: Mapping[str, Any]) -> str:
    """Processor or GPU, instruction sets, cores and threads, in words."""
    isa = environment.get("isa")
    told = f" ({' '.join(isa)})" if isa else ""
    cpu = f"{environment['cpu']}{told}, {environment['cores']} cores, {environment['threads']} thread(s)"
    return f"{environment['gpu']}, {cpu}" if environment.get("gpu") else cpu


def one_run(records: Iterable[Mapping[str, Any]], *more: str) -> None:
    """Check that all records agree in run, commit and machine, and in the fields ``more``.

    Raises:
        MixedRecordsError: they do not; the message says in what.
    """
    records = list(records)
    values = {name: sorted({str(record[name]) for record in records}) for name in (*OF_A_RUN, *more)}
    if mixed := [f"{len(v)} values of {name} ({', '.join(v)})" for name, v in values.items() if len(v) > 1]:
        raise MixedRecordsError(
            f"a table shows one run at one temperature; these records have {'; '.join(mixed)}"
        )


def summaries(run: Run, temperature: float) -> list[dict[str, Any]]:
    """Summaries of the arms at a temperature, by suite, in the order of the run; recomputed from the records.

    Raises:
        MixedRecordsError: the records are not of one run.
    """
    records = [record for record in run.records if record["temperature"] == temperature]
    one_run(records, "temperature")
    engines = {arm["name"]: arm["engine"] for arm in run.header["arms"]}

    def texts(arm: str, suite: str) -> dict[tuple[Any, ...], str]:
        """Hash of an arm's text to each question of a suite."""
        own = (one for one in records if one["model_id"] == arm and suite in (ALL, one["suite"]))
        return {(one["suite"], one["question_id"], one["repeat"]): one["text_sha256"] for one in own}

    plain = texts("autoregressive", ALL)
    found = summarise(records, engines, run.header["settings"]["bases"])
    for one in found:
        same = sum(plain.get(key) == text for key, text in texts(one["arm"], one["suite"]).items())
        one["as_plain"] = same if temperature == 0 and plain else None
    return sorted(found, key=lambda one: [*engines].index(one["arm"]))


def table(run: Run, temperature: float, suite: str) -> list[str]:
    """Markdown table of one suite at one temperature of one run; an arm that failed has its error for numbers."""
    failed = {arm["name"]: arm["error"] for arm in run.header["arms"] if arm["status"] == "failed"}
    rows = [one for one in summaries(run, temperature) if one["suite"] == suite and one["arm"] not in failed]
    right = [name for name in _ACCURACY if any(name in one["quality"] for one in rows)]
    same = any(one["as_plain"] is not None for one in rows)
    head = ["arm", "tokens/s", "÷ plain", "target calls/token", "mean drift", "trusted"]
    head += [name.replace("_at_", "@").replace("_", " ") for name in right] + ["text as plain"] * same
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for one in rows:
        calls, trusted, drift = one["target_calls_per_token"], one["trusted_share"], one["mean_drift"]
        cells = [
            f"`{one['arm']}`", f"{one['tokens_per_s']:.1f}", interval(one["speed_over"].get("autoregressive")),
            f"{calls[0]:.3f}" if calls else "–", "0" if one["lossless"] else interval(drift, 3),
            "–" if trusted is None else f"{trusted:.0%}", *(interval(one["quality"].get(name)) for name in right),
        ]  # fmt: skip
        cells += ["–" if one["as_plain"] is None else f"{one['as_plain']} of {one['answers']}"] * same
        lines.append(f"| {' | '.join(cells)} |")
    for arm, error in failed.items():
        lines.append(f"| `{arm}` | failed: {error.replace('|', '/')} {'| ' * (len(head) - 2)}|")
    return lines


def interval(value: Sequence[float | None] | None, digits: int = 2) -> str:
    """value [low, high]; the value alone if there is no interval."""
    if value is None or value[0] is None:
        return "–"
    middle, low, high = value
    return f"{middle:.{digits}f}" + ("" if low is None else f" [{low:.{digits}f}, {high:.{digits}f}]")


def where(run: Run) -> str:
    """Run, command, machine with load, versions, commit and date of a run: one line."""
    header, env = run.header, run.header["environment"]
    asked = ", ".join(f"{suite['asked']} prompts of {suite['name']}" for suite in header["suites"])
    return (
        f"Run `{header['run']}`: `{header['command']}`; {asked}; on {machine(env)}, load {env['load']} to "
        f"{header['load_at_end']}; torch {env['torch']}, transformers {env['transformers']}, "
        f"commit {header['commit']}, {header['created'][:10]}."
    )


def read(path: Path) -> Run:
    """A published run, checked.

    Raises:
        ValueError: it is damaged, or may not be published (``refusal``).
        MixedRecordsError: a record is of another run, commit or machine than the first line says.
    """
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    header, records = lines[0], lines[1:]
    if header.get("schema") != SCHEMA or header["run"] not in path.name or not records:
        raise ValueError(f"{path.name} is not a published run {SCHEMA}")
    if (why := refusal(header, header.get("failed", ()))) is not None:
        raise ValueError(f"{path.name}: {why}")
    first = {"run": header["run"], "commit": header["commit"], "machine": machine(header["environment"])}
    one_run([first, *records])
    return Run(header, records)


def published(topic: str) -> dict[str, Run]:
    """Name -> newest run of that name in a topic; older ones stay as files."""
    found = sorted((RESULTS / topic).glob(f"*{SUFFIX}"), key=lambda path: path.name)
    return {path.name.partition(".")[0]: read(path) for path in found}


def refusal(header: Mapping[str, Any], failed: Sequence[str] = ()) -> str | None:
    """Why a run with this first line may not be published; None if it may.

    Args:
        failed: names of the arms that are known to have failed.
    """
    command, commit, arms = header["command"], header["environment"]["commit"], header["arms"]
    if not commit or header["environment"]["dirty"]:
        return "it was made on uncommitted changes: commit them and run it again"
    if not in_history(commit):
        return f"its commit {commit} is not in history: run it again on a commit that is"
    named = [str(arm.get(field) or "") for arm in arms for field in ("name", "spec", "error")]
    for text in (command, *named):
        words = [text, *text.split(), *(shlex.split(text) if text is command else ())]
        if any(_ABSOLUTE.search(re.sub(r"https?://", "", word)) for word in words):
            return (
                f"it names an absolute path ({text}): run it with relative ones (a link to the data folder)"
            )
    broken = {arm["name"] for arm in arms if arm["status"] == "failed"}
    if unlike := min(broken ^ {*failed}, default=None):
        fix = (
            "failed: mend it, or name it with --failed"
            if unlike in broken
            else "has not failed: do not name it"
        )
        return f"its arm '{unlike}' {fix}"
    return None


@cache
def in_history(commit: str) -> bool:
    """Whether a commit is an ancestor of the present one; a shallow clone cannot tell, and says yes."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        return True
    return git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


def publish(folder: Path, topic: str, name: str | None = None, failed: Sequence[str] = ()) -> Path:
    """Write the records of a finished run, under ``name`` (the run's folder) in a topic; returns the file.

    Args:
        failed: names of its arms that have failed, which its tables then show.

    Raises:
        UserError: the run may not be published (``refusal``), was resumed, or is there already.
    """
    results = read_results(folder)
    environment, sessions = results["environment"], results.get("sessions") or []
    name = name or folder.resolve().name
    if len(sessions) != 1:
        raise UserError(
            f"the run in '{folder}' has {len(sessions)} sessions: run it again in one, with --restart"
        )
    if (why := refusal(results, failed)) is not None:
        raise UserError(f"the run in '{folder}' is not published: {why}")
    if not re.fullmatch(r"[a-z0-9-]+", name):
        raise UserError(f"'{name}' is not a name: give one of a-z, 0-9 and - with --name")
    kept = ("run", "command", "created", "seconds", "environment", "pair", "settings", "suites", "arms")
    header = {"schema": SCHEMA, **{key: results[key] for key in kept}}
    header |= {"failed": sorted(failed)} if failed else {}
    header |= {"commit": environment["commit"], "load_at_end": sessions[0]["load_at_end"]}
    shared = {"run": results["run"], "commit": environment["commit"], "machine": machine(environment)}
    lines = [header, *({**shared, **_record(row)} for row in results["rows"])]
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    path = RESULTS / topic / f"{name}.{results['run']}{SUFFIX}"
    if path.exists():
        raise UserError(f"'{path.name}' is published already, and published runs are not changed")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, gzip.compress(text.encode(), mtime=0))
    read(path)
    return path


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without its text, with what summaries read."""
    choice = {key: value for key, value in row["choices"][0].items() if key != "turns"}
    text = hashlib.sha256(json.dumps(row["token_ids"]).encode()).hexdigest()[:16]
    kept = {key: value for key, value in row.items() if key not in _LEFT_OUT}
    return {**kept, "choices": [choice], "arrivals_ms": [], "text_sha256": text}


def main() -> int:
    """Publish a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["publish"])
    parser.add_argument("run", type=Path, help="folder of a finished run of 'sprinter bench'")
    parser.add_argument("topic", help="folder of benchmarks/results")
    parser.add_argument("--name", help="what the run is called there; default: its folder's name")
    parser.add_argument(
        "--failed", metavar="ARM", nargs="+", default=(), help="arms that are known to have failed"
    )
    chosen = parser.parse_args()
    try:
        path = publish(chosen.run, chosen.topic, chosen.name, chosen.failed)
    except (UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
