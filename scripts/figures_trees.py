"""Figures of docs/methods for drafters that grow trees, and for the rules that judge them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from figures_base import BLUE, GREEN, GREY, INK, LETTERS, ORANGE, PALE, PURPLE, Pair, canvas, figure
from sprinter.decode import (
    Drawn,
    Dynamic,
    Fixed,
    Heads,
    Judge,
    Method,
    Never,
    OneHot,
    Root,
    Sparse,
    Static,
    Traversal,
    Widened,
    Without,
)
from sprinter.decode.accept.base import TargetCall
from sprinter.decode.draft import Verdict
from sprinter.decode.drafter import Drafter
from sprinter.decode.enumerate import MarkovPair, run_chain
from sprinter.decode.grow import grow_from
from sprinter.decode.loop import Limits
from sprinter.decode.tree import Tree
from sprinter.random import AddressedDraws


def judged(
    rule: Judge, drafter: Drafter, depth: int, seed: int, start: int = 0
) -> tuple[Tree, Verdict, list[float]]:
    """One tree on a pair of random laws, its verdict, and each node's q at its parent."""
    pair, text, draws = Pair(12, seed=5), (start, seed), AddressedDraws(seed)
    growth = drafter.growth(Root(draws, 1, len(text), depth))
    paths = grow_from(growth, lambda path: pair.q((*text, *path)))
    kept = growth.kept()
    tree, _ = growth.finish()
    p = torch.stack([pair.p((*text, *paths[node])) for node in (-1, *kept)])
    sure = [float(pair.q((*text, *paths[node][:-1]))[paths[node][-1]]) for node in kept]
    return tree, rule.judge(TargetCall(tree, p, None, draws, 1, len(text))), sure


def draw_tree(ax: Axes, tree: Tree, verdict: Verdict, sure: list[float]) -> None:
    """Nodes by level; the path that stays is filled, and what follows it stands behind it."""
    children, place, leaves = tree.children(), dict[int, float](), 0
    depths = [0, *tree.depths()]

    def lay(node: int) -> float:
        nonlocal leaves
        own = [lay(child) for child in children[node + 1]]
        if not own:
            leaves += 1
        place[node] = sum(own) / len(own) if own else -float(leaves)
        return place[node]

    lay(-1)
    for node, parent in enumerate(tree.parents or ()):
        ends = (depths[parent + 1], depths[node + 1])
        ax.plot(ends, (place[parent], place[node]), color=GREY, lw=0.4 + 3 * sure[node], zorder=1)
    for node in range(-1, len(tree.tokens)):
        stays = node in verdict.path
        ax.text(
            depths[node + 1], place[node], LETTERS[tree.tokens[node]] if node >= 0 else "text",
            ha="center", va="center", fontsize=8, color="white" if stays else INK, zorder=2,
            bbox={"boxstyle": "round,pad=0.25", "fc": GREEN if stays else PALE, "ec": GREEN if stays else GREY},
        )  # fmt: skip
    last = verdict.path[-1] if verdict.path else -1
    ax.annotate(
        f"then {LETTERS[verdict.token]}", (depths[last + 1], place[last]), (10, -11), textcoords="offset points",
        fontsize=8, color=BLUE,
    )  # fmt: skip
    ax.set(
        xlim=(-0.4, max(depths) + 0.6), ylim=(-leaves - 0.7, -0.2), xticks=range(max(depths) + 1), yticks=()
    )
    ax.set_xlabel("level")
    ax.spines["left"].set_visible(False)


@cache
def mean_kept(
    make: Callable[[], Judge], drafter: Drafter, depth: int, count: int = 300
) -> tuple[float, float]:
    """Mean number of draft tokens that stay in a round, and of nodes."""
    rounds = [judged(make(), drafter, depth, seed, start=1) for seed in range(count)]
    return sum(one.accepted for _, one, _ in rounds) / count, sum(
        len(tree.tokens) for tree, *_ in rounds
    ) / count


def two_trees(drafter: Drafter, rule: Judge, depth: int, seeds: tuple[int, int], title: str) -> Figure:
    fig, axes = canvas(3.1, ncols=2)
    for ax, seed in zip(axes, seeds, strict=True):
        draw_tree(ax, *judged(rule, drafter, depth, seed))
    axes[0].set_title(title)
    axes[1].set_title("after another text; wide lines: large q")
    return fig


def against(ax: Axes, lines: list[tuple[str, Callable[[], Judge], list[Drafter], str, str]]) -> None:
    """Accepted tokens a round against the size of the tree."""
    for label, make, drafters, color, mark in lines:
        points = [mean_kept(make, one, one.levels or 3) for one in drafters]
        ax.plot(
            [n for _, n in points], [kept for kept, _ in points], marker=mark, color=color, ms=4, label=label
        )
    ax.set(xlabel="nodes of the tree", ylabel="accepted draft tokens a round")
    ax.set_title("300 rounds on random laws, 3 levels")
    ax.legend(loc="lower right")


CHOSEN: list[Drafter] = [Dynamic(4, 3, nodes) for nodes in (3, 6, 12, 24)]
FIXED: list[Drafter] = [Static(widths) for widths in ("1x1x1", "2x1x1", "3x2x1", "4x2x2")]
DRAWN: list[Drafter] = [Drawn(widths) for widths in ("1x1x1", "2x1x1", "3x2x1", "4x2x2")]


@figure("static")
def _static() -> Figure:
    return two_trees(Static("3x2x1"), OneHot(), 3, (1, 4), "static(widths=3x2x1), judged by onehot")


@figure("dynamic")
def _dynamic() -> Figure:
    return two_trees(Dynamic(4, 4, 12), OneHot(), 4, (1, 4), "dynamic(expand=4, depth=4, nodes=12)")


@figure("drawn")
def _drawn() -> Figure:
    return two_trees(Drawn("3x2x1"), Without(), 3, (1, 4), "drawn(widths=3x2x1), judged by without")


@figure("widened")
def _widened() -> Figure:
    return two_trees(Widened(), Without(), 3, (1, 4), "widened: a chain, with leaves beside it")


@figure("onehot")
def _onehot() -> Figure:
    fig, (left, right) = canvas(3.1, ncols=2)
    draw_tree(left, *judged(OneHot(), Dynamic(4, 3, 9), 3, 2))
    left.set_title("dynamic(expand=4, depth=3, nodes=9), judged")
    against(right, [("dynamic", OneHot, CHOSEN, GREEN, "o"), ("static", OneHot, FIXED, ORANGE, "s")])
    return fig


@figure("without")
def _without() -> Figure:
    fig, (left, right) = canvas(3.1, ncols=2)
    draw_tree(left, *judged(Without(), Drawn("3x2x1"), 3, 2))
    left.set_title("drawn(widths=3x2x1), judged")
    repeated: list[Drafter] = [Drawn(one.widths, True) for one in DRAWN if isinstance(one, Drawn)]
    against(
        right, [("without", Without, DRAWN, GREEN, "o"), ("with replacement", Without, repeated, PURPLE, "^")]
    )
    return fig


@figure("traversal")
def _traversal() -> Figure:
    fig, (left, right) = canvas(3.1, ncols=2)
    draw_tree(left, *judged(Traversal(), Drawn("3x2x1"), 3, 2))
    left.set_title("drawn(widths=3x2x1), judged leaf to text")
    against(right, [("traversal", Traversal, DRAWN, GREEN, "o"), ("without", Without, DRAWN, ORANGE, "s")])
    return fig


ACCURACIES = ((0.60, 0.17, 0.08, 0.04), (0.42, 0.16, 0.09, 0.05), (0.30, 0.13, 0.08, 0.05))
"""An example: accuracies by tokens ahead and rank."""


def sparse(nodes: int) -> Drafter:
    return Sparse(nodes).settle(ACCURACIES)


@figure("sparse")
def _sparse() -> Figure:
    fig, (left, right) = canvas(3.1, ncols=2)
    draw_tree(left, *judged(OneHot(), sparse(12), 3, 4))
    left.set_title("12 nodes by accuracies, judged by onehot")
    chosen = [sparse(nodes) for nodes in (3, 6, 12, 24)]
    against(right, [("sparse", OneHot, chosen, GREEN, "o"), ("static", OneHot, FIXED, ORANGE, "s")])
    return fig


class ToldHeads:
    """Heads with the draft's laws of a pair: those after the path, or their mean over all paths of this length.

    The text is told to them, as a trained head reads it from the target's state.
    """

    kind = "example"
    layers: tuple[int, ...] = (0,)
    accuracies = ACCURACIES
    flops = 1.0

    def __init__(self, pair: MarkovPair, sees_path: bool) -> None:
        self.pair, self.sees_path, self.steps, self.tokens = pair, sees_path, 0, 0
        self.text: tuple[int, ...] = ()

    def begin(self) -> ToldHeads:
        return self

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        self.text = tuple(text)

    def law(self, depth: int, path: tuple[int, ...] = ()) -> Tensor:
        """The mean law after paths of ``depth`` more tokens."""
        own = self.pair.q((*self.text, *path))
        if depth == 0:
            return own
        return torch.stack([p * self.law(depth - 1, (*path, x)) for x, p in enumerate(own)]).sum(0)

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        laws = [self.law(0, path) if self.sees_path else self.law(len(path)) for path in paths]
        return torch.stack(laws).log() if len(paths[0]) < 3 else None


@figure("heads")
def _heads() -> Figure:
    """Rounds of heads whose laws see the drafted tokens, and of heads whose laws do not."""
    fig, axes = canvas(3.1, ncols=2)
    methods = {
        "chain": Method(drafter=Heads(), stop=Fixed(3)),
        "static": Method(drafter=Heads(Static("3x2x1")), accept=OneHot(), stop=Never()),
        "dynamic": Method(drafter=Heads(Dynamic(3, 3, 9)), accept=OneHot(), stop=Never()),
    }
    titles = ("laws see the path (EAGLE)", "laws do not (Medusa)")
    for ax, sees, title in zip(axes, (True, False), titles, strict=True):
        for at, (name, method) in enumerate(methods.items()):
            pair, counts = MarkovPair(4, 4, sharp=2.5, distance=0.3), [0] * 4
            for seed in range(60):
                heads = ToldHeads(pair, sees)
                record = run_chain(method, pair, (0, seed % 4), Limits(16), AddressedDraws(seed), heads=heads)
                for added in record.accept_lengths[:-1]:
                    counts[added - 1] += 1
            shares = [count / sum(counts) for count in counts]
            places = [x + 0.27 * (at - 1) for x in range(4)]
            ax.bar(places, shares, 0.25, label=name, color=(BLUE, ORANGE, GREEN)[at])
        ax.set(xlabel="draft tokens that stay", xticks=range(4), title=title, ylim=(0, 0.75))
    axes[0].set_ylabel("share of the rounds")
    axes[1].legend()
    return fig
