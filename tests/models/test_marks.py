"""What is captured of a module is valid as long as it stays what it was."""

import pytest
import torch
from tests.models.tiny import fresh
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache

from sprinter.models.capture.marks import Watch
from sprinter.models.runners.forward import call_model


def test_a_watch_sees_hooks() -> None:
    model = fresh("llama")
    watches = [Watch(), Watch(contents=False)]
    assert all(watch.changed(model) for watch in watches)
    for module in (model, model.model.layers[1].mlp):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            handle = register(lambda *_: None)
            assert all(watch.changed(model) and not watch.changed(model) for watch in watches)
            handle.remove()
            assert all(watch.changed(model) for watch in watches)
    handle = register_module_forward_hook(lambda *_: None)
    assert all(watch.changed(model) for watch in watches)
    handle.remove()


def test_hooks_that_only_note_are_not_looked_at() -> None:
    """Ours is there while another thread's pass is under way, transformers' from the first recorded pass on."""
    model, found = fresh("llama"), []
    watch = Watch()
    watch.changed(model)

    def look(hidden: torch.Tensor) -> torch.Tensor:
        assert model.lm_head._forward_pre_hooks
        found.append(watch.changed(model))
        return hidden

    call_model(model, torch.tensor([[3]]), look, cache=DynamicCache())
    assert found == [False]
    model(input_ids=torch.tensor([[3]]), output_hidden_states=True)
    assert any(part._forward_hooks for part in model.modules())


def test_a_watch_of_places_knows_no_values() -> None:
    module, watch = nn.Linear(3, 3), Watch(contents=False)
    assert watch.changed(module) and not watch.changed(module)
    with torch.no_grad():
        module.weight.add_(1)
    assert not watch.changed(module)
    module.weight.data = module.weight.data.clone()
    assert watch.changed(module) and not watch.changed(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [(), (3,), (70, 70), (128, 96)])
def test_a_watch_sees_rows_and_columns_that_are_written_unseen(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    module, watch = nn.Module(), Watch()
    module.register_buffer("x", torch.ones(shape, dtype=dtype))
    assert watch.changed(module)
    held = module.x.data  # type: ignore[union-attr]
    for axis, size in enumerate(shape):
        for i in range(0, size, 7):
            held.select(axis, i).add_(1)
            assert watch.changed(module), (axis, i)
    held.add_(1)
    assert watch.changed(module) and not watch.changed(module)
