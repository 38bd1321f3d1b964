"""Public checks of accept rules on trees; ``check_accept`` and ``check_drafter`` call them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule, Judge
from sprinter.decode.draft import Control
from sprinter.decode.drafter import Drafter, Model
from sprinter.decode.enumerate import EnumeratedDraws, MarkovPair, check_same_law, joint_law, target_joint_law
from sprinter.decode.grow import Root, grow_from
from sprinter.decode.growers import Drawn, Dynamic, Static, Widened
from sprinter.decode.method import Method
from sprinter.decode.sequence import Siblings
from sprinter.decode.stop import Calibrated, Fixed, Svip

__all__ = ["TREES", "check_longest", "check_trees", "control_of_pair"]

TREES: tuple[Drafter, ...] = (
    Static("2x1x1"), Dynamic(2, 3, 4), Drawn("2x1"), Drawn("2x1", replacement=True), Widened("3x2x2x1"),
    Model(drafts=2),
)  # fmt: skip
"""Small drafters of trees, of each kind of siblings."""


def check_trees(rule: Judge, drafter: Drafter) -> None:
    """Check that texts keep the target's law where a rule judges the trees of a drafter, also under a stop rule.

    Raises:
        AssertionError: the joint law of texts is not the target's.
    """
    chance = drafter.siblings is not Siblings.CHOSEN  # multiplies the paths
    narrow, holey, wide = MarkovPair(2, 1), MarkovPair(3, 2, sharp=2.0, zeros=0.3), MarkovPair(4, 3)
    for pair, length in ((narrow, 4 - chance), (holey, 4 - chance), (wide, 2)):
        method = Method(accept=rule, stop=Fixed(3), drafter=drafter)
        check_same_law(
            joint_law(method, pair, length),
            target_joint_law(pair, length),
            f"{rule} with {drafter} on {pair}",
        )
    stops = () if drafter.siblings is Siblings.INDEPENDENT else (Svip(0.6), Calibrated(0.6))
    for stop in stops:
        method = Method(accept=rule, stop=stop, drafter=drafter, cap=3)
        check_same_law(
            joint_law(method, holey, 3), target_joint_law(holey, 3), f"{rule} with {drafter} under {stop}"
        )


def check_longest(rule: AcceptRule) -> None:
    """Check a rule for positions on trees of chosen siblings: the longest path whose tokens all stay, then p or r.

    Raises:
        AssertionError: the joint law of texts is not the one that b and r imply.
    """
    for drafter, pair in itertools.product(
        (Static("2x2"), Dynamic(2, 3, 5)), (MarkovPair(seed=6), MarkovPair(3, 2, sharp=2.0, zeros=0.3))
    ):
        found = joint_law(Method(accept=rule, stop=Fixed(3), drafter=drafter), pair, 4)
        check_same_law(
            found, _declared_longest(rule, drafter, pair, 4), f"{rule} with {drafter} against its b and r"
        )
    if rule.lossless_greedy:
        greedy = MarkovPair(3, 1, sharp=1e6)  # one-hot laws
        found = joint_law(Method(accept=rule, stop=Fixed(2), drafter=Static("3x3")), greedy, 4)
        check_same_law(found, target_joint_law(greedy, 4), f"{rule} claims lossless_greedy, on trees")


def _declared_longest(
    rule: AcceptRule, drafter: Drafter, pair: MarkovPair, length: int
) -> dict[tuple[int, ...], float]:
    """The law of texts that b and r imply for trees of chosen siblings, by recursion over rounds, without the loop."""
    law: dict[tuple[int, ...], float] = {}

    def go(text: tuple[int, ...], chance: float) -> None:
        if chance == 0 or len(text) == length:
            law[text] = law.get(text, 0.0) + chance
            return
        paths = _chosen(drafter, pair, (0, *text), min(drafter.levels or 0, length - len(text) - 1))
        longest: tuple[int, ...] = ()
        for path in paths:
            stays = all(_decision(rule, pair, (0, *text, *path[:i]))[0][x] == 1 for i, x in enumerate(path))
            longest = path if stays and len(path) > len(longest) else longest
        end = (0, *text, *longest)
        inner = any(path[:-1] == longest for path in paths)
        last = _decision(rule, pair, end)[1] if inner else pair.p(end)
        for x, one in enumerate(last.tolist()):
            go((*text, *longest, x), chance * one)

    go((), 1.0)
    return law


def _decision(rule: AcceptRule, pair: MarkovPair, prefix: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """b and r of a rule after a text, each ``[V]``."""
    p = pair.p(prefix)[None]
    b, r = rule.both(p, p, control_of_pair(rule, pair, [prefix], p, p))
    return b[0], r[0]


def _chosen(drafter: Drafter, pair: MarkovPair, text: tuple[int, ...], depth: int) -> list[tuple[int, ...]]:
    """The paths to the nodes of a tree without chance, in its order."""
    if depth < 1:
        return []
    growth = drafter.growth(Root(EnumeratedDraws(), 1, len(text), depth))
    paths = grow_from(growth, lambda path: pair.q((*text, *path)))
    return [paths[node] for node in growth.kept()]


def control_of_pair(
    rule: Judge, pair: MarkovPair, prefixes: Sequence[tuple[int, ...]], p: Tensor, q: Tensor
) -> Control | None:
    """What the loop gives a rule beside the laws after ``prefixes``, on a pair whose laws are raw laws too."""
    if not (rule.needs_raw or rule.needs):
        return None
    scores = {kind: torch.tensor([pair.score(kind, one) for one in prefixes]) for kind in rule.needs}
    return Control(p, q, scores)
