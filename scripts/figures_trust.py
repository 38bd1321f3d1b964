"""Figures of the trust rules and the drafters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures_base import (
    BLUE,
    GREEN,
    GREY,
    INK,
    KINDS,
    LETTERS,
    ORANGE,
    PURPLE,
    RED,
    ROUND_WORDS,
    Pair,
    Q,
    box,
    canvas,
    figure,
    follow,
    law_pairs,
    legend_of,
)
from figures_stop import trade
from sprinter.decode.accept import Exact
from sprinter.decode.lookup import look_up
from sprinter.decode.signals import margin
from sprinter.decode.spec import parse_method
from sprinter.decode.trust import Online
from sprinter.laws import one_hot, overlap


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
        high = 1.0 if signal in ("gate", "uniform") else max(ys)
        top.set(ylim=(0, 1.08 * high), yticks=(0, int(high)), xticks=())
        top.set_ylabel({"uniform": "u", "entropy": "H(q)"}.get(signal, signal))
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


Dial = tuple[str, str, tuple[float, ...], str, str]
"""Label, form of the trust rule's spec, values, colour, line."""
_GATE: Dial = ("gate(tau)", "trust=gate(tau={})", (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0), GREEN, "-o")
_COIN: Dial = ("coin(rate)", "trust=coin(rate={})", (0.9, 0.8, 0.65, 0.5, 0.3, 0.15, 0.0), PURPLE, "--s")
_CERTAIN: Dial = (
    "certain(threshold)",
    "trust=certain(threshold={})",
    (1.6, 1.2, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0),
    BLUE,
    "-^",
)
_ONLINE: Dial = (
    "online(tau)",
    "trust=online(tau={})",
    (0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 1.0),
    ORANGE,
    "-v",
)


def plane(ax: Axes, more: Sequence[Dial] = ()) -> None:
    """Target calls and drift of a gate, a coin and other dials."""
    for label, form, values, color, line in (_GATE, _COIN, *more):
        spots = [trade(f"{form.format(value)},stop=untrusted,accept=exact,cap=20") for value in values]
        ax.plot([y for _, y, _ in spots], [d for *_, d in spots], line, color=color, ms=4, label=label)
    ax.set(xlabel="target calls a token", ylabel="mean drift", xlim=(0, None), ylim=(0, None))
    ax.set_title("The dial, on random laws")
    ax.legend(loc="upper right")


def trust_figure(
    spec: str,
    signal: str | None,
    level: float | None,
    seed: int = 3,
    plane_too: bool = False,
    more: Sequence[Dial] = (),
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
        plane(fig.add_subplot(grid[:, 1]), more)
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


@figure("certain")
def _certain() -> Figure:
    return trust_figure("certain(threshold=0.6)", "entropy", 0.6, plane_too=True, more=[_CERTAIN])


@figure("online")
def _online() -> Figure:
    fig, (left, right) = canvas(3.3, ncols=2)
    pair, text = (
        Pair(),
        [0, *(token.id for token in follow(parse_method("autoregressive"), 220).record.tokens)],
    )
    p, q = (
        torch.stack(laws)
        for laws in zip(*[pair.laws(tuple(text[:n])) for n in range(1, len(text))], strict=True)
    )
    left.plot(margin(q), overlap(p, q), ".", color=GREY, ms=3)
    line = torch.linspace(0, 6, 60, dtype=torch.float64)
    for new, color in ((40, PURPLE), (200, BLUE), (1000, GREEN)):
        state = follow(parse_method("online(signal=margin, tau=0.7)"), new).record.rules.trust_state
        rule = Online("margin", tau=0.7)
        left.plot(
            line, rule.predict({"margin": line}, state), color=color, label=f"after {int(state[2])} verdicts"
        )
    left.axhline(0.7, color=INK, lw=1)
    left.set(xlabel="margin of q (nats)", ylabel="β = Σ min(p, q)", xlim=(0, 6), ylim=(0, 1.03))
    left.set_title("Fit along a text; line: tau")
    left.legend(loc="lower right")
    plane(right, [_CERTAIN, _ONLINE])
    return fig


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


@figure("allocated")
def _allocated() -> Figure:
    fig, (ax,) = canvas(2.6)
    method = parse_method("allocation(share=0.5)")
    for row in range(10):
        for i, token in enumerate(follow(method, 24, seed=row).record.tokens, 1):
            box(ax, i, -row, LETTERS[token.id], token.origin.value)
    ax.set(xlim=(0.3, 24.7), ylim=(-9.7, 0.7), xticks=(), yticks=())
    ax.spines[:].set_visible(False)
    ax.set_title("allocation(share=0.5): ten texts, each by one model")
    legend_of(
        fig, ["trusted", "target"], {"trusted": "the draft's, all trusted", "target": "the target's own"}
    )
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
