"""The README's tables of results, and how a result file is read and named: for ``update_results.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sprinter.decode.spec import parse_method

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any] | None:
    """Contents of one result file; None if it does not exist."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def where(results: dict[str, Any]) -> str:
    """Command, machine and commit of the numbers: one line, or one for each part that was measured separately."""
    if isinstance(results.get("runs"), dict):
        return "\n".join(f"- {part}: {_made(run)}, {_place(run)}" for part, run in results["runs"].items())
    if "new_tokens" not in results:
        return f"{_made(results)}, {_place(results)}"
    made = f"{_made(results)}: {texts(results)}{results['new_tokens']} new tokens each"
    return f"{made}, {_place(results)}"


def _made(run: dict[str, Any]) -> str:
    data = "" if run.get("benchmark") == "gpu" else " --data DIR"
    return f"`{run['command'].strip()}{data}`"


def _place(run: dict[str, Any]) -> str:
    env = run["environment"]
    device = env["gpu"] or f"{env['cpu']}, {env['cores']} cores, {env['threads']} thread(s)"
    return f"on {device}; torch {env['torch']}, transformers {env['transformers']}, commit {env['commit']}."


def texts(results: dict[str, Any]) -> str:
    """Number of texts, if the results hold one number for all."""
    kind = "prompts" if str(results.get("benchmark", "")).startswith("real/") else "paragraphs"
    return f"{results['prompts']} {kind}, " if "prompts" in results else ""


def readme_block() -> str:
    """The README's tables: the real pair beside other engines, and temperature 1 of the main job."""
    results = load("methods/main_job")
    if results is None:
        return "No results yet: `scripts/update_results.py` writes them from `benchmarks/results/`."
    lines = [
        *real_lines(),
        "The built-in pair at temperature 1, on text that it was not trained on (95 % intervals over paragraphs;",
        "speed is relative to plain decoding with the target, arms interleaved; more in [results](docs/results.md)):",
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


_ENGINES = {
    "transformers:plain": "transformers in bfloat16",
    "transformers:assisted": "transformers in bfloat16, with the draft",
    "transformers:lookup": "transformers in bfloat16, prompt lookup",
    "llama-server:plain": "llama.cpp",
    "llama-server:draft": "llama.cpp, with the draft",
    "llama-server:ngram": "llama.cpp, n-grams",
}


SUITES = ("humaneval", "gsm8k")
"""Suites of the README's first table."""


def real_lines() -> list[str]:
    """The README's first table: a real pair beside other engines, with what lossy methods do to answers."""
    speed, quality = load("real/speed"), load("real/quality")
    if speed is None or quality is None or "peers" not in speed["parts"]:
        return []
    found = {(row["arm"], row["suite"]): row for row in speed["parts"]["peers"]}
    answers = {(row["arm"], row["suite"]): row for row in quality["rows"] if row["temperature"] == 0}
    prompts = min(row["prompts"] for row in found.values())
    more = (load("real/named") or {"rows": []})["rows"]
    answers |= {(row["arm"], row["suite"]): row for row in more if row["temperature"] == 0}
    named = {row["prompts"] for row in more if row["suite"] in SUITES and row["temperature"] == 0}
    asked = " or ".join(map(str, sorted({row["prompts"] for row in quality["rows"]} | named)))
    lines = [
        "Qwen2.5-Coder-1.5B-Instruct with its 0.5B sister (Q4_K_M files), in chat, greedy, all arms in turn on one",
        f"machine. Two values: HumanEval, GSM8K. Tokens/s, prompt included, and calls: {prompts} prompts of a suite.",
        f"Drift and change of accuracy (pass@1, exact match) with its 95 % interval: {asked} prompts.",
        "",
        "| arm | tokens/s | target calls/token | mean drift | change on HumanEval | change on GSM8K |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for arm in dict.fromkeys(arm for arm, _ in found):
        timed = [found[arm, suite] for suite in SUITES]
        judged = [answers.get((arm, suite)) for suite in SUITES]
        calls = [row["target_calls_per_token"] for row in timed]
        if arm == "autoregressive" or arm in _ENGINES:
            drift, changes = "–", ["–", "–"]
        elif parse_method(arm).lossless(greedy=True):
            drift, changes = "0", ["exact", "exact"]
        else:
            drift = ", ".join("–" if row is None else f"{row['mean_drift'][0]:.3f}" for row in judged)
            changes = [_change(row) for row in judged]
        cells = [
            _ENGINES.get(arm, f"`{arm}`"),
            ", ".join(f"{row['tokens_per_s']:.1f}" for row in timed),
            "–" if None in calls else ", ".join(f"{one:.2f}" for one in calls),
            drift,
            *changes,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    shown = {"speed": speed["runs"]["peers"]}
    return [
        *lines,
        "",
        where({"runs": shown}),
        "",
        "What drift does to answers: [drift and quality](docs/studies/drift-and-quality.md); what the lossy modes of",
        "engines and papers cost: [lossy modes](docs/studies/lossy-modes.md).",
        "",
    ]


def _change(row: dict[str, Any] | None) -> str:
    """Change of accuracy with its interval."""
    if row is None or row["accuracy_change"] is None:
        return "–"
    change, low, high = row["accuracy_change"]
    return f"{change:+.2f} [{low:.2f}, {high:.2f}]"


def captured_lines() -> list[str]:
    """The README's second table: captured forward passes and other engines, temperature 1."""
    results = load("engine/decoding")
    if results is None:
        return []
    columns = ("builtin", "enlarged")
    pairs = [results[name]["1"] for name in columns]
    rows = {
        "transformers, assisted (tuned)": [_fastest(pair, "transformers:assisted") for pair in pairs],
        "vLLM, its fastest method": [_fastest(pair, "vllm:") for pair in pairs],
        "plain decoding, float32": [_named(pair, "autoregressive, float32") for pair in pairs],
        "plain decoding, bfloat16": [_named(pair, "autoregressive, bfloat16") for pair in pairs],
        "exact speculation (tuned), bfloat16": [_fastest(pair, "speculative", "bfloat16") for pair in pairs],
        "`sprinter`, set to drift 0.15, bfloat16": [
            _named(pair, pair["sprinter_over_exact"]["bfloat16"]["arm"]) for pair in pairs
        ],
    }
    lines = [
        "",
        "With compiled forward passes (`compile=True`) and with other engines, relative to transformers' `generate` in",
        "float32 on the same core. In the second column the built-in target has additional layers and units with zero",
        "outputs: the same texts at the cost of a 17 M target.",
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
