"""Speed against drift of everything that a tuning tried: as PNG, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sprinter.plots import COLOURS, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_tuning", "plot_text"]

BLUE, GREY, INK, RED = (COLOURS[name] for name in ("blue", "grey", "ink", "red"))
_WIDTH, _HEIGHT = 64, 16  # characters of the text plot


def draw_tuning(profile: Mapping[str, Any]) -> Figure:
    """Speed-up over mean drift: predictions, measured settings with intervals, the front, and what was chosen."""
    figure, (ax,) = canvas(8.3, 4.6)
    entries = {one["spec"]: one for one in profile["settings"]}
    early = [one["measured"] for one in profile["front"] if one["measured"] and one["spec"] not in entries]
    _dots(
        ax,
        [one["predicted"] for one in profile["front"]],
        "expected by replay",
        marker=".",
        color=GREY,
        alpha=0.5,
    )
    if early:
        _dots(ax, early, "early rounds", marker="o", mfc="white", color=BLUE, ms=4)
    x, y = (np.array([one[key] for one in entries.values()], dtype=float) for key in ("drift", "speed_up"))
    across, up = (
        np.nan_to_num(np.abs(of[:, 1:] - of[:, :1]).T) for of in (x, y)
    )  # no interval: of one prompt
    ax.errorbar(x[:, 0], y[:, 0], yerr=up, xerr=across, fmt="o", color=BLUE, ms=4.5, lw=1, capsize=2,
                label="finalists, 95 %")  # fmt: skip
    allowed = sorted((one["drift"][0], one["speed_up"][0]) for one in entries.values() if one["allowed"])
    best = np.maximum.accumulate([speed for _, speed in allowed])
    right = max(*x[:, 0], 0.01) * 1.05
    ax.step([*(drift for drift, _ in allowed), right], [*best, best[-1]], where="post", color=INK, lw=1.1,
            label="front of the finalists")  # fmt: skip
    for i, spec in enumerate(dict.fromkeys(one["spec"] for one in profile["chosen"])):
        at = entries[spec]["drift"][0], entries[spec]["speed_up"][0]
        ax.plot(*at, "*", color=RED, ms=11, zorder=4, label=None if i else "chosen")
        left = at[0] > right / 2  # the label is left of a point on the right
        ax.annotate(spec, at, xytext=(-6 if left else 6, 16 if left else 8), textcoords="offset points", fontsize=7.5,
                    color=INK, ha="right" if left else "left")  # fmt: skip
    for budget in profile["goal"]["budgets"] if profile["goal"]["budget_unit"] == "drift" else ():
        ax.axvline(budget, color=GREY, lw=0.9, ls=":")
        ax.annotate(f"budget {budget:g}", (budget, 0.01), xycoords=("data", "axes fraction"), fontsize=7.5,
                    color=GREY, ha="right", va="bottom")  # fmt: skip
    ax.axhline(1.0, color=GREY, lw=0.9)
    ax.set(xlabel="mean drift TV(π, p) a token", ylabel="speed relative to plain decoding")
    ax.set_title(f"{profile['prompts']['count']} prompts, temperature {profile['sampling']['temperature']:g}")
    ax.set_xlim(left=-0.03 * (ax.get_xlim()[1] or 1.0))
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def _dots(ax: Axes, points: Sequence[Mapping[str, float]], label: str, **look: Any) -> None:
    ax.plot([one["drift"] for one in points], [one["speed_up"] for one in points], ls="", label=label, **look)


def plot_text(profile: Mapping[str, Any]) -> str:
    """The same as lines of text: · expected, o measured, # a finalist, * chosen."""
    width, height = _WIDTH, _HEIGHT
    chosen, finals = {one["spec"] for one in profile["chosen"]}, profile["settings"]
    points = [(one["predicted"]["drift"], one["predicted"]["speed_up"], "·") for one in profile["front"]]
    measured = [one["measured"] for one in profile["front"] if one["measured"]]
    points += [(one["drift"], one["speed_up"], "o") for one in measured]
    points += [(one["drift"][0], one["speed_up"][0], "#") for one in finals]
    points += [(one["drift"][0], one["speed_up"][0], "*") for one in finals if one["spec"] in chosen]
    right = max([x for x, _, _ in points] + [1e-3])
    low, high = min(y for _, y, _ in points), max(y for _, y, _ in points)
    span = max(1e-6, high - low)
    grid = [[" "] * width for _ in range(height)]
    for x, y, mark in points:  # later marks cover earlier ones
        grid[round((high - y) / span * (height - 1))][round(x / right * (width - 1))] = mark
    lines = ["speed relative to plain decoding (· expected, o measured, # finalist, * chosen)"]
    for i, row in enumerate(grid):
        label = f"{high - span * i / (height - 1):6.2f}" if i % 5 == 0 else " " * 6
        lines.append(f"{label} |{''.join(row).rstrip()}")
    lines += [f"{'':6} +{'-' * width}", f"{'':8}0{f'{right:.3f}':>{width - 1}}  mean drift a token"]
    return "\n".join(lines)
