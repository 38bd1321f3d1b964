"""Captured draft steps hold their heads: with other heads they are captured anew."""

from typing import Any

import pytest
import torch
from tests.models.fake_cuda import fake_cuda
from tests.models.tiny import CONTEXT, VOCAB, tiny
from torch import nn

import sprinter
from sprinter.heads.head import Head, HeadConfig
from sprinter.models import choose
from sprinter.models.capture.graphs import GraphUnits
from sprinter.models.pair import LoadedModel, LoadedPair


def gate(bias: float, architecture: str = "linear") -> Head:
    config = HeadConfig(32, "qwen2", "llama", architecture=architecture)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        head = Head(config, config.network())
    last = head.network if architecture == "linear" else head.network.out
    assert isinstance(last.bias, nn.Parameter)
    last.bias.data.fill_(bias)
    return head


def pair_with(head: Head) -> sprinter.Pair:
    """Pairs over the same two models."""
    target, draft = (
        LoadedModel(tiny(kind), kind, None, CONTEXT, VOCAB, 32, (), compile=True)
        for kind in ("llama", "qwen2")
    )
    return sprinter.Pair(LoadedPair(target, draft, None), head)


def origins(pair: sprinter.Pair) -> set[str]:
    out = pair.generate([3, 9, 11], method="sprinter(tau=0.5, cap=4)", max_new_tokens=12, seed=1)
    return {token.origin for token in out.tokens}


def test_graphs_have_each_their_own_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    made: list[GraphUnits] = []

    def units(model: Any, windows: Any, must: bool, fuse: object) -> GraphUnits:
        made.append(GraphUnits(model, windows, must))  # not fused: interpreted, the kernels take minutes
        return made[-1]

    monkeypatch.setattr(choose, "capture_kind", lambda model: ("graphs", "CUDA graphs"))
    monkeypatch.setattr(choose, "GraphUnits", units)
    pair = pair_with(gate(50.0))
    assert "trusted" in origins(pair)
    drafts = next(each for each in made if each.model is tiny("qwen2"))
    held = len(drafts._graphs)
    assert "trusted" in origins(pair) and len(drafts._graphs) == held  # a request more captures nothing
    pair.heads["gate"] = gate(-50.0)
    assert "trusted" not in origins(pair) and len(drafts._graphs) > held
