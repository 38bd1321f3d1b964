"""One picture of what captured passes bring: docs/figures/engine.png.

Run: python benchmarks/engine/figure.py    (from the results of decoding.py, batch.py and passes.py)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import ROOT, document, option_parser, print_written
from sprinter.theory.figures import save as save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
DRIFT = 0.15
_OURS, _HALF, _VLLM, _THEIRS = "#0072B2", "#D55E00", "#009E73", "#8A8A8A"
_DTYPES = {"float32": _OURS, "bfloat16": _HALF}
_BATCH = {
    "autoregressive": ("ours, float32", _OURS, "-"),
    "autoregressive, bfloat16": ("ours, bfloat16", _HALF, "-"),
    "vllm float32": ("vLLM, float32", _VLLM, "-"),
    "vllm bfloat16": ("vLLM, bfloat16", _VLLM, "--"),
    "transformers": ("transformers, float32", _THEIRS, "-"),
}


def draw(results: Results) -> Figure:
    """Speed against drift for both targets; tokens/s against rows, and what a pass over n tokens costs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 7.0), layout="constrained")
    (left, right), (rows, passes) = figure.subplots(2, 2)
    _dial(left, results["decoding"]["builtin"]["1"], "the built-in pair")
    _dial(right, results["decoding"]["enlarged"]["1"], "its target at the cost of a 17 M one")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside upper center", ncols=4)
    _rows(rows, results["batch"]["speeds"])
    _passes(passes, results["passes"]["passes"])
    return figure


def _dial(panel: Axes, part: Results, title: str) -> None:
    found = {row["arm"]: row for row in part["rows"]}
    for dtype, colour in _DTYPES.items():
        own = [row for arm, row in found.items() if arm.endswith(f", {dtype}")]
        dial = [row for row in own if row["arm"].startswith("sprinter") and "tail" not in row["arm"]]
        tails = [row for row in own if "tail" in row["arm"]]
        exact = [row for row in own if row["arm"].startswith("speculative")]
        _points(
            panel, sorted(dial, key=lambda row: row["mean_drift"]), colour, "o", "-", f"sprinter, {dtype}"
        )
        _points(panel, tails, colour, "^", "", f"sprinter with a tail, {dtype}")
        _points(panel, exact, colour, "v", "", f"exact speculation, {dtype}")
        plain = found[f"autoregressive, {dtype}"]["over_transformers"][0]
        panel.axhline(plain, color=colour, lw=0.9, ls="--", label=f"plain, {dtype}")
    vllm = max(row["over_transformers"][0] for arm, row in found.items() if arm.startswith("vllm:"))
    panel.axhline(vllm, color=_VLLM, lw=1.2, label="vLLM, its fastest")
    panel.axhline(1, color=_THEIRS, lw=1.2, label="transformers, plain")
    panel.axvline(DRIFT, color=_THEIRS, lw=0.8, ls=":")
    panel.set(
        title=title, xlabel="mean drift, temperature 1", ylabel="tokens/s over transformers", ylim=(0, None)
    )


def _points(panel: Axes, rows: list[Any], colour: str, mark: str, line: str, label: str) -> None:
    if not rows:
        return
    x, y = [row["mean_drift"] for row in rows], [row["over_transformers"] for row in rows]
    error = [[value - low for value, low, _ in y], [high - value for value, _, high in y]]
    panel.errorbar(
        x, [value for value, _, _ in y], error, color=colour, marker=mark, ms=4, ls=line, lw=1.2, elinewidth=0.8,
        label=label,
    )  # fmt: skip


def _rows(panel: Axes, rows: list[Any]) -> None:
    for arm, (label, colour, line) in _BATCH.items():
        own = [row for row in rows if row["arm"] == arm]
        panel.plot(
            [row["batch"] for row in own], [row["tokens_per_s"] for row in own], line, color=colour, marker=".",
            lw=1.2, label=label,
        )  # fmt: skip
    panel.set_xscale("log", base=2)
    ticks = sorted({row["batch"] for row in rows} - {10})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    most = max(row["tokens_per_s"] for row in rows)
    panel.set(title="many rows, plain decoding, built-in target", xlabel="rows", ylabel="tokens/s")
    panel.set_ylim(0, 1.45 * most)  # room for the legend
    panel.legend(fontsize=8, loc="upper left")


def _passes(panel: Axes, parts: Results) -> None:
    for model, line in (("target", "-"), ("draft", "--")):
        for dtype, colour in _DTYPES.items():
            costs = parts[f"{model}, {dtype}"]["us"]
            sizes = [int(n) for n in costs if int(n) <= 16]
            panel.plot(
                sizes, [costs[str(n)]["captured"] for n in sizes], line, color=colour, marker=".", lw=1.2,
                label=f"{model}, {dtype}",
            )  # fmt: skip
    panel.set(
        title="a captured pass, built-in pair", xlabel="tokens in it", ylabel="microseconds", ylim=(0, None)
    )
    panel.legend(fontsize=8)


def main() -> None:
    """Read, draw, save."""
    option_parser(__doc__, data=False).parse_args()
    folder = ROOT / "benchmarks" / "results" / "engine"
    names = ("decoding", "batch", "passes")
    results = {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in names}
    print_written("engine/figure", save_figure(draw, results, document("figures/engine.png")))


if __name__ == "__main__":
    main()
