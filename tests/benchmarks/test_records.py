"""scripts/records.py: published runs, and tables that show one of them."""

from __future__ import annotations

import gzip
import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.bench.rows import rows_of

from sprinter.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "sprinter bench --config benchmarks/configs/readme-builtin.toml --data data --out run"


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script as a module, with a folder of its own for what it publishes."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("records")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "published")
    return module


@pytest.fixture
def results(tmp_path: Path) -> dict[str, Any]:
    """A finished run of two arms on four prompts, at two temperatures."""
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    environment = {
        "cpu": "AMD EPYC", "isa": ["avx2", "avx512f"], "load": 0.1, "cores": 2, "threads": 2, "gpu": None,
        "torch": "2.13.0", "transformers": "5.23.0", "commit": head.stdout.strip(), "dirty": False,
    }  # fmt: skip
    times = np.array([1.0, 1.1, 0.9, 1.0])
    rows = [
        one
        for temperature in (0.0, 1.0)
        for one in [
            *rows_of("autoregressive", times, temperature=temperature, calls=20),
            *rows_of("sprinter", times / 2, temperature=temperature, drift=0.05),
        ]
    ]
    rows[4]["token_ids"] = [[7] * 20]
    for row in rows:
        number = int(row["question_id"][1:])
        row["quality"] = {"pass_at_1": number % 2} if number < 2 else {"exact_match": 1.0}
    arms = [{"name": name, "engine": "sprinter", "status": "ok"} for name in ("autoregressive", "sprinter")]
    return {
        "schema": "sprinter-bench/1", "run": "20260101-000000-abc-0001", "command": COMMAND, "seconds": 9.0,
        "sessions": [{"command": COMMAND, "load_at_end": 0.2}], "created": "2026-01-01T00:00:00+00:00",
        "environment": environment, "pair": {}, "settings": {"bases": ["autoregressive"]},
        "suites": [{"name": "toy", "asked": 4}], "arms": arms, "rows": rows,
    }  # fmt: skip


def written(folder: Path, results: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_the_table_that_the_readme_showed_is_a_mixture(records: Any) -> None:
    """Its script kept the last row of an arm and suite: 16 arms of a run at T = 0.7, and one of a greedy run."""
    lines = (Path(__file__).parent / "readme_before.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    shown = {(row["model_id"], row["suite"]): row for row in rows}
    speeds = {
        arm: (shown[arm, "humaneval"]["tokens_per_s"], shown[arm, "gsm8k"]["tokens_per_s"])
        for arm, _ in shown
    }
    assert speeds["speculative(gamma=5)"] == (17.8, 14.7) and speeds["sprinter"] == (38.7, 42.5)
    with pytest.raises(
        records.MixedRecordsError, match=r"2 values of run .*2 values of temperature \(0\.0, 0\.7\)"
    ):
        records.one_run(shown.values(), "temperature")
    for temperature in (0.0, 0.7):
        records.one_run([row for row in rows if row["temperature"] == temperature], "temperature")


def test_a_run_is_published_and_its_tables_are_made_of_its_records(
    records: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    path = records.publish(written(tmp_path / "toy", results), "methods")
    assert path.name == "toy.20260101-000000-abc-0001.jsonl.gz"
    run = records.published("methods")["toy"]
    assert "text" not in gzip.decompress(path.read_bytes()).decode().replace("text_sha256", "")
    first = run.records[0]
    assert first["run"] == results["run"] and first["commit"] == results["environment"]["commit"]
    assert first["machine"] == "AMD EPYC (avx2 avx512f), 2 cores, 2 thread(s)"
    assert run.temperatures == [0.0, 1.0] and run.suites == ["toy"]
    greedy, drawn = (records.table(run, temperature, "toy") for temperature in run.temperatures)
    plain = "| `autoregressive` | 20.0 | 1.00 [1.00, 1.00] | 1.000 | 0 | 0% |"
    assert greedy[2] == f"{plain} 0.50 [0.00, 1.00] | 1.00 [1.00, 1.00] | 4 of 4 |"
    assert greedy[3].startswith("| `sprinter` | 40.0 | 2.00 [2.00, 2.00] | 0.500 | 0.050 [0.050, 0.050] |")
    assert greedy[0].endswith("| trusted | pass@1 | exact match | text as plain |")
    assert greedy[3].endswith("| 3 of 4 |") and "text as plain" not in drawn[0]
    told = records.where(run)
    assert f"`{COMMAND}`" in told and "load 0.1 to 0.2" in told and "4 prompts of toy" in told
    with pytest.raises(UserError, match="published already"):
        records.publish(tmp_path / "toy", "methods")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": {"dirty": True}}, "uncommitted changes"),
        ({"environment": {"commit": None}}, "uncommitted changes"),
        ({"environment": {"commit": "0123456789ab"}}, "not in history"),
        ({"command": "sprinter bench --data /home/me/data"}, "absolute path"),
        *(
            ({"command": f"sprinter bench {word}"}, "absolute path")
            for word in (
                "--data=/home/me/data",
                "-o/home/me",
                "-o /home/me",
                "--out=~/run",
                "--suite a:/home/q.txt:3",
                "'vllm:heads(head=/home/me)'",
                "file:///home/me",
                "--data 'file:data'",
                "@/home/me",
                "'$HOME/data'",
                r"'C:\Users\me'",
                "//host/data",
                "'a,/home/me'",
            )
        ),
        ({"arms": [{"name": "a", "spec": "heads(head=/home/me)", "status": "ok"}]}, "absolute path"),
        ({"arms": [{"name": "a", "status": "failed", "error": "no '/home/me'"}]}, "absolute path"),
        (
            {"arms": [{"name": "svip", "status": "failed", "error": "no draft"}]},
            "its arm 'svip' failed: mend it",
        ),
        ({"sessions": [{}, {}]}, "2 sessions"),
        ({"sessions": []}, "0 sessions"),
    ],
)
def test_what_is_not_published(
    records: Any, results: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    for key, value in change.items():
        results[key] = {**results[key], **value} if isinstance(value, dict) else value
    with pytest.raises(UserError, match=message):
        records.publish(written(tmp_path / "toy", results), "methods")


@pytest.mark.parametrize(
    ("field", "value"), [("run", "another"), ("commit", "another"), ("machine", "Xeon, 2 cores, 1 thread(s)")]
)
def test_a_record_of_another_run_is_found(
    records: Any, results: dict[str, Any], tmp_path: Path, field: str, value: str
) -> None:
    path = records.publish(written(tmp_path / "toy", results), "methods")
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    lines[-1][field] = value
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    with pytest.raises(records.MixedRecordsError, match=f"2 values of {field}"):
        records.read(path)


@pytest.mark.parametrize(
    "words",
    [
        "--data data --out .work/run-1",
        "--target org/name/f.gguf",
        "--suite 'a/*.txt:3'",
        "--url http://host:8000/v1",
    ],
)
def test_relative_paths_and_urls_are_published(
    records: Any, results: dict[str, Any], tmp_path: Path, words: str
) -> None:
    results["command"] = f"sprinter bench {words} -o run/a~b"
    assert records.publish(written(tmp_path / "toy", results), "methods").exists()


def test_records_of_two_temperatures_make_no_table(
    records: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    run = records.read(records.publish(written(tmp_path / "toy", results), "methods"))
    with pytest.raises(records.MixedRecordsError, match=r"2 values of temperature \(0.0, 1.0\)"):
        records.one_run(run.records, "temperature")


def test_an_arm_that_failed_has_its_error_in_the_table(
    records: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    error = "out of memory | at once"
    results["arms"][1] |= {"status": "failed", "error": error}
    results["arms"].append({"name": "svip", "engine": "sprinter", "status": "failed", "error": "no draft"})
    folder, broken = written(tmp_path / "run", results), ["sprinter", "svip"]
    for failed, said in (([], "'sprinter' failed"), (["svip"], "'sprinter' failed"),
                         ([*broken, "x"], "'x' has not failed")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            records.publish(folder, "toy", failed=failed)
    run = records.read(records.publish(folder, "toy", failed=broken))
    assert run.header["failed"] == broken
    rows = records.table(run, 1.0, "toy")[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| `autoregressive`", "| `sprinter`", "| `svip`"]
    assert (
        rows[1].startswith("| `sprinter` | failed: out of memory / at once |")
        and "failed: no draft" in rows[2]
    )
    assert len({row.count("|") for row in records.table(run, 1.0, "toy")}) == 1
