"""``sprinter doctor --probe``: how two models agree on the user's texts, what they cost here, which methods can pay."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprinter.cli.loading import Loading, load
from sprinter.cli.pages import console, print_table
from sprinter.cli.probe_texts import read_probe
from sprinter.cli.progress import Progress
from sprinter.errors import SprinterError, UserError

if TYPE_CHECKING:
    from sprinter.decode.costs import PassCosts
    from sprinter.engine.pair import Pair
    from sprinter.laws import Sampling
    from sprinter.theory.recording import Recording
    from sprinter.theory.regions import Place
    from sprinter.theory.replay import Replay

__all__ = ["run_probe", "show_probe"]

_FEW = 500  # tokens that the texts of a probe should have
PAYS = 1.05
"""Least expected speed-up of a method that is said to pay: the loop's own time is not part of the expectation."""
MARGIN = 1.05
"""How much faster another runner must be: times vary between two probes."""
_log = logging.getLogger("sprinter")
_DIALS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "svip": ("svip(h={:g})", (0.2, 0.3, 0.4, 0.6)),
    "calibrated": ("calibrated(rate={:g})", (0.2, 0.4, 0.6)),
    "lookup": ("lookup", (0.0,)),
    "hybrid": ("hybrid(copies={:g})", (5, 11)),
    "sprinter": ("sprinter(tau={:g})", (0.6, 0.7, 0.8, 0.9)),
    "certain": ("certain(threshold={:g})", (0.3, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0)),
    "online": ("online(tau={:g})", (0.5, 0.6, 0.7, 0.8)),
}


def run_probe(
    loading: Loading, file: Path, *, max_drift: float, positions: int, temperature: float
) -> dict[str, Any]:
    """Load the pair and probe it: a JSON object.

    Args:
        file: texts.
        max_drift: of the lossy methods that are proposed.
        positions: tokens to probe.
        temperature: of the processed laws.

    Raises:
        UserError: no draft, or what is wrong with the texts.
    """
    from sprinter.bench.agreement import agreement, certain_positions
    from sprinter.laws import Sampling, overlap
    from sprinter.theory.passes import measure_passes
    from sprinter.theory.recording import read_passages
    from sprinter.theory.regions import place

    sampling = Sampling(temperature)
    with Progress() as progress:
        progress("loading the models")
        pair = load(loading)
        if pair.models.draft is None:
            raise UserError("a probe compares two models, and this pair has no draft: give --draft")
        texts = read_probe(file, pair.models, positions)
        reading = partial(progress, "reading the texts with both models")
        recording = read_passages(pair, texts.passages, sampling=sampling, progress=reading)
        costs = measure_passes(pair, sampling=sampling, progress=partial(progress, "timing forward passes"))
        beta = float(overlap(recording.p, recording.q).mean())
        runners, fastest, kept = _compare_runners(
            loading,
            pair,
            costs,
            lambda one: one.target_s(1) / max(1.0, one.speed_up(beta)),
            sampling,
            progress,
        )
        if fastest is not None and not isinstance(best := runners[fastest], str):
            costs = best
        methods = _methods(pair, recording, costs, beta, max_drift, sampling, progress)
    choice = _recommended(methods)
    return {
        "target": pair.models.target.id,
        "draft": pair.models.draft.id,
        "temperature": temperature,
        "file": str(file),
        "texts": {"read": len(texts.passages), "in_file": texts.texts},
        "positions": {"read": texts.positions, "in_texts": texts.tokens},
        "in_common": _in_common(pair, recording.ids.tolist()),
        **agreement(recording),
        "certain": certain_positions(recording),
        "seconds": _seconds(costs),
        "runners": {
            name: {"error": one} if isinstance(one, str) else _seconds(one) for name, one in runners.items()
        },
        "fastest_runner": fastest,
        "kept": kept,
        "max_drift": max_drift,
        "methods": methods,
        "place": _placed(
            place(beta, costs.step, kept=min(1.0, max_drift / max(1e-9, 1 - beta))), methods, choice
        )
        | {"overlap": beta, "cost": costs.step},
        "recommended": {
            "method": choice["method"],
            "command": _command(loading, choice, fastest, kept),
            "why": _why(choice, methods),
        },
    }


def _in_common(pair: Pair, ids: Sequence[int]) -> float | None:
    """Part of the tokens that the draft knows, if its vocabulary is another one."""
    from sprinter.models.translated import TranslatedModel

    draft = None if pair.models.draft is None else pair.models.draft.model
    return draft.tokens.share(ids) if isinstance(draft, TranslatedModel) else None


def _compare_runners(
    loading: Loading, pair: Pair, costs: PassCosts, token_s: Callable[[PassCosts], float], sampling: Sampling,
    progress: Progress,
) -> tuple[dict[str, PassCosts | str], str | None, bool]:  # fmt: skip
    """Time the passes of the other runners that could serve the pair, and keep the fastest for ``--runner auto``.

    Args:
        loading: of the pair; where it names a runner, a dtype or a device, nothing is compared.
        pair, costs: as loaded, and its own costs.
        token_s: seconds a token with given costs.

    Returns:
        Costs by runner, those of mixed pairs put together from them, or why it cannot serve the pair; the fastest one;
        and whether that is kept for later. None of these where there is no choice.
        Our kernels, which run GGUF files otherwise where they can, are left only for a runner that is faster by
        ``MARGIN``.
    """
    from sprinter.engine.runners import MIXED, OURS, RIVALS, USUAL, keep_fastest, rival_of
    from sprinter.theory.passes import measure_passes

    own = rival_of(pair.models)
    names = (
        "dtype",
        "draft_dtype",
        "draft_runner",
        "device",
        "device_map",
        "draft_vocabulary",
        "compile",
        "cache_dtype",
    )
    asked = {getattr(loading, name) for name in names}
    if own is None or loading.target is None or loading.runner != "auto" or asked - {None, "auto", False}:
        return {}, None, False
    found: dict[str, PassCosts | str] = {own: costs}
    for name, options in RIVALS.items():
        if name == own:
            continue
        progress(f"loading the models with runner {name}")
        try:
            other = load(replace(loading, **options))
            step = partial(progress, f"timing forward passes with runner {name}")
            found[name] = measure_passes(other, sampling=sampling, progress=step)
        except (SprinterError, MemoryError, RuntimeError) as error:
            found[name] = str(error) or type(error).__name__
    timed: Mapping[str, PassCosts] = {name: one for name, one in found.items() if not isinstance(one, str)}
    for name, (of_target, of_draft, _) in MIXED.items():
        if of_target in timed and of_draft in timed:
            found[name] = replace(timed[of_target], draft=timed[of_draft].draft)
    timed = {name: one for name, one in found.items() if not isinstance(one, str)}
    usual = OURS if OURS in timed else USUAL
    seconds = {name: token_s(one) * (1 if name == usual else MARGIN) for name, one in timed.items()}
    fastest = min(seconds, key=seconds.__getitem__)
    try:
        keep_fastest(loading.target, loading.draft, loading.arguments(), fastest)
    except (UserError, OSError, RuntimeError) as error:
        _log.warning("which runner is fastest cannot be kept for later: %s", error)
        return found, fastest, False
    return found, fastest, True


def _recommended(methods: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The default, unless another exact method is expected to be faster by more than a probe can tell apart."""
    default = next(row for row in methods if row["default"])
    best = max((row for row in methods if row["lossless"]), key=lambda row: float(row["speed_up"]))
    return best if best["speed_up"] > PAYS * default["speed_up"] else default


def _why(choice: Mapping[str, Any], methods: Sequence[Mapping[str, Any]]) -> str:
    """The reason for a recommendation, in one sentence."""
    if choice["method"] == "autoregressive":
        best = max(float(row["speed_up"]) for row in methods if row["lossless"])
        return (
            f"No exact draft is expected to gain enough: the best is {best:.2f}x as fast as plain decoding."
        )
    most = (
        "about as fast as any other exact method" if choice["default"] else "the fastest of the exact methods"
    )
    return f"It keeps the target's law, expected {choice['speed_up']:.2f}x as fast as plain decoding, {most}."


def _placed(where: Place, methods: Sequence[Mapping[str, Any]], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Where a pair lies on the map of cost and overlap, and the method for it: of lossy ones the fastest that fits."""
    lossy = [row for row in methods if not row["lossless"]]
    method = choice["method"]
    if where.region == "trust" and lossy:
        method = max(lossy, key=lambda row: float(row["speed_up"]))["method"]
    elif where.region == "plain":
        method = "autoregressive"
    return {**asdict(where), "gain": where.gain, "method": method}


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


def _methods(
    pair: Pair, recording: Recording, costs: PassCosts, beta: float, max_drift: float, sampling: Sampling,
    progress: Progress,
) -> list[dict[str, Any]]:  # fmt: skip
    """The fastest setting of each method with a drift of at most ``max_drift``."""
    from sprinter.decode.spec import parse_method
    from sprinter.engine.runtime import drafts_by_default
    from sprinter.theory.replay import replay

    default = "auto" if drafts_by_default(costs) else "autoregressive"
    _, gamma = costs.best_run(beta)
    tried = {"autoregressive": ["autoregressive"], "speculative": [f"speculative(gamma={gamma})"]}
    tried["block"] = [f"block(gamma={gamma})"]
    tried["optimal"] = [f"optimal({costs.named})"]
    tried["auto"] = [f"auto({costs.named}, reads={costs.reads})"]
    for name, (spec, values) in _DIALS.items():
        if name != "sprinter" or pair.gate is not None:
            tried[name] = [spec.format(value) for value in values]
    rows, done = [], 0
    for name, specs in tried.items():
        found: list[dict[str, Any]] = []
        for spec in specs:
            method = parse_method(spec)
            run = replay(recording, method)
            row = _row(spec, method.lossless(sampling.greedy), run, costs)
            found.append({**row, "default": name == default})
            done += 1
            progress("replaying methods", done, sum(map(len, tried.values())))
        fit = [row for row in found if row["lossless"] or row["mean_drift"] <= max_drift]
        if fit:
            rows.append(max(fit, key=lambda row: row["speed_up"]))
    return rows


def _seconds(costs: PassCosts) -> dict[str, Any]:
    return {"target_pass": {str(n): seconds for n, seconds in costs.target}, "draft_step": costs.draft_s(1)}


def _row(spec: str, lossless: bool, run: Replay, costs: PassCosts) -> dict[str, Any]:
    return {
        "method": spec,
        "lossless": lossless,
        "speed_up": run.speed_up(costs),
        "tokens_per_s": 1 / run.token_s(costs),
        "target_calls": run.target_calls / run.tokens,
        "draft_steps": run.draft_steps / run.tokens,
        "mean_drift": run.mean_drift,
        "trusted": run.trusted / run.tokens,
        "pays": round(run.speed_up(costs), 2) >= PAYS,  # as it is shown
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
    if found["positions"]["in_texts"] < _FEW:
        page.print(
            f"warning: {found['positions']['in_texts']} tokens say little: give ten texts of about 100 words, a line "
            "each, such as the target writes\n"
        )
    if (share := found["in_common"]) is not None:
        page.print(f"different vocabularies: {share:.0%} of these tokens are in common\n")
    _show_agreement(found)
    _show_certain(found["certain"])
    for name, seconds in (found["runners"] or {None: found["seconds"]}).items():
        if error := seconds.get("error"):
            page.print(f"runner {name}: {error}\n", markup=False)
        else:
            _show_costs(seconds, name)
    _show_methods(found["methods"], found["max_drift"])
    page.print(_place_line(found["place"], found["max_drift"]), markup=False)
    page.print(
        "Expected on these texts from the times above, without the loop's own; drift is TV to the target's law."
    )
    if (fastest := found["fastest_runner"]) is not None:
        later = " --runner auto takes it for these files from now on." if found["kept"] else ""
        page.print(f"Fastest here: runner {fastest}.{later}")
    lossy = [row for row in found["methods"] if not row["lossless"] and row["pays"]]
    if lossy:
        best = max(lossy, key=lambda row: row["speed_up"])
        page.print(
            f"Fastest lossy method at drift <= {found['max_drift']:g}: {best['method']}, {best['speed_up']:.2f}x.",
            markup=False,
        )
    page.print(found["recommended"]["why"], markup=False, soft_wrap=True)
    page.print(f"Recommended: {found['recommended']['command']}", markup=False, soft_wrap=True)


def _place_line(where: Mapping[str, Any], max_drift: float) -> str:
    """The pair's place on the map of docs/studies/when-it-pays.md, in words."""
    from sprinter.theory.regions import GAIN, LONGEST_DRAFT

    needed = where["needed"]
    more = (
        "no drift is enough"
        if needed is None
        else f"drift {needed * (1 - where['overlap']):.2g} would be needed"
    )
    return (
        f"On the map: a draft step costs {where['cost']:.2f} of a target pass, overlap {where['overlap']:.2f}: "
        f"{where['region']} ({where['method']}). With drafts of up to {LONGEST_DRAFT} tokens drift {max_drift:g} makes "
        f"it about {where['gain']:.2f}x as fast as the best without drift; for {GAIN:g}x {more}."
        + (" What is recommended below keeps the target's law." if where["region"] == "trust" else "")
    )


def _show_agreement(found: Mapping[str, Any]) -> None:
    from sprinter.bench.agreement import CLOSE

    rows = []
    for name, key in (("mean overlap β = Σ min(p, q)", "overlap"), ("same first choice", "agreement")):
        value, low, high = found[key]
        rows.append((name, f"{value:.3f}", "-" if low is None else f"{low:.3f} to {high:.3f}"))
    rows.append((f"positions with β > {CLOSE:g}", f"{found[f'overlap_above_{CLOSE:g}']:.0%}", ""))
    for name, areas in found["auc"].items():
        for what, area in areas.items():
            shown = "-" if area is None else f"{area:.3f}"
            rows.append((f"AUC of {name} for {what.replace('_', ' ')}", shown, ""))
    print_table(("", "value", "95 % interval"), rows, title="How far the draft agrees with the target")


def _show_certain(found: Sequence[Mapping[str, Any]]) -> None:
    from sprinter.bench.agreement import SIGNS

    rows = (
        (
            row["signal"], f"{'<=' if SIGNS[row['signal']] < 0 else '>='} {row['threshold']:g}",
            f"{row['trusted']:.0%}", f"{row['drift']:.3f}",
        )
        for row in found
    )  # fmt: skip
    columns = ("signal", "threshold", "trusted", "drift")
    print_table(columns, rows, title="Positions that certain would trust")


def _show_costs(seconds: Mapping[str, Any], runner: str | None) -> None:
    passes = seconds["target_pass"]
    rows = (
        ("target, by number of tokens", *(f"{1e3 * each:.1f}" for each in passes.values())),
        ("draft step", f"{1e3 * seconds['draft_step']:.1f}", *[""] * (len(passes) - 1)),
    )
    title = "Milliseconds of a forward pass" + ("" if runner is None else f", runner {runner}")
    print_table(("", *passes), rows, title=title)


def _show_methods(methods: Sequence[Mapping[str, Any]], max_drift: float) -> None:
    columns = (
        "method", "speed-up", "tokens/s", "target calls/token", "draft steps/token", "drift", "pays",
    )  # fmt: skip
    auto = [row for row in methods if row["method"].startswith("auto(")]
    rows = (
        (
            ("auto" if row in auto else row["method"]) + " (default)" * row["default"],
            f"{row['speed_up']:.2f}x", f"{row['tokens_per_s']:.1f}",
            f"{row['target_calls']:.2f}", f"{row['draft_steps']:.2f}",
            "0 (exact)" if row["lossless"] else f"{row['mean_drift']:.3f}",
            "-" if row["method"] == "autoregressive" else "yes" if row["pays"] else "no",
        )
        for row in methods
    )  # fmt: skip
    print_table(columns, rows, title=f"Expected speed; lossy methods at drift <= {max_drift:g}")
    if any(row["speed_up"] < 1 for row in auto):
        console().print(
            "auto is shown as if it drafted throughout: where that loses time it decodes plainly.\n"
        )
