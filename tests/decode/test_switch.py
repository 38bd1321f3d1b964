"""Never slower: whether rounds draft, what that costs, and that exact methods stay exact whoever switches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

import pytest
import torch

from sprinter.decode import Method, parse_method, resting
from sprinter.decode.conformance import check_same_law
from sprinter.decode.costs import PassCosts
from sprinter.decode.draft import Origin, Record
from sprinter.decode.enumerate import MarkovPair, joint_law, run_chain, target_joint_law
from sprinter.decode.lookup import Endings, Lookup
from sprinter.decode.loop import Limits
from sprinter.decode.switch import (
    AdaptiveSwitch,
    DraftSwitch,
    PassShare,
    Replayed,
    RoundCount,
    Spent,
    Tracker,
)
from sprinter.random import AddressedDraws

PAIR = MarkovPair(seed=5, zeros=0.2)
FLAT = PassCosts(((1, 1.0), (9, 1.4)), ((1, 0.25), (9, 0.3)))
BAD = MarkovPair(vocab=12, seed=1, sharp=4.0)
GOOD = MarkovPair(vocab=12, seed=1, sharp=4.0, distance=0.02)


class Adversary(DraftSwitch):
    """Switches by the text so far."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def _decide(self, round: int, left: int) -> bool:
        return (sum(token.id for token in self._record.tokens) + round) % 2 == 0

    def _decide_copies(self, round: int) -> bool:
        return (sum(token.id for token in self._record.tokens) + round) % 4 != 1

    def count(self, done: RoundCount) -> None:
        """Nothing depends on it."""


LOSSLESS = [
    "speculative(gamma=2)", "block(gamma=3)", "svip(h=0.5)", "adaedl", "heuristic(start=1)", "calibrated",
    "optimal(step=0.1, token=0)", "auto", "specinfer(gamma=2)", "lookup(n=1, gamma=2)",
    "tree(expand=2, depth=2, nodes=3)", "static-tree(widths=2x1)", "cape(counts=2x1x1x1, gamma=2)",
    "traversal(widths=2x1)", "heads(gamma=2)", "medusa(nodes=3)",
]  # fmt: skip


@pytest.mark.parametrize("spec", LOSSLESS)
def test_exact_methods_stay_exact_across_switches(spec: str, copies_of_one: list[int]) -> None:
    method = parse_method(spec)
    assert method.lossless()
    prompt = 0, 1, 2, 0
    found = joint_law(method, PAIR, 3, prompt=prompt, switch=Adversary)
    check_same_law(found, target_joint_law(PAIR, 3, prompt=prompt), spec)
    assert max(copies_of_one) == 1  # in some of the texts


@pytest.fixture
def copies_of_one(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds that rest copy what followed the last token earlier; the numbers of tokens that they copied."""
    found: list[int] = []

    class Counted(Endings):
        def look_up(self, text: Sequence[int], at_most: int) -> list[int]:
            copied = super().look_up(text, at_most)
            found.append(len(copied))
            return copied

    monkeypatch.setattr(resting, "COPIES", Lookup(1, 1, length=2))
    monkeypatch.setattr(resting, "Endings", Counted)
    return found


class Circle(MarkovPair):
    """A target that repeats itself, and a draft that is always wrong."""

    def p(self, text: Sequence[int]) -> torch.Tensor:
        return torch.eye(self.vocab, dtype=torch.float64)[(text[-1] + 1) % self.vocab]

    def q(self, text: Sequence[int]) -> torch.Tensor:
        return torch.eye(self.vocab, dtype=torch.float64)[text[-1]]


def copying(costs: PassCosts) -> Callable[[Record], DraftSwitch]:
    return lambda record: AdaptiveSwitch(Tracker(costs, copying=Tracker(costs)))


@pytest.mark.parametrize("spec", ["speculative(gamma=5)", "svip", "specinfer(gamma=3)", "relaxed"])
def test_a_text_that_repeats_itself_is_copied_where_the_draft_rests(spec: str) -> None:
    pair = Circle(vocab=7)
    record = written(spec, pair, 300, copying(FLAT))
    assert record.stats.copy_switches and record.stats.switches
    assert [token.id for token in record.tokens] == [(i + 1) % 7 for i in range(300)]
    without = written(spec, pair, 300, paced(FLAT))
    assert not without.stats.copy_switches
    assert record.stats.target_calls < 0.5 * without.stats.target_calls
    again = written(
        spec, pair, 300, lambda record_: Replayed(record.stats.switches, record.stats.copy_switches)
    )
    assert again.accept_lengths == record.accept_lengths
    assert again.stats.copy_switches == record.stats.copy_switches


def test_copies_that_lose_are_given_up(copies_of_one: list[int]) -> None:
    steep = PassCosts(((1, 1.0), (9, 6.0)), ((1, 0.25), (9, 0.3)))
    flat_law = MarkovPair(vocab=12, seed=1, sharp=1.0)
    record = written("speculative(gamma=5)", flat_law, 500, copying(steep))
    assert len(record.stats.copy_switches) >= 2
    stats = record.stats
    read = 1 + stats.drafted / stats.target_calls
    assert stats.target_calls * steep.target_s(read) < 1.08 * stats.new_tokens
    assert 0 < sum(copies_of_one) < 100


def test_a_draft_that_gains_less_than_copies_is_not_taken_back() -> None:
    costs = PassCosts(((1, 1.0), (9, 1.0)), ((1, 0.5), (9, 0.5)))
    for copied, back in ((1, True), (4, False)):  # tokens that a round at rest adds
        row = AdaptiveSwitch(Tracker(costs, copying=Tracker(costs)))
        for number in range(1, 400):
            if row.drafts(number):
                row.count(RoundCount(2, 1, 3, 1 if number < 10 else 3))  # then in the time of two
            else:
                row.copies(number)
                row.count(RoundCount(0, 1, copied, copied))
        assert (len(row.changes) == 2) is back


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("matches", [0.005, 0.3])
def test_copies_that_rows_wait_for_in_vain_are_given_up(rows: int, matches: float) -> None:
    """Passes read as many tokens of every row as the longest: a refused copy delays all, and pays for it."""
    costs = PassCosts(((1, 1.0), (9, 1.4), (64, 5.0)), ((1, 1.0), (9, 1.0)))
    tracker, chance = Tracker(costs, lambda: rows, Tracker(costs, lambda: rows, apart=True)), Random(1)
    group = [AdaptiveSwitch(tracker) for _ in range(rows)]
    spent, rounds = 0.0, 3000
    for number in range(1, rounds + 1):
        drafting = [row.drafts(number) for row in group]
        read = [
            8 if not drafts and row.copies(number) and chance.random() < matches else 1
            for row, drafts in zip(group, drafting, strict=True)
        ]
        longer = sum(read) - rows
        for row, drafts, n in zip(group, drafting, read, strict=True):
            row.charge(PassShare(True, rows, max(read), (n - 1) / longer if longer else 0.0))
            row.count(RoundCount(int(drafts), 1, n, 1))
        spent += costs.for_rows(rows).target_s(max(read))
    assert spent / rounds < 1.03 * costs.for_rows(rows).target_s(1)


@pytest.mark.parametrize(
    ("rows", "pads", "some"),
    [(1, True, True), (16, True, False), (16, False, False), (4, False, True), (10, False, False)],
)
def test_copies_that_cannot_pay_are_not_tried(rows: int, pads: bool, some: bool) -> None:
    """Sixteen rows that wait for one lose more than the eight tokens that it can gain; without padding, more than half
    of them. Ten would gain a little by the best of copies: it must be about a tenth."""
    costs = PassCosts(((1, 1.0), (9, 1.4), (64, 5.0)), ((1, 1.0), (9, 1.0)))
    copying = Tracker(costs, lambda: rows, apart=True, pads=pads, longest=8)
    group = [AdaptiveSwitch(Tracker(costs, lambda: rows, copying)) for _ in range(rows)]
    tried = 0
    for number in range(1, 400):
        for row in group:
            drafts = row.drafts(number)
            tried += not drafts and row.copies(number)
            row.count(RoundCount(int(drafts), 1, 1, 1))
    assert bool(tried) is some


@pytest.mark.parametrize(("rows", "kept"), [(1, True), (4, False)])
def test_half_of_what_a_row_copies_counts_among_others(rows: int, kept: bool) -> None:
    """A row that copies four tokens at the price of three: alone it gains, a batch waits for the others."""
    copying = Tracker(PassCosts(((1, 1.0), (64, 1.0))), lambda: rows, longest=8)
    row = AdaptiveSwitch(copying)
    for _ in range(40):
        copying.drafts(row)
        copying.count(row, True, RoundCount(0, 1, 5, 4), Spent(3.0 / rows, rows))
    assert copying._on == kept


def test_chains_are_not_tried_among_too_many_rows() -> None:
    """Four rows wait longer for the best of drafts than it saves; where fewer are left they draft again."""
    costs = PassCosts(((1, 1.0), (2, 1.0), (5, 4.0)), ((1, 0.2), (9, 0.9)))
    assert costs.for_rows(1).speed_up(0.9) > 1 > costs.for_rows(4).speed_up(0.9)
    left = 4
    row = AdaptiveSwitch(Tracker(costs, lambda: left, chains=True))
    for number in range(1, 300):
        assert not row.drafts(number)
        row.count(RoundCount(0, 1, 1, 1))
    left = 1
    assert row.drafts(300) and row.changes == [1, 300]
    assert AdaptiveSwitch(Tracker(costs, lambda: 4)).drafts(1)  # lossy methods and trees may gain more


@pytest.mark.parametrize(("three", "tried"), [(10.3, False), (9.0, True)])
def test_among_many_rows_the_best_of_drafts_must_gain_a_tenth(three: float, tried: bool) -> None:
    """A batch ends with its slowest row, whatever the others have gained."""
    costs = PassCosts(((1, 1.0), (3, three / 4)), shared=((4, 4.0, 0.0),), several=((4, three),))
    best = costs.for_rows(4).speed_up(0.9)
    assert 1 < best < 1.075 or (tried and best > 1.075)
    for awaited, drafts in (
        (48.0, tried),
        (1e4, True),
        (inf, True),
    ):  # tokens of its text; others take over its row
        tracker = Tracker(costs, lambda: 4, chains=True, awaited=lambda awaited=awaited: awaited)  # type: ignore[misc]
        group = [AdaptiveSwitch(tracker) for _ in range(4)]
        assert any(row.drafts(1) for row in group) is drafts


def test_one_row_tries_first_where_usual_drafts_would_gain_little() -> None:
    costs = PassCosts(((1, 1.0), (2, 1.0), (8, 2.0)), ((1, 0.15), (9, 0.4)))
    four = costs.for_rows(4)
    assert four.speed_up(0.7) < 1.1 < four.speed_up(0.9) and costs.speed_up(0.7) > 1
    for rows, first in ((1, 1), (4, 1), (1, 1)):
        tracker = Tracker(costs, lambda rows=rows: rows, chains=True, awaited=lambda: 48.0)  # type: ignore[misc]
        group = [AdaptiveSwitch(tracker) for _ in range(rows)]
        assert sum([row.drafts(1) for row in group]) == first
    tracker = Tracker(costs, lambda: 4)
    assert all(AdaptiveSwitch(tracker).drafts(1) for _ in range(4)), "others than exact chains begin together"


def test_a_draft_that_pays_only_if_all_rows_share_its_steps() -> None:
    """Rows with drafts of different lengths leave the last steps to one of them."""
    costs = PassCosts(((1, 1.0), (100, 1.0)), ((1, 0.25), (100, 0.25)))
    for apart in (False, True):
        tracker = Tracker(costs, lambda: 4)
        group = [AdaptiveSwitch(tracker) for _ in range(4)]
        drafting: list[int] = []
        for number in range(1, 200):
            drafting.append(0)
            for row in group:
                if row.drafts(number):
                    drafting[-1] += 1
                    # Two steps: 1.5 plain tokens' time for 2 tokens, or 3 of a row by itself.
                    for _ in range(2):
                        row.charge(PassShare(False, 1 if apart else 4, 1, 0.0))
                    row.charge(PassShare(True, 4, 3, 0.25))
                    row.count(RoundCount(2, 1, 3, 2))
                else:
                    row.charge(PassShare(True, 4, 1, 0.0))
                    row.count(RoundCount(0, 1, 1, 1))
        assert (drafting == [4] * 199) is not apart
        # A trial counts what rounds took before: it fails, and the others do not begin again.
        assert not apart or (max(drafting[10:]) == 1 and sum(drafting[10:]) < 10)


def test_rows_that_still_read_their_prompts_are_not_missed() -> None:
    """Sixteen rows of which four decode: these could share no pass with the others, whatever they do."""
    costs = PassCosts(((1, 1.0), (100, 1.0)), ((1, 0.1), (100, 0.1)))
    tracker = Tracker(costs, lambda: 16)
    group = [AdaptiveSwitch(tracker) for _ in range(16)]
    assert all(row.drafts(1) for row in group)
    for number in range(2, 60):
        for row in group[:4]:
            row.charge(PassShare(False, 4, 1, 0.0))
            row.charge(PassShare(True, 4, 2, 0.25))
            row.count(RoundCount(1, 1, 2, 2))  # 1.1 plain tokens' time
            assert row.drafts(number)


def test_rows_that_do_their_rounds_together_rest_together() -> None:
    group = Rows.of(16)
    assert all(row.drafts(1) for row in group.rows)
    for number in range(1, 60):
        drafting = 0
        for row in group.rows:  # each row counts a round, and begins its next one at once
            drafts = row.drafts(number)
            drafting += drafts
            row.count(RoundCount(int(drafts), 1, 1, 1))
        assert drafting in (0, 16)


def test_a_row_among_others_of_other_methods_is_judged_by_its_own_rounds() -> None:
    """The tracker is of one method and sampling: the other rows of the pass never ask here."""
    row, drafted = AdaptiveSwitch(Tracker(FLAT, lambda: 32)), 0
    while row.drafts(drafted + 1):
        row.count(RoundCount(5, 1, 6, 1))
        drafted += 1
        assert drafted < 12
    assert drafted > 1


def test_copies_that_pay_for_one_row_are_used_by_it() -> None:
    costs = PassCosts(((1, 1.0), (9, 1.4), (64, 5.0)), ((1, 1.0), (9, 1.0)))
    row, written = AdaptiveSwitch(Tracker(costs, copying=Tracker(costs, apart=True))), 0
    for number in range(1, 200):
        drafts = row.drafts(number)
        copies = not drafts and row.copies(number)
        row.count(RoundCount(int(drafts), 1, 8 if copies else 1, added := 6 if copies else 1))
        written += added
    assert written > 900


def test_the_adversary_does_switch() -> None:
    found = {
        len(
            run_chain(Method(), PAIR, (0,), Limits(12), AddressedDraws(seed), switch=Adversary).stats.switches
        )
        for seed in range(8)
    }
    assert max(found) >= 2


def paced(costs: PassCosts, rows: Callable[[], int] = lambda: 1) -> Callable[[Record], DraftSwitch]:
    return lambda record: AdaptiveSwitch(Tracker(costs, rows))


def written(spec: str, pair: MarkovPair, length: int, switch: Callable[[Record], DraftSwitch]) -> Record:
    return run_chain(parse_method(spec), pair, (0,), Limits(length), AddressedDraws(3), switch=switch)


def cost(record: Record, costs: PassCosts) -> float:
    """Of a token, in plain decoding's: draft steps, and passes over the mean number of tokens that one read."""
    stats = record.stats
    read = 1 + stats.drafted / stats.target_calls
    spent = stats.drafted * costs.draft_s(1) + stats.target_calls * costs.target_s(read)
    return spent / stats.new_tokens / costs.target_s(1)


@pytest.mark.parametrize(
    "spec", ["speculative(gamma=5)", "block(gamma=8)", "heuristic", "specinfer(gamma=3)"]
)
def test_a_useless_draft_costs_little(spec: str) -> None:
    without = run_chain(parse_method(spec), BAD, (0,), Limits(500), AddressedDraws(3))
    record = written(spec, BAD, 500, paced(FLAT))
    assert cost(without, FLAT) > 1.2 and cost(record, FLAT) < 1.06
    assert record.stats.switches[0] < 12 and len(record.stats.switches) >= 5  # it is tried again


def test_a_good_draft_is_kept() -> None:
    record = written("speculative(gamma=5)", GOOD, 300, paced(FLAT))
    assert record.stats.switches == [] and cost(record, FLAT) < 0.6


def test_many_rows_that_share_passes_stop_a_draft_that_pays_for_one() -> None:
    steep = PassCosts(((1, 1.0), (8, 1.1), (48, 6.6)), ((1, 0.1), (8, 0.8)))
    alone = written("speculative(gamma=5)", GOOD, 200, paced(steep))
    crowded = written("speculative(gamma=5)", GOOD, 800, paced(steep, lambda: 32))
    assert not alone.stats.switches and crowded.stats.switches
    targets = [token.origin is Origin.TARGET for token in crowded.tokens]
    assert sum(targets) > 0.7 * len(targets)  # a 32nd of the rows is seen here, so it takes a while


class Watching(DraftSwitch):
    """Drafts in every round, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[RoundCount] = []

    def _decide(self, round: int, left: int) -> bool:
        return True

    def count(self, done: RoundCount) -> None:
        self.told.append(done)


@pytest.mark.parametrize(
    ("drafter", "least", "most"),
    [
        ("model", 1.0, 1.0),
        ("lookup(n=1, least=1)", 0.0, 0.0),
        ("lookup(n=2, least=1, otherwise=model)", 0.05, 0.5),
    ],
)
def test_only_steps_of_the_draft_model_are_counted(drafter: str, least: float, most: float) -> None:
    """A copied token costs no step; where nothing matches, the model's tokens do."""
    watching = Watching()
    record = written(f"drafter={drafter},stop=fixed(gamma=3)", GOOD, 60, lambda record: watching)
    steps = sum(one.steps for one in watching.told)
    assert least * record.stats.drafted <= steps <= most * record.stats.drafted
    assert record.stats.drafted > 20


def test_a_record_replays_its_switches() -> None:
    first = written("speculative(gamma=5)", BAD, 300, paced(FLAT))
    again = written("speculative(gamma=5)", BAD, 300, lambda record: Replayed(first.stats.switches))
    assert [token.id for token in first.tokens] == [token.id for token in again.tokens]
    assert first.stats.switches == again.stats.switches and first.stats.switches


@dataclass
class Rows:
    """Rows of one tracker, round by round, each of which loses or gains so much."""

    tracker: Tracker
    rows: list[AdaptiveSwitch]

    @classmethod
    def of(cls, count: int) -> Rows:
        tracker = Tracker(PassCosts(((1, 1.0), (100, 1.0)), ((1, 1.0), (100, 1.0))), lambda: count)
        return cls(tracker, [AdaptiveSwitch(tracker) for _ in range(count)])

    def round(self, number: int, added: int) -> int:
        """A round of all rows with one draft step each; returns how many drafted."""
        on = [row.drafts(number) for row in self.rows]
        for row, drafts in zip(self.rows, on, strict=True):
            row.count(RoundCount(int(drafts), 1, 1, added if drafts else 1))
        return sum(on)


def test_one_row_tries_for_all() -> None:
    group = Rows.of(16)
    assert group.round(1, 1) == 16  # a loss of one token's time each
    later = [group.round(number, 1) for number in range(2, 69)]
    assert later[:64] == [0] * 64 and later[64] == 1
    group = Rows.of(16)
    before = [group.round(number, 1) for number in range(1, 66)]
    assert before[-1] == 0
    tried = [group.round(number, 4) for number in range(66, 69)]  # now it gains
    assert tried == [1, 16, 16]


def test_a_row_that_ends_while_it_tries_makes_room_for_another() -> None:
    group = Rows.of(2)
    while group.round(number := len(group.rows[0].changes) + 1, 1) != 0:
        pass
    for _ in range(200):
        trying = [row for row in group.rows if row.drafts(number)]
        if trying:
            break
        for row in group.rows:
            row.count(RoundCount(0, 1, 1, 1))
    assert len(trying) == 1
    (other,) = [row for row in group.rows if row is not trying[0]]
    assert not other.drafts(number)
    group.rows.clear()
    trying.clear()
    assert other.drafts(number + 1)


@pytest.mark.parametrize("count", [1, 8, 32])
def test_a_draft_that_becomes_good_is_used_again(count: int) -> None:
    group, number = Rows.of(count), 0
    while number < 300:  # at first it loses
        number += 1
        group.round(number, 1)
    found = 0
    while found < count and number < 1500:
        number += 1
        found = group.round(number, 4)
    assert found == count and number < 800
    assert all(group.round(n, 4) == count for n in range(number + 1, number + 50))


def test_a_trial_that_says_nothing_is_given_up() -> None:
    group, tried = Rows.of(3), []
    for number in range(1, 200):
        tried = [row for row in group.rows if row.drafts(number)]
        if len(tried) == 1:
            break
        for row in group.rows:
            row.count(RoundCount(int(row in tried), 1, 1, 1))
    (lost,), first = tried, number  # it holds on, and never counts
    others = [row for row in group.rows if row is not lost]
    for _ in range(500):
        for row in others:
            row.count(RoundCount(0, 1, 1, 1))
    assert any(row.drafts(first) for row in others)


def test_levels_of_trees_cost_what_they_read() -> None:
    costs = PassCosts(((1, 1.0), (64, 1.0)), ((1, 0.1), (8, 0.8)))
    wide, slim = Tracker(costs), Tracker(costs)
    for tracker, width in ((wide, 8.0), (slim, 1.0)):
        row = AdaptiveSwitch(tracker)
        for number in range(1, 8):
            if row.drafts(number):
                row.count(RoundCount(steps=4, width=width, target_tokens=30, added=2))  # 4.2 or 1.4 against 2
        assert bool(row.changes) is (tracker is wide)


def test_what_the_host_does_for_each_row_counts() -> None:
    costs = PassCosts(((1, 1.0), (200, 1.0)), ((1, 0.2), (200, 0.2)))
    slow = replace(costs, host=(0.0, 0.05, 0.0))
    off = []
    for chosen in (costs, slow):
        for count in (1, 16):
            tracker = Tracker(chosen, lambda count=count: count)  # type: ignore[misc]
            row = AdaptiveSwitch(tracker)
            for number in range(1, 60):
                if row.drafts(number):
                    row.count(RoundCount(steps=4, width=1, target_tokens=5, added=3))  # 1.8 s in passes
            off.append(bool(row.changes))
    assert off == [False, False, False, True]  # 2.0 s for one row, 5.0 s for 16 of them
