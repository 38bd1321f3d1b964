"""Hidden states of decoder layers, and keys and values, as runners hand them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.models.forest import KINDS, WAYS, Forest, forest, graphs_without_cuda, runner_of  # noqa: F401 (a fixture)
from tests.models.tiny import tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sprinter.models.cache_name import model_cache_name
from sprinter.models.choose import make_runner
from sprinter.models.runners import forward


@torch.inference_mode()
def states_of(model: PreTrainedModel, text: Sequence[int]) -> tuple[list[Tensor], DynamicCache]:
    """What comes out of each decoder layer of a plain pass, and its cache. transformers gives the last one normed."""
    cache, last = DynamicCache(), []
    handle = forward.decoder_layers(model)[-1].register_forward_hook(lambda _m, _a, out: last.append(out))
    output: Any = model(
        input_ids=torch.tensor([list(text)]),
        use_cache=True,
        output_hidden_states=True,
        **{model_cache_name(type(model).forward): cache},
    )
    handle.remove()
    return [*output.hidden_states[1:-1], last[0] if isinstance(last[0], Tensor) else last[0][0]], cache


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gpt_neox", "gemma2", "gemma3"])
def test_hidden_states_of_layers_and_keys_and_values(kind: str, way: str) -> None:
    runner, model = runner_of(kind, way, 2), tiny(kind)
    texts = [[7, 3, 60, 12, 5, 9], [1, 2, 3, 4]]
    tokens = torch.tensor([texts[0][:4], [*texts[1][:3], 0]])
    prompt = runner.extend(tokens, [4, 3], logits=False, hidden_layers=[1, 0])
    step = runner.extend(torch.tensor([[5, 9], [4, 0]]), [2, 1], hidden_layers=[-2, -1, 0])
    assert prompt.logits is None and len(prompt.layers) == 2 and len(step.layers) == 3
    for row, (text, first) in enumerate(zip(texts, (4, 3), strict=True)):
        states, cache = states_of(model, text)
        for given, layer in zip(prompt.layers, (1, 0), strict=True):
            torch.testing.assert_close(given[row, :first], states[layer][0, :first], rtol=1e-4, atol=1e-4)
        for given, layer in zip(step.layers, (0, 1, 0), strict=True):
            new = len(text) - first
            torch.testing.assert_close(given[row, :new], states[layer][0, first:], rtol=1e-4, atol=1e-4)
        wanted = [held for layer in cache.layers for held in (layer.keys, layer.values)]
        for given, one in zip(runner._cache.buffers(), wanted, strict=True):  # type: ignore[attr-defined]
            torch.testing.assert_close(given[row : row + 1, :, : len(text)], one, rtol=1e-4, atol=1e-4)
    hooks = [hook for part in forward.decoder_layers(model) for hook in part._forward_hooks.values()]
    assert not [
        hook for hook in hooks if hook.__module__ == forward.__name__
    ]  # transformers leaves some of its own


@pytest.mark.parametrize("way", WAYS)
def test_hidden_states_of_layers_in_a_tree(way: str) -> None:
    runner, model = runner_of("llama", way, 2), tiny("llama")
    runner.extend(torch.tensor([[7, 3], [1, 2]]))
    step = runner.extend(torch.tensor([[5, 6, 7]]), rows=[1], parents=[[1, 1, 2]], hidden_layers=[0, 1])
    for given, wanted in zip(step.layers, states_of(model, [1, 2, 5, 7])[0], strict=True):
        torch.testing.assert_close(given[0, 2], wanted[0, -1], rtol=1e-4, atol=1e-4)


def test_hidden_states_of_layers_over_the_other_runners() -> None:
    crop, text = make_runner(tiny("gpt_neo"), max_len=20), [(7 * i + 3) % 61 for i in range(20)]
    step = crop.extend(torch.tensor([text]), logits=False, hidden_layers=[0])
    wanted = states_of(tiny("gpt_neo"), text)[0][0]
    assert step.layers[0].shape == wanted.shape
    torch.testing.assert_close(step.layers[0][0, -1], wanted[0, -1], rtol=1e-4, atol=1e-4)
    crop.rewind([0])
    assert crop.extend(torch.ones(1, 4, dtype=torch.long), [0], hidden_layers=[0]).layers[0].shape == (
        1,
        4,
        32,
    )
    assert crop.extend(torch.ones(1, 4, dtype=torch.long), [3], hidden_layers=[0]).layers[0].shape == (
        1,
        4,
        32,
    )


def test_layers_that_do_not_exist() -> None:
    runner = make_runner(tiny("llama"), max_len=20)
    runner.extend(torch.ones(1, 2, dtype=torch.long))
    for layer in (2, -3):
        with pytest.raises(ValueError, match="this model has layers 0 to 1, or -2 to -1"):
            runner.extend(torch.ones(1, 2, dtype=torch.long), hidden_layers=[layer])
    assert runner.lengths == [2]
