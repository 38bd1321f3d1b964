"""``sprinter gate roc``: evaluates a head on labels, with the draft's entropy and confidence as baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sprinter.cli.gate_train import print_areas
from sprinter.cli.options import JsonOption, LabelsOption, MoreLabelsOption, RepeatsOption
from sprinter.cli.pages import print_files, print_json, refuse_file, write_json
from sprinter.cli.signature import option

__all__ = ["command"]


def command(
    labels: LabelsOption,
    gate: Annotated[str, option("Directory or hub id of the gate or other head.", default=False)],
    more: MoreLabelsOption = None,
    out: Annotated[
        Path | None, option("Directory for report.json and three PNG files.", default="numbers alone")
    ] = None,
    repeats: RepeatsOption = 500,
    seed: Annotated[int, option("Seed of the bootstrap.", min=0, max=2**63 - 1)] = 0,
    json: JsonOption = False,
) -> None:
    """Evaluate a head: ROC, precision-recall, calibration, rates over tau. Its training prompts are left out."""
    from sprinter.files import writing
    from sprinter.heads.artifact import load_head
    from sprinter.plots import check_plots
    from sprinter.training.plots import draw
    from sprinter.training.roc import judge_directory

    if out is not None:
        check_plots("leave --out away for numbers alone")
        refuse_file(out)
    report = judge_directory(load_head(gate), [*labels, *(more or ())], repeats, seed)
    files: list[Path] = []
    if out is not None:
        with writing(out, "give another directory"):
            files = draw(report, out)
        files.append(write_json(out / "report.json", report.to_dict()))
    if json:
        print_json({"gate": gate, "files": [str(file) for file in files], **report.to_dict()})
        return
    print_areas(report)
    print_files(files)
