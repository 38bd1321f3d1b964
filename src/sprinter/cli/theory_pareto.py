"""``sprinter theory pareto``: target use against drift for every method, with Theorem 5's front."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import FiguresOption, JsonOption, ProbingOptions
from sprinter.cli.pages import console, print_files, print_json, print_table, write_file, write_json
from sprinter.cli.progress import Progress
from sprinter.cli.signature import option, takes
from sprinter.cli.theory_common import check_out, read_prompts, record

__all__ = ["command"]


@loads("profile")
@takes("probing", ProbingOptions)
def command(
    loading: Loading = Loading(),
    probing: ProbingOptions = ProbingOptions(),
    out: Annotated[
        Path | None, option("Directory for pareto.json and pareto.png.", default="numbers alone")
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
    lines, sampling = read_prompts(probing.prompts, probing.texts), Sampling(temperature=probing.temperature)
    pair = load(loading)
    with Progress() as progress:
        recordings = record(pair, lines, probing.max_new_tokens, sampling, probing.seed, progress)
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
    _print(data, files)


def _print(data: dict[str, Any], files: list[Path]) -> None:
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
