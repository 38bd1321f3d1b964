"""The figures of docs/methods, one a rule, and of docs/studies: a table, for the kinds of ``figure_kinds.py``; all of
them with ``python scripts/figures.py``, one with ``--only svip``.

Every curve, box and dot comes out of the classes in ``sprinter.decode``: laws and keep chances from the accept rules,
decisions and states from the trust and stop rules, texts from the real loop on random laws. Only the studies' figures
show what was measured, benchmarks/results. The same code gives the same files; needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import figure_kinds as pic
import records
from figure_kinds import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Curve, accept, example, panels, trade
from sprinter import decode
from sprinter.bench.agreement import SIGNS
from sprinter.decode.accept import Diversed, Harmless
from sprinter.decode.draft import Control
from sprinter.laws import kl_divergence, tv_distance
from sprinter.plots import STYLE, few_colours
from sprinter.theory.regions import place

ROOT = Path(__file__).resolve().parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"


# --- figures that are not made of panels ------------------------------------------------------------------------------
def strip(axes: Sequence[Axes], spec: str, signal: str, level: float, length: int) -> set[str]:
    """A text: the signal that decided, the tokens by origin, their drift."""
    followed, place, (top, lane, bottom) = pic.follow(spec, length, 3), 0, axes
    tokens, scores = followed.record.tokens, list[tuple[int, float]]()
    for round in range(1, followed.record.stats.rounds + 1):
        rows = followed.signals.get(round, []) if signal else []
        scores += [(place + i + 1, row[signal]) for i, row in enumerate(rows) if place + i < length]
        place += sum(token.round == round for token in tokens)
    if signal:
        below = signal == "uniform" or SIGNS.get(signal, 1.0) < 0  # what is trusted
        xs, ys = zip(*scores, strict=True)
        top.vlines(xs, 0, ys, color=GREY, lw=1)
        for fine, color, fill in ((True, ORANGE, "full"), (False, RED, "none")):
            if those := [one for one in scores if (one[1] < level if below else one[1] >= level) is fine]:
                top.plot(*zip(*those, strict=True), "o", color=color, ms=4, fillstyle=fill)
        top.axhline(level, color=INK, lw=1)
        high = max(1.0, *ys)
        top.set(ylim=(0, 1.08 * high), yticks=(0, int(high)), xticks=())
        top.set_ylabel({"uniform": "u", "entropy": "H(q)"}.get(signal, signal))
    top.set_visible(bool(signal))
    for i, token in enumerate(tokens, 1):
        pic.box(lane, i, 0, token.id, token.origin.value)
        if i > 1 and token.round != tokens[i - 2].round:
            lane.plot([i - 0.5] * 2, [-0.75, 0.75], color=INK, lw=0.9)
    lane.set(ylim=(-0.8, 0.8), yticks=(), xticks=())
    lane.spines[["left", "bottom"]].set_visible(False)
    bottom.bar(range(1, length + 1), [token.drift or 0.0 for token in tokens], width=0.7, color=PURPLE)
    bottom.set(ylim=(0, 1), yticks=(0, 1), ylabel="drift", xticks=range(1, length + 1, 5))
    if not any(token.drift for token in tokens):
        told = "0 everywhere: every token was drawn or checked by the target"
        bottom.text(length / 2, 0.5, told, ha="center", va="center")
    for ax in axes:
        ax.set_xlim(0.3, length + 0.7)
    return {token.origin.value for token in tokens}


def trusting(spec: str, signal: str = "", level: float = 0.0, *more: str) -> pic.Drawing:
    """The strip, and for rules with a signal the plane of calls and drift, with dials of ``DIALS`` beside the usual."""

    def draw() -> Figure:
        fig = plt.figure(figsize=(8, 3.3 if signal else 2.0), layout="constrained")
        heights, widths = (2 if signal else 0.01, 1.1, 1.6), (1.55, 1) if signal else (1,)
        grid = fig.add_gridspec(3, len(widths), height_ratios=heights, width_ratios=widths)
        axes = [fig.add_subplot(grid[i, 0]) for i in range(3)]
        kinds = strip(axes, spec, signal, level, 20 if signal else 32)
        metered = ", metered by closing passes" if "draft" in spec else ": bars between tokens end a round"
        axes[0 if signal else 1].set_title(spec + metered)
        axes[2].set_xlabel("token of the text")
        pic.legend_of(fig, kinds, side="left" if signal else "")
        if signal:
            dials(*more)(fig.add_subplot(grid[:, 1]))
        return fig

    return draw


def gate_signals() -> Figure:
    """Target calls a token against drift at three temperatures, built-in pair: benchmarks/results."""
    shown = {
        "coin": ("a coin", GREY, "o"), "paper, λ=1.2": ("the paper's: linear, ratio(λ=1.2)", RED, "s"),
        "overlap, entropy only": ("entropy alone", ORANGE, "^"), "overlap": ("linear, overlap", GREEN, "D"),
        "own overlap, mlp, hidden, law and T": ("default: mlp on state, law and T", BLUE, "v"),
    }  # fmt: skip
    curves = json.loads((RESULTS / "gate" / "study_builtin.json").read_text(encoding="utf-8"))["curves"]
    fig, axes = plt.subplots(1, 3, figsize=(9.2, 3.3), sharey=True, layout="constrained")
    for ax, temperature in zip(axes, ("1.0", "0.7", "0.0"), strict=True):
        plain, measured = curves[temperature]["plain"], curves[temperature]["points"]
        for name, (label, colour, marker) in shown.items():
            if name in measured:
                points = zip(*sorted([plain, *measured[name]]), strict=True)
                ax.plot(*points, "-", color=colour, marker=marker, ms=3.5, lw=1.1, label=label)
        ax.plot(*plain, "o", color=INK, ms=4)
        title, y = f"temperature {float(temperature):g}", "target calls a token" if ax is axes[0] else ""
        pic.said(ax, title, "mean drift", y, xlim=(-0.005, None), ylim=(0, None))
    pic.legend_below(axes[0], "center")
    return fig


def speed_and_drift() -> Figure:
    """Speed over plain decoding against drift: the arms of the newest runs of README's two configurations."""
    fig, axes = plt.subplots(1, 2, figsize=(7.4, 3.3), layout="constrained")
    shown = {"real": "Qwen2.5-Coder 1.5B and 0.5B, greedy", "methods": "built-in pair, temperature 1"}
    colors = {"exact": BLUE, "sprinter": ORANGE, "coin": PURPLE}
    for ax, (topic, title) in zip(axes, shown.items(), strict=True):
        run = records.published(topic)["readme-real" if topic == "real" else "readme-builtin"]
        (temperature,) = run.temperatures
        points = dict[str, list[tuple[float, float, str]]]()
        for one in records.summaries(run, temperature):
            speed, drift, name = one["speed_over"].get("autoregressive"), one["mean_drift"], one["arm"]
            if one["suite"] == run.suites[0] and speed is not None:
                tail = f" (tail {name.partition('tail=')[2][0]})" if "tail=" in name else ""
                lossy = name.partition("(")[0].removeprefix("trust=") + tail
                x, kind = (0.0, "exact") if one["lossless"] or drift is None else (drift[0], lossy)
                points.setdefault(kind, []).append((x, speed[0], name))
                ax.plot([x, x], speed[1:], color=GREY, lw=0.8)
        for kind, found in points.items():
            xs, ys, names = zip(*sorted(found, key=lambda one: one[:2]), strict=True)
            color, exact, at = colors.get(kind.partition(" ")[0], GREEN), kind == "exact", -1.0
            line = "o" if exact else "o--" if "tail" in kind else "o-"
            ax.plot(xs, ys, line, color=color, ms=4.5, lw=1.1, label=kind)
            for y, name in zip(ys, names, strict=True) if exact else ():
                at = max(y, at + 0.05 * (ax.get_ylim()[1] - ax.get_ylim()[0]))  # names do not overlap
                told, place = (
                    {"autoregressive": "plain"}.get(name, name.partition("(")[0]),
                    {"xytext": (-7, -2), "textcoords": "offset points"},
                )
                ax.annotate(told, (0, at), ha="right", fontsize=7.5, color=color, **place)
        y = "speed ÷ plain" if ax is axes[0] else ""
        pic.said(ax, title, "mean drift", y, xlim=(-0.4 * ax.get_xlim()[1], None))
        ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= ax.get_xlim()[1]])
        ax.legend(loc="best")
    return fig


def when_it_pays() -> Figure:
    """Where plain decoding, exact drafts and trust win, by cost of a draft step and overlap; pairs as points."""
    found = json.loads((RESULTS / "real" / "when_it_pays_map.json").read_text(encoding="utf-8"))
    fig, ax = plt.subplots(figsize=(7.4, 5.2), layout="constrained")
    costs, overlaps = torch.logspace(-2, 0, 81).tolist(), torch.linspace(0.3, 0.995, 81).tolist()
    places = [[place(overlap, cost, kept=0.0) for cost in costs] for overlap in overlaps]
    plain = [[float(one.gamma == 0) for one in row] for row in places]
    needed = [
        [torch.nan if one.gamma == 0 else 1.01 if one.needed is None else one.needed for one in row]
        for row in places
    ]
    ax.contourf(costs, overlaps, plain, levels=[0.5, 1.5], colors=["#dddddd"])
    ax.contourf(costs, overlaps, needed, levels=[0.0, 0.3], colors=["#d9efe6"])
    levels = [0.25, 0.3, 0.4, 0.6, 1.0]
    lines = ax.contour(costs, overlaps, needed, levels=levels, colors=GREY, linewidths=0.9)
    ax.clabel(lines, fmt=lambda share: f"{100 * share:.0f} %", fontsize=7)
    looks = {
        "qwen": (BLUE, "o", "Qwen2.5-Coder 0.5B/1.5B, also padded"), "builtin": (ORANGE, "D", "built-in pair"),
        "foreign": (GREEN, "v", "SmolLM2-135M/Qwen2.5-Coder 1.5B"), "cheap": (GREEN, "x", "the same, distilled"),
    }  # fmt: skip
    for pair, (color, marker, label) in looks.items():
        spots = [(one["ratio"], one["agreement"]) for one in found["entries"]
                 if (one["pair"], one["kind"]) == (pair, "measured") and "ms" not in one["place"]]  # fmt: skip
        if spots:
            ax.plot(*zip(*spots, strict=True), marker, color=color, ms=5, ls="", label=label)
    spots = [(one["ratio"], one["overlap"]) for one in found["papers"]]
    ax.plot(
        *zip(*spots, strict=True), "^", color=RED, ms=5, ls="", fillstyle="none", label="SPRINTER's own pairs"
    )
    ax.set_xscale("log")
    title = "Share of the draft's errors that must stay for 1.3 times the speed of the best exact draft"
    y = "overlap β (greedy: share of equal first choices)"
    pic.said(ax, title, "draft step ÷ target pass", y, xlim=(0.01, 1), ylim=(0.3, 1))
    ax.text(0.6, 0.36, "plain", ha="center")
    ax.legend(loc="lower left")
    return fig


# --- panels of single figures -------------------------------------------------------------------------------------
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


def allocated(ax: Axes) -> set[str]:
    for row in range(10):
        for i, token in enumerate(pic.follow("allocation(share=0.5)", 24, seed=row).record.tokens, 1):
            pic.box(ax, i, -row, token.id, token.origin.value)
    title = "allocation(share=0.5): ten texts, each by one model"
    pic.said(ax, title, bare=True, xlim=(0.3, 24.7), ylim=(-9.7, 0.7))
    return {"trusted", "target"}


def several(name: str) -> pic.Panel:
    """A round of a rule for several drafts: every candidate that was tried carries its chance."""

    def draw(ax: Axes) -> set[str]:
        tree, verdict, tried = pic.several_round(name, 3, 1067, pic.Pair(4, seed=5, noise=2.0))
        path = [tree.tokens[node] for node in verdict.path]
        for row, chain in enumerate(tree.chains()):
            for depth, x in enumerate(chain.tokens):
                shared = depth < verdict.accepted and list(chain.tokens[: depth + 1]) == path[: depth + 1]
                chance, kept = tried.get((row, depth), (None, shared and name != "batch"))
                kind = "accepted" if kept else "dropped" if chance is None else "refused"
                pic.box(ax, depth + 1, row + 1, x, kind, 0.5, 0.5)
                told = "" if chance is None else f"{chance:.2f}"
                ax.text(depth + 1, row + 1.3, told, ha="center", va="top", fontsize=7, color="#555555")
        kind = "bonus" if verdict.accepted == 4 else "replacement"
        pic.box(ax, verdict.accepted + 1, 4.15, verdict.token, kind, 0.5, 0.5)
        pic.said(
            ax, f"{name}: one round of M = 3 drafts, γ = 4", y="draft", xlim=(0.5, 5.5), ylim=(4.6, 0.55)
        )
        ax.set_yticks([1, 2, 3, 4.15], ["1", "2", "3", "target"])
        ax.set(xlabel="depth (below a token that was tried: its chance)", xticks=range(1, 5))
        return {"accepted", "refused", "dropped", "replacement"}

    return draw


def accepted_tokens(ax: Axes) -> None:
    """Accepted tokens a round against the number of drafts, of the three rules."""
    pair, counts = pic.Pair(8, seed=2, noise=1.5), (1, 2, 4, 8)
    for name, color, line in (("specinfer", GREEN, "-o"), ("spectr", PURPLE, "--s"), ("batch", GREY, ":^")):
        verdicts = [[pic.several_round(name, m, r, pair)[1] for r in range(250)] for m in counts]
        means = [sum(one.accepted for one in some) / 250 for some in verdicts]
        ax.plot(counts, means, line, color=color, ms=4, label=name)
    title, y = "γ = 4, 250 rounds on random laws", "accepted draft tokens a round"
    pic.said(ax, title, "drafts M", y, "lower right", xticks=counts, ylim=(0, 4))


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


# --- the table --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Weighed(decode.AcceptRule):
    """``diversed`` with a weight that is a function of the laws, ``[...]``."""

    weight: Callable[[Tensor, Tensor], Tensor]

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return Diversed().keep(p, q, Control(p, q, {"diversed": self.weight(p, q)}))

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return Diversed().replacement(p, q)


def one_weight(w: float) -> Weighed:
    return Weighed(lambda p, q: torch.full_like(p[..., 0], w))


class Spared:
    """``judge`` with scores that are uniform on [0, 1] for each position of a draft of 200."""

    def __init__(self, threshold: float) -> None:
        self._rule, self._scores = Harmless(threshold), torch.Generator().manual_seed(2)

    def ends(self, tokens: list[int], p: Tensor, q: Tensor) -> tuple[Tensor, object]:
        scores = torch.rand(len(tokens) + 1, generator=self._scores)
        return self._rule.ends(tokens, p, q, Control(p, q, {"judge": scores}))


ACCURACIES = ((0.60, 0.17, 0.08, 0.04), (0.42, 0.16, 0.09, 0.05), (0.30, 0.13, 0.08, 0.05))
"""An example: accuracies by tokens ahead and rank."""
TENTHS = [i / 10 for i in range(11)]
SLACKS = [0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.8, 1.0]
KLS = [0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 4.0, 10.0]
FLOORS = [0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.09, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 0.99]
DELTAS = [0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0]
TOTALS = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02]
THETAS = [1.0, 0.98, 0.96, 0.95, 0.94, 0.92, 0.9, 0.85, 0.8, 0.7]
NATS = [0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0]
EPSILONS = {0.0: "ε = 0", 0.01: "0.01", 0.05: "0.05", 0.2: "0.2"}
DASHED: dict[str, Any] = {"color": PURPLE, "line": "--"}
FUZZY = {  # divergence -> largest threshold, colour, line, marks
    "js": (0.7, PURPLE, ":", {}), "kl": (8.0, BLUE, "--", {}), "kl_reversed": (8.0, ORANGE, "-.", {}),
    "tv": (1.0, RED, (0, (1, 1)), {}), "js_reference": (3.0, GREEN, "-", {0.1: "0.1", 0.3: "T = 0.3", 0.6: "0.6"}),
}  # fmt: skip
WIDTHS = ("1x1x1", "2x1x1", "3x2x1", "4x2x2")
ONEHOT, WITHOUT, TRAVERSAL, MATCH = decode.OneHot(), decode.Without(), decode.Traversal(), decode.Match()
CHOSEN: list[Any] = [decode.Dynamic(4, 3, nodes) for nodes in (3, 6, 12, 24)]
FIXED: list[Any] = [decode.Static(widths) for widths in WIDTHS]
DRAWN, REPEATED = ([decode.Drawn(widths, again) for widths in WIDTHS] for again in (False, True))
SPARSE: list[Any] = [decode.Sparse(nodes).settle(ACCURACIES) for nodes in (3, 6, 12, 24)]
TWO_DRAFTS: dict[str, Any] = {
    "words": {"accepted": "kept, or the same as what was kept", "dropped": "not tried"}, "side": "left",
}  # fmt: skip
LOOKUP = "drafter=lookup(n=2,least=1),stop=fixed(gamma=4),accept=exact"
SUFFIX = "drafter=suffix(factor=2.0),stop=never,accept=match,cap=8"
RECYCLE = "recycle"
PARALLEL = "drafter=parallel(tokens=4),stop=fixed(gamma=4)"
ALLOCATED = {"trusted": "the draft's, all trusted", "target": "the target's own"}


def two_trees(drafter: Any, rule: decode.Judge, depth: int, title: str) -> pic.Drawing:
    """Trees after two texts."""
    again = "after another text; wide lines: large q"
    return panels(pic.tree(drafter, rule, depth, 1, title), pic.tree(drafter, rule, depth, 4, again))


FIGURES: dict[str, pic.Drawing] = {
    # accept
    "exact": trade("exact", Curve("opt(epsilon={})", SLACKS, "opt: on the line", {0.0: "exact: ε = 0"}, offset=(7, 3))),
    "opt": trade("opt(epsilon=0.04)", Curve("uno(epsilon={})", SLACKS, "uno", **DASHED),
        Curve("opt(epsilon={})", SLACKS, "opt: on the line", EPSILONS, offset=(-6, -8), side="right"), right=0.8),
    "uno": trade("uno(epsilon=0.04)", Curve("opt(epsilon={})", SLACKS, "opt", **DASHED),
        Curve("uno(epsilon={})", SLACKS, "uno: above the line", EPSILONS, offset=(7, 3)), right=0.8),
    "fuzzy": trade("fuzzy(threshold=0.3)", *(
        Curve(f"fuzzy(divergence={name}, threshold={{}})", [most * (i / 24) ** 2 for i in range(25)], name, marks,
            color, (7, 3), line) for name, (most, color, line, marks) in FUZZY.items())),
    "mentored": trade("mentored(kl=0.1)", Curve("mentored(kl={})", KLS, "mentored: on the line",
        {0.0: "D = 0", 0.01: "0.01", 0.1: "0.1", 0.5: "0.5 nats"}), right=0.8),
    "lenient": trade("lenient(w=0.5)", Curve("lenient(w={})", TENTHS, "lenient: on the line",
        {1.0: "w = 1", 0.8: "0.8", 0.5: "0.5", 0.2: "0.2"}), right=0.8),
    "typical": trade("typical(epsilon=0.09, delta=0.3)",
        Curve("typical(epsilon=1.0, delta={})", FLOORS, "δ from 0 to 1, ε = 1", **DASHED),
        Curve("typical(epsilon={}, delta=0.3)", FLOORS, "ε from 0 to 1, δ = 0.3",
            {0.002: "0.002", 0.02: "0.02", 0.09: "ε = 0.09"}, offset=(4, 6))),
    "bild": trade("bild(rollback=2.5)", Curve("bild(rollback={})", NATS, "bild",
        {0.6: "0.6", 2.0: "2", 5.0: "5 nats"}, offset=(7, 4)), ceiling=0.72),
    "random": trade("random(rate=0.5)", Curve("random(rate={})", TENTHS, "random",
        {0.0: "0", 0.5: "rate = 0.5", 0.9: "0.9"}, offset=(6, 5)), Curve("opt(epsilon={})", SLACKS, "opt", **DASHED)),
    "greedy": example("greedy", "greedy: keeps argmax p alone", temperatures),
    "diversed": example(one_weight(0.5), "diversed, weight 0.5", pic.plane(
        Curve(one_weight, TENTHS, "one weight for all", {0.0: "w = 0", 0.5: "0.5", 1.0: "1"}),
        Curve(lambda w: Weighed(lambda p, q: (tv_distance(p, q) < w).double()), TENTHS, "1 where TV(p, q) is small",
            **DASHED))),
    "margin": trade("margin(theta=0.95)", Curve("margin(theta={})", THETAS, "margin",
        {1.0: "theta = 1", 0.9: "0.9"}, offset=(6, 5)), ceiling=0.85),
    "relaxed": trade("relaxed(top_k=4, delta=0.2)", Curve("relaxed(top_k=10, delta={})", DELTAS, "relaxed, top_k = 10",
            {0.0: "0", 0.1: "0.1", 0.6: "delta = 0.6"}, offset=(6, 5)),
        Curve("relaxed(top_k=10, delta={}, sampled=true)", DELTAS, "the same, sampled", **DASHED), ceiling=0.85),
    "threshold": trade("threshold(single=0.2, total=0.5)", Curve("threshold(single=1.0, total={})", TOTALS,
            "total from 1, single = 1", {1.0: "1", 0.5: "0.5", 0.1: "0.1"}),
        Curve("threshold(single={}, total=1.0)", TOTALS, "single from 1, total = 1", **DASHED)),
    "cascade": trade("cascade(alpha=0.2)", *(
        Curve(f"cascade(deferral={name}, alpha={{}})", TENTHS, name, {0.2: "alpha = 0.2"} if name == "opt" else {},
            color, (-6, -12), line, "right")
        for name, color, line in (("opt", GREEN, "-"), ("diff", PURPLE, "--"), ("chow", BLUE, ":")))),
    "cactus": panels(spent, pic.kept_by_length({f"δ = {d:g}": accept(f"cactus(delta={d})") for d in (0.1, 0.0, 0.5)})),
    "block": pic.judged_chains({"block": accept("block"), "exact": accept("exact")}, 3),
    "judge": pic.judged_chains({"a half of the refused spared": Spared(0.5), "exact": accept("exact"),
        "a fifth spared": Spared(0.8)}, 3),
    "fly": pic.judged_chains({name: accept(name) for name in ("fly(window=2)", "exact", "fly(window=4)")}, 8),
    "asd": pic.judged_chains({name: accept(name) for name in ("asd(share=0.5)", "greedy", "asd(share=2.0)")}, 8),
    **{name: panels(several(name), accepted_tokens, **TWO_DRAFTS) for name in ("batch", "spectr", "specinfer")},
    # trees and heads
    "static": two_trees(FIXED[2], ONEHOT, 3, "static(widths=3x2x1), judged by onehot"),
    "dynamic": two_trees(decode.Dynamic(4, 4, 12), ONEHOT, 4, "dynamic(expand=4, depth=4, nodes=12)"),
    "drawn": two_trees(DRAWN[2], WITHOUT, 3, "drawn(widths=3x2x1), judged by without"),
    "widened": two_trees(decode.Widened(), WITHOUT, 3, "widened: a chain, with leaves beside it"),
    "onehot": panels(pic.tree(decode.Dynamic(4, 3, 9), ONEHOT, 3, 2, "dynamic(expand=4, depth=3, nodes=9), judged"),
        pic.sizes(("dynamic", ONEHOT, CHOSEN, GREEN, "o"), ("static", ONEHOT, FIXED, ORANGE, "s"))),
    "match": panels(pic.tree(decode.Dynamic(4, 3, 9), MATCH, 3, 2, "the path that the target draws itself"),
        pic.sizes(("match", MATCH, CHOSEN, GREEN, "o"), ("onehot", ONEHOT, CHOSEN, ORANGE, "s"))),
    "without": panels(pic.tree(DRAWN[2], WITHOUT, 3, 2, "drawn(widths=3x2x1), judged"),
        pic.sizes(("without", WITHOUT, DRAWN, GREEN, "o"), ("with replacement", WITHOUT, REPEATED, PURPLE, "^"))),
    "traversal": panels(pic.tree(DRAWN[2], TRAVERSAL, 3, 2, "drawn(widths=3x2x1), judged leaf to text"),
        pic.sizes(("traversal", TRAVERSAL, DRAWN, GREEN, "o"), ("without", WITHOUT, DRAWN, ORANGE, "s"))),
    "sparse": panels(pic.tree(SPARSE[2], ONEHOT, 3, 4, "12 nodes by accuracies, judged by onehot"),
        pic.sizes(("sparse", ONEHOT, SPARSE, GREEN, "o"), ("static", ONEHOT, FIXED, ORANGE, "s"))),
    "heads": panels(pic.tree(SPARSE[2], ONEHOT, 3, 5, "medusa(nodes=12): a tree of heads"),
        pic.sizes(("laws see the path (EAGLE)", ONEHOT, CHOSEN, BLUE, "o"),
            ("laws do not (Medusa)", ONEHOT, CHOSEN, ORANGE, "s", True))),
    "parallel": panels(pic.rounds(PARALLEL, PARALLEL, 14)),
    # stop
    "fixed": pic.stopping("speculative(gamma={:g})", 5, *pic.COUNTS),
    "heuristic": pic.stopping("heuristic(start={:g})", 5, 1, 10),
    "confidence": pic.stopping("confidence(c={})", 0.4, 0.1, 0.2, 0.6, 0.8),
    "fallback": pic.stopping("stop=fallback(f={}),accept=exact,cap=20", 0.6, 0.3, 0.4, 0.5, 0.8, seed=1),
    "svip": pic.stopping("svip(h={})", 0.3, 0.2, 0.25, 0.35, 0.4, 0.5),
    "adaedl": pic.stopping("stop=adaedl(alpha={})", 0.9, 0.5, 0.7),
    "calibrated": pic.stopping("calibrated(rate={})", 0.4, 0.2, 0.3, 0.6, 0.8),
    "optimal": pic.stopping("optimal(step={}, token=0.03)", 0.25, 0.05, 0.1, 0.5, 1.0),
    "specdec++": pic.stopping("stop=specdec++(h={},least=2),cap=8", 0.7, 0.3, 0.5, 0.9),
    "disco": pic.stopping("stop=disco(threshold={}),cap=8", 0.5, 0.3, 0.4, 0.6, 0.7),
    "untrusted": panels(*(
        pic.rounds(title, f"trust=gate(tau=0.7),stop={stop},accept=exact,cap=20", 8, 2, title == stop[:9], fontsize=8.5)
        for stop in ("untrusted", "untrusted(tail=2)", "untrusted(tail=8, under=svip(h=0.3))")
        for title in (stop.replace("8, ", "8,\n"),)), height=3.4),
    "never": panels(
        pic.rounds("stop=never,cap=8: the cap ends every run", "trust=nobody,stop=never,accept=exact,cap=8", 7),
        pic.rounds("the same with trust=everyone", "trust=everyone,stop=never,accept=exact,cap=8", 7), height=3.0),
    # trust
    "nobody": trusting("speculative(gamma=5)"), "everyone": trusting("draft-only"),
    "gate": trusting("sprinter(tau=0.7, cap=20, tail=0)", "gate", 0.7),
    "coin": trusting("coin(rate=0.7, cap=20)", "uniform", 0.7),
    "certain": trusting("certain(threshold=0.6)", "entropy", 0.6, "certain(threshold)"),
    "online": panels(pic.rounds("online(tau=0.7, after=4)", "online(tau=0.7, after=4)", 8, 2),
        dials("certain(threshold)", "online(tau)"), height=3.3),
    # drafters, and docs/studies
    "nothing": trusting("autoregressive"), "model": panels(*(
        pic.rounds(told, f"drafter=model(greedy={greedy}),stop=fixed(gamma=5),accept=exact", 8, first=greedy == "false")
        for greedy, told in (("false", "model: drawn from q"), ("true", "model(greedy=true): argmax q"))), height=3.0),
    "allocated": panels(allocated, height=2.6, words=ALLOCATED),
    "lookup": panels(pic.rounds(LOOKUP, LOOKUP, 14)), "suffix": panels(pic.rounds(SUFFIX, SUFFIX, 14)),
    "recycle": panels(pic.rounds(RECYCLE, RECYCLE, 14)),
    "gate-signals": gate_signals, "when-it-pays": when_it_pays, "speed-and-drift": speed_and_drift,
}  # fmt: skip


FOLDERS = {"gate-signals": "studies", "when-it-pays": "studies", "speed-and-drift": "."}


def save(fig: Figure, path: Path) -> None:
    """Save a PNG with few colours, at twice its display resolution."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = BytesIO()
    fig.savefig(raw, format="png", dpi=180, metadata={"Software": None})
    plt.close(fig)
    path.write_bytes(few_colours(raw.getvalue()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", choices=sorted(FIGURES), help="one figure instead of all")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder with methods/ and studies/")
    given = parser.parse_args()
    torch.set_num_threads(1)
    mpl.use("Agg")
    mpl.rcParams.update(STYLE | {"legend.handlelength": 1.2})
    for name in [given.only] if given.only else FIGURES:
        folder = FOLDERS.get(name, "methods")
        path = given.out / folder / "figures" / f"{name}.png"
        save(FIGURES[name](), path)
        print(f"{name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
