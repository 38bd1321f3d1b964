"""Keys and values in bfloat16, of models whose passes our kernels run: attention, bits, texts, memory, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

import sprinter
from sprinter.cli.doctor import _held
from sprinter.errors import UserError
from sprinter.models import kernels
from sprinter.models.choose import make_runner
from sprinter.models.memory import token_bytes
from sprinter.models.pair import load_models

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
from tests.models.test_draft_runs import check_run, each_set  # noqa: F401 (a fixture)
from tests.models.test_kernel_passes import TEXT, of_kind, saved

PROMPTS = ["Once upon a time, there was", "The dog", "Lily had a red ball and a", "One day"]


def halved(model: Any) -> Any:
    kernels.set_cache_dtype(model, "bfloat16")
    return model


def llama(d: int, heads: int, kv: int, longest: int) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=90, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=d, max_position_embeddings=longest, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    assert kernels.compile_layers(model) is None
    return halved(model)


class Given(DynamicCache):
    """Keys and values that are there already, whatever a pass makes."""

    def __init__(self, buffers: list[Tensor], count: int) -> None:
        super().__init__()
        self._given = [one[:, :, :count].float() for one in buffers]

    def update(self, *made: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return self._given[2 * made[2]], self._given[2 * made[2] + 1]


@pytest.mark.usefixtures("each_set")
@pytest.mark.parametrize(("d", "heads", "kv"), [(16, 6, 2), (48, 3, 3), (64, 2, 1), (80, 4, 1), (128, 2, 1)])
def test_attention_is_that_of_float32_over_rounded_keys_and_values(d: int, heads: int, kv: int) -> None:
    """Ragged rows, the longest of them beyond many blocks, read in parts; transformers reads what the kernels wrote."""
    lengths, longest = (700, 37, 1, 65), 704
    model = llama(d, heads, kv, longest)
    runner: Any = make_runner(model, batch=len(lengths), max_len=longest, compile=True)
    ids = torch.randint(1, 90, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    parts = [runner.extend(ids[:, :40], [min(40, one) for one in lengths]).logits]
    parts.append(runner.extend(ids[[0, 3], 40:], [660, 25], rows=[0, 3]).logits)
    buffers = runner._cache.buffers()
    assert {one.dtype for one in buffers} == {torch.bfloat16}
    for row, length in enumerate(lengths):
        own = parts[0][row, : min(40, length)]
        if length > 40:
            own = torch.cat([own, parts[1][[0, 3].index(row), : length - 40]])
        held = Given([one[row : row + 1] for one in buffers], length)
        with torch.inference_mode():
            wanted = model(ids[row : row + 1, :length], None, None, held, use_cache=True).logits[0]
        assert float((own - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.usefixtures("each_set")
def test_what_is_written_are_the_nearest_numbers() -> None:
    """PyTorch's rounding, of the keys and values that the same kernels keep in float32."""
    model = llama(32, 4, 2, 64)
    kept = []
    for dtype in ("bfloat16", "float32"):
        kernels.set_cache_dtype(model, dtype)
        runner: Any = make_runner(model, batch=1, max_len=40, compile=True)
        runner.extend(TEXT[:1, :24] % 90)
        kept.append([one[:, :, :24] for one in runner._cache.buffers()[:2]])  # of the first layer
    for half, whole in zip(*kept, strict=True):
        assert torch.equal(half, whole.bfloat16()) and not torch.equal(half.float(), whole)


@pytest.mark.usefixtures("each_set")
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_draft_runs_are_those_of_single_steps(kind: str) -> None:
    check_run(halved(of_kind("llama-biases", kind)))


@pytest.mark.parametrize("name", ["llama-biases", "gemma2", "gpt2", "neox"])
def test_a_token_is_the_same_in_every_pass(name: str) -> None:
    """To the bit: alone, with others, after a rewind, in a copied row, and in another runner that takes it over."""
    model = halved(of_kind(name, "float32"))
    rows: Any = make_runner(model, batch=3, max_len=40, compile=True)
    whole = rows.extend(TEXT).logits
    for row in range(3):
        alone: Any = make_runner(model, batch=1, max_len=40, compile=True)
        assert torch.equal(alone.extend(TEXT[row : row + 1]).logits[0], whole[row])
    rows.rewind([9, 4, 12])
    again = rows.extend(torch.stack([TEXT[0, 9:12], TEXT[1, 4:7], TEXT[2, 12:15]])).logits
    assert all(torch.equal(again[row], whole[row, at : at + 3]) for row, at in enumerate((9, 4, 12)))
    rows.rewind([0, 0, 12])
    rows.copy(2, [0], 12)
    copied = rows.extend(TEXT[2:, 12:14], rows=[0]).logits
    assert torch.equal(copied[0], whole[2, 12:14])
    other: Any = make_runner(model, batch=1, max_len=60, compile=True)
    other.adopt(rows, 12)
    assert torch.equal(other.extend(TEXT[2:, 12:14]).logits[0], whole[2, 12:14])
    kernels.set_cache_dtype(model, "float32")
    usual: Any = make_runner(model, batch=3, max_len=40, compile=True)
    difference = usual.extend(TEXT).logits - whole
    assert 0 < float(difference.norm() / whole.norm()) < 0.02
    assert usual.cache_bytes == 2 * rows.cache_bytes == 2 * 3 * 41 * token_bytes(halved(model))


@pytest.fixture(scope="module")
def pair() -> Any:
    return sprinter.load_pair(compile=True, cache_dtype="bfloat16")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["autoregressive", "speculative(gamma=4)", "sprinter", "tree"])
def test_rows_write_what_they_write_alone(pair: Any, method: str, temperature: float) -> None:
    kept = {"method": method, "max_new_tokens": 40, "temperature": temperature, "never_slower": False}
    together = pair.generate_batch(PROMPTS, seed=[1, 2, 3, 4], rows=4, **kept)
    for at, out in enumerate(together):
        assert out.text == pair.generate(PROMPTS[at], seed=at + 1, **kept).text


def test_exact_methods_and_kept_prefixes_write_the_text_of_plain_decoding(pair: Any) -> None:
    kept = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True, "never_slower": False}
    plain = pair.generate(PROMPTS[0], method="autoregressive", **kept)
    again = pair.generate(PROMPTS[0], method="speculative(gamma=3)", **kept)
    assert plain.text == again.text and len(plain.tokens) == 40
    longer = PROMPTS[0] + plain.text
    first, second = (pair.generate(longer, method="autoregressive", **kept) for _ in range(2))
    assert second.text == first.text and second.stats.cached_tokens > 0


def test_records_name_it(pair: Any) -> None:
    models = pair.generate("The dog", max_new_tokens=2).models
    assert models["target"]["cache_dtype"] == models["draft"]["cache_dtype"] == "bfloat16"
    assert _held(pair.models.target).endswith(" KiB a token (bfloat16)")


class Old(NamedTuple):
    """Of older kernels."""

    buffers: Any


def test_what_cannot_keep_them_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    with pytest.raises(
        UserError, match=r"^cache_dtype=bfloat16 is for models whose passes our kernels run on a CPU"
    ):
        load_models(tmp_path, compile=False, cache_dtype="bfloat16")
    with pytest.raises(UserError, match=r"^cache_dtype=int8 is unknown: give float32, bfloat16, float16, "):
        load_models(tmp_path, compile=True, cache_dtype="int8")
    monkeypatch.setattr("sprinter_kernels.Slots", Old)
    with pytest.raises(UserError, match=r"^cache_dtype=bfloat16 needs sprinter-kernels 0.5, and "):
        load_models(tmp_path, compile=True, cache_dtype=torch.bfloat16)
    loaded = load_models(tmp_path, compile=True, cache_dtype="float32").target
    assert kernels.cache_dtype_of(loaded.model) == "float32"


def test_two_pairs_of_one_model_keep_one_dtype() -> None:
    """Kept prefixes of the model are read by both."""
    model = of_kind("llama-biases", "float32")
    kernels.keep_cache_in(model, "bfloat16", "it")
    for dtype in ("float32", None):
        with pytest.raises(
            UserError, match=r"^it was loaded with cache_dtype=bfloat16, and float32 is asked for now: "
        ):
            kernels.keep_cache_in(model, dtype, "it")
    kernels.keep_cache_in(model, "bfloat16", "it")
    assert kernels.cache_dtype_of(model) == "bfloat16"
