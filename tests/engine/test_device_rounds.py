"""Draft runs that are one launch: texts, laws and counts of single steps; launches and synchronisations."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.models.fake_cuda import Counted, fake_cuda
from tests.models.test_graphs import runner_of
from tests.models.tiny import CONTEXT, VOCAB, fresh, tiny
from transformers import PreTrainedModel

import sprinter
from sprinter.engine.backends.base import Drafted, DraftPlan, DraftRow
from sprinter.engine.backends.cuda_graph import GraphBackend
from sprinter.engine.engine import Engine
from sprinter.heads.head import Head, HeadConfig
from sprinter.laws import Sampling
from sprinter.models import choose
from sprinter.models.capture.graphs import GraphUnits
from sprinter.models.pair import LoadedModel, LoadedPair
from sprinter.random import AddressedDraws

PROMPTS = [[3, 9, 11], [7, 5, 20, 31, 8], [40, 2]]


def gate() -> Head:
    config = HeadConfig(32, "qwen2", "llama", architecture="linear")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        head = Head(config, config.network())
        for weight in head.parameters():
            weight.detach().normal_(0, 0.2)
    return head


@cache
def draft() -> PreTrainedModel:
    """Like the target, with some noise: drafts are accepted and rejected."""
    model = fresh("llama")
    model.load_state_dict(tiny("llama").state_dict())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return model


def pair_of(compile: bool) -> sprinter.Pair:
    target, small = (
        LoadedModel(model, name, None, CONTEXT, VOCAB, 32, (), compile=compile)
        for model, name in ((tiny("llama"), "llama"), (draft(), "qwen2"))
    )
    return sprinter.Pair(LoadedPair(target, small, None), gate())


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> sprinter.Pair:
    """A pair whose passes are graphs, without kernels of their own."""
    fake_cuda(monkeypatch)
    monkeypatch.setattr(choose, "capture_kind", lambda model: ("graphs", "CUDA graphs"))
    monkeypatch.setattr(
        choose, "GraphUnits", lambda model, windows, must, _: GraphUnits(model, windows, must)
    )
    return pair_of(True)


def assert_same(one: sprinter.Generation, other: sprinter.Generation) -> None:
    """What must not depend on how passes run."""
    assert [(x.id, x.origin, x.round) for x in one.tokens] == [
        (x.id, x.origin, x.round) for x in other.tokens
    ]
    for name in ("drift", "ratio", "gate_score"):
        found, wanted = (
            [-1.0 if (value := getattr(x, name)) is None else value for x in each.tokens]
            for each in (one, other)
        )
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert (one.accept_lengths, one.finish_reason) == (other.accept_lengths, other.finish_reason)
    for name in (
        "target_calls",
        "drafted",
        "accepted",
        "checked",
        "target_tokens",
        "draft_steps",
        "draft_tokens",
    ):
        assert getattr(one.stats, name) == getattr(other.stats, name), name


METHODS = {
    "speculative(gamma=4)": {},
    "speculative(gamma=3)": {"temperature": 0.0},
    "svip(h=0.5)": {"ahead": 5},
    "adaedl": {"ahead": 3, "top_k": 20, "top_p": 0.9},
    "sprinter(tau=0.5, cap=6)": {"ahead": 4},
    "trust=gate(tau=0.5),stop=untrusted(tail=1),cap=7": {"ahead": 7, "temperature": 0.7},
}


@pytest.mark.parametrize("method", METHODS)
def test_texts_of_ragged_rows_are_those_of_single_steps(method: str, graphed: sprinter.Pair) -> None:
    """Also the counts: no step is counted behind a token at which the device has ended the run."""
    options: dict[str, Any] = {
        "method": method,
        "max_new_tokens": 14,
        "never_slower": False,
        **METHODS[method],
    }
    plain = pair_of(False)
    engine = Engine(graphed, rows=3, max_len=CONTEXT)
    ids = [engine.add(prompt, seed=i, **options) for i, prompt in enumerate(PROMPTS)]
    found = engine.finish()
    options["ahead"] = 1
    for i, (id, prompt) in enumerate(zip(ids, PROMPTS, strict=True)):
        assert_same(found[id], plain.generate(prompt, seed=i, **options))


def test_a_run_is_one_launch_and_one_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    rows = GraphBackend(runner_of("llama", 3, CONTEXT), VOCAB, "draft")
    rows.runner.extend(torch.tensor([[3, 9, 11, 4]] * 3), logits=False)
    plan = DraftPlan(Sampling(0.8, 9), ("entropy",), {"gate": gate()}, raw=True)
    asked = [DraftRow(i, [5], 5, 1, AddressedDraws(i), plan, count=n) for i, n in enumerate((2, 5, 4))]
    rows.draft(asked)
    rows.runner.rewind([4] * 3)
    with Counted() as count:
        made = rows.draft(asked)
    assert [len(one.tokens) for one in made if isinstance(one, Drafted)] == [2, 5, 4]
    assert rows.runner.lengths == [6, 9, 8]
    assert (count.launches, count.waits) == (1, 1)
