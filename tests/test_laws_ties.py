"""One rule for ties and for what reaches top-p, whichever way the law is made; see ``Sampling``."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sprinter.laws import Sampling, process, process_rows, tv_distance

SLACK = {torch.float32: Fraction(1e-6), torch.float64: Fraction(1e-9)}
NASTY = (
    0.0,
    -0.0,
    -math.inf,
    1e-40,
    -1e-40,
    5e-324,
    1.0,
    1.0000001,
    -1.0,
    math.log(2),
    -80.0,
    -104.0,
    -800.0,
    1e8,
)
TEMPERATURES = (0.0, 2.0**-99, 1e-4, 0.7, 1.0, 3.0, 2.0**99)


def by_rows(logits: Tensor, sampling: Sampling) -> Tensor:
    """``process_rows`` as captured steps call it."""
    temperature, top_p, min_p = (
        torch.tensor([value], dtype=torch.float64)
        for value in (sampling.temperature, sampling.top_p, sampling.min_p)
    )
    cuts = (torch.tensor([sampling.top_k]), top_p, min_p)
    return process_rows(logits[None], temperature, cuts)[0]


def kept_by_the_rule(logits: Tensor, sampling: Sampling) -> list[bool] | None:
    """Whether each token is kept by top-k and top-p, in exact arithmetic; None where it hangs on last bits."""
    values = logits.tolist()
    ranking = sorted(range(len(values)), key=lambda i: (-values[i], i))
    ranking = ranking[: sampling.top_k or None]
    scores = torch.full_like(logits, -torch.inf)
    scores[ranking] = logits[ranking] / sampling.temperature
    law = torch.softmax(scores, -1).tolist()
    goal = Fraction(torch.tensor(sampling.top_p, dtype=logits.dtype).item())
    if goal < 1:
        goal, mass, kept = max(goal - SLACK[logits.dtype], Fraction(1, 2**50)), Fraction(0), 0
        while kept < len(ranking) and mass < goal:
            mass += Fraction(law[ranking[kept]])
            if abs(mass - goal) < Fraction(1, 10**12):
                return None
            kept += 1
        ranking = ranking[:kept]
    return [i in ranking and law[i] > 0 for i in range(len(values))]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Sampling]:
    """Logits with ties, signed zeros, forbidden tokens and tiny values; settings at their edges."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    some = draw(st.lists(st.sampled_from(NASTY) | st.floats(-30, 30, width=32), min_size=1, max_size=12))
    values = torch.tensor(some * draw(st.sampled_from([1, 2, 5, 30])), dtype=dtype)
    values[draw(st.integers(0, len(values) - 1))] = draw(st.sampled_from([0.0, -0.0, 2.0]))
    n = len(values)
    top_p = draw(
        st.integers(1, n).map(lambda k: k / n)
        | st.sampled_from([1e-9, 0.5, 0.99999999])
        | st.floats(1e-6, 1.0)
    )
    top_k = draw(st.integers(0, n + 2))
    return values, Sampling(
        draw(st.sampled_from(TEMPERATURES)), top_k, top_p, draw(st.sampled_from([0.0, 0.125, 0.5, 1.0]))
    )


@given(cases())
def test_both_ways_keep_the_same_tokens(case: tuple[Tensor, Sampling]) -> None:
    logits, sampling = case
    eager, rows = process(logits, sampling), by_rows(logits, sampling)
    assert torch.equal(eager > 0, rows > 0)
    assert float(tv_distance(eager, rows)) < 1e-6
    assert float(eager.sum()) == pytest.approx(1, abs=1e-5)


@given(cases())
def test_what_is_kept_is_what_the_rule_says(case: tuple[Tensor, Sampling]) -> None:
    logits, given = case
    sampling = Sampling(given.temperature or 1.0, given.top_k, given.top_p)
    wanted = kept_by_the_rule(logits, sampling)
    if wanted is not None:
        assert (process(logits, sampling) > 0).tolist() == wanted
        assert (by_rows(logits, sampling) > 0).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", [process, by_rows])
def test_zeros_of_either_sign_are_equal(way: object, dtype: torch.dtype) -> None:
    assert callable(way)
    logits = torch.tensor([-0.0, 0.0, -0.0, 0.0, -1.0], dtype=dtype)
    for sampling in (Sampling(top_k=3), Sampling(top_k=4, top_p=0.75), Sampling(top_p=0.6)):
        assert (way(logits, sampling) > 0).tolist() == [True] * 3 + [False] * 2
    assert way(logits, Sampling(0.0)).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", [process, by_rows])
@pytest.mark.parametrize("n", [2, 3, 7, 10, 30, 100, 1000])
def test_k_of_n_equal_tokens_reach_k_nths(way: object, dtype: torch.dtype, n: int) -> None:
    assert callable(way)
    for k in range(1, n, max(1, n // 25)):
        law = way(torch.full((n,), 0.3, dtype=dtype), Sampling(top_p=k / n))
        assert (law > 0).tolist() == [True] * k + [False] * (n - k)
