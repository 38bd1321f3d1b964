"""``sprinter gate label``: labels texts with both models, as training data for a gate."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import READING, DataOption, JsonOption, MoreOption, PlacingOptions, RestartOption
from sprinter.cli.pages import print_json
from sprinter.cli.progress import Progress
from sprinter.cli.signature import in_options, option, takes
from sprinter.training.label_settings import LabelSettings

if TYPE_CHECKING:
    from sprinter.training.label_run import LabelProgress, LabelReport

__all__ = ["command"]

_MORE: dict[str, Any] = {"classes": {"kind": str}, "classes_per_prompt": {"kind": int}}


def _read(given: dict[str, Any]) -> dict[str, Any]:
    classes = given.get("classes")
    return given | ({"classes": tuple(map(str.strip, classes.split(",")))} if classes else {})


@loads("draft_vocabulary", "gate", "head", "compile", "profile")  # labelling makes its own runners
@takes("settings", LabelSettings, without=("batch_size",), panels={"Texts": READING}, more=_MORE, read=_read)
@takes("placing", PlacingOptions)
def command(
    data: DataOption,
    out: Annotated[str, option("Directory for the labels.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    settings: Any = None,
    batch_size: Annotated[
        int | None,
        option(
            "Texts per step; each step is a shard, and an interrupted run loses one step.",
            default="that of the labels in --out, else 16, on a GPU 128",
        ),
    ] = None,
    placing: PlacingOptions = PlacingOptions(),
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Label texts for a gate: prompts are continued in four ways and scored by both models, one shard per step.

    To continue a run that was interrupted, give the same command again.
    """
    placing.check(loading)
    pair = load(loading)
    from sprinter.training.label_run import label, usual_batch

    size = usual_batch(pair.models, Path(out), restart) if batch_size is None else batch_size
    settings = replace(settings, batch_size=size)
    with Progress() as progress:

        def show(done: LabelProgress) -> None:
            speed = f"{done.tokens / done.seconds:.0f} tokens/s"
            progress(
                f"{done.prompts} prompts, {done.positions} positions, {speed}", round(100 * done.share), 100
            )

        report = label(
            pair, [*data, *(more or ())], out, settings, restart=restart, progress=show, **asdict(placing)
        )
    if json:
        print_json(_summary(report, out))
    else:
        print(_line(report, out))
    for note in report.notes:
        print(f"note: {in_options(note)}", file=sys.stderr)


def _summary(report: LabelReport, out: str) -> dict[str, Any]:
    info = report.info
    return {
        "out": out, "positions": info.positions, "prompts": info.prompts, "skipped": info.skipped,
        "shards": info.shards, "resumed_shards": report.resumed, "seconds": round(report.seconds, 3),
        "tokens": report.tokens, "tokens_per_s": round(report.tokens_per_s, 1), "dataset_hash": info.dataset_hash,
        "split": info.settings["split"], "notes": list(report.notes),
    }  # fmt: skip


def _line(report: LabelReport, out: str) -> str:
    info = report.info
    skipped = ", ".join(
        f"{count} {reason.replace('_', ' ')}" for reason, count in info.skipped.items() if count
    )
    speed = f"{report.tokens_per_s:.0f} tokens/s" if report.tokens else "nothing was left to do"
    parts = [
        f"{info.positions} positions of {info.prompts} prompts in {out}",
        f"skipped: {skipped or 'none'}",
        f"{report.seconds:.1f} s, {speed}",
        f"hash {str(info.dataset_hash)[:16]}",
    ]
    return "; ".join(parts)
