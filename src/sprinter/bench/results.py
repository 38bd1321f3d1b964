"""Results of a run: one row per answer (Spec-Bench's format), summaries, and the environment.

``results.json`` is one object:

    schema       "sprinter-bench/1"
    run          id of the run: UTC time, commit, four hex digits
    sessions     one per call that asked: {"command", "environment", "began", "ended", "load_at_end"}
    created      UTC time, ISO 8601; ``seconds``: the run's total time; ``command``: its command line
    environment  machine, versions, commit (``sprinter.bench.environment``)
    pair         {"target" | "draft" | "gate" ...: {"name", "sha256", "parameters", "dtype"}}
    settings     temperatures, new_tokens, repeats, seed, top_k, top_p, min_p, ...
    suites       one entry per suite: ``Suite.facts()``, "asked" (prompts that fit) and "left_out" (those that did not;
                 later turns that did not, counted in every answer)
    arms         {"name", "spec", "engine", "versions", "status": "ok" | "failed", "error": line or null} in order
    rows         one per arm, suite, temperature, sample and repeat, as in the lines of ``rows.jsonl``:
                 {"question_id", "category", "model_id": arm, "choices": [{"index": 0, "turns": [text],
                 "decoding_steps": [n], "new_tokens": [n], "wall_time": [s], "accept_lengths": [n, ...]}], "tstamp",
                 "load", "suite", "temperature", "repeat", "lossless", "prompt_tokens": [n], "ttft_s": [s],
                 "arrivals_ms": [[...]], "target_calls": [n], "draft_steps": [n], "origins": {origin: n},
                 "drift_sum": x, "drift_tokens": n, "flops": {"passes", "tokens"} or null, "token_ids": [[...]],
                 "quality": {...},
                 "remote": {"round_trips", "paid_tokens", "sent_bytes", "received_bytes"} or {}}
    summary      one per arm, suite ("all": over all) and temperature; ``Interval``s are [value, low, high], with low
                 and high null for a single prompt:
                 {"arm", "engine", "suite", "temperature", "lossless", "prompts", "new_tokens", "tokens_per_s",
                 "speed_over": {base arm: Interval}, "ttft_ms": {"p50", "p95"}, "gap_ms": {"p50", "p95"},
                 "target_calls_per_token": Interval, "draft_steps_per_token", "mean_drift": Interval, "drift_coverage",
                 "drafted_share", "trusted_share", "tokens_per_round": Interval, "round_histogram": [n of 0, 1, ...],
                 "accepted_of_checked", "quality": {name: Interval},
                 "round_trips_per_token", "bytes_per_token", "paid_per_token": of a target on a server}
    analysis     statistics of the pair's laws along texts for the report, or null (``sprinter.bench.analysis``)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sprinter.errors import UserError
from sprinter.files import write_atomic, writing

__all__ = ["RESULTS", "SCHEMA", "read_results", "write_results", "write_spec_bench"]

SCHEMA = "sprinter-bench/1"
RESULTS = "results.json"
_LONGEST = 100  # maximum number of characters of a suite's or an arm's name in a file name
_SPEC_BENCH = ("question_id", "category", "answer_id", "model_id", "choices", "tstamp")


def write_results(directory: Path, results: Mapping[str, Any]) -> Path:
    """Write ``results.json`` atomically and return its path.

    Raises:
        UserError: the file cannot be written.
    """
    path = directory / RESULTS
    with writing(path):
        return write_atomic(path, json.dumps(results, ensure_ascii=False, allow_nan=False) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file, or the one in a directory.

    Raises:
        UserError: the file is missing, damaged, or has another schema.
    """
    file, fix = path / RESULTS if path.is_dir() else path, "give a results.json of 'sprinter bench'"
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read '{file}' ({error.strerror}): {fix}") from None
    except ValueError:
        raise UserError(f"'{file}' is not JSON: {fix}") from None
    schema = results.get("schema") if isinstance(results, dict) else None
    if schema != SCHEMA:
        raise UserError(f"'{file}' has schema {schema!r}, this version reads {SCHEMA!r}: run it again")
    return dict(results)


def write_spec_bench(directory: Path, results: Mapping[str, Any]) -> list[Path]:
    """Write a file per arm, suite and temperature in Spec-Bench's own format, for its ``evaluation/speed.py``.

    A repeat becomes an additional question. Files of an earlier run in the directory are deleted.

    Raises:
        UserError: the files cannot be written.
    """
    texts: dict[tuple[str, str, float], str] = {}
    for row in results["rows"]:
        record = {key: row[key] for key in _SPEC_BENCH if key in row}
        record["answer_id"] = "-".join(str(row[key]) for key in ("model_id", "question_id", "repeat"))
        key = (row["suite"], row["model_id"], row["temperature"])
        texts[key] = texts.get(key, "") + json.dumps(record, ensure_ascii=False) + "\n"
    files: dict[str, str] = {}
    for (suite, arm, temperature), text in texts.items():
        files[_file_name(suite, arm, temperature, files)] = text
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("*.jsonl"):
            if old.name not in files:
                old.unlink()
        return [write_atomic(directory / name, text) for name, text in files.items()]


def _file_name(suite: str, arm: str, temperature: float, taken: Iterable[str]) -> str:
    """A file name that every file system accepts; names that become equal are numbered."""
    plain = "-".join(re.sub(r"[^A-Za-z0-9_.=-]+", "_", part)[:_LONGEST] for part in (suite, arm))
    name, used = f"{plain}-temp-{temperature:g}.jsonl", {name.casefold() for name in taken}
    while name.casefold() in used:
        plain += "-2"
        name = f"{plain}-temp-{temperature:g}.jsonl"
    return name
