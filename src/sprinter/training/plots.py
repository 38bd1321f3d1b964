"""Figures of a report: three PNG files, legible at the width of a README. Needs matplotlib (extra ``plots``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprinter.errors import UserError, install_line
from sprinter.training.metrics import Curve
from sprinter.training.roc import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_matplotlib", "draw"]

# Okabe and Ito's palette; markers and line styles encode the signal too
_OWN = ("#0072B2", "-", "o")
_STYLES: Mapping[str, tuple[str, str, str]] = {
    "max q": ("#E69F00", "--", "s"),
    "entropy": ("#009E73", ":", "^"),
    "q(x)": ("#CC79A7", "-.", "D"),
}
_GREY = "#8A8A8A"
_LOOK: Any = {
    "font.size": 9, "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 9, "axes.titlelocation": "left", "legend.frameon": False, "figure.facecolor": "white",
    "legend.fontsize": 8.5,
}  # fmt: skip
_DPI = 150


def check_matplotlib() -> None:
    """Raise a UserError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise UserError(
            f"pictures need matplotlib: {install_line('plots')}, or leave --out away for numbers alone"
        )


def draw(report: Report, directory: Path) -> list[Path]:
    """Write roc.png, precision-recall.png and gate.png, and return their paths.

    Raises:
        UserError: matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib

    directory.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_LOOK):
        figures = {
            "roc": _curves(report, "roc", ("false positive rate", "true positive rate")),
            "precision-recall": _curves(report, "precision_recall", ("recall", "precision")),
            "gate": _overview(report),
        }
        return [_save(figure, directory / f"{title}.png") for title, figure in figures.items()]


def _save(figure: Figure, path: Path) -> Path:
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=_DPI)
    part.replace(path)
    return path


def _canvas(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(panels.flat)


def _line(panel: Axes, curve: Curve, signal: str, label: str, width: float = 1.4) -> None:
    colour, style, _ = _STYLES.get(signal, _OWN)
    panel.plot(curve.x, curve.y, style, color=colour, linewidth=width, label=label)
    panel.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)


def _curves(report: Report, which: str, axes: tuple[str, str]) -> Figure:
    """One panel per label, one line per signal, with the 95 % band."""
    columns = min(4, len(report.truths))
    rows = -(-len(report.truths) // columns)
    figure, panels = _canvas(rows, columns, 0.5 + 2.4 * rows, sharex=True, sharey=True)
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
    figure, panels = _canvas(1, 3, 3.6, width_ratios=(1.25, 1, 1))
    _areas(panels[0], report)
    _calibration(panels[1], report)
    _rates(panels[2], report)
    return figure


def _areas(panel: Axes, report: Report) -> None:
    """AUC with its interval, one row per label."""
    labels = list(report.truths)
    signals = list(report.truths[labels[0]].signals)
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
