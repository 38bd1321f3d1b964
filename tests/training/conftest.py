"""A target and prompts for the tests of drafts and heads made for it."""

import json
from pathlib import Path

import pytest
from tests.training.drafting import saved_target

import sprinter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def pair(target: Path) -> sprinter.Pair:
    return sprinter.load_pair(target, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    records = [{"prompt": f"the thing {i}", "kind": "ab"[i % 2]} for i in range(30)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file
