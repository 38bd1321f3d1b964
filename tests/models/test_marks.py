"""What compiled code is named after: everything of a module that it holds."""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.models.tiny import fresh, save, tiny
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM, DynamicCache

from sprinter.heads.networks import build_network
from sprinter.models.capture import marks
from sprinter.models.capture.marks import Watch, digest
from sprinter.models.runners.forward import call_model


def test_equal_modules_have_one_digest(tmp_path: Path) -> None:
    one, other = fresh("llama"), fresh("llama")
    assert digest(one) == digest(other) != digest(tiny("llama"))
    loaded = AutoModelForCausalLM.from_pretrained(save(tmp_path / "there", one, None))
    assert digest(loaded) == digest(one)


def test_architectures_with_equal_weights_differ() -> None:
    mlp, ffn = (build_network(kind, 8) for kind in ("mlp", "ffn"))
    ffn.load_state_dict(mlp.state_dict())
    assert digest(mlp) != digest(ffn)
    ffn._activation = nn.functional.silu
    assert digest(mlp) == digest(ffn)


def test_plain_attributes_count() -> None:
    made = [nn.LayerNorm(4), nn.LayerNorm(4, eps=0.1), nn.Sequential(nn.LayerNorm(4)), nn.LayerNorm(4)]
    made[3].hidden = torch.ones(2)  # a tensor that is no buffer is frozen into the code as well
    assert len({digest(module) for module in made}) == 4
    before = digest(made[0])
    made[0].eps = 0.1  # type: ignore[assignment]
    assert digest(made[0]) == digest(made[1]) != before
    for change in (nn.functional.relu, partial(nn.functional.gelu, approximate="tanh"), {"a": 1}, [1], {2}):
        made[1].act = change
        before, _ = digest(made[1]), made[0].__setattr__("act", change)
        assert digest(made[0]) == before
    made[1].act = partial(nn.functional.gelu, approximate="none")
    assert digest(made[0]) != digest(made[1])


def _written(place: Path, name: str, text: str) -> ModuleType:
    place.mkdir(parents=True, exist_ok=True)
    (place / "own.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, place / "own.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


CODE = "from torch import nn\nclass Own(nn.Module):\n    def forward(self, x):\n        return x + {}\n"


@pytest.mark.parametrize("name", ["a_package_of_mine", "transformers_modules.org.repo.own"])
def test_other_source_is_another_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    made = [digest(_written(tmp_path / str(i), name, CODE.format(i % 2)).Own()) for i in range(3)]
    assert made[0] == made[2] != made[1]


def test_what_lies_beside_a_models_own_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformers_modules.org.repo.own"
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    one = digest(_written(tmp_path / "one", name, CODE.format(1)).Own())
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "helper.py").write_text("ONE = 1\n")
    assert digest(_written(tmp_path / "two", name, CODE.format(1)).Own()) != one


def test_code_that_was_typed_serves_its_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for _ in range(2):
        space: dict[str, type[nn.Module]] = {"__name__": "typed"}
        exec(CODE.format(1), space)
        made.append(digest(space["Own"]()))
        assert made[-1] == digest(space["Own"]())
    assert made[0] != made[1]


def test_code_of_a_hooked_model_serves_its_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama")
    plain, watches = digest(model), [Watch(), Watch(contents=False)]
    assert all(watch.changed(model) for watch in watches)
    for module in (model, model.model.layers[1].mlp):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            handle = register(lambda *_: None)
            assert all(watch.changed(model) and not watch.changed(model) for watch in watches)
            here = digest(model)
            with monkeypatch.context() as other_process:
                other_process.setattr(marks, "_RUN", "another")
                there = marks._digest(model)
            assert len({plain, here, there}) == 3
            handle.remove()
            assert all(watch.changed(model) for watch in watches) and digest(model) == plain
    handle = register_module_forward_hook(lambda *_: None)
    assert all(watch.changed(model) for watch in watches) and digest(model) != plain
    handle.remove()


def test_hooks_that_only_note_are_not_looked_at() -> None:
    """Ours is there while another thread's pass is under way, transformers' from the first recorded pass on."""
    model, found = fresh("llama"), []
    before, watch = digest(model), Watch()
    watch.changed(model)

    def look(hidden: torch.Tensor) -> torch.Tensor:
        assert model.lm_head._forward_pre_hooks
        found.append((watch.changed(model), digest(model)))
        return hidden

    call_model(model, torch.tensor([[3]]), look, cache=DynamicCache())
    assert found == [(False, before)]
    model(input_ids=torch.tensor([[3]]), output_hidden_states=True)
    assert any(part._forward_hooks for part in model.modules()) and digest(model) == before


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
