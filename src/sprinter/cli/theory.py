"""``sprinter theory``: the papers' theorems, simulated, drawn, counted, and used for predictions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sprinter.cli.fleet import fleet
from sprinter.cli.generating import AT_DEFAULTS, generates
from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import FiguresOption, JsonOption, ProbingOptions, complete_method, refuse_unused
from sprinter.cli.pages import (
    check_out,
    console,
    print_files,
    print_json,
    print_table,
    write_file,
    write_json,
)
from sprinter.cli.progress import Progress
from sprinter.cli.prompts import read_text
from sprinter.cli.signature import option, takes
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.engine.pair import Pair
    from sprinter.laws import Sampling
    from sprinter.theory.recording import Recording

__all__ = ["GROUP"]


_PROMPTS = (
    "The harbour of the old town lies at the mouth of the river, and its lighthouse was built in",
    "Once upon a time a small hedgehog found a red umbrella under the apple tree. She",
    "The council met on Tuesday to discuss the new railway line, which would connect the",
    "In biology, the term is used for a group of plants that",
    "The film was released in the spring of 1974 and was directed by",
    "The battle began at dawn when the first regiment crossed the bridge near",
    "He was born in a village in the north of the country, where his father",
    "The museum holds a large collection of paintings from the",
    "During the war the factory produced parts for aircraft, and after it",
    "The species lives in forests at an altitude of up to two thousand metres and feeds on",
    "The song reached number three in the charts and remained there for",
    "The earthquake struck on Sunday morning, and officials said that",
)
"""Prompts of the probe if the user gives none."""


def _read_prompts(file: Path | None, texts: int) -> list[str]:
    """``texts`` prompts: the file's lines, else the built-in ones, repeated if there are too few."""
    lines: Sequence[str] = _PROMPTS
    if file is not None:
        text = read_text(file, f"--prompts '{file}'", "a UTF-8 text, one prompt a line")
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise UserError(f"--prompts '{file}' is empty: give one prompt a line")
    return [lines[i % len(lines)] for i in range(texts)]


def _record(
    pair: Pair, prompts: Sequence[str], new_tokens: int, sampling: Sampling, seed: int, progress: Progress
) -> list[Recording]:
    """Run a short probe: texts of the target and of the draft for the same prompts, with both models' laws."""
    from sprinter.theory.recording import probe

    found = []
    for writer in ("target", "draft"):
        step = partial(progress, f"recording {len(prompts)} texts by the {writer}")
        found.append(
            probe(
                pair,
                prompts,
                writer=writer,
                new_tokens=new_tokens,
                sampling=sampling,
                seed=seed,
                progress=step,
            )
        )
    return found


def simulate(
    states: Annotated[int, option("States of the Markov chains.")] = 7,
    horizon: Annotated[int, option("Tokens per text.")] = 50,
    drafts: Annotated[
        list[int] | None,
        option("Drafts M of a batch, 2 to 8; may be repeated.", "--drafts", "-m", default="4, 5"),
    ] = None,
    runs: Annotated[int, option("Texts per curve.")] = 500,
    long: Annotated[
        int, option("Horizon of a longer simulation with a quarter of the texts; 0: none.")
    ] = 100,
    seed: Annotated[int, option("Seed of chains and draws.")] = 10,
    out: Annotated[
        Path | None, option("Directory for simulate.json and the figures.", default="numbers only")
    ] = None,
    figures: FiguresOption = True,
    json: JsonOption = False,
) -> None:
    """Check the theorems by simulation: the real decode loop over non-stationary Markov chains."""
    from sprinter.plots import png
    from sprinter.theory.figures import SIMULATIONS
    from sprinter.theory.simulation import Setting, run_all

    setting = Setting(states, horizon, seed, tuple(drafts or (4, 5)), runs, long)
    check_out(out, figures)
    with Progress() as progress:
        data = run_all(setting, progress)
    files: list[Path] = []
    if out is not None:
        files.append(write_json(out / "simulate.json", data))
        if figures:
            files += [
                write_file(out / f"{name}.png", png(partial(draw, data[part])))
                for name, (part, draw) in SIMULATIONS.items()
                if part in data
            ]
    if json:
        print_json({**data, "files": [str(file) for file in files]})
        return
    _print_checks(data, files)


def _print_checks(data: dict[str, Any], files: list[Path]) -> None:
    rows = (
        (
            one["what"], f"{one['closed']:.3f}", f"{one['mean']:.3f}",
            f"{one['low']:.3f} to {one['high']:.3f}"
            + " (outside)" * (not one["low"] <= one["closed"] <= one["high"]),
            str(one["runs"]),
        )
        for part in data.values()
        for one in (part.get("checks", []) if isinstance(part, dict) else [])
    )  # fmt: skip
    print_table(("closed form", "value", "simulated", "99 % interval", "texts"), rows)
    page = console()
    short = data["rejections"]["short"]
    ratio = short["gamma_5"]["calls_over_theorem_1"]
    page.print(
        f"{data['within_interval']} of {data['comparisons']} closed forms lie within their 99 % interval."
    )
    page.print(
        f"Drafts of 5 tokens need {short['gamma_5']['target_calls']:.2f} target calls a text, {100 * (ratio - 1):.1f} "
        f"% more than drafts to the horizon ({short['theorem_1_target_calls']:.2f}); Theorem 1 counts "
        f"{short['theorem_1_rejections']:.2f} rejections, {short['gamma_5']['rejections']:.2f} of which are left."
    )
    print_files(files)


@loads("profile", "suffix_cache", "template")
@takes("probing", ProbingOptions)
def pareto(
    loading: Loading = Loading(),
    probing: ProbingOptions = ProbingOptions(),
    out: Annotated[
        Path | None, option("Directory for pareto.json and pareto.png.", default="numbers only")
    ] = None,
    figures: FiguresOption = True,
    json: JsonOption = False,
) -> None:
    """Draw the trade-off between target use and mean drift for every method, from recorded laws."""
    from sprinter.laws import Sampling
    from sprinter.plots import png
    from sprinter.theory.figures import draw_pareto
    from sprinter.theory.pareto import pareto

    check_out(out, figures)
    lines, sampling = _read_prompts(probing.prompts, probing.texts), Sampling(temperature=probing.temperature)
    pair = load(loading)
    with Progress() as progress:
        recordings = _record(pair, lines, probing.max_new_tokens, sampling, probing.seed, progress)
        data = pareto(recordings, seed=probing.seed, progress=lambda name: progress("replaying"))
    data["settings"] = {
        "texts": probing.texts, "new_tokens": probing.max_new_tokens, "temperature": probing.temperature,
        "seed": probing.seed,
    }  # fmt: skip
    files: list[Path] = []
    if out is not None:
        files.append(write_json(out / "pareto.json", data))
        if figures:
            files.append(write_file(out / "pareto.png", png(lambda: draw_pareto(data))))
    if json:
        print_json({**data, "files": [str(file) for file in files]})
        return
    _print_curves(data, files)


def _print_curves(data: dict[str, Any], files: list[Path]) -> None:
    for title, curves, x in (
        ("At one position", [*data["rules"], *data["gates"]], "refused or checked"),
        ("In the loop", data["loop"], "target calls a token"),
    ):
        rows = (
            (
                point.get("spec", curve["name"]), f"{point['value']:.4g}",
                *(f"{point[key]:.3f}" for key in ("x", "y", "above_front")),
            )
            for curve in curves
            for point in curve["points"]
        )  # fmt: skip
        print_table(("method", "value", x, "mean drift", "above the front"), rows, title=title, left=2)
    console().print(
        f"The front: x + drift = {data['front']['tv']:.3f}, the mean TV(p, q) of {data['positions']} positions. It "
        "bounds rules for one draft that see q(x) and p(x). A gate sees the prefix alone: compare it with the coin."
    )
    print_files(files)


_PREDICTED = ("autoregressive", "speculative", "sprinter")


@loads("profile", "suffix_cache", "template")
@generates("top_k", "top_p")
@takes("probing", ProbingOptions)
def predict(
    method: Annotated[
        list[str] | None,
        option(
            "Any method; may be repeated.",
            "--method",
            "-m",
            default=", ".join(_PREDICTED),
            autocompletion=complete_method,
        ),
    ] = None,
    best: Annotated[bool, option("Search the best gamma, h, lambda, tau and T.")] = True,
    max_drift: Annotated[float, option("Maximum drift of the best lossy methods.", min=0.0, max=1.0)] = 0.1,
    cost_ratio: Annotated[
        float | None,
        option("Time of a draft step divided by that of a target forward pass.", default="measured here"),
    ] = None,
    loading: Loading = Loading(),
    labels: Annotated[
        Path | None, option("Labels made by 'sprinter gate label' instead of a probe.", default=False)
    ] = None,
    probing: ProbingOptions = ProbingOptions(),
    options: GenerationOptions = AT_DEFAULTS,
    json: JsonOption = False,
) -> None:
    """Predict methods on your pair: a short probe records both models' laws, and the decode loop replays them."""
    from sprinter.decode.spec import parse_method
    from sprinter.laws import Sampling
    from sprinter.theory import predict as theory
    from sprinter.theory.replay import check_replayable

    if labels is not None:
        unused = {name: getattr(probing, name) for name in ("prompts", "max_new_tokens", "texts")}
        refuse_unused(predict, unused, "with --labels, which take the place of a probe: leave it out")
    if not best:
        refuse_unused(predict, {"max_drift": max_drift}, "with --no-best: leave one of them out")
    methods = [parse_method(spec) for spec in method or _PREDICTED]
    given = None if cost_ratio is None else theory.CostRatio(cost_ratio)
    sampling = Sampling(probing.temperature, options.top_k, options.top_p)
    lines, seed = _read_prompts(probing.prompts, probing.texts), probing.seed
    pair = load(loading)
    if not method:
        methods = [one for one in methods if "gate" not in one.needs or pair.gate is not None]
    for one in methods:
        check_replayable(one, pair.heads)
    with Progress() as progress:
        if given is None:
            progress("measuring costs")
        cost = given or theory.measure_costs(pair)
        if labels is not None:
            recordings = _from_labels(labels, pair, sampling)
        else:
            recordings = _record(pair, lines, probing.max_new_tokens, sampling, seed, progress)
        rows = []
        for done, one in enumerate(methods, 1):
            rows.append(theory.predict(recordings, one, cost=cost, seed=seed).to_dict())
            progress(f"predicting {len(methods)} methods", done, len(methods))
        found: dict[str, Any] = {}
        if best:
            tried, wanted = itertools.count(1), sum(map(len, theory.dials(recordings[0]).values()))
            chosen = theory.best(
                recordings, cost, max_drift=max_drift, seed=seed,
                progress=lambda name: progress("looking for the best", next(tried), wanted),
            )  # fmt: skip
            found = {name: None if one is None else one.to_dict() for name, one in chosen.items()}
    if json:
        ratio = {"draft": cost.draft, "gate": cost.gate, "token": cost.token}
        print_json({"cost_ratio": ratio, "max_drift": max_drift, "predictions": rows, "best": found})
        return
    _print_predictions(rows, found, cost.draft, max_drift)


def _from_labels(directory: Path, pair: Pair, sampling: Any) -> list[Recording]:
    """Recordings made from labels of ``sprinter gate label``, checked against the pair."""
    from sprinter.fingerprint import weights_fingerprint
    from sprinter.laws import Sampling
    from sprinter.theory.from_labels import from_labels
    from sprinter.training.records import read_info, read_records

    info = read_info(directory)
    if pair.models.draft is None:
        raise UserError("labels hold the laws of both models, and this pair has no draft: give --draft")
    for which, model, wanted in (
        ("target", pair.models.target, info.target_fingerprint),
        ("draft", pair.models.draft, info.draft_fingerprint),
    ):
        if weights_fingerprint(model.model) != wanted:
            raise UserError(
                f"the labels in '{directory}' were made with another {which}: give the pair that made them"
            )
    if sampling != Sampling(temperature=info.temperature):
        raise UserError(
            f"the labels hold texts at temperature {info.temperature:g}: give --temperature {info.temperature:g} alone"
        )
    columns = read_records(directory).columns()
    new_tokens = int(info.settings["new_tokens"])
    return [
        from_labels(columns, writer, temperature=info.temperature, new_tokens=new_tokens, heads=pair.heads)
        for writer in ("target", "draft")
    ]


def _print_predictions(
    rows: list[dict[str, Any]], found: dict[str, Any], ratio: float, max_drift: float
) -> None:
    columns = ("method", "tokens/call", "mean drift", "draft steps/token", "speed-up", "lossless")
    for title, named in (
        ("Predicted", [("", row) for row in rows]),
        (f"The best of each dial at drift <= {max_drift:g}", list(found.items())),
    ):
        if named:
            print_table(columns, (_cells(dial, row) for dial, row in named), title=title)
    console().print(
        f"Speed-ups over plain decoding at a cost ratio of {ratio:.3f} (draft step over target pass); 95 % intervals."
    )


def _cells(dial: str, row: dict[str, Any] | None) -> tuple[str, ...]:
    if row is None:
        return (f"{dial}: none drifts so little", *("-",) * 5)
    calls, drift = row["tokens_per_call_interval"], row["mean_drift_interval"]
    return (
        f"{dial}: {row['method']}" if dial else row["method"],
        "-" if calls is None else f"{row['tokens_per_call']:.2f} [{calls[0]:.2f}, {calls[1]:.2f}]",
        f"{row['mean_drift']:.3f} [{drift[0]:.3f}, {drift[1]:.3f}]",
        f"{row['draft_steps']:.2f}", f"{row['speed_up']:.2f}", "yes" if row["lossless"] else "no",
    )  # fmt: skip


@loads("profile", "suffix_cache", "template")
def flops(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Architecture such as gpt2-xl, directory, hub id or GGUF file.",
            show_default="the paper's",
        ),
    ] = None,
    tokens: Annotated[int, option("Tokens to count.", min=1)] = 20,
    context: Annotated[
        int | None, option("Number of tokens attended to.", default="the model's full context", min=1)
    ] = None,
    loading: Loading = Loading(),
    gamma: Annotated[int, option("Draft tokens per round.", min=1)] = 5,
    method: Annotated[
        list[str] | None,
        option(
            "Count this method by passes and by tokens, with a short probe; may be repeated.",
            "--method",
            "-m",
            autocompletion=complete_method,
        ),
    ] = None,
    texts: Annotated[int, option("Texts of the probe.", min=2)] = 12,
    json: JsonOption = False,
) -> None:
    """Count forward FLOPs of models, of a round or of methods, as Hoffmann et al. (2022, Appendix F).

    For a round give --target and --draft, by architecture, directory or hub id. --method counts methods on a loaded
    pair.
    """
    target, draft = loading.target, loading.draft
    if not method and (others := [name for name in loading.given() if name not in ("target", "draft")]):
        raise UserError(f"--{others[0].replace('_', '-')} is for models that are loaded: give --method too")
    if method:
        unused = {"models": models, "tokens": tokens, "context": context, "gamma": gamma}
        refuse_unused(flops, unused, "with --method, which counts by a probe of its own: leave it out")
        value = _methods(method, loading, texts)
    elif target is not None or draft is not None:
        if target is None or draft is None:
            raise UserError("a round needs both models: give --target and --draft")
        unused = {"models": models, "tokens": tokens, "texts": texts}
        refuse_unused(flops, unused, "on a round, which --target and --draft ask for: leave it out")
        value = _round(target, draft, gamma, context)
    else:
        refuse_unused(flops, {"gamma": gamma}, "on single models: give --target and --draft")
        refuse_unused(flops, {"texts": texts}, "without a probe: give --method")
        value = {"models": _models(models, tokens, context), "tokens": tokens}
    if json:
        print_json(value)
        return
    for rows in value.values():
        if isinstance(rows, list):
            columns = [key.replace("_", " ") for key in rows[0]]
            print_table(columns, ([_cell(value) for value in row.values()] for row in rows))


def _models(models: Sequence[str] | None, tokens: int, context: int | None) -> list[dict[str, Any]]:
    from sprinter.models.flops import forward_flops, full_context
    from sprinter.theory.flops import PAPER_TABLE, config_of

    rows = []
    for name in models or PAPER_TABLE:
        config = config_of(name)
        each = forward_flops(config, context)
        printed = PAPER_TABLE.get(name.lower()) if tokens == 20 and context is None else None
        rows.append({
            "model": name, "context": context or full_context(config), "flops_per_token": each,
            "billions": tokens * each / 1e9, "paper_billions": printed,
        })  # fmt: skip
    return rows


def _round(target: str, draft: str, gamma: int, context: int | None) -> dict[str, Any]:
    """FLOPs of a round by equations 5 and 6, and by tokens, which equation 6 does not count."""
    from sprinter.models.flops import forward_flops
    from sprinter.theory.flops import config_of
    from sprinter.theory.sequential import sequential_flops, speculative_flops

    t, d = (config_of(name) for name in (target, draft))
    big, small = forward_flops(t, context), forward_flops(d, context)
    gate = 2.0 * int(d.get_text_config(decoder=True).hidden_size)
    exact = float(speculative_flops(gamma, small, big))
    rows = [
        {"round": f"speculative, {gamma} draft tokens (equation 5)", "billions": exact / 1e9},
        {"round": f"sprinter, {gamma} draft tokens, by passes (equation 6)",
         "billions": float(sequential_flops(gamma, small, gate, big)) / 1e9},
        {"round": "the same by tokens: the target's cache needs them all", "billions": (exact + gamma * gate) / 1e9},
    ]  # fmt: skip
    return {"target": target, "draft": draft, "gamma": gamma, "rounds": rows}


def _methods(specs: Sequence[str], loading: Loading, texts: int) -> dict[str, Any]:
    from sprinter.decode.spec import parse_method
    from sprinter.laws import Sampling
    from sprinter.models.flops import forward_flops
    from sprinter.theory.flops import method_flops
    from sprinter.theory.predict import predict
    from sprinter.theory.replay import check_replayable

    methods = [parse_method(spec) for spec in specs]
    pair = load(loading)
    for method in methods:
        check_replayable(method, pair.heads)
    with Progress() as progress:
        recordings = _record(pair, _read_prompts(None, texts), 64, Sampling(), 0, progress)
    assert pair.models.draft is not None
    big, small = (forward_flops(model.model.config) for model in (pair.models.target, pair.models.draft))
    rows = []
    for method in methods:
        found = predict(recordings, method)
        head = pair.heads["gate"].flops if "gate" in method.needs else 0.0
        count = method_flops(
            found.calls, found.tokens_read, found.draft_steps, found.gate_scores, big, small, head
        )
        rows.append({
            "method": found.method, "millions_by_passes": count.passes / 1e6, "millions_by_tokens": count.tokens / 1e6,
            "passes_over_plain": count.passes_ratio, "tokens_over_plain": count.tokens_ratio,
        })  # fmt: skip
    return {"methods": rows}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3e}" if value >= 1e6 else f"{value:.2f}"
    return str(value)


GROUP = {"simulate": simulate, "pareto": pareto, "flops": flops, "predict": predict, "fleet": fleet}
