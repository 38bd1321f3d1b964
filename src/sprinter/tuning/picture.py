"""Speed against drift of everything that a tuning tried: as PNG, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    _predictions(ax, profile["front"])
    _eliminated(ax, profile)
    _finalists(ax, profile["settings"])
    _steps(ax, profile["settings"])
    _names(ax, profile)
    for budget in profile["goal"]["budgets"] if profile["goal"]["coin"] == "drift" else ():
        ax.axvline(budget, color=GREY, lw=0.9, ls=":")
        ax.annotate(f"budget {budget:g}", (budget, 0.01), xycoords=("data", "axes fraction"), fontsize=7.5,
                    color=GREY, ha="right", va="bottom")  # fmt: skip
    ax.axhline(1.0, color=GREY, lw=0.9)
    ax.set(xlabel="mean drift TV(π, p) a token", ylabel="speed relative to plain decoding")
    ax.set_title(f"{profile['prompts']['count']} prompts, temperature {profile['sampling']['temperature']:g}")
    ax.set_xlim(left=-0.03 * (ax.get_xlim()[1] or 1.0))
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def _predictions(ax: Axes, front: Sequence[Mapping[str, Any]]) -> None:
    points = [one["predicted"] for one in front]
    ax.plot([one["drift"] for one in points], [one["speed_up"] for one in points], ".", color=GREY, alpha=0.5, ms=5,
            label="expected by replay")  # fmt: skip


def _eliminated(ax: Axes, profile: Mapping[str, Any]) -> None:
    finals = {one["spec"] for one in profile["settings"]}
    points = [one["measured"] for one in profile["front"] if one["measured"] and one["spec"] not in finals]
    if points:
        ax.plot([one["drift"] for one in points], [one["speed_up"] for one in points], "o", mfc="white", color=BLUE,
                ms=4, lw=0, label="early rounds")  # fmt: skip


def _finalists(ax: Axes, settings: Sequence[Mapping[str, Any]]) -> None:
    x, y = [one["drift"][0] for one in settings], [one["speed_up"][0] for one in settings]
    errors = [_error(one["speed_up"]) for one in settings]
    across = [_error(one["drift"]) for one in settings]
    ax.errorbar(x, y, yerr=list(zip(*errors, strict=True)), xerr=list(zip(*across, strict=True)), fmt="o", color=BLUE,
                ms=4.5, lw=1, capsize=2, label="finalists, 95 %")  # fmt: skip


def _error(interval: Sequence[float | None]) -> tuple[float, float]:
    value, low, high = interval
    if value is None or low is None or high is None:
        return 0.0, 0.0
    return max(0.0, value - low), max(0.0, high - value)


def _steps(ax: Axes, settings: Sequence[Mapping[str, Any]]) -> None:
    """The best measured speed within each drift, as a staircase."""
    best, xs, ys = 0.0, [], []
    for drift, speed in sorted((one["drift"][0], one["speed_up"][0]) for one in settings if one["allowed"]):
        if speed > best:
            best = speed
            xs.append(drift)
            ys.append(speed)
    right = max([*(one["drift"][0] for one in settings), *xs, 0.01]) * 1.05
    ax.step([*xs, right], [*ys, best], where="post", color=INK, lw=1.1, label="front of the finalists")


def _names(ax: Axes, profile: Mapping[str, Any]) -> None:
    found = {one["spec"]: one for one in profile["settings"]}
    right = max(one["drift"][0] for one in profile["settings"])
    for i, spec in enumerate(dict.fromkeys(one["spec"] for one in profile["chosen"])):
        entry = found[spec]
        at = entry["drift"][0], entry["speed_up"][0]
        label = "chosen" if i == 0 else None
        ax.plot(*at, "*", color=RED, ms=11, zorder=4, label=label)
        left = at[0] > right / 2  # the label is left of a point on the right
        ax.annotate(spec, at, xytext=(-6 if left else 6, 16 if left else 8), textcoords="offset points", fontsize=7.5,
                    color=INK, ha="right" if left else "left")  # fmt: skip


def plot_text(profile: Mapping[str, Any], width: int = _WIDTH, height: int = _HEIGHT) -> str:
    """The same as lines of text: · expected, o measured, # a finalist, * chosen.

    Args:
        width, height: of the plot without its axes, in characters.
    """
    chosen = {one["spec"] for one in profile["chosen"]}
    points = [(one["predicted"]["drift"], one["predicted"]["speed_up"], "·") for one in profile["front"]]
    points += [
        (one["measured"]["drift"], one["measured"]["speed_up"], "o")
        for one in profile["front"]
        if one["measured"]
    ]
    points += [(one["drift"][0], one["speed_up"][0], "#") for one in profile["settings"]]
    points += [
        (one["drift"][0], one["speed_up"][0], "*") for one in profile["settings"] if one["spec"] in chosen
    ]
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
