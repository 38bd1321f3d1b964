"""Keys and values of rows in fewer bits than weights, as on a GPU: eagerly, in our kernels, in graphs; refusals."""

from __future__ import annotations

from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests.engine import test_device_rounds as rounds
from tests.models.tiny import CONTEXT, fresh, tiny
from torch import Tensor

from sprinter.engine.backends.cuda_graph import GraphBackend
from sprinter.engine.engine import Engine
from sprinter.engine.record import models_record
from sprinter.errors import UserError
from sprinter.models import choose, kernels, memory
from sprinter.models.choose import exactness, make_runner
from sprinter.models.kernels import CACHES
from sprinter.models.runners.row import RowRunner

NARROW = {"bfloat16": 0.01, "float16": 0.0015, "float8_e4m3": 0.15}
"""Mean distance of the tiny models' laws from those of float32, at most: their weights are large."""
ROUNDING = 1e-5
graphed = rounds.graphed


def kept_in(kind: str, dtype: str) -> Any:
    model = fresh(kind)
    kernels.set_cache_dtype(model, dtype)
    return model


def laws(runner: Any, tokens: Tensor, pieces: list[int], counts: list[int] | None = None) -> Tensor:
    made = [runner.extend(one, counts).logits for one in tokens.split(pieces, 1)]
    return torch.cat(made, 1).softmax(-1)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", NARROW)
def test_laws_are_near_those_of_float32_and_the_same_in_all_passes(kind: str, dtype: str) -> None:
    model, plain = kept_in(kind, dtype), fresh(kind)
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(1, 61, (3, 24), generator=torch.Generator().manual_seed(3))
    made = [make_runner(one, batch=3, max_len=40) for one in (model, plain, model)]
    narrow, wide, again = (
        laws(one, tokens, sizes) for one, sizes in zip(made, ([24], [24], [9, 1, 5, 9]), strict=True)
    )
    assert [exactness(one) for one in (model, plain)] == ["up to rounding", "to the bit"]
    far = (narrow - wide).abs().sum(-1).mean() / 2
    assert ROUNDING < far < NARROW[dtype], far
    torch.testing.assert_close(narrow, again, atol=1e-3, rtol=0)  # numbers that are rounded apart
    assert all(isinstance(one, RowRunner) for one in made)
    share = CACHES[dtype].itemsize / 4
    assert made[0].cache_bytes == share * made[1].cache_bytes  # type: ignore[attr-defined]
    assert memory.token_bytes(model) == share * memory.token_bytes(plain)
    for row in range(3):  # the copies and moves of other passes
        made[0].wipe(row)  # type: ignore[attr-defined]
    made[0].rewind([4, 9, 2])
    some = made[0].extend(tokens[:2, 9:10], rows=[1, 0]).logits
    assert some is not None and some.isfinite().all()


def test_a_number_that_is_too_large_becomes_the_largest() -> None:
    model = kept_in("llama", "float8_e4m3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(1e6)
    runner = make_runner(model, max_len=8)
    assert runner.extend(torch.tensor([[3, 4, 5]])).logits.isfinite().all()  # type: ignore[union-attr]
    assert runner._cache.buffers()[1].float().abs().max() == 448  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_graphs_keep_them_too(graphed: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of captured rounds are those of eager steps over the same keys and values."""
    small, large = deepcopy(rounds.draft()), deepcopy(tiny("llama"))
    monkeypatch.setattr(rounds, "draft", lambda: small)
    monkeypatch.setattr(rounds, "tiny", lambda _: large)
    for model in (small, large):
        kernels.set_cache_dtype(model, dtype)
    pairs = [rounds.pair_of(compile) for compile in (True, False)]
    options: dict[str, Any] = {
        "method": "sprinter(tau=0.5, cap=4)",
        "ahead": 4,
        "max_new_tokens": 14,
        "seed": 2,
    }
    with Engine(pairs[0], rows=2, max_len=CONTEXT) as engine:
        ids = [engine.add(prompt, **options) for prompt in rounds.PROMPTS]
        assert isinstance(rows := engine._models.target, GraphBackend)
        found = engine.finish()
        assert {one.dtype for one in rows._captured._buffers} == {CACHES[dtype]}
    for id, prompt in zip(ids, rounds.PROMPTS, strict=True):
        rounds.assert_same(found[id], pairs[1].generate(prompt, **options | {"ahead": 1}))
    assert models_record(pairs[0].models, {})["draft"]["cache_dtype"] == dtype


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is installed on Linux alone")
@pytest.mark.parametrize("dtype", NARROW)
def test_our_kernels_read_and_write_them(dtype: str) -> None:
    pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
    from sprinter_kernels.fused import fused_layers
    from tests.models import test_fused as fused

    if not getattr(kernels.kernels("fused"), "WIDENS", False):
        pytest.skip("the kernels that are installed are older")
    model = fused.model_of("llama")
    kernels.keep_rows_in(model, dtype, "it")
    tokens = torch.randint(0, 61, (2, 2), generator=torch.Generator().manual_seed(2))
    expected = fused.run_pass(model, tokens, [0, 31], [2, 0], CACHES[dtype])
    with fused_layers(model) as layers:
        given = fused.run_pass(model, tokens, [0, 31], [2, 0], CACHES[dtype])
    assert all(layer.ran for layer in layers)
    # Triton's interpreter cuts bfloat16 off, and loses some carries of float8: later layers differ by that.
    near = 1e-3 if dtype == "float16" else 0.1
    for one, other in zip(given[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)
    step = float(torch.finfo(CACHES[dtype]).eps)
    for made, wanted in zip(given[2][:2], expected[2][:2], strict=True):  # what the first layer has written
        one, other = (torch.cat([x[2, :, :2], x[0, :, 31:33]]).float() for x in (made, wanted))
        assert ((one - other).abs() <= step * other.abs() + 1e-3).double().mean() > 0.9
    if dtype != "bfloat16":  # whose largest number is float32's
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(1e7)
        with fused_layers(model):
            values = fused.run_pass(model, tokens, [0, 31], [2, 0], CACHES[dtype])[2][1]
        assert values.float().abs().max() == torch.finfo(CACHES[dtype]).max, "a number that is too large"


def test_what_cannot_keep_them_is_refused() -> None:
    model = fresh("llama").bfloat16()
    with pytest.raises(UserError, match=r"^cache_dtype=float32 is wider than it, in bfloat16, whose"):
        kernels.keep_rows_in(model, "float32", "it")
    for own, before, later, now in (
        ("bfloat16", "the model's own", "float8_e4m3", "float8_e4m3"),
        (None, "the model's own", "float8_e4m3", "float8_e4m3"),
        ("float8_e4m3", "float8_e4m3", "float16", "float16"),
        ("float8_e4m3", "float8_e4m3", None, "the model's own"),
    ):
        model = fresh("llama").bfloat16()
        kernels.keep_rows_in(model, own, "it")
        assert kernels.cache_dtype_of(model) == (own if own == before else None)
        kernels.keep_rows_in(model, own, "it")
        with pytest.raises(
            UserError, match=rf"^it was loaded with {before} keys and values, and {now} ones are"
        ):
            kernels.keep_rows_in(model, later, "it")
        assert kernels.rows_dtype_of(model) == CACHES.get(before)
    with pytest.raises(UserError, match=r"^cache_dtype=float16 does not go with it \(is on meta\): leave"):
        choose.keep_cache_in(fresh("llama").to("meta"), "float16", "it")
    model = fresh("llama")
    assert kernels.compile_layers(model) is None
    with pytest.raises(
        UserError, match=r"^cache_dtype=float8_e4m3 is for GPUs, and it is on a CPU: give bfloat16"
    ):
        choose.keep_cache_in(model, "float8_e4m3", "it")
