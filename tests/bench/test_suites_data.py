"""The named suites over their real files, where SPRINTER_DATA names the directory that holds them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sprinter.bench.suites import group_of_spec_bench, load_suite

DATA = os.environ.get("SPRINTER_DATA", "")
pytestmark = [pytest.mark.skipif(not DATA, reason="SPRINTER_DATA is not set"), pytest.mark.slow]

COUNTS = {
    "wiki-summary": 991, "lm1b": 11_338, "heldout": 685, "wikipedia": 546, "wikinews": 139, "tinystories": 11,
    "spec-bench": 384, "mt-bench": 63, "vicuna": 64, "gsm8k": 1055, "humaneval": 131, "commonsenseqa": 977,
    "mmlu": 11_263,
}  # fmt: skip


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_real_files(name: str, count: int) -> None:
    suite = load_suite(name, Path(DATA))
    assert len(suite.samples) == count
    if name in ("gsm8k", "humaneval", "commonsenseqa", "mmlu"):
        assert all(sample.check and sample.check.answer for sample in suite.samples)


def test_sixty_prompts_of_spec_bench_are_ten_of_each_group() -> None:
    samples = load_suite("spec-bench", Path(DATA), limit=60).samples
    groups = [group_of_spec_bench(sample.category) for sample in samples]
    assert {group: groups.count(group) for group in groups} == dict.fromkeys(groups[:6], 10)
