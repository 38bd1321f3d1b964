"""``dtype="int8"``: products of 8-bit weights and 16-bit activations, whole models, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import sprinter
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.laws import tv_distance
from sprinter.models import int8
from sprinter.models.convert import convert_gguf
from sprinter.models.int8 import Int8Linear, has_int8, quantise
from sprinter.models.pair import builtin_paths, load_models

PROMPTS = ("The first king of", "In the year 1900 the river", "She was born in")


def layer(wide: int, high: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    made = nn.Linear(wide, high, bias)
    with torch.no_grad():
        made.weight *= torch.logspace(-2, 2, high)[:, None]  # channels of very different sizes
    return made


@pytest.mark.parametrize(
    ("wide", "high"), [(64, 64), (96, 40), (896, 128), (1536, 256), (33, 7), (512, 3000)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_the_rounded_weights(wide: int, high: int, bias: bool) -> None:
    """Of activations only what 16 bits cannot hold is lost; outliers take nothing from the other tokens."""
    linear = layer(wide, high, bias)
    linear.requires_grad_(False)
    made = Int8Linear(linear.weight, linear.bias)
    x = torch.randn(5, 3, wide)
    x[2] *= 1e4
    x[3, :, 0] = 300.0
    codes, scale = int8._codes(linear.weight)
    assert codes.abs().max() == 127
    exact = x.double() @ (codes.double() * scale.double()[:, None]).T + (linear.bias.double() if bias else 0)
    error = (made(x).double() - exact).abs()
    largest = x.abs().amax(-1, keepdim=True).double() * (
        codes.double().abs() @ torch.ones(wide).double() * scale
    )
    assert made(x).dtype == torch.float32 and made(x).shape == (5, 3, high)
    assert bool((error <= largest / 32639 + 1e-5 * exact.abs() + 1e-6).all())
    lost = (made(x[0]) - linear(x[0])).norm() / linear(x[0]).norm()
    assert 0 < float(lost) < 0.01


def test_the_two_halves_are_the_number() -> None:
    rows = torch.randn(7, 50) * torch.logspace(-20, 3, 7)[:, None]
    rows[3] = 0.0
    halves, step = int8._halves(rows)
    whole = halves[:7].long() * 256 + halves[7:14].long()
    assert whole.abs().max() == 127 * 256 + 127
    assert bool(((whole * step.double() - rows).abs() <= 0.5001 * step).all())
    assert int8._halves(torch.randn(1, 8))[0].shape == (4, 8)


@pytest.mark.parametrize(("wide", "high"), [(64, 64), (896, 128), (96, 300)])
def test_a_token_does_not_depend_on_the_other_tokens(wide: int, high: int) -> None:
    """The same bits in a pass of one token and of forty."""
    linear = layer(wide, high)
    made, x = Int8Linear(linear.weight, linear.bias), torch.randn(40, wide)
    whole = made(x)
    for start, n in ((0, 1), (1, 2), (3, 3), (5, 4), (7, 9), (12, 17), (0, 33)):
        assert torch.equal(made(x[start : start + n]), whole[start : start + n])


@pytest.fixture(scope="module")
def builtin_pair() -> sprinter.Pair:
    return sprinter.load_pair()


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair(dtype="int8")


@pytest.mark.parametrize(
    "method", ["speculative(gamma=4)", "svip", "block(gamma=3)", "specinfer(drafts=2, gamma=3)"]
)
def test_greedy_texts_are_those_of_plain_decoding(pair: sprinter.Pair, method: str) -> None:
    for prompt in PROMPTS:
        texts = {
            pair.generate(prompt, method=one, temperature=0, max_new_tokens=40).text
            for one in ("autoregressive", method)
        }
        assert len(texts) == 1


def test_the_law_is_near_that_of_the_weights(pair: sprinter.Pair, builtin_pair: sprinter.Pair) -> None:
    ids = torch.tensor([pair.tokenizer("The first king of the island was born in the year")["input_ids"]])  # type: ignore[misc]
    with torch.inference_mode():
        laws = [one.models.target.module("a test")(ids).logits.softmax(-1) for one in (builtin_pair, pair)]
    gap = tv_distance(*laws)
    assert 0 < float(gap.mean()) < 0.02 and float(gap.max()) < 0.05


def test_gates_load_and_records_repeat(pair: sprinter.Pair, builtin_pair: sprinter.Pair) -> None:
    target, plain = pair.models.target, builtin_pair.models.target
    assert weights_fingerprint(target.model) == weights_fingerprint(plain.model)
    assert (target.weights, target.size) == ("int8", plain.size)
    made = pair.generate(PROMPTS[0], method="sprinter(tau=0.5)", max_new_tokens=30, seed=3)
    assert made.stats.trusted > 0
    record = made.to_dict()
    assert record["models"]["target"]["dtype"] == "int8"
    again = sprinter.load_pair(dtype=record["models"]["target"]["dtype"])
    assert again.generate(record["prompt"]["token_ids"], **record["request"]).text == made.text


def test_a_gguf_file_is_run_by_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "target.gguf"
    convert_gguf(builtin_paths()["target"], file, "q8_0")
    loaded = load_models(file, dtype="int8").target
    assert loaded.weights == "int8 (from Q8_0)" and has_int8(loaded.module("a test"))


@pytest.mark.parametrize("tied", [True, False])
def test_every_linear_layer_is_replaced_once(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.requires_grad_(False)
    ids, size = torch.arange(10)[None], sum(one.numel() for one in model.parameters())
    before = model(ids).logits
    assert quantise(model) == size
    assert not any(type(one) in (nn.Linear, nn.Embedding) for one in model.modules())
    assert sum(isinstance(one, Int8Linear) for one in model.modules()) == 2 * 7 + 1
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert float((model(ids).logits - before).abs().max()) < 0.02 * float(before.abs().max())


def test_models_without_linear_layers_are_refused() -> None:
    """GPT-2's are of a class of transformers' own."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=32)).eval()
    with pytest.raises(UserError, match=r"of those of GPT2LMHeadModel are: use bfloat16"):
        quantise(model)


def test_a_model_that_reads_its_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                         num_attention_heads=2)).eval()  # fmt: skip
    forward = type(model).forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, *given, **more: (self.lm_head.weight.dtype, forward(self, *given, **more))[1],
    )
    with pytest.raises(UserError, match=r"does not run with 8-bit layers .*weight.*: use bfloat16"):
        quantise(model)


def test_a_build_without_the_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*given: object) -> torch.Tensor:
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(int8, "_checked", [])
    monkeypatch.setattr(int8, "_product", missing)
    with pytest.raises(UserError, match="has no 8-bit products"):
        int8.check_products()


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(UserError, match="dtype int8 is for models on a CPU"):
        load_models(builtin_paths()["target"], dtype="int8", device_map="cpu")
    with pytest.raises(UserError, match="cannot be compiled: its weights are quantised"):
        sprinter.load_pair(dtype="int8", compile=True)


def test_llamacpp_has_its_own_types() -> None:
    pytest.importorskip("llama_cpp")
    with pytest.raises(UserError, match="runner llamacpp has no dtype 'int8'"):
        sprinter.load_pair(builtin_paths()["target"], runner="llamacpp", dtype="int8")


def test_a_processor_that_saturates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_checked", [])
    int8.check_products()
    assert int8._checked == [True]
    monkeypatch.setattr(int8, "_checked", [])
    exact = int8._product
    monkeypatch.setattr(int8, "_product", lambda *given: exact(*given).clamp(max=2_000_000))
    with pytest.raises(UserError, match="are not exact: use dtype=bfloat16"):
        int8.check_products()
