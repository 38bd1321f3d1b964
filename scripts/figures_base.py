"""Shared by the figures of docs/methods: style, example laws, common drawings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from sprinter.decode.accept import AcceptRule
from sprinter.decode.draft import AskDraft, Draft, Record
from sprinter.decode.enumerate import ChainDriver
from sprinter.decode.loop import Limits, decode
from sprinter.decode.spec import Method
from sprinter.laws import overlap, tv_distance
from sprinter.random import AddressedDraws, Purpose

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "methods" / "figures"
# Okabe and Ito's palette, distinct for all common kinds of colour vision; shapes and letters repeat the information
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
    known_answers: dict[Any, Any] = field(default_factory=dict, compare=False)

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

    def score(self, head: str, text: tuple[int, ...]) -> float:
        """A head that estimates the overlap of p and q after a prefix (SpecDec++'s: min(1, p/q) of a text's last
        token), with an error that depends on the text."""
        if head == "specdec++":
            p, q = self.laws(text[:-1])
            true = min(1.0, float(p[text[-1]] / q[text[-1]]))
        else:
            true = float(overlap(*self.laws(text)))
        digest = hashlib.sha256(f"{'gate' if head == 'disco' else head}{self.seed}{text}".encode()).digest()
        error = int.from_bytes(digest[:6]) / 2**48 - 0.5
        return min(1.0, max(0.0, true + 0.3 * error))


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
    """Decode with the real loop on a Pair, and record its driver's answers."""
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
    """Draw one token. A rejected one is struck through."""
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
    """A legend of the boxes, below the panels."""
    handles = [Rectangle((0, 0), 1, 1, fc=KINDS[k][0], ec=KINDS[k][1], ls=KINDS[k][3]) for k in kinds]
    labels = [(words or {}).get(kind, kind) for kind in kinds]
    fig.legend(handles, labels, loc=f"outside lower {side}", ncols=len(labels), columnspacing=1.2)


def rounds(ax: Axes, method: Method, count: int = 8, seed: int = 0, most: int | None = None) -> list[str]:
    """Draw the first rounds of a text, one per row: draft tokens, their verdicts, and the target's tokens."""
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
    """Draw the keep probability b above; below, p and q as bars and π as diamonds."""
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
    """Draw a rule's curve in the plane as its parameter varies; some values are marked."""
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


def save(fig: Figure, path: Path) -> None:
    """Save a PNG with few colours, at twice its display resolution."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = BytesIO()
    fig.savefig(raw, format="png", dpi=180, metadata={"Software": None})
    plt.close(fig)
    Image.open(raw).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
