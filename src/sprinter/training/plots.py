"""Figures of a report: three PNG files, legible at the width of a README. Needs matplotlib (extra ``plots``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sprinter.files import write_atomic
from sprinter.plots import COLOURS, canvas, png
from sprinter.training.metrics import Curve
from sprinter.training.roc import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

# markers and line styles encode the signal too
_OWN = (COLOURS["blue"], "-", "o")
_STYLES: Mapping[str, tuple[str, str, str]] = {
    "max q": (COLOURS["orange"], "--", "s"),
    "entropy": (COLOURS["green"], ":", "^"),
    "q(x)": (COLOURS["purple"], "-.", "D"),
}
_GREY = COLOURS["grey"]


def draw(report: Report, directory: Path) -> list[Path]:
    """Write roc.png, precision-recall.png and gate.png, and return their paths.

    Raises:
        UserError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    figures: dict[str, Callable[[], Figure]] = {
        "roc": lambda: _curves(report, "roc", ("false positive rate", "true positive rate")),
        "precision-recall": lambda: _curves(report, "precision_recall", ("recall", "precision")),
        "gate": lambda: _overview(report),
    }
    pictures = {directory / f"{title}.png": png(make, 150) for title, make in figures.items()}
    directory.mkdir(parents=True, exist_ok=True)
    return [write_atomic(path, picture) for path, picture in pictures.items()]


def _line(panel: Axes, curve: Curve, signal: str, label: str, width: float = 1.4) -> None:
    colour, style, _ = _STYLES.get(signal, _OWN)
    panel.plot(curve.x, curve.y, style, color=colour, linewidth=width, label=label)
    panel.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)


def _curves(report: Report, which: str, axes: tuple[str, str]) -> Figure:
    """One panel per label, one line per signal, with the 95 % band."""
    columns = min(4, len(report.truths))
    rows = -(-len(report.truths) // columns)
    figure, panels = canvas(9, 0.5 + 2.4 * rows, rows, columns, sharex=True, sharey=True)
    for panel, (label, truth) in zip(panels, report.truths.items(), strict=False):
        for signal, found in truth.signals.items():
            curve = found.roc if which == "roc" else found.precision_recall.tail()
            _line(panel, curve, signal, signal)
        if which == "roc":
            panel.plot([0, 1], [0, 1], color=_GREY, linewidth=0.8)
        else:
            panel.axhline(truth.share, color=_GREY, linewidth=0.8)
        own = truth.signals[report.kind]
        area = own.auc if which == "roc" else own.average_precision
        panel.set_title(f"{_title(label)}\n{'AUC' if which == 'roc' else 'AP'} {area}")
        panel.set(xlim=(0, 1), ylim=(0, 1.01), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    for panel in panels[len(report.truths) :]:
        panel.set_visible(False)
    figure.supxlabel(axes[0], fontsize=9)
    figure.supylabel(axes[1], fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _overview(report: Report) -> Figure:
    figure, panels = canvas(9, 3.6, 1, 3, width_ratios=(1.25, 1, 1))
    _areas(panels[0], report)
    _calibration(panels[1], report)
    _rates(panels[2], report)
    return figure


def _areas(panel: Axes, report: Report) -> None:
    """AUC with its interval, one row per label."""
    labels, signals = list(report.truths), report.signals
    for place, signal in enumerate(signals):
        found = [report.truths[label].signals[signal].auc for label in labels]
        colour, _, mark = _STYLES.get(signal, _OWN)
        rows = [row + 0.2 * (place - (len(signals) - 1) / 2) for row in range(len(labels))]
        middle = [area.value for area in found]
        reach = [[area.value - area.low for area in found], [area.high - area.value for area in found]]
        panel.errorbar(
            middle, rows, xerr=[[max(0.0, value) for value in side] for side in reach], fmt=mark, color=colour,
            markersize=3.5, linewidth=1.2, label=signal,
        )  # fmt: skip
    panel.set_yticks(range(len(labels)), [_title(label) for label in labels])
    panel.invert_yaxis()
    panel.axvline(0.5, color=_GREY, linewidth=0.8)
    panel.set(xlabel="AU-ROC (95 % interval)", title="separation")
    panel.legend(loc="upper center", bbox_to_anchor=(0.35, -0.17), ncols=len(signals), handletextpad=0.2,
                 columnspacing=0.8)  # fmt: skip


def _calibration(panel: Axes, report: Report) -> None:
    curve = report.calibration
    low, high = (curve.y - curve.low).clamp(min=0), (curve.high - curve.y).clamp(min=0)
    panel.plot([0, 1], [0, 1], color=_GREY, linewidth=0.8)
    panel.errorbar(
        curve.x, curve.y, yerr=[low.tolist(), high.tolist()], fmt="o-", color=_OWN[0], markersize=3.5
    )  # fmt: skip
    panel.set(xlim=(0, 1), ylim=(0, 1), xlabel="score", ylabel=f"mean of {_title(report.label)}")
    panel.set_title(f"calibration (error {report.calibration_error:.3f})")


def _rates(panel: Axes, report: Report) -> None:
    """η_TP and η_FP over τ for the paper's labels; the thickest line is the strictest label."""
    ratios = [label for label in report.truths if label.startswith("ratio") and "greedy" not in label]
    chosen: Sequence[str] = ratios or list(report.truths)[:1]
    for which, (signal, name) in enumerate(((report.kind, "η_TP"), ("max q", "η_FP"))):
        for place, label in enumerate(chosen):
            _line(
                panel,
                report.truths[label].rates[which],
                signal,
                f"{name}, {_short(label)}",
                1.8 - 0.5 * place,
            )
    panel.axvline(report.tau, color=_GREY, linewidth=0.8)
    panel.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="threshold τ", ylabel="share that scores at least τ")
    panel.set_title("kept at τ")
    panel.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, handlelength=1.4, columnspacing=0.8
    )


_TITLES = {
    "overlap(temperature=1.0)": "overlap β",
    "overlap above its median": "overlap β > median",
    "agreement": "argmax agrees",
    "accept(at=text)": "accept x (soft)",
    "accept(at=drawn)": "accept x (soft)",
}


def _title(label: str) -> str:
    """Short name of a label in figures."""
    if label in _TITLES:
        return _TITLES[label]
    if label.startswith("ratio("):
        place = "greedy x" if "greedy" in label else "x ~ q"
        return f"q/p ≤ {_lambda(label)}, {place}"
    return label


def _short(label: str) -> str:
    return f"λ = {_lambda(label)}" if label.startswith("ratio(") else _title(label)


def _lambda(label: str) -> str:
    return f"{float(label.partition('lambda=')[2].partition(',')[0]):g}"
