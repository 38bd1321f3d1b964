"""Code of what follows a forward pass: one file for all models of a size, without their weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_families import made

from sprinter.engine.captured import TargetUnit, _like
from sprinter.models.capture.compiled import cache_dir
from sprinter.models.capture.results import JoinedRunner, ResultUnits
from sprinter.models.capture.runner import PASS, READ
from sprinter.models.capture.together import _bytes
from sprinter.models.choose import capture_kind
from sprinter.models.quantised.quantise import quantise
from sprinter.models.quantised.straight import Straight
from sprinter.models.runner import make_runner

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPRINTER_CACHE", str(tmp_path_factory.mktemp("compiled")))
        yield cache_dir()


def runner(name: str, compile: bool | None = True, batch: int = 2) -> JoinedRunner:
    model: Any = made(name)
    quantise(model, "int8")
    assert capture_kind(model)[0] == "kernels"
    rows = make_runner(model, batch=batch, max_len=40, compile=compile)
    assert isinstance(rows, JoinedRunner)
    return rows


def unit(rows: JoinedRunner) -> TargetUnit:
    return TargetUnit(rows.vocab_size, truncates=False, raw=False)


def test_models_of_one_size_share_one_file(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens, counts = torch.tensor([[3, 9, 11], [5, 1, 0]]), [3, 2]
    with caplog.at_level(logging.WARNING, "sprinter"):
        for name, compile in (("llama", True), ("qwen2", None)):  # the second finds what the first compiled
            rows = runner(name, compile)
            extras = [x.expand(2, 4).contiguous() for x in _like(rows)]
            found = rows.run(unit(rows), tokens, counts, extras)
            assert found is not None and rows.lengths == counts
            rows.rewind([0, 0])
            logits = rows.extend(tokens, counts).logits
            assert logits is not None
            for i, count in enumerate(counts):
                wanted = logits[i, :count].softmax(-1)
                torch.testing.assert_close(
                    found[0][i, :count], wanted.to(found[0].dtype), atol=1e-6, rtol=1e-5
                )
                torch.testing.assert_close(found[1][i, :count], logits[i, :count].amax(-1))
    (path,) = own_cache.glob("*.pt2")
    assert path.name.startswith("target-results-") and path.stat().st_size < 4 << 20
    said = [
        record.getMessage() for record in caplog.records if "what follows the model" in record.getMessage()
    ]
    assert said == ["compiling the target's passes (what follows the model), once; some ten seconds"]


def test_what_is_missing_is_told_once() -> None:
    rows = runner("llama")
    (recipe,) = rows.missing(unit(rows), _like(rows))
    assert recipe.model is None and recipe.name == "target-results" and _bytes(recipe) == 0
    assert rows.missing(unit(rows), _like(rows)) == []
    assert rows.missing(PASS, []) == rows.missing(READ, []) == []
    assert runner("llama", None).missing(unit(rows), _like(rows)) == []


def test_results_over_large_vocabularies_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = runner("llama").model
    monkeypatch.setattr("sprinter.models.choose.MOST_TOKENS", model.config.vocab_size - 1)
    rows = make_runner(model, max_len=40, compile=True)
    assert not isinstance(rows, JoinedRunner) and isinstance(rows.straight, Straight)


def test_other_sizes_are_other_code() -> None:
    one, other = runner("llama"), runner("llama")
    other.model.lm_head.out_features += 1  # type: ignore[attr-defined, operator]
    asked = unit(one), _like(one)
    assert len(one.missing(*asked)) == 1 and one.missing(*asked) == []
    one.model.lm_head.out_features += 1  # as a model whose vocabulary is extended between two texts
    assert len(one.missing(*asked)) == 1
    one.model.lm_head.out_features -= 1
    keys = [
        ResultUnits(rows.model, True)._recipe(unit(one), _like(rows)).facts["shape"] for rows in (one, other)
    ]
    assert keys[0] != keys[1]
