"""Figures of block verification and of the lossy acceptance that engines offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from figures_base import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    accept_panels,
    canvas,
    curve,
    example,
    figure,
    law_pairs,
    plane,
)
from sprinter.decode.accept import (
    AcceptRule,
    Block,
    Cactus,
    Cascade,
    ChainRule,
    Diversed,
    Exact,
    Fly,
    Harmless,
    Margin,
    Relaxed,
    Threshold,
)
from sprinter.decode.accept.cascade import DEFERRALS
from sprinter.decode.draft import Control
from sprinter.laws import kl_divergence, tv_distance

STEPS = range(1, 9)


def drafts(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """200 drafts of up to 15 tokens: tokens ``[200, 16]``, p and q ``[200, 16, V]``."""
    p, q = (laws.view(200, 16, -1) for laws in law_pairs(3200))
    chance = torch.Generator().manual_seed(seed)
    return torch.stack([torch.multinomial(laws, 1, generator=chance).squeeze(-1) for laws in q]), p, q


def staying(rule: ChainRule | Exact | Spared, n: int, tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Chance that at least k = 1 ... n tokens of each draft stay, ``[drafts, n]``."""
    if isinstance(rule, Exact):
        return rule.keep(p, q).gather(-1, tokens[..., None]).squeeze(-1)[:, :n].cumprod(-1)
    ends = [rule.ends(x[:n].tolist(), a[: n + 1], b[:n])[0] for x, a, b in zip(tokens, p, q, strict=True)]
    return torch.stack(ends).flip(-1).cumsum(-1).flip(-1)[:, 1:]


def chain_panels(rules: dict[str, ChainRule | Exact | Spared], chain: int, seed: int) -> Figure:
    """One draft on the left; draft tokens kept a round against the draft's length on the right."""
    fig, (left, right) = canvas(3.1, ncols=2)
    marks = ((GREEN, "-", "o"), (GREY, "--", "s"), (PURPLE, ":", "^"))
    for (name, rule), (color, line, mark) in zip(rules.items(), marks, strict=False):
        stays = [staying(rule, n, *drafts(seed)) for n in STEPS]
        left.plot(STEPS, stays[-1][chain], line, marker=mark, color=color, ms=4, label=name)
        kept = [float(one.sum(-1).mean()) for one in stays]
        right.plot(STEPS, kept, line, marker=mark, color=color, ms=4, label=name)
    left.set(
        xlabel="k", ylabel="chance that k tokens stay, or more", ylim=(0, 1.03), title="One draft of 8 tokens"
    )
    right.set(
        xlabel="draft length",
        ylabel="draft tokens kept a round",
        ylim=(0, None),
        title="200 drafts, random laws",
    )
    for ax in (left, right):
        ax.legend()
    return fig


@figure("block")
def _block() -> Figure:
    return chain_panels({"block": Block(), "exact": Exact()}, chain=3, seed=5)


class Spared:
    """``judge`` with scores that are uniform on [0, 1] for each position of a draft of 200."""

    def __init__(self, threshold: float) -> None:
        self._rule, self._scores = Harmless(threshold), torch.Generator().manual_seed(2)

    def ends(self, tokens: list[int], p: Tensor, q: Tensor) -> tuple[Tensor, object]:
        scores = torch.rand(len(tokens) + 1, generator=self._scores)
        return self._rule.ends(tokens, p, q, Control(p, q, {"judge": scores}))


@figure("judge")
def _judge() -> Figure:
    rules = {"a half of the refused spared": Spared(0.5), "exact": Exact(), "a fifth spared": Spared(0.8)}
    return chain_panels(rules, 3, 5)


@figure("diversed")
def _diversed() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Weighed(lambda p, q: torch.full_like(p[..., 0], 0.5)), "diversed, weight 0.5")
    plane(right)
    values = [i / 10 for i in range(11)]
    curve(
        right, lambda w: Weighed(lambda p, q: torch.full_like(p[..., 0], w)), values, "one weight for all",
        [(0.0, "w = 0"), (0.5, "0.5"), (1.0, "1")],
    )  # fmt: skip
    curve(
        right, lambda w: Weighed(lambda p, q: (tv_distance(p, q) < w).double()), values,
        "1 where TV(p, q) is small", color=PURPLE, line="--",
    )  # fmt: skip
    right.legend(loc="upper right")
    return fig


@dataclass(frozen=True)
class Weighed(AcceptRule):
    """``diversed`` with a weight that is a function of the laws, ``[...]``."""

    weight: Callable[[Tensor, Tensor], Tensor]

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return Diversed().keep(p, q, Control(p, q, {"diversed": self.weight(p, q)}))

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return Diversed().replacement(p, q)


@figure("fly")
def _fly() -> Figure:
    return chain_panels(
        {"fly(window=2)": Fly(window=2), "exact": Exact(), "fly(window=4)": Fly(window=4)}, 8, 5
    )


@figure("cactus")
def _cactus() -> Figure:
    fig, (left, right) = canvas(3.1, ncols=2)
    p, q = (laws[:60] for laws in law_pairs())
    for delta, color, mark in ((0.01, PURPLE, "^"), (0.1, GREEN, "o"), (0.5, BLUE, "s")):
        kl = [
            float(kl_divergence(position_law(Cactus(delta), *pair), pair[0]))
            for pair in zip(p, q, strict=True)
        ]
        shown = sorted(one / delta for one in kl)
        left.plot(
            [i / len(shown) for i in range(len(shown))],
            shown,
            mark,
            color=color,
            ms=3,
            label=f"δ = {delta:g}",
        )
    left.axhline(1, color=INK, lw=1)
    left.set(xlabel="share of 60 pairs of laws", ylabel="KL(π‖p) / δ", ylim=(0, None))
    left.set_title("The bound, and what π does")
    left.legend(loc="upper left")
    for delta, color, line in ((0.0, GREY, "--"), (0.1, GREEN, "-"), (0.5, BLUE, ":")):
        kept = [float(staying(Cactus(delta), n, *drafts(5)).sum(-1).mean()) for n in STEPS]
        right.plot(STEPS, kept, line, marker="o", color=color, ms=4, label=f"δ = {delta:g}")
    right.set(
        xlabel="draft length",
        ylabel="draft tokens kept a round",
        ylim=(0, None),
        title="200 drafts, random laws",
    )
    right.legend()
    return fig


def position_law(rule: ChainRule, p: Tensor, q: Tensor) -> Tensor:
    """π of a single position: the mean of the outcomes over the drafted token."""
    both = torch.stack([p, p])
    made = torch.zeros_like(p)
    for x, chance in enumerate(q.tolist()):
        if chance > 0:
            outcomes = rule.outcomes([x], both, q.unsqueeze(0))
            made += chance * outcomes[0]
            made[x] += chance * outcomes[1].sum()
    return made


@figure("margin")
def _margin() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Margin(0.95), "margin(theta=0.95)")
    plane(right, ceiling=0.85)
    values = [1.0, 0.98, 0.96, 0.95, 0.94, 0.92, 0.9, 0.85, 0.8, 0.7]
    marks = [(1.0, "theta = 1"), (0.9, "0.9")]
    curve(right, Margin, values, "margin", marks, offset=(6, 5))
    right.legend(loc="upper right")
    return fig


@figure("relaxed")
def _relaxed() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Relaxed(4, 0.2), "relaxed(top_k=4, delta=0.2)")
    plane(right, ceiling=0.85)
    values = [0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0]
    marks = [(0.0, "0"), (0.1, "0.1"), (0.6, "delta = 0.6")]
    curve(right, lambda d: Relaxed(10, d), values, "relaxed, top_k = 10", marks, offset=(6, 5))
    curve(right, lambda d: Relaxed(10, d, True), values, "the same, sampled", color=PURPLE, line="--")
    right.legend(loc="upper right")
    return fig


@figure("threshold")
def _threshold() -> Figure:
    fig, top, left, right = accept_panels()
    example(top, left, Threshold(0.2, 0.5), "threshold(single=0.2, total=0.5)")
    plane(right)
    values = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02]
    marks = [(1.0, "1"), (0.5, "0.5"), (0.1, "0.1")]
    curve(right, lambda t: Threshold(1.0, t), values, "total from 1, single = 1", marks)
    curve(right, lambda t: Threshold(t, 1.0), values, "single from 1, total = 1", color=PURPLE, line="--")
    right.legend(loc="upper right")
    return fig


@figure("cascade")
def _cascade() -> Figure:
    fig, (left, right) = canvas(3.3, ncols=2)
    _deferrals(left)
    p, q = law_pairs()
    values = [i / 50 for i in range(51)]
    for name, color, line in (("opt", GREEN, "-"), ("diff", PURPLE, "--"), ("chow", BLUE, ":")):
        drifts = [float(Cascade(name, alpha).drift(p, q).mean()) for alpha in values]
        right.plot(values, drifts, line, color=color, lw=2, label=name)
    right.axhline(float(tv_distance(p, q).mean()), color=GREY, lw=1)
    right.set(xlim=(0, 1), ylim=(0, None), xlabel="alpha", ylabel="TV(π, p), mean over 400 pairs of laws")
    right.set_title("Drift; grey: of the draft alone")
    right.legend(loc="lower right")
    return fig


def _deferrals(ax: Axes) -> None:
    p, q = (laws[:200] for laws in law_pairs())
    deferred = DEFERRALS["opt"](p, q, 0.5)
    for chosen, color, text in ((deferred, RED, "deferred: exact"), (~deferred, ORANGE, "not deferred: q")):
        ax.plot(p.amax(-1)[chosen], q.amax(-1)[chosen], ".", color=color, ms=5, label=text)
    ax.plot([0, 1], [0, 1], color=INK, lw=1)
    ax.set(
        xlim=(0, 1),
        ylim=(0, 1),
        xlabel="max p",
        ylabel="max q",
        title="opt, alpha = 0.5, on 200 pairs of laws",
    )
    ax.legend(loc="lower right")
