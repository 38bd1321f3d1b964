"""Forward passes of joined models that go straight to their parts: the same bits as the model's own, or not taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_families import UNWRITTEN, made
from tests.models.gguf_files import byte_tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from sprinter.models.choose import make_runner
from sprinter.models.pair import load_models
from sprinter.models.quantised.quantise import quantise
from sprinter.models.quantised.single_call import Straight, _angles, _OneCall
from sprinter.models.reduced_vocab import cut_output

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
    if own is None:
        taken.append(False)

    def noted(*given: Any, **named: Any) -> Any:
        found = own(*given, **named)
        taken.append(found is not None)
        return found

    rows.straight = noted if straight and own is not None else None
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
    assert taken == [True] * 7
    assert len(usual) == len(straight) == 13
    assert all(torch.equal(one, other) for one, other in zip(usual, straight, strict=True))
    for layers in ((1,), (1, 0), (-1, 0, 0)):
        (usual, _), (noted, taken) = passes(model, False, layers), passes(model, True, layers)
        assert taken == [True] * 7 and len(noted) == 13 + 6 * len(layers)
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
    assert taken.count(True) == 7 and all(map(torch.equal, usual, straight))


@pytest.mark.parametrize("where", ["", "model", "model.layers.0", "model.layers.1"])
def test_hooks_that_would_be_passed_over_end_it_which_is_said_once(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, seen = model_of("llama"), list[int]()

    def hook(module: nn.Module, args: Any) -> None:
        seen.append(len(args))

    handle = model.get_submodule(where).register_forward_pre_hook(hook)
    try:
        _, taken = passes(model, True)
    finally:
        handle.remove()
    assert not any(taken) and len(seen) >= 7
    (line,) = [one.getMessage() for one in caplog.records if one.name == "sprinter"]
    assert "slower" in line and "hooks" in line
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


def test_another_forward_of_a_part_is_called() -> None:
    model = model_of("llama")
    model.model.norm.forward = lambda x: x * 0.0
    outs, taken = passes(model, True)
    assert taken.count(True) == 7 and not any(float(one.abs().sum()) for one in outs)
    model.model.forward = model.model.forward  # as a library that wraps it does
    assert not any(passes(model, True)[1])


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each pass in one call, whether it made the logits too."""
    calls: list[bool] = []
    run = _OneCall.run

    def noted(self: _OneCall, *given: Any) -> Any:
        states, logits = run(self, *given)
        calls.append(logits is not None)
        return states, logits

    monkeypatch.setattr(_OneCall, "run", noted)
    return calls


@pytest.mark.parametrize("name", STRAIGHT)
def test_a_pass_is_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    passes(model_of(name), True)
    assert calls == [True, True, True, True, True, False, True]


@pytest.mark.parametrize(
    ("part", "count"),
    [("model.embed_tokens", 0), ("model.norm", 0), ("model.rotary_emb", 0), ("lm_head", 7)],
)
def test_parts_with_hooks_are_called(part: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = counted(monkeypatch), model_of("llama")
    wanted, _ = passes(model, True)
    calls.clear()
    handle = model.get_submodule(part).register_forward_hook(lambda *_: None)
    found, _ = passes(model, True)
    assert calls == [False] * count and all(map(torch.equal, wanted, found))
    handle.remove()
    passes(model, True)
    assert calls[count:] == [True, True, True, True, True, False, True]


def test_a_model_of_one_layer_is_one_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = counted(monkeypatch), made("llama")
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    quantise(model, "int8")
    (usual, _), (straight, taken) = passes(model, False), passes(model, True)
    assert len(calls) == 7 and taken.count(True) == 7 and all(map(torch.equal, usual, straight))


def test_angles_that_depend_on_the_text_are_made_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = counted(monkeypatch), model_of("llama")
    wanted, _ = passes(model, True)
    calls.clear()
    model.model.rotary_emb.rope_type = "dynamic"
    found, taken = passes(model, True)
    assert not calls and taken.count(True) == 7 and all(map(torch.equal, wanted, found))


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2-yarn", "phi3-partial"])
def test_angles_of_all_positions_are_those_of_each(name: str) -> None:
    rotary = model_of(name).model.rotary_emb
    for last in (3, 70, 300, 2000):
        tables = _angles(rotary, last)
        places = torch.randint(0, last, (2, 7), generator=torch.Generator().manual_seed(last))
        for table, part in zip(tables, rotary(torch.zeros(1), position_ids=places), strict=True):
            assert len(table) >= last and torch.equal(table[places], part)


@pytest.mark.parametrize("wrong", [-1, 10_000])
def test_ids_without_a_row_are_refused(wrong: int) -> None:
    rows = make_runner(model_of("llama"), max_len=20)
    rows.extend(TEXT[:1, :4])
    with pytest.raises(IndexError, match="a token id has no row"):
        rows.extend(torch.tensor([[5, wrong]]))
    assert rows.lengths == [4]


def test_masks_that_are_added_to_scores_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = counted(monkeypatch), model_of("llama")
    wanted, _ = passes(model, True)
    calls.clear()
    monkeypatch.setattr(model.config, "_attn_implementation", "eager")  # the row runner then adds masks
    found, _ = passes(model, True)
    assert len(calls) == 7 and all(map(torch.equal, wanted, found))


def test_ids_of_another_type_are_the_same_ids() -> None:
    rows, found = make_runner(model_of("llama"), max_len=20), []
    for dtype in (torch.int64, torch.int32):
        rows.rewind([0])
        rows.extend(TEXT[:1, :4])
        found.append(rows.extend(TEXT[:1, 4:7].to(dtype)).logits)
    assert found[0] is not None and found[1] is not None and torch.equal(found[0], found[1])


class _Louder(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2.0


def test_parts_of_other_classes_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = counted(monkeypatch), made("llama")
    own = model.model.embed_tokens
    model.model.embed_tokens = louder = _Louder(*own.weight.shape)
    louder.weight = own.weight
    quantise(model, "int8")
    (usual, _), (straight, taken) = passes(model, False), passes(model, True)
    assert not calls and taken.count(True) == 7 and all(map(torch.equal, usual, straight))
    model = model_of("llama")
    model.lm_head = nn.Linear(64, model.config.vocab_size, bias=False)
    (usual, _), (straight, _) = passes(model, False), passes(model, True)
    assert calls == [False] * 7 and all(map(torch.equal, usual, straight))


def test_weights_live_as_long_as_the_kernels_point_to_them(tmp_path: Path) -> None:
    made("qwen2").bfloat16().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model: Any = load_models(tmp_path, compile=True).target.model
    rows = make_runner(model, max_len=20)
    rows.extend(TEXT[:1, :4])
    rows.extend(TEXT[:1, 4:6])
    before = rows.extend(TEXT[:1, 6:7]).logits
    rows.rewind([6])
    for part in model.modules():
        for weight in part.parameters(recurse=False):
            weight.data = torch.full_like(weight, torch.nan)
    torch.randn(1000, 64)  # takes the memory of what was freed
    after = rows.extend(TEXT[:1, 6:7]).logits
    assert before is not None and after is not None and torch.equal(before, after)


def test_states_of_the_only_layer_bear_no_mark() -> None:
    model = made("llama")
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    quantise(model, "int8")
    seen: list[Tensor] = []
    handle = model.model.layers[0].register_forward_hook(lambda _, args, out: seen.append(out))
    passes(model, True)
    handle.remove()
    assert len(seen) == 7 and not any(vars(out) for out in seen)


def test_a_first_pass_that_fails_leaves_a_runner_that_adopts() -> None:
    model = model_of("llama")
    full, rows = make_runner(model, max_len=20), make_runner(model, max_len=20)
    with pytest.raises(IndexError, match="no row"):
        rows.extend(torch.tensor([[5, -1]]))
    full.extend(TEXT[:1, :6])
    assert rows.cache_bytes == full.cache_bytes > 0
    assert rows.adopt(full, 4) and rows.lengths == [4] and rows.cache_bytes == full.cache_bytes
    one, other = rows.extend(TEXT[:1, 4:6]).logits, make_runner(model, max_len=20).extend(TEXT[:1, :6]).logits
    assert one is not None and other is not None and torch.equal(one, other[:, 4:])
