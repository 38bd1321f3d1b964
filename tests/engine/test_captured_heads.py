"""Captured draft steps hold their heads: other heads, or heads that change, are other code."""

from weakref import WeakKeyDictionary

import pytest
import torch
from tests.models.eager_units import FrozenCode
from tests.models.fake_cuda import fake_cuda
from tests.models.tiny import CONTEXT, VOCAB, tiny
from torch import nn

import sprinter
from sprinter.engine.captured import DraftUnit
from sprinter.heads.head import Head, HeadConfig
from sprinter.models import choose
from sprinter.models.capture.compiled import Recipe
from sprinter.models.capture.compiled import _key as compiled_key
from sprinter.models.capture.graphs import GraphUnits
from sprinter.models.capture.units import CompiledUnits
from sprinter.models.choose import _choose
from sprinter.models.pair import LoadedModel, LoadedPair

CPU = torch.device("cpu")


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> FrozenCode:
    return FrozenCode(monkeypatch)


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


def test_pairs_over_one_draft_have_each_their_own_gate(frozen: FrozenCode) -> None:
    pairs = [pair_with(gate(bias)) for bias in (50.0, -50.0)]
    for _ in range(3):
        assert "trusted" in origins(pairs[0])
        assert "trusted" not in origins(pairs[1])


def test_a_gate_that_changes_is_another_gate(frozen: FrozenCode) -> None:
    head = gate(50.0)
    pair = pair_with(head)
    assert isinstance(head.network.bias, nn.Parameter)
    for bias, trusts in ((50.0, True), (-50.0, False), (50.0, True)):
        head.network.bias.data.fill_(bias)
        assert ("trusted" in origins(pair)) == trusts
    looks = len(frozen.looks)
    assert origins(pair) and len(frozen.looks) == looks


def test_a_gate_that_changes_between_texts_of_an_engine(frozen: FrozenCode) -> None:
    head = gate(50.0)
    assert isinstance(head.network.bias, nn.Parameter)
    seen = []
    with sprinter.Engine(pair_with(head), rows=2, max_len=32) as engine:
        for bias in (50.0, -50.0):
            with torch.no_grad():
                head.network.bias.fill_(bias)
            engine.add([3, 9, 11], method="sprinter(tau=0.5, cap=4)", max_new_tokens=12, seed=1)
            while engine.unfinished:
                seen += [
                    {token.origin for token in event.generation.tokens}
                    for event in engine.step()
                    if event.generation
                ]
    assert "trusted" in seen[0] and "trusted" not in seen[1]


def test_heads_of_another_architecture_are_other_code(frozen: FrozenCode) -> None:
    heads = {kind: gate(0.0, kind) for kind in ("mlp", "ffn")}
    heads["ffn"].load_state_dict(heads["mlp"].state_dict())
    units, keys = CompiledUnits(tiny("qwen2"), {"": None}, True), []
    swapped = gate(0.0, "mlp")
    swapped.network._activation = nn.functional.tanh
    for head in (*heads.values(), swapped):
        unit = DraftUnit(VOCAB, False, {"gate": head}, CPU)
        keys.append(compiled_key(units._recipe(unit, "one", (), ())))
    assert len(set(keys)) == 3


def test_what_a_text_needs_is_compiled_together(frozen: FrozenCode, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Recipe] = []
    monkeypatch.setattr("sprinter.models.capture.units._shelves", WeakKeyDictionary())
    monkeypatch.setattr("sprinter.engine.captured.compile_together", told.extend)
    pair = pair_with(gate(0.0))
    origins(pair)
    assert [one.name for one in told] == [
        "read-any", "read-any", "target-any", "target-one", "draft-any", "draft-one",
    ]  # fmt: skip
    assert {compiled_key(one) for one in told} >= set(frozen.looks)
    origins(pair)
    assert len(told) == 6


def test_few_codes_of_one_unit_are_held(frozen: FrozenCode) -> None:
    pairs = [pair_with(gate(float(bias))) for bias in range(8)]
    for pair in pairs:
        origins(pair)
    looks = len(frozen.looks)
    origins(pairs[-1])
    assert len(frozen.looks) == looks
    origins(pairs[0])
    assert len(frozen.looks) > looks  # its code was dropped, and read again


def test_graphs_have_each_their_own_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    made: list[GraphUnits] = []

    def units(model: object, windows: object, compile: object) -> GraphUnits:
        assert model in (tiny("llama"), tiny("qwen2"))
        made.append(GraphUnits(model, _choose(model).windows, True))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(choose, "_units", units)
    pair = pair_with(gate(50.0))
    assert "trusted" in origins(pair)
    drafts = next(each for each in made if each.model is tiny("qwen2"))
    held = len(drafts._graphs)
    assert "trusted" in origins(pair) and len(drafts._graphs) == held  # a request more captures nothing
    pair.heads["gate"] = gate(-50.0)
    assert "trusted" not in origins(pair) and len(drafts._graphs) > held
