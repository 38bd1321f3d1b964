"""Draw the figure of docs/studies/gate-signals.md from benchmarks/results/.

python scripts/make_study_figures.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from figures_base import BLUE, GREEN, GREY, INK, ORANGE, RED, STYLE, save

ROOT = Path(__file__).resolve().parent.parent
SHOWN = {  # gate -> (label, colour, marker)
    "coin": ("a coin", GREY, "o"),
    "paper, λ=1.2": ("the paper's: linear, ratio(λ=1.2)", RED, "s"),
    "overlap, entropy only": ("entropy alone", ORANGE, "^"),
    "overlap": ("linear, overlap", GREEN, "D"),
    "own overlap, mlp, hidden, law and T": ("default: mlp on state, law and T", BLUE, "v"),
}


def main() -> None:
    """Draw it."""
    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    path = ROOT / "benchmarks" / "results" / "gate" / "study_builtin.json"
    figure, out = gate_signals(json.loads(path.read_text(encoding="utf-8")))
    save(figure, ROOT / "docs" / "studies" / "figures" / f"{out}.png")


def gate_signals(results: dict[str, Any]) -> tuple[Figure, str]:
    """Target calls a token against drift at three temperatures, built-in pair."""
    fig, axes = plt.subplots(1, 3, figsize=(9.2, 3.3), sharey=True, layout="constrained")
    for ax, temperature in zip(axes, ("1.0", "0.7", "0.0"), strict=True):
        curve = results["curves"][temperature]
        for name, (label, colour, marker) in SHOWN.items():
            if name in curve["points"]:
                points = sorted([curve["plain"], *curve["points"][name]])
                ax.plot(
                    *zip(*points, strict=True), "-", color=colour, marker=marker, ms=3.5, lw=1.1, label=label
                )
        ax.plot(*curve["plain"], "o", color=INK, ms=4)
        ax.set(
            xlabel="mean drift",
            title=f"temperature {float(temperature):g}",
            xlim=(-0.005, None),
            ylim=(0, None),
        )
    axes[0].set_ylabel("target calls a token")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(labels), columnspacing=1.2)
    return fig, "gate-signals"


if __name__ == "__main__":
    main()
