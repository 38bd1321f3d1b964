"""Forward passes of joined models that go straight to their parts: the same bits as the model's own, or not taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.gguf_families import UNWRITTEN, made
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaForCausalLM

from sprinter.models.cut import cut_output
from sprinter.models.quantised.quantise import quantise
from sprinter.models.quantised.straight import Straight
from sprinter.models.runner import make_runner

TEXT = torch.randint(1, 250, (3, 24), generator=torch.Generator().manual_seed(0))


def model_of(name: str) -> Any:
    model = made(name)
    quantise(model, "int8")
    return model


def passes(model: Any, straight: bool, layers: tuple[int, ...] = ()) -> tuple[list[Tensor], list[bool]]:
    """Outputs of several kinds of passes, and for each call of ``Straight`` whether it was taken."""
    rows = make_runner(model, batch=3, max_len=40)
    taken: list[bool] = []
    own = rows.straight
    assert isinstance(own, Straight)

    def noted(*given: Any, **named: Any) -> Any:
        found = own(*given, **named)
        taken.append(found is not None)
        return found

    rows.straight = noted if straight else None
    outs = [
        rows.extend(TEXT[:, :9], [9, 4, 6], hidden_layers=layers),
        rows.extend(TEXT[:, 9:10], hidden_layers=layers),
        rows.extend(TEXT[:2, 10:14], rows=[2, 0], hidden_layers=layers),
        rows.extend(TEXT[:, 14:20], [6, 1, 0], hidden_layers=layers),
    ]
    rows.rewind([6, 6, 6])
    outs += [rows.extend(TEXT[:, 20:23], hidden_layers=layers), rows.extend(TEXT[:, 23:], logits=False)]
    outs += [rows.extend(TEXT[:2, :4], rows=[2, 0], parents=[[9, 9, 10, 12], None], hidden_layers=layers)]
    return [part for one in outs for part in (one.logits, one.hidden, *one.layers) if part is not None], taken


STRAIGHT = (
    "llama",
    "llama-biases",
    "llama-tied",
    "mistral",
    "phi3",
    "phi3-partial",
    "qwen2",
    "qwen2-yarn",
    "qwen3",
)


@pytest.mark.parametrize("name", STRAIGHT)
def test_a_straight_pass_has_the_bits_of_the_usual_one(name: str) -> None:
    model = model_of(name)
    (usual, _), (straight, taken) = passes(model, False), passes(model, True)
    # The first pass makes the cache.
    assert taken == [False] + [True] * 6
    assert len(usual) == len(straight) == 13
    assert all(torch.equal(one, other) for one, other in zip(usual, straight, strict=True))
    for layers in ((1,), (1, 0), (-1, 0, 0)):
        (usual, _), (noted, taken) = passes(model, False, layers), passes(model, True, layers)
        assert taken == [False] + [True] * 6 and len(noted) == 13 + 6 * len(layers)
        assert all(torch.equal(one, other) for one, other in zip(usual, noted, strict=True))


@pytest.mark.parametrize("name", ["gemma2", "gemma3", *sorted(UNWRITTEN.keys() - STRAIGHT)])
def test_models_that_do_more_take_the_usual_way(name: str) -> None:
    assert Straight.of(model_of(name)) is None


def test_so_does_a_model_with_another_forward_and_one_that_is_not_joined() -> None:
    assert Straight.of(made("llama")) is None

    class Louder(LlamaForCausalLM):
        def forward(self, *given: Any, **named: Any) -> Any:
            out = super().forward(*given, **named)
            out.logits *= 2.0
            return out

    plain = made("llama")
    louder = Louder(plain.config).eval()
    louder.load_state_dict(plain.state_dict())
    quantise(louder, "int8")
    assert Straight.of(louder) is None


def test_a_cut_output_layer_goes_straight_too() -> None:
    model = made("llama")
    cut_output(model, torch.arange(0, 200, 2))
    quantise(model, "int8")
    (usual, _), (straight, taken) = passes(model, False), passes(model, True)
    assert taken.count(True) == 6 and all(map(torch.equal, usual, straight))


@pytest.mark.parametrize("where", ["", "model", "model.layers.0", "model.layers.1", "everywhere"])
def test_hooks_that_would_be_passed_over_end_it(where: str) -> None:
    model, seen = model_of("llama"), list[int]()

    def hook(module: nn.Module, args: Any) -> None:
        seen.append(len(args))

    if where == "everywhere":
        handle = register_module_forward_pre_hook(hook)
    else:
        handle = model.get_submodule(where).register_forward_pre_hook(hook)
    try:
        _, taken = passes(model, True)
    finally:
        handle.remove()
    assert not any(taken) and len(seen) >= 7
    assert any(passes(model, True)[1])


def test_hooks_on_parts_that_it_calls_run() -> None:
    model = model_of("llama")
    wanted, _ = passes(model, True)
    seen: list[str] = []
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        part = model.get_submodule(name)
        part.register_forward_hook(lambda *_, name=name: seen.append(name))
    found, taken = passes(model, True)
    assert any(taken) and all(map(torch.equal, wanted, found))
    assert seen.count("model.embed_tokens") == seen.count("model.norm") == 7
    assert seen.count("lm_head") == 6  # one pass wants no logits


def test_a_layer_that_is_replaced_is_noticed() -> None:
    model, other = model_of("llama"), model_of("llama-biases")
    before, _ = passes(model, True)
    model.model.layers[1] = other.model.layers[1]
    (usual, _), (straight, taken) = passes(model, False), passes(model, True)
    assert not any(taken) and all(map(torch.equal, usual, straight))
    assert not torch.equal(before[2], usual[2])


def test_another_forward_of_a_part_is_called() -> None:
    model = model_of("llama")
    model.model.norm.forward = lambda x: x * 0.0
    outs, taken = passes(model, True)
    assert taken.count(True) == 6 and not any(float(one.abs().sum()) for one in outs)
    model.model.forward = model.model.forward  # as a library that wraps it does
    assert not any(passes(model, True)[1])
