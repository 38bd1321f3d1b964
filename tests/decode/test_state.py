"""Rules that remember: each text starts from a fresh state, or from one that the caller passes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sprinter.decode.costs import PassCosts
from sprinter.decode.draft import Record
from sprinter.decode.enumerate import ChainDriver, MarkovPair
from sprinter.decode.loop import Limits, decode
from sprinter.decode.spec import Method, parse_method
from sprinter.decode.state import RuleState
from sprinter.decode.switch import Tracker
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

COSTS = PassCosts(((1, 1.0), (9, 1.4)))
PAIR = MarkovPair(seed=7, distance=0.0)  # p = q: all is accepted, so γ only grows


def text(method: Method, rules: RuleState | None = None, seed: int = 0) -> Record:
    record, draws = Record(), AddressedDraws(seed)
    driver = ChainDriver(PAIR, draws, drafter=method.drafter)
    loop = decode((0,), method, Limits(20), draws, record, rules=rules)
    request = next(loop, None)
    while request is not None:
        try:
            request = loop.send(driver.answer(request))
        except StopIteration:
            request = None
    return record


def test_the_heuristics_length_is_carried_on_or_begins_anew():
    """Rounds of 5, 7 and then what is left of 20 tokens: 3 + 2 ends it; the next text begins with 9 or with 5."""
    method = parse_method("heuristic(start=5)")
    first = text(method)
    assert first.accept_lengths == [6, 8, 6]
    assert first.rules is not None
    assert int(first.rules.stop_state[0]) == 11
    assert text(method).accept_lengths == [6, 8, 6]
    assert text(method, first.rules).accept_lengths == [12, 8]


def test_adaedls_threshold_is_carried_on():
    """Two texts in a row move λ exactly as their rounds do, one after the other."""
    method = Method(stop=parse_method("stop=adaedl(threshold=0.0,longest=3)").stop)
    first = text(method)
    second = text(method, first.rules)
    assert first.rules is not None
    assert second.rules is not None
    state = method.stop.start()
    for record in (first, second):
        for added in record.accept_lengths:
            state = method.stop.end_round(state, added - 1, added - 1, added - 1)
        assert record.rules is not None
        assert torch.equal(torch.stack(state), torch.stack(record.rules.stop_state))


def test_a_state_left_by_another_rule_is_refused():
    left = text(parse_method("heuristic(start=5)")).rules
    with pytest.raises(UserError, match="generation by the same method"):
        text(parse_method("adaedl"), left)
    with pytest.raises(UserError, match="by the same method"):
        text(parse_method("heuristic(start=6)"), left)
    with pytest.raises(UserError, match="not a state of rules"):
        text(parse_method("heuristic(start=6)"), 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        *[("heuristic", {"trust": [], "stop": [value]})
          for value in (0.7, float("nan"), float("inf"), -7, 0, 41, 2**70, 2**63, 1e30, None, True, "5", [5])],
        *[("adaedl", {"trust": [], "stop": value})
          for value in ([float("nan"), 0.9], [0.5, float("inf")], [0.5, 1.5], [0.5, -0.1], [0.5], [[0.5], [0.9]])],
        *[("trust=nobody,stop=untrusted(tail=2,under=heuristic)", {"trust": [], "stop": value})
          for value in ([-1, 5], [0, -5], [0.5, 5])],
        *[("speculative", given)
          for given in ({}, {"trust": []}, {"trust": "x", "stop": [1, 2]}, {"trust": [], "stop": ""},
                       {"trust": [], "stop": [], "stpo": []})],
    ],
)  # fmt: skip
def test_a_state_that_no_text_can_have_left_is_refused(spec: str, given: dict[str, object]) -> None:
    method = parse_method(spec)
    with pytest.raises(
        UserError, match=r"^rules=.* is not a state of the (trust|stop) rule: give what an earlier"
    ):
        RuleState.begin(method.trust, method.stop, given)


def test_a_state_goes_through_json() -> None:
    for spec in ("heuristic(start=60)", "adaedl", "specdec++", "speculative", "sprinter(tail=2)"):
        method = parse_method(spec)
        own = RuleState.begin(method.trust, method.stop)
        assert RuleState.begin(method.trust, method.stop, json.loads(json.dumps(own.to_dict()))) == own
    method = parse_method("heuristic")
    assert (
        RuleState.begin(method.trust, method.stop, {"trust": [], "stop": [7.0]}).stop_state[0].dtype
        == torch.int64
    )


def test_what_rules_learned_is_the_mean_of_the_rows_of_a_batch() -> None:
    """The row that ends last has the worst drafts; alone it would make the next batch's drafts too short."""
    method = parse_method("optimal(signal=mean)")
    fresh = RuleState.begin(method.trust, method.stop)

    def state(overlap: float) -> RuleState:
        stop = fresh.stop_state
        overlaps = torch.tensor(overlap, dtype=torch.float64), *stop[3:5], torch.tensor(9)
        return replace(fresh, stop_state=(*stop[:2], *overlaps))

    tracker = Tracker(COSTS)
    for before, ends, mean in ((None, (0.9, 0.8, 0.4), 0.7), (0.7, (0.5, 0.3, 0.1), 0.3)):
        later = Tracker(COSTS)
        later.follow(tracker.past())
        tracker = later
        if before is not None:
            assert float(tracker.learned["key"][0].stop_state[2]) == pytest.approx(before)
        for end in ends:
            tracker.learned["key"] = tracker.learn("key", state(end), 3)
        kept = tracker.learned["key"][0]
        assert float(kept.stop_state[2]) == pytest.approx(mean) and int(kept.stop_state[5]) == 9
        assert RuleState.begin(method.trust, method.stop, kept.to_dict()).to_dict() == kept.to_dict()
    tracker.learned["key"] = tracker.learn("key", state(0.9), 3)
    assert float(tracker.learned["key"][0].stop_state[2]) == pytest.approx(0.5), "a batch without an end"
