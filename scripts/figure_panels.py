"""Panels of single figures, in the order of the table in ``figures.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

import figure_kinds as pic
from figure_kinds import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, accept
from sprinter import decode
from sprinter.decode.accept.cascade import DEFERRALS
from sprinter.decode.accept.fuzzy import DIVERGENCES
from sprinter.decode.enumerate import MarkovPair, run_chain
from sprinter.decode.lookup import look_up
from sprinter.decode.loop import Limits
from sprinter.decode.regression import Regression
from sprinter.decode.signals import margin
from sprinter.decode.spec import parse_method
from sprinter.decode.trust import Online
from sprinter.laws import kl_divergence, one_hot, overlap, tv_distance
from sprinter.random import AddressedDraws


# --- accept -----------------------------------------------------------------------------------------------------------
def refusals(ax: Axes) -> None:
    p, q = pic.law_pairs(150)
    chance = torch.Generator().manual_seed(3)
    tokens = torch.multinomial(q, 300, replacement=True, generator=chance)
    keep = accept("exact").keep(p, q).gather(-1, tokens)
    refused = (torch.rand(keep.shape, generator=chance, dtype=torch.float64) >= keep).double().mean(-1)
    ax.plot([0, 1], [0, 1], color=GREY, lw=1.4, label="P(reject) = TV(p, q)")
    ax.plot(tv_distance(p, q), refused, ".", color=GREEN, ms=4, label="a pair of laws, 300 draws")
    title, y = "Refused as often as the laws differ", "share of refused draft tokens"
    pic.said(ax, title, "TV(p, q)", y, "upper left", xlim=(0, 1), ylim=(0, 1))


def divergences(ax: Axes) -> None:
    p, q = pic.law_pairs(150)
    distance = tv_distance(p, q)
    for name, color, mark in (("js_reference", GREEN, "o"), ("js", PURPLE, "^")):
        value = DIVERGENCES[name](p, q)
        keep = accept(f"fuzzy(divergence={name}, threshold=0.3)").keep(p, q)[:, 0] > 0
        ax.plot(value[keep], distance[keep], mark, color=color, ms=3.5, label=f"{name}: kept")
        ax.plot(value[~keep], distance[~keep], mark, color=color, ms=3.5, fillstyle="none", label="refused")
    ax.axvline(0.3, color=INK, lw=1)
    ax.text(0.305, 0.02, " T = 0.3", fontsize=8)
    title, y = "Whole positions are kept or refused", "TV(p, q) of the position"
    pic.said(ax, title, "divergence, nats", y, "lower right", xlim=(0, 0.8), ylim=(0, 1))


def temperatures(ax: Axes) -> None:
    xs = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02]
    p, q = (laws.clamp(min=1e-300).log() for laws in pic.law_pairs())
    for which, name, line, color in (
        (1, "greedy", "-", GREEN),
        (0, "greedy", "--", RED),
        (0, "exact", ":", GREY),
    ):
        laws = [(torch.softmax(p / t, -1), torch.softmax(q / t, -1)) for t in xs]
        means, label = [pic.cost(accept(name), one)[which] for one in laws], ("P(reject)", "TV(π, p)")[which]
        ax.plot(xs, means, line, color=color, lw=2, label=f"{label}, {name}")
    title, y = "At temperature 0 it is exact", "mean over 400 pairs of laws"
    pic.said(ax, title, "temperature of both laws", y, "upper left", xlim=(0, 1), ylim=(0, None))


def position_law(rule: Any, p: Tensor, q: Tensor) -> Tensor:
    """π of a single position: the mean of the outcomes over the drafted token."""
    both, made = torch.stack([p, p]), torch.zeros_like(p)
    for x, chance in enumerate(q.tolist()):
        if chance > 0:
            outcomes = rule.outcomes([x], both, q.unsqueeze(0))
            made += chance * outcomes[0]
            made[x] += chance * outcomes[1].sum()
    return made


def spent(ax: Axes) -> None:
    for delta, color, mark in ((0.01, PURPLE, "^"), (0.1, GREEN, "o"), (0.5, BLUE, "s")):
        rule, laws = accept(f"cactus(delta={delta})"), zip(*pic.law_pairs(60), strict=True)
        shown = sorted(float(kl_divergence(position_law(rule, p, q), p)) / delta for p, q in laws)
        shares = [i / len(shown) for i in range(len(shown))]
        ax.plot(shares, shown, mark, color=color, ms=3, label=f"δ = {delta:g}")
    ax.axhline(1, color=INK, lw=1)
    title, x = "The bound, and what π does", "share of 60 pairs of laws"
    pic.said(ax, title, x, "KL(π‖p) / δ", "upper left", ylim=(0, None))


def by_delta() -> list[pic.ByLength]:
    looks = ((0.0, GREY, "--"), (0.1, GREEN, "-"), (0.5, BLUE, ":"))
    rules = {delta: accept(f"cactus(delta={delta})") for delta, *_ in looks}
    return [(f"δ = {d:g}", c, ls, "o", [pic.staying(rules[d], n) for n in pic.LENGTHS]) for d, c, ls in looks]


def deferrals(ax: Axes) -> None:
    p, q = pic.law_pairs(200)
    deferred = DEFERRALS["opt"](p, q, 0.5)
    for chosen, color, text in ((deferred, RED, "deferred: exact"), (~deferred, ORANGE, "not deferred: q")):
        ax.plot(p.amax(-1)[chosen], q.amax(-1)[chosen], ".", color=color, ms=5, label=text)
    ax.plot([0, 1], [0, 1], color=INK, lw=1)
    title = "opt, alpha = 0.5, on 200 pairs of laws"
    pic.said(ax, title, "max p", "max q", "lower right", xlim=(0, 1), ylim=(0, 1))


def cascaded(ax: Axes) -> None:
    (p, q), values = pic.law_pairs(), [i / 50 for i in range(51)]
    for name, color, line in (("opt", GREEN, "-"), ("diff", PURPLE, "--"), ("chow", BLUE, ":")):
        rules = [accept(f"cascade(deferral={name}, alpha={alpha})") for alpha in values]
        drifts = [float(rule.drift(p, q).mean()) for rule in rules]
        ax.plot(values, drifts, line, color=color, lw=2, label=name)
    ax.axhline(float(tv_distance(p, q).mean()), color=GREY, lw=1)
    title, y = "Drift; grey: of the draft alone", "TV(π, p), mean over 400 pairs of laws"
    pic.said(ax, title, "alpha", y, "lower right", xlim=(0, 1), ylim=(0, None))


# --- several drafts, heads --------------------------------------------------------------------------------------------
@cache
def first_token(name: str) -> list[float]:
    """Chance that one of M first tokens is kept, M = 1..8, mean over random laws on 8 tokens."""
    rule, pair, out = decode.ACCEPT.get(name)(), pic.Pair(8, seed=2, noise=1.5), []
    for count in range(1, 9):
        total = 0.0
        for p, q in (pair.laws((i,)) for i in range(30)):
            missed = torch.zeros(count, dtype=torch.float64)  # chances of keeping, given all before refused
            for x in range(8):
                chances: list[float] = []
                rule.pick(p, q, [x] * count, lambda _, chance, seen=chances: bool(seen.append(chance)))
                missed += float(q[x]) * torch.tensor(chances, dtype=torch.float64)
            total += 1 - float((1 - missed).prod())
        out.append(total / 30)
    return out


def first_tokens(ax: Axes) -> None:
    for name, color, line, mark in (("batch", GREEN, "-", "o"), ("spectr", PURPLE, "--", "s")):
        label = "batch, specinfer: recursion" if name == "batch" else "spectr: k-SEQ"
        ax.plot(range(1, 9), first_token(name), line, marker=mark, color=color, ms=4, label=label)
    base = first_token("batch")[0]
    ax.axhline(base, color=GREY, lw=1, ls=":")
    ax.text(8, base - 0.012, "1 − TV(p, q), one draft", ha="right", va="top", color="#666666", fontsize=8)
    title, y = "More drafts, less and less gained", "chance that a first token is kept"
    pic.said(ax, title, "drafts M", y, "upper left", ylim=(base - 0.08, 1), xticks=range(1, 9))


def accepted_tokens(ax: Axes) -> None:
    pair, counts = pic.Pair(8, seed=2, noise=1.5), (1, 2, 4, 8)
    for name, color, line in (("specinfer", GREEN, "-o"), ("spectr", PURPLE, "--s"), ("batch", GREY, ":^")):
        verdicts = [[pic.several_round(name, m, r, pair)[1] for r in range(250)] for m in counts]
        means = [sum(one.accepted for one in some) / 250 for some in verdicts]
        ax.plot(counts, means, line, color=color, ms=4, label=name)
    title, y = "γ = 4, 250 rounds on random laws", "accepted draft tokens a round"
    pic.said(ax, title, "drafts M", y, "lower right", xticks=counts, ylim=(0, 4))


ACCURACIES = ((0.60, 0.17, 0.08, 0.04), (0.42, 0.16, 0.09, 0.05), (0.30, 0.13, 0.08, 0.05))
"""An example: accuracies by tokens ahead and rank."""


class ToldHeads:
    """Heads with the draft's laws of a pair: those after the path, or their mean over all paths of this length.

    The text is told to them, as a trained head reads it from the target's state.
    """

    kind, layers, accuracies, flops = "example", (0,), ACCURACIES, 1.0

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
        after = [p * self.law(depth - 1, (*path, x)) for x, p in enumerate(own)] if depth else []
        return torch.stack(after).sum(0) if depth else own

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        laws = [self.law(0, path) if self.sees_path else self.law(len(path)) for path in paths]
        return torch.stack(laws).log() if len(paths[0]) < 3 else None


def heads(sees: bool) -> pic.Panel:
    """Rounds of heads whose laws see the drafted tokens, or whose laws do not."""

    def draw(ax: Axes) -> None:
        static, dynamic = decode.Static("3x2x1"), decode.Dynamic(3, 3, 9)
        chain = decode.Method(drafter=decode.Heads(), stop=decode.Fixed(3))
        trees = [decode.Method(drafter=decode.Heads(one), accept=decode.OneHot(), stop=decode.Never())
                 for one in (static, dynamic)]  # fmt: skip
        for at, (name, method) in enumerate(
            zip(("chain", "static", "dynamic"), (chain, *trees), strict=True)
        ):
            pair, counts = MarkovPair(4, 4, sharp=2.5, distance=0.3), [0] * 4
            for seed in range(60):
                draws, own = AddressedDraws(seed), ToldHeads(pair, sees)
                record = run_chain(method, pair, (0, seed % 4), Limits(16), draws, heads=own)
                for added in record.accept_lengths[:-1]:
                    counts[added - 1] += 1
            shares = [count / sum(counts) for count in counts]
            places, color = [x + 0.27 * (at - 1) for x in range(4)], (BLUE, ORANGE, GREEN)[at]
            ax.bar(places, shares, 0.25, label=name, color=color)
        title = "laws see the path (EAGLE)" if sees else "laws do not (Medusa)"
        y, legend = ("share of the rounds", "") if sees else ("", "best")
        pic.said(ax, title, "draft tokens that stay", y, legend, xticks=range(4), ylim=(0, 0.75))

    return draw


# --- stop -------------------------------------------------------------------------------------------------------------
SPECDEC, DISCO = "stop=specdec++(h=0.7,least=2),cap=8", "stop=disco(threshold=0.5),cap=8"


def shade(ax: Axes, low: float, high: float) -> None:
    """The stopping region."""
    ax.axvspan(low, high, color=RED, alpha=0.08, lw=0)


def fixed(ax: Axes, rule: Any) -> None:
    lengths = (1, 2, 3, 4, 5, 6, 8, 10, 12)
    steps, calls, _ = zip(*(pic.dialled(f"speculative(gamma={gamma})") for gamma in lengths), strict=True)
    ax.plot(lengths, calls, "-o", color=BLUE, ms=4, label="target calls a token")
    ax.plot(lengths, steps, "--s", color=ORANGE, ms=4, label="draft steps a token")
    title = "Fewer calls, more wasted drafting"
    pic.said(ax, title, "γ", legend="upper left", ylim=(0, None), xticks=lengths)


def heuristic(ax: Axes) -> None:
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
    ]  # what the target would keep, by round
    rule: Any = parse_method("heuristic").stop
    state = rule.start()
    for round, most in enumerate(would, 1):
        state, drafted, stop = rule.begin_round(state), 0, False
        while not stop:
            drafted += 1
            stop, state = rule.stop({"drafted": torch.tensor(drafted)}, state)
        kept = min(drafted, most)
        ax.bar(round, drafted, width=0.8, fc="white", ec=RED if kept < drafted else SKY)
        ax.bar(round, kept, width=0.8, color=SKY)
        ax.text(round, drafted + 0.3, str(drafted), ha="center", fontsize=8)
        state = rule.end_round(state, drafted, drafted, kept)
    title, last = "γ over rounds: +2 where all is accepted (filled), else −1, at least 1", len(would)
    limits: dict[str, Any] = {"xticks": range(1, last + 1), "xlim": (0.3, last + 0.7), "ylim": (0, 16)}
    pic.said(ax, title, "round", "draft tokens", **limits)
    handles = [Rectangle((0, 0), 1, 1, color=SKY), Rectangle((0, 0), 1, 1, fc="white", ec=RED)]
    ax.legend(handles, ["accepted", "drafted, not accepted"], loc="upper center", ncols=2)
    ax.set_yticks((0, 5, 10, 15))


def bound(ax: Axes, factor: float, label: str, stops_at: float) -> None:
    """1 − √(factor · H) over the panel of entropy, and where the rule stops."""
    h = torch.linspace(0, 3.4, 60, dtype=torch.float64)
    ax.plot(h, 1 - (factor * h).sqrt(), color=INK, lw=1.4, label=label)
    shade(ax, stops_at, 3.4)
    ax.set_xlim(0, 3.4)
    pic.legend_below(ax)


def svip(ax: Axes, rule: Any) -> None:
    pic.certainty(ax, rule, "entropy", "H(q), nats", "The bound that stops a run")
    bound(ax, rule.c, "1 − √(c·H)", rule.h**2 / rule.c)


def confidence(ax: Axes, rule: Any) -> None:
    pic.certainty(ax, rule, "token_prob", "q(x)", "Stops where the drawn token was unlikely")
    shade(ax, 0, 0.4)
    pic.legend_below(ax)


def fallback(ax: Axes, rule: Any) -> None:
    pic.certainty(ax, rule, "max_prob", "max q", "Stops where the draft is torn")
    shade(ax, 0, 0.6)
    pic.legend_below(ax)


def calibrated(ax: Axes, rule: Any) -> None:
    h = torch.linspace(0.02, 3.4, 80, dtype=torch.float64)
    pic.certainty(ax, rule, "entropy", "H(q), nats", "First token of a run; what it learns")
    for new, color in ((0, GREY), (40, PURPLE), (400, BLUE)):
        state = pic.follow("calibrated", new).record.rules.stop_state if new else rule.start()
        chance = Regression(rule.signal, rule.memory).predict({"entropy": h}, state[1:])
        ax.plot(h, chance, color=color, lw=1.4, label=f"{int(state[-1])} verdicts")
    ax.axhline(rule.rate, color=INK, lw=0.8, ls=":")
    ax.set_xlim(0, 3.4)
    ax.legend(loc="upper right", fontsize=7.5)


def optimal(ax: Axes, rule: Any) -> None:
    _, beta, tokens, cost = pic.follow("optimal", 300).record.rules.stop_state[:4]
    places = torch.arange(0, 13)
    for chance, color in ((0.9, GREEN), (0.75, BLUE), (0.5, PURPLE)):
        gain, label = chance**places * beta * cost / tokens, f"each accepted at {chance:g}"
        ax.plot(places, gain, "-o", ms=3.2, color=color, lw=1.2, label=label)
    ax.axhline(rule.step + rule.token, color=RED, lw=1.2, label="its cost")
    pic.said(ax, "Gain of another draft token", "tokens drafted", "target passes", ylim=(0, None))
    ax.legend(loc="upper right", fontsize=7.5)


def adaedl(ax: Axes) -> None:
    rule: Any = parse_method("adaedl").stop
    pic.certainty(ax, rule, "entropy", "H(q), nats", "Where it stops at the start, λ = 0.5")
    ax.axhline(rule.threshold, color=INK, lw=0.8, ls=":")
    bound(ax, rule.g, "1 − √(g·H)", (1 - rule.threshold) ** 2 / rule.g)


def adapting(ax: Axes) -> None:
    rule: Any = parse_method("adaedl").stop
    share = [1.0] * 20 + [0.5] * 25 + [1.0] * 15 + [0.0] * 10 + [1.0] * 30  # accepted of 10 drafted, by round
    state, states = rule.start(), []
    for part in share:
        state = rule.end_round(rule.begin_round(state), 10, 10, round(10 * part))
        states.append((float(state[0]), float(state[1])))
    at, (levels, rates) = range(1, len(share) + 1), zip(*states, strict=True)
    lines = [
        *ax.step(at, share, where="mid", color=SKY, lw=1),
        *ax.plot(at, rates, "--", color=PURPLE, lw=1.5),
    ]
    ax.axhline(rule.alpha, color=GREY, lw=0.8, ls=":")
    ax.text(1.5, rule.alpha - 0.015, "α", va="top", fontsize=8)
    pic.said(ax, "λ follows a given acceptance", "round", "acceptance", ylim=(-0.03, 1.05), xlim=(0, 100))
    other = ax.twinx()
    lines += other.plot(at, levels, color=GREEN, lw=2)
    other.set_ylabel("λ", color=GREEN)
    other.spines["right"].set_visible(True)
    other.set_ylim(0.44, 0.56)
    ax.figure.legend(lines, ["accepted/drafted", "AR", "λ (right)"], loc="outside lower right", ncols=3)


def specdec(ax: Axes, rule: Any) -> None:
    for n, signals in enumerate(list(pic.follow(SPECDEC, 60).signals.values())[:9]):
        risk = 1 - torch.tensor([row["specdec++"] for row in signals]).cumprod(0)
        label = None if n else "one run"
        ax.plot(range(1, len(risk) + 1), risk, "-o", color=SKY, ms=3, lw=0.9, label=label)
    ax.axhspan(rule.h, 1.0, color=RED, alpha=0.08, lw=0)
    ax.axhline(rule.h, color=INK, lw=0.8, ls=":", label="h")
    title = "Chance of a refusal in the run"
    pic.said(ax, title, "tokens drafted", "1 − Π p̂", ylim=(0, 1.03), xlim=(0.7, 8.3))
    pic.legend_below(ax)


def disco(ax: Axes, rule: Any) -> None:
    pair, text, points = pic.Pair(), (0,), []
    for token in pic.follow(DISCO, 200).record.tokens:
        score = pair.score("disco", text)
        points.append((score, float(overlap(*pair.laws(text))), score >= rule.threshold))
        text = (*text, token.id)
    pic.dots(ax, points)
    shade(ax, 0.0, rule.threshold)
    title, x = "The score that ends a run", "score of the network (an example)"
    pic.said(ax, title, x, "β = Σ min(p, q)", xlim=(0, 1), ylim=(0, 1.03))
    pic.legend_below(ax)


# --- trust ------------------------------------------------------------------------------------------------------------
DIALS = {  # of trust rules: values, colour, line
    "gate(tau)": ((0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0), GREEN, "-o"),
    "coin(rate)": ((0.9, 0.8, 0.65, 0.5, 0.3, 0.15, 0.0), PURPLE, "--s"),
    "certain(threshold)": ((1.6, 1.2, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0), BLUE, "-^"),
    "online(tau)": ((0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 1.0), ORANGE, "-v"),
}


def dials(*more: str) -> pic.Panel:
    """Target calls and drift of a gate, a coin and other dials."""

    def draw(ax: Axes) -> None:
        for label in ("gate(tau)", "coin(rate)", *more):
            values, color, line = DIALS[label]
            form = f"trust={label.removesuffix(')')}={{}}),stop=untrusted,accept=exact,cap=20"
            spots = [pic.dialled(form.format(value))[1:] for value in values]
            ax.plot(*zip(*spots, strict=True), line, color=color, ms=4, label=label)
        limits: dict[str, Any] = {"xlim": (0, None), "ylim": (0, None)}
        title = "The dial, on random laws"
        pic.said(ax, title, "target calls a token", "mean drift", "upper right", **limits)

    return draw


def fits(ax: Axes) -> None:
    pair, text = pic.Pair(), [0, *(token.id for token in pic.follow("autoregressive", 220).record.tokens)]
    laws = [pair.laws(tuple(text[:n])) for n in range(1, len(text))]
    p, q = (torch.stack(one) for one in zip(*laws, strict=True))
    ax.plot(margin(q), overlap(p, q), ".", color=GREY, ms=3)
    line, rule = torch.linspace(0, 6, 60, dtype=torch.float64), Online("margin", tau=0.7)
    for new, color in ((40, PURPLE), (200, BLUE), (1000, GREEN)):
        state = pic.follow("online(signal=margin, tau=0.7)", new).record.rules.trust_state
        label = f"after {int(state[2])} verdicts"
        ax.plot(line, rule.predict({"margin": line}, state), color=color, label=label)
    ax.axhline(0.7, color=INK, lw=1)
    title, limits = "Fit along a text; line: tau", {"xlim": (0, 6), "ylim": (0, 1.03)}
    pic.said(ax, title, "margin of q (nats)", "β = Σ min(p, q)", "lower right", **limits)


# --- drafters ---------------------------------------------------------------------------------------------------------
def nothing(ax: Axes) -> None:
    for i, token in enumerate(pic.follow("autoregressive", 32).record.tokens, 1):
        pic.box(ax, i, 0, token.id, token.origin.value)
        ax.text(i, -0.75, str(token.round), ha="center", va="center", fontsize=6.5, color="#555555")
    title = "autoregressive: one target call a token (its number below)"
    pic.said(ax, title, bare=True, xlim=(0.3, 32.7), ylim=(-1.1, 0.6))


def draft_law(ax: Axes) -> None:
    places = range(len(pic.Q))
    ax.bar([i - 0.2 for i in places], pic.Q, width=0.38, color=ORANGE, label="q, greedy=false")
    ax.bar([i + 0.2 for i in places], one_hot(pic.Q), width=0.38, fc="white", ec=RED, label="q, greedy=true")
    ax.set_xticks(places, list(pic.LETTERS[: len(pic.Q)]))
    title = "The law that a draft token is drawn from"
    pic.said(ax, title, "token", "probability", "upper right", ylim=(0, 1.05))


def greedy_draft(ax: Axes) -> None:
    p, q = pic.law_pairs(220)
    drawn, certain = ((law * accept("exact").keep(p, law)).sum(-1) for law in (q, one_hot(q)))
    ax.plot([0, 1], [0, 1], color=GREY, lw=1)
    ax.plot(drawn, certain, ".", color=GREEN, ms=4)
    x, y = "sampled draft: Σ min(p, q)", "greedy draft: p(argmax q)"
    pic.said(ax, "Chance that exact acceptance keeps it", x, y, xlim=(0, 1), ylim=(0, 1))


def allocated(ax: Axes) -> set[str]:
    for row in range(10):
        for i, token in enumerate(pic.follow("allocation(share=0.5)", 24, seed=row).record.tokens, 1):
            pic.box(ax, i, -row, token.id, token.origin.value)
    title = "allocation(share=0.5): ten texts, each by one model"
    pic.said(ax, title, bare=True, xlim=(0.3, 24.7), ylim=(-9.7, 0.7))
    return {"trusted", "target"}


def lookup(ax: Axes) -> set[str]:
    text = "the gate trusts a token , the target checks a run . if the gate trusts"
    names, words = sorted(set(text.split())), text.split()
    ids = [names.index(word) for word in words]
    found, n = look_up(ids, n=3, least=2, at_most=5), len(words)
    size = next(s for s in (3, 2) if any(ids[i : i + s] == ids[-s:] for i in range(n - s)))
    start = max(i for i in range(n - size) if ids[i : i + size] == ids[-size:])
    spots, x, y = [], 0.0, 0
    for i, word in enumerate([*words, *(names[j] for j in found)]):
        wide = 0.17 + 0.105 * len(word)
        x, y = (0.0, y - 1) if i == 12 else (x, y)
        copied_from = start + size <= i < start + size + len(found)
        ending = start <= i < start + size or n - size <= i < n
        kind = "accepted" if copied_from or i >= n else "trusted" if ending else "dropped"
        face, edge, _, line = pic.KINDS[kind]
        face = "white" if copied_from else face
        ax.add_patch(Rectangle((x, y - 0.3), wide, 0.6, fc=face, ec=edge, ls=line, lw=1.2))
        ax.text(x + wide / 2, y, word, ha="center", va="center_baseline", fontsize=9)
        spots.append((x + wide / 2, y))
        x += wide + 0.07
    style = {"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.15"}
    arrow = {"color": BLUE, "shrinkA": 13, "shrinkB": 13, **style}
    ax.annotate("", spots[n], spots[start + size], arrowprops=arrow)
    title = f"lookup(n=3, gamma=5): the ending of {size} words stood before; what followed it is the draft"
    pic.said(ax, title, bare=True, xlim=(-0.1, 9.3), ylim=(-1.6, 0.6))
    return {"trusted", "accepted", "dropped"}
