"""Tables and words from the results of speed.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.common import cells

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
DRIFT = 0.15
"""The bound within which a method is to gain."""
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
