"""The stop rule that learns: what it is taught, what its threshold means, and that a tail may use it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sprinter.decode import Calibrated, Gate, Method, Online, State, Untrusted, parse_method
from sprinter.decode.conformance import check_same_law
from sprinter.decode.decoding import METER_CHUNK
from sprinter.decode.enumerate import MarkovPair, joint_law, run_chain, target_joint_law
from sprinter.decode.loop import Limits
from sprinter.decode.rule_conformance import check_stop
from sprinter.errors import UserError
from sprinter.laws import entropy, overlap
from sprinter.random import AddressedDraws

PAIR = MarkovPair(4, seed=7, sharp=2.0, distance=0.5)


@dataclasses.dataclass(frozen=True, slots=True)
class Notes(Calibrated):
    """Writes down what it is taught."""

    taught: list[tuple[float, float]] = dataclasses.field(default_factory=list, compare=False)

    def learn(self, signals, overlaps, state: State) -> State:  # type: ignore[no-untyped-def]
        self.taught.extend(zip(signals["entropy"].tolist(), overlaps.tolist(), strict=True))
        return Calibrated.learn(self, signals, overlaps, state)


def written(method: Method, length: int = 80, seed: int = 3, complete: bool = False):  # type: ignore[no-untyped-def]
    return run_chain(method, PAIR, (0,), Limits(length), AddressedDraws(seed), complete=complete)


def test_it_is_taught_the_overlap_of_each_draft_token() -> None:
    rule = Notes(rate=0.3)
    record = written(Method(stop=rule, cap=3))
    known, ids = {}, [0, *(token.id for token in record.tokens)]
    for end in range(1, len(ids) + 1):
        for refused in ([], *([x] for x in range(4)), *([x, y] for x in range(4) for y in range(4))):
            prefix = (*ids[:end], *refused)
            q = PAIR.q(prefix)
            known[round(float(entropy(q)), 9)] = float(overlap(PAIR.p(prefix), q))
    shared = [(at, beta) for at, beta in rule.taught if round(at, 9) in known]
    assert len(rule.taught) > 60 and len(shared) == len(rule.taught)
    assert all(beta == pytest.approx(known[round(at, 9)], abs=1e-12) for at, beta in shared)
    assert len(rule.taught) == record.stats.drafted


def test_rate_is_a_probability() -> None:
    """Of the first token of a run: that it is accepted. Of a later one: that all before it are accepted too."""
    fit = Calibrated(memory=5000)
    entropies = torch.linspace(0.05, 4.0, 400, dtype=torch.float64)
    chance = torch.sigmoid(-0.5 - 1.5 * entropies.log())
    state = fit.start()
    for _ in range(8):
        state = fit.learn({"entropy": entropies}, chance, state)
    for rate in (0.2, 0.5, 0.8):
        stops, _ = Calibrated(rate, memory=5000).stop({"entropy": entropies}, state)
        edge = chance[stops].max() if bool(stops.any()) else torch.tensor(0.0)
        assert abs(float(edge) - rate) < 0.08, (rate, float(edge))
    rule, run = Calibrated(0.5, memory=5000), Calibrated().begin_round(state)
    own = float(rule.own_chance({"entropy": torch.tensor(0.3)}, run))
    for length in range(1, 9):
        stop, run = rule.stop({"entropy": torch.tensor(0.3)}, run)
        assert bool(stop) == (own**length < 0.5)
    assert 0.5**0.5 < own < 0.99 and bool(stop)


def test_a_higher_rate_drafts_less_and_wastes_less() -> None:
    drafted, kept = [], []
    for rate in (0.1, 0.5, 0.9):
        stats = written(Method(stop=Calibrated(rate), cap=12), length=400).stats
        drafted.append(stats.drafted / stats.rounds)
        kept.append(stats.accepted / stats.drafted)
    assert drafted == sorted(drafted, reverse=True) and kept == sorted(kept)


def test_metering_does_not_change_what_it_learns() -> None:
    method = Method(trust=Gate(0.2), stop=Untrusted(tail=2, under=Calibrated(0.4)), cap=6)
    one, other = (written(method, length=2 * METER_CHUNK, complete=complete) for complete in (False, True))
    assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
    assert one.rules is not None and other.rules is not None
    assert all(
        torch.equal(*parts) for parts in zip(one.rules.stop_state, other.rules.stop_state, strict=True)
    )
    assert int(one.rules.stop_state[4]) > 20, "the tail's rule has learned"


def test_a_tail_and_a_trust_rule_learn_from_the_same_verdicts() -> None:
    method = Method(trust=Online("margin", after=2), stop=Untrusted(tail=2, under=Calibrated(0.4)), cap=5)
    record = written(method)
    assert record.rules is not None
    assert int(record.rules.trust_state[2]) == int(record.rules.stop_state[4]) > 10
    check_stop(Untrusted(tail=1, under=Calibrated(0.4)))


def test_the_law_is_kept_while_it_learns_with_either_exact_rule() -> None:
    pair = MarkovPair(3, 5)
    for spec in (
        "stop=calibrated(rate=0.6,memory=2),accept=exact,cap=3",
        "stop=calibrated(rate=0.6),accept=block,cap=2",
    ):
        check_same_law(joint_law(parse_method(spec), pair, 4), target_joint_law(pair, 4), spec)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Calibrated(1.5), "rate=1.5"),
        (lambda: Calibrated(signal="entropie"), "did you mean 'entropy'"),
        (lambda: Calibrated(memory=0), "memory=0"),
        (lambda: Calibrated(signal=3), "signal=3 is not a name"),
    ],
)
def test_values_out_of_range_are_one_line(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=message):
        make()
