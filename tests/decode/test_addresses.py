"""Random numbers through the loop: the text does not depend on drafting ahead, and no number is used twice."""

from __future__ import annotations

import pytest
from tests.decode.chains import (
    Grows,
    LikelyToken,
    RecordingDraws,
    Remembers,
    Unsure,
    ends_at_eos,
    ids,
    listen,
)

from sprinter.decode.accept import Exact
from sprinter.decode.enumerate import MarkovPair
from sprinter.decode.loop import Limits
from sprinter.decode.spec import METHODS, Method, parse_method
from sprinter.decode.stop import Fixed
from sprinter.decode.trust import Coin, Gate
from sprinter.random import AddressedDraws

PAIR = MarkovPair(seed=41, vocab=5, sharp=1.2, zeros=0.15)
COMPOSED = [
    Method(stop=Unsure(0.6)),
    Method(stop=Remembers(0.5)),
    Method(stop=Grows()),
    Method(trust=Coin(0.6), stop=Unsure(0.5), cap=5),
    Method(trust=Gate(0.4), stop=Remembers(0.5), cap=4),
    Method(trust=LikelyToken(0.3), stop=Fixed(4)),
]
ALL = [*(parse_method(name) for name in METHODS.names()), *COMPOSED]


def some(seeds: int, method: Method) -> range:
    """Fewer seeds for rules that take their time and only change chances."""
    return range(seeds if isinstance(method.accept, Exact) else 3)


@pytest.mark.parametrize("method", ALL, ids=lambda method: method.name)
def test_the_text_does_not_depend_on_what_is_drafted_ahead(method: Method) -> None:
    """Tokens, origins, rounds and drifts, over many seeds."""
    texts = set()
    for seed in some(10, method):
        one, four, many = (
            listen(method, PAIR, Limits(12, ends_at_eos), AddressedDraws(seed), ahead=ahead, complete=True)[0]
            for ahead in (1, 4, 16)
        )
        assert one.tokens == four.tokens == many.tokens
        assert one.accept_lengths == four.accept_lengths == many.accept_lengths
        assert one.finish == four.finish == many.finish
        assert one.stats == four.stats == many.stats
        texts.add(ids(one))
    assert len(texts) > len(some(10, method)) // 2  # seeds matter


@pytest.mark.parametrize("method", ALL, ids=lambda method: method.name)
@pytest.mark.parametrize("ahead", [1, 4])
def test_no_address_serves_two_draws(method: Method, ahead: int) -> None:
    """Not even for what is drafted ahead and thrown away."""
    drawn = 0
    for seed in some(12, method):
        draws = RecordingDraws(AddressedDraws(seed))
        listen(method, PAIR, Limits(14), draws, ahead=ahead)
        assert draws.reused == {}
        drawn += len(draws.used)
    assert drawn >= 14 * len(some(12, method))


def test_requests_of_one_seed_write_different_texts() -> None:
    texts = {ids(listen(Method(), PAIR, Limits(12), AddressedDraws(3, request))[0]) for request in range(20)}
    assert len(texts) > 15
