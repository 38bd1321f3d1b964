"""The stop rule that weighs costs: what it decides, and that no fixed length is much cheaper under its costs."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch

from sprinter.decode import Method, Optimal, parse_method
from sprinter.decode.conformance import check_same_law
from sprinter.decode.draft import AskDraft, Record, Stats
from sprinter.decode.drafter import Model
from sprinter.decode.enumerate import ChainDriver, MarkovPair, joint_law, run_chain, target_joint_law
from sprinter.decode.lookup import Lookup
from sprinter.decode.loop import Limits, decode
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.stop import Fixed, StopRule
from sprinter.errors import UserError
from sprinter.random import AddressedDraws


def at(chance: float, overlap: float, tokens: float, cost: float, rule: Optimal) -> tuple[torch.Tensor, ...]:
    """A state whose regression predicts 0.5 at entropy 1 (log-odds 0)."""
    numbers = (torch.tensor(one, dtype=torch.float64) for one in (chance, 0.0, overlap, tokens, cost))
    return (*numbers, *rule.start()[5:])


@pytest.mark.parametrize(
    ("chance", "overlap", "price", "stops"),
    [(1.0, 0.8, 1.0, False), (1.0, 0.4, 1.0, True), (0.5, 0.8, 1.0, True), (0.5, 0.8, 2.0, False)],
)
def test_it_compares_the_gain_of_one_more_token_with_its_cost(
    chance: float, overlap: float, price: float, stops: bool
) -> None:
    """Gain: chance x 0.5 x overlap x price; cost: 0.2 + 0.05."""
    rule = Optimal(step=0.2, token=0.05)
    found, (product, *_) = rule.stop(
        {"entropy": torch.tensor(1.0)}, at(chance, overlap, 10.0, 10.0 * price, rule)
    )
    assert bool(found) is stops and float(product) == pytest.approx(chance * 0.5)
    assert float(rule.begin_round((product, *rule.start()[1:]))[0]) == 1.0


def test_a_round_is_priced_by_what_it_added_and_cost() -> None:
    rule = Optimal(step=0.2, token=0.05)
    state = rule.end_round(at(0.3, 0.5, 10.0, 5.0, rule), drafted=6, checked=4, accepted=3)
    assert float(state[3]) == pytest.approx(10.0 * 0.95 + 2 + 3 + 1)
    assert float(state[4]) == pytest.approx(5.0 * 0.95 + 1 + 6 * 0.25)
    assert float(state[0]) == 0.3 and float(state[2]) == 0.5


def test_a_round_that_verifies_costs_more_in_addition() -> None:
    rule = Optimal(step=0.2, token=0.05, verify=0.5)
    state = at(0.3, 0.5, 10.0, 5.0, rule)
    assert float(rule.end_round(state, 6, 4, 3)[4]) == pytest.approx(5.0 * 0.95 + 1 + 6 * 0.25 + 0.5)
    assert float(rule.end_round(state, 0, 0, 0)[4]) == pytest.approx(5.0 * 0.95 + 1)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("costs", [(0.3, 0.05, 0.0), (0.05, 0.0, 0.5), (0.6, 0.1, 0.1), (0.0, 0.0, 0.0)])
def test_without_a_signal_a_run_is_as_long_as_is_best_at_the_mean_acceptance(
    kept: float, costs: tuple[float, float, float]
) -> None:
    step, token, verify = costs
    rule = Optimal(step, token, "mean", verify=verify)
    state = rule.start()
    state = rule.begin_round((*state[:2], torch.tensor(kept, dtype=torch.float64), *state[3:]))

    def price(length: int) -> float:
        tokens = 1 + sum(kept**i for i in range(1, length + 1))
        return (1 + verify + length * (step + token)) / tokens

    length = rule.ahead(state)
    # lengths whose prices differ by rounding are equally good: Python 3.12 and newer add floats by another algorithm
    assert price(length) == pytest.approx(min(map(price, range(1, 41))), rel=1e-14)
    assert not rule.learns and rule.needs == frozenset()
    ends = [bool(rule.stop({"drafted": torch.tensor(n)}, state)[0]) for n in range(1, length + 1)]
    assert ends == [False] * (length - 1) + [True]


def test_without_a_signal_acceptance_is_counted() -> None:
    """A round has a verdict for each token that is kept, and for the first that is not; copies have none."""
    rule = Optimal(signal="mean")
    some = rule.end_round(rule.start(), drafted=4, checked=4, accepted=2)
    assert float(some[2]) == pytest.approx((8 * 0.7 + 2) / 11) and int(some[-1]) == 3
    every = rule.end_round(some, drafted=3, checked=3, accepted=3)
    assert float(every[2]) == pytest.approx((11 * float(some[2]) + 3) / 14) and int(every[-1]) == 6
    _, copied = rule.stop({"drafted": torch.tensor(1), "copied": torch.tensor(True)}, every)
    assert rule.end_round(copied, 1, 1, 0) == copied


def test_without_a_signal_the_draft_writes_a_run_at_once() -> None:
    asked: list[int | None] = []
    pair = MarkovPair(6, 3, sharp=2.0, distance=0.2)

    class Watched(ChainDriver):
        def answer(self, ask: Any) -> Any:
            asked.extend([ask.ahead] if isinstance(ask, AskDraft) else [])
            return super().answer(ask)

    method = Method(stop=Optimal(0.1, 0.0, "mean"), cap=20)
    driver = Watched(
        pair, AddressedDraws(4), 4, method.accept.needs_raw, method.drafter, None, method.needs, None
    )
    record = Record(stats=Stats())
    loop = decode(TokenSequence.begin((0,)), method, Limits(60), AddressedDraws(4), record)
    ask = next(loop)
    with suppress(StopIteration):
        while True:
            ask = loop.send(driver.answer(ask))
    assert asked and all(one is not None and one >= 1 for one in asked) and max(map(int, asked)) > 1


def test_copied_tokens_end_no_run_and_have_no_part_in_the_price() -> None:
    rule, state = Optimal(step=0.2, token=0.05), at(0.3, 0.5, 10.0, 5.0, Optimal())
    for _ in range(4):
        stop, state = rule.stop({"entropy": torch.tensor(0.0), "copied": torch.tensor(True)}, state)
        assert not stop and float(state[0]) == 0.3
    done = rule.end_round(state, drafted=4, checked=4, accepted=3)
    assert [float(part) for part in done[:5]] == [
        float(part) for part in state[:5]
    ]  # the price is the model's
    assert float(rule.begin_round(done)[1]) == 0.0


def test_a_new_text_is_known_after_few_verdicts() -> None:
    """The mean overlap begins at 0.7, with the weight of 8 verdicts; later a verdict weighs a hundredth."""
    rule, one = Optimal(), {"entropy": torch.tensor([0.1], dtype=torch.float64)}
    state = rule.start()
    for count in (1, 5, 10):
        several = {"entropy": torch.full((count,), 0.1, dtype=torch.float64)}
        state = rule.learn(several, torch.ones(count), state)
    assert float(state[2]) == pytest.approx(1 - 0.3 * 8 / 24)  # however they come
    for _ in range(300):
        state = rule.learn(one, torch.tensor([1.0]), state)
    before = float(state[2])
    assert before - float(rule.learn(one, torch.tensor([0.0]), state)[2]) == pytest.approx(before / 101)


def test_copies_teach_nothing_of_the_draft_model() -> None:
    """As many verdicts are learned from as tokens were drafted by the model."""
    told = []

    class Watched(Optimal):
        def learn(self, signals: Any, overlaps: Any, state: Any) -> Any:
            told.append(len(overlaps))
            return super().learn(signals, overlaps, state)

    for drafter, share in (
        (Lookup(2, 1, Model()), (0.05, 0.6)),
        (Lookup(2, 1), (1.0, 1.0)),
        (Model(), (1.0, 1.0)),
    ):
        told.clear()
        pair = MarkovPair(12, 1, sharp=4.0, distance=0.02)
        stats = run_chain(
            Method(stop=Watched(), drafter=drafter, cap=4), pair, (0,), Limits(80), AddressedDraws(3)
        ).stats
        assert share[0] * stats.drafted <= sum(told) <= share[1] * stats.drafted and stats.drafted > 20


def cost(stats: Stats, step: float, token: float) -> float:
    """Of a text, a token of it, in target passes over one token."""
    return (stats.target_calls + (step + token) * stats.drafted) / stats.new_tokens


def written(stop: StopRule, pair: MarkovPair, length: int = 400) -> Stats:
    return run_chain(Method(stop=stop, cap=20), pair, (0,), Limits(length), AddressedDraws(4)).stats


@pytest.mark.parametrize(
    ("distance", "step", "token"),
    [
        (0.1, 0.25, 0.03),
        pytest.param(0.4, 0.4, 0.2, marks=pytest.mark.slow),
        pytest.param(0.4, 0.05, 0.0, marks=pytest.mark.slow),
        pytest.param(1.0, 0.25, 0.03, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("signal", ["entropy", "mean"])
def test_no_fixed_length_is_much_cheaper(distance: float, step: float, token: float, signal: str) -> None:
    """Under its own costs, against the best length of each pair chosen in hindsight: over six pairs, and of each."""
    ratios = []
    for seed in range(3, 9):
        pair = MarkovPair(6, seed, sharp=2.0, distance=distance)
        own = cost(written(Optimal(step, token, signal), pair), step, token)
        ratios.append(own / min(cost(written(Fixed(gamma), pair), step, token) for gamma in (1, 2, 4, 7)))
    assert sum(ratios) / len(ratios) < 1.03 and max(ratios) < 1.15


def test_dearer_drafts_are_shorter() -> None:
    pair = MarkovPair(6, 3, sharp=2.0, distance=0.2)
    lengths = [
        (stats.drafted / stats.rounds)
        for stats in (written(Optimal(step), pair) for step in (0.02, 0.2, 0.8))
    ]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 2 * lengths[2]


def test_the_law_is_kept_while_it_learns_with_either_exact_rule() -> None:
    pair = MarkovPair(3, 5)
    for accept, signal in product(("exact", "block"), ("entropy", "mean")):
        spec = f"stop=optimal(step=0.1,token=0.01,signal={signal}),accept={accept},cap=3"
        check_same_law(joint_law(parse_method(spec), pair, 3), target_joint_law(pair, 3), spec)


def test_states_that_it_cannot_reach_are_refused() -> None:
    rule = Optimal()
    for wrong in ((1.5, 0.5, 1.0, 1.0), (0.5, -0.1, 1.0, 1.0), (0.5, 0.5, 0.0, 1.0), (0.5, 0.5, 1.0, 0.0)):
        assert not rule.possible(at(*wrong, rule))
    assert rule.possible(at(0.5, 0.5, 1.0, 1.0, rule))
    for name in ("step", "token"):
        with pytest.raises(UserError, match=f"{name}=-1"):
            Optimal(**{name: -1})  # type: ignore[arg-type]
