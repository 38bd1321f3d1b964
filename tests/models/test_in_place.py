"""Models in float32 and bfloat16 that our kernels run over the weights as they are."""

from __future__ import annotations

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_families import FAMILIES, GEMMA, UNWRITTEN, made
from tests.models.gguf_files import byte_tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import sprinter
from sprinter.errors import UserError
from sprinter.models.choose import capture_kind, make_runner, renew
from sprinter.models.pair import load_models
from sprinter.models.quantised import fused_layers, in_place
from sprinter.models.quantised.fused_layers import _Stack, is_joined
from sprinter.models.quantised.quantise import quantise


def saved(name: str, folder: Path, dtype: str = "float32") -> Path:
    made(name).to(getattr(torch, dtype)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def compiled(folder: Path, dtype: str = "float32") -> Any:
    model = load_models(folder, dtype=dtype, compile=True).target.model
    assert is_joined(model) and capture_kind(model) == ("kernels", "our kernels run its layers")
    return model


def text() -> Tensor:
    return torch.randint(1, 250, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*FAMILIES, *UNWRITTEN])
def test_laws_are_those_of_the_weights_in_float32(name: str, dtype: str, tmp_path: Path) -> None:
    """In bfloat16 too: no activation is rounded."""
    folder, ids = saved(name, tmp_path, dtype), text()
    model = compiled(folder, dtype)
    same = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found, wanted = model(ids, output_hidden_states=True), same(ids, output_hidden_states=True)
    assert found.logits.dtype == torch.float32 and model.dtype == getattr(torch, dtype)
    assert float((found.logits - wanted.logits).norm() / wanted.logits.norm()) < 1e-5
    for mine, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert float((mine - other).norm() / other.norm()) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "qwen3", "gemma2", "gemma3", *UNWRITTEN])
def test_a_token_is_the_same_in_every_pass(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: alone, with others, in rows, along branches, and where layers run in one call."""
    model, ids = compiled(saved(name, tmp_path), dtype), text()
    calls: list[int] = []
    together = _Stack.together
    monkeypatch.setattr(
        _Stack,
        "together",
        lambda *args: (calls.append(len(found.facts) if (found := together(*args)) else 1), found)[1],
    )
    one = make_runner(model, batch=3, max_len=40, compile=True)
    whole_text = one.extend(ids).logits
    rows = make_runner(model, batch=3, max_len=40, compile=True)
    parts = [rows.extend(ids[:, :9]).logits, rows.extend(ids[:, 9:10]).logits]
    parts += [rows.extend(ids[:, 10:]).logits]
    assert torch.equal(torch.cat(parts, 1), whole_text)
    assert any(many > 1 for many in calls) is (name not in ("gemma2", "gemma3", "gpt2-by-layer"))
    rows.rewind([9, 9, 9])
    branches = rows.extend(ids[:2, 9:12], rows=[2, 0], parents=[[8, 9, 8], None]).logits
    chains = [torch.cat([ids[2, :9], ids[0, [9, 10]]]), torch.cat([ids[0, :9], ids[1, 9:12]])]
    alone = [make_runner(model, max_len=40, compile=True).extend(chain[None]).logits[0] for chain in chains]
    assert torch.equal(branches[0, :2], alone[0][9:]) and torch.equal(branches[1], alone[1][9:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_methods_write_the_text_of_plain_decoding(dtype: str, tmp_path: Path) -> None:
    saved("llama-biases", tmp_path / "target")
    saved("llama-tied", tmp_path / "draft")
    pair = sprinter.load_pair(
        tmp_path / "target", tmp_path / "draft", dtype=dtype, compile=True, draft_vocabulary=200
    )
    assert pair.models.draft is not None
    assert is_joined(pair.models.target.model) and is_joined(pair.models.draft.model)
    texts = {
        method: pair.generate("abc", method=method, max_new_tokens=30, temperature=0.0).tokens
        for method in ("autoregressive", "speculative(gamma=3)", "svip", "lookup")
    }
    plain = [token.id for token in texts["autoregressive"]]
    assert len(plain) > 10 and all([token.id for token in own] == plain for own in texts.values())
    for temperature in (0.0, 1.0):
        options = {"method": "svip", "max_new_tokens": 20, "temperature": temperature}
        batch = pair.generate_batch(["abc", "xyzw"], seed=[1, 2], **options)
        alone = [pair.generate(one, seed=i, **options) for i, one in enumerate(("abc", "xyzw"), 1)]
        assert [one.text for one in batch] == [one.text for one in alone]


def through_runner(model: Any, ids: Tensor) -> Tensor:
    """Logits of all but the first token, in a pass that runs all layers in one call."""
    rows = make_runner(model, batch=len(ids), max_len=40, compile=True)
    rows.extend(ids[:, :1])
    made = rows.extend(ids[:, 1:]).logits
    assert made is not None
    return made


@pytest.mark.parametrize("name", ["llama", "qwen2", "neox"])
def test_weights_that_change_are_seen_after_a_reload(name: str, tmp_path: Path) -> None:
    model, ids = compiled(saved(name, tmp_path / "one"), "bfloat16"), text()
    first, twin = through_runner(model, ids), deepcopy(model)
    assert torch.equal(first, model(ids).logits[:, 1:])
    twin.load_state_dict({key: values * 1.5 for key, values in model.state_dict().items()})
    assert not torch.equal(twin(ids).logits[:, 1:], first)
    twin.save_pretrained(tmp_path / "two")
    byte_tokenizer().save_pretrained(tmp_path / "two")
    assert torch.equal(compiled(tmp_path / "two", "bfloat16")(ids).logits, twin(ids).logits)
    assert torch.equal(through_runner(model, ids), first)
    layer: Any = (model.gpt_neox if name == "neox" else model.model).layers[1]
    mlp, up = layer.mlp, "dense_h_to_4h" if name == "neox" else "up_proj"
    changes: list[tuple[Any, bool]] = [
        (lambda: layer.post_attention_layernorm.weight.mul_(2.0), True),
        (lambda: setattr(mlp, up, deepcopy(getattr(mlp, up))), False),
        (lambda: getattr(mlp, up).weight.copy_(getattr(mlp, up).weight.flip(0)), True),
    ]
    for change, differs in changes:
        before = through_runner(model, ids)
        with torch.no_grad():
            change()
        renew(model)
        found = through_runner(model, ids)
        assert is_joined(model) and torch.equal(found, model(ids).logits[:, 1:])
        assert torch.equal(found, before) is not differs


def test_gpt2_is_laid_out_anew_and_saved_as_before(tmp_path: Path) -> None:
    folder, ids = saved("gpt2", tmp_path / "one"), text()
    model = compiled(folder)
    weight = model.transformer.h[0].attn.c_attn.weight
    assert weight.shape == (64, 192) and weight.t().is_contiguous()
    model.save_pretrained(tmp_path / "two")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two").eval()
    assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-4)
    strange = made("gpt2")
    strange.config.activation_function = "relu"
    strange.save_pretrained(tmp_path / "three")
    byte_tokenizer().save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match=r"cannot be compiled: .*; use compile=False"):
        load_models(tmp_path / "three", compile=True)
    kept = load_models(tmp_path / "three").target.model
    assert in_place.run_in_place(kept) and not is_joined(kept)
    assert all(one.is_contiguous() for one in kept.parameters())


def test_sizes_that_are_no_multiples() -> None:
    """A matrix of 24 rows is read; heads of 8, of which several are in a block of rows, are not."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}
    odd = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).eval()
    ids = torch.arange(1, 31).view(2, 15)
    wanted = odd(ids).logits
    assert in_place.run_in_place(odd) is None and is_joined(odd)
    assert torch.allclose(odd(ids).logits, wanted, atol=1e-4)
    small = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=8)).eval()
    assert in_place.run_in_place(small) and not is_joined(small)
    quantise(small, "int8")
    assert not is_joined(small) and torch.isfinite(small(ids).logits).all()


def test_the_language_model_of_a_larger_one_is_known_as_joined() -> None:
    sizes = {**GEMMA, "vocab_size": 300, "layer_types": ["sliding_attention"] * 3}
    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=sizes, vision_config={**seen, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).eval()
    ids = torch.arange(1, 31).view(2, 15)
    with torch.no_grad():
        wanted = model(ids).logits
    assert not is_joined(model)
    if in_place.run_in_place(model) is None:
        assert is_joined(model) and torch.allclose(model(ids).logits, wanted, atol=1e-3)
    else:
        assert not any("forward" in vars(part) for part in model.modules())


def test_what_the_kernels_cannot_do_is_refused(tmp_path: Path) -> None:
    model, ids = compiled(saved("llama", tmp_path)), text()
    with pytest.raises(RuntimeError, match="have no gradients: train on"):
        model(inputs_embeds=torch.randn(1, 4, 64, requires_grad=True))
    with pytest.raises(TypeError, match=r"compile=False|cannot be pickled"):
        pickle.dumps(model)
    twin = deepcopy(model)
    twin.model.layers[1].mlp.up_proj = nn.Sequential(twin.model.layers[1].mlp.up_proj)
    with pytest.raises(RuntimeError, match=r"up is another than when the model was loaded"):
        twin(ids)
    twin = deepcopy(model).double()
    with pytest.raises(RuntimeError, match="a model that is compiled stays as it is, on the CPU"):
        twin(ids)


def test_layers_that_the_kernels_do_not_run_are_said(tmp_path: Path) -> None:
    model = load_models(saved("llama", tmp_path)).target.model
    assert isinstance(model, LlamaForCausalLM)
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward  # as a library that wraps it does
    line = "LlamaForCausalLM cannot be compiled: model.layers.0.mlp has another forward than that of its class; use"
    for _ in range(2):
        with pytest.raises(UserError, match=line):
            load_models(model, tokenizer=tmp_path, compile=True)
    assert not any(
        "forward" in vars(part) for part in model.modules() if part is not model.model.layers[0].mlp
    )


def test_layers_that_compute_something_else_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = fused_layers._Forward._made

    def without_norm(self: fused_layers._Forward, *weights: Any) -> object:
        facts = original(self, *weights)
        facts.eps = 1e3
        return facts

    monkeypatch.setattr(fused_layers._Forward, "_made", without_norm)
    with pytest.raises(UserError, match=r"the joined layers of .* differ from its own: use compile=False"):
        compiled(saved("llama", tmp_path))


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", torch.bfloat16), ("float16", torch.float32)])
def test_auto_keeps_a_dtype_that_changes_no_law(dtype: str, kept: torch.dtype, tmp_path: Path) -> None:
    folder, ids = saved("qwen2", tmp_path, dtype), text()
    model, same = compiled(folder, "auto"), compiled(folder, "float32")
    assert model.dtype == kept and same.dtype == torch.float32
    assert torch.allclose(model(ids).logits, same(ids).logits, atol=1e-4)
    assert load_models(folder).target.model.dtype == torch.float32


def test_models_in_memory_and_small_ones_join_too(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    mine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = mine(text()).logits
    assert not is_joined(load_models(mine, tokenizer=folder).target.model)
    assert load_models(mine, tokenizer=folder, compile=True).target.model is mine and is_joined(mine)
    assert torch.allclose(mine(text()).logits, wanted, atol=1e-4)
    assert not is_joined(load_models(folder, dtype="float32").target.model)
    for name in ("gpt2", "gemma2", "qwen2"):
        model = load_models(saved(name, tmp_path / name, "bfloat16"), compile=True).target.model
        assert is_joined(model) and capture_kind(model)[0] == "kernels" and model.dtype == torch.bfloat16


def test_what_stands_in_a_model_in_memory_is_honoured(tmp_path: Path) -> None:
    """A hook on a whole layer runs; one inside a layer, which the kernels would pass over, is refused."""
    folder, ids = saved("llama", tmp_path), text()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.model.layers[1].register_forward_hook(lambda _, args, out: 2.0 * out)
    wanted = model(ids).logits
    load_models(model, tokenizer=folder, compile=True)
    assert is_joined(model) and torch.allclose(through_runner(model, ids), wanted[:, 1:], atol=1e-3)
    other: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    other.model.layers[1].mlp.register_forward_hook(lambda _, args, out: 2.0 * out)
    with pytest.raises(
        UserError, match=r"cannot be compiled: model\.layers\.1\.mlp has a hook; use compile=False"
    ):
        load_models(other, tokenizer=folder, compile=True)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_that_is_left_attends_as_before(tmp_path: Path, attention: str) -> None:
    folder = saved("llama", tmp_path)
    model: Any = load_models(
        folder, compile=True, attn_implementation=attention, dtype="float32"
    ).target.model
    assert is_joined(model) and model.config._attn_implementation != attention
    in_place._leave(model)
    assert model.config._attn_implementation == attention
