"""Every method on the built-in pair: speed, target calls, draft steps, drift, acceptance.

    python benchmarks/methods/every_method.py --data DIR

60 paragraphs that the pair was not trained on, 64 new tokens, temperatures 0, 0.7 and 1, meter complete, arms
interleaved prompt by prompt. On 12 other paragraphs are set: γ, SVIP's h and AdaEDL's λ0 for speed (``optimal`` has
measured costs instead); the dials of opt, uno, fuzzy, mentored and the gate for mean drift 0.05, 0.10 and 0.20 (7 to 10
values, read off by interpolation).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import sprinter
from benchmarks.common import (
    TEMPERATURES,
    arguments,
    best_gamma,
    cells,
    command,
    curve,
    environment,
    fastest,
    heldout_prompts,
    interleave,
    kept_results,
    method_arm,
    read_off,
    row,
    save,
    write_results,
)  # fmt: skip
from benchmarks.smoke import sized
from sprinter.theory.passes import measure_passes

DRIFTS = sized((0.05, 0.10, 0.20), (0.10,))
SVIP_H = sized((0.3, 0.45, 0.6, 0.75, 0.9, 1.1), (0.6,))
ADAEDL_LAMBDA = sized((0.0, 0.15, 0.3, 0.4, 0.5), (0.3,))
DIALS: dict[str, tuple[str, Sequence[float]]] = {  # spec with the dial's place, values to try
    "opt": ("opt(epsilon={}, gamma={gamma})", (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8)),
    "uno": ("uno(epsilon={}, gamma={gamma})", (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8)),
    "fuzzy": ("fuzzy(threshold={}, gamma={gamma})", (0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.3)),
    "mentored": ("mentored(kl={}, gamma={gamma})", (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
    "sprinter": ("sprinter(tau={})", (0.3, 0.45, 0.6, 0.68, 0.74, 0.8, 0.86)),
}
FIXED = (
    "specdec++", "disco",
    "heuristic", "confidence(c=0.4)", "lookup(n=3, gamma=5)", "batch(drafts=2, gamma={gamma})",
    "specinfer(drafts=2, gamma={gamma})", "spectr(drafts=2, gamma={gamma})",
    "block(gamma={gamma})", "calibrated", "lenient(w=0.8, gamma={gamma})", "typical(gamma={gamma})",
    "bild", "random(rate=0.5, gamma={gamma})",
    "cascade(gamma={gamma})", "relaxed(gamma={gamma})", "threshold(single=0.5, gamma={gamma})",
    "coin(rate=0.5)", "allocation(share=0.5)", "draft-only",
)  # fmt: skip
TAILS = (0, 2, 4)
NAME = "methods/every_method"
BASES = ("autoregressive", "speculative")


def tune(pair: sprinter.Pair, prompts: list[str], temperature: float) -> dict[str, Any]:
    """All settings of one temperature."""
    gamma, speeds = best_gamma(pair, prompts, temperature)
    svip = fastest(pair, [f"svip(h={h})" for h in SVIP_H], prompts, temperature)
    adaedl = fastest(
        pair, [f"stop=adaedl(threshold={v}),cap=40" for v in ADAEDL_LAMBDA], prompts, temperature
    )
    settings: dict[str, Any] = {"gamma": gamma, "speeds": {**speeds, **svip, **adaedl}}
    settings["optimal"] = measure_passes(pair, sampling=sprinter.Sampling(temperature)).optimal
    settings |= {"svip": next(iter(svip)), "adaedl": next(iter(adaedl)), "dials": {}, "curves": {}}
    for name in DIALS:
        tune_dial(pair, prompts, temperature, name, settings)
    return settings


def tune_dial(
    pair: sprinter.Pair, prompts: list[str], temperature: float, name: str, settings: dict[str, Any]
) -> None:
    """Values of one dial for the wanted drifts, written into ``settings``."""
    spec, values = DIALS[name]
    values = sized(values, values[::5])
    spec = spec.replace("{gamma}", str(settings["gamma"]))
    drifts = curve(pair, spec, values, prompts, temperature)["drift"]
    settings["curves"][spec] = dict(zip(map(str, values), drifts, strict=True))
    for drift in DRIFTS:
        value = round(read_off(drift, drifts, values), 6)
        settings["dials"][f"{name} @ {drift:.2f}"] = spec.format(value)


def arms_of(settings: dict[str, Any]) -> dict[str, str]:
    """Name -> spec."""
    gamma = settings["gamma"]
    arms = {"autoregressive": "autoregressive", "speculative": f"speculative(gamma={gamma})"}
    arms |= {"svip (tuned)": settings["svip"], "adaedl (tuned)": settings["adaedl"]}
    arms["optimal (measured costs)"] = settings["optimal"]
    arms |= {spec.split("(")[0]: spec.format(gamma=gamma) for spec in FIXED} | settings["dials"]
    inside = settings["dials"]["sprinter @ 0.10"].removesuffix(")")
    arms["sprinter @ 0.10, head 8"] = f"{inside}, head=8)"
    return arms | {f"sprinter @ 0.10, tail {k}": f"{inside}, tail={k})" for k in TAILS if k}


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    head = (
        "T", "arm", "method", "tokens/s", "÷ autoregressive", "÷ speculative", "target calls/token",
        "draft steps/token", "drift", "accepted of checked", "lossless",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for r in rows:
        values = [
            str(r["temperature"]), r["arm"], f"`{r['method']}`", f"{r['tokens_per_s']:.0f}",
            cells(r["speed_over_autoregressive"]), cells(r["speed_over_speculative"]),
            f"{r['target_calls_per_token'][0]:.3f}", f"{r['draft_steps_per_token']:.2f}", cells(r["mean_drift"], 3),
            f"{r['accepted_of_checked']:.2f}" if r["accepted_of_checked"] is not None else "–",
            "yes" if r["lossless"] else "no",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


def again(pair: sprinter.Pair, tuning: list[str], prompts: list[str], names: list[str]) -> None:
    """Measure some arms of the last results anew, beside both bases, and put their rows in the place of the old.

    The name of a dial stands for all of its arms, and has it tuned anew.
    """
    began = time.time()
    results = kept_results(NAME)
    for temperature in TEMPERATURES:
        settings = results["tuned"][str(temperature)]
        if "optimal" not in settings:
            settings["optimal"] = measure_passes(pair, sampling=sprinter.Sampling(temperature)).optimal
        for name in DIALS:
            if name in names:
                tune_dial(pair, tuning, temperature, name, settings)
        wanted = (*BASES, *names)
        chosen = {name: spec for name, spec in arms_of(settings).items() if name.split(" @")[0] in wanted}
        arms = [method_arm(pair, spec, temperature, name) for name, spec in chosen.items()]
        interleave(arms, prompts, note=f"T={temperature}")
        fresh = {arm.name: row(arm, temperature, plain=arms[0], exact=arms[1]) for arm in arms[len(BASES) :]}
        rows = {t: [old for old in results["rows"] if old["temperature"] == t] for t in TEMPERATURES}
        rows[temperature] = [fresh.pop(old["arm"], old) for old in rows[temperature]]
        rows[temperature] += fresh.values()
        results["rows"] = [one for t in TEMPERATURES for one in rows[t]]
    entry = {
        "command": command(NAME),
        "arms": names,
        "environment": environment(),
        "seconds": round(time.time() - began, 1),
    }
    # An earlier entry whose arms all have newer rows describes nothing any more.
    earlier = [
        old
        for old in results.get("again", [])
        if not all(arm in names or arm.split(" @")[0] in names for arm in old["arms"])
    ]
    results["again"] = [*earlier, entry]
    write_results(NAME, results, table(results["rows"]))


def main() -> None:
    """Tune, measure, write."""
    args = arguments(__doc__, tuning_prompts=12, again=True)
    began = time.time()
    pair = sprinter.load_pair(compile=False)
    tuning = heldout_prompts(args.data, args.tuning_prompts, skip=args.prompts)
    prompts = heldout_prompts(args.data, args.prompts)
    if args.again:
        return again(pair, tuning, prompts, args.again)
    rows: list[dict[str, Any]] = []
    settings = {}
    for temperature in TEMPERATURES:
        settings[temperature] = tune(pair, tuning, temperature)
        named = arms_of(settings[temperature])
        arms = [method_arm(pair, spec, temperature, name) for name, spec in named.items()]
        interleave(arms, prompts, args.repeats, note=f"T={temperature}")
        rows += [row(arm, temperature, plain=arms[0], exact=arms[1]) for arm in arms]
        save(NAME, table(rows), began, len(prompts), tuned=settings, rows=rows)
    return None


if __name__ == "__main__":
    main()
