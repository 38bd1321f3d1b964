"""Tables, words and one figure from the results of speed.py.

Run: python benchmarks/llamacpp/tables.py    (from benchmarks/results/llamacpp/speed.json)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

from benchmarks.common import RESULTS, ROOT, cells, document, option_parser, print_written
from sprinter.files import write_atomic
from sprinter.theory.figures import save as save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
DRIFT = 0.15
"""The bound within which a method is to gain."""
BEGIN, END = "<!-- llamacpp:begin -->", "<!-- llamacpp:end -->"
_STYLES = {
    "sprinter": ("#0072B2", "o"),
    "opt": ("#D55E00", "s"),
    "fuzzy": ("#009E73", "^"),
    "lookup": ("#CC79A7", "D"),
    "speculative": ("#444444", "v"),
}
Results = Mapping[str, Any]


def predict(row: Results, plain: Results, costs: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """What a token costs in passes alone, by its counts and the passes' measured costs, and what that would gain.

    Where drafts have no fixed length each call reads another number of tokens, and llama.cpp makes its graph anew.

    Returns:
        tokens_per_call, read_per_call (tokens that a target call reads), pass_over_one (what such a pass costs in
        passes over one token), draft_over_target (a draft step likewise), models_ms and host_ms a token (in passes and
        the prompt's, and all that was measured besides), predicted (speed over plain decoding if passes were all).
    """
    own = costs["target, another size" if row["sizes_change"] else "target"]
    target, draft = costs["target"], costs["draft"]
    each = row["per_token"]
    calls, steps = each["target_calls"], each["draft_steps"]
    read = each["target_tokens"] / calls if calls else 0.0
    call_ms = cost(own, read) if calls else 0.0
    step_ms = cost(draft, each["draft_tokens"] / steps) if steps else 0.0
    models = row["ms_per_token"]["prefill_s"] + calls * call_ms + steps * step_ms
    alone = plain["ms_per_token"]["prefill_s"] + plain["per_token"]["target_calls"] * cost(target, 1)
    return {
        "tokens_per_call": 1 / calls if calls else float("inf"),
        "read_per_call": read,
        "pass_over_one": call_ms / cost(target, 1),
        "draft_over_target": step_ms / cost(target, 1),
        "models_ms": models,
        "host_ms": sum(row["ms_per_token"].values()) - models,
        "predicted": alone / models,
    }


def cost(passes: Mapping[Any, float], n: float) -> float:
    """Milliseconds of a pass over n tokens, between the sizes that were measured by a straight line."""
    sizes = sorted(passes, key=int)
    return float(np.interp(n, [int(size) for size in sizes], [passes[size] for size in sizes]))


def why(row: Results, plain: Results) -> str:
    """One sentence on a method that is slower than plain decoding."""
    told = f"`{row['arm']}` {row['over_plain'][0]:.2f}x: {row['tokens_per_call']:.2f} tokens a call"
    told += f", but its calls read {row['read_per_call']:.1f} tokens at {row['pass_over_one']:.2f} times one's cost"
    if steps := row["per_token"]["draft_steps"]:
        told += f" and {steps:.2f} draft steps a token cost {row['draft_over_target']:.2f} of it each"
    host, own = row["host_ms"], plain["host_ms"]
    rest = f"our work around the passes (laws, draws, gate, loop), {host:.2f} ms a token (plain: {own:.2f})"
    if row["predicted"] < 1:
        return f"{told}: the passes alone give {row['predicted']:.2f}x; the rest is {rest}."
    return f"{told}: the passes alone would give {row['predicted']:.2f}x; {rest}, takes it."


def table(results: Results) -> str:
    """Markdown: for each target and dtype the arms, the best, the costs of passes, and why methods lose."""
    return "\n".join(line for key, part in results.items() for line in _part(key, part))


def _part(key: str, part: Results) -> list[str]:
    rows = part["rows"]
    plain = next(row for row in rows if row["arm"] == "autoregressive")
    lines = [
        f"### {key} ({part['parameters'] / 1e6:.1f} M parameters)", "",
        "| arm | tokens/s | over plain | over llama-cpp-python | drift | predicted | tokens/call "
        "| draft, gate, target, other ms |",
        "| --- " * 8 + "|",
        *(_row(row) for row in rows),
        "", f"Fastest within drift {DRIFT}, chosen on every other prompt, measured on the rest "
        f"(exact speculation was tuned to γ = {part['gamma']} on others):", "",
        "| method | setting | over plain | drift |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, one in part["best"].items():
        setting = f"| {name} | `{one['arm']}` | {cells(one['over_plain'])} | {cells(one['drift'], 3)} |"
        lines.append(setting)
    lines += ["", "| ms a pass of n tokens | " + " | ".join(map(str, SIZES)) + " |"]
    lines += ["| --- |" + " --- |" * len(SIZES)]
    for which, costs in part["passes_ms"].items():
        told = " | ".join(f"{costs[n]:.2f}" for n in sorted(costs, key=int))
        lines.append(f"| {which} | {told} |")
    losing = [row for row in rows if "drift" in row and row is not plain and row["over_plain"][0] < 1]
    if losing:
        lines += ["", "Slower than plain decoding, and why:", "", *(f"- {why(row, plain)}" for row in losing)]
    return [*lines, ""]


def _row(row: Results) -> str:
    ms = row.get("ms_per_token")
    told = [f"{row['tokens_per_s']:.0f}", cells(row["over_plain"]), cells(row["over_own_loop"])]
    if ms is None:
        return f"| `{row['arm']}` | {' | '.join(told)} | | | | |"
    told += [cells(row["drift"], 3), f"{row['predicted']:.2f}", f"{row['tokens_per_call']:.2f}"]
    told.append(", ".join(f"{ms[part]:.2f}" for part in ("draft_s", "gate_s", "target_s", "other_s")))
    return f"| `{row['arm']}` | {' | '.join(told)} |"


def draw(results: Results) -> Figure:
    """A row of two panels for each target: speed against drift, and what a pass over n tokens costs."""
    from matplotlib.figure import Figure

    targets: dict[str, dict[str, Any]] = {}
    for key, part in results.items():
        target, _, dtype = key.rpartition(", ")
        targets.setdefault(target, {})[dtype] = part
    figure = Figure(figsize=(8.3, 3.1 * len(targets) + 0.3), layout="constrained")
    panels = figure.subplots(len(targets), 2, squeeze=False)
    for (left, right), (target, parts) in zip(panels, targets.items(), strict=True):
        dtype = "f16" if "f16" in parts else next(iter(parts))
        _speeds(left, parts[dtype], f"{target}, {dtype}")
        _passes(right, parts)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _speeds(panel: Axes, part: Results, title: str) -> None:
    rows = {row["arm"]: row for row in part["rows"]}
    for name, (colour, mark) in _STYLES.items():
        found = [row for arm, row in rows.items() if arm.partition("(")[0] == name]
        found.sort(key=lambda row: row["drift"][0])
        x, y = [row["drift"][0] for row in found], [row["over_plain"] for row in found]
        error = [[value - low for value, low, _ in y], [high - value for value, _, high in y]]
        joined = "-" if name == "sprinter" else ""
        panel.errorbar(
            x, [value for value, _, _ in y], error, color=colour, marker=mark, ms=4, lw=1.2, ls=joined, elinewidth=0.8,
            label=name,
        )  # fmt: skip
    panel.axhline(1, color="#8A8A8A", lw=0.8)
    panel.axvline(DRIFT, color="#8A8A8A", lw=0.8, ls=":")
    own = rows["llamacpp:plain"]["over_plain"][0]
    panel.axhline(own, color="#E69F00", lw=1.2, ls="--", label="llama-cpp-python")
    panel.set(title=title, xlabel="mean drift", ylabel="speed over our plain decoding", ylim=(0, None))


def _passes(panel: Axes, parts: Mapping[str, Results]) -> None:
    for style, (dtype, part) in zip(("-", "--", ":"), parts.items(), strict=False):
        for which, colour in (("target", "#0072B2"), ("draft", "#D55E00")):
            costs = part["passes_ms"][which]
            sizes = sorted(costs, key=int)
            panel.plot([int(n) for n in sizes], [costs[n] for n in sizes], style, color=colour, marker=".", lw=1.2,
                       label=f"{which}, {dtype}")  # fmt: skip
            anew = part["passes_ms"][f"{which}, another size"]
            panel.plot(
                [int(n) for n in sizes], [anew[n] for n in sizes], style, color=colour, alpha=0.4, lw=1.2
            )
    panel.set(
        title="what a pass costs (pale: after one of another size)",
        xlabel="tokens in it",
        ylabel="ms",
        xticks=(1, 4, 8, 12, 16),
        ylim=(0, None),
    )
    panel.legend()


def publish(results: Results, command: str) -> tuple[Path, Path]:
    """The picture, and between the marks of docs/llamacpp.md the picture and the best of each method."""
    figure = save_figure(draw, dict(results), document("figures/llamacpp.png"))
    page = document("llamacpp.md")
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    write_atomic(page, f"{before}{begin}\n{_summary(results, command)}\n{end}{after}")
    return figure, page


def _summary(results: Results, command: str) -> str:
    lines = [
        "![Speed against drift, and what a pass costs](figures/llamacpp.png)", "",
        "| target, weights | our plain decoding over llama-cpp-python's | method | over plain | drift |",
        "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for key, part in results.items():
        plain = next(row for row in part["rows"] if row["arm"] == "autoregressive")
        first = f"{key} | {cells(plain['over_own_loop'])}"
        for name, one in part["best"].items():
            if name != "any":
                told = f"`{one['arm']}` | {cells(one['over_plain'])} | {cells(one['drift'], 3)}"
                lines.append(f"| {first} | {told} |")
                first = " | "
    lines += [
        "",
        f"`{command} --data DIR`: the fastest setting of each method within drift {DRIFT}, chosen on every other",
        "prompt and measured on the rest (95 % intervals over prompts). All rows, what each pass costs and why each",
        "method that loses does: `benchmarks/results/llamacpp/speed.md`.",
    ]
    return "\n".join(lines)


def main() -> None:
    option_parser(__doc__, data=False).parse_args()
    path = ROOT / "benchmarks" / "results" / "llamacpp" / "speed.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    made = RESULTS / "llamacpp" / "speed.md"
    made.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(made, table(found["results"]) + "\n")
    print_written("llamacpp/tables", made, *publish(found["results"], found["command"]))


if __name__ == "__main__":
    main()
