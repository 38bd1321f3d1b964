"""Addressed random numbers. A statistical test fails by chance once in 10,000 seeds, or as its docstring says."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.tools import FALSE_ALARM, chi_square_p, rate_p, uniform_p
from torch import Tensor

from sprinter import random as numbers
from sprinter.laws import one_hot
from sprinter.random import AddressedDraws, Purpose, draw_tokens

KEYS = [0, 1, 2**32, 2**64 - 1, 0xDEADBEEF12345678, 0x0123456789ABCDEF]
LAW = torch.tensor([0.4, 0.0, 0.05, 0.25, 0.1, 0.001, 0.149, 0.05])
SEVEN = AddressedDraws(7)
Axis = Callable[[int, Purpose], tuple[AddressedDraws, tuple[int, int, Purpose, int]]]

# Draws and address (round, position, purpose, row) of the i-th number of a series.
AXES: dict[str, Axis] = {
    "round": lambda i, purpose: (SEVEN, (i, 5, purpose, 0)),
    "position": lambda i, purpose: (SEVEN, (1, i, purpose, 0)),
    "row": lambda i, purpose: (SEVEN, (1, 5, purpose, i)),
    "seed": lambda i, purpose: (AddressedDraws(i), (1, 5, purpose, 0)),
    "request": lambda i, purpose: (AddressedDraws(7, request=i), (1, 5, purpose, 0)),
}


@pytest.fixture(params=AXES)
def axis(request: pytest.FixtureRequest) -> Axis:
    """Each part of an address in turn."""
    return AXES[request.param]


def tokens(axis: Axis, law: Tensor, n: int, purpose: Purpose = Purpose.DRAFT) -> list[int]:
    series = (axis(i, purpose) for i in range(n))
    return [draws.token(law, *address) for draws, address in series]


def uniforms(axis: Axis, n: int, purpose: Purpose) -> list[float]:
    series = (axis(i, purpose) for i in range(n))
    return [draws.uniform(*address) for draws, address in series]


# --- together --------------------------------------------------------------------------------------------------------
class OtherDraws(AddressedDraws):
    """Draws of a class that only it knows."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (6, 7), (6, 5000)])
@pytest.mark.parametrize("other", [AddressedDraws, OtherDraws])
def test_tokens_drawn_together_are_those_drawn_alone(
    rows: int, vocab: int, dtype: torch.dtype, other: type[AddressedDraws]
) -> None:
    torch.manual_seed(rows)
    for i in range(8):
        laws = torch.softmax(3 * torch.randn(rows, vocab, dtype=dtype), -1)
        laws[: i % (rows + 1)] = one_hot(laws[: i % (rows + 1)])  # up to all of them
        draws = [AddressedDraws(2**70, 1), other(-1, 2), *map(AddressedDraws, range(rows))]
        asked = [(one, i, 2**31 + row, row % 3) for row, one in enumerate(draws[:rows])]
        for purpose in (Purpose.DRAFT, Purpose.TARGET):
            alone = [
                one.token(law, round, position, purpose, row)
                for law, (one, round, position, row) in zip(laws, asked, strict=True)
            ]
            assert draw_tokens(laws, asked, purpose).tolist() == alone


def test_a_token_is_drawn_on_a_device_without_waiting_for_it() -> None:
    """A meta tensor has no values: to fetch one is an error."""
    for rows in (1, 2):
        laws = torch.empty(rows, 8, device="meta")
        assert draw_tokens(laws, [(AddressedDraws(), 1, 2, 0)] * rows, Purpose.DRAFT).shape == (rows,)


# --- addresses -------------------------------------------------------------------------------------------------------
def test_an_address_gives_the_same_number_in_any_order() -> None:
    law = torch.full((50,), 0.02)
    addresses = list(itertools.product(range(3), range(4), Purpose, range(2)))
    first = [AddressedDraws(3, 1).token(law, *address) for address in addresses]
    draws = AddressedDraws(3, 1)
    assert [draws.token(law, *address) for address in reversed(addresses)] == first[::-1]
    assert draws.uniform(2, 9, Purpose.TRUST) == AddressedDraws(3, 1).uniform(2, 9, Purpose.TRUST)


def test_every_part_of_the_address_counts() -> None:
    """64-bit keys of 120,000 addresses differ (false alarm 4e-10)."""
    keys = [
        AddressedDraws(seed, request).address(round, position, purpose, row)
        for seed, request in itertools.product((-1, 0, 1, 10**30), range(3))
        for round, position, purpose, row in itertools.product(range(10), range(100), Purpose, range(2))
    ]
    assert len(keys) == 120_000
    assert len(set(keys)) == len(keys)


def test_long_texts_and_many_rows_do_not_share_addresses() -> None:
    draws = AddressedDraws()
    parts = [(1, 0, 1, 0), (0, 2**31, 1, 0), (0, 0, 1, 1), (2**20, 2**30, 4, 100), (2**20, 2**30, 4, 101)]
    assert len({draws.address(round, position, Purpose(p), row) for round, position, p, row in parts}) == len(
        parts
    )


# --- race times ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vocab", [1, 3, 1000, 50_257])
def test_numpy_and_torch_race_times_agree(vocab: int) -> None:
    for key in KEYS:
        here = torch.from_numpy(numbers._race_times_numpy(key, vocab))
        there = numbers._race_times_torch(key, vocab, torch.device("cpu"))
        assert here.dtype == there.dtype == torch.float32
        assert bool((here > 0).all()) and bool(torch.isfinite(here).all())
        torch.testing.assert_close(here, there, rtol=1e-6, atol=0)


def test_numpy_and_torch_draw_the_same_tokens() -> None:
    """A law decides alike by both (float noise would part them about once in 10 million draws)."""
    law = torch.softmax(torch.randn(1000, generator=torch.Generator().manual_seed(1)), -1)
    draws = AddressedDraws(1)
    for position in range(300):
        key = draws.address(1, position, Purpose.DRAFT, 0)
        there = int((law / numbers._race_times_torch(key, 1000, torch.device("cpu"))).argmax())
        assert draws.token(law, 1, position, Purpose.DRAFT) == there


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_draws_the_same_tokens() -> None:
    law = torch.softmax(torch.randn(5000, generator=torch.Generator().manual_seed(1)), -1)
    draws = AddressedDraws(1)
    for position in range(300):
        here = draws.token(law, 1, position, Purpose.DRAFT)
        assert here == draws.token(law.cuda(), 1, position, Purpose.DRAFT)


@pytest.mark.statistical
def test_race_times_are_exponential() -> None:
    times = [
        numbers._race_times_numpy(AddressedDraws(9).address(1, i, Purpose.DRAFT, 0), 37) for i in range(2000)
    ]
    assert uniform_p(np.exp(-np.concatenate(times).astype(np.float64)).tolist()) > FALSE_ALARM
    first_to_arrive = np.min(times, axis=1) * 37  # Exp(1) again if the 37 are independent
    assert uniform_p(np.exp(-first_to_arrive.astype(np.float64)).tolist()) > FALSE_ALARM


@pytest.mark.parametrize("vocab", [50_257, 151_936, 256_000])
def test_no_two_tokens_always_tie(vocab: int) -> None:
    """Of two tokens with equal times under every key the less likely one would never be drawn."""
    draws = AddressedDraws(2)
    keys = [draws.address(1, position, Purpose.DRAFT, 0) for position in range(3)]
    times = [numbers._race_times_numpy(key, vocab).view(np.uint32).astype(np.uint64) for key in keys]
    assert len(np.unique(times[0] << 32 ^ times[1] << 16 ^ times[2])) == vocab


@pytest.mark.statistical
def test_tokens_with_like_words_race_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs whose words the first step of the finaliser tells apart least: chance 0.1 against 0.9, and 0.01.

    False alarm 1e-4 over all pairs together.
    """
    high, low = numbers._words(256_000)
    mixed = (high ^ high >> 16) << 2  # multiplication keeps a difference in the two top bits there
    order = np.argsort(mixed, kind="stable")
    pairs = [order[[i, i + 1]] for i in np.nonzero(np.diff(mixed[order]) == 0)[0][:6]]
    assert len(pairs) == 6
    draws, n = AddressedDraws(4), 10_000
    keys = [draws.address(1, position, Purpose.DRAFT, 0) for position in range(n)]
    for pair in pairs:
        words = high[pair], low[pair]
        monkeypatch.setattr(numbers, "_words", lambda vocab, words=words: words)
        times = np.stack([numbers._race_times_numpy(key, 2) for key in keys]).astype(np.float64)
        for chance in (0.1, 0.01):
            wins = int((times[:, 0] / chance < times[:, 1] / (1 - chance)).sum())
            assert rate_p(wins, n, chance) > FALSE_ALARM / 12


# --- tokens ----------------------------------------------------------------------------------------------------------
@pytest.mark.statistical
@pytest.mark.parametrize("purpose", [Purpose.DRAFT, Purpose.TARGET])
def test_tokens_follow_their_law(axis: Axis, purpose: Purpose) -> None:
    counts = np.bincount(tokens(axis, LAW, 4000, purpose), minlength=len(LAW))
    assert chi_square_p(counts.tolist(), LAW.double().tolist()) > FALSE_ALARM


@pytest.mark.statistical
def test_neighbouring_addresses_draw_independently(axis: Axis) -> None:
    law = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    drawn = np.array(tokens(axis, law, 4000))
    pairs = np.bincount(3 * drawn[::2] + drawn[1::2], minlength=9)
    assert chi_square_p(pairs.tolist(), torch.outer(law, law).flatten().tolist()) > FALSE_ALARM


@pytest.mark.statistical
@pytest.mark.parametrize("other", [Purpose.TRUST, Purpose.ACCEPT, Purpose.TARGET])
def test_purposes_draw_independently_at_one_address(axis: Axis, other: Purpose) -> None:
    law, n = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 2500
    drafted = np.array(tokens(axis, law, n))
    if other == Purpose.TARGET:
        second, chances = np.array(tokens(axis, law, n, other)), law
    else:
        second = (np.array(uniforms(axis, n, other)) * 4).astype(int)
        chances = torch.full((4,), 0.25, dtype=torch.float64)
    counts = np.bincount(len(chances) * drafted + second, minlength=3 * len(chances))
    assert chi_square_p(counts.tolist(), torch.outer(law, chances).flatten().tolist()) > FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_without_probability_are_never_drawn(dtype: torch.dtype) -> None:
    law = torch.tensor([0.0, 1e-3, 0.0, 0.999, 0.0], dtype=dtype)
    assert set(tokens(AXES["position"], law, 8000)) == {1, 3}


@pytest.mark.parametrize("hot", [0, 17, 99])
def test_a_one_hot_law_gives_its_token(hot: int) -> None:
    law = torch.zeros(100)
    law[hot] = 1.0
    assert set(tokens(AXES["round"], law, 3000)) == {hot}


def test_only_proportions_matter() -> None:
    draws = AddressedDraws(11)
    for position in range(500):
        whole = draws.token(LAW, 1, position, Purpose.DRAFT)
        assert draws.token(0.125 * LAW, 1, position, Purpose.DRAFT) == whole
        assert draws.token(LAW.double(), 1, position, Purpose.DRAFT) == whole


def test_small_noise_rarely_changes_a_draw() -> None:
    """Relative noise of 1e-3 moves a uniform law over 100 tokens by at most 1e-3; few draws may follow it."""
    chance = torch.Generator().manual_seed(5)
    law, draws = torch.full((100,), 0.01), AddressedDraws(12)
    noisy = law * (1 + 1e-3 * torch.randn(100, generator=chance))
    both = [
        (draws.token(law, 1, i, Purpose.DRAFT), draws.token(noisy, 1, i, Purpose.DRAFT)) for i in range(3000)
    ]
    assert sum(clean != moved for clean, moved in both) <= 15


@pytest.mark.statistical
def test_rare_tokens_of_a_large_vocabulary() -> None:
    """Float32, 50,000 tokens: ten share 0.9, the others 2e-6 each; rare blocks of ids come at their own rate."""
    law = torch.full((50_000,), 0.1 / 49_990)
    law[:10] = 0.09
    drawn = np.array(tokens(AXES["position"], law, 2000))
    edges = [10, 12_500, 25_000, 37_500, 50_000]
    blocks = [int(((drawn >= low) & (drawn < high)).sum()) for low, high in itertools.pairwise(edges)]
    counts = [int((drawn == token).sum()) for token in range(10)] + blocks
    chances = [0.09] * 10 + [0.1 * (high - low) / 49_990 for low, high in itertools.pairwise(edges)]
    assert chi_square_p(counts, chances) > FALSE_ALARM


# --- uniform and keep ------------------------------------------------------------------------------------------------
@pytest.mark.statistical
@pytest.mark.parametrize("purpose", [Purpose.TRUST, Purpose.ACCEPT])
def test_uniform_numbers_are_uniform(axis: Axis, purpose: Purpose) -> None:
    values = uniforms(axis, 5000, purpose)
    assert all(0 <= u < 1 for u in values)
    assert uniform_p(values) > FALSE_ALARM


@pytest.mark.statistical
def test_neighbouring_uniform_numbers_are_independent(axis: Axis) -> None:
    cells = (np.array(uniforms(axis, 10_000, Purpose.ACCEPT)) * 4).astype(int)
    counts = np.bincount(4 * cells[::2] + cells[1::2], minlength=16)
    assert chi_square_p(counts.tolist(), [1 / 16] * 16) > FALSE_ALARM


def test_keep_compares_the_accept_numbers_of_successive_positions() -> None:
    draws, chances = AddressedDraws(5), [0.1, 0.9, 0.5, 0.5]
    for round in range(50):
        numbers_there = [draws.uniform(round, 8 + i, Purpose.ACCEPT, row=2) for i in range(4)]
        wanted = [u < b for u, b in zip(numbers_there, chances, strict=True)]
        assert draws.keep(chances, round, 8, row=2) == wanted


@pytest.mark.statistical
def test_keep_keeps_at_its_chances() -> None:
    """Four chances, false alarm 1e-4 each; 0 and 1 leave nothing to chance."""
    draws, chances, n = AddressedDraws(6), [0.0, 0.02, 0.5, 0.97, 1.0], 8000
    kept = np.array([draws.keep(chances, round, 1) for round in range(n)]).sum(0)
    assert kept[0] == 0 and kept[4] == n
    for hits, chance in zip(kept[1:4], chances[1:4], strict=True):
        assert rate_p(int(hits), n, chance) > FALSE_ALARM
    assert draws.keep([], 1, 1) == []


@pytest.mark.parametrize("vocab", [37, 3072])
def test_a_race_of_rows_gives_the_tokens_of_the_single_draws(vocab: int) -> None:
    laws = torch.softmax(3 * torch.randn(200, vocab, generator=torch.Generator().manual_seed(vocab)), -1)
    draws = [AddressedDraws(seed) for seed in range(200)]
    keys = [one.address(2, 5 + i % 3, Purpose.DRAFT, 1) for i, one in enumerate(draws)]
    words = numbers.race_words(vocab, torch.device("cpu"))
    low, high = torch.tensor([key & 0xFFFFFFFF for key in keys]), torch.tensor([key >> 32 for key in keys])
    expected = [
        one.token(law, 2, 5 + i % 3, Purpose.DRAFT, 1)
        for i, (one, law) in enumerate(zip(draws, laws, strict=True))
    ]
    assert numbers.race(laws, low, high, words).tolist() == expected
    assert len(set(expected)) > 20


@pytest.mark.parametrize("kept", [1, 3, 40, 4000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_from_truncated_laws_of_large_vocabularies_look_at_what_is_left(
    kept: int, dtype: torch.dtype
) -> None:
    """The same tokens as over the whole vocabulary, whatever share of it has a probability."""
    chance = torch.Generator().manual_seed(kept)
    for i in range(20):
        law = torch.zeros(50_000, dtype=dtype)
        ids = torch.randperm(50_000, generator=chance)[:kept]
        law[ids] = torch.rand(kept, generator=chance, dtype=dtype) + 1e-3
        draws = AddressedDraws(i)
        times = numbers._race_times_numpy(draws.address(1, 2, Purpose.DRAFT), 50_000)
        assert draws.token(law, 1, 2, Purpose.DRAFT) == int((law.numpy() / times).argmax())


@pytest.mark.parametrize("vocab", [1 << 12, 50_000])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.3, 0.01])
def test_a_race_that_leaves_out_times_has_the_same_winner(vocab: int, share: float) -> None:
    """Flat, steep and nearly one-hot laws, with and without zeros, in both dtypes."""
    chance = np.random.default_rng(5)
    draws = AddressedDraws(3)
    for number in range(60):
        logits = chance.normal(size=vocab) * (0.0, 1.0, 4.0, 12.0)[number % 4]
        weights = np.exp(logits - logits.max())
        weights[chance.random(vocab) >= share] = 0.0
        weights[number] = 1.0
        law = torch.from_numpy((weights / weights.sum()).astype((np.float32, np.float64)[number % 2]))
        times = numbers._race_times_numpy(draws.address(1, number, Purpose.DRAFT), vocab)
        assert draws.token(law, 1, number, Purpose.DRAFT) == int((law.numpy() / times).argmax())


def test_addresses_of_many_draws_are_those_of_each() -> None:
    draws = [AddressedDraws(seed) for seed in (0, 7, -3, 2**64 + 5)]
    rounds, positions = np.arange(1, 4)[:, None], np.arange(3)[:, None] + [0, 5, 9, 2**20]
    found = numbers.addresses(draws, rounds, positions, Purpose.TARGET)
    assert found.tolist() == [
        [
            own.address(int(rounds[step, 0]), int(positions[step, i]), Purpose.TARGET)
            for i, own in enumerate(draws)
        ]
        for step in range(3)
    ]
