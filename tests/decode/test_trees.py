"""Trees: joint laws by enumeration for rules and growers, mutants that fail, shapes of the trees, what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sprinter.decode import (
    ACCEPT,
    DRAFTER,
    Block,
    Calibrated,
    Confidence,
    Drawn,
    Dynamic,
    Exact,
    Fixed,
    Gate,
    GreedyMatch,
    Judge,
    Method,
    Model,
    Never,
    OneHot,
    Root,
    Siblings,
    SpecInfer,
    Static,
    Svip,
    Tips,
    Traversal,
    TreeBuilder,
    TreeRule,
    Typical,
    Widened,
    Without,
    check_drafter,
    parse_method,
)
from sprinter.decode import enumerate as enumerating
from sprinter.decode.accept.base import TargetCall
from sprinter.decode.accept.tree import Keep, recursion
from sprinter.decode.drafter import Drafter
from sprinter.decode.enumerate import (
    EnumeratedDraws,
    MarkovPair,
    check_same_law,
    joint_law,
    run_chain,
    target_joint_law,
)
from sprinter.decode.grow import grow_from
from sprinter.decode.growers import _DrawnGrowth
from sprinter.decode.loop import Limits
from sprinter.decode.sequence import Tree, paths_of
from sprinter.decode.stop.chance import ChanceRule
from sprinter.decode.trust import State
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

NARROW, HOLEY, WIDE = MarkovPair(2, 1), MarkovPair(3, 2, sharp=2.0, zeros=0.3), MarkovPair(4, 3)


def check(method: Method, pair: MarkovPair, length: int) -> None:
    check_same_law(joint_law(method, pair, length), target_joint_law(pair, length), f"{method} on {pair}")


# --- joint laws: beside what check_accept does for each rule ---------------------------------------------------------
DEEP = [
    (OneHot(), Static("3x2x1")),
    (OneHot(), Dynamic(2, 3, 5)),
    (Traversal(), Static("3x2x1")),
    (Traversal(), Dynamic(3, 3, 7)),
    (Without(), Widened("4x3x2x1")),
    (Traversal(), Widened("4x3x2x1")),
    (Without(), Drawn("1x1x2")),
    (Traversal(), Drawn("1x2x1")),
    (Traversal(), Model()),
    (Without(), Model()),
]


@pytest.mark.parametrize(("rule", "drafter"), DEEP, ids=str)
def test_joint_law_of_trees_of_three_levels(rule: Judge, drafter: Drafter) -> None:
    """With truncated laws, whose supports differ, and texts that end within a tree."""
    method = Method(accept=rule, drafter=drafter, stop=Fixed(3))
    check(method, HOLEY, 4)

    def ends(text: Sequence[int]) -> str | None:
        return "eos" if text[-1] == 2 else None

    found, wanted = joint_law(method, HOLEY, 4, ends=ends), target_joint_law(HOLEY, 4, ends=ends)
    check_same_law(found, wanted, f"{method} with ends")


@pytest.mark.slow  # every draw of every node is enumerated
@pytest.mark.parametrize("rule", [Without(), Traversal()], ids=str)
@pytest.mark.parametrize(
    "drafter", [Drawn("2x1x1"), Drawn("2x1x1", True), Drawn("2x2"), Widened("3x3x2x1")], ids=str
)
def test_joint_law_of_deeper_drawn_trees(rule: Judge, drafter: Drafter) -> None:
    for stop in (Never() if drafter.levels else Fixed(3), Svip(0.6)):
        for pair, length in ((NARROW, 4), (MarkovPair(3, 1), 3), (MarkovPair(4, 4, sharp=2.0, zeros=0.3), 3)):
            check(Method(accept=rule, drafter=drafter, stop=stop, cap=3), pair, length)


def test_every_rule_and_drafter_of_trees_is_checked_by_the_conformance_suite() -> None:
    rules = {name for name in ACCEPT.names() if Siblings.CHOSEN in ACCEPT.get(name).siblings}
    assert {"onehot", "traversal", "typical", "greedy", "margin", "relaxed", "bild"} <= rules
    growers = [DRAFTER.get(name)() for name in ("static", "dynamic", "drawn", "widened")]
    assert [grower.siblings for grower in growers] == [Siblings.CHOSEN] * 2 + [
        Siblings.DRAWN,
        Siblings.WIDENED,
    ]


@pytest.mark.parametrize(
    "drafter", [Static("2x1"), Dynamic(2, 2, 3), Drawn("2x1"), Widened("3x2x2x1"), Model(drafts=2)], ids=str
)
def test_growers_pass_the_public_check(drafter: Drafter) -> None:
    check_drafter(drafter)


# --- mutants ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class AsIfIndependent(Without):
    """Each sibling is judged against the law of the first, as if they were drawn with replacement."""

    def pick(self, p: Tensor, tree: Tree, children: Sequence[int], keep: Keep) -> tuple[int | None, Tensor]:
        return recursion(
            p, [tree.tokens[i] for i in children], [tree.laws[children[0]]] * len(children), keep
        )


class _Mutated(_DrawnGrowth):
    """Says another law of the later siblings."""

    def told(self, law: Tensor, earlier: list[int]) -> Tensor:
        raise NotImplementedError

    def grow(self, level: int, tips: Sequence[int], found: Tips) -> None:
        first = len(self.tokens)
        super().grow(level, tips, found)
        for i, tip in enumerate(tips):
            own = [node for node in range(first, len(self.tokens)) if self.parents[node] == tip]
            for n, node in enumerate(own[1:], 1):
                self.laws[node] = self.told(found.laws[i], [self.tokens[one] for one in own[:n]])


class NotNormalised(_Mutated):
    """q without the earlier siblings, but not normalised."""

    def told(self, law: Tensor, earlier: list[int]) -> Tensor:
        left = law.clone()
        left[earlier] = 0.0
        return left


class NormalisedByTheFirst(_Mutated):
    """q without the last sibling only, normalised: the ones before it are still there."""

    def told(self, law: Tensor, earlier: list[int]) -> Tensor:
        left = law.clone()
        left[earlier[-1]] = 0.0
        return left / left.sum()


@dataclass(frozen=True)
class Mutant(Drawn):
    growth_of: type[_DrawnGrowth] = _DrawnGrowth

    def growth(self, root: Root) -> TreeBuilder:
        return self.growth_of(root, [int(one) for one in self.widths.split("x")], False)


@dataclass(frozen=True, slots=True)
class KeepsTheRefused(OneHot):
    """p is not renormalised without the refused sibling."""

    def pick(self, p: Tensor, tree: Tree, children: Sequence[int], keep: Keep) -> tuple[int | None, Tensor]:
        for index, node in enumerate(children):
            if keep(index, float(p[tree.tokens[node]])):
                return index, p
        return None, p


@dataclass(frozen=True)
class Reranked(Drawn):
    """Drops the less probable of drawn siblings: their laws are no longer those that they were drawn from."""

    def growth(self, root: Root) -> TreeBuilder:
        class Ranks(_DrawnGrowth):
            def kept(self) -> list[int]:
                best = max(range(len(self.tokens)), key=lambda node: float(self.laws[0][self.tokens[node]]))
                return [best]

        return Ranks(root, [int(one) for one in self.widths.split("x")], False)


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        (AsIfIndependent(), Drawn("2")),
        (Without(), Mutant("2", growth_of=NotNormalised)),
        (Traversal(), Mutant("2", growth_of=NotNormalised)),
        (Without(), Mutant("3", growth_of=NormalisedByTheFirst)),
        (Traversal(), Mutant("3", growth_of=NormalisedByTheFirst)),
        (KeepsTheRefused(), Static("2")),
        (Without(), Reranked("2")),
    ],
    ids=str,
)
def test_mutants_are_biased(rule: Judge, drafter: Drafter) -> None:
    pair = MarkovPair(5, 3)
    sound = Static("2") if isinstance(rule, OneHot) else Drawn(getattr(drafter, "widths", "2"))
    check(
        Method(accept=OneHot() if isinstance(rule, OneHot) else Traversal(), drafter=sound, stop=Never()),
        pair,
        2,
    )
    with pytest.raises(AssertionError, match="has chance"):
        check(Method(accept=rule, drafter=drafter, stop=Never()), pair, 2)


def test_a_target_pass_that_sees_siblings_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    method, pair = Method(accept=OneHot(), drafter=Static("2x1"), stop=Never()), MarkovPair(3, 1)
    check(method, pair, 3)

    def leaks(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
        paths = paths_of(tokens, parents)
        return [(*paths[0], *path) if i and len(path) == 1 else path for i, path in enumerate(paths)]

    monkeypatch.setattr(enumerating, "paths_of", leaks)
    with pytest.raises(AssertionError, match="has chance"):
        check(method, pair, 3)


# --- traversal -------------------------------------------------------------------------------------------------------
def verdicts(rule: Judge, tree: Tree, p: Tensor) -> dict[tuple[int, ...], float]:
    """Probability of each text of a verdict."""
    law: dict[tuple[int, ...], float] = {}
    draws = EnumeratedDraws()
    while True:
        verdict = rule.judge(TargetCall(tree, p, None, draws, 1, 1))
        text = (*(tree.tokens[node] for node in verdict.path), verdict.token)
        law[text] = law.get(text, 0.0) + draws.weight
        if not draws.next_path():
            return law


def test_traversal_of_a_chain_is_block_verification() -> None:
    chance = torch.Generator().manual_seed(5)
    for _ in range(20):
        p, q = (torch.rand(n, 5, generator=chance, dtype=torch.float64).pow(2) for n in (4, 3))
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        tokens = [int(torch.multinomial(law, 1, generator=chance)) for law in q]
        chain = Tree(tokens, list(q))
        check_same_law(verdicts(Traversal(), chain, p), verdicts(Block(), chain, p), "traversal")


def expected(rule: Judge, drafter: Drafter, pair: MarkovPair, depth: int) -> float:
    """Expected number of tokens of one round, over every draw of its tree and every verdict."""
    draws, total = EnumeratedDraws(), 0.0
    while True:
        growth = drafter.growth(Root(draws, 1, 1, depth))
        paths = grow_from(growth, lambda path: pair.q((0, *path)))
        tree, _ = growth.finish()
        p = torch.stack([pair.p((0, *path)) for path in paths.values()])
        kept = rule.judge(TargetCall(tree, p, None, draws, 1, 1)).accepted
        total += draws.weight * (1 + kept)
        if not draws.next_path():
            return total


def test_traversal_keeps_more_of_the_same_trees() -> None:
    """Never fewer on these pairs, and more in all."""
    gains = []
    for seed in range(3):
        pair = MarkovPair(3, seed, sharp=1.5)
        gains.append(
            expected(Traversal(), Drawn("2x1"), pair, 2) - expected(Without(), Drawn("2x1"), pair, 2)
        )
    assert min(gains) > -1e-12 and max(gains) > 0.01


# --- growers ---------------------------------------------------------------------------------------------------------
def grown(
    drafter: Drafter, laws: dict[tuple[int, ...], list[float]], depth: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """The paths of the tree that a drafter grows; the last of ``laws`` is that of all other paths."""
    last = list(laws.values())[-1]
    growth = drafter.growth(Root(AddressedDraws(seed), 1, 0, depth))
    paths = grow_from(growth, lambda path: torch.tensor(laws.get(path, last), dtype=torch.float64))
    return [paths[node] for node in growth.kept()]


def test_static_trees_hold_the_most_probable_tokens() -> None:
    laws = {(): [0.1, 0.6, 0.3], (1,): [0.2, 0.0, 0.8], (2,): [0.9, 0.05, 0.05]}
    assert grown(Static("2x1"), laws, 2) == [(1,), (2,), (1, 2), (2, 0)]
    assert grown(Static("3x1"), {(): [0.0, 1.0, 0.0]}, 1) == [
        (1,)
    ]  # tokens that cannot be drawn are left out


def test_dynamic_trees_expand_and_rerank_by_path_probability() -> None:
    """EAGLE-2's Figures 4 and 5 in small: 0.6·0.9 comes before 0.3, and 0.3·0.5 is dropped."""
    laws = {(): [0.1, 0.6, 0.3], (1,): [0.9, 0.06, 0.04], (2,): [0.5, 0.3, 0.2]}
    assert grown(Dynamic(2, 2, 3), laws, 2) == [(1,), (2,), (1, 0)]
    assert grown(Dynamic(2, 2, 4), laws, 2) == [(1,), (2,), (1, 0), (2, 0)]
    assert grown(Dynamic(1, 3, 9), laws, 3) == [(1,), (1, 0), (1, 0, 0)]


def test_reranking_keeps_paths_whole() -> None:
    chance = torch.Generator().manual_seed(1)
    for _ in range(30):
        laws = {(): torch.rand(6, generator=chance).softmax(-1).tolist()}
        for x in range(6):
            laws[(x,)] = (8 * torch.rand(6, generator=chance)).softmax(-1).tolist()
        paths = grown(Dynamic(3, 4, 7), laws, 4)
        assert len(paths) == 7 and all(path[:-1] in [(), *paths] for path in paths)


@pytest.mark.parametrize(("sure", "count"), [(0.2, 5), (0.3, 5), (0.5, 4), (0.7, 2), (0.95, 1)])
def test_widened_chains_have_more_candidates_where_the_draft_is_unsure(sure: float, count: int) -> None:
    law = [sure, *([(1 - sure) / 4] * 4)]
    for seed in range(20):
        paths = grown(Widened("5x4x2x1"), {(): law}, 1, seed)
        if paths[0] == (0,):
            assert len(set(paths)) == len(paths) == count
    deep = grown(Widened("5x4x2x1"), {(): law}, 2)
    assert sum(len(path) == 2 for path in deep) >= 1
    assert all(path[:1] == deep[0] for path in deep if len(path) == 2)  # only the drawn token goes on


# --- rules for positions on trees ------------------------------------------------------------------------------------
def test_typical_takes_the_longest_path_whose_tokens_all_stay() -> None:
    """Medusa's section 2.3.1; drift and ratio of a token that stays for sure are those of a one-hot law."""
    p = torch.tensor(
        [[0.5, 0.3, 0.2], [0.01, 0.0, 0.99], [0.4, 0.6, 0.0], [1.0, 0, 0], [0, 1.0, 0]], dtype=torch.float64
    )
    tree = Tree([0, 1, 1, 2], [torch.empty(0)] * 4, (), [-1, -1, 1, 1])
    verdict = Typical(0.09, 0.3).judge(TargetCall(tree, p, None, AddressedDraws(), 1, 1))
    assert list(verdict.path) == [1, 2] and verdict.token == 0
    assert verdict.drifts == pytest.approx([0.7, 0.4, 0.0]) and verdict.ratios == pytest.approx(
        [0.3, 0.6, 1.0]
    )
    verdict = GreedyMatch().judge(TargetCall(tree, p, None, AddressedDraws(), 1, 1))
    assert list(verdict.path) == [0] and verdict.token == 2


def test_lossy_trees_are_metered() -> None:
    method = Method(accept=Typical(), drafter=Dynamic(3, 3, 8), stop=Never())
    record = run_chain(method, WIDE, (0,), Limits(30), AddressedDraws(1))
    stats = record.stats
    assert not method.lossless() and method.lossless(greedy=True)
    assert stats.accepted > 5 and stats.mean_drift is not None and 0 < stats.mean_drift < 1
    assert stats.drift_coverage == 1 and stats.text_drift is not None and not math.isnan(stats.text_drift)


# --- what goes together ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("accept=onehot", "judges trees of siblings that are chosen, and drafter .* drafts chains"),
        ("drafter=static,accept=exact", "those of Static.* are chosen: give onehot or traversal"),
        ("drafter=static", "are chosen: give onehot or traversal"),
        ("drafter=drawn,accept=onehot", "are drawn: give without or traversal"),
        ("drafter=widened,accept=specinfer", "are widened: give without or traversal"),
        ("drafter=static,accept=without", "are chosen: give onehot"),
        ("drafter=model(drafts=2),accept=without,stop=fixed", "judges one draft"),
        ("drafter=drawn,accept=typical", "are drawn: give without or traversal"),
        ("drafter=static,accept=lenient", "are chosen: give onehot or traversal"),
        ("drafter=dynamic,accept=onehot,trust=gate(tau=0.5)", "trees, which go with trust=nobody"),
        ("drafter=dynamic,accept=onehot,stop=confidence", "is for chains"),
        ("drafter=dynamic,accept=onehot,stop=calibrated(signal=gate)", "is for chains"),
        ("drafter=dynamic,accept=onehot,stop=optimal", "is for chains"),
        ("drafter=dynamic,accept=onehot,stop=fallback", "is for chains"),
        ("drafter=dynamic,accept=typical,head=4", "head=4 has the exact rule judge one draft"),
        ("static-tree(widths=4x0)", "widths=4x0 is out of range: give whole numbers >= 1, as in 4x2x2"),
        ("static-tree(widths=20x20x20)", "a tree of 8420 tokens: give one of fewer than 512"),
        ("tree(expand=30, depth=30)", "give smaller numbers"),
        ("tree(nodes=0)", "nodes=0 is out of range"),
        ("cape(counts=7x5x3)", "give four numbers in"),
        ("drafter=drawn(replacement=3),accept=without", "replacement=3 is out of range: give true or false"),
    ],
)
def test_what_does_not_go_together(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(spec)


def test_trees_without_a_largest_depth_are_refused() -> None:
    with pytest.raises(UserError, match="no largest depth: give stop=fixed or cap=20"):
        Method(accept=Without(), drafter=Widened(), stop=Svip())
    with pytest.raises(UserError, match="trust=nobody"):
        Method(accept=Without(), drafter=Drawn(), trust=Gate(0.5), stop=Fixed(2))
    with pytest.raises(UserError, match="is for chains"):
        Method(accept=Without(), drafter=Drawn(), stop=Confidence())


def test_specs_of_trees() -> None:
    method = parse_method("tree")
    assert method.is_as(Method(accept=OneHot(), drafter=Dynamic(8, 5, 24), stop=Never()))
    assert method.name == "tree(expand=8, depth=5, nodes=24)" and method.lossless() and method.levels == 5
    assert parse_method("drafter=static(widths=4),accept=onehot").stop == Never()
    assert parse_method("static-tree(widths=4)").drafter == Static("4")
    assert parse_method("cape(gamma=3)").levels == 3 and parse_method("tree(cap=2)").levels == 2
    assert parse_method("drafter=widened,accept=without,stop=svip,cap=6").levels == 6
    assert issubclass(OneHot, TreeRule) and Exact.siblings == {Siblings.ALONE}
    assert SpecInfer.siblings == {Siblings.ALONE, Siblings.INDEPENDENT}


def test_a_stop_rule_ends_a_tree_where_the_best_path_is_unsure() -> None:
    """SVIP on a tree: with a threshold of 0 each tree has one level, with a large one all of them."""
    sizes = []
    for h in (0.0, 1e6):
        method = Method(accept=OneHot(), drafter=Static("2x2x2"), stop=Svip(h))
        record = run_chain(method, WIDE, (0,), Limits(40), AddressedDraws(2))
        sizes.append(record.stats.drafted / record.stats.target_calls)
    assert sizes[0] <= 2 < 8 < sizes[1] <= 14


def test_a_rule_that_learns_is_told_which_levels_were_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[float]] = []

    def learn(self: Calibrated, signals: Mapping[str, Tensor], verdicts: Tensor, state: State) -> State:
        assert signals["entropy"].shape == verdicts.shape
        told.append(verdicts.tolist())
        return ChanceRule.learn(self, signals, verdicts, state)

    monkeypatch.setattr(Calibrated, "learn", learn)
    method = Method(accept=OneHot(), drafter=Static("2x2x2"), stop=Calibrated(0.0))
    record = run_chain(method, WIDE, (0,), Limits(60), AddressedDraws(2))
    kept = [added - 1 for added in record.accept_lengths]
    wanted = [[1.0] * n + [0.0] * (n < 3) for n in kept]
    assert told[:-1] == wanted[: len(told) - 1] and {0, 1, 2} <= {
        *kept
    }  # the last tree is cut by the text's end
    assert record.rules is not None and float(record.rules.stop_state[-1]) == sum(map(len, told))


def test_calibrated_trees_are_smaller_where_the_draft_is_bad() -> None:
    method = parse_method("drafter=static(widths=2x1x1x1),accept=onehot,stop=calibrated(rate=0.5)")
    levels = []
    for pair in (MarkovPair(12, 1, sharp=4.0), MarkovPair(12, 1, sharp=4.0, distance=0.02)):
        record = run_chain(method, pair, (0,), Limits(300), AddressedDraws(3))
        levels.append(record.stats.drafted / record.stats.target_calls)
    assert levels[0] < 0.8 * levels[1]
