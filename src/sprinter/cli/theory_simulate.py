"""``sprinter theory simulate``: compares closed forms with Monte Carlo simulation of the real decode loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from sprinter.cli.options import FiguresOption, JsonOption
from sprinter.cli.pages import console, print_files, print_json, print_table, write_file, write_json
from sprinter.cli.progress import Progress
from sprinter.cli.signature import option
from sprinter.cli.theory_common import check_out

__all__ = ["command"]


def command(
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
        Path | None, option("Directory for simulate.json and the figures.", default="numbers alone")
    ] = None,
    figures: FiguresOption = True,
    json: JsonOption = False,
) -> None:
    """Check the theorems by simulation: non-stationary Markov chains answer the real decode loop."""
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
    _print(data, files)


def _print(data: dict[str, Any], files: list[Path]) -> None:
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
