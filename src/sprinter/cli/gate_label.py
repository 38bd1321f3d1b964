"""``sprinter gate label``: labels texts with both models, as training data for a gate."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.messages import in_options
from sprinter.cli.pages import print_json
from sprinter.cli.ray_options import RayAddressOption, WorkersOption, check_ray

if TYPE_CHECKING:
    from sprinter.training.label_run import LabelProgress, LabelReport

__all__ = ["command"]

_EVERY_S = 20  # between progress lines if standard error is not a terminal


@loads(without=("draft_vocabulary", "gate", "head", "compile", "profile"))  # labelling makes its own runners
def command(
    data: Annotated[
        list[str],
        typer.Option(
            help="Texts: .txt (one per line, see --split), .jsonl (both also .gz), .parquet, or a data set's name; "
            "records also with messages, or with a prompt or question and its answer; may be repeated.",
            show_default=False,
        ),
    ],
    out: Annotated[str, typer.Option(help="Directory for the labels.", show_default=False)],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="More data, as in --data *.gz.", show_default=False),
    ] = None,
    loading: Loading = Loading(),
    field: Annotated[
        str | None,
        typer.Option(
            help="Field of a record that holds its text; dots separate nested fields.",
            show_default="text, prompt, question, turns or content",
        ),
    ] = None,
    split: Annotated[
        Literal["lines", "blank-lines", "file"],
        typer.Option(help="What one text of a .txt file is: a line, a block between blank lines, the file."),
    ] = "lines",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Every text is a prompt of a user; prompts go through the chat template."
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message before all prompts, with --chat.", show_default=False)
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Prefix classes to label: original, draft, target, interleaved. target,draft: only answers that the "
            "models write themselves.",
            show_default="all four",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of texts.", show_default="all")] = None,
    prompt_share: Annotated[
        float, typer.Option(help="Share of a running text's words used as prompt.")
    ] = 0.3,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            help="Maximum prompt length of running text; longer ones are truncated. 0: none, too long ones are "
            "skipped."
        ),
    ] = 128,
    new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Labelled positions per text.")] = 20,
    classes_per_prompt: Annotated[
        int, typer.Option(help="Prefix classes per prompt: 1: the next one of them; 4: all of them.")
    ] = 1,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Of the completions; labels have their own.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same records.")] = 0,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Texts per step; each step is a shard, and an interrupted run loses one step.",
            show_default="that of the labels in --out, else 16, on a GPU 128",
        ),
    ] = None,
    engine: Annotated[Literal["local", "ray"], typer.Option(help="Where the steps run.")] = "local",
    workers: WorkersOption = None,
    ray_address: RayAddressOption = None,
    restart: Annotated[bool, typer.Option("--restart", help="Delete the labels in --out first.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Label texts for a gate: prompts are continued in four ways and scored by both models, one shard per step.

    To continue a run that was interrupted, give the same command again.
    """
    from sprinter.training.label_step import CPU_BATCH, LabelSettings

    settings = LabelSettings(
        seed,
        temperature,
        prompt_share,
        prompt_tokens,
        new_tokens,
        classes_per_prompt,
        CPU_BATCH if batch_size is None else batch_size,
        limit,
        field,
        split,
        chat,
        system,
        tuple(name.strip() for name in classes.split(",")) if classes else None,
    )
    check_ray(engine, loading)
    pair = load(loading)
    from sprinter.training.label_run import label, usual_batch

    if batch_size is None:
        settings = replace(settings, batch_size=usual_batch(pair.models, Path(out), restart))
    with _bar() if sys.stderr.isatty() else contextlib.nullcontext(_lines()) as progress:
        report = label(
            pair, [*data, *(more or ())], out, settings, engine=engine, workers=workers,
            ray_address=ray_address, restart=restart, progress=progress,
        )  # fmt: skip
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


def _lines() -> Callable[[LabelProgress], None]:
    """Progress where standard error is no terminal: a line after the first shard, every 20 seconds, and at the end."""
    first: list[LabelProgress] = []
    said = 0.0

    def show(done: LabelProgress) -> None:
        nonlocal said
        if not first:
            first.append(done)
        if done is not first[0] and done.share < 1 and done.seconds - said < _EVERY_S:
            return
        said, grown = done.seconds, done.share - first[0].share
        left = ""
        if grown > 0 and done.share < 1:
            rest = (done.seconds - first[0].seconds) * (1 - done.share) / grown
            left = f", about {rest / 60:.1f} min left"
        print(
            f"labelling: {done.share:.0%}, {done.prompts} prompts, {done.positions} positions, "
            f"{done.tokens / done.seconds:.0f} tokens/s{left}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    return show


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[LabelProgress], None]]:
    """A progress bar with tokens/s and the remaining time, for a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("labelling"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[speed]:.0f} tokens/s"),
        TextColumn("{task.fields[positions]} positions"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("labelling", total=1.0, speed=0.0, positions=0)

        def show(done: Any) -> None:
            speed = done.tokens / done.seconds
            bar.update(task, completed=done.share, speed=speed, positions=done.positions)

        yield show
