"""``sprinter gate roc``: evaluates a head on labels, with the draft's entropy and confidence as baselines."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from sprinter.cli.gate_train import print_areas
from sprinter.cli.pages import console, print_json
from sprinter.errors import UserError

__all__ = ["command"]


def command(
    labels: Annotated[
        list[Path],
        typer.Option(help="Directory made by 'sprinter gate label'; may be repeated.", show_default=False),
    ],
    gate: Annotated[
        str, typer.Option(help="Directory or hub id of the gate or other head.", show_default=False)
    ],
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="More labels, as in --labels labels/*.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for report.json and three PNG files.", show_default="numbers alone"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=20, help="Bootstrap samples for the intervals.")] = 500,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the bootstrap.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Evaluate a head: ROC, precision-recall, calibration, rates over tau. Its training prompts are left out."""
    from sprinter.heads.artifact import load_head
    from sprinter.plots import check_plots
    from sprinter.training.plots import draw
    from sprinter.training.roc import judge_directory

    if out is not None:
        check_plots("leave --out away for numbers alone")
        if out.exists() and not out.is_dir():
            raise UserError(f"--out '{out}' is a file: give a directory")
    report = judge_directory(load_head(gate), [*labels, *(more or ())], repeats, seed)
    files: list[Path] = []
    if out is not None:
        try:
            files = draw(report, out)
            part = out / "report.json.part"
            part.write_text(json_module.dumps(report.to_dict(), allow_nan=False) + "\n", encoding="utf-8")
            files.append(part.replace(out / "report.json"))
        except OSError as error:
            raise UserError(
                f"cannot write in --out '{out}' ({error.strerror}): give another directory"
            ) from None
    if json:
        print_json({"gate": gate, "files": [str(file) for file in files], **report.to_dict()})
        return
    print_areas(report)
    if files:
        console().print("wrote " + ", ".join(str(file) for file in files))
