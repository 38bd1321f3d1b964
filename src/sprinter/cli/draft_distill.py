"""``sprinter draft distill``: makes a draft model from texts that the target writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from sprinter.cli.draft_common import load_target, on_texts, on_training, trains, writes
from sprinter.cli.loading import Loading, loads
from sprinter.cli.options import ON_TARGET, DataOption, JsonOption, MoreOption, RestartOption
from sprinter.cli.pages import console, print_json, print_table
from sprinter.cli.signature import option, takes
from sprinter.training.drafts.settings import StudentSettings, TextSettings, TrainingSettings

__all__ = ["command"]


@loads(*ON_TARGET)
@writes()
@trains()
@takes("student", StudentSettings, only=("layers", "width", "vocabulary"))
def command(
    data: DataOption,
    out: Annotated[Path, option("Folder of the draft.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    student: StudentSettings = StudentSettings(),
    training: TrainingSettings = TrainingSettings(),
    texts: TextSettings = TextSettings(),
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Distil a draft from a target: it writes texts, a small model learns its laws on them, and is measured.

    To continue a run that was interrupted, give the same command again.
    """
    from sprinter.training.drafts.distill import distill

    texts, student = replace(texts, seed=training.seed), replace(student, seed=training.seed)
    pair, weights = load_target(loading)
    facts = distill(
        pair, weights, [*data, *(more or ())], out, texts, student, training, restart=restart,
        on_texts=on_texts, on_training=on_training,
    )  # fmt: skip
    if json:
        print_json({"out": str(out), **facts})
        return
    names = [*dict.fromkeys(name for row in facts["tasks"].values() for name in row)]
    rows = (
        [task, *(f"{row[name]:.3f}" if name in row else "–" for name in names)]
        for task, row in facts["tasks"].items()
    )
    heads = [name.replace("_", " ") for name in ("task", *names)]
    print_table(heads, rows, title=f"held-out prompts, {facts['method']}")
    console().print(
        f"{facts['student']['parameters']:,} parameters a step, trained in {facts['training']['seconds']:.0f} s; "
        f"saved in {out}"
    )
