"""Heads that draft: joint laws by enumeration for chains and trees, mutants that fail, sparse trees, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sprinter.decode import (
    ACCEPT,
    STOP,
    Block,
    Certain,
    Drawn,
    Dynamic,
    Exact,
    Fixed,
    Gate,
    Heads,
    Heuristic,
    Judge,
    Lookup,
    Mentored,
    Method,
    Model,
    Never,
    OneHot,
    Siblings,
    Sparse,
    SpecInfer,
    Static,
    StopRule,
    Svip,
    Traversal,
    Typical,
    Untrusted,
    Widened,
    Without,
    check_drafter,
    parse_method,
)
from sprinter.decode.draft_heads import HeadDrafts, HeadText
from sprinter.decode.drafter import Drafter
from sprinter.decode.enumerate import (
    MarkovHeads,
    MarkovPair,
    check_same_law,
    joint_law,
    run_chain,
    target_joint_law,
)
from sprinter.decode.loop import Limits
from sprinter.decode.signals import state_signals
from sprinter.decode.sparse import choose_nodes
from sprinter.decode.spec import full_spec
from sprinter.errors import SprinterError, UserError
from sprinter.random import AddressedDraws

NARROW, HOLEY, WIDE = MarkovPair(2, 1), MarkovPair(3, 2, sharp=2.0, zeros=0.3), MarkovPair(4, 3)
PROMPT = (0, 1)
CHAINS: list[tuple[Judge, StopRule]] = [
    (Exact(), Fixed(3)), (Block(), Fixed(3)), (Traversal(), Fixed(2)), (Exact(), Svip(0.6)), (Exact(), Heuristic(2)),
]  # fmt: skip
TREES: list[tuple[Judge, Drafter]] = [
    (OneHot(), Static("2x2x1")), (OneHot(), Dynamic(2, 3, 5)), (OneHot(), Sparse(6, "0x1x00x02x10x000")),
    (Traversal(), Sparse(5, "0x1x00x01x10")), (Without(), Drawn("2x1")), (Traversal(), Drawn("2x1")),
    (Without(), Widened("3x2x2x1")), (SpecInfer(), Model(drafts=2)),
]  # fmt: skip


def check(method: Method, pair: MarkovPair, length: int, heads: MarkovHeads, ahead: int = 1) -> None:
    found = joint_law(method, pair, length, prompt=PROMPT, heads=heads, ahead=ahead)
    check_same_law(found, target_joint_law(pair, length, prompt=PROMPT), f"{method} on {pair}")


# --- joint laws ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("rule", "stop"), CHAINS, ids=str)
def test_joint_law_of_chains(rule: Judge, stop: StopRule) -> None:
    """Heads that reach less far than the run, as far, and further; one token an answer, or the whole run."""
    method = Method(accept=rule, stop=stop, drafter=Heads(), cap=3)
    for pair, reach, ahead, sees_path in ((NARROW, 2, 1, False), (NARROW, 5, 3, True), (HOLEY, 3, 3, False)):
        check(method, pair, 4 if pair is NARROW else 3, MarkovHeads(pair, reach, sees_path), ahead)


@pytest.mark.parametrize(("rule", "grow"), TREES, ids=str)
def test_joint_law_of_trees(rule: Judge, grow: Drafter) -> None:
    method = Method(accept=rule, stop=Fixed(3), drafter=Heads(grow))
    drawn = not isinstance(rule, OneHot)
    for pair, reach, sees_path in ((NARROW, 2, False), (HOLEY, 3, True)):
        check(method, pair, 3 if drawn else 4, MarkovHeads(pair, reach, sees_path))


@pytest.mark.parametrize("name", ACCEPT.names())
def test_every_accept_rule_judges_heads(name: str) -> None:
    """Exact ones keep the target's law; with heads that reach one token less than the run."""
    rule = ACCEPT.get(name)()
    fits = {
        Siblings.ALONE: Heads(),
        Siblings.CHOSEN: Heads(Static("2x1")),
        Siblings.DRAWN: Heads(Drawn("2x1")),
    }
    grow = next((one for kind, one in fits.items() if kind in rule.siblings), Heads(Model(drafts=2)))
    method = Method(accept=rule, stop=Fixed(2), drafter=grow).settle({"judge": 0.5})
    record = run_chain(method, WIDE, PROMPT, Limits(8), AddressedDraws(1), heads=MarkovHeads(WIDE, 2))
    assert len(record.tokens) == 8 and record.stats.drafted > 0
    if method.lossless():
        check(method, NARROW, 3, MarkovHeads(NARROW, 1))


@pytest.mark.parametrize("name", STOP.names())
def test_every_stop_rule_that_reads_no_states_ends_drafts_of_heads(name: str) -> None:
    rule = STOP.get(name)()
    if rule.needs & state_signals():
        with pytest.raises(UserError, match="drafts of heads have none"):
            Method(stop=rule, drafter=Heads(), cap=3)
        return
    check(Method(stop=rule, drafter=Heads(), cap=2), NARROW, 3, MarkovHeads(NARROW, 3, True))


def test_texts_that_end_within_a_tree_and_greedy_chains() -> None:
    def ends(text: Sequence[int]) -> str | None:
        return "eos" if text[-1] == 2 else None

    for method in (
        Method(accept=OneHot(), drafter=Heads(Static("2x2"))),
        Method(drafter=Heads(Model(greedy=True))),
    ):
        found = joint_law(method, HOLEY, 4, prompt=PROMPT, ends=ends)
        check_same_law(found, target_joint_law(HOLEY, 4, prompt=PROMPT, ends=ends), f"{method} with ends")


@pytest.mark.parametrize("drafter", [Heads(), Heads(Dynamic(2, 2, 3)), Heads(Sparse(3, "0x1x00"))], ids=str)
def test_heads_pass_the_public_check(drafter: Drafter) -> None:
    check_drafter(drafter)


def test_a_lossy_trust_rule_meters_heads_as_a_draft_model() -> None:
    """Tokens that are trusted are the heads' own steps; when these reach no further, the target is called."""
    method = Method(trust=Certain("entropy", 1.2), stop=Untrusted(), drafter=Heads(), cap=6)
    records = [
        run_chain(
            method, WIDE, PROMPT, Limits(24), AddressedDraws(seed), complete=True, heads=MarkovHeads(WIDE, 2)
        )
        for seed in range(6)
    ]
    assert sum(record.stats.trusted for record in records) > 10
    assert all(record.stats.drift_coverage == 1 for record in records)
    assert max(max(record.accept_lengths) for record in records) <= 3


# --- mutants ---------------------------------------------------------------------------------------------------------
class _NoTail(HeadDrafts):
    """Takes the first head again in the second answer of a run."""

    def read(self, *args: object) -> None:
        super().read(*args)  # type: ignore[arg-type]
        self._tail = ()


def test_a_law_of_another_place_fails(monkeypatch: pytest.MonkeyPatch) -> None:

    class Told(HeadDrafts):
        def draft(self, *args: object) -> object:
            made = super().draft(*args)  # type: ignore[arg-type]
            return type(made)(made.tokens, made.laws.roll(1, 0), made.signals, made.raw)

    monkeypatch.setattr("sprinter.decode.enumerate.HeadDrafts", Told)
    with pytest.raises(AssertionError, match="has chance"):
        check(Method(drafter=Heads(), stop=Fixed(2)), WIDE, 3, MarkovHeads(WIDE), ahead=2)


def test_a_draft_does_not_depend_on_the_number_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Method(drafter=Heads(), stop=Fixed(3))

    def texts(ahead: int) -> list[list[int]]:
        made = [
            run_chain(
                method, WIDE, PROMPT, Limits(16), AddressedDraws(seed), ahead=ahead, heads=MarkovHeads(WIDE)
            )
            for seed in range(4)
        ]
        return [[token.id for token in record.tokens] for record in made]

    assert texts(1) == texts(3)
    monkeypatch.setattr("sprinter.decode.enumerate.HeadDrafts", _NoTail)
    assert texts(1) != texts(3)


# --- sparse trees ----------------------------------------------------------------------------------------------------
def test_medusas_choice_is_the_best_tree() -> None:
    """Among all trees of as many nodes, its sum of products of accuracies is the largest."""
    accuracies = [[0.6, 0.25, 0.1], [0.5, 0.3, 0.05], [0.4, 0.1, 0.2]]
    values = {
        path: _product(accuracies, path)
        for depth in (1, 2, 3)
        for path in map("".join, itertools.product("012", repeat=depth))
    }
    for count in (1, 2, 3, 4):
        best = max(
            sum(values[path] for path in tree)
            for tree in itertools.combinations(values, count)
            if all(len(path) == 1 or path[:-1] in tree for path in tree)
        )
        assert sum(values[path] for path in choose_nodes(accuracies, count)) == pytest.approx(best)
    assert len(choose_nodes(accuracies, 100)) == 39, "no more than there are"


def _product(accuracies: Sequence[Sequence[float]], path: str) -> float:
    value = 1.0
    for depth, rank in enumerate(path):
        value *= accuracies[depth][int(rank)]
    return value


def test_a_recorded_tree_is_filled_in_by_the_heads() -> None:
    method = parse_method("drafter=heads(grow=sparse(nodes=3)),accept=onehot")
    settled = method.settle({}, None, MarkovHeads.accuracies)
    assert settled.drafter == Heads(Sparse(3, "0x1x00"))
    assert "tree=0x1x00" in settled.name and parse_method(full_spec(settled)) == settled
    assert settled.levels == 2 and settled.drafter.slots(1) == 2 and settled.drafter.slots(2) == 3
    assert method.settle({}) == method, "stays open where no heads are known"
    with pytest.raises(UserError, match="here are none: give heads="):
        parse_method("medusa").settle({}, None, ())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sparse(8, "0x00x10"), "node 10 without its parent 1"),
        (lambda: Sparse(8, "0x0"), "names 2 nodes: give different ones"),
        (lambda: Sparse(1, "0x1"), "at most nodes=1"),
        (lambda: Sparse(8, "0,1"), "give nodes by the ranks"),
        (lambda: Sparse(512), "nodes=512 is out of range"),
        (lambda: Heads(Lookup()), "give a drafter that reads a draft model's laws"),
        (lambda: Heads(Heads()), "give a drafter that reads a draft model's laws"),
        (lambda: Method(drafter=Heads(Drawn("2x1")), accept=OneHot()), "those of .* are drawn"),
        (lambda: Method(drafter=Heads(Static("2x1"))), "accept rule Exact"),
        (lambda: Method(drafter=Heads(), trust=Gate(0.5), stop=Untrusted()), "drafts of heads have none"),
        (
            lambda: Method(drafter=Heads(Sparse()), accept=OneHot(), trust=Certain("entropy", 1.0)),
            "grows trees",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]


def test_presets() -> None:
    assert (
        parse_method("heads").lossless()
        and parse_method("medusa").lossless()
        and parse_method("eagle").lossless()
    )
    assert (
        parse_method("eagle").drafter == Heads(Dynamic(8, 5, 24)) and parse_method("medusa").stop == Never()
    )
    typical = parse_method("drafter=heads(grow=sparse(tree=0x1x00)),accept=typical")
    assert isinstance(typical.accept, Typical) and not typical.lossless()
    assert parse_method("drafter=heads,accept=mentored(kl=0.1)").accept == Mentored(0.1)


# --- heads that can draft no token after some texts -------------------------------------------------------------------
class _DeadEnds(MarkovHeads):
    """After a drafted token 0 all logits are −inf."""

    value = -torch.inf

    def begin(self) -> HeadText:
        text, value = super().begin(), self.value
        real = text.logits

        def logits(paths: Sequence[tuple[int, ...]]) -> Tensor | None:
            found = real(paths)
            if found is not None:
                for i, path in enumerate(paths):
                    if path[-1:] == (0,):
                        found[i] = value
            return found

        text.logits = logits  # type: ignore[method-assign]
        return text


@pytest.mark.parametrize(
    ("rule", "grow"),
    [(Exact(), None), (Block(), None), *TREES, (Traversal(), Model(drafts=2))],
    ids=str,
)
def test_a_draft_ends_where_the_heads_know_no_token(rule: Judge, grow: Drafter | None) -> None:
    method = Method(accept=rule, stop=Fixed(3), drafter=Heads(grow), cap=3)
    check(method, NARROW, 3, _DeadEnds(NARROW, 4, sees_path=True), ahead=3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("grow", [None, Static("2x2")], ids=str)
def test_logits_that_are_not_numbers_are_an_error(value: float, grow: Drafter | None) -> None:
    heads = _DeadEnds(NARROW, 4, sees_path=True)
    heads.value = value
    method = Method(accept=OneHot() if grow else Exact(), stop=Fixed(3), drafter=Heads(grow))
    with pytest.raises(SprinterError, match=r"drafting heads' logits are (NaN|\+inf) at position"):
        check(method, NARROW, 3, heads)
