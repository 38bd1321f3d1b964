"""Predicted against measured tokens a target call and drift on the built-in pair, and where Theorem 3.1 fails.

    python benchmarks/theory/predict.py --data DIR [--measured-only]

Measured: 200 paragraphs that the pair was not trained on, 64 new tokens, meter complete; arms that
``results/theory/measured.json`` already holds are not measured again. Where the method allows it many rows run
together (``rows.py``), and the first texts of each arm must equal the engine's.

Predicted: from laws recorded along one text of the target and one of the draft after each of 300 other paragraphs of
the same documents, replayed without the models; then from 24 of them, and in simpler ways that show what each part of
the prediction is worth. 95 % bootstrap intervals over paragraphs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

import sprinter
from benchmarks.common import (
    RESULTS,
    command,
    document,
    environment,
    heldout_prompts,
    interval,
    option_parser,
    write_results,
)  # fmt: skip
from benchmarks.smoke import sized
from benchmarks.theory.rows import Rows, serves
from sprinter.decode.draft import Stats
from sprinter.decode.spec import parse_method
from sprinter.laws import Sampling, tv_distance
from sprinter.theory.figures import draw_prediction, save
from sprinter.theory.predict import predict
from sprinter.theory.recording import Recording, probe
from sprinter.theory.replay import replay
from sprinter.theory.sequential import class_rates, expected_trusted, run_lengths

NEW_TOKENS = sized(64, 6)
ARMS: tuple[tuple[str, float], ...] = (
    ("speculative(gamma=2)", 1.0), ("speculative(gamma=5)", 1.0), ("speculative(gamma=10)", 1.0),
    ("svip(h=0.6)", 1.0), ("heuristic", 1.0), ("stop=adaedl(threshold=0.1)", 1.0), ("confidence(c=0.1)", 1.0),
    ("specdec++", 1.0), ("disco", 1.0), ("batch(drafts=3)", 1.0), ("spectr(drafts=3)", 1.0), ("lookup", 1.0),
    ("sprinter(tau=0.75)", 1.0), ("sprinter(tau=0.7)", 1.0), ("sprinter(tau=0.6)", 1.0),
    ("sprinter(tau=0.7, tail=4)", 1.0), ("coin(rate=0.5)", 1.0), ("opt(epsilon=0.005)", 1.0),
    ("uno(epsilon=0.005)", 1.0), ("fuzzy(threshold=0.2)", 1.0), ("mentored(kl=0.1)", 1.0), ("lenient(w=0.7)", 1.0),
    ("random(rate=0.5)", 1.0), ("typical", 1.0), ("bild", 1.0),
    ("speculative(gamma=5)", 0.7), ("sprinter(tau=0.7)", 0.7), ("opt(epsilon=0.02)", 0.7),
    ("speculative(gamma=5)", 0.0), ("sprinter(tau=0.7)", 0.0), ("fuzzy(threshold=0.2)", 0.0),
)  # fmt: skip
MEASURED = RESULTS / "theory" / "measured.json"
CHECKED = sized(3, 1)  # prompts of each arm on which rows run together are compared with the engine
COLUMNS = ("tokens", "target_calls", "drift", "draft_steps", "trusted", "rounds")


# --- measured --------------------------------------------------------------------------------------------------------
def measure(pair: sprinter.Pair, prompts: list[str]) -> dict[str, Any]:
    """Counts of every arm on every prompt; saved after each arm."""
    held = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    if held.get("prompts") != len(prompts) or held.get("new_tokens") != NEW_TOKENS:
        held = {"prompts": len(prompts), "new_tokens": NEW_TOKENS, "columns": COLUMNS, "arms": {}}
    together = Rows(pair)
    for spec, temperature in ARMS:
        name = f"{spec} @ {temperature}"
        if name in held["arms"]:
            continue
        began = time.time()
        rows = measured_rows(pair, together, prompts, spec, temperature)
        held["arms"][name] = rows
        held["environment"] = environment()
        part = MEASURED.with_suffix(".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(held) + "\n")
        part.replace(MEASURED)
        print(f"{name}: {time.time() - began:.0f} s", flush=True)
    return held


def measured_rows(
    pair: sprinter.Pair, together: Rows, prompts: list[str], spec: str, temperature: float
) -> list[list[float]]:
    """``COLUMNS`` of every prompt. Rows run together where they can; the first ones must equal the engine's own."""
    method, ids = parse_method(spec), [pair.tokenizer(prompt)["input_ids"] for prompt in prompts]
    many = serves(method)
    stats = [r.stats for r in together.run(ids, method, Sampling(temperature), NEW_TOKENS)] if many else []
    for i in range(CHECKED if many else len(ids)):
        own = pair.generate(
            ids[i],
            method=method,
            max_new_tokens=NEW_TOKENS,
            temperature=temperature,
            seed=i,
            meter="complete",
        ).stats
        if many and not np.allclose(columns(own), columns(stats[i]), rtol=0, atol=0.01):
            sys.exit(
                f"error: {spec}, prompt {i}: rows together give {columns(stats[i])}, the engine {columns(own)}"
            )
        stats += [] if many else [own]
    return [columns(one) for one in stats]


def columns(s: Stats) -> list[float]:
    """``COLUMNS`` of one text."""
    drift = round((s.mean_drift or 0.0) * s.new_tokens, 3)
    return [s.new_tokens, s.target_calls, drift, s.draft_steps, s.trusted, s.rounds]


# --- predicted -------------------------------------------------------------------------------------------------------
def record(pair: sprinter.Pair, prompts: list[str], temperature: float) -> list[Recording]:
    """Texts of both models after the probe's prompts."""
    sampling = Sampling(temperature=temperature)
    return [
        probe(pair, prompts, writer=writer, new_tokens=NEW_TOKENS, sampling=sampling, seed=10_000)
        for writer in ("target", "draft")
    ]


def compare(spec: str, temperature: float, recordings: list[Recording], rows: np.ndarray) -> dict[str, Any]:
    """One arm: measured, predicted, and relative errors (None where the measured value is 0)."""
    found = predict(recordings, spec)
    tokens, calls, drift, steps = rows[:, :4].T
    measured = {"tokens_per_call": interval(tokens, calls), "drift": interval(drift, tokens)}
    predicted = {"tokens_per_call": found.tokens_per_call or 0.0, "drift": found.mean_drift}
    row: dict[str, Any] = {
        "method": parse_method(spec).name, "temperature": temperature, "lossless": found.lossless,
        "draft_steps": {"measured": float(steps.sum() / tokens.sum()), "predicted": found.draft_steps},
        "weight_of_target_text": found.weight,
    }  # fmt: skip
    for key, (value, low, high) in measured.items():
        error = predicted[key] / value - 1 if value > 1e-6 else None
        row[key] = {"measured": value, "interval": [low, high], "predicted": predicted[key], "error": error}
    return row


def simpler(spec: str, recordings: list[Recording]) -> dict[str, dict[str, float]]:
    """The same by parts: along the target's text alone, the draft's alone, and without the coupling of draws."""
    ways = {
        "target's text alone": (recordings[0], True),
        "draft's text alone": (recordings[1], True),
        "target's text, draws not coupled": (recordings[0], False),
    }
    found = {name: replay(one, parse_method(spec), coupled=coupled) for name, (one, coupled) in ways.items()}
    return {
        name: {"tokens_per_call": one.tokens_per_call or 0.0, "drift": one.mean_drift}
        for name, one in found.items()
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and worst relative error of each quantity, and over how many arms."""
    found = {}
    for key in ("tokens_per_call", "drift"):
        errors = [abs(row[key]["error"]) for row in rows if row[key]["error"] is not None]
        found[key] = {"arms": len(errors), "median": median(errors), "worst": max(errors)}
    return found


# --- Theorem 3.1's assumption ----------------------------------------------------------------------------------------
def independence(recordings: list[Recording], held: dict[str, Any]) -> list[dict[str, Any]]:
    """What Theorems 3.1 and 3.3 say from a gate's rates, beside what was measured.

    η_TP and η_FP are the built-in gate's, by expectation over x ~ q along the target's text; r has the law of the
    acceptable runs there. The theorem's drift is counted over drafted positions.
    """
    one = recordings[0]
    tv = torch.cat(
        [tv_distance(p, q) for p, q in zip(one.p.split(256), one.q.split(256), strict=True)]
    ).double()
    x = torch.multinomial(one.q, 1, generator=torch.Generator().manual_seed(0))
    good = (one.q.gather(-1, x) <= one.p.gather(-1, x)).squeeze(-1)
    width = max(one.lengths)
    table = torch.zeros(len(one.lengths), width, dtype=torch.bool)
    for k, (first, length) in enumerate(zip(one.starts, one.lengths, strict=True)):
        table[k, :length] = good[first : first + length]
    law = run_lengths(table, torch.tensor(one.lengths))
    found = []
    for tau in (0.75, 0.7, 0.6):
        rows = np.array(held["arms"][f"sprinter(tau={tau}) @ 1.0"])
        trusted = one.signals["gate"] >= tau
        tp, fp = class_rates(one.p, one.q, trusted)
        by_gate = predict(recordings, f"sprinter(tau={tau})")
        drift, steps, kept, rounds = rows.sum(0)[2:]
        runs = expected_trusted(tp, fp, torch.arange(len(law)), cap=20)
        found.append({
            "tau": tau, "eta_tp": tp, "eta_fp": fp, "mean_tv": float(tv.mean()),
            "tv_where_trusted": float(tv[trusted].mean()),
            "theorem_3_1_drift_a_drafted_token": fp * float(tv.mean()),
            "measured_drift_a_drafted_token": float(drift / steps),
            "replayed_drift_a_drafted_token": by_gate.mean_drift / by_gate.draft_steps,
            "theorem_3_3_trusted_a_round": float((law * runs).sum()),
            "measured_trusted_a_round": float(kept / rounds),
        })  # fmt: skip
    return found


# --- report ----------------------------------------------------------------------------------------------------------
def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| T | method | tokens/call | predicted | error | drift | predicted | error |",
        "| --- " * 8 + "|",
    ]
    for row in results["rows"]:
        cells = []
        for key, digits in (("tokens_per_call", 2), ("drift", 4)):
            one = row[key]
            low, high = one["interval"]
            error = "" if one["error"] is None else f"{100 * one['error']:+.1f} %"
            cells += [f"{one['measured']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]",
                      f"{one['predicted']:.{digits}f}", error]  # fmt: skip
        lines.append(f"| {row['temperature']} | `{row['method']}` | {' | '.join(cells)} |")
    head = "| way of predicting | tokens/call: median | worst | drift: median | worst |"
    lines += ["", head, "| --- " * 5 + "|"]
    for name, one in {"the mixture": results["summary"], **results["other_ways"]}.items():
        cells = [
            f"{100 * one[key][what]:.1f} %"
            for key in ("tokens_per_call", "drift")
            for what in ("median", "worst")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    head = "| τ | η_TP | η_FP | drift a draft token: Theorem 3.1 | measured | trusted a round: Theorem 3.3 | measured |"
    lines += ["", head, "| --- " * 7 + "|"]
    for one in results["independence"]:
        values = (f"{one[key]:.3f}" for key in (
            "eta_tp", "eta_fp", "theorem_3_1_drift_a_drafted_token", "measured_drift_a_drafted_token",
            "theorem_3_3_trusted_a_round", "measured_trusted_a_round"))  # fmt: skip
        lines.append(f"| {one['tau']} | {' | '.join(values)} |")
    return "\n".join(lines)


def other_ways(
    recordings: dict[float, list[Recording]], quick: dict[float, list[Recording]], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Errors of simpler predictions, and of the same from a quick probe."""
    by_way: dict[str, list[dict[str, Any]]] = {}
    for (spec, temperature), row in zip(ARMS, rows, strict=True):
        fast = predict(quick[temperature], spec)
        ways = simpler(spec, recordings[temperature])
        ways["the mixture, 24 texts"] = {
            "tokens_per_call": fast.tokens_per_call or 0.0,
            "drift": fast.mean_drift,
        }
        for name, found in ways.items():
            errors = {
                key: {"error": None if row[key]["error"] is None else found[key] / row[key]["measured"] - 1}
                for key in ("tokens_per_call", "drift")
            }
            by_way.setdefault(name, []).append(errors)
    return {name: summary(found) for name, found in by_way.items()}


def main() -> None:
    """Measure, predict, write."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=sized(200, 4))
    parser.add_argument("--probe", type=int, default=sized(300, 4))
    parser.add_argument("--measured-only", action="store_true", help="stop before the predictions")
    args = parser.parse_args()
    began = time.time()
    pair = sprinter.load_pair(compile=False)
    every = heldout_prompts(args.data, 3 * args.prompts)
    measured_on = every[::3]
    others = [prompt for i, prompt in enumerate(every) if i % 3]
    probed = [others[i * len(others) // args.probe] for i in range(args.probe)]
    held = measure(pair, measured_on)
    if args.measured_only:
        return
    temperatures = sorted({temperature for _, temperature in ARMS}, reverse=True)
    recordings = {t: record(pair, probed if t == 1.0 else probed[::2], t) for t in temperatures}
    quick = {t: record(pair, probed[:24], t) for t in temperatures}
    rows = [
        compare(spec, t, recordings[t], np.array(held["arms"][f"{spec} @ {t}"], dtype=float))
        for spec, t in ARMS
    ]
    results = {
        "benchmark": "theory/predict", "command": command(), "environment": environment(),
        "prompts": len(measured_on), "probe": len(probed), "new_tokens": NEW_TOKENS, "rows": rows,
        "summary": summary(rows), "other_ways": other_ways(recordings, quick, rows),
        "independence": independence(recordings[1.0], held), "seconds": round(time.time() - began, 1),
    }  # fmt: skip
    save(draw_prediction, results, document("theory/predicted.png"))
    write_results("theory/predict", results, table(results))


if __name__ == "__main__":
    main()
