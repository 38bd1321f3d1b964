"""Models whose passes our kernels run, over weights as they are or quantised: laws, bits, refusals, reloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_families import OURS, UNWRITTEN, made
from tests.models.gguf_files import byte_tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import sprinter
from sprinter.errors import UserError
from sprinter.models import kernels
from sprinter.models.choose import capture_kind, make_runner, renew
from sprinter.models.kernels import passes_of, quantise, runs
from sprinter.models.pair import load_models
from sprinter.models.reduced_vocab import CutHead, cut_output

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
from sprinter_kernels import model as packing
from sprinter_kernels import supports

TEXT = torch.randint(1, 250, (3, 24), generator=torch.Generator().manual_seed(0))
KINDS = ("float32", "bfloat16", "int8", "int4")
EVERY = [*OURS, *UNWRITTEN]


def saved(name: str, folder: Path, dtype: str = "float32") -> Path:
    made(name).to(getattr(torch, dtype)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def compiled(folder: Path, dtype: str = "float32") -> Any:
    model = load_models(folder, dtype=dtype, compile=True).target.model
    assert runs(model) and capture_kind(model) == ("kernels", "our kernels run its layers")
    return model


def of_kind(name: str, kind: str) -> Any:
    model = made(name)
    if kind.startswith("int"):
        quantise(model, kind)
    else:
        assert kernels.compile_layers(model.to(getattr(torch, kind))) is None
    assert runs(model)
    return model


def through(model: Any, ids: Tensor) -> Tensor:
    """Logits of one pass of a runner."""
    found = make_runner(model, batch=len(ids), max_len=40, compile=True).extend(ids).logits
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EVERY)
def test_laws_are_those_of_the_weights_in_float32(name: str, dtype: str, tmp_path: Path) -> None:
    """In bfloat16 too: no activation is rounded. States of layers as well."""
    folder = saved(name, tmp_path, dtype)
    model = compiled(folder, dtype)
    same = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = same(TEXT, output_hidden_states=True)
    found = make_runner(model, batch=3, max_len=40, compile=True).extend(TEXT, hidden_layers=[1, 0, 1])
    assert found.logits is not None and model.dtype == getattr(torch, dtype)
    states = [wanted.hidden_states[i] for i in (2, 1, 2)]
    for mine, other in zip([found.logits, *found.layers], [wanted.logits, *states], strict=True):
        assert mine.dtype == torch.float32 and float((mine - other).norm() / other.norm()) < 1e-5


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", EVERY)
def test_quantised_layers_compute_what_the_modules_do(name: str, dtype: str) -> None:
    """But for the order of sums, which moves rounded activations."""
    model = of_kind(name, dtype)
    with torch.inference_mode():
        wanted = model(TEXT).logits
    assert float((through(model, TEXT) - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-biases", "qwen2-yarn", "gemma2", "gemma3", *UNWRITTEN])
def test_a_token_is_the_same_in_every_pass(name: str, kind: str) -> None:
    """To the bit: alone, with others, in rows of several lengths, along branches, whatever else is wanted."""
    model = of_kind(name, kind)
    whole = through(model, TEXT)
    rows = make_runner(model, batch=3, max_len=40, compile=True)
    parts = [
        rows.extend(TEXT[:, :9]),
        rows.extend(TEXT[:, 9:10], hidden_layers=[-1]),
        rows.extend(TEXT[:, 10:]),
    ]
    assert torch.equal(torch.cat([one.logits for one in parts if one.logits is not None], 1), whole)
    rows.rewind([9, 9, 9])
    branches = rows.extend(TEXT[:2, 9:12], rows=[2, 0], parents=[[8, 9, 8], None]).logits
    chains = [torch.cat([TEXT[2, :9], TEXT[0, [9, 10]]]), torch.cat([TEXT[0, :9], TEXT[1, 9:12]])]
    alone = [through(model, chain[None])[0] for chain in chains]
    assert branches is not None
    assert torch.equal(branches[0, :2], alone[0][9:]) and torch.equal(branches[1], alone[1][9:])
    rows.rewind([6, 4, 9])
    ragged = rows.extend(torch.cat([TEXT[:1, 6:12], TEXT[1:2, 4:10], TEXT[2:, 9:15]]), [6, 1, 2])
    assert ragged.logits is not None
    for row, (at, count) in enumerate([(6, 6), (4, 1), (9, 2)]):  # in one line, without padding
        assert torch.equal(ragged.logits[row, :count], whole[row, at : at + count])
    without = make_runner(model, batch=3, max_len=40, compile=True).extend(TEXT, logits=False)
    assert without.logits is None and torch.equal(without.hidden[:, 9:10], parts[1].hidden)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_methods_write_the_text_of_plain_decoding(dtype: str, tmp_path: Path) -> None:
    saved("llama-biases", tmp_path / "target")
    saved("llama-tied", tmp_path / "draft")
    pair = sprinter.load_pair(
        tmp_path / "target", tmp_path / "draft", dtype=dtype, compile=True, draft_vocabulary=200
    )
    assert pair.models.draft is not None
    assert runs(pair.models.target.model) and runs(pair.models.draft.model)
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


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_cut_output_layer_knows_its_words_alone(kind: str) -> None:
    model, known = made("llama"), torch.arange(0, 200, 2)
    cut_output(model, known)
    assert isinstance(model.lm_head, CutHead)
    if kind == "int8":
        quantise(model, kind)
    else:
        assert kernels.compile_layers(model) is None
    found = through(model, TEXT)
    with torch.inference_mode():
        wanted = model(TEXT).logits
    assert runs(model) and found.shape == wanted.shape
    assert float((found - wanted)[..., known].norm() / wanted[..., known].norm()) < 0.02
    assert torch.equal(found < -9e3, wanted < -9e3) and int((found[0, 0] > -9e3).sum()) == 100


@pytest.mark.parametrize("name", ["llama", "qwen2", "neox"])
def test_weights_that_change_are_seen_after_a_reload(name: str, tmp_path: Path) -> None:
    model = compiled(saved(name, tmp_path), "bfloat16")
    first = through(model, TEXT)
    layer: Any = (model.gpt_neox if name == "neox" else model.model).layers[1]
    with torch.no_grad():
        layer.post_attention_layernorm.weight.mul_(2.0)
    renew(model)
    found = through(model, TEXT)
    assert runs(model) and not torch.equal(found, first)
    layer.post_attention_layernorm.weight.data /= 2.0
    renew(model)
    assert torch.equal(through(model, TEXT), first)


def test_a_linear_layer_that_is_replaced_is_read_after_a_reload(caplog: pytest.LogCaptureFixture) -> None:
    model, other = of_kind("llama", "int8"), of_kind("llama-biases", "int8")
    before = through(model, TEXT)
    model.model.layers[1].self_attn.q_proj = other.model.layers[1].self_attn.q_proj
    renew(model)
    assert runs(model) and not torch.equal(through(model, TEXT), before)
    model.model.layers[1].self_attn.q_proj = nn.Linear(64, 64)  # beside quantised ones
    renew(model)
    assert runs(model)
    model.model.layers[1].mlp = nn.Identity()
    renew(model)
    assert not runs(model) and torch.isfinite(through(model, TEXT)).all()
    (line,) = [one.getMessage() for one in caplog.records if one.name == "sprinter"]
    assert "model.layers.1.mlp is of class Identity" in line and "slower" in line


def test_gpt2_is_laid_out_anew_and_saved_as_before(tmp_path: Path) -> None:
    model = compiled(saved("gpt2", tmp_path / "one"))
    weight = model.transformer.h[0].attn.c_attn.weight
    assert weight.shape == (64, 192) and weight.t().is_contiguous()
    model.save_pretrained(tmp_path / "two")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two").eval()
    assert torch.allclose(again(TEXT).logits, through(model, TEXT), atol=1e-4)
    strange = made("gpt2")
    strange.config.activation_function = "relu"
    strange.save_pretrained(tmp_path / "three")
    byte_tokenizer().save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match=r"cannot be compiled: .*; use compile=False"):
        load_models(tmp_path / "three", compile=True)
    kept = load_models(tmp_path / "three").target.model
    assert supports(kept) and all(one.is_contiguous() for one in kept.parameters())


def test_sizes_that_are_no_multiples() -> None:
    """A matrix of 24 rows is read; heads of 8, of which several are in a block of rows, are not."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}
    odd, ids = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).eval(), TEXT % 99
    with torch.inference_mode():
        wanted = odd(ids).logits
    assert kernels.compile_layers(odd) is None
    assert torch.allclose(through(odd, ids), wanted, atol=1e-4)
    small = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=8)).eval()
    assert "no whole blocks" in (kernels.compile_layers(small) or "") and not runs(small)
    quantise(small, "int8")
    assert not runs(small) and torch.isfinite(through(small, ids)).all()


def louder(model: Any) -> Any:
    class Louder(LlamaForCausalLM):
        def forward(self, *given: Any, **named: Any) -> Any:
            out = super().forward(*given, **named)
            out.logits *= 2.0
            return out

    model.__class__ = Louder
    return model


STRANGE = {
    "its class": (louder, "do not know Louder"),
    "a hook on it": (lambda model: model.register_forward_hook(lambda *_: None), "LlamaForCausalLM has a hook"),
    "a hook on a layer": (lambda model: model.model.layers[1].register_forward_pre_hook(lambda *_: None), "hook"),
    "a hook on the norm": (lambda model: model.model.norm.register_forward_hook(lambda *_: None), "norm has a hook"),
    "another embedding": (lambda model: setattr(model.model, "embed_tokens", nn.Identity()), "embedding or output"),
    "another norm": (lambda model: setattr(model.model, "norm", nn.Identity()), "last norm"),
    "a layer less": (lambda model: model.model.layers.__delitem__(1), "list of layers"),
    "a layer twice": (
        lambda model: model.model.layers.__setitem__(1, model.model.layers[0]), "list of layers"),
    "double precision": (lambda model: model.double(), "in float64 on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_what_the_kernels_would_pass_over_is_said(name: str) -> None:
    change, said = STRANGE[name]
    model = made("llama")
    assert supports(model) is None
    change(model)
    assert said in (supports(model) or "") and passes_of(model) is None


def test_angles_that_depend_on_the_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the context ends before they change."""
    model = made("llama")
    model.model.rotary_emb.rope_type = "dynamic"
    model.config.rope_parameters["factor"] = 2.0
    with pytest.raises(ValueError, match="its rotary embedding is dynamic"):
        packing.pack(model)
    packed = packing.pack(model, longest=100)
    assert len(packed._angles(packed._kinds[0], 20)[0]) == 100
    buffers = [torch.zeros(1, packed.kv, 101, packed.d) for _ in range(2 * packed.depth)]
    slots = packing.Slots([one.data_ptr() for one in buffers], 101, 101)
    with pytest.raises(
        IndexError, match="the text is longer than 100 tokens, where its rotary embedding changes"
    ):
        packed.forward(torch.ones(1, 101, dtype=torch.int64), slots)


@pytest.mark.parametrize("name", ["llama", "qwen2-yarn", "phi3-partial", "gemma3"])
def test_angles_of_all_positions_are_those_of_each(name: str) -> None:
    model = made(name)
    packed, rotary = packing.pack(model), model.model.rotary_emb
    for kind in packed._kinds:
        more = {"layer_type": kind} if isinstance(rotary.rope_type, dict) else {}
        for last in (3, 70, 300, 2000):
            places = torch.randint(0, last, (2, 7), generator=torch.Generator().manual_seed(last))
            wanted = rotary(torch.zeros(1), position_ids=places, **more)
            for table, part in zip(packed._angles(kind, last), wanted, strict=True):
                assert len(table) >= last and torch.equal(table[places], part)


@pytest.mark.parametrize("wrong", [-1, 10_000])
def test_ids_without_a_row_are_refused(wrong: int) -> None:
    rows = make_runner(of_kind("llama", "int8"), max_len=20)
    rows.extend(TEXT[:1, :4])
    with pytest.raises(IndexError, match="a token id has no row"):
        rows.extend(torch.tensor([[5, wrong]]))
    assert rows.lengths == [4]


def test_ids_and_masks_of_another_type_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_kind("gemma3", "int8")
    wanted = through(model, TEXT)
    assert torch.equal(through(model, TEXT.to(torch.int32)), wanted)
    monkeypatch.setattr(
        model.config, "_attn_implementation", "eager"
    )  # the row runner then adds masks to scores
    assert torch.equal(through(model, TEXT), wanted)


def test_weights_live_as_long_as_the_kernels_point_to_them(tmp_path: Path) -> None:
    model = compiled(saved("qwen2", tmp_path, "bfloat16"), "auto")
    before = through(model, TEXT)
    for part in model.modules():
        for weight in part.parameters(recurse=False):
            weight.data = torch.full_like(weight, torch.nan)
    torch.randn(1000, 64)  # takes the memory of what was freed
    assert torch.equal(through(model, TEXT), before)


def test_a_first_pass_that_fails_leaves_a_runner_that_adopts() -> None:
    model = of_kind("llama", "int8")
    full, rows = make_runner(model, max_len=20), make_runner(model, max_len=20)
    with pytest.raises(IndexError, match="no row"):
        rows.extend(torch.tensor([[5, -1]]))
    full.extend(TEXT[:1, :6])
    assert rows.cache_bytes == full.cache_bytes > 0
    assert rows.adopt(full, 4) and rows.lengths == [4]
    one, whole = rows.extend(TEXT[:1, 4:6]).logits, through(model, TEXT[:1, :6])
    assert one is not None and torch.equal(one, whole[:, 4:])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_passes_do_not_depend_on_the_default_device(device: str) -> None:
    model = of_kind("llama", "int8")
    rows = make_runner(model, batch=2, max_len=40, compile=False)

    def passes() -> list[Tensor | None]:
        rows.rewind([0, 0])
        every = [
            (TEXT[:2, :4], [4, 4]),
            (TEXT[:2, 4:7], [3, 3]),
            (TEXT[:2, 7:], [5, 1]),
            (TEXT[:2, :1], [1, 1]),
        ]
        return [rows.extend(part, counts).logits for part, counts in every]

    wanted = passes()
    with torch.device(device):
        found = passes()
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "said"), [("eps", 1e3, "differ from its own"), ("cap", 1e-3, "differ")]
)
def test_kernels_that_compute_something_else_are_noticed(
    field: str, value: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = packing.Packed._layer

    def wrong(self: Any, *given: Any) -> Any:
        facts = original(self, *given)
        setattr(facts, field, value)
        return facts

    monkeypatch.setattr(packing.Packed, "_layer", wrong)
    with pytest.raises(UserError, match=f"the kernels' logits of .* {said}.*: use compile=False"):
        kernels.compile_layers(made("llama"))


def test_tokens_that_differ_between_passes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = packing.Packed.forward

    def wrong(self: Any, ids: Tensor, *given: Any, **named: Any) -> Any:
        logits, *rest = original(self, ids, *given, **named)
        return logits + 1e-6 * ids.shape[1], *rest

    monkeypatch.setattr(packing.Packed, "forward", wrong)
    with pytest.raises(UserError, match=r"tokens of .* differ between forward passes: use bfloat16"):
        quantise(made("llama"), "int8")


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", torch.bfloat16), ("float16", torch.float32)])
def test_auto_keeps_a_dtype_that_changes_no_law(dtype: str, kept: torch.dtype, tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path, dtype)
    model, same = compiled(folder, "auto"), compiled(folder, "float32")
    assert model.dtype == kept and same.dtype == torch.float32
    assert torch.allclose(through(model, TEXT), through(same, TEXT), atol=1e-4)
    assert load_models(folder).target.model.dtype == torch.float32


def test_models_in_memory_stay_what_they_are(tmp_path: Path) -> None:
    """The kernels read a model that was given, and its own modules and gradients are untouched."""
    folder = saved("llama", tmp_path)
    mine: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = mine(TEXT).logits
    assert not runs(load_models(mine, tokenizer=folder).target.model)
    assert load_models(mine, tokenizer=folder, compile=True).target.model is mine and runs(mine)
    assert torch.allclose(through(mine, TEXT), wanted, atol=1e-4) and torch.equal(mine(TEXT).logits, wanted)
    assert mine(TEXT).logits.requires_grad
    other: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    other.model.layers[1].mlp.register_forward_hook(lambda _, args, out: 2.0 * out)
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"cannot be compiled: model\.layers\.1\.mlp has a hook; use compile=False"
        ):
            load_models(other, tokenizer=folder, compile=True)
