"""Figures of the stop rules."""

from __future__ import annotations

from functools import cache

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures_base import (
    BLUE,
    GREEN,
    GREY,
    INK,
    KINDS,
    ORANGE,
    PURPLE,
    RED,
    ROUND_WORDS,
    SKY,
    Pair,
    canvas,
    figure,
    follow,
    law_pairs,
    legend_left,
    legend_of,
    rounds,
)
from sprinter.decode.accept import Exact
from sprinter.decode.regression import Regression
from sprinter.decode.spec import parse_method
from sprinter.decode.stop import (
    AdaEdl,
    BildFallback,
    Calibrated,
    Confidence,
    Disco,
    Heuristic,
    Optimal,
    SpecDec,
    StopRule,
    Svip,
)
from sprinter.laws import entropy, overlap


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


@figure("calibrated")
def _calibrated() -> Figure:
    fig, ax = stop_figure("calibrated(rate=0.4)", 0)
    rule, h = Calibrated(), torch.linspace(0.02, 3.4, 80, dtype=torch.float64)
    certainty(ax, rule, "entropy", "H(q), nats", "First token of a run; what it learns")
    for new, color in ((0, GREY), (40, PURPLE), (400, BLUE)):
        fit = follow(parse_method("calibrated"), new).record.rules if new else None
        state = rule.start() if fit is None else fit.stop_state
        chance = Regression(rule.signal, rule.memory).predict({"entropy": h}, state[1:])
        ax.plot(h, chance, color=color, lw=1.4, label=f"{int(state[-1])} verdicts")
    ax.axhline(rule.rate, color=INK, lw=0.8, ls=":")
    ax.set_xlim(0, 3.4)
    ax.legend(loc="upper right", fontsize=7.5)
    return fig


@figure("optimal")
def _optimal() -> Figure:
    fig, ax = stop_figure("optimal(step=0.25, token=0.03)", 0)
    rule = Optimal()
    learned = follow(parse_method("optimal"), 300).record.rules
    assert learned is not None
    _, overlap_, tokens, cost = learned.stop_state[:4]
    places = torch.arange(0, 13)
    for chance, color in ((0.9, GREEN), (0.75, BLUE), (0.5, PURPLE)):
        gain = chance**places * overlap_ * cost / tokens
        ax.plot(places, gain, "-o", ms=3.2, color=color, lw=1.2, label=f"each accepted at {chance:g}")
    ax.axhline(rule.step + rule.token, color=RED, lw=1.2, label="its cost")
    ax.set(xlabel="tokens drafted", ylim=(0, None), title="Gain of another draft token")
    ax.set_ylabel("target passes")
    ax.legend(loc="upper right", fontsize=7.5)
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


@figure("specdec++")
def _specdec() -> Figure:
    fig, ax = stop_figure("stop=specdec++(h=0.7,least=2),cap=8", 0)
    followed, rule = follow(parse_method("stop=specdec++(h=0.7,least=2),cap=8"), 60, seed=0), SpecDec()
    for n, signals in enumerate(list(followed.signals.values())[:9]):
        chances = torch.tensor([row["specdec++"] for row in signals])
        risk = 1 - chances.cumprod(0)
        ax.plot(
            range(1, len(risk) + 1), risk, "-o", color=SKY, ms=3, lw=0.9, label="one run" if n == 0 else None
        )
    ax.axhspan(rule.h, 1.0, color=RED, alpha=0.08, lw=0)
    ax.axhline(rule.h, color=INK, lw=0.8, ls=":", label="h")
    ax.set(xlabel="tokens drafted", ylabel="1 − Π p̂", ylim=(0, 1.03), xlim=(0.7, 8.3))
    ax.set_title("Chance of a refusal in the run")
    legend_left(fig, ax)
    return fig


@figure("disco")
def _disco() -> Figure:
    spec = "stop=disco(threshold=0.5),cap=8"
    fig, ax = stop_figure(spec, 0)
    pair, shown = Pair(), follow(parse_method(spec), 200, seed=0)
    text, points = [0], []
    for token in shown.record.tokens:
        points.append(
            (pair.score("disco", tuple(text)), float(overlap(pair.p(tuple(text)), pair.q(tuple(text)))))
        )
        text.append(token.id)
    for stops, colour, fill, label in ((False, GREEN, "full", "drafts on"), (True, RED, "none", "stops")):
        chosen = [point for point in points if (point[0] < Disco().threshold) is stops]
        ax.plot(*zip(*chosen, strict=True), "o", color=colour, ms=3.2, fillstyle=fill, label=label)
    shade(ax, 0.0, Disco().threshold)
    ax.set(xlabel="score of the network (an example)", ylabel="β = Σ min(p, q)", xlim=(0, 1), ylim=(0, 1.03))
    ax.set_title("The score that ends a run")
    legend_left(fig, ax)
    return fig
