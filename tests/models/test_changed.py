"""Models that change after units of them were captured: a text is made with what lies there when it begins."""

import pytest
import torch
from tests.models.eager_units import captured
from tests.models.fake_cuda import fake_cuda
from tests.models.tiny import fresh, tiny, uncached
from torch import nn
from transformers import PreTrainedModel

from sprinter.models.capture.graphs import GraphUnits
from sprinter.models.capture.runner import PASS, CapturedRunner
from sprinter.models.choose import _choose

TEXT = [3, 9, 11, 4, 1, 7]


def says(runner: CapturedRunner, model: PreTrainedModel) -> None:
    """A whole text in captured passes, as the model itself says it now."""
    runner.rewind([0])
    wanted, _ = uncached(model, TEXT)
    for at, n in ((0, 3), (3, 1), (4, 2)):
        (logits, _) = runner.run(PASS, torch.tensor([TEXT[at : at + n]]), None) or (None, None)
        assert logits is not None, "it was not captured"
        torch.testing.assert_close(logits[0], wanted[at : at + n], rtol=1e-4, atol=1e-4)


def _load(model: PreTrainedModel) -> None:
    model.load_state_dict(tiny("llama").state_dict())


def _parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())


def _layer(model: PreTrainedModel) -> None:
    model.model.layers[1] = tiny("llama").model.layers[1]


def _hook(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def test_the_model_is_looked_at_once_a_text() -> None:
    runner = captured("llama", 3, 40)
    units = runner._units
    runner.extend(torch.ones(3, 2, dtype=torch.long))
    assert units.begun == 1  # type: ignore[attr-defined]
    for _ in range(5):
        runner.extend(torch.ones(3, 1, dtype=torch.long))
    runner.rewind([2, 0, 4])
    runner.extend(torch.ones(3, 1, dtype=torch.long), [1, 0, 1])
    runner.extend(torch.ones(2, 1, dtype=torch.long), rows=[0, 2])
    assert units.begun == 1  # type: ignore[attr-defined]
    runner.extend(torch.ones(1, 1, dtype=torch.long), rows=[1])
    assert units.begun == 2  # type: ignore[attr-defined]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> tuple[PreTrainedModel, CapturedRunner]:
    fake_cuda(monkeypatch)
    model = fresh("llama")
    windows = _choose(model).windows
    return model, CapturedRunner(model, 1, 40, windows, GraphUnits(model, windows, True))


def test_graphs_follow_weights_to_another_place(graphs: tuple[PreTrainedModel, CapturedRunner]) -> None:
    model, runner = graphs
    says(runner, model)
    held = dict(runner._units._graphs)  # type: ignore[attr-defined]
    _load(model)  # in place, where a graph reads them
    says(runner, model)
    assert runner._units._graphs == held  # type: ignore[attr-defined]
    for change in (_parameter, _layer, _hook):
        change(model)
        says(runner, model)
        assert not held.items() & runner._units._graphs.items()  # type: ignore[attr-defined]
