"""gpu.md: the tables of gpu.json; page.md: the same as a part of a page of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import cells, grid


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *lines = (" | ".join(row) for row in rows)
    return "\n".join(grid(head, lines))


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def interval(values: Sequence[float] | None, digits: int = 2) -> str:
    """value [low, high], or a dash."""
    return "–" if values is None else cells((values[0], values[1], values[2]), digits)


def train_text(stage: Mapping[str, Any]) -> str:
    """How the pair came about."""
    rows = [("model", "parameters", "tokens", "epochs", "steps", "seconds", "tokens/s")]
    for role in ("target", "draft"):
        one = stage[role]
        counts = (f"{one['parameters']:,}", f"{one['tokens']:,}", number(one["epochs"]), f"{one['steps']:,}")
        rows.append((role, *counts, number(one["seconds"], 0), number(one["tokens_per_s"], 0)))
    held, gate = stage["heldout"], stage["gate"]
    words = (
        f"Held-out: target loss {held['target_loss']:.3f}, draft loss {held['draft_loss']:.3f} nats a token, mean "
        f"overlap β {held['overlap']['mean']:.3f} over {held['positions']:,} positions. Gate: τ = "
        f"{', '.join(f'{tau:g}' for tau in gate['taus'])}."
    )
    return f"{table(rows)}\n\n{words}"


def arms_text(measured: Mapping[str, Any], bases: Sequence[str], rounds: bool = False) -> str:
    """One table of arms; ``rounds`` shows what a round takes in the place of drift."""
    if not measured["summary"]:
        return f"Temperature {measured['temperature']:g}: no prompt was answered by every arm in the time."
    tail = ("tokens/round", "ms/round") if rounds else ("mean drift", "trusted")
    rows = [("arm", "tokens/s", *(f"÷ {base}" for base in bases), "target calls/token", *tail)]
    for row in sorted(measured["summary"], key=lambda row: -row["tokens_per_s"]):
        speeds = (interval(row["speed_over"].get(base)) for base in bases)
        told = (
            (interval(row["tokens_per_round"]), number(row["round_ms"]))
            if rounds
            else (interval(row["mean_drift"], 3), number(row["trusted_share"]))
        )
        rows.append(
            (
                row["arm"],
                number(row["tokens_per_s"], 1),
                *speeds,
                interval(row["target_calls_per_token"]),
                *told,
            )
        )
    prompts = min((row["prompts"] for row in measured["summary"]), default=0)
    notes = [
        f"{prompts} prompts, {measured['new_tokens']} new tokens, temperature {measured['temperature']:g}."
    ]
    notes += [f"Failed: {arm['name']}: {arm['error']}." for arm in measured["arms"] if arm["error"]]
    return f"{table(rows)}\n\n{' '.join(notes)}"


def passes_text(models: Mapping[str, Any]) -> str:
    """Passes and steps against the copy."""
    head = (
        "model",
        "what",
        "ms",
        "kernels ms",
        "GB read and written",
        "of the large copy",
        "of a copy of its size",
    )
    rows: list[tuple[str, ...]] = [head]
    for role, facts in models.items():
        for one in facts["passes"]:
            busy = one["kernel_ms"] if isinstance(one.get("kernel_ms"), float) else None
            shares = (number(one["fraction"][name]) for name in ("large", "same_size"))
            size = number(one["bytes"] / 1e9, 3)
            rows.append(
                (
                    role,
                    f"{one['kind']} pass, {one['tokens']} tokens",
                    number(one["pass_ms"], 3),
                    number(busy, 3),
                    size,
                    *shares,
                )
            )
        for name, step in facts.get("steps", {}).items():
            shares = (number(step["fraction"][kind]) for kind in ("large", "same_size"))
            rows.append((role, f"{name} step", number(step["step_ms"], 3), "", "", *shares))
    same = {
        one["same_bits"] for facts in models.values() for one in facts["passes"] if one["kind"] == "captured"
    }
    told = {
        frozenset(
            {True}
        ): "The first token's logits are the same, to the bit, in captured passes of all lengths.",
        frozenset(
            {True, False}
        ): "The first token's logits are not the same bits in captured passes of all lengths.",
    }.get(frozenset(same), "")
    return f"{table(rows)}\n\n{told}"


def arms_section(stage: Mapping[str, Any]) -> str:
    """Both temperatures."""
    bases = ("autoregressive", "transformers:plain", "transformers:assisted")
    parts = [f"γ = {one['gamma']}\n\n{arms_text(one, bases)}" for one in stage["temperatures"]]
    return "\n\n".join(parts)


def roofline_section(stage: Mapping[str, Any]) -> str:
    """Copy and passes."""
    return f"Copy of a large buffer: {stage['copy_gb_per_s']:,.0f} GB/s.\n\n{passes_text(stage['models'])}"


def latency_section(stage: Mapping[str, Any]) -> str:
    """One part a case."""
    bases = ("transformers:plain", "transformers:assisted")
    parts = [stage["note"][0].upper() + stage["note"][1:] + "."]
    for case in stage["cases"]:
        parts += [f"### {case['case']}", arms_text(case, bases, rounds=True), passes_text(case["models"])]
    parts += [f"Left out: {name}: {why}." for name, why in stage["left_out"].items()]
    return "\n\n".join(parts)


def rows_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Methods by number of rows."""
    rows = [
        ("rows", "arm", "tokens/s", "tokens a round", "ms a round: draft", "gate", "target", "other", "drift")
    ]
    for line in lines:
        if "error" in line:
            rows.append((str(line["rows"]), line["arm"], line["error"], *["–"] * 6))
            continue
        times = [number(line["ms_per_round"][what]) for what in ("draft", "gate", "target", "other")]
        facts = number(line["tokens_per_s"], 1), number(line["tokens_per_round"]), *times
        rows.append((str(line["rows"]), line["arm"], *facts, number(line["drift"], 3)))
    return table(rows)


def real_section(stage: Mapping[str, Any]) -> str:
    """Laws, then arms by weights and temperature."""
    rows = [("target's passes", "KL from float32, nats", "same most likely token", "positions")]
    for name, one in stage["laws"].items():
        rows.append((name, f"{one['kl']:.2g}", number(one["same_first"], 3), f"{one['positions']:,}"))
    parts = [f"{' with '.join(stage['pair'])}.", table(rows)]
    bases = ("transformers:plain", "captured autoregressive")
    for one in stage["temperatures"]:
        parts.append(f"{one['dtype']}\n\n{arms_text(one, bases)}")
        parts += [rows_text(one["rows"])] if one.get("rows") else []
    return "\n\n".join(parts)


SECTIONS = {
    "train": train_text,
    "arms": arms_section,
    "real": real_section,
    "latency": latency_section,
    "roofline": roofline_section,
}


def markdown(told: Mapping[str, Any]) -> str:
    """All stages that have run."""
    where = told["environment"]
    title = f"# GPU benchmark: {where.get('gpu') or where.get('cpu')}"
    versions = f"torch {where['torch']}, transformers {where['transformers']}, commit {where['commit']}"
    return "\n\n".join([title, f"{versions}; `{told['command']}`", *sections(told)])


def sections(told: Mapping[str, Any]) -> list[str]:
    """A heading and a text for each stage."""
    parts = []
    for name, stage in told["stages"].items():
        parts.append(f"## {name}")
        parts += [f"Failed: {stage['error']}."] if "error" in stage else []
        parts.append(
            SECTIONS[name](stage) if "stage_seconds" in stage else "Not finished; gpu.json has the rest."
        )
    return parts


def page(told: Mapping[str, Any]) -> str:
    """All stages, for a page of results, whose headings are of the second level."""
    lines = "\n\n".join(sections(told)).splitlines()
    return "\n".join(f"#{line}" if line.startswith("##") else line for line in lines)
