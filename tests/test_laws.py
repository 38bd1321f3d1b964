"""Logits into laws, and the arithmetic of laws."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sprinter.errors import UserError
from sprinter.laws import (
    Sampling,
    entropy,
    first_largest,
    js_divergence,
    kl_divergence,
    overlap,
    process,
    process_rows,
    raw_law,
    residual,
    tv_distance,
)

LN2 = math.log(2)


def random_logits(rows: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocab, generator=chance, dtype=dtype)


@st.composite
def laws(draw: st.DrawFn, count: int) -> list[Tensor]:
    """Laws over one vocabulary, zeros and one-hot laws included."""
    vocab = draw(st.integers(2, 6))
    weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=vocab, max_size=vocab)
    rows = [draw(weights.filter(lambda row: sum(row) > 0)) for _ in range(count)]
    return [torch.tensor(row, dtype=torch.float64) / sum(row) for row in rows]


# --- Sampling --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"temperature": -1.0},
            "temperature=-1.0 is out of range: give a number in [0, 1e+30] (0 is greedy)",
        ),
        (
            {"temperature": math.nan},
            "temperature=nan is out of range: give a number in [0, 1e+30] (0 is greedy)",
        ),
        (
            {"temperature": math.inf},
            "temperature=inf is out of range: give a number in [0, 1e+30] (0 is greedy)",
        ),
        ({"temperature": 1e-40}, "temperature=1e-40 is too small to divide by: give 0 (greedy)"),
        (
            {"temperature": 1e40},
            "temperature=1e+40 is out of range: give a number in [0, 1e+30] (0 is greedy)",
        ),
        (
            {"top_k": -1},
            "top_k=-1 is out of range: give a whole number in [0, 2147483647] (0 keeps all tokens)",
        ),
        ({"top_k": 2.5}, "top_k=2.5 is not a whole number: give one in [0, 2147483647] (0 keeps all tokens)"),
        ({"top_k": 2.0}, "top_k=2.0 is not a whole number: give one in [0, 2147483647] (0 keeps all tokens)"),
        (
            {"top_k": True},
            "top_k=True is not a whole number: give one in [0, 2147483647] (0 keeps all tokens)",
        ),
        (
            {"top_k": math.inf},
            "top_k=inf is not a whole number: give one in [0, 2147483647] (0 keeps all tokens)",
        ),
        ({"top_p": 0.0}, "top_p=0.0 is out of range: give a number in (0, 1] (1 keeps all tokens)"),
        ({"top_p": 1.1}, "top_p=1.1 is out of range: give a number in (0, 1] (1 keeps all tokens)"),
        ({"top_p": math.nan}, "top_p=nan is out of range: give a number in (0, 1] (1 keeps all tokens)"),
        ({"min_p": -0.1}, "min_p=-0.1 is out of range: give a number in [0, 1] (0 keeps all tokens)"),
        ({"min_p": 1.5}, "min_p=1.5 is out of range: give a number in [0, 1] (0 keeps all tokens)"),
    ],
)
def test_sampling_says_what_is_wrong(values: dict[str, float], message: str) -> None:
    with pytest.raises(UserError) as error:
        Sampling(**values)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_sampling_takes_four_values() -> None:
    with pytest.raises(TypeError, match="Sampling takes temperature, top_k, top_p, min_p: got 5 values"):
        Sampling(0.5, 5, 0.9, 0.25, 7)


def test_sampling_takes_the_edges_of_its_ranges() -> None:
    edges = [Sampling(temperature=1e-30), Sampling(top_p=1e-9), Sampling(min_p=1.0)]
    for sampling in edges:
        assert process(torch.tensor([1.0, 3.0, 2.0]), sampling).tolist() == [0, 1, 0]
    assert Sampling(temperature=0).greedy
    assert not Sampling().greedy


def test_sampling_takes_numbers_of_any_kind() -> None:
    given = Sampling(Fraction(1, 2), np.int64(5), Fraction(9, 10), np.float32(0.25))  # type: ignore[arg-type]
    plain = Sampling(0.5, 5, 0.9, 0.25)
    assert given == plain and repr(given) == repr(plain)
    logits = random_logits(2, 12, dtype=torch.float32)
    assert torch.equal(process(logits, given), process(logits, plain))


# --- process ---------------------------------------------------------------------------------------------------------
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=2.0),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=500),
    Sampling(top_p=0.01),
    Sampling(top_p=0.5),
    Sampling(top_p=0.95),
    Sampling(min_p=0.05),
    Sampling(min_p=1.0),
    Sampling(0.7, 7, 0.8, 0.1),
    Sampling(1.3, 20, 0.9, 0.02),
]


def transformers_law(logits: Tensor, sampling: Sampling) -> Tensor:
    """What transformers draws from: its own processors in the order of ``generate``."""
    no_text = torch.zeros(len(logits), 1, dtype=torch.long)
    if sampling.temperature != 1.0:
        logits = TemperatureLogitsWarper(sampling.temperature)(no_text, logits)
    if sampling.top_k > 0:
        logits = TopKLogitsWarper(sampling.top_k)(no_text, logits)
    if sampling.top_p < 1.0:
        logits = TopPLogitsWarper(sampling.top_p)(no_text, logits)
    if sampling.min_p > 0.0:
        logits = MinPLogitsWarper(sampling.min_p)(no_text, logits)
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_process_agrees_with_transformers(sampling: Sampling) -> None:
    logits = random_logits(200, 40)
    found, wanted = process(logits, sampling), transformers_law(logits, sampling)
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_process_gives_laws_in_any_shape(sampling: Sampling) -> None:
    logits = random_logits(6, 30, dtype=torch.float32)
    law = process(logits.view(2, 3, 30), sampling)
    assert law.shape == (2, 3, 30)
    assert law.dtype == torch.float32
    assert bool((law >= 0).all())
    torch.testing.assert_close(law.sum(-1), torch.ones(2, 3), rtol=0, atol=2e-6)
    for row in range(6):
        assert torch.equal(law.view(6, 30)[row], process(logits[row], sampling))


def test_process_leaves_its_input_alone() -> None:
    logits = random_logits(3, 20)
    before = logits.clone()
    for sampling in [*SETTINGS, Sampling(temperature=0)]:
        process(logits, sampling)
    assert torch.equal(logits, before)


def test_temperature_zero_is_one_hot_at_the_first_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [-1.0, -1.0, -1.0, -1.0], [1.0, 2.0, 4.0, 3.0]])
    law = process(logits, Sampling(temperature=0, top_k=2, top_p=0.5, min_p=0.1))
    assert law.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]


def test_lower_temperature_tends_to_greedy() -> None:
    logits = random_logits(50, 20)
    gap = tv_distance(process(logits, Sampling(temperature=1e-3)), process(logits, Sampling(temperature=0)))
    assert float(gap.max()) < 1e-3


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_top_k_keeps_exactly_k_where_scores_tie(k: int) -> None:
    law = process(torch.zeros(4, 9), Sampling(top_k=k))
    assert (law > 0).sum(-1).tolist() == [k] * 4
    torch.testing.assert_close(law.amax(-1), torch.full((4,), 1 / k))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.05, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (0.95, 3), (0.96, 4), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    chances = [0.5, 0.30000001, 0.15, 0.04999999]  # sums are a little above 0.5, 0.8, 0.95
    law = process(torch.tensor(chances, dtype=torch.float64).log(), Sampling(top_p=top_p))
    assert int((law > 0).sum()) == kept
    assert law.tolist()[:kept] == pytest.approx([chance / sum(chances[:kept]) for chance in chances[:kept]])


def test_top_p_keeps_the_first_of_tied_tokens() -> None:
    law = process(torch.zeros(10, dtype=torch.float64), Sampling(top_p=0.25))
    assert law.tolist() == pytest.approx([1 / 3] * 3 + [0] * 7)


def test_min_p_is_relative_to_the_largest() -> None:
    law = process(torch.tensor([0.6, 0.3, 0.08, 0.02], dtype=torch.float64).log(), Sampling(min_p=0.1))
    assert law.tolist() == pytest.approx([0.6 / 0.98, 0.3 / 0.98, 0.08 / 0.98, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0), Sampling(0.7, 20, 0.9, 0.01)], ids=str
)
def test_half_precision_logits_are_raised_to_float32(dtype: torch.dtype, sampling: Sampling) -> None:
    logits = random_logits(20, 200).to(dtype)
    law = process(logits, sampling)
    assert law.dtype == torch.float32
    assert torch.equal(law, process(logits.float(), sampling))
    assert float((law.sum(-1) - 1).abs().max()) < 1e-6
    assert torch.equal(raw_law(logits), torch.softmax(logits.float(), -1))


def test_raw_law_knows_no_temperature() -> None:
    logits = random_logits(5, 12)
    assert torch.equal(raw_law(logits), process(logits, Sampling()))
    assert raw_law(logits).dtype == torch.float64


def test_forbidden_tokens_stay_forbidden() -> None:
    logits = random_logits(50, 12)
    logits[:, ::3] = -torch.inf
    for sampling in SETTINGS:
        assert float(process(logits, sampling)[:, ::3].max()) == 0.0


# --- distances -------------------------------------------------------------------------------------------------------
@given(laws(2))
def test_total_variation_and_overlap(pair: list[Tensor]) -> None:
    p, q = pair
    tv = float(tv_distance(p, q))
    assert -1e-15 <= tv <= 1 + 1e-12
    assert float(overlap(p, q)) == pytest.approx(1 - tv, abs=1e-12)
    assert tv == pytest.approx(float(tv_distance(q, p)), abs=1e-15)
    assert tv == pytest.approx(float((p - q).clamp(min=0).sum()), abs=1e-12)
    assert float(tv_distance(p, p)) == 0.0


@given(laws(3))
def test_total_variation_is_a_metric(trio: list[Tensor]) -> None:
    p, q, r = trio
    assert float(tv_distance(p, r)) <= float(tv_distance(p, q) + tv_distance(q, r)) + 1e-12


@given(laws(1))
def test_entropy_bounds(one: list[Tensor]) -> None:
    (p,) = one
    assert -1e-15 <= float(entropy(p)) <= math.log(len(p)) + 1e-12
    assert float(entropy(p)) == pytest.approx(sum(-x * math.log(x) for x in p.tolist() if x > 0), abs=1e-12)


def test_entropy_at_its_ends() -> None:
    assert float(entropy(torch.eye(4, dtype=torch.float64)[1])) == 0.0
    assert float(entropy(torch.full((8,), 1 / 8, dtype=torch.float64))) == pytest.approx(
        math.log(8), abs=1e-14
    )


@given(laws(2))
def test_kl_divergence(pair: list[Tensor]) -> None:
    p, q = pair
    kl = float(kl_divergence(p, q))
    if bool(((p > 0) & (q == 0)).any()):
        assert kl == math.inf
    else:
        cross = sum(-x * math.log(y) for x, y in zip(p.tolist(), q.tolist(), strict=True) if x > 0)
        assert kl == pytest.approx(cross - float(entropy(p)), abs=1e-10)
        assert kl >= 2 * float(tv_distance(p, q)) ** 2 - 1e-12  # Pinsker
    assert float(kl_divergence(p, p)) == 0.0


@given(laws(2))
def test_js_divergence(pair: list[Tensor]) -> None:
    p, q = pair
    js, mean = float(js_divergence(p, q)), (p + q) / 2
    assert -1e-15 <= js <= LN2 + 1e-12
    assert js == pytest.approx(float(js_divergence(q, p)), abs=1e-12)
    assert js == pytest.approx(float(entropy(mean) - (entropy(p) + entropy(q)) / 2), abs=1e-12)
    assert js <= LN2 * float(tv_distance(p, q)) + 1e-12  # Lin (1991)


def test_js_divergence_of_disjoint_laws_is_ln_2() -> None:
    one = torch.eye(3, dtype=torch.float64)
    assert float(js_divergence(one[0], one[2])) == pytest.approx(LN2, abs=1e-15)


@pytest.mark.parametrize("function", [tv_distance, overlap, kl_divergence, js_divergence])
def test_distances_work_on_the_last_axis(function: object) -> None:
    p, q = torch.softmax(random_logits(6, 5, 1), -1), torch.softmax(random_logits(6, 5, 2), -1)
    assert callable(function)
    whole = function(p.view(2, 3, 5), q.view(2, 3, 5))
    assert whole.shape == (2, 3)
    for row in range(6):
        assert float(whole.view(6)[row]) == pytest.approx(float(function(p[row], q[row])), abs=1e-14)


# --- residual --------------------------------------------------------------------------------------------------------
@given(laws(2))
def test_residual(pair: list[Tensor]) -> None:
    p, q = pair
    before = p.clone(), q.clone()
    r = residual(p, q)
    assert torch.equal(p, before[0]) and torch.equal(q, before[1])
    assert float(r.sum()) == pytest.approx(1, abs=1e-12)
    assert bool((r >= 0).all())
    tv = float(tv_distance(p, q))
    if tv > 1e-9:
        assert float(r[p <= q].sum()) == 0.0
        assert (torch.minimum(p, q) + tv * r).tolist() == pytest.approx(p.tolist(), abs=1e-9)


def test_residual_of_equal_laws_is_a_law() -> None:
    p = torch.softmax(random_logits(4, 7), -1)
    assert torch.equal(residual(p, p.clone()), p)


def test_residual_row_by_row() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.1, 0.4]], dtype=torch.float64)
    assert residual(p, q)[0].tolist() == [0.5, 0.5, 0.0]
    assert residual(p, q)[1].tolist() == pytest.approx([0, 2 / 3, 1 / 3])


class Launches(TorchDispatchMode):
    """Counts operations that compute something."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = {"view", "slice", "select", "unsqueeze", "expand", "alias", "detach", "scalar_tensor"}
        self.count += func.__name__.split(".")[0] not in views
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rows", "most"), [(1, 230), (4, 340)])
def test_few_rows_take_few_launches(rows: int, most: int) -> None:
    settings = torch.ones(rows, dtype=torch.float64)
    logits = torch.randn(rows, 128_256, generator=torch.Generator().manual_seed(0))
    with Launches() as launched:
        process_rows(logits, 0.7 * settings, ((50 * settings).long(), 0.9 * settings, 0 * settings))
    assert 0 < launched.count <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("vocab", "bits"), [(50, 4), (3072, 4), (3072, 3), (3072, 1)])
def test_rows_with_settings_as_tensors_get_the_same_laws(
    dtype: torch.dtype, vocab: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many bits a step of the search tries."""
    monkeypatch.setattr("sprinter.laws._ROOM", 12 * vocab * (2**bits - 1))
    logits = 4 * torch.randn(12, vocab, dtype=dtype, generator=torch.Generator().manual_seed(vocab))
    logits[::3] = (logits[::3] * 4).round() / 4  # ties
    settings = [
        Sampling(temperature, top_k, top_p, min_p)
        for temperature, top_k, top_p, min_p in itertools.product(
            (0.0, 0.7, 1.0), (0, 1, 7, vocab + 3), (1.0, 0.9, 0.3), (0.0, 0.1)
        )
    ]
    for start in range(0, len(settings), 12):
        mine = settings[start : start + 12]
        temperature, top_p, min_p = (
            torch.tensor([getattr(one, name) for one in mine], dtype=dtype)
            for name in ("temperature", "top_p", "min_p")
        )
        top_k = torch.tensor([one.top_k for one in mine])
        laws = process_rows(logits, temperature, (top_k, top_p, min_p))
        for law, row, one in zip(laws, logits, mine, strict=True):
            expected = process(row, one)
            assert torch.equal(law > 0, expected > 0), one
            torch.testing.assert_close(law, expected, rtol=1e-5, atol=1e-7)
    bare = process_rows(logits, torch.tensor([0.0, 0.5, 1.0] * 4, dtype=dtype), None)
    for law, row, value in zip(bare, logits, [0.0, 0.5, 1.0] * 4, strict=True):
        torch.testing.assert_close(law, process(row, Sampling(value)))


@pytest.mark.parametrize("top_p", [0.5, 0.999, 0.999999])
def test_top_p_beyond_the_first_tokens_that_are_ranked(top_p: float) -> None:
    """A flat law needs more tokens than are ranked first, a steep one fewer; both as by a full sort, up to rounding."""
    steep = -torch.arange(3000, dtype=torch.float64) / 40
    for logits in (torch.zeros(3000, dtype=torch.float64), steep, torch.stack([steep, steep / 100])):
        law, raw = process(logits, Sampling(top_p=top_p)), torch.softmax(logits, -1)
        ranked = raw.sort(dim=-1, descending=True, stable=True).values
        kept = (ranked.cumsum(-1) - ranked < top_p - 1e-9).sum(-1)
        assert torch.equal((law > 0).sum(-1), kept)
        assert ((law > 0).cumsum(-1).amax(-1) == kept).all() and (law > 0).diff(dim=-1).sum(-1).max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_largest_is_found_as_torch_finds_it(dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(1)
    values = torch.randint(0, 5, (4, 7, 300), generator=chance).to(dtype)
    assert torch.equal(first_largest(values), values.argmax(-1, keepdim=True))
    assert torch.equal(first_largest(values[0, 0]), values[0, 0].argmax(-1, keepdim=True))
    assert torch.equal(first_largest(values.transpose(1, 2)), values.transpose(1, 2).argmax(-1, keepdim=True))
    asked = values.clone().requires_grad_()
    assert torch.equal(first_largest(asked), values.argmax(-1, keepdim=True))
