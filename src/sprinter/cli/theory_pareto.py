"""``sprinter theory pareto``: target use against drift for every method, with Theorem 5's front."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.pages import console, print_json
from sprinter.cli.theory_common import ProgressLine, check_out, read_prompts, record, write_file, write_json

__all__ = ["command"]


@loads(without=("profile",))
def command(
    loading: Loading = Loading(),
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, one prompt a line.", show_default="12 built-in ones")
    ] = None,
    texts: Annotated[int, typer.Option(min=2, help="Texts by each model.")] = 24,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens per text.")
    ] = 64,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same points.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for pareto.json and pareto.png.", show_default="numbers alone"),
    ] = None,
    figures: Annotated[bool, typer.Option(help="Draw the PNG file into --out.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Draw the trade-off between target use and mean drift for every method, from recorded laws."""
    from sprinter.laws import Sampling
    from sprinter.plots import png
    from sprinter.theory.figures import draw_pareto
    from sprinter.theory.pareto import pareto

    check_out(out, figures)
    lines, sampling, progress = (
        read_prompts(prompts, texts),
        Sampling(temperature=temperature),
        ProgressLine(),
    )
    pair = load(loading)
    recordings = record(pair, lines, max_new_tokens, sampling, seed, progress)
    data = pareto(recordings, seed=seed, progress=lambda name: progress("replaying", 0, 0))
    progress.close()
    data["settings"] = {
        "texts": texts,
        "new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
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
    from rich import box
    from rich.table import Table

    for title, curves, x in (
        ("At one position", [*data["rules"], *data["gates"]], "refused or checked"),
        ("In the loop", data["loop"], "target calls a token"),
    ):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("method", "value"):
            table.add_column(name)
        for name in (x, "mean drift", "above the front"):
            table.add_column(name, justify="right")
        for curve in curves:
            for point in curve["points"]:
                name = point.get("spec", curve["name"])
                numbers = (f"{point[key]:.3f}" for key in ("x", "y", "above_front"))
                table.add_row(name, f"{point['value']:.4g}", *numbers)
        console().print(table)
    console().print(
        f"The front: x + drift = {data['front']['tv']:.3f}, the mean TV(p, q) of {data['positions']} positions. It "
        "bounds rules for one draft that see q(x) and p(x). A gate sees the prefix alone: compare it with the coin."
    )
    if files:
        console().print("wrote " + ", ".join(str(file) for file in files))
