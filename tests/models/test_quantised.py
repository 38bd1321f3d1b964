"""Weights of 4 to 8 bits: what is stored, the kernel's products, whole models."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.gguf_families import FAMILIES, OURS, written
from tests.models.gguf_files import NO_GGUF
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import sprinter
from sprinter.fingerprint import weights_fingerprint
from sprinter.laws import tv_distance
from sprinter.models.choose import make_runner, pads_rows
from sprinter.models.gguf.dequantise import dequantised
from sprinter.models.kernels import is_quantised, parameter_count, quantise
from sprinter.models.pair import load_models
from sprinter.models.runners.row import RowRunner

BYTES = dict[str, torch.Tensor]()
"""Format -> a packed matrix of the first instruction set that was tried."""
PROMPTS = ("The first king of", "In the year 1900 the river", "She was born in")
pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
from sprinter_kernels import Slots, native, pack  # noqa: E402
from sprinter_kernels.layers import Matrix, QuantisedEmbedding, QuantisedLinear, Source  # noqa: E402
from sprinter_kernels.layout import FORMATS, eight_bits, four_bits  # noqa: E402


@pytest.fixture(params=native.instruction_sets())
def built(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has, in turn; a test at a time, as all others have the best one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.ASKED, request.param)
        native.native.cache_clear()
        assert native.native().__name__ == f"sprinter_kernels.{request.param}"
        yield request.param
    native.native.cache_clear()


def packed(name: str, high: int, width: int) -> Matrix:
    blocks = stored(name, high, width)
    return Matrix(Source("", high, width, no_rows, name, lambda: (blocks, np.arange(high))), None).keep()


def no_rows(some: slice) -> torch.Tensor:
    raise AssertionError("dequantised")


def made_of(weight: torch.Tensor, bits: int) -> Matrix:
    return Matrix(Source("", *weight.shape, lambda some: weight[some]), bits).keep()


def numbers(blocks: np.ndarray, name: str) -> np.ndarray:
    gguf = pytest.importorskip("gguf", reason=NO_GGUF)
    return np.asarray(gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]))


def stored(name: str, high: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows of a GGUF tensor of this kind, ``[high, bytes]``."""
    gguf = pytest.importorskip("gguf", reason=NO_GGUF)
    form, chance = FORMATS[name], np.random.default_rng(seed)
    if form.block == 32:
        weights = chance.standard_normal((high, width)).astype(np.float32)
        return gguf.quantize(weights, gguf.GGMLQuantizationType[name])
    rows = chance.integers(0, 256, (high, width // 256, form.bytes), dtype=np.uint8)
    for at in (208,) if name == "Q6_K" else (0, 2):  # the 16-bit floats of a block
        values = chance.uniform(-0.02, 0.02, (high, width // 256, 1)).astype(np.float16)
        rows[..., at : at + 2] = values.view(np.uint8)
    return rows.reshape(high, -1)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as the kernel rounds them, float64."""
    groups = x.double().view(len(x), -1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / step.clamp(min=1e-300)).round() * step).view(x.shape)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_numbers_of_the_file(built: str, name: str) -> None:
    data, matrix = stored(name, 37, 512), packed(name, 37, 512)
    ids = torch.tensor([0, 36, 15, 16, 5, 5])
    assert torch.equal(matrix.rows(ids), torch.from_numpy(numbers(data, name))[ids].float())
    order = np.random.default_rng(1).permutation(37)
    shuffled = native.pack(data[order], FORMATS[name], np.argsort(order))
    assert torch.equal(shuffled, matrix.packed)
    first = BYTES.setdefault(name, matrix.packed)  # one file serves all instruction sets
    assert torch.equal(matrix.packed, first)


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_rounded_activations(built: str, name: str) -> None:
    high, width = 53, 768
    matrix = packed(name, high, width)
    weights = matrix.rows(torch.arange(high)).double()
    before = torch.get_num_threads()
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 33, 64, 70):
        torch.manual_seed(rows)
        x, bias = torch.randn(rows, width), torch.randn(high)
        x[0, :40] *= 1e4
        x[-1, 64:96] = 0.0
        found = matrix.product(x, bias)
        wanted = rounded(x) @ weights.T + bias.double()
        size = (rounded(x).abs() @ weights.T.abs()).clamp(min=1.0)
        assert float(((found - wanted).abs() / size).max()) < 1e-5, rows
        # The same bits alone, with other tokens, and with another number of threads.
        try:
            torch.set_num_threads(3 - min(before, 2))
            few = [matrix.product(part.clone(), bias) for part in x.split(5)]
            assert torch.equal(torch.cat(few), found), rows
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [3, 30])
def test_what_is_no_number_stays_none(built: str, name: str, rows: int) -> None:
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(0))
    x[1, 300], x[2, 40] = torch.nan, torch.inf
    found = packed(name, 21, 512).product(x)
    assert found[1:3].isnan().all() and found[:1].isfinite().all() and found[3:].isfinite().all()


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 13, 70])
def test_products_in_place_are_those_of_the_weights(built: str, dtype: torch.dtype, rows: int) -> None:
    high, width = 53, 16 * 43
    torch.manual_seed(rows)
    weight, x, bias = torch.randn(high, width).to(dtype), torch.randn(rows, width), torch.randn(high)
    x[0, :40] *= 1e4

    def product(x: torch.Tensor) -> torch.Tensor:
        facts = native.native().Matrix(
            native.FLOATS[dtype], weight.data_ptr(), high, width, bias.data_ptr(), high, high
        )
        made = torch.empty(len(x), high)
        native.native().linear(facts, x.data_ptr(), len(x), made.data_ptr(), torch.get_num_threads())
        return made

    found = product(x)
    wanted = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T
    assert float(((found - wanted).abs() / size).max()) < 1e-6
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(before, 2))
        assert torch.equal(product(x[-1:].clone())[0], found[-1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("d", [8, 16, 40, 128])
def test_attention_is_that_of_pytorch(built: str, heads: tuple[int, int], d: int) -> None:
    """In a layer with a cap on its scores; each query sees some of the keys before it, in any pattern."""
    config = Gemma2Config(
        vocab_size=50, hidden_size=48, intermediate_size=32, num_hidden_layers=1, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=d, query_pre_attn_scalar=d, attn_logit_softcapping=3.0,
        initializer_range=0.3, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(d)
    model = Gemma2ForCausalLM(config).eval()
    packed, n = pack(model), 21
    ids = torch.randint(1, 50, (2, n))
    sees = (torch.rand(2, 1, n, n) < 0.5).tril() | torch.eye(n, dtype=torch.bool)
    buffers = [torch.zeros(2, heads[1], n, d) for _ in range(2)]
    slots = Slots([one.data_ptr() for one in buffers], n, n)

    added = torch.where(sees, 0.0, -1e9)
    with torch.inference_mode():
        found, states, _ = packed.forward(ids, slots, sees)
        torch.testing.assert_close(found, model(ids, attention_mask=added).logits, rtol=1e-4, atol=1e-5)
        model.model.layers[0].self_attn.attn_logit_softcapping = 30.0
        assert not torch.allclose(
            found, model(ids, attention_mask=added).logits, rtol=0.01
        )  # the cap is felt
        model.model.embed_tokens.weight[0] = torch.nan
        ids[1, 3] = 0
        sees[1, :, 4:, 3] = False
        poisoned = packed.forward(ids, slots, sees)[1]
    assert torch.equal(poisoned[0], states[0]) and poisoned[1, 3].isnan().all()
    assert poisoned[1, :3].isfinite().all() and poisoned[1, 4:].isfinite().all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_poisons_its_own_token_alone(built: str, poison: float) -> None:
    matrix, x = packed("Q4_1", 20, 96), torch.randn(5, 96)
    clean = matrix.product(x)
    x[2, 50] = poison
    found = matrix.product(x)
    assert not torch.isfinite(found[2]).any()
    rest = [0, 1, 3, 4]
    assert torch.equal(found[rest], clean[rest])


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.1)])
@pytest.mark.parametrize("width", [64, 33, 600])
def test_a_layer_is_near_the_one_that_it_replaces(bits: int, most: float, width: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(width, 50)
    linear.requires_grad_(False)
    linear.weight *= torch.logspace(-2, 2, 50)[:, None]
    linear.weight[3] = 0.0
    made = QuantisedLinear(made_of(linear.weight, bits), linear.bias)
    x = torch.randn(2, 5, width)
    found, wanted = made(x), linear(x)
    assert found.dtype == torch.float32 and found.shape == (2, 5, 50)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < most
    assert torch.equal(found[..., 3], wanted[..., 3])
    assert made(x[:0]).shape == (0, 5, 50)


def test_four_bits_are_fitted_by_least_squares() -> None:
    """No worse than the codes between the least and the largest weight of a group."""
    weight = np.random.default_rng(0).standard_normal((200, 32)).astype(np.float32)
    made = numbers(four_bits(weight), "Q4_1")
    low, high = weight.min(1, keepdims=True), weight.max(1, keepdims=True)
    plain = np.rint((weight - low) / (high - low) * 15) * (high - low) / 15 + low
    assert ((made - weight) ** 2).mean() < 0.95 * ((plain - weight) ** 2).mean()


def test_scales_near_zero_cut_no_weight_off_and_large_ones_are_refused() -> None:
    for size in (1e-3, 1e-4, 1e-5):
        weight = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32) * np.float32(size)
        error = np.abs(numbers(eight_bits(weight), "Q8_0") - weight).max()
        assert error <= 1.2 * max(np.abs(weight).max() / 254, 127 * 2.0**-25)
    for wrong in (1e8, np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite, or too large"):
            eight_bits(np.full((2, 32), wrong, np.float32))


def test_layers_do_not_follow_what_changes_around_them() -> None:
    """PyTorch's default dtype, another dtype of the ids, a model that is converted."""
    layer = QuantisedLinear(made_of(torch.ones(6, 64) * 0.5, 4), torch.ones(6))
    embedding = QuantisedEmbedding(layer._matrix)
    x, ids = torch.ones(3, 64), torch.tensor([5, 0])
    wanted, row = layer(x), embedding(ids)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(layer(x), wanted) and layer(x).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(embedding(ids.to(torch.int32)), row)
    assert torch.equal(layer.to(torch.bfloat16)(x), wanted) and torch.equal(layer(x.bfloat16()), wanted)
    for refused in (layer.state_dict, lambda: pickle.dumps(embedding)):
        with pytest.raises(TypeError, match="cannot be saved: save the one that it was made from"):
            refused()


def test_an_embedding_refuses_ids_without_a_row() -> None:
    made = QuantisedEmbedding(made_of(torch.ones(5, 32), 8))
    assert made(torch.tensor([[0, 4]])).shape == (1, 2, 32)
    for ids in ([5], [-1]):
        with pytest.raises(IndexError, match="there are 5 rows"):
            made(torch.tensor(ids))


# --- whole models ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def builtin_pair() -> sprinter.Pair:
    return sprinter.load_pair()


@pytest.fixture(scope="module", params=["int8", "int4"])
def pair(request: pytest.FixtureRequest) -> sprinter.Pair:
    return sprinter.load_pair(dtype=request.param)


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
    text = "Once upon a time there was a little dog who had a red ball. One day he went"
    ids = torch.tensor([pair.tokenizer(text)["input_ids"]])  # type: ignore[misc]
    with torch.inference_mode():
        laws = [one.models.target.module("a test")(ids).logits.softmax(-1) for one in (builtin_pair, pair)]
    gap, most = tv_distance(*laws), 0.03 if pair.models.target.weights == "int8" else 0.15
    assert 0 < float(gap.mean()) < most


def test_gates_load_and_records_repeat(pair: sprinter.Pair, builtin_pair: sprinter.Pair) -> None:
    target, plain = pair.models.target, builtin_pair.models.target
    assert weights_fingerprint(target.model) == weights_fingerprint(plain.model)
    assert target.weights in ("int8", "int4") and target.size == plain.size
    made = pair.generate(PROMPTS[0], method="sprinter(tau=0.5)", max_new_tokens=30, seed=3)
    assert made.stats.trusted > 0
    record = made.to_dict()
    assert record["models"]["target"]["dtype"] == target.weights
    assert record["models"]["draft"]["kernels"] == version("sprinter-kernels"), "their laws hang on it"
    again = sprinter.load_pair(dtype=record["models"]["target"]["dtype"])
    assert again.generate(record["prompt"]["token_ids"], **record["request"]).text == made.text


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_linear_layer_is_replaced_once(tied: bool, dtype: str) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.requires_grad_(False)
    ids, size = torch.arange(10)[None], parameter_count(model)
    before = model(ids).logits
    quantise(model, dtype)
    assert parameter_count(model) == size and is_quantised(model)
    assert not any(type(one) in (nn.Linear, nn.Embedding) for one in model.modules())
    assert sum(isinstance(one, QuantisedLinear) for one in model.modules()) == 2 * 7 + 1
    assert (model.lm_head._matrix is model.model.embed_tokens._matrix) == tied  # type: ignore[union-attr]
    assert model.dtype == torch.float32 and model.lm_head._matrix.form.name == "Q8_0"
    change = float((model(ids).logits - before).abs().max() / before.abs().max())
    assert 0 < change < (0.02 if dtype == "int8" else 0.2)


@pytest.mark.parametrize("name", FAMILIES)
def test_files_are_run_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """Weights, biases, tied matrices and the order of rows are the dequantised model's; activations are rounded."""
    pytest.importorskip("gguf", reason=NO_GGUF)
    written(name, tmp_path / "m.gguf", "Q8_0")
    plain = dequantised(tmp_path / "m.gguf", torch.float32)
    kept = dequantised(tmp_path / "m.gguf", torch.float32, quantised="gguf")
    assert kept.stored == plain.stored == "Q8_0" and kept.eos_ids == plain.eos_ids
    assert parameter_count(kept.model) == parameter_count(plain.model)
    assert weights_fingerprint(kept.model) == weights_fingerprint(plain.model)
    layers = {path: part for path, part in kept.model.named_modules() if hasattr(part, "_matrix")}
    assert len(layers) == 3 * 7 + 2
    for path, layer in layers.items():
        own, other = layer._matrix, plain.model.get_submodule(path)
        assert torch.equal(own.rows(torch.arange(own.high)), other.weight)
        bias = getattr(other, "bias", None)
        assert bias is None or torch.equal(layer.bias, bias)
    ids = torch.arange(1, 60)[None]
    with torch.inference_mode():
        wanted, found = plain.model(ids).logits, kept.model(ids).logits
        assert torch.equal(layers["model.embed_tokens"](ids), plain.model.model.embed_tokens(ids))
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.08


@pytest.mark.parametrize("name", OURS)
def test_a_token_has_the_same_law_in_every_forward_pass(name: str, tmp_path: Path) -> None:
    """To the bit: alone, with others, in a ragged batch, in a tree, behind a shared prefix."""
    pytest.importorskip("gguf", reason=NO_GGUF)
    written(name, tmp_path / "m.gguf", "Q5_0")
    model = load_models(tmp_path / "m.gguf", dtype="gguf").target.model
    text = torch.randint(1, 250, (1, 40), generator=torch.Generator().manual_seed(0))
    runner = make_runner(model, max_len=50, compile=False)
    assert runner.name == "row"
    whole = runner.extend(text).logits
    assert whole is not None
    for step in (1, 2, 3, 8, 13):
        runner.rewind([0])
        parts = [runner.extend(text[:, at : at + step]).logits for at in range(0, 40, step)]
        assert torch.equal(torch.cat([one for one in parts if one is not None], 1), whole)
    rows = make_runner(model, batch=3, max_len=50, compile=False)
    rows.extend(text[:, :9].expand(3, -1), [9, 4, 6])
    found = rows.extend(torch.cat([text[:, 9:15], text[:, 4:10], text[:, 6:12]]), [6, 6, 2]).logits
    assert found is not None
    assert torch.equal(found[0], whole[0, 9:15]) and torch.equal(found[1], whole[0, 4:10])
    assert torch.equal(found[2, :2], whole[0, 6:8])
    some = rows.extend(text[:, 15:18], rows=[0]).logits
    assert some is not None and torch.equal(some, whole[:, 15:18])
    some = rows.extend(torch.cat([text[:, 8:11], text[:, 10:13]]), rows=[2, 1]).logits
    assert some is not None and torch.equal(some, torch.cat([whole[:, 8:11], whole[:, 10:13]]))
    runner.rewind([10])
    branches = torch.cat([text[:, 10:11], text[:, 30:31], text[:, 11:13]], 1)
    tree = runner.extend(branches, parents=[[9, 9, 10, 12]]).logits
    assert tree is not None and torch.equal(tree[:, [0, 2, 3]], whole[:, 10:13])


@pytest.mark.parametrize("name", ["llama", "qwen2-yarn", "qwen3", "gemma3"])
def test_rows_of_different_lengths_stand_in_one_line_without_padding(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    written(name, tmp_path / "m.gguf", "Q5_0")
    model = load_models(tmp_path / "m.gguf", dtype="gguf").target.model
    text = torch.randint(1, 250, (4, 30), generator=torch.Generator().manual_seed(0))
    assert not pads_rows(model)
    outputs, sizes, lines = [], list[tuple[int, ...]](), list[torch.Tensor | None]()
    for flat in (True, False):
        rows = make_runner(model, batch=4, max_len=50, compile=False)
        assert isinstance(rows, RowRunner) and rows._takes_flat
        rows._takes_flat &= flat
        sizes.clear()
        own: Any = rows.straight

        def noted(tokens: torch.Tensor, *given: Any, own: Any = own, **named: Any) -> Any:
            sizes.append(tuple(tokens.shape))
            return own(tokens, *given, **named)

        rows.straight = noted
        rows.extend(text[:, :9], [9, 4, 6, 1])
        several = rows.extend(text[:, 9:15], [6, 1, 2, 0], hidden_layers=[0, 2])
        few = rows.extend(text[:2, 15:19], [1, 4], rows=[3, 1])
        states = rows.extend(text[:, 19:22], [3, 2, 1, 1], logits=False)
        assert rows.lengths == [18, 11, 9, 3] and states.logits is None
        few_sizes = list(sizes)
        rows.extend(text[:, :2], [0, 0, 0, 0])  # no token at all
        assert rows.lengths == [18, 11, 9, 3]
        sizes[:] = few_sizes
        outputs.append((several, few, states))
        in_line = [(1, 20), (1, 9), (1, 5), (1, 7)]
        assert sizes == (in_line if rows._takes_flat else [(4, 9), (4, 6), (2, 4), (4, 3)])
        lines.append(rows.extend(text[:, 22:25], [3, 1, 2, 1], line=True).logits)
    line, padded = lines
    assert line is not None and padded is not None and len(line) == 7
    each = torch.cat([own[:n] for own, n in zip(padded, [3, 1, 2, 1], strict=True)])
    assert torch.equal(line, each)
    for one, other, counts in zip(*outputs, ([6, 1, 2, 0], [1, 4], [3, 2, 1, 1]), strict=True):
        assert (one.logits is None) == (other.logits is None) and len(one.layers) == len(other.layers)
        pairs = zip([one.hidden, *one.layers], [other.hidden, *other.layers], strict=True)
        for mine, padded in [*pairs, *([(one.logits, other.logits)] if one.logits is not None else [])]:
            assert mine is not None and padded is not None and mine.shape == padded.shape
            assert mine.isfinite().all()
            for row, n in enumerate(counts):
                assert torch.equal(mine[row, :n], padded[row, :n])


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_a_pair_of_files_writes_and_says_what_it_is(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    for seed, which in enumerate(("target", "draft")):
        torch.manual_seed(seed)
        written("qwen2", tmp_path / f"{which}.gguf", kind)
    made = sprinter.load_pair(tmp_path / "target.gguf", tmp_path / "draft.gguf", dtype="gguf")
    assert made.models.target.weights == f"gguf (from {kind})" and is_quantised(
        made.models.target.module("a test")
    )
    texts = {
        made.generate([5, 9, 20], method=one, temperature=0, max_new_tokens=20).text
        for one in ("autoregressive", "speculative(gamma=3)")
    }
    assert len(texts) == 1
    record = made.generate([5, 9, 20], max_new_tokens=2).models["target"]
    again = {name: record[name] for name in ("dtype", "attn_implementation", "quantization_config")}
    assert sprinter.load_pair(record["id"], **again).models.target.weights == f"gguf (from {kind})"
    eight = load_models(tmp_path / "target.gguf", dtype="int8").target
    assert eight.weights == f"int8 (from {kind})"
