"""Figures of the accept rules, for one draft and for several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from figures_base import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LETTERS,
    ORANGE,
    PURPLE,
    RED,
    Pair,
    accept_panels,
    box,
    canvas,
    cost,
    curve,
    example,
    figure,
    law_pairs,
    legend_of,
    plane,
)
from sprinter.decode.accept import (
    Bild,
    Exact,
    Fuzzy,
    GreedyMatch,
    Lenient,
    Mentored,
    Opt,
    RandomAccept,
    SeveralRule,
    TargetCall,
    Typical,
    Uno,
)
from sprinter.decode.accept.fuzzy import DIVERGENCES
from sprinter.decode.drafter import Model
from sprinter.decode.grow import Root, grow_from
from sprinter.decode.registry import ACCEPT
from sprinter.laws import tv_distance
from sprinter.random import AddressedDraws, Purpose


# --- accept -----------------------------------------------------------------------------------------------------------
@figure("exact")
def _exact() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Exact(), "exact: b = min(1, p/q), π = p")
    p, q = (laws[:150] for laws in law_pairs())
    chance = torch.Generator().manual_seed(3)
    tokens = torch.multinomial(q, 300, replacement=True, generator=chance)
    keep = Exact().keep(p, q).gather(-1, tokens)
    refused = (torch.rand(keep.shape, generator=chance, dtype=torch.float64) >= keep).double().mean(-1)
    right.plot([0, 1], [0, 1], color=GREY, lw=1.4, label="P(reject) = TV(p, q)")
    right.plot(tv_distance(p, q), refused, ".", color=GREEN, ms=4, label="a pair of laws, 300 draws")
    right.set(xlim=(0, 1), ylim=(0, 1), xlabel="TV(p, q)", ylabel="share of refused draft tokens")
    right.set_title("Refused as often as the laws differ")
    right.legend(loc="upper left")
    return fig


SLACKS = [0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.8, 1.0]
SLACK_MARKS = [(0.0, "ε = 0"), (0.01, "0.01"), (0.05, "0.05"), (0.2, "0.2")]


@figure("opt")
def _opt() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Opt(0.04), "opt(epsilon=0.04)")
    plane(right, right=0.8)
    curve(right, Uno, SLACKS, "uno", color=PURPLE, line="--")
    curve(right, Opt, SLACKS, "opt: on the line", SLACK_MARKS, offset=(-6, -8), side="right")
    right.legend(loc="upper right")
    return fig


@figure("uno")
def _uno() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Uno(0.04), "uno(epsilon=0.04)")
    plane(right, right=0.8)
    curve(right, Opt, SLACKS, "opt", color=PURPLE, line="--")
    curve(right, Uno, SLACKS, "uno: above the line", SLACK_MARKS, offset=(7, 3))
    right.legend(loc="upper right")
    return fig


@figure("fuzzy")
def _fuzzy() -> Figure:
    fig, (left, right) = canvas(3.3, ncols=2)
    p, q = (laws[:150] for laws in law_pairs())
    distance = tv_distance(p, q)
    for name, color, mark in (("js_reference", GREEN, "o"), ("js", PURPLE, "^")):
        value, keep = DIVERGENCES[name](p, q), Fuzzy(name, 0.3).keep(p, q)[:, 0] > 0
        left.plot(value[keep], distance[keep], mark, color=color, ms=3.5, label=f"{name}: kept")
        left.plot(value[~keep], distance[~keep], mark, color=color, ms=3.5, fillstyle="none", label="refused")
    left.axvline(0.3, color=INK, lw=1)
    left.text(0.305, 0.02, " T = 0.3", fontsize=8)
    left.set(xlim=(0, 0.8), ylim=(0, 1), xlabel="divergence, nats", ylabel="TV(p, q) of the position")
    left.set_title("Whole positions are kept or refused")
    left.legend(loc="lower right")
    plane(right)
    top = {"js": 0.7, "kl": 8.0, "kl_reversed": 8.0, "tv": 1.0, "js_reference": 3.0}
    lines = {"js": ":", "kl": "--", "kl_reversed": "-.", "tv": (0, (1, 1)), "js_reference": "-"}
    colors = {"js": PURPLE, "kl": BLUE, "kl_reversed": ORANGE, "tv": RED, "js_reference": GREEN}
    for name, most in top.items():
        marks = [(0.1, "0.1"), (0.3, "T = 0.3"), (0.6, "0.6")] if name == "js_reference" else []
        values = [most * (i / 24) ** 2 for i in range(25)]
        curve(right, lambda t, d=name: Fuzzy(d, t), values, name, marks, colors[name], (7, 3), lines[name])  # type: ignore[misc]
    right.legend(loc="upper right")
    return fig


@figure("mentored")
def _mentored() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Mentored(0.1), "mentored(kl=0.1)")
    plane(right, right=0.8)
    values = [0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 4.0, 10.0]
    curve(
        right,
        Mentored,
        values,
        "mentored: on the line",
        [(0.0, "D = 0"), (0.01, "0.01"), (0.1, "0.1"), (0.5, "0.5 nats")],
    )
    right.legend(loc="upper right")
    return fig


@figure("lenient")
def _lenient() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Lenient(0.5), "lenient(w=0.5)")
    plane(right, right=0.8)
    marks = [(1.0, "w = 1"), (0.8, "0.8"), (0.5, "0.5"), (0.2, "0.2")]
    curve(right, Lenient, [i / 10 for i in range(11)], "lenient: on the line", marks)
    right.legend(loc="upper right")
    return fig


@figure("typical")
def _typical() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Typical(), "typical(epsilon=0.09, delta=0.3)")
    plane(right)
    values = [0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.09, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 0.99]
    curve(right, lambda d: Typical(1.0, d), values, "δ from 0 to 1, ε = 1", color=PURPLE, line="--")
    curve(
        right,
        lambda e: Typical(e, 0.3),
        values,
        "ε from 0 to 1, δ = 0.3",
        [(0.002, "0.002"), (0.02, "0.02"), (0.09, "ε = 0.09")],
        offset=(4, 6),
    )
    right.legend(loc="upper right")
    return fig


@figure("bild")
def _bild() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Bild(2.5), "bild(rollback=2.5)")
    plane(right, ceiling=0.72)
    values = [0.0, 0.1, 0.3, 0.6, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15]
    curve(right, Bild, values, "bild", [(0.6, "0.6"), (2, "2"), (5, "5 nats")], offset=(7, 4))
    right.legend(loc="upper right")
    return fig


@figure("random")
def _random() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, RandomAccept(0.5), "random(rate=0.5)")
    plane(right)
    curve(
        right,
        RandomAccept,
        [i / 10 for i in range(11)],
        "random",
        [(0.0, "0"), (0.5, "rate = 0.5"), (0.9, "0.9")],
        offset=(6, 5),
    )
    curve(right, Opt, SLACKS, "opt", color=PURPLE, line="--")
    right.legend(loc="upper right")
    return fig


@figure("greedy")
def _greedy() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, GreedyMatch(), "greedy: keeps argmax p alone")
    temperatures = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02]
    p, q = (laws.clamp(min=1e-300).log() for laws in law_pairs())
    means: dict[str, list[tuple[float, float]]] = {"greedy": [], "exact": []}
    for t in temperatures:
        laws = torch.softmax(p / t, -1), torch.softmax(q / t, -1)
        for name, rule in (("greedy", GreedyMatch()), ("exact", Exact())):
            means[name].append(cost(rule, *laws))
    right.plot(temperatures, [y for _, y in means["greedy"]], color=GREEN, lw=2, label="TV(π, p), greedy")
    right.plot(
        temperatures, [x for x, _ in means["greedy"]], "--", color=RED, lw=2, label="P(reject), greedy"
    )
    right.plot(temperatures, [x for x, _ in means["exact"]], ":", color=GREY, lw=2, label="P(reject), exact")
    right.set(
        xlim=(0, 1), ylim=(0, None), xlabel="temperature of both laws", ylabel="mean over 400 pairs of laws"
    )
    right.set_title("At temperature 0 it is exact")
    right.legend(loc="upper left")
    return fig


# --- several drafts ---------------------------------------------------------------------------------------------------
class Listening:
    """Draws that remember which candidate was tried with what chance."""

    def __init__(self, seed: int) -> None:
        self.inner, self.tried = AddressedDraws(seed), []

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        kept = self.inner.keep(chances, round, position, row)
        self.tried.append((position - 1, row, chances[0], kept[0]))
        return kept

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        return self.inner.token(law, round, position, purpose, row)


def several_round(rule: SeveralRule, drafts: int, gamma: int, round: int, pair: Pair) -> tuple:
    """One judged round of independent drafts: (tree, verdict, what was tried)."""
    draws = Listening(7)
    growth = Model(drafts=drafts).growth(Root(draws, round, 1, gamma))
    paths = grow_from(growth, lambda path: pair.q((round, *path)))
    tree, _ = growth.finish()
    p = torch.stack([pair.p((round, *path)) for path in paths.values()])
    return tree, rule.judge(TargetCall(tree, p, None, draws, round, 1)), draws.tried


def draw_several(ax: Axes, name: str, round: int) -> None:
    """One round drawn: every candidate that was tried carries its chance."""
    tree, verdict, tried = several_round(ACCEPT.get(name)(), 3, 4, round, Pair(4, seed=5, noise=2.0))
    fate = {(row, depth): (chance, kept) for depth, row, chance, kept in tried}
    chains, path = tree.chains(), [tree.tokens[node] for node in verdict.path]
    for row, chain in enumerate(chains):
        for depth, x in enumerate(chain.tokens):
            shared = depth < verdict.accepted and list(chain.tokens[: depth + 1]) == path[: depth + 1]
            known = fate.get((row, depth))
            kind = ("accepted" if known[1] else "refused") if known else "dropped"
            if kind == "dropped" and shared and name != "batch":
                kind = "accepted"
            box(ax, depth + 1, row + 1, LETTERS[x], kind, 0.5, 0.5)
            if known:
                ax.text(
                    depth + 1,
                    row + 1.3,
                    f"{known[0]:.2f}",
                    ha="center",
                    va="top",
                    fontsize=7,
                    color="#555555",
                )
    kind = "bonus" if verdict.accepted == 4 else "replacement"
    box(
        ax, verdict.accepted + 1 if kind == "replacement" else 5, 4.15, LETTERS[verdict.token], kind, 0.5, 0.5
    )
    ax.set(
        xlim=(0.5, 5.5),
        ylim=(4.6, 0.55),
        xlabel="depth (below a token that was tried: its chance)",
        ylabel="draft",
    )
    ax.set_yticks([1, 2, 3, 4.15], ["1", "2", "3", "target"])
    ax.set_xticks(range(1, 5))
    ax.set_title(f"{name}: one round of M = 3 drafts, γ = 4")


@cache
def first_token(name: str) -> list[float]:
    """Chance that one of M first tokens is kept, M = 1..8, mean over random laws on 8 tokens."""
    rule, pair, out = ACCEPT.get(name)(), Pair(8, seed=2, noise=1.5), []
    for count in range(1, 9):
        total = 0.0
        for i in range(30):
            p, q = pair.laws((i,))
            missed = torch.zeros(
                count, dtype=torch.float64
            )  # chance of keeping at each try, given all before refused
            for x in range(8):
                chances: list[float] = []

                def refuse(index: int, chance: float, chances: list[float] = chances) -> bool:
                    chances.append(chance)
                    return False

                rule.pick(p, q, [x] * count, refuse)
                missed += float(q[x]) * torch.tensor(chances, dtype=torch.float64)
            total += 1 - float((1 - missed).prod())
        out.append(total / 30)
    return out


@cache
def mean_accepted(name: str) -> list[float]:
    """Mean accepted draft tokens a round of gamma = 4 for M = 1, 2, 4, 8, by the real verdicts on 250 rounds."""
    rule, pair = ACCEPT.get(name)(), Pair(8, seed=2, noise=1.5)
    return [
        sum(several_round(rule, m, 4, r, pair)[1].accepted for r in range(250)) / 250 for m in (1, 2, 4, 8)
    ]


def several_figure(name: str, round: int) -> tuple[Figure, Axes]:
    fig, (left, right) = canvas(3.1, ncols=2)
    draw_several(left, name, round)
    words = {"accepted": "kept, or the same as what was kept", "dropped": "not tried"}
    legend_of(fig, ["accepted", "refused", "dropped", "replacement"], words, "left")
    return fig, right


def first_token_panel(ax: Axes) -> None:
    for name, color, line, mark in (("batch", GREEN, "-", "o"), ("spectr", PURPLE, "--", "s")):
        label = "batch, specinfer: recursion" if name == "batch" else "spectr: k-SEQ"
        ax.plot(range(1, 9), first_token(name), line, marker=mark, color=color, ms=4, label=label)
    base = first_token("batch")[0]
    ax.axhline(base, color=GREY, lw=1, ls=":")
    ax.text(8, base - 0.012, "1 − TV(p, q), one draft", ha="right", va="top", color="#666666", fontsize=8)
    ax.set(
        xlabel="drafts M",
        ylabel="chance that a first token is kept",
        ylim=(base - 0.08, 1),
        xticks=range(1, 9),
    )
    ax.set_title("More drafts, less and less gained")
    ax.legend(loc="upper left")


@figure("batch")
def _batch() -> Figure:
    fig, right = several_figure("batch", 1067)
    first_token_panel(right)
    return fig


@figure("specinfer")
def _specinfer() -> Figure:
    fig, ax = several_figure("specinfer", 1067)
    lines = (("specinfer", GREEN, "-", "o"), ("spectr", PURPLE, "--", "s"), ("batch", GREY, ":", "^"))
    for name, color, line, mark in lines:
        ax.plot((1, 2, 4, 8), mean_accepted(name), line, marker=mark, color=color, ms=4, label=name)
    ax.set(xlabel="drafts M", ylabel="accepted draft tokens a round", xticks=(1, 2, 4, 8), ylim=(0, 4))
    ax.set_title("γ = 4, 250 rounds on random laws")
    ax.legend(loc="lower right")
    return fig


@figure("spectr")
def _spectr() -> Figure:
    fig, right = several_figure("spectr", 1067)
    first_token_panel(right)
    return fig
