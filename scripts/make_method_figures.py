"""Draw the figures of docs/methods, one a rule, from the rules themselves.

Every curve, box and dot comes out of the classes in ``sprinter.decode``: laws and keep chances from the accept rules,
decisions and states from the trust and stop rules, texts from the real loop on a small pair of random laws. Nothing is
measured on a model. The same code gives the same files; needs matplotlib (the development extra).

    python scripts/make_method_figures.py                 # all, into docs/methods/figures
    python scripts/make_method_figures.py --only svip     # one
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from sprinter.decode.accept import (
    AcceptRule,
    Bild,
    Exact,
    Fuzzy,
    GreedyMatch,
    Lenient,
    Mentored,
    Opt,
    RandomAccept,
    SeveralRule,
    Typical,
    Uno,
)
from sprinter.decode.accept.fuzzy import DIVERGENCES
from sprinter.decode.draft import AskDraft, Chain, Draft, Record
from sprinter.decode.drafter import look_up
from sprinter.decode.enumerate import ChainDriver
from sprinter.decode.loop import Limits, decode
from sprinter.decode.methods import Method, parse_method
from sprinter.decode.registry import ACCEPT
from sprinter.decode.stop import AdaEdl, BildFallback, Confidence, Heuristic, StopRule, Svip
from sprinter.laws import entropy, one_hot, overlap, tv_distance
from sprinter.random import AddressedDraws, Purpose

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "methods" / "figures"
# Okabe and Ito's palette, told apart by all common kinds of colour vision; shapes and letters say the same again
BLUE, ORANGE, SKY, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7"
INK, GREY, PALE = "#222222", "#8A8A8A", "#E8E8E8"
STYLE = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 1.2,
    "figure.facecolor": "white",
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# The small example that the accept rules' left panels share
P = torch.tensor([0.30, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02], dtype=torch.float64)
Q = torch.tensor([0.20, 0.30, 0.08, 0.04, 0.16, 0.02, 0.12, 0.08], dtype=torch.float64)

FIGURES: dict[str, Callable[[], Figure]] = {}


def figure(name: str) -> Callable[[Callable[[], Figure]], Callable[[], Figure]]:
    """Register a drawing under the name of its rule."""

    def register(draw: Callable[[], Figure]) -> Callable[[], Figure]:
        FIGURES[name] = draw
        return draw

    return register


def canvas(height: float = 3.0, **kwargs: object) -> tuple[Figure, list[Axes]]:
    """A figure 8 inches wide and its panels, left to right and top to bottom."""
    fig, axes = plt.subplots(figsize=(8, height), layout="constrained", squeeze=False, **kwargs)
    return fig, list(axes.flat)


# --- random laws, and texts of the real loop --------------------------------------------------------------------------
@dataclass(frozen=True)
class Pair:
    """Random laws after a prefix, by its hash. Where the target is sure, the draft agrees more: as models do."""

    vocab: int = 8
    seed: int = 0
    noise: float = 1.0
    _memory: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    def laws(self, prefix: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """p and q, each ``[vocab]``, float64."""
        if prefix not in self._memory:
            digest = hashlib.sha256(f"{self.seed}{prefix}".encode()).digest()
            chance = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            sharp, z, e = (
                torch.randn(n, generator=chance, dtype=torch.float64) for n in (1, self.vocab, self.vocab)
            )
            logits = 2.2 * (0.5 * sharp).exp() * z
            both = (torch.softmax(logits, -1), torch.softmax(logits + self.noise * e, -1))
            self._memory[prefix] = both
        return self._memory[prefix]

    def p(self, prefix: tuple[int, ...]) -> Tensor:
        """The target's law."""
        return self.laws(prefix)[0]

    def q(self, prefix: tuple[int, ...]) -> Tensor:
        """The draft's law."""
        return self.laws(prefix)[1]

    def gate(self, prefix: tuple[int, ...]) -> float:
        """A gate that estimates the overlap of p and q, with an error that depends on the prefix."""
        digest = hashlib.sha256(f"gate{self.seed}{prefix}".encode()).digest()
        error = int.from_bytes(digest[:6]) / 2**48 - 0.5
        return min(1.0, max(0.0, float(overlap(*self.laws(prefix))) + 0.3 * error))


@cache
def law_pairs(count: int = 400, vocab: int = 32) -> tuple[Tensor, Tensor]:
    """p and q of many prefixes, ``[count, vocab]`` each."""
    pair = Pair(vocab, seed=1, noise=1.7)
    both = [pair.laws((i,)) for i in range(count)]
    return torch.stack([p for p, _ in both]), torch.stack([q for _, q in both])


@dataclass
class Followed:
    """One decoding: its record, what was drafted round by round, and the signals of each draft token."""

    record: Record
    drafted: dict[int, list[int]]
    signals: dict[int, list[dict[str, float]]]


def follow(method: Method, length: int, seed: int = 0, pair: Pair | None = None) -> Followed:
    """Decode through the real loop on a Pair, and listen to what its driver answers."""
    pair, record, prompt, draws = pair or Pair(), Record(), (0,), AddressedDraws(seed)
    driver = ChainDriver(pair, prompt, draws, 1, method.accept.needs_raw, method.drafter)  # type: ignore[arg-type]
    loop = decode(prompt, method, Limits(length), draws, record, complete=True)
    out, request = Followed(record, {}, {}), next(loop, None)
    while request is not None:
        answer = driver.answer(request)
        if isinstance(request, AskDraft) and isinstance(answer, Draft):
            out.drafted.setdefault(request.round, []).extend(answer.tokens)
            row = {name: float(values[0]) for name, values in answer.signals.items()}
            row["uniform"] = draws.uniform(request.round, request.start + len(request.tokens), Purpose.TRUST)
            out.signals.setdefault(request.round, []).append(row)
        try:
            request = loop.send(answer)
        except StopIteration:
            request = None
    record.count()
    return out


# --- shared drawings --------------------------------------------------------------------------------------------------
KINDS = {  # of a box: face, edge, letter, line style
    "trusted": (ORANGE, ORANGE, "black", "-"),
    "accepted": (SKY, SKY, "black", "-"),
    "refused": ("white", RED, RED, "-"),
    "dropped": ("white", GREY, GREY, ":"),
    "discarded": ("white", PURPLE, PURPLE, "--"),
    "replacement": (RED, RED, "white", "-"),
    "bonus": (BLUE, BLUE, "white", "-"),
    "target": (INK, INK, "white", "-"),
}


def box(
    ax: Axes, x: float, y: float, text: str, kind: str, width: float = 0.86, height: float = 0.74
) -> None:
    """One token. A refused one is struck through."""
    face, edge, ink, line = KINDS[kind]
    corner = (x - width / 2, y - height / 2)
    ax.add_patch(Rectangle(corner, width, height, fc=face, ec=edge, ls=line, lw=1.1))
    ax.text(x, y, text, ha="center", va="center_baseline", color=ink, fontsize=8)
    if kind == "refused":
        for near, far in ((0.5, 0.22), (-0.22, -0.5)):  # a gap where the letter is
            ax.plot(
                [x + width * near, x + width * far], [y + height * near, y + height * far], color=RED, lw=0.9
            )


def legend_of(
    fig: Figure, kinds: Sequence[str], words: dict[str, str] | None = None, side: str = "center"
) -> None:
    """Boxes and what they mean, below the panels."""
    handles = [Rectangle((0, 0), 1, 1, fc=KINDS[k][0], ec=KINDS[k][1], ls=KINDS[k][3]) for k in kinds]
    labels = [(words or {}).get(kind, kind) for kind in kinds]
    fig.legend(handles, labels, loc=f"outside lower {side}", ncols=len(labels), columnspacing=1.2)


def rounds(ax: Axes, method: Method, count: int = 8, seed: int = 0, most: int | None = None) -> list[str]:
    """The first rounds of a text, one a row: what was drafted, what became of it, what the target added."""
    followed = follow(method, 12 * count, seed)
    seen: list[str] = []
    for round in range(1, count + 1):
        final = [token for token in followed.record.tokens if token.round == round]
        drafted = followed.drafted.get(round, [])
        kinds = [token.origin.value for token in final]
        own, added = (
            (kinds[:-1], kinds[-1]) if kinds[-1] in ("replacement", "bonus", "target") else (kinds, None)
        )
        rest = len(drafted) - len(own)
        if rest and added == "replacement":
            own = [*own, "refused", *["dropped"] * (rest - 1)]
        elif rest:
            own = [*own, *["discarded"] * rest]
        for i, (x, kind) in enumerate(zip(drafted, own, strict=True)):
            box(ax, i + 1, round, LETTERS[x], kind)
        if added is not None:
            box(ax, len(drafted) + 1.25, round, LETTERS[final[-1].id], added)
        seen += [*own, added] if added else own
    width = most or max(len(followed.drafted.get(r, [])) for r in range(1, count + 1)) + 2
    ax.set(xlim=(0.4, max(width, 7)), ylim=(count + 0.6, 0.4), xlabel="token of the round", ylabel="round")
    ax.set_xticks(range(1, width - 1, 1 if width < 14 else 2))
    ax.set_yticks(range(1, count + 1))
    return list(dict.fromkeys(kind for kind in KINDS if kind in seen))


def legend_left(fig: Figure, ax: Axes) -> None:
    """The left panel's legend, below it."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower left", ncols=len(labels), columnspacing=1.2)


ROUND_WORDS = {"target": "the target's own", "discarded": "discarded by the stop rule"}


def example(ax_b: Axes, ax: Axes, rule: AcceptRule, title: str, p: Tensor = P, q: Tensor = Q) -> None:
    """Keep chance b above; below, p and q as bars and π as diamonds."""
    b, law, places = rule.keep(p, q), rule.law(p, q), range(len(p))
    ax_b.bar(places, b, width=0.8, color=PALE, ec=GREY, lw=0.6)
    ax_b.set(ylim=(0, 1.05), yticks=(0, 1), ylabel="keep b", xticks=(), title=title)
    ax.bar([i - 0.2 for i in places], p, width=0.38, color=BLUE, label="p, target")
    ax.bar([i + 0.2 for i in places], q, width=0.38, color=ORANGE, label="q, draft")
    ax.plot(places, law, "D", color=INK, ms=4.5, mfc="white", label="π, this rule", clip_on=False, zorder=4)
    ax.set_xticks(places, list(LETTERS[: len(p)]))
    ax.set(ylabel="probability", xlabel=f"token      TV(π, p) = {float(tv_distance(law, p)):.2f}")
    ax.legend(loc="upper right")


def cost(rule: AcceptRule, p: Tensor | None = None, q: Tensor | None = None) -> tuple[float, float]:
    """Mean P(reject) and mean TV(π, p) over the law pairs."""
    if p is None or q is None:
        p, q = law_pairs()
    kept = (q * rule.keep(p, q)).sum(-1)
    return float((1 - kept).mean()), float(tv_distance(rule.law(p, q), p).mean())


def plane(ax: Axes, ceiling: float | None = None, right: float = 1.02) -> float:
    """The plane of P(reject) and TV(π, p), with Theorem 5's line. Returns the mean TV(p, q)."""
    far = float(tv_distance(*law_pairs()).mean())
    ax.fill([0, far, 0], [0, 0, far], color=PALE, lw=0)
    ax.plot([0, far], [far, 0], color=GREY, lw=1.4)
    ax.annotate("no rule\nreaches here", (right * 0.015, far * 0.05), color="#666666", fontsize=7.5)
    ax.set(
        xlim=(0, right),
        ylim=(0, ceiling or far * 1.12),
        xlabel="P(reject) of a draft token",
        ylabel="TV(π, p)",
    )
    ax.set_title("Trade: means over 400 random pairs of laws")
    return far


def curve(
    ax: Axes,
    make: Callable[[float], AcceptRule],
    values: Sequence[float],
    label: str,
    marks: Sequence[tuple[float, str]] = (),
    color: str = GREEN,
    offset: tuple[int, int] = (6, 4),
    line: str = "-",
    side: str = "left",
) -> None:
    """Where a rule goes in the plane as its parameter runs; some values are marked."""
    points = [cost(make(value)) for value in values]
    ax.plot(*zip(*points, strict=True), color=color, lw=2, ls=line, label=label)
    for value, text in marks:
        at = cost(make(value))
        ax.plot(*at, "o", color=color, ms=5, mec="white", mew=0.6)
        on_axis = at[1] < 0.01
        shift, align = ((6, 5), "left") if on_axis else (offset, side)
        ax.annotate(text, at, xytext=shift, textcoords="offset points", fontsize=8, color=INK, ha=align)


def accept_panels() -> tuple[Figure, Axes, Axes, Axes]:
    """Keep chance over the example on the left, the plane on the right."""
    fig = plt.figure(figsize=(8, 3.3), layout="constrained")
    grid = fig.add_gridspec(2, 2, height_ratios=(1, 3))
    return fig, fig.add_subplot(grid[0, 0]), fig.add_subplot(grid[1, 0]), fig.add_subplot(grid[:, 1])


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
    """One judged round of independent drafts: (chains, verdict, what was tried)."""
    draws, chains, rows = Listening(7), [], []
    for n in range(drafts):
        text, laws = [round], []
        for i in range(gamma):
            law = pair.q(tuple(text))
            laws.append(law)
            text.append(draws.token(law, round, 1 + i, Purpose.DRAFT, n))
        chains.append(Chain(text[1:], laws))
        rows.append(torch.stack([pair.p(tuple(text[: i + 1])) for i in range(gamma + 1)]))
    verdict = rule.judge(chains, torch.stack(rows), draws, round, 1)  # type: ignore[arg-type]
    return chains, verdict, draws.tried


def draw_several(ax: Axes, name: str, round: int) -> None:
    """One round drawn: every candidate that was tried carries its chance."""
    chains, verdict, tried = several_round(ACCEPT.get(name)(), 3, 4, round, Pair(4, seed=5, noise=2.0))
    fate = {(row, depth): (chance, kept) for depth, row, chance, kept in tried}
    path = chains[verdict.row].tokens
    for row, chain in enumerate(chains):
        for depth, x in enumerate(chain.tokens):
            shared = depth < verdict.accepted and list(chain.tokens[: depth + 1]) == list(path[: depth + 1])
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


# --- stop -------------------------------------------------------------------------------------------------------------
def certainty(ax: Axes, rule: StopRule, signal: str, label: str, title: str, per_token: bool = False) -> None:
    """A signal of the draft against what the target would keep; filled: the rule drafts on, hollow: it stops."""
    p, q = (laws[:220] for laws in law_pairs())
    chance = torch.Generator().manual_seed(5)
    x = torch.multinomial(q, 1, generator=chance)
    values = {"entropy": entropy(q), "max_prob": q.amax(-1), "token_prob": q.gather(-1, x).squeeze(-1)}
    values |= {f"{name}_processed": value for name, value in values.items()}
    keeps = Exact().keep(p, q)
    truth = keeps.gather(-1, x).squeeze(-1) if per_token else (q * keeps).sum(-1)
    stop, _ = rule.stop({**values, "drafted": torch.ones(len(p))}, rule.start())
    shown = values[signal]
    ax.plot(shown[~stop], truth[~stop], "o", color=GREEN, ms=3.2, label="drafts on")
    ax.plot(shown[stop], truth[stop], "o", color=RED, ms=3.2, fillstyle="none", label="stops")
    ax.set(xlabel=label, ylim=(0, 1.03), title=title)
    ax.set_ylabel("chance that the target keeps x" if per_token else "β = Σ min(p, q)")


def shade(ax: Axes, low: float, high: float) -> None:
    """The stopping region."""
    ax.axvspan(low, high, color=RED, alpha=0.08, lw=0)


def stop_figure(spec: str, seed: int) -> tuple[Figure, Axes]:
    """Right: rounds of the method. The left panel is the rule's own."""
    fig, (left, right) = canvas(3.5, ncols=2)
    kinds = rounds(right, parse_method(spec), 8, seed)
    right.set_title(spec)
    legend_of(fig, kinds, ROUND_WORDS, "right")
    return fig, left


@cache
def trade(spec: str, length: int = 600) -> tuple[float, float, float]:
    """Draft steps a token, target calls a token, mean drift: the real loop on random laws."""
    followed = follow(parse_method(spec), length, seed=4)
    stats, drafted = followed.record.stats, sum(len(tokens) for tokens in followed.drafted.values())
    return drafted / stats.new_tokens, stats.target_calls / stats.new_tokens, float(stats.mean_drift or 0.0)


@figure("fixed")
def _fixed() -> Figure:
    fig, ax = stop_figure("speculative(gamma=5)", 0)
    lengths = (1, 2, 3, 4, 5, 6, 8, 10, 12)
    points = [trade(f"speculative(gamma={gamma})")[:2] for gamma in lengths]
    ax.plot(lengths, [y for _, y in points], "-o", color=BLUE, ms=4, label="target calls a token")
    ax.plot(lengths, [x for x, _ in points], "--s", color=ORANGE, ms=4, label="draft steps a token")
    ax.set(xlabel="γ", ylim=(0, None), xticks=lengths, title="Fewer calls, more wasted drafting")
    ax.legend(loc="upper left")
    return fig


@figure("heuristic")
def _heuristic() -> Figure:
    fig, (ax,) = canvas(2.7)
    would = [
        9,
        9,
        4,
        3,
        2,
        0,
        1,
        0,
        1,
        0,
        0,
        0,
        0,
        2,
        5,
        9,
        9,
        9,
        20,
        7,
    ]  # what the target would keep, round by round
    rule = Heuristic()
    state = rule.start()
    for round, most in enumerate(would, 1):
        state, drafted = rule.begin_round(state), 0
        while True:
            drafted += 1
            stop, state = rule.stop({"drafted": torch.tensor(drafted)}, state)
            if stop:
                break
        kept = min(drafted, most)
        ax.bar(round, drafted, width=0.8, fc="white", ec=RED if kept < drafted else SKY)
        ax.bar(round, kept, width=0.8, color=SKY)
        ax.text(round, drafted + 0.3, str(drafted), ha="center", fontsize=8)
        state = rule.end_round(state, drafted, drafted, kept)
    ax.set(
        xlabel="round", ylabel="draft tokens", xticks=range(1, len(would) + 1), xlim=(0.3, len(would) + 0.7)
    )
    ax.set_title("γ over rounds: +2 where all is accepted (filled), else −1, at least 1")
    ax.set(ylim=(0, 16), yticks=(0, 5, 10, 15))
    handles = [Rectangle((0, 0), 1, 1, color=SKY), Rectangle((0, 0), 1, 1, fc="white", ec=RED)]
    ax.legend(handles, ["accepted", "drafted, not accepted"], loc="upper center", ncols=2)
    return fig


@figure("confidence")
def _confidence() -> Figure:
    fig, ax = stop_figure("confidence(c=0.4)", 0)
    certainty(
        ax, Confidence(), "token_prob", "q(x)", "Stops where the drawn token was unlikely", per_token=True
    )
    shade(ax, 0, 0.4)
    legend_left(fig, ax)
    return fig


@figure("fallback")
def _fallback() -> Figure:
    fig, ax = stop_figure("bild(fallback=0.6, rollback=5.0)", 1)
    certainty(ax, BildFallback(), "max_prob", "max q", "Stops where the draft is torn")
    shade(ax, 0, 0.6)
    legend_left(fig, ax)
    return fig


@figure("svip")
def _svip() -> Figure:
    fig, ax = stop_figure("svip(h=0.3, c=0.15)", 0)
    rule = Svip()
    certainty(ax, rule, "entropy", "H(q), nats", "The bound that stops a run")
    h = torch.linspace(0, 3.4, 60, dtype=torch.float64)
    ax.plot(h, 1 - (rule.c * h).sqrt(), color=INK, lw=1.4, label="1 − √(c·H)")
    shade(ax, rule.h**2 / rule.c, 3.4)
    ax.set_xlim(0, 3.4)
    legend_left(fig, ax)
    return fig


@figure("adaedl")
def _adaedl() -> Figure:
    fig, (left, right) = canvas(3.2, ncols=2)
    rule = AdaEdl()
    certainty(left, rule, "entropy", "H(q), nats", "Where it stops at the start, λ = 0.5")
    h = torch.linspace(0, 3.4, 60, dtype=torch.float64)
    left.plot(h, 1 - (rule.g * h).sqrt(), color=INK, lw=1.4, label="1 − √(g·H)")
    left.axhline(rule.threshold, color=INK, lw=0.8, ls=":")
    shade(left, (1 - rule.threshold) ** 2 / rule.g, 3.4)
    left.set_xlim(0, 3.4)
    legend_left(fig, left)
    share = (
        [1.0] * 20 + [0.5] * 25 + [1.0] * 15 + [0.0] * 10 + [1.0] * 30
    )  # accepted of 10 drafted, round by round
    state, levels, rates = rule.start(), [], []
    for part in share:
        state = rule.end_round(rule.begin_round(state), 10, 10, round(10 * part))
        levels.append(float(state[0]))
        rates.append(float(state[1]))
    at = range(1, len(share) + 1)
    right.step(at, share, where="mid", color=SKY, lw=1, label="accepted/drafted")
    right.plot(at, rates, "--", color=PURPLE, lw=1.5, label="AR")
    right.axhline(rule.alpha, color=GREY, lw=0.8, ls=":")
    right.text(1.5, rule.alpha - 0.015, "α", va="top", fontsize=8)
    right.set(xlabel="round", ylabel="acceptance", ylim=(-0.03, 1.05), xlim=(0, 100))
    right.set_title("λ follows a given acceptance")
    other = right.twinx()
    other.plot(at, levels, color=GREEN, lw=2, label="λ (right)")
    other.set_ylabel("λ", color=GREEN)
    other.spines["right"].set_visible(True)
    other.set_ylim(0.44, 0.56)
    lines = [*right.get_lines()[:2], other.get_lines()[0]]
    fig.legend(lines, [line.get_label() for line in lines], loc="outside lower right", ncols=3)
    return fig


@figure("untrusted")
def _untrusted() -> Figure:
    fig, axes = canvas(3.4, ncols=3)
    stops = ("untrusted", "untrusted(tail=2)", "untrusted(tail=8, under=svip(h=0.3))")
    kinds: list[str] = []
    for ax, stop in zip(axes, stops, strict=True):
        method = parse_method(f"trust=gate(tau=0.7),stop={stop},accept=exact,cap=20")
        kinds += rounds(ax, method, 8, 2)
        ax.set_title(stop.replace("untrusted(tail=8, ", "untrusted(tail=8,\n"), fontsize=8.5)
        ax.set_ylabel("round" if ax is axes[0] else "")
    legend_of(fig, [kind for kind in KINDS if kind in kinds], ROUND_WORDS)
    return fig


@figure("never")
def _never() -> Figure:
    fig, (left, right) = canvas(3.0, ncols=2)
    kinds = rounds(left, parse_method("trust=nobody,stop=never,accept=exact,cap=8"), 7, 0)
    left.set_title("stop=never,cap=8: the cap ends every run")
    more = rounds(right, parse_method("trust=everyone,stop=never,accept=exact,cap=8"), 7, 0)
    right.set_title("the same with trust=everyone")
    legend_of(fig, [kind for kind in KINDS if kind in {*kinds, *more}], ROUND_WORDS)
    return fig


# --- trust ------------------------------------------------------------------------------------------------------------
def strip(
    axes: Sequence[Axes], spec: str, signal: str | None, level: float | None, seed: int, length: int = 26
) -> list[str]:
    """A text: the signal that decided, the tokens by origin, their drift."""
    followed = follow(parse_method(spec), length, seed)
    tokens, place = followed.record.tokens, 0
    scores: list[tuple[int, float]] = []
    for round in range(1, followed.record.stats.rounds + 1):
        rows = followed.signals.get(round, [])
        if signal:
            scores += [(place + i + 1, row[signal]) for i, row in enumerate(rows)]
        place += sum(token.round == round for token in tokens)
    top, lane, bottom = axes
    if signal and level is not None:
        xs, ys = zip(*[(x, y) for x, y in scores if x <= length], strict=True)
        top.vlines(xs, 0, ys, color=GREY, lw=1)
        fine = [y >= level if signal == "gate" else y < level for y in ys]
        top.plot(
            [x for x, f in zip(xs, fine, strict=True) if f],
            [y for y, f in zip(ys, fine, strict=True) if f],
            "o",
            color=ORANGE,
            ms=4,
        )
        top.plot(
            [x for x, f in zip(xs, fine, strict=True) if not f],
            [y for y, f in zip(ys, fine, strict=True) if not f],
            "o",
            color=RED,
            ms=4,
            fillstyle="none",
        )
        top.axhline(level, color=INK, lw=1)
        top.set(ylim=(0, 1.08), yticks=(0, 1), xticks=(), ylabel="gate" if signal == "gate" else "u")
    else:
        top.set_visible(False)
    for i, token in enumerate(tokens, 1):
        box(lane, i, 0, LETTERS[token.id], token.origin.value)
        if i > 1 and token.round != tokens[i - 2].round:
            lane.plot([i - 0.5] * 2, [-0.75, 0.75], color=INK, lw=0.9)
    lane.set(ylim=(-0.8, 0.8), yticks=(), xticks=())
    lane.spines[["left", "bottom"]].set_visible(False)
    bottom.bar(range(1, length + 1), [token.drift or 0.0 for token in tokens], width=0.7, color=PURPLE)
    bottom.set(ylim=(0, 1), yticks=(0, 1), ylabel="drift", xticks=range(1, length + 1, 5))
    if not any(token.drift for token in tokens):
        bottom.text(
            length / 2,
            0.5,
            "0 everywhere: every token was drawn or checked by the target",
            ha="center",
            va="center",
        )
    for ax in axes:
        ax.set_xlim(0.3, length + 0.7)
    return [kind for kind in KINDS if kind in {token.origin.value for token in tokens}]


def trust_figure(
    spec: str, signal: str | None, level: float | None, seed: int = 3, plane_too: bool = False
) -> Figure:
    """The strip, and for rules with a dial the plane of calls and drift."""
    fig = plt.figure(figsize=(8, 3.3 if plane_too else 2.0), layout="constrained")
    grid = fig.add_gridspec(
        3,
        2 if plane_too else 1,
        height_ratios=(2, 1.1, 1.6) if signal else (0.01, 1.1, 1.6),
        width_ratios=(1.55, 1) if plane_too else (1,),
    )
    axes = [fig.add_subplot(grid[i, 0]) for i in range(3)]
    kinds = strip(axes, spec, signal, level, seed, 20 if plane_too else 32)
    (axes[0] if signal else axes[1]).set_title(
        spec + (": bars between tokens end a round" if "draft" not in spec else ", metered by closing passes")
    )
    axes[2].set_xlabel("token of the text")
    legend_of(fig, kinds, ROUND_WORDS, "left" if plane_too else "center")
    if plane_too:
        ax = fig.add_subplot(grid[:, 1])
        levels = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
        dials = (
            ("gate(tau)", "trust=gate(tau={})", levels, GREEN, "-o"),
            ("coin(rate)", "trust=coin(rate={})", (0.9, 0.8, 0.65, 0.5, 0.3, 0.15, 0.0), PURPLE, "--s"),
        )
        for label, form, values, color, line in dials:
            spots = [trade(f"{form.format(value)},stop=untrusted,accept=exact,cap=20") for value in values]
            ax.plot([y for _, y, _ in spots], [d for *_, d in spots], line, color=color, ms=4, label=label)
        ax.set(xlabel="target calls a token", ylabel="mean drift", xlim=(0, None), ylim=(0, None))
        ax.set_title("The dial, on random laws")
        ax.legend(loc="upper right")
    return fig


@figure("nobody")
def _nobody() -> Figure:
    return trust_figure("speculative(gamma=5)", None, None)


@figure("everyone")
def _everyone() -> Figure:
    return trust_figure("draft-only", None, None)


@figure("gate")
def _gate() -> Figure:
    return trust_figure("sprinter(tau=0.7, cap=20, tail=0)", "gate", 0.7, plane_too=True)


@figure("coin")
def _coin() -> Figure:
    return trust_figure("coin(rate=0.7, cap=20)", "uniform", 0.7, plane_too=True)


# --- drafters ---------------------------------------------------------------------------------------------------------
@figure("nothing")
def _nothing() -> Figure:
    fig, (ax,) = canvas(1.25)
    tokens = follow(parse_method("autoregressive"), 32).record.tokens
    for i, token in enumerate(tokens, 1):
        box(ax, i, 0, LETTERS[token.id], token.origin.value)
        ax.text(i, -0.75, str(token.round), ha="center", va="center", fontsize=6.5, color="#555555")
    ax.set(xlim=(0.3, 32.7), ylim=(-1.1, 0.6), xticks=(), yticks=())
    ax.spines[:].set_visible(False)
    ax.set_title("autoregressive: one target call a token (its number below)")
    return fig


@figure("model")
def _model() -> Figure:
    fig, (left, right) = canvas(3.0, ncols=2)
    places, sure = range(len(Q)), one_hot(Q)
    left.bar([i - 0.2 for i in places], Q, width=0.38, color=ORANGE, label="q, greedy=false")
    left.bar([i + 0.2 for i in places], sure, width=0.38, fc="white", ec=RED, label="q, greedy=true")
    left.set_xticks(places, list(LETTERS[: len(Q)]))
    left.set(
        ylabel="probability", xlabel="token", ylim=(0, 1.05), title="The law that a draft token is drawn from"
    )
    left.legend(loc="upper right")
    p, q = (laws[:220] for laws in law_pairs())
    point = one_hot(q)
    drawn, greedy = ((law * Exact().keep(p, law)).sum(-1) for law in (q, point))
    right.plot([0, 1], [0, 1], color=GREY, lw=1)
    right.plot(drawn, greedy, ".", color=GREEN, ms=4)
    right.set(
        xlim=(0, 1), ylim=(0, 1), xlabel="sampled draft: Σ min(p, q)", ylabel="greedy draft: p(argmax q)"
    )
    right.set_title("Chance that exact acceptance keeps it")
    return fig


@figure("lookup")
def _lookup() -> Figure:
    fig, (ax,) = canvas(2.1)
    text = "the gate trusts a token , the target checks a run . if the gate trusts"
    words = text.split()
    ids = [sorted(set(words)).index(word) for word in words]
    found = look_up(ids, n=3, least=2, at_most=5)
    names = sorted(set(words))
    size = next(s for s in (3, 2) if any(ids[i : i + s] == ids[-s:] for i in range(len(ids) - s)))
    start = max(i for i in range(len(ids) - size) if ids[i : i + size] == ids[-size:])
    spots, x, y = [], 0.0, 0
    for i, word in enumerate([*words, *(names[j] for j in found)]):
        wide = 0.17 + 0.105 * len(word)
        if i == 12:
            x, y = 0.0, y - 1
        kind = (
            "accepted"
            if i >= len(words)
            else "trusted"
            if start <= i < start + size or i >= len(words) - size
            else "dropped"
        )
        copied_from = start + size <= i < start + size + len(found)
        face, edge, _, line = KINDS["accepted" if copied_from else kind]
        face = "white" if copied_from else face
        ax.add_patch(Rectangle((x, y - 0.3), wide, 0.6, fc=face, ec=edge, ls=line, lw=1.2))
        ax.text(x + wide / 2, y, word, ha="center", va="center_baseline", fontsize=9)
        spots.append((x + wide / 2, y))
        x += wide + 0.07
    ax.annotate(
        "",
        spots[len(words)],
        spots[start + size],
        arrowprops={
            "arrowstyle": "->",
            "color": BLUE,
            "shrinkA": 13,
            "shrinkB": 13,
            "connectionstyle": "arc3,rad=-0.15",
        },
    )
    ax.set(
        xlim=(-0.1, 9.3),
        ylim=(-1.6, 0.6),
        xticks=(),
        yticks=(),
        title=f"lookup(n=3, gamma=5): the ending of {size} words stood before; what followed it is the draft",
    )
    ax.spines[:].set_visible(False)
    faces = [
        ("trusted", "the ending, and where it stood"),
        ("accepted", "draft: copied tokens"),
        ("dropped", "other text"),
    ]
    legend_of(fig, [kind for kind, _ in faces], dict(faces))
    return fig


def save(fig: Figure, path: Path) -> None:
    """A PNG of few colours, twice as fine as it is shown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = BytesIO()
    fig.savefig(raw, format="png", dpi=180, metadata={"Software": None})
    plt.close(fig)
    Image.open(raw).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", choices=sorted(FIGURES), help="one figure instead of all")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder for the PNG files (default: %(default)s)"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    for name in [given.only] if given.only else FIGURES:
        fig = FIGURES[name]()
        path = given.out / f"{name}.png"
        save(fig, path)
        print(f"{name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
