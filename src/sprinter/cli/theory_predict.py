"""``sprinter theory predict``: predicts tokens per target call, drift and speed-up of any method by replay."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sprinter.cli.generating import AT_DEFAULTS, generates
from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import JsonOption, ProbingOptions, complete_method, refuse_unused
from sprinter.cli.pages import console, print_json, print_table
from sprinter.cli.progress import Progress
from sprinter.cli.signature import option, takes
from sprinter.cli.theory_common import read_prompts, record
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.engine.pair import Pair
    from sprinter.theory.recording import Recording

__all__ = ["command"]

_METHODS = ("autoregressive", "speculative", "sprinter")


@loads("profile")
@generates("top_k", "top_p")
@takes("probing", ProbingOptions)
def command(
    method: Annotated[
        list[str] | None,
        option(
            "Any method; may be repeated.",
            "--method",
            "-m",
            default=", ".join(_METHODS),
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
        refuse_unused(command, unused, "with --labels, which take the place of a probe: leave it out")
    if not best:
        refuse_unused(command, {"max_drift": max_drift}, "with --no-best: leave one of them out")
    methods = [parse_method(spec) for spec in method or _METHODS]
    given = None if cost_ratio is None else theory.CostRatio(cost_ratio)
    sampling = Sampling(probing.temperature, options.top_k, options.top_p)
    lines, seed = read_prompts(probing.prompts, probing.texts), probing.seed
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
            recordings = record(pair, lines, probing.max_new_tokens, sampling, seed, progress)
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
    _print(rows, found, cost.draft, max_drift)


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


def _print(rows: list[dict[str, Any]], found: dict[str, Any], ratio: float, max_drift: float) -> None:
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
