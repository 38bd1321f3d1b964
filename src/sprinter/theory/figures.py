"""Figures of the theory commands, drawn from their JSON data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sprinter.plots import COLOURS, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SIMULATIONS", "draw_fleet", "draw_pareto"]

# markers and dashes encode the curve too
BLUE, ORANGE, SKY, GREEN, RED, PURPLE, INK, GREY, PALE = (
    COLOURS[name] for name in ("blue", "orange", "sky", "green", "red", "purple", "ink", "grey", "grid")
)
_COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
_WIDTH = 8.3
"""Inches: about 1,000 pixels, readable when scaled to 830."""


# --- theory simulate -------------------------------------------------------------------------------------------------
def _running(ax: Axes, curves: list[dict[str, Any]], title: str) -> None:
    for curve, colour in zip(curves, _COLOURS, strict=False):
        name = f"M = {curve['drafts']}"
        ax.fill_between(curve["runs"], curve["low"], curve["high"], color=colour, alpha=0.18, lw=0)
        ax.plot(curve["runs"], curve["mean"], color=colour, lw=1.3, label=f"{name}, simulated")
        label = f"{name}, theorem: {curve['closed']:.2f}"
        ax.axhline(curve["closed"], color=colour, ls="--", lw=1.2, label=label)
    ax.set(title=title, xlabel="texts simulated", ylabel="rejections a text")
    middle = [curve["closed"] for curve in curves]
    spread = max(curve["high"][-1] - curve["low"][-1] for curve in curves)
    ax.set_ylim(min(middle) - 1.5 * spread, max(middle) + 3 * spread)
    ax.legend(loc="upper right")


def _scaling(ax: Axes, data: dict[str, Any]) -> None:
    scaling = data["scaling"]
    ax.plot(scaling["drafts"], scaling["rejections"], color=BLUE, marker="o", ms=3, lw=1.2, label="Theorem 3")
    ax.plot(scaling["drafts"][:1], scaling["rejections"][:1], "o", color=INK, ms=5, label="M = 1: Theorem 1")
    ax.axhline(scaling["limit"], color=GREY, ls="--", lw=1.2, label=f"M → ∞: {scaling['limit']:.2f}")
    for curve in data["curves"]:
        middle, half = curve["mean"][-1], (curve["high"][-1] - curve["low"][-1]) / 2
        ax.errorbar(curve["drafts"], middle, half, color=RED, fmt="x", ms=5, lw=1.2)
    ax.errorbar([], [], [], color=RED, fmt="x", ms=5, label="simulated, 99 % interval")
    ax.set(title="(c) drafts a batch", xlabel="drafts M", ylabel="rejections a text", xscale="log")
    ax.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    ax.minorticks_off()
    ax.legend(loc="upper right")


def draw_rejections(data: dict[str, Any]) -> Figure:
    """Figure 2 (a) to (c) of Yin et al., or its Figure 5."""
    figure, (a, b, c) = canvas(_WIDTH, 3.3, 1, 3)
    _running(a, data["curves"][:1], f"(a) one draft, T = {data['horizon']}")
    _running(b, data["curves"][1:], f"(b) batches, T = {data['horizon']}")
    _scaling(c, data)
    return figure


def draw_short(data: dict[str, Any]) -> Figure:
    """Drafts of γ tokens against Theorem 1's drafts to the horizon."""
    short = data["short"]
    figure, (ax,) = canvas(_WIDTH, 3.1, 1, 1)
    for key, colour, marker in (("target_calls", BLUE, "o"), ("rejections", RED, "s")):
        ax.plot(
            short["gamma"],
            short[key],
            color=colour,
            marker=marker,
            ms=3.5,
            label=f"{key.replace('_', ' ')}, exact",
        )
    ax.plot(short["gamma"], short["leviathan_calls"], color=ORANGE, ls=":", lw=1.6,
            label="target calls, Leviathan (independent acceptances)")  # fmt: skip
    ax.axhline(short["theorem_1_rejections"], color=GREY, ls="--", lw=1.2,
               label=f"Theorem 1: {short['theorem_1_rejections']:.2f} rejections")  # fmt: skip
    ratio = short["gamma_5"]["calls_over_theorem_1"]
    ax.annotate(f"γ = 5: {100 * (ratio - 1):.0f} % more calls\nthan drafts to the horizon",
                (5, short["gamma_5"]["target_calls"]), (5.5, 0.35 * short["target_calls"][0]), color=INK, va="top",
                arrowprops={"arrowstyle": "->", "color": GREY})  # fmt: skip
    ax.set(title=f"Short drafts, T = {data['horizon']}", xlabel="draft length γ (tokens)", ylabel="count a text",
           xscale="log", ylim=(0, None))  # fmt: skip
    ax.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    ax.minorticks_off()
    ax.legend(loc="upper right")
    return figure


def draw_batch_gain(data: dict[str, Any]) -> Figure:
    """Figure 3 (right) of Yin et al."""
    figure, (left, right) = canvas(_WIDTH, 3.0, 1, 2)
    for (u, gains), colour in zip(data["bernoulli"].items(), _COLOURS, strict=False):
        left.plot(data["drafts"], gains, color=colour, marker="o", ms=2.5, lw=1.2, label=f"draft Ber({u})")
    for (r, gains), colour in zip(data["uniform"].items(), _COLOURS, strict=False):
        right.plot(data["drafts"], gains, color=colour, marker="o", ms=2.5, lw=1.2, label=f"r = {r}")
    left.set_title(f"target Ber({data['bernoulli_target']})")
    right.set_title("draft uniform on V tokens, target on V / r")
    for ax in (left, right):
        ax.set(xlabel="drafts M", ylabel="rejection probability saved")
        ax.set_xticks([1, 5, 10, 15, 20])
        ax.set_ylim(top=1.35 * ax.get_ylim()[1])
        ax.legend(loc="upper left", ncols=2)
    return figure


def draw_front(data: dict[str, Any]) -> Figure:
    """Figure 4 of Yin et al.: the front, OPT on it and UNO above it."""
    figure, (left, right) = canvas(_WIDTH, 3.2, 1, 2)
    tv, points = data["tv"], data["points"]
    epsilons, rejects, losses = ([point[key] for point in points] for key in ("epsilon", "reject", "loss"))
    left.fill_between([0, tv, 1.35 * tv], [tv, 0, 0], [1.5 * tv] * 3, color=SKY, alpha=0.15, lw=0)
    left.plot([0, tv], [tv, 0], color=INK, lw=1.3, label="Pareto front (Theorem 5)")
    for name, colour, marker in (("opt", BLUE, "o"), ("uno", RED, "s")):
        drift, x, y = (
            [point[name][key] for point in points] for key in ("drift", "measured_reject", "measured_drift")
        )
        left.plot(rejects, drift, color=colour, lw=1, label=f"{name}, by formula")
        left.plot(x, y, marker, color=colour, ms=4.5, mfc="none", label=f"{name}, simulated")
        right.plot(epsilons, drift, color=colour, marker=marker, ms=4, lw=1.2, label=name)
    left.text(0.2 * tv, 0.25 * tv, "out of reach", color=GREY, ha="center")
    left.set(xlabel="rejection probability", ylabel="TV(π, p)", xlim=(0, 1.35 * tv), ylim=(0, 1.5 * tv),
             title="(a) one position of the chain")  # fmt: skip
    right.plot(epsilons, losses, color=INK, ls="--", lw=1, label="Loss* (Theorem 4)")
    right.set(xlabel="slack ε in b = min(1, (p + ε)/q)", ylabel="TV(π, p)", title="(b) bias at a slack")
    right.set_ylim(bottom=0)
    left.legend(loc="upper right")
    right.legend(loc="lower right")
    return figure


def draw_trusted(data: dict[str, Any]) -> Figure:
    """Figures 5 and 6 of SPRINTER."""
    figure, (left, right) = canvas(_WIDTH, 3.2, 1, 2)
    for curve, colour in zip(data["curves"], (BLUE, RED), strict=True):
        name = f"$\\eta_{{FP}}$ = {curve['eta_fp']}"
        left.plot(data["eta_tp"], curve["trusted"], color=colour, lw=1.4, label=name)
        right.plot(data["eta_tp"], curve["stop_time"], color=colour, lw=1.4, label=name)
        for point in curve["points"]:
            half = (point["high"] - point["low"]) / 2
            left.errorbar(point["eta_tp"], point["mean"], half, color=colour, fmt="o", ms=3.5, lw=1.2)
    left.errorbar([], [], [], color=GREY, fmt="o", ms=3.5, label="simulated, 99 % interval")
    for ax, key in ((left, "trusted"), (right, "stop_time")):
        low, high = (curve[key][-1] for curve in data["curves"])
        style = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (1.02, low), (1.02, high), arrowprops=style)
        ax.text(1.04, (low + high) / 2, f"{high - low:.1f}", va="center")
        ax.set(xlabel="true-positive rate $\\eta_{TP}$", xlim=(-0.03, 1.12))
        ax.legend(loc="upper left")
    left.set(ylabel="expected tokens trusted E[N]", title=f"Theorem 3.3, r = {data['r']} acceptable tokens")
    right.set(ylabel="expected stopping time (s)", title=f"Theorem 3.4, draft step {data['t_draft']} s")
    return figure


SIMULATIONS: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "yin-figure-2": ("rejections", draw_rejections),
    "short-drafts": ("rejections", draw_short),
    "yin-figure-3": ("batch_gain", draw_batch_gain),
    "yin-figure-4": ("front", draw_front),
    "yin-figure-5": ("longer", draw_rejections),
    "sprinter-figures-5-6": ("trusted", draw_trusted),
}
"""File name of each figure of ``theory simulate`` -> (part of the data, function that draws it)."""


# --- theory pareto ---------------------------------------------------------------------------------------
_LOOKS: dict[str, tuple[str, str]] = {
    "opt": (BLUE, "o"), "mentored": (GREEN, "D"), "lenient": (SKY, "v"), "uno": (RED, "s"), "fuzzy": (PURPLE, "^"),
    "random": (GREY, "x"), "typical": (ORANGE, "P"), "bild": (INK, "*"), "draft-only": (GREY, "D"),
    "allocation": (GREY, "v"), "coin": (GREY, "+"), "sprinter": (ORANGE, "o"), "sprinter, tail 4": (ORANGE, "s"),
    "best prefix-only gate": (INK, ""), "cascade": (INK, "D"), "threshold": (INK, "^"), "relaxed": (PURPLE, "v"),
    "margin": (PURPLE, "s"),
}  # fmt: skip
"""Colour and marker of a method, the same in both panels."""


def _plot(ax: Axes, curve: dict[str, Any], *, line: str = "-", label: str = "", marker: bool = True) -> None:
    colour, shape = _LOOKS.get(curve["name"], (INK, "o"))
    x, y = ([point[axis] for point in curve["points"]] for axis in ("x", "y"))
    label = label or curve["name"]
    if min(y) > ax.get_ylim()[1]:
        label += " (off the picture)"
    ax.plot(x, y, line, color=colour, marker=shape if marker else "", ms=3.8, lw=1.1, label=label,
            mfc="white" if curve["name"].startswith("sprinter") else colour)  # fmt: skip


def _front(ax: Axes, tv: float) -> None:
    ax.fill_between([0, tv], [tv, 0], color=PALE, lw=0)
    ax.plot([0, tv], [tv, 0], color=INK, lw=1.6, label="front (Theorem 5)")


def _exact(ax: Axes, curves: list[dict[str, Any]]) -> None:
    """The exact methods, all at drift 0, in three groups."""
    exact = {curve["name"]: curve["points"] for curve in curves if curve["lossless"]}
    several = exact.keys() & {"batch", "specinfer", "spectr"}
    for label, colour, shape, names in (
        ("speculative, γ = 1 ... 12", INK, "o", exact.keys() & {"speculative"}),
        ("other exact methods", INK, "|", exact.keys() - several - {"speculative"}),
        ("several drafts (exact)", SKY, "d", several),
    ):
        x = [point["x"] for name in sorted(names) for point in exact[name]]
        if not x:
            continue
        size = 7.0 if shape == "|" else 3.8
        ax.plot(x, [0.0] * len(x), shape, color=colour, ms=size, label=label, clip_on=False, zorder=3)


def draw_pareto(data: dict[str, Any]) -> Figure:
    """Rejections or target checks against drift at one position, and target calls against drift in the loop."""
    figure, (left, right, *keys) = canvas(_WIDTH, 5.6, 2, 2, height_ratios=(2, 1))
    tv = data["front"]["tv"]
    for ax in (left, right):
        ax.set_ylim(-0.015 * tv, 1.12 * tv)
    _front(left, tv)
    for curve in data["rules"]:
        _plot(left, curve)
    for curve in data["gates"]:
        oracle = curve["name"].startswith("best")
        _plot(left, curve, line=":" if oracle else "--", label=f"{curve['name']} (checks)", marker=not oracle)
    for ax in (left, right):
        ax.text(0.008, 0.01 * tv, "out of reach\nof one draft", color=GREY, fontsize=7, va="bottom")
    left.set(xlabel="share of tokens that needed the target:\nrejected (rules that see p), checked (gates, dashed)",
             ylabel="mean drift TV(π, p)", title="(a) at one position", xlim=(0, 1.02))  # fmt: skip
    _front(right, tv)
    _exact(right, data["loop"])
    for curve in data["loop"]:
        if not curve["lossless"]:
            _plot(right, curve, line="--" if curve["name"].startswith(("sprinter", "coin")) else "-")
    right.set(xlabel="target calls a new token", title="(b) in the loop, drafts of 5 unless varied",
              xlim=(0, None))  # fmt: skip
    for ax, key in zip((left, right), keys, strict=True):
        key.set_axis_off()
        key.legend(*ax.get_legend_handles_labels(), loc="upper center", ncols=2, fontsize=7.5, handlelength=1.6,
                   columnspacing=1, borderaxespad=0)  # fmt: skip
    return figure


# --- theory fleet ----------------------------------------------------------------------------------------
def draw_fleet(data: dict[str, Any]) -> Figure:
    """Tokens a second and milliseconds a token against the number of streams, by method."""
    figure, (left, right) = canvas(_WIDTH, 3.2, 1, 2)
    looks = {"plain": (INK, "o"), "exact": (BLUE, "s"), "trust": (ORANGE, "^")}
    for method, (colour, marker) in looks.items():
        mine = [one for one in data["forecasts"] if one["method"] == method]
        x = [one["streams"] for one in mine]
        token_ms = [one["token_ms"][0] if one["token_ms"] else float("nan") for one in mine]
        for ax, y in ((left, [one["tokens_per_s"] for one in mine]), (right, token_ms)):
            ax.plot(x, y, color=colour, marker=marker, ms=4, lw=1.2, label=method)
    left.set(ylabel="tokens/s", title="throughput (predicted)")
    right.set(ylabel="ms a token (median text)", title="time between tokens (predicted)")
    for ax in (left, right):
        ax.set(xlabel="streams", xscale="log", yscale="log")
        ax.set_xticks(x, [str(n) for n in x])
        ax.minorticks_off()
        ax.legend()
    return figure
