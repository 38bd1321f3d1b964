"""``sprinter doctor --probe``: how two models agree on the user's texts, what they cost here, which methods can pay."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprinter.cli.loading import Loading, load
from sprinter.cli.pages import console
from sprinter.cli.probe_runners import compare_runners
from sprinter.cli.probe_texts import ProbeTexts, read_probe
from sprinter.cli.theory_common import ProgressLine
from sprinter.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from sprinter.engine.pair import Pair
    from sprinter.laws import Sampling
    from sprinter.theory.passes import PassTimes
    from sprinter.theory.recording import Recording
    from sprinter.theory.replay import Replay

__all__ = ["Probing", "run_probe", "show_probe"]

PAYS = 1.05
"""Least expected speed-up of a method that is said to pay: the loop's own time is not part of the expectation."""
_DIALS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "svip": ("svip(h={:g})", (0.2, 0.3, 0.4, 0.6)),
    "calibrated": ("calibrated(rate={:g})", (0.2, 0.4, 0.6)),
    "lookup": ("lookup", (0.0,)),
    "hybrid": ("hybrid(copies={:g})", (5, 11)),
    "sprinter": ("sprinter(tau={:g})", (0.6, 0.7, 0.8, 0.9)),
    "certain": ("certain(threshold={:g})", (0.3, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0)),
    "online": ("online(tau={:g})", (0.5, 0.6, 0.7, 0.8)),
}
_GAMMAS = range(1, 13)


@dataclass(frozen=True, slots=True)
class Probing:
    """The options of a probe.

    Attributes:
        file: texts. max_drift: of the lossy methods that are proposed. positions: tokens to probe. temperature: of the
            processed laws.
    """

    file: Path
    max_drift: float
    positions: int
    temperature: float


def run_probe(loading: Loading, asked: Probing) -> dict[str, Any]:
    """Load the pair and probe it: a JSON object.

    Raises:
        UserError: no draft, or what is wrong with the texts.
    """
    from sprinter.bench.agreement import agreement, certain_positions
    from sprinter.laws import Sampling, overlap
    from sprinter.theory.given import read_passages
    from sprinter.theory.passes import measure_passes

    sampling, progress = Sampling(asked.temperature), ProgressLine()
    progress("loading the models")
    pair = load(loading)
    if pair.models.draft is None:
        raise UserError("a probe compares two models, and this pair has no draft: give --draft")
    texts = read_probe(asked.file, pair.models, asked.positions)

    def step(stage: str) -> Any:
        return lambda done, wanted: progress(stage, done, wanted)

    recording = read_passages(
        pair, texts.passages, sampling=sampling, progress=step("reading the texts with both models")
    )
    times = measure_passes(pair, sampling=sampling, progress=step("timing forward passes"))
    beta = float(overlap(recording.p, recording.q).mean())
    runners, fastest, kept = compare_runners(
        loading, pair, times, lambda one: min(one.pass_s(1), _best_gamma(beta, one)[1]), sampling, progress
    )
    if fastest is not None and not isinstance(best := runners[fastest], str):
        times = best
    methods = _methods(pair, recording, times, beta, asked.max_drift, sampling, progress)
    choice = _recommended(methods)
    progress.close()
    return {
        "target": pair.models.target.id,
        "draft": pair.models.draft.id,
        "temperature": asked.temperature,
        **_sizes(asked.file, texts),
        **agreement(recording),
        "certain": certain_positions(recording),
        "seconds": _seconds(times),
        "runners": {
            name: {"error": one} if isinstance(one, str) else _seconds(one) for name, one in runners.items()
        },
        "fastest_runner": fastest,
        "kept": kept,
        "max_drift": asked.max_drift,
        "methods": methods,
        "recommended": {"method": choice["method"], "command": _command(loading, choice, fastest, kept)},
    }


def _recommended(methods: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The default, unless another exact method is expected to be faster by more than a probe can tell apart."""
    default = next(row for row in methods if row["default"])
    best = max((row for row in methods if row["lossless"]), key=lambda row: float(row["speed_up"]))
    return best if best["speed_up"] > PAYS * default["speed_up"] else default


def _command(loading: Loading, best: Mapping[str, Any], fastest: str | None, kept: bool) -> str:
    """The command that generates in the recommended way; plain decoding needs no draft.

    Args:
        fastest, kept: the fastest runner, and whether ``--runner auto`` takes it.
    """
    from sprinter.engine.runners import MIXED, RIVALS

    given = loading.given()
    if fastest is not None and not kept:
        given |= MIXED[fastest][2] if fastest in MIXED else RIVALS[fastest]
    if best["method"] == "autoregressive":
        given = {name: value for name, value in given.items() if not name.startswith(("draft", "gate"))}
    words = ["sprinter", "generate", "PROMPT"]
    for name, value in given.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [f"--{'no-' if one is False else ''}{name.replace('_', '-')}"]
            words += [] if isinstance(one, bool) else [str(one)]
    if not best["default"]:
        words += ["--method", best["method"]]
    return shlex.join(words)


def _sizes(file: Path, texts: ProbeTexts) -> dict[str, Any]:
    return {
        "file": str(file),
        "texts": {"read": len(texts.passages), "in_file": texts.texts},
        "positions": {"read": texts.positions, "in_texts": texts.tokens},
    }


def _methods(
    pair: Pair,
    recording: Recording,
    times: PassTimes,
    beta: float,
    max_drift: float,
    sampling: Sampling,
    progress: ProgressLine,
) -> list[dict[str, Any]]:
    """The fastest setting of each method with a drift of at most ``max_drift``."""
    from sprinter.decode.costs import PassCosts
    from sprinter.decode.spec import parse_method
    from sprinter.engine.parts import drafts_by_default
    from sprinter.theory.replay import replay

    draft = ((1, times.draft_s), (2, times.draft_s))
    drafts = drafts_by_default(PassCosts(tuple(sorted(times.target_s.items())), draft))
    default = "auto" if drafts else "autoregressive"
    gamma, _ = _best_gamma(beta, times)
    tried = {"autoregressive": ["autoregressive"], "speculative": [f"speculative(gamma={gamma})"]}
    tried["block"] = [f"block(gamma={gamma})"]
    tried["optimal"], tried["auto"] = [times.optimal], [f"auto({times.auto})"]
    for name, (spec, values) in _DIALS.items():
        if name != "sprinter" or pair.gate is not None:
            tried[name] = [spec.format(value) for value in values]
    rows, done = [], 0
    for name, specs in tried.items():
        found: list[dict[str, Any]] = []
        for spec in specs:
            method = parse_method(spec)
            run = replay(recording, method)
            row = _row(spec, method.lossless(sampling.greedy), run, times)
            found.append({**row, "default": name == default})
            done += 1
            progress("replaying methods", done, sum(map(len, tried.values())))
        fit = [row for row in found if row["lossless"] or row["mean_drift"] <= max_drift]
        if fit:
            rows.append(max(fit, key=lambda row: row["speed_up"]))
    return rows


def _best_gamma(overlap: float, times: PassTimes) -> tuple[int, float]:
    """The draft length with the largest expected speed, from independent acceptances (Leviathan et al. 2023), and
    seconds a token with it."""
    from sprinter.theory.speculation import expected_tokens

    def token_s(gamma: int) -> float:
        round_s = gamma * times.draft_s + times.pass_s(gamma + 1)
        return round_s / float(expected_tokens(overlap, gamma))

    best = min(_GAMMAS, key=token_s)
    return best, token_s(best)


def _seconds(times: PassTimes) -> dict[str, Any]:
    return {
        "target_pass": {str(n): seconds for n, seconds in times.target_s.items()},
        "draft_step": times.draft_s,
    }


def _row(spec: str, lossless: bool, run: Replay, times: PassTimes) -> dict[str, Any]:
    return {
        "method": spec,
        "lossless": lossless,
        "speed_up": times.speed_up(run),
        "tokens_per_s": 1 / times.token_s(run),
        "target_calls": run.target_calls / run.tokens,
        "draft_steps": run.draft_steps / run.tokens,
        "mean_drift": run.mean_drift,
        "trusted": run.trusted / run.tokens,
        "pays": round(times.speed_up(run), 2) >= PAYS,  # as it is shown
    }


# --- shown ------------------------------------------------------------------------------------------------------------
def show_probe(found: Mapping[str, Any]) -> None:
    """Print the tables of a probe."""
    page = console()
    texts, positions = found["texts"], found["positions"]
    page.print(
        f"{texts['read']} of {texts['in_file']} texts, {positions['read']} of their {positions['in_texts']} tokens, "
        f"temperature {found['temperature']:g}\ntarget {found['target']}\ndraft  {found['draft']}\n"
    )
    page.print(_agreement_table(found))
    page.print(_certain_table(found["certain"]))
    for name, seconds in (found["runners"] or {None: found["seconds"]}).items():
        if error := seconds.get("error"):
            page.print(f"runner {name}: {error}\n", markup=False)
        else:
            page.print(_cost_table(seconds, name))
    page.print(_method_table(found["methods"], found["max_drift"]))
    page.print(
        "Expected on these texts from the times above, without the loop's own; drift is TV to the target's law."
    )
    if (fastest := found["fastest_runner"]) is not None:
        later = " --runner auto takes it for these files from now on." if found["kept"] else ""
        page.print(f"Fastest here: runner {fastest}.{later}")
    page.print(f"Recommended: {found['recommended']['command']}", markup=False, soft_wrap=True)


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def _agreement_table(found: Mapping[str, Any]) -> Table:
    from sprinter.bench.agreement import CLOSE

    table = _table("How far the draft agrees with the target", ("", "value", "95 % interval"))
    for name, key in (("mean overlap β = Σ min(p, q)", "overlap"), ("same first choice", "agreement")):
        value, low, high = found[key]
        table.add_row(name, f"{value:.3f}", "-" if low is None else f"{low:.3f} to {high:.3f}")
    table.add_row(f"positions with β > {CLOSE:g}", f"{found[f'overlap_above_{CLOSE:g}']:.0%}", "")
    for name, areas in found["auc"].items():
        for what, area in areas.items():
            shown = "-" if area is None else f"{area:.3f}"
            table.add_row(f"AUC of {name} for {what.replace('_', ' ')}", shown, "")
    return table


def _certain_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    from sprinter.bench.agreement import SIGNS

    table = _table("Positions that certain would trust", ("signal", "threshold", "trusted", "drift"))
    for row in rows:
        shown = f"{'<=' if SIGNS[row['signal']] < 0 else '>='} {row['threshold']:g}"
        table.add_row(row["signal"], shown, f"{row['trusted']:.0%}", f"{row['drift']:.3f}")
    return table


def _cost_table(seconds: Mapping[str, Any], runner: str | None) -> Table:
    passes = seconds["target_pass"]
    title = "Milliseconds of a forward pass" + ("" if runner is None else f", runner {runner}")
    table = _table(title, ("", *passes))
    table.add_row("target, by number of tokens", *(f"{1e3 * each:.1f}" for each in passes.values()))
    table.add_row("draft step", f"{1e3 * seconds['draft_step']:.1f}", *[""] * (len(passes) - 1))
    return table


def _method_table(methods: Sequence[Mapping[str, Any]], max_drift: float) -> Table:
    table = _table(
        f"Expected speed; lossy methods at drift <= {max_drift:g}",
        ("method", "speed-up", "tokens/s", "target calls/token", "draft steps/token", "drift", "pays"),
    )
    for row in methods:
        table.add_row(
            row["method"] + " (default)" * row["default"],
            f"{row['speed_up']:.2f}x", f"{row['tokens_per_s']:.1f}", f"{row['target_calls']:.2f}",
            f"{row['draft_steps']:.2f}", "0 (exact)" if row["lossless"] else f"{row['mean_drift']:.3f}",
            "-" if row["method"] == "autoregressive" else "yes" if row["pays"] else "no",
        )  # fmt: skip
    return table
