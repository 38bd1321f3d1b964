"""Linear layers of 8 bits for GPUs; their arithmetic is that of any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import fresh
from torch import nn

from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.heads.drafting import OutputLayer
from sprinter.models import options as options_module
from sprinter.models.choose import capture_kind, make_runner
from sprinter.models.kernels import parameter_count, round_linears
from sprinter.models.options import load_options

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
from sprinter_kernels.layers import RoundedLinear

from sprinter.models.reduced_vocab import some_rows


@torch.no_grad()
def test_a_rounded_layer_is_near_the_linear_one_and_exact_on_its_codes() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(96, 40), torch.randn(5, 96)
    rounded = RoundedLinear.of(linear.weight, linear.bias)
    weight = rounded.codes.float() * rounded.scale[:, None]
    assert rounded.codes.dtype == torch.int8 and rounded.codes.abs().amax(1).eq(127).all()
    half = rounded.scale[:, None] / 2
    assert bool(((weight - linear.weight).abs() <= half * 1.0001).all())
    expected = linear(x)
    torch.testing.assert_close(rounded(x), x @ weight.T + linear.bias, rtol=1e-5, atol=1e-5)
    made = rounded.to(torch.bfloat16)(x.bfloat16())
    assert made.dtype == torch.bfloat16 and rounded.scale.dtype == torch.float32
    assert float((made.float() - expected).norm() / expected.norm()) < 0.02


def test_a_row_of_zeros_stays_one_and_what_is_no_number_is_refused() -> None:
    weight = torch.randn(3, 8)
    weight[1] = 0
    assert torch.equal(RoundedLinear.of(weight).codes[1], torch.zeros(8, dtype=torch.int8))
    weight[2, 3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        RoundedLinear.of(weight)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "phi3", "gpt_neox"])
@torch.no_grad()
def test_a_rounded_model_counts_and_computes_as_the_one_it_was(kind: str) -> None:
    model = fresh(kind)
    ids = torch.arange(9)[None]
    before, size, mark = model(ids).logits, parameter_count(model), weights_fingerprint(model)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    round_linears(model)
    assert not any(type(part) is nn.Linear for part in model.modules())
    assert float((model(ids).logits - before).norm() / before.norm()) < 0.1
    # An output layer that is tied has its own codes; the embedding stays.
    assert parameter_count(model) == size + (model.get_input_embeddings().weight.numel() if tied else 0)
    assert weights_fingerprint(model) == mark
    runner = make_runner(model, max_len=20)
    logits = runner.extend(ids).logits
    assert logits is not None
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    model: Any = fresh("llama")
    model.model.norm.weight.data.fill_(torch.inf)
    with pytest.raises(UserError, match="gives no numbers"):
        round_linears(model)
    model = fresh("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj, a weight is not finite"):
        round_linears(model)


def test_a_rounded_model_is_not_saved_without_its_weights(tmp_path: Path) -> None:
    model = fresh("llama")
    round_linears(model)
    with pytest.raises(TypeError, match="cannot be saved"):
        model.save_pretrained(tmp_path)


@torch.no_grad()
def test_an_output_layer_of_eight_bits_can_be_cut_and_shared_with_heads() -> None:
    model, ids = fresh("llama"), torch.tensor([2, 5, 60])
    round_linears(model)
    head: Any = model.get_output_embeddings()
    where, some = some_rows(head, ids)
    x = torch.randn(4, 32)
    torch.testing.assert_close(some(x), head(x)[:, where])
    shared = OutputLayer(model, 61)
    assert shared(x.bfloat16()).dtype == torch.bfloat16  # states keep their dtype, and no matrix is made


def test_which_devices_take_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "device_of", torch.device)

    def options(dtype: str, device: str, **more: Any) -> Any:
        given = {"device_map": None, "attn_implementation": None, "quantization_config": None, **more}
        return load_options(
            dtype,
            device,
            **given,
            trust_remote_code=False,
            compile=None,
            dequantise=False,
            vocabulary=None,
            cache_dtype=None,
        )

    on_gpu = options("int8", "cuda")
    assert on_gpu.quantised == "int8" and on_gpu.dtype == torch.bfloat16 and on_gpu.dequantise
    assert options("int8", "cpu").dtype == torch.float32
    assert options("int8", "cuda", attn_implementation="sdpa").extra == {"attn_implementation": "sdpa"}
    with pytest.raises(UserError, match="attention of its own"):
        options("int8", "cpu", attn_implementation="sdpa")
    with pytest.raises(UserError, match="dtype int4 is for models on a CPU: give device=cpu, or dtype=int8"):
        options("int4", "cuda")
    with pytest.raises(UserError, match="leave device_map and quantization_config out"):
        options("int8", "cuda", device_map="auto")


def test_a_rounded_model_can_be_captured_on_a_gpu() -> None:
    model = fresh("llama")
    round_linears(model)
    assert capture_kind(model)[0] != "kernels"
    if torch.cuda.is_available():
        assert capture_kind(model.to("cuda"))[0] == "graphs"


@pytest.mark.gpu
def test_int8_loads_on_a_gpu(tmp_path: Any) -> None:
    import sprinter

    pair = sprinter.load_pair(device="cuda", dtype="int8")
    assert pair.models.target.weights == "int8"
    same = [
        pair.generate("The", method=m, temperature=0.0, max_new_tokens=24)
        for m in ("autoregressive", "speculative")
    ]
    assert [t.id for t in same[0].tokens] == [t.id for t in same[1].tokens]
