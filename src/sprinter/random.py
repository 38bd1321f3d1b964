"""Addressed random numbers: u = f(seed, request, round, position, row, purpose, token id).

No stream is consumed, so the same seed gives the same text alone or in a batch, whatever was drafted ahead and
discarded. A token is drawn by an exponential race (the Gumbel-max trick): token i arrives at time E_i / law_i, and the
first one wins. Small numerical noise in the law rarely changes the winner, unlike with an inverse-CDF draw.

splitmix64 folds the address into a 64-bit key. Per token a murmur-style 32-bit finaliser mixes the key with a fixed
64-bit word of the token id, half by half. 32-bit words would collide in vocabularies of 50,000 and more, and of two
tokens that always tie the less likely one would never be drawn. The integers are the same on every device; on the CPU
numpy computes them, because its calls cost a fraction of torch's on a few thousand elements.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "ANY_SEED",
    "AddressedDraws",
    "Draws",
    "PositionDraws",
    "Purpose",
    "addresses",
    "draw_tokens",
    "drawn_seed",
    "following_seed",
    "race",
    "race_words",
    "sample_seed",
    "word_blocks",
]

ANY_SEED = -1
"""Stands for a seed that is drawn."""

_MASK = (1 << 64) - 1
_C1, _C2 = 0x7FEB352D, 0x846CA68B
_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's
_MANY = 1 << 12  # tokens, from which on it pays to leave out those that cannot win
_SLACK = np.float32(1 - 1e-5)  # for rounding


class Purpose(IntEnum):
    """Use of a random number; part of its address."""

    DRAFT = 1
    TRUST = 2
    ACCEPT = 3
    TARGET = 4  # replacement, bonus or plain target token: at most one of them per position and round
    ALLOCATE = 5  # which model writes a text, once per text


class Draws(Protocol):
    """Random numbers of one decoding. The loop and the drivers use no other source."""

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        """One token id from ``law [V]``."""
        ...

    def uniform(self, round: int, position: int, purpose: Purpose, row: int = 0) -> float:
        """One number in [0, 1)."""
        ...

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        """For tokens at ``position, position + 1, ...``: u < chance (purpose ACCEPT)."""
        ...


class AddressedDraws:
    """Counter-based random numbers of one request.

    Args:
        seed: any integer; the same seed gives the same text.
        request: number of the request within a seed; rows of one batch have different numbers.
    """

    def __init__(self, seed: int = 0, request: int = 0) -> None:
        key = 0
        for word in range(
            seed.bit_length() // 64 + 1
        ):  # all words of the two's complement: no two seeds share a key
            key = _mix64(key ^ (seed >> 64 * word & _MASK))
        self._key = _mix64(key ^ (request & _MASK))

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        """One token id from ``law [V]`` (any non-negative weights)."""
        key = self.address(round, position, purpose, row)
        if law.device.type == "cpu":
            weights = law.numpy()
            present = weights != 0.0  # the other tokens never arrive
            many = np.count_nonzero(present)
            if many == 1:
                return int(present.argmax())
            if len(weights) < _MANY:
                return int((weights / _race_times_numpy(key, len(weights))).argmax())
            if 0 < 2 * many < len(weights):
                ids = np.flatnonzero(present)
                return int(ids[_first_arrival(weights[ids], key, len(weights), ids)])
            return _first_arrival(weights, key, len(weights))
        times = _race_times_torch(key, law.shape[-1], law.device)
        return int((law / times).argmax())

    def uniform(self, round: int, position: int, purpose: Purpose, row: int = 0) -> float:
        """One number in [0, 1), 53 bits."""
        return (self.address(round, position, purpose, row) >> 11) * 2.0**-53

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        """Whether u < chance for the tokens at ``position, position + 1, ...``."""
        return [self.uniform(round, position + i, Purpose.ACCEPT, row) < b for i, b in enumerate(chances)]

    def address(self, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        """The 64-bit key of one draw; ``race`` uses it to draw on a device."""
        return _mix64(_mix64(self._key ^ (round << 32 | position)) ^ (row << 8 | purpose))


class PositionDraws(AddressedDraws):
    """Random numbers that depend on the position alone, not on the round: those of plain decoding, where each round
    writes a token.

    Args:
        seed: as in ``AddressedDraws``. prompt: number of tokens before the first position.
    """

    def __init__(self, seed: int, prompt: int) -> None:
        super().__init__(seed)
        self._prompt = prompt

    def address(self, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        """The key of the round in which plain decoding writes a position."""
        return super().address(position - self._prompt + 1, position, purpose, row)


def draw_tokens(laws: Tensor, asked: Sequence[tuple[Draws, int, int, int]], purpose: Purpose) -> Tensor:
    """``Draws.token`` from each of ``laws [n, V]``, together where that is faster; the tokens are the same.

    Args:
        asked: draws, round, position and row of each token.

    Returns:
        Token ids ``[n]``, on the laws' device.
    """
    cpu, vocab = laws.device.type == "cpu", laws.shape[-1]
    addressed = all(isinstance(one[0], AddressedDraws) for one in asked)
    if cpu and addressed and len(asked) > 1 and np.count_nonzero(laws[0].numpy()) == 1:
        present = laws.numpy() != 0.0
        if np.count_nonzero(present) == len(present):  # one token in each, as in greedy decoding
            return torch.from_numpy(present.argmax(-1))
    apart = cpu and (len(asked) == 1 or vocab >= _MANY)
    if apart or any(type(one[0]) is not AddressedDraws for one in asked):
        each = zip(laws, asked, strict=True)
        ids = [draws.token(law, round, position, purpose, row) for law, (draws, round, position, row) in each]
        return torch.tensor(ids, device=laws.device)
    draws, *where = zip(*asked, strict=True)
    rounds, positions, rows = (np.array(each) for each in where)
    keys = addresses(draws, rounds, positions, purpose, rows)
    if not cpu:
        halves = keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)
        low, high = torch.from_numpy(np.stack(halves).astype(np.int64)).to(laws.device)
        return race(laws, low, high, race_words(vocab, laws.device))
    weights = laws.numpy()
    return torch.from_numpy((weights / _race_times_numpy(keys[:, None], vocab)).argmax(-1))


def addresses(
    draws: Sequence[AddressedDraws],
    rounds: np.ndarray,
    positions: np.ndarray,
    purpose: Purpose,
    rows: np.ndarray | int = 0,
) -> np.ndarray:
    """``AddressedDraws.address`` of many draws at once.

    Args:
        draws: of n texts. rounds, positions, rows: whole numbers that broadcast to ``[..., n]``.

    Returns:
        uint64 ``[..., n]``.
    """
    keys = np.array([own._key for own in draws], np.uint64)
    where = rounds.astype(np.uint64) << np.uint64(32) | positions.astype(np.uint64)
    what = np.asarray(rows).astype(np.uint64) << np.uint64(8) | np.uint64(purpose)
    return _mix64_numpy(_mix64_numpy(keys ^ where) ^ what)


def _mix64(x: int) -> int:
    """splitmix64: a bijection of 64-bit words (Steele et al. 2014)."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _M1) & _MASK
    x = ((x ^ (x >> 27)) * _M2) & _MASK
    return x ^ (x >> 31)


def _mix64_numpy(x: np.ndarray) -> np.ndarray:
    """``_mix64`` of each element, uint64."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


@lru_cache(maxsize=8)
def _words(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A fixed 64-bit word per token id, as its high and low 32 bits: splitmix64 of the id, so all words differ."""
    x = _mix64_numpy(np.arange(vocab, dtype=np.uint64) * np.uint64(_GOLDEN))
    return (x >> np.uint64(32)).astype(np.uint32), x.astype(np.uint32)


def word_blocks(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """High and low halves of the words of token ids, uint32, up to a whole block of 64, for our kernels."""
    return _words(-(-vocab // 64) * 64)


@lru_cache(maxsize=8)
def _words_torch(vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    high, low = (torch.from_numpy(half.astype(np.int64)).to(device) for half in _words(vocab))
    return high, low


def _first_arrival(weights: np.ndarray, key: int, vocab: int, ids: np.ndarray | None = None) -> int:
    """Index of the largest of some weights over their times; the others' times are not all computed.

    A time −ln(1 − u) is at least u, so a token whose weight over u is less than what another reaches cannot win.
    """
    below = _race_numbers(key, vocab, ids)
    bound = weights / -below
    first = int(bound.argmax())
    reached = weights[first] / -np.log1p(below[first])
    some = np.flatnonzero(bound >= reached * _SLACK)
    return int(some[(weights[some] / -np.log1p(below[some])).argmax()]) if len(some) else first


def _race_times_numpy(key: Any, vocab: int, ids: np.ndarray | None = None) -> np.ndarray:
    """Exp(1) times of all tokens, or of those in ``ids``, float32, strictly positive; keys ``[n, 1]``: ``[n, V]``."""
    u = _race_numbers(key, vocab, ids)
    # -log1p(-u) keeps full relative precision for early arrivals, which decide the race.
    np.log1p(u, out=u)
    np.negative(u, out=u)
    return u


def _race_numbers(key: Any, vocab: int, ids: np.ndarray | None) -> np.ndarray:
    """−u for numbers u in (0, 1) of all tokens, or of those in ``ids``, float32."""
    high, low = _words(vocab)
    if ids is not None:
        high, low = high[ids], low[ids]
    first, second = _halves(key)
    x = high ^ first
    y = x >> 16
    x ^= y
    x *= np.uint32(_C1)
    x ^= second
    x ^= low
    np.right_shift(x, 15, out=y)
    x ^= y
    x *= np.uint32(_C2)
    np.right_shift(x, 16, out=y)
    x ^= y
    u: np.ndarray = x.astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(-(2.0**-32))
    np.maximum(u, np.float32(-1 + 2.0**-24), out=u)
    return u


def _halves(key: int | np.ndarray) -> tuple[Any, Any]:
    """The low and the high 32 bits of keys."""
    if isinstance(key, int):
        return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    return key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)


def race_words(vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """High and low halves of the words of all token ids, each ``[vocab]`` int64, for ``race``."""
    return _words_torch(vocab, device)


def race(law: Tensor, key_low: Tensor, key_high: Tensor, words: tuple[Tensor, Tensor]) -> Tensor:
    """Draw one token per row; the tokens are those of ``AddressedDraws.token``.

    Args:
        law: ``[rows, V]``.
        key_low, key_high: halves of the rows' addresses, ``[rows]`` int64.
        words: the result of ``race_words``.

    Returns:
        Token ids ``[rows]``.
    """
    return (law / _race_times(key_low[:, None], key_high[:, None], words)).argmax(-1)


def _race_times_torch(key: int, vocab: int, device: torch.device) -> Tensor:
    return _race_times(key & 0xFFFFFFFF, key >> 32, _words_torch(vocab, device))


def _race_times(key_low: int | Tensor, key_high: int | Tensor, words: tuple[Tensor, Tensor]) -> Tensor:
    """``_race_times_numpy`` in int64 arithmetic (torch lacks uint32 shifts), with the same integers."""
    mask = 0xFFFFFFFF
    high, low = words
    x = high ^ key_low
    x = ((x ^ (x >> 16)) * _C1) & mask
    x = x ^ key_high ^ low
    x = ((x ^ (x >> 15)) * _C2) & mask
    x = x ^ (x >> 16)
    u = (x.float() + 0.5) * 2.0**-32
    return -torch.log1p(-u.clamp(max=1 - 2.0**-24))


def drawn_seed(seed: int) -> int:
    """The seed itself, or another one each time for -1, as llama.cpp has it."""
    return secrets.randbits(32) if seed == ANY_SEED else seed


def following_seed(seed: int, i: int) -> int:
    """The i-th seed from this one on, which passes over -1."""
    return seed + i + (seed < ANY_SEED <= seed + i)


def sample_seed(seed: int, number: int) -> int:
    """The seed of one of the samples of a seed, 63 bits: samples share no random numbers, nor do those of the next
    seed."""
    return AddressedDraws(seed, number)._key >> 1
