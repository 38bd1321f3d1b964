"""Write the measured numbers into README.md and docs/results.md from benchmarks/results/*.json.

python scripts/update_results.py           write
python scripts/update_results.py --check   exit 1 if a file differs from what would be written
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
TITLES = {
    "main_job": "The main job: speed, target calls and drift at three drifts",
    "methods": "Every method",
    "bench_table": "Every method and transformers' own generation on three suites",
    "bench_noise": "How far the bench can be trusted",
    "engine_decoding": "Captured passes: decoding",
    "engine": "Captured passes: one pass, one step",
    "batch": "Many rows at once",
    "llamacpp": "llama.cpp as a runner",
    "crosscheck": "Against transformers' assisted decoding",
    "gate_study_builtin": "Gates: which signal is worth learning (built-in pair)",
    "gate_study_other": "Gates: which signal is worth learning (another pair)",
    "gate_transfer": "Gates: one kind of text to another",
    "gate_labelling": "Labelling speed",
    "theory_predict": "Predicted against measured",
    "paper_sprinter": "SPRINTER's tables in kind",
    "paper_svip": "SVIP's tables in kind",
    "paper_fsd": "Fuzzy speculative decoding's tables in kind",
    "paper_fsd_laws": "Fuzzy speculative decoding: divergences in kind",
    "paper_theory": "OPT against UNO, target against draft, in kind",
}


def load(name: str) -> dict[str, Any] | None:
    """One result file, or None if it was not made yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def where(results: dict[str, Any]) -> str:
    """How the numbers were made: one line, or one for each part that was measured by itself."""
    if isinstance(results.get("runs"), dict):
        return "\n".join(f"- {part}: {_made(run)}, {_place(run)}" for part, run in results["runs"].items())
    made = f"{_made(results)}: {texts(results)}{results['new_tokens']} new tokens each"
    return f"{made}, {_place(results)}"


def _made(run: dict[str, Any]) -> str:
    return f"`{run['command'].strip()} --data DIR`"


def _place(run: dict[str, Any]) -> str:
    env = run["environment"]
    device = env["gpu"] or f"{env['cpu']}, {env['cores']} cores, {env['threads']} thread(s)"
    return f"on {device}; torch {env['torch']}, transformers {env['transformers']}, commit {env['commit']}."


def texts(results: dict[str, Any]) -> str:
    """How many texts, where the results say so in one place."""
    return f"{results['prompts']} paragraphs, " if "prompts" in results else ""


def readme_block() -> str:
    """The README's table: temperature 1 of the main job."""
    results = load("main_job")
    if results is None:
        return "Numbers will stand here once a script in `benchmarks/` has printed them; none is written by hand."
    lines = [
        "The built-in pair at temperature 1, on text that it was not trained on (95 % intervals over paragraphs;",
        "speed is relative to plain decoding with the target, arms interleaved; the rest: [results](docs/results.md)):",
        "",
        "| arm | speed | target calls/token | mean drift | trusted |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        if row["temperature"] == 1.0:
            speed, low, high = row["speed_over_autoregressive"]
            lines.append(
                f"| `{row['method']}` | {speed:.2f}x [{low:.2f}, {high:.2f}] | {row['target_calls_per_token'][0]:.2f} "
                f"| {row['mean_drift'][0]:.3f} | {row['trusted_share']:.0%} |"
            )
    return "\n".join([*lines, "", where(results), *captured_lines()])


def captured_lines() -> list[str]:
    """The README's second table: captured passes beside other engines, temperature 1."""
    results = load("engine_decoding")
    if results is None:
        return []
    columns = ("builtin", "enlarged")
    pairs = [results[name]["1"] for name in columns]
    rows = {
        "transformers, assisted (tuned)": [_fastest(pair, "transformers:assisted") for pair in pairs],
        "vLLM, the fastest of its ways": [_fastest(pair, "vllm:") for pair in pairs],
        "plain decoding, float32": [_named(pair, "autoregressive, float32") for pair in pairs],
        "plain decoding, bfloat16": [_named(pair, "autoregressive, bfloat16") for pair in pairs],
        "exact speculation (tuned), bfloat16": [_fastest(pair, "speculative", "bfloat16") for pair in pairs],
        "`sprinter`, set to drift 0.15, bfloat16": [
            _named(pair, pair["sprinter_over_exact"]["bfloat16"]["arm"]) for pair in pairs
        ],
    }
    lines = [
        "",
        "With compiled passes (`compile=True`), against transformers' `generate` in float32 on the same core, other",
        "engines beside it. The second column is the built-in target with layers and units added that say nothing:",
        "the same texts at the cost of a 17 M target.",
        "",
        "| tokens/s over transformers, temperature 1 | built-in pair | target at the cost of a 17 M one |",
        "| --- | --- | --- |",
    ]
    for name, found in rows.items():
        lines.append(f"| {name} | {' | '.join(_speed(row) for row in found)} |")
    shown = {name: run for name, run in results["runs"].items() if name in columns}
    return [*lines, "", where({**results, "runs": shown})]


def _named(pair: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in pair["rows"] if row["arm"] == name)


def _fastest(pair: dict[str, Any], start: str, end: str = "") -> dict[str, Any]:
    found = [row for row in pair["rows"] if row["arm"].startswith(start) and row["arm"].endswith(end)]
    return max(found, key=lambda row: row["tokens_per_s"])


def _speed(row: dict[str, Any]) -> str:
    value, low, high = row["over_transformers"]
    drift = f", drift {row['mean_drift']:.3f}" if row["mean_drift"] else ""
    return f"{value:.1f}x [{low:.1f}, {high:.1f}]{drift}"


def equal_trust(results: dict[str, Any]) -> list[str]:
    """Sprinter's drift beside the coin's at the same trusted share, the coin's read off between its measured points."""
    lines = [
        "",
        "Drift at equal trusted share (the coin's is interpolated between its own points and the origin):",
        "",
    ]
    lines += ["| T | arm | trusted | sprinter's drift | coin's drift there | ratio |", "| --- " * 6 + "|"]
    for temperature in sorted({row["temperature"] for row in results["rows"]}):
        rows = [row for row in results["rows"] if row["temperature"] == temperature]
        coins = sorted(
            (row["trusted_share"], row["mean_drift"][0]) for row in rows if row["arm"].startswith("coin")
        )
        points = [(0.0, 0.0), *coins]
        for row in rows:
            share, drift = row["trusted_share"], row["mean_drift"][0]
            if not row["arm"].startswith("sprinter"):
                continue
            for (x0, y0), (x1, y1) in pairwise(points):
                if x0 <= share <= x1:
                    coin = y0 + (y1 - y0) * (share - x0) / (x1 - x0)
                    cells = f"{share:.2f} | {drift:.3f} | {coin:.3f} | {drift / coin:.2f}"
                    lines.append(f"| {temperature} | `{row['method']}` | {cells} |")
                    break
    return lines


def results_page() -> str:
    """docs/results.md."""
    parts = [
        "# Results",
        "",
        "Written by `scripts/update_results.py` from `benchmarks/results/`; do not edit by hand. Speeds are ratios",
        "within one run, arms interleaved prompt by prompt, with 95 % bootstrap intervals over prompts;",
        "the meter is complete.",
    ]
    for name, title in TITLES.items():
        results = load(name)
        if results is not None:
            table = (RESULTS / f"{name}.md").read_text(encoding="utf-8").strip()
            parts += ["", f"## {title}", "", where(results), "", table]
            parts += equal_trust(results) if name == "main_job" else []
    notes = ROOT / "docs" / "results-notes.md"
    if notes.is_file():
        parts += ["", notes.read_text(encoding="utf-8").strip()]
    return "\n".join(parts) + "\n"


def main() -> int:
    """Write, or compare."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    head, rest = readme.split(BEGIN)
    tail = rest.split(END)[1]
    wanted = {
        ROOT / "README.md": f"{head}{BEGIN}\n{readme_block()}\n{END}{tail}",
        ROOT / "docs" / "results.md": results_page(),
    }
    stale = [
        path
        for path, text in wanted.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} does not match benchmarks/results: run python scripts/update_results.py"
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
