"""``sprinter theory fleet``: what replicas of a server do under load, before there are any."""

from __future__ import annotations

import json as reader
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import FiguresOption, JsonOption
from sprinter.cli.pages import (
    check_out,
    console,
    print_files,
    print_json,
    print_table,
    write_file,
    write_json,
)  # fmt: skip
from sprinter.cli.progress import Progress
from sprinter.cli.prompts import read_text
from sprinter.cli.signature import option, takes
from sprinter.errors import UserError
from sprinter.theory.settings import FleetSettings

if TYPE_CHECKING:
    from sprinter.theory.fleet import Forecast
    from sprinter.theory.load_costs import LoadCosts

__all__ = ["fleet"]

_PANELS = {
    "Load": "streams rate lengths prompt_tokens answer_tokens spread texts seed first_ms between_ms",
    "Methods": "gamma accept trust tail keep cap round_trip_ms",
    "Server": "replicas rows step_tokens slowdown step_ms event_ms text_ms",
    "GPUs": "parameters draft_parameters weight_bits kv_kib gpus bandwidth tflops memory_gb efficiency pass_ms",
}


@loads("profile", "suffix_cache", "template")
@takes(
    "settings",
    FleetSettings,
    panels=_PANELS,
    more={"streams": {"default": "1, 4, 16, 64"}},
    read=lambda given: {name: value for name, value in given.items() if value != []},
)
def fleet(
    settings: Any = None,
    costs: Annotated[
        Path | None,
        option("File of costs that an earlier --json printed.", default="measured here", panel="Server"),
    ] = None,
    loading: Loading = Loading(),
    out: Annotated[
        Path | None, option("Directory for fleet.json and fleet.png.", default="numbers only")
    ] = None,
    figures: FiguresOption = True,
    json: JsonOption = False,
) -> None:
    """Predict throughput, latencies and GPUs of plain, exact and trusting decoding under load.

    Costs of passes are measured on the pair here, or read from --costs; with --parameters they follow from the
    bandwidth and arithmetic of the GPUs.
    """
    from sprinter.plots import png
    from sprinter.theory.figures import draw_fleet
    from sprinter.theory.fleet import METHODS, forecast, needed
    from sprinter.theory.machines import MeasuredPasses, Roofline, draft_lengths

    if settings.parameters is not None and (costs is not None or loading.given()):
        raise UserError("--parameters describes a model on GPUs: leave out --costs and the options of models")
    check_out(out, figures)
    given = None if settings.parameters is not None else _measured(costs, loading, settings.rows)
    found: list[Forecast] = []
    with Progress() as progress:
        for method in METHODS:
            progress(f"simulating {method}")
            priced = Roofline(settings) if given is None else MeasuredPasses(given, method == "trust")
            if settings.rate is None:
                found += [
                    forecast(settings, priced, method, n, settings.replicas or 1) for n in settings.streams
                ]
            elif settings.replicas:
                found.append(forecast(settings, priced, method, replicas=settings.replicas))
            elif (one := needed(settings, priced, method)) is not None:
                found.append(one)
    if not found:
        raise UserError(
            "no fleet keeps these latencies: give a larger --first-ms or --between-ms, or more --rows"
        )
    told = {**asdict(settings), "lengths": settings.lengths and str(settings.lengths)}
    lengths = draft_lengths(settings, Roofline(settings) if given is None else MeasuredPasses(given))
    data = {
        "settings": told, "costs": given and asdict(given), "forecasts": [one.to_dict() for one in found],
        "draft_tokens": lengths,
        "out_of_reach": [method for method in METHODS if method not in {one.method for one in found}],
    }  # fmt: skip
    files: list[Path] = []
    if out is not None:
        files.append(write_json(out / "fleet.json", data))
        if figures and settings.rate is None:
            files.append(write_file(out / "fleet.png", png(lambda: draw_fleet(data))))
    if json:
        print_json({**data, "files": [str(file) for file in files]})
        return
    _print(found, settings, lengths)
    print_files(files)


def _measured(file: Path | None, loading: Loading, rows: int) -> LoadCosts:
    """Costs of a file, or of the pair here."""
    from sprinter.theory.load_costs import LoadCosts, measure_load

    if file is None:
        return measure_load(load(loading), rows)
    if loading.given():
        raise UserError("--costs takes the place of models: leave out the options that load them")
    wanted = "a file of 'sprinter theory fleet --json'"
    try:
        kept = reader.loads(read_text(file, f"--costs '{file}'", wanted))["costs"]
        return LoadCosts.from_json(kept)
    except (reader.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--costs '{file}' holds no costs ({error}): give {wanted}") from None


def _print(found: list[Forecast], settings: FleetSettings, lengths: list[tuple[int, int, int]]) -> None:
    rows = (
        (
            one.method, "-" if one.streams is None else str(one.streams), str(one.replicas * settings.gpus),
            str(one.rows), f"{one.tokens_per_s:,.0f}", f"{one.texts_per_s:.3g}", _spread(one.first_ms),
            _spread(one.token_ms), _spread(one.between_ms), f"{one.tokens_per_call:.2f}", f"{one.busy:.0%}",
        )
        for one in found
    )  # fmt: skip
    machines = "replicas" if settings.parameters is None else "GPUs"
    heads = ("method", "streams", machines, "rows", "tokens/s", "texts/s", "first token, ms", "a token, ms",
             "between events, ms", "tokens/call", "busy")  # fmt: skip
    print_table(heads, rows, title="Predicted: median and 95 % of latencies")
    each = ", ".join(
        f"{drafted} for {first if first == last else f'{first} to {last}'}"
        for first, last, drafted in lengths
    )
    console().print(
        f"Draft tokens of an exact round that are fastest, by rows: {each}. For vLLM:\n"
        f"num_speculative_tokens_per_batch_size={[list(one) for one in lengths]}",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    if settings.rate is not None and not settings.replicas:
        console().print(
            f"The fewest that keep 95 % of first tokens within {settings.first_ms:g} ms and of events within "
            f"{settings.between_ms:g} ms at {settings.rate:g} texts/s; methods that are missing cannot."
        )


def _spread(values: tuple[float, float] | None) -> str:
    if values is None:
        return "-"
    middle, high = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)
    return f"{middle} ({high})"
