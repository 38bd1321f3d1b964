"""Linear layers by oneDNN: the same laws, also after weights have changed, and the given model stays as it is."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sprinter.models.choose import make_runner, renew
from sprinter.models.runners import forward, onednn
from sprinter.models.runners.forward import ModelRunner
from sprinter.models.runners.onednn import copied_weights

pytestmark = pytest.mark.skipif(not onednn._available(), reason="PyTorch has no oneDNN here")
IDS = torch.tensor([[5, 3, 8, 1, 9, 2]])


def llama(bias: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=bias, mlp_bias=bias,
    )  # fmt: skip
    model = LlamaForCausalLM(config).requires_grad_(False)
    for name, weights in model.named_parameters():
        weights.normal_(std=0.3) if "norm" not in name else None
    return model


def read(model: PreTrainedModel, runner: Any = None) -> torch.Tensor:
    """Logits of two passes, over one token and over several."""
    runner = make_runner(model, max_len=16) if runner is None else runner
    with torch.inference_mode():
        runner.rewind([0])
        return torch.cat([runner.extend(part).logits for part in (IDS[:, :1], IDS[:, 1:])], 1)


def plain(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("most", [onednn._MOST, 0], ids=["copied", "as they are"])
def test_laws_are_those_of_pytorch(monkeypatch: pytest.MonkeyPatch, bias: bool, most: int) -> None:
    monkeypatch.setattr(onednn, "_MOST", most)
    model = llama(bias)
    assert copied_weights(model) is not None
    torch.testing.assert_close(read(model), plain(model), rtol=1e-5, atol=1e-5)


def test_the_given_model_is_not_changed() -> None:
    model = llama()
    before = copy.deepcopy(model.state_dict())
    runner = make_runner(model, max_len=16)
    assert isinstance(runner, ModelRunner) and runner.model is not model and runner.copies is not None
    read(model, runner)
    assert not any("forward" in part.__dict__ for part in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    pairs = zip(model.parameters(), runner.model.parameters(), strict=True)
    assert all(own is other for own, other in pairs)


@pytest.mark.parametrize("most", [onednn._MOST, 0], ids=["copied", "as they are"])
def test_weights_changed_in_place_are_read_anew(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(onednn, "_MOST", most)
    model = llama()
    runner = make_runner(model, max_len=16)
    before = read(model, runner)
    model.model.layers[0].mlp.up_proj.weight.mul_(3.0)  # counted by PyTorch
    changed = read(model, runner)
    torch.testing.assert_close(changed, plain(model), rtol=1e-5, atol=1e-5)
    assert (changed - before).abs().max() > 0.1
    model.lm_head.weight.data = model.lm_head.weight.data * 2  # at another place
    torch.testing.assert_close(read(model, runner), plain(model), rtol=1e-5, atol=1e-5)


def test_a_reload_takes_weights_that_were_changed_unseen() -> None:
    model = llama()
    read(model)
    model.lm_head.weight.data.mul_(2)  # neither counted nor moved
    renew(model)
    torch.testing.assert_close(read(model), plain(model), rtol=1e-5, atol=1e-5)


def test_other_dtypes_and_changed_layers_run_as_they_are() -> None:
    assert copied_weights(llama().double()) is None and copied_weights(llama().bfloat16()) is None
    part = llama()
    part.lm_head.double()
    assert copied_weights(part) is None
    wrapped: Any = llama()
    first = wrapped.model.layers[0].mlp.up_proj
    first.forward = lambda x: nn.functional.linear(x, first.weight) * 2  # as another library does
    assert copied_weights(wrapped) is None
    torch.testing.assert_close(read(wrapped), plain(wrapped), rtol=1e-5, atol=1e-5)


def test_a_new_runner_reads_a_model_as_it_is_now() -> None:
    model, other = llama(), llama(bias=False)
    kept = make_runner(model, max_len=16)
    before = read(model, kept)
    other.lm_head.weight.mul_(-2)
    model.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(read(model), plain(other), rtol=1e-5, atol=1e-5)
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 64, bias=False).requires_grad_(False)
    changed = read(model)
    torch.testing.assert_close(changed, plain(model), rtol=1e-5, atol=1e-5)
    assert (changed - before).abs().max() > 0.1
    model.resize_token_embeddings(70)
    assert read(model).shape[-1] == 70
    model.double()
    torch.testing.assert_close(read(model), plain(model))


def test_weights_that_a_hook_makes_are_left_to_it() -> None:
    model = llama()
    prune.random_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)
    assert copied_weights(model) is None
    model.model.layers[0].mlp.up_proj.weight_orig.data.mul_(-3)
    renew(model)
    torch.testing.assert_close(read(model), plain(model), rtol=1e-5, atol=1e-5)


def test_autocast_around_a_pass_changes_nothing() -> None:
    model = llama()
    expected = read(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(read(model), expected)


def test_runners_before_and_after_a_reload_take_turns() -> None:
    model = llama()
    first = make_runner(model, max_len=16)
    renew(model)
    second = make_runner(model, max_len=16)
    assert isinstance(first, ModelRunner) and isinstance(second, ModelRunner)
    assert first.model is not second.model and forward.turn(first._head) is forward.turn(second._head)


def test_copies_keep_no_model() -> None:
    def noted(model: LlamaForCausalLM) -> LlamaForCausalLM:
        model.model.norm.register_forward_hook(lambda *_: model.config and None)
        return model

    model = noted(llama())
    read(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
