"""Models that change after units of them were captured: a text is made with what lies there when it begins."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.eager_units import FrozenCode, captured
from tests.models.fake_cuda import fake_cuda
from tests.models.tiny import fresh, tiny, uncached
from torch import nn
from transformers import PreTrainedModel

from sprinter.models.capture.graphs import GraphUnits
from sprinter.models.capture.runner import PASS, CapturedRunner
from sprinter.models.choose import _choose
from sprinter.models.runner import make_runner

TEXT = [3, 9, 11, 4, 1, 7]


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> FrozenCode:
    return FrozenCode(monkeypatch)


def says(runner: CapturedRunner, model: PreTrainedModel) -> None:
    """A whole text in captured passes, as the model itself says it now."""
    runner.rewind([0])
    wanted, _ = uncached(model, TEXT)
    for at, n in ((0, 3), (3, 1), (4, 2)):
        (logits, _) = runner.run(PASS, torch.tensor([TEXT[at : at + n]]), None) or (None, None)
        assert logits is not None, "it was not captured"
        torch.testing.assert_close(logits[0], wanted[at : at + n], rtol=1e-4, atol=1e-4)


def runner_of(model: PreTrainedModel) -> CapturedRunner:
    runner = make_runner(model, max_len=40, compile=True)
    assert isinstance(runner, CapturedRunner)
    return runner


def _load(model: PreTrainedModel) -> None:
    model.load_state_dict(tiny("llama").state_dict())


def _data(model: PreTrainedModel) -> None:
    for own, other in zip(model.parameters(), tiny("llama").parameters(), strict=True):
        own.data.copy_(other.data)


def _row(model: PreTrainedModel) -> None:
    model.lm_head.weight.data[17] += 1.0


def _column(model: PreTrainedModel) -> None:
    model.lm_head.weight.data[:, 5] += 1.0


def _element(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight[7, 7] += 1.0


def _numpy(model: PreTrainedModel) -> None:
    model.lm_head.weight.detach().numpy()[:] *= 2.0


def _optimizer(model: PreTrainedModel) -> None:
    model(input_ids=torch.tensor([TEXT])).logits.logsumexp(-1).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def _parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())


def _layer(model: PreTrainedModel) -> None:
    model.model.layers[1] = tiny("llama").model.layers[1]


def _order(model: PreTrainedModel) -> None:
    first, second = model.model.layers
    first.mlp, second.mlp = second.mlp, first.mlp


def _activation(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.act_fn = nn.Tanh()


def _attribute(model: PreTrainedModel) -> None:
    model.model.norm.variance_epsilon = 0.5


def _hook(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def _pre_hook(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def _hook_with_kwargs(model: PreTrainedModel) -> None:
    model.register_forward_hook(_scaled, with_kwargs=True)


def _scaled(module: nn.Module, args: object, kwargs: object, output: Any) -> Any:
    output.logits = 2 * output.logits
    return output


CHANGES = [_load, _data, _row, _column, _element, _numpy, _optimizer, _parameter, _layer, _order, _activation,
           _attribute, _hook, _pre_hook, _hook_with_kwargs]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_a_change_is_noticed_when_the_next_text_begins(
    frozen: FrozenCode, change: Callable[[PreTrainedModel], None]
) -> None:
    model = fresh("llama")
    runner, other = runner_of(model), runner_of(model)
    says(runner, model)
    says(other, model)
    before, (wanted, _) = dict(frozen.disk), uncached(model, TEXT)
    change(model)
    assert (uncached(model, TEXT)[0] - wanted).abs().max() > 1e-2, "this changes nothing"
    says(runner, model)
    says(other, model)
    for key, code in before.items():  # what was kept of the model as it was is still that
        assert frozen.disk[key] is code
    assert len(frozen.disk) == 2 * len(before), "the new model's code lies under the old one's key"


def test_weights_that_torch_does_not_count(frozen: FrozenCode) -> None:
    with torch.inference_mode():
        model = fresh("llama")
        runner = runner_of(model)
        says(runner, model)
        model.lm_head.weight.mul_(-1.0)
        says(runner, model)


def test_weights_that_come_back_find_their_code(frozen: FrozenCode) -> None:
    model = fresh("llama")
    runner, before = runner_of(model), {name: x.clone() for name, x in model.state_dict().items()}
    says(runner, model)
    _load(model)
    says(runner, model)
    held = dict(frozen.disk)
    model.load_state_dict(before)
    says(runner, model)
    assert frozen.disk == held


def test_code_of_weights_that_are_gone_is_dropped(frozen: FrozenCode) -> None:
    model = fresh("llama")
    runner = runner_of(model)
    says(runner, model)
    codes = [weakref.ref(code) for code in frozen.disk.values()]
    frozen.disk.clear()
    _load(model)
    runner.rewind([0])
    runner.extend(torch.tensor([TEXT]))
    gc.collect()
    assert len(codes) > 1 and not any(code() for code in codes)


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


def test_nothing_is_looked_up_again_while_nothing_changes(frozen: FrozenCode) -> None:
    model = fresh("llama")
    for runner in (runner_of(model), runner_of(model)):
        for _ in range(3):
            says(runner, model)
    assert len(frozen.looks) == 2  # one token, and any number of them


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
