"""Draw the figures of docs/studies/ from benchmarks/results/.

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


DIALS = {  # on the real pair: dial -> (label, colour, marker)
    "coin": ("a coin", GREY, "o"),
    "paper: linear, λ=1.2, greedy": ("the paper's gate", RED, "s"),
    "mlp": ("gate: mlp on state and law", BLUE, "v"),
    "certain, entropy": ("certain: entropy", ORANGE, "^"),
    "certain, margin": ("certain: margin", GREEN, "D"),
    "online": ("online", INK, "x"),
}
FAMILIES = {  # beginning of an arm's name -> (label, colour, marker)
    "certain": ("certain", ORANGE, "^"),
    "sprinter": ("sprinter", BLUE, "v"),
    "fuzzy": ("fuzzy", RED, "s"),
    "coin": ("a coin", GREY, "o"),
    "draft-only": ("draft alone", INK, "P"),
    "": ("other lossy methods", GREEN, "D"),
}


def main() -> None:
    """Draw every figure whose results are there."""
    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    for name, draw in {
        "gate/study_builtin": (gate_signals,),
        "real/gates": (real_dials,),
        "real/quality": (drift_and_quality, lossy_answers),
        "real/sampled": (lossy_drift,),
    }.items():
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        if path.is_file():
            for each in draw:
                figure, out = each(json.loads(path.read_text(encoding="utf-8")))
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


def real_dials(results: dict[str, Any]) -> tuple[Figure, str]:
    """Target calls a token against drift on a real pair: all prompts, then each kind."""
    curves = results["curves"]
    fig, axes = plt.subplots(
        1, len(curves), figsize=(2.1 * len(curves) + 1, 3.1), sharey=True, layout="constrained"
    )
    for ax, (kind, dials) in zip(axes, curves.items(), strict=True):
        for name, (label, colour, marker) in DIALS.items():
            points = sorted((one["drift"], one["calls"]) for one in [*dials["nothing trusted"], *dials[name]])
            ax.plot(*zip(*points, strict=True), "-", color=colour, marker=marker, ms=3, lw=1.1, label=label)
        exact = [dials[name][0]["calls"] for name in dials if name.startswith("exact")]
        ax.plot(0, min(exact), "*", color=INK, ms=9, label="best exact method", clip_on=False)
        ax.set(
            xlabel="mean drift",
            title=f"{kind} ({results['texts'][kind]})",
            xlim=(-0.005, 0.25),
            ylim=(0, 0.65),
        )
    axes[0].set_ylabel("target calls a token")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, columnspacing=1.2)
    return fig, "real-dials"


def drift_and_quality(results: dict[str, Any]) -> tuple[Figure, str]:
    """Change of accuracy against mean drift, an arm a point, with intervals; exact methods show the noise."""
    suites = sorted({row["suite"] for row in results["rows"]})
    fig, axes = plt.subplots(
        1, len(suites), figsize=(4.4 * len(suites), 3.6), sharey=True, layout="constrained"
    )
    for ax, suite in zip(axes, suites, strict=True):
        for row in results["rows"]:
            if row["suite"] != suite or not row["accuracy_change"] or not row["mean_drift"]:
                continue
            start = next(start for start in FAMILIES if row["arm"].startswith(start))
            label, colour, marker = FAMILIES[start]
            if row["mean_drift"][0] == 0:
                label, colour, marker = "exact methods", "black", "."
            change, low, high = row["accuracy_change"]
            ax.errorbar(
                row["mean_drift"][0], change, yerr=[[change - low], [high - change]], fmt=marker, color=colour, ms=5,
                lw=0.8, alpha=0.85, label=label,
            )  # fmt: skip
        ax.axhline(0, color=GREY, lw=0.8)
        ax.set(xlabel="mean drift", title=suite, xlim=(-0.005, None))
    axes[0].set_ylabel("accuracy minus the target's")
    named = {
        label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    fig.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named), columnspacing=1.2)
    return fig, "drift-and-quality"


def lossy_drift(results: dict[str, Any]) -> tuple[Figure, str]:
    """Mean drift against target calls a token at temperature 1, a lossy mode a point, a panel a kind of prompt."""
    return _plane(results["rows"], "mean_drift", "mean drift (TV a token)"), "lossy-drift"


def lossy_answers(results: dict[str, Any]) -> tuple[Figure, str]:
    """Change of accuracy against target calls a token, greedy, an arm a point."""
    return _plane(results["rows"], "accuracy_change", "accuracy minus the target's"), "lossy-answers"


def _plane(rows: list[dict[str, Any]], value: str, label: str) -> Figure:
    """A measure against target calls a token, a panel a suite; every point has its number in the legend below."""
    suites = sorted({row["suite"] for row in rows})
    shown = [
        row for row in rows if row[value] and row["target_calls_per_token"] and row["arm"] != "autoregressive"
    ]
    arms = list(dict.fromkeys(row["arm"] for row in shown))
    columns = 3
    fig, axes = plt.subplots(
        1, len(suites), figsize=(3.6 * len(suites), 3.4 + 0.17 * -(-len(arms) // columns)), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for ax, suite in zip(axes[0], suites, strict=True):
        for row in shown:
            if row["suite"] != suite:
                continue
            _, colour, _ = FAMILIES[next(start for start in FAMILIES if row["arm"].startswith(start))]
            x, y = row["target_calls_per_token"][0], row[value][0]
            ax.plot(x, y, ".", color=colour, ms=4)
            ax.annotate(
                str(arms.index(row["arm"]) + 1), (x, y), xytext=(3, 2), textcoords="offset points", fontsize=6.5,
                color=colour,
            )  # fmt: skip
        ax.axhline(0, color=GREY, lw=0.8)
        ax.locator_params(axis="x", nbins=5)
        ax.set(xlabel="target calls a token", title=suite)
    axes[0][0].set_ylabel(label)
    handles = [plt.Line2D([], [], ls="", label=f"{i}  {arm}") for i, arm in enumerate(arms, 1)]
    fig.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=6.5,
        handlelength=0,
        handletextpad=0,
    )
    return fig


if __name__ == "__main__":
    main()
