"""The reference of metrics and records against the code: each field and each metric has a row, and no row is left."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

import sprinter
from sprinter.bench import results

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
RESULTS = ROOT / "benchmarks" / "results"


def part(page: str, heading: str) -> str:
    """The text of a section of the second level."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def fields(section: str) -> list[str]:
    """The names in the first cells of a table."""
    cells = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def out() -> sprinter.Generation:
    return sprinter.load_pair().generate("The river rises in", max_new_tokens=4, seed=1)


def test_each_count_of_a_text_has_a_row(out: sprinter.Generation) -> None:
    stats, section = out.to_dict()["stats"], part("metrics.md", "Of a text")
    assert sorted(fields(section)) == sorted([*stats, "remote"])
    for name in [*stats["times"], "round_trips", "paid_tokens", "sent_bytes", "received_bytes"]:
        assert f"`{name}`" in section
    assert all(hasattr(out.stats, name) for name in ("flops_passes", "flops_tokens", *stats["times"]))


def test_each_field_of_a_text_has_a_row(out: sprinter.Generation) -> None:
    record = out.to_dict()
    assert fields(part("records.md", "A text")) == list(record)
    assert list(record["version"]) == ["sprinter", "torch", "transformers"]


def test_each_metric_of_the_server_has_its_row() -> None:
    pytest.importorskip("prometheus_client")
    from sprinter.serve.prometheus import ServeMetrics, ServeState

    metrics = ServeMetrics(lambda: [ServeState("m", 0, 0, 1, True, 0.0)])
    metrics._drafted["m"] = (2, 1)
    metrics._drift.labels("m", "svip").inc(0.1)
    metrics._scored.labels("m", "svip").inc(2)
    wanted = []
    for collector in metrics._registry._collector_to_names:
        for family in collector.collect():
            own = family.samples[0].labels if collector is metrics else collector._labelnames
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(f"`{one}`" for one in own) or "–"
            wanted.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    rows = [line for line in part("metrics.md", "Of a server").splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(wanted) and len(rows) > 20


def test_fields_of_a_run_are_those_that_the_bench_documents() -> None:
    documented = re.findall(r"^    (\w+) {2,}\S", results.__doc__ or "", re.MULTILINE)
    section = part("records.md", "A run of the bench")
    named = fields(section)
    assert sorted(named) == sorted([*documented, "command", "seconds"]) and len(named) > 10
    assert re.search(rf'^\| `schema` \| "{results.SCHEMA}"', section, re.MULTILINE)


def test_a_published_run_has_the_fields_that_the_page_names() -> None:
    bench, section = part("records.md", "A run of the bench"), part("records.md", "Published results")
    path = next((RESULTS / "real").glob("readme-real.*.jsonl.gz"))
    run, *rows = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    assert run["schema"] in section and rows
    assert {name for name in run if f"`{name}`" not in section} == set()
    unnamed = {*rows[0], *rows[0]["choices"][0]} - {"index"}
    assert {name for name in unnamed if f"`{name}`" not in bench + section} == set()


def test_a_result_of_a_script_has_the_fields_that_the_page_names() -> None:
    section = part("records.md", "Published results")
    for path in RESULTS.glob("papers/*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        named = ("paper", "command", "environment", "pair", "settings", "verdicts", "parts")
        assert {*named} <= {*record} and all(f"`{name}`" in section for name in named)
