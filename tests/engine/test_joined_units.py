"""Steps over models with joined layers: one call of the kernels, then compiled results; the same as eager steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.engine.test_captured import PROMPT, SAMPLINGS, asked_of, same
from tests.models.gguf_families import made
from torch import Tensor

from sprinter.decode.signals import SIGNALS
from sprinter.engine.captured import CapturedDraftSteps, CapturedTargetPasses
from sprinter.engine.rows import CacheRows, Feed
from sprinter.engine.steps import DraftPlan, DraftRow, EagerDraftSteps, EagerTargetPasses, TargetRow
from sprinter.errors import SprinterError
from sprinter.heads.head import Head, HeadConfig
from sprinter.laws import Sampling
from sprinter.models.capture.compiled import Compiled, Recipe
from sprinter.models.capture.results import JoinedRunner, _AfterPass
from sprinter.models.quantised.quantise import quantise
from sprinter.models.runner import make_runner
from sprinter.random import AddressedDraws

VOCAB = made("llama").config.vocab_size


def target() -> Any:
    model = made("llama")
    quantise(model, "int8")
    return model


def gate() -> Head:
    features = ("hidden", "entropy", "max_q", "top_q(k=4)", "position", "temperature")
    config = HeadConfig(64, "draft", "target", architecture="mlp", features=features, width=8)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Head(config, config.network())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Code of units runs as plain Python; the names of the units that were asked for."""
    names: list[str] = []

    def find(recipe: Recipe, may_compile: bool) -> Compiled | None:
        assert recipe.model is None  # no weight of the model belongs to the code
        if not may_compile:
            return None
        module: Any = _AfterPass(recipe.unit)  # type: ignore[arg-type]

        def call(inputs: list[Tensor]) -> list[Tensor]:
            names.append(recipe.name)
            assert all(one.is_contiguous() for one in inputs)
            return list(module(*inputs[:2], inputs[2:]))

        return call

    monkeypatch.setattr("sprinter.models.capture.results.find_compiled", find)
    monkeypatch.setattr("sprinter.engine.captured.compile_together", lambda recipes: None)
    return names


def both(batch: int, compile: bool | None = True) -> tuple[CacheRows, CacheRows]:
    """Rows of an eager and of a unit runner that hold the same text."""
    model, found = target(), []
    for capture in (False, compile):
        rows = CacheRows(make_runner(model, batch=batch, max_len=64, compile=capture), VOCAB, "draft")
        rows.runner.extend(torch.tensor([PROMPT] * batch), logits=False)
        found.append(rows)
    assert isinstance(found[1].runner, JoinedRunner) and not isinstance(found[0].runner, JoinedRunner)
    return found[0], found[1]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("batch", [1, 3])
def test_draft_steps_are_those_of_the_eager_way(sampling: Sampling, batch: int, calls: list[str]) -> None:
    eager, rows = both(batch)
    plan = DraftPlan(sampling, tuple(SIGNALS), {"gate": gate()}, raw=True)
    for seed in range(8):
        for each in (eager, rows):
            each.runner.rewind([4] * batch)
        asked = asked_of(batch, seed, plan)
        same(CapturedDraftSteps(rows)(asked), EagerDraftSteps(eager)(asked))
        assert rows.runner.lengths == eager.runner.lengths
    assert len(calls) > 8 and set(calls) == {"draft-results"}


def scores(rows: CacheRows, steps: Any, asked: Sequence[TargetRow]) -> list[Any]:
    rows.runner.rewind([4] * 3)
    return list(steps(rows)(asked))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_target_passes_are_those_of_the_eager_way(sampling: Sampling, calls: list[str]) -> None:
    eager, rows = both(3)
    for tokens in ([1, 2, 3], [7], list(range(20))):
        asked = [TargetRow(Feed(0, 4, tokens), sampling, True), TargetRow(Feed(2, 4, [7]), Sampling(0.4))]
        found = scores(rows, CapturedTargetPasses, asked), scores(eager, EagerTargetPasses, asked)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one.laws, other.laws, rtol=0, atol=1e-5)
            assert one.raw is not None or other.raw is None
        assert rows.runner.lengths == eager.runner.lengths == [4 + len(tokens), 4, 5]
    assert calls == ["target-results"] * 3


def test_logits_that_are_not_finite_are_an_error_and_the_rows_stay(calls: list[str]) -> None:
    _, rows = both(1)
    rows.runner.model.model.norm.weight.data[3] = torch.nan  # type: ignore[attr-defined]
    row = DraftRow(0, [5], 5, 1, AddressedDraws(1), DraftPlan(Sampling()), count=3)
    (error,) = CapturedDraftSteps(rows)([row])
    assert isinstance(error, SprinterError) and "logits are NaN at position 4" in str(error)
    (error,) = CapturedTargetPasses(rows)([TargetRow(Feed(0, 4, [5, 6]), Sampling())])
    assert isinstance(error, SprinterError) and rows.runner.lengths == [4] and len(calls) == 4


def test_without_code_on_the_disk_steps_are_eager(calls: list[str]) -> None:
    eager, rows = both(1, compile=None)
    asked = [DraftRow(0, [5], 5, 1, AddressedDraws(1), DraftPlan(Sampling()), count=3)]
    same(CapturedDraftSteps(rows)(asked), EagerDraftSteps(eager)(asked))
    passes = [TargetRow(Feed(0, 7, [5, 6]), Sampling())]
    one, other = CapturedTargetPasses(rows)(passes)[0], EagerTargetPasses(eager)(passes)[0]
    assert torch.equal(one.laws, other.laws) and not calls  # type: ignore[union-attr]


def test_long_feeds_go_the_eager_way(calls: list[str]) -> None:
    model = target()
    runner = make_runner(model, max_len=600, compile=True)
    feed = [TargetRow(Feed(0, 0, [1 + i % 200 for i in range(530)]), Sampling())]
    (scored,) = CapturedTargetPasses(CacheRows(runner, VOCAB, "target"))(feed)
    assert scored.laws.shape == (530, VOCAB) and not calls  # type: ignore[union-attr]
    assert runner.lengths == [530]
