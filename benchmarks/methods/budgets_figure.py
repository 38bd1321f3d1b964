"""Speed against drift, budgets beside fixed settings: docs/figures/budgets.png.

Run: python benchmarks/methods/budgets_figure.py    (from the results of budgets.py)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import ROOT, document, option_parser, print_written
from sprinter.theory.figures import save as save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = {
    "builtin": "the built-in pair",
    "qwen": "Qwen2.5-Coder 1.5 B, 0.5 B",
    "smollm2": "SmolLM2, distilled draft",
}
_BUDGETED = {
    "auto": ("#0072B2", "o"), "sprinter(tail=3)": ("#D55E00", "s"), "certain(tail=3)": ("#009E73", "^"),
    "opt(epsilon=0.4)": ("#CC79A7", "D"), "fuzzy(threshold=0.6)": ("#8A8A8A", "v"),
}  # fmt: skip
_FIXED = {"sprinter": ("#D55E00", "--"), "certain": ("#009E73", "--")}


def draw(results: dict[str, Any]) -> Figure:
    """A panel for each pair: budgets as points, fixed settings as dashed lines, exact methods as crosses."""
    from matplotlib.figure import Figure

    pairs = results["pairs"]
    figure = Figure(figsize=(3.4 * len(pairs), 3.9), layout="constrained")
    panels = figure.subplots(1, len(pairs), squeeze=False)[0]
    for panel, (name, of) in zip(panels, pairs.items(), strict=True):
        _pair(panel, _TITLES.get(name, name), of["arms"])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside upper center", ncols=4)
    return figure


def _pair(panel: Axes, title: str, arms: list[dict[str, Any]]) -> None:
    def points(chosen: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
        found = sorted((arm["summary"]["drift"][0], 1 / arm["summary"]["cost"][0]) for arm in chosen)
        return [drift for drift, _ in found], [speed for _, speed in found]

    for method, (colour, marker) in _BUDGETED.items():
        own = [arm for arm in arms if arm["method"] == method and arm["budget"] is not None]
        panel.plot(*points(own), color=colour, marker=marker, ms=4, lw=1.2, label=f"{method} within a budget")
    for dial, (colour, line) in _FIXED.items():
        own = [arm for arm in arms if arm["dial"] == dial]
        panel.plot(*points(own), line, color=colour, lw=1.0, label=f"{dial}, fixed settings")
    exact = [arm for arm in arms if arm["dial"] == "exact"]
    panel.plot(*points(exact), "x", color="black", ms=5, label="exact methods")
    panel.axhline(1.0, color="black", lw=0.6, ls=":")
    panel.set(title=title, xlabel="mean TV drift a token", xlim=(-0.005, 0.21), ylim=(0, None))
    panel.set_ylabel("expected speed over plain decoding")


def main() -> None:
    """Read, draw, save."""
    option_parser(__doc__, data=False).parse_args()
    path = ROOT / "benchmarks" / "results" / "methods" / "budgets.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    print_written("methods/budgets_figure", save_figure(draw, results, document("figures/budgets.png")))


if __name__ == "__main__":
    main()
