"""The loop: limits, ends, what it asks for, what it counts, greedy equality."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest
from tests.decode.chains import (
    EOS,
    Asked,
    Grows,
    LikelyToken,
    Remembers,
    TablePair,
    Text,
    Unsure,
    ends_at_eos,
    ids,
    listen,
    one_hot,
)

from sprinter.decode.accept import Exact
from sprinter.decode.draft import Origin, Record
from sprinter.decode.enumerate import ChainDriver, MarkovPair
from sprinter.decode.loop import Limits, decode
from sprinter.decode.spec import METHODS, Method, parse_method
from sprinter.decode.stop import Fixed, Never, Untrusted
from sprinter.decode.trust import Coin, Everyone, Gate
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

PAIR = MarkovPair(seed=31, vocab=4, sharp=1.5, zeros=0.2)
SPECS = [*METHODS.names(), "sprinter(tau=0, cap=3)", "sprinter(tau=1.0)", "coin(cap=2)", "draft-only(cap=4)"]
COMPOSED = [
    Method(stop=Unsure()),
    Method(stop=Remembers()),
    Method(stop=Grows()),
    Method(trust=Gate(0.3), stop=Fixed(3)),
    Method(trust=Coin(0.7), stop=Unsure(), cap=6),
    Method(trust=LikelyToken(), stop=Fixed(4), cap=3),
    Method(trust=Everyone(), stop=Fixed(5)),
]
ALL = [*map(parse_method, SPECS), *COMPOSED]
QUICK = [
    method for method in ALL if isinstance(method.accept, Exact)
]  # other rules change chances, not lengths


def name_of(method: object) -> str:
    return method.name if isinstance(method, Method) else str(method)


# --- limits ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("limit", range(1, 13))
def test_the_token_limit_is_exact(limit: int) -> None:
    """For every draft length and every other method, also when the driver drafts ahead; nobody reads beyond it."""
    methods = [*(Method(stop=Fixed(gamma)) for gamma in range(1, 9)), *QUICK]
    for i, method in enumerate(methods):
        for ahead in (1, 4):
            prompt = (0, 1, 2)
            record, exchange = listen(
                method, PAIR, Limits(limit), AddressedDraws(i), prompt=prompt, ahead=ahead
            )
            assert len(record.tokens) == limit
            assert record.finish == "length"
            end = len(prompt) + limit
            for ask, answer in exchange.drafts:
                assert ask.at_most >= 1
                assert ask.start + len(ask.tokens) + ask.at_most <= end
                assert len(answer.tokens) <= ask.at_most
            for score in exchange.scores:
                assert score.start + len(score.tokens) <= end


@pytest.mark.parametrize("cap", [1, 2, 3, 7])
def test_no_run_is_longer_than_its_cap(cap: int) -> None:
    for method in (Method(stop=Fixed(9), cap=cap), Method(trust=Gate(0.0), stop=Untrusted(), cap=cap)):
        _, exchange = listen(method, PAIR, Limits(30), ahead=16)
        for _, asks in groupby(exchange.drafts, key=lambda pair: pair[0].round):
            assert sum(len(answer.tokens) for _, answer in asks) <= cap


@pytest.mark.parametrize("gamma", range(1, 9))
def test_a_method_that_never_trusts_leaves_the_last_place_to_the_call(gamma: int) -> None:
    """Drafting the last token would be wasted: the call draws one anyway."""
    record, exchange = listen(Method(stop=Fixed(gamma)), PAIR, Limits(12))
    assert all(ask.start + len(ask.tokens) + ask.at_most <= 12 for ask, _ in exchange.drafts)
    assert record.tokens[-1].origin != Origin.ACCEPTED


# --- ends ------------------------------------------------------------------------------------------------------------
def chain_pair(target: Sequence[int], draft: Sequence[int], gate: float = 0.0) -> TablePair:
    """Deterministic: the n-th new token is target[n], or draft[n], for every prefix."""
    return TablePair(
        lambda text: one_hot(target[len(text) - 1]),
        lambda text: one_hot(draft[len(text) - 1]),
        lambda text: gate,
    )


def cut(text: Sequence[int]) -> Text:
    """Up to and with the first EOS."""
    text = tuple(text)
    return text[: text.index(EOS) + 1] if EOS in text else text


@pytest.mark.parametrize("gamma", range(1, 9))
def test_greedy_texts_are_the_targets_for_every_place_of_eos(gamma: int) -> None:
    """One-hot laws; the draft errs every third token; EOS at each place of the text, in the draft alone, or nowhere."""
    length = 11
    for place in range(length + 1):
        target = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0]
        target[place] = EOS  # the last place is never reached
        draft = [x if i % 3 else 1 - x if x < EOS else 0 for i, x in enumerate(target)]
        early = [EOS if i == place // 2 else x for i, x in enumerate(target)]
        for drafted in (draft, early, target):
            for ahead in (1, 16):
                method = Method(stop=Fixed(gamma))
                record, _ = listen(
                    method, chain_pair(target, drafted), Limits(length, ends_at_eos), prompt=(0,), ahead=ahead
                )
                assert ids(record) == cut(target[:length])
                assert record.finish == ("eos" if place < length else "length")


@pytest.mark.parametrize("place", range(6))
def test_greedy_texts_of_a_gate(place: int) -> None:
    """A gate that trusts all writes the draft's text; one that trusts none the target's."""
    target, draft = [0, 1, 0, 1, 1, 0, 0], [1] * 7
    target[place] = draft[place] = EOS
    for gate, wanted in ((0.9, draft), (0.1, target)):
        record, _ = listen(parse_method("sprinter"), chain_pair(target, draft, gate), Limits(6, ends_at_eos))
        assert ids(record) == cut(wanted)


def test_a_trusted_eos_ends_the_text_unchecked() -> None:
    pair = chain_pair([0, 1, 1, 1], [0, 1, EOS, 1], gate=0.9)
    record, exchange = listen(parse_method("sprinter"), pair, Limits(4, ends_at_eos))
    assert [token.origin for token in record.tokens] == [Origin.TRUSTED] * 3
    assert record.finish == "eos"
    assert exchange.scores == []
    assert record.stats.drift_coverage == 0.0


def test_a_trusted_eos_at_the_cap_ends_the_text_unchecked() -> None:
    """The cap checks a token so that the run goes on; a text that ends needs no call."""
    pair = chain_pair([0, 1, 1, 1], [0, EOS, 1, 1], gate=0.9)
    record, exchange = listen(parse_method("sprinter(cap=2)"), pair, Limits(4, ends_at_eos))
    assert ids(record) == (0, EOS)
    assert exchange.scores == []


def test_an_untrusted_eos_is_checked() -> None:
    refused = chain_pair([0, 1, 1, 1], [0, EOS, 1, 1], gate=0.1)
    record, _ = listen(parse_method("sprinter"), refused, Limits(4, ends_at_eos))
    assert ids(record) == (0, 1, 1, 1)
    kept = chain_pair([0, EOS, 1, 1], [0, EOS, 1, 1], gate=0.1)
    record, exchange = listen(Method(stop=Fixed(5)), kept, Limits(4, ends_at_eos))
    assert ids(record) == (0, EOS)
    assert record.tokens[-1].origin == Origin.ACCEPTED
    assert len(exchange.scores) == 1


def test_an_eos_from_the_target_ends_the_text() -> None:
    as_replacement, _ = listen(
        Method(stop=Fixed(2)), chain_pair([0, EOS, 1, 1], [0, 1, 1, 1]), Limits(4, ends_at_eos)
    )
    assert ids(as_replacement) == (0, EOS)
    assert as_replacement.tokens[-1].origin == Origin.REPLACEMENT
    as_bonus, _ = listen(
        Method(stop=Fixed(1)), chain_pair([0, EOS, 1, 1], [0, 1, 1, 1]), Limits(4, ends_at_eos)
    )
    assert as_bonus.tokens[-1].origin == Origin.BONUS
    plain, _ = listen(
        parse_method("autoregressive"), chain_pair([0, EOS, 1], [0, 0, 0]), Limits(3, ends_at_eos)
    )
    assert plain.tokens[-1].origin == Origin.TARGET


def test_nothing_is_drafted_after_an_end() -> None:
    """A driver that drafts ahead goes past EOS; the loop takes nothing of it."""
    pair = chain_pair([0, EOS, 1, 1, 1, 1], [0, EOS, 1, 1, 1, 1])
    record, exchange = listen(Method(stop=Fixed(5)), pair, Limits(6, ends_at_eos), ahead=5)
    assert len(exchange.drafts[0][1].tokens) == 5
    assert exchange.scores[0].tokens == (0, 0, EOS)
    assert ids(record) == (0, EOS)


def test_the_reason_is_the_first_that_comes() -> None:
    def ends(text: Sequence[int]) -> str | None:
        return "stop" if text[-2:] == [1, 1] else "eos" if text[-1] == EOS else None

    pair = chain_pair([0, 1, 1, EOS], [0, 1, 1, EOS])
    record, _ = listen(Method(stop=Fixed(4)), pair, Limits(4, ends))
    assert (ids(record), record.finish) == ((0, 1, 1), "stop")
    record, _ = listen(Method(stop=Fixed(4)), chain_pair([0, 1, EOS], [0, 1, EOS]), Limits(3, ends))
    assert record.finish == "eos"  # at the limit, and a reason of its own


def test_a_prompt_that_ends_itself_is_not_asked_about() -> None:
    record, _ = listen(Method(stop=Fixed(2)), PAIR, Limits(3, ends_at_eos), prompt=(0, EOS))
    assert len(record.tokens) >= 1


# --- what is asked ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ALL, ids=name_of)
def test_requests_and_counts(method: Method) -> None:
    """Over several seeds: counts agree with what was asked and written; one token from the target a call at most."""
    seen: set[Origin] = set()
    for seed in range(12 if method in QUICK else 4):
        complete = seed % 2 == 1
        record, exchange = listen(
            method, PAIR, Limits(10, ends_at_eos), AddressedDraws(seed), complete=complete
        )
        stats, tokens = record.stats, record.tokens
        calls = [ask for ask in exchange.scores if not ask.closing]
        assert stats.target_calls == len(calls)
        assert stats.closing_passes == len(exchange.scores) - len(calls)
        assert stats.new_tokens == len(tokens) == sum(record.accept_lengths)
        assert stats.rounds == len(record.accept_lengths) == max(token.round for token in tokens)
        assert min(record.accept_lengths) >= 1
        assert all(ask.tokens for ask in exchange.scores)
        assert [ask.round for ask in calls] == sorted({ask.round for ask in calls})
        assert all(
            previous.start + len(previous.tokens) >= following.start
            for previous, following in zip(exchange.scores, exchange.scores[1:], strict=False)
        )
        assert stats.trusted == sum(token.origin == Origin.TRUSTED for token in tokens)
        assert stats.accepted == sum(token.origin == Origin.ACCEPTED for token in tokens)
        assert stats.accepted <= stats.checked
        replaced = sum(token.origin == Origin.REPLACEMENT for token in tokens)
        assert stats.checked == stats.accepted + replaced
        for round, written in groupby(tokens, key=lambda token: token.round):
            order = [token.origin for token in written]
            from_target = [o for o in order if o in (Origin.REPLACEMENT, Origin.BONUS, Origin.TARGET)]
            assert len(from_target) <= 1
            assert from_target == order[len(order) - len(from_target) :]
            assert (
                sorted(order[: len(order) - len(from_target)], key=[Origin.TRUSTED, Origin.ACCEPTED].index)
                == (order[: len(order) - len(from_target)])
            )
            if Origin.BONUS in order:
                assert Origin.ACCEPTED in order
            if Origin.TARGET in order:
                assert Origin.ACCEPTED not in order
            assert len(order) == record.accept_lengths[round - 1]
        seen |= {token.origin for token in tokens}
    if not method.drafter.proposes:
        assert seen == {Origin.TARGET}
    if method.trust.never:
        assert Origin.TRUSTED not in seen


def test_plain_decoding_asks_for_one_token_a_call() -> None:
    record, exchange = listen(parse_method("autoregressive"), PAIR, Limits(7))
    assert exchange.drafts == []
    assert [(ask.start, len(ask.tokens)) for ask in exchange.scores] == [(i, 1) for i in range(7)]
    assert record.stats.tokens_per_target_call == 1.0


def test_a_long_prompt_is_read_but_for_its_last_token() -> None:
    _, exchange = listen(Method(stop=Never()), PAIR, Limits(4), prompt=(0, 1, 2, 3, 1))
    assert exchange.drafts[0][0] == Asked(5, (), 1, 3)
    assert exchange.scores[0].start == 4
    assert exchange.scores[0].tokens[0] == 1 and len(exchange.scores[0].tokens) == 4


def test_a_driver_that_answers_with_less_is_asked_again() -> None:
    _, exchange = listen(Method(stop=Never()), PAIR, Limits(8), ahead=2)
    first = [ask for ask, _ in exchange.drafts if ask.round == 1]
    assert [(ask.start, ask.at_most) for ask in first] == [(1, 7), (3, 5), (5, 3), (7, 1)]


def test_a_discarding_rule_that_always_fires_is_plain_decoding() -> None:
    record, exchange = listen(Method(stop=Unsure(1.1)), PAIR, Limits(6))
    assert [token.origin for token in record.tokens] == [Origin.TARGET] * 6
    assert all(len(ask.tokens) == 1 for ask in exchange.scores)
    assert record.stats.checked == 0


def test_a_run_that_a_rule_stops_is_checked_even_if_its_last_token_is_trusted() -> None:
    """No call without use: Everyone and fixed(3) trust two tokens and check the third."""
    record, _ = listen(Method(trust=Everyone(), stop=Fixed(3)), MarkovPair(seed=32, distance=0.0), Limits(8))
    origins = [token.origin for token in record.tokens]
    run = [Origin.TRUSTED, Origin.TRUSTED, Origin.ACCEPTED, Origin.BONUS]
    assert origins == run * 2


def test_what_follows_an_untrusted_token_is_untrusted() -> None:
    """Trust comes back after the second token, too late: what hangs on an untrusted token waits with it."""
    target = [0, 1, 1, 0, 1, 0]
    pair = TablePair(
        lambda text: one_hot(target[len(text) - 1]),
        lambda text: one_hot(target[len(text) - 1]),
        lambda text: 0.0 if len(text) == 2 else 1.0,
    )
    record, _ = listen(Method(trust=Gate(0.5), stop=Fixed(4)), pair, Limits(6))
    origins = [token.origin for token in record.tokens]
    assert origins[:5] == [Origin.TRUSTED, Origin.ACCEPTED, Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS]


def test_tokens_are_recorded_as_soon_as_they_are_settled() -> None:
    """A stream may show trusted tokens at once; untrusted ones appear after the call."""
    target = [0, 1, 1, 0, 1, 0]
    pair = TablePair(
        lambda text: one_hot(target[len(text) - 1]),
        lambda text: one_hot(target[len(text) - 1]),
        lambda text: 1.0 if len(text) < 3 else 0.0,
    )
    method, record, draws = parse_method("sprinter"), Record(), AddressedDraws()
    driver = ChainDriver(pair, draws)  # type: ignore[arg-type]
    loop, counts = decode((0,), method, Limits(6), draws, record), []
    request = next(loop)
    for _ in range(4):
        request = loop.send(driver.answer(request))
        counts.append(len(record.tokens))
    assert counts == [1, 2, 2, 4]
    loop.close()
    record.count()
    assert record.finish is None
    assert record.stats.new_tokens == 4


def test_a_text_of_no_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="max_new_tokens=0"):
        Limits(0)
