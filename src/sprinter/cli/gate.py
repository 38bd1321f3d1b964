"""``sprinter gate``: labels texts, mines tokens, trains and evaluates a gate or another head."""

from __future__ import annotations

import json as json_module
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import (
    READING,
    DataOption,
    JsonOption,
    LabelsOption,
    MoreLabelsOption,
    MoreOption,
    PlacingOptions,
    RepeatsOption,
    RestartOption,
)
from sprinter.cli.pages import console, print_files, print_json, print_table, refuse_file, write_json
from sprinter.cli.progress import Progress
from sprinter.cli.signature import in_options, option, stated_in, takes
from sprinter.errors import UserError
from sprinter.kinds import HEAD_KINDS
from sprinter.training.label_settings import LabelSettings
from sprinter.training.settings import TrainSettings
from sprinter.training.sources import ReadingSettings

if TYPE_CHECKING:
    from sprinter.training.examples import Example
    from sprinter.training.label_run import LabelProgress, LabelReport
    from sprinter.training.roc import Report
    from sprinter.training.threshold import TauSetting
    from sprinter.training.train import Epoch

__all__ = ["GROUP"]

_ALONE = "draft_vocabulary", "gate", "head", "compile", "cache_dtype", "profile", "suffix_cache", "template"
"""Options of ``Loading`` that labelling has no use for: it makes its own runners."""


_CLASSES: dict[str, Any] = {"classes": {"kind": str}, "classes_per_prompt": {"kind": int}}


def _read_classes(given: dict[str, Any]) -> dict[str, Any]:
    classes = given.get("classes")
    return given | ({"classes": tuple(map(str.strip, classes.split(",")))} if classes else {})


@loads(*_ALONE)
@takes(
    "settings",
    LabelSettings,
    without=("batch_size",),
    panels={"Texts": READING},
    more=_CLASSES,
    read=_read_classes,
)
@takes("placing", PlacingOptions)
def label(
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


@loads(*_ALONE)
@takes("reading", ReadingSettings, without=("split",), panels={"Texts": READING})
def mine(
    data: Annotated[
        list[str],
        option(
            "Prompts whose answers can be compared: records with a prompt, question or messages; may be repeated.",
            default=False,
        ),
    ],
    out: Annotated[Path, option("Directory for the mined tokens.", default=False)],
    loading: Loading = Loading(),
    compare: Annotated[
        Literal["number", "choice"],
        option("What must agree in two answers: the final number (as in GSM8K), or the chosen letter."),
    ] = "number",
    reading: ReadingSettings = ReadingSettings(),
    new_tokens: Annotated[int, option("Maximum length of an answer.", "--max-new-tokens")] = 256,
    method: Annotated[
        str, option("Lossless method that writes the answers.", "--method", "-m")
    ] = "autoregressive",
    rows: Annotated[int, option("Prompts at a time; each group of them is a file.")] = 16,
    share: Annotated[float, option("Share of the differing tokens to try.")] = 1.0,
    seed: Annotated[int, option("Seed of the choice of these tokens.")] = 0,
    json: JsonOption = False,
) -> None:
    """Replace tokens of the target's greedy answer by the draft's, and test whether the answer stays.

    'sprinter gate train --preset judge' and '--preset diversed' learn from it. To continue a run that was interrupted,
    give the same command again.
    """
    from sprinter.bench.quality.checks import final_number, first_choice
    from sprinter.training.mine import MineSettings, mine, read_mined

    settings = MineSettings(compare, new_tokens, method, rows, share, seed, reading.limit)
    examples = _examples(data, reading)
    pair = load(loading)
    began = time.perf_counter()
    with Progress() as progress:
        mine(
            pair, examples, final_number if compare == "number" else first_choice, out, settings,
            lambda done, wanted, tried: progress(f"{tried} tokens tried", done, wanted),
        )  # fmt: skip
    mined = read_mined(out)
    facts = {
        "out": str(out), "prompts": mined.info["prompts"], "skipped": mined.info["skipped"],
        "answered": mined.info["answered"], "tokens": len(mined.same),
        "harmless": round(float(mined.same.double().mean()), 4) if len(mined.same) else None,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    if json:
        print_json(facts)
        return
    skipped = "".join(
        f", {count} skipped ({why.replace('_', ' ')})" for why, count in facts["skipped"].items()
    )
    counts = f"{facts['prompts']} prompts{skipped}, {facts['answered']} ended with a {compare}"
    if len(mined.same):
        print(f"{counts}: {facts['tokens']} tokens tried, {facts['harmless']:.1%} harmless; saved in {out}")
    else:
        print(f"{counts}, no token to try: give more prompts, or more --max-new-tokens")


def _examples(data: list[str], reading: ReadingSettings) -> list[Example]:
    from sprinter.training.examples import Example, read_examples

    found = read_examples(data, reading.field, chat=reading.chat, system=reading.system)
    return [one if isinstance(one, Example) else Example(one, None, "") for one in found]


_FITTED = stated_in(TrainSettings)
_UNSAID: dict[str, Any] = dict.fromkeys(_FITTED)
_WEIGHT: dict[str, Any] = {"weight": {"kind": str}}


@takes("fitting", dict, stated=_FITTED, without=("preset", "seed"), more=_WEIGHT, **_UNSAID)
def train(
    labels: LabelsOption,
    out: Annotated[Path, option("Directory for the head.", default=False)],
    more: MoreLabelsOption = None,
    preset: Annotated[
        str,
        option(
            "paper (the SPRINTER paper's gate: λ = 1.2, τ = 0.5), linear, mlp, resnet: gates; disco, specdec++: stop "
            "rules; judge, diversed: accept rules, from tokens that 'sprinter gate mine' found."
        ),
    ] = "linear",
    fitting: Any = None,
    seed: Annotated[
        int, option("Seed of the split by prompt, the weights and the batches.", min=0, max=2**63 - 1)
    ] = 0,
    recall: Annotated[
        float | None,
        option("For judge: share of the harmful tokens that the threshold must reject.", default="0.9"),
    ] = None,
    repeats: RepeatsOption = 500,
    force: Annotated[bool, option("Replace a head in --out.", "--force")] = False,
    json: JsonOption = False,
) -> None:
    """Train a gate or a learned stop rule on labels, evaluate it on held-out prompts, and save it."""
    from sprinter.training.card import save_trained
    from sprinter.training.dataset import read_positions
    from sprinter.training.roc import judge
    from sprinter.training.train import train

    if preset in HEAD_KINDS and HEAD_KINDS[preset].model == "target":
        for name in (*fitting, *(["recall"] if preset == "diversed" and recall is not None else ())):
            raise UserError(f"--{name} is not for a {preset} head, which is fitted in one way: leave it out")
        _check_out(out, force)
        _train_on_mined([*labels, *(more or ())], preset, out, recall, seed, repeats, json)
        return
    if recall is not None:
        raise UserError("--recall is for a judge head: leave it out")
    fitting["weight"] = _weight(fitting.get("weight"))
    if classes := fitting.get("classes"):
        fitting["classes"] = tuple(word.strip() for word in classes.split(","))
    settings = TrainSettings(preset=preset, seed=seed, **fitting)
    _check_out(out, force)
    began = time.perf_counter()
    positions = read_positions([*labels, *(more or ())], settings.inputs)
    trained = train(positions, settings, lambda epoch: _show_epoch(epoch, settings.epochs))
    report = judge(trained.head, positions.select(positions.parts(seed) == 2), repeats)
    try:
        facts = save_trained(trained, report, positions, out)
    except UserError:
        if not json:
            _print_areas(report)  # shows what to ask for instead
        raise
    seconds = round(time.perf_counter() - began, 2)
    if json:
        print_json({"out": str(out), "preset": preset, "size": trained.head.size, "time_s": seconds, **facts})
        return
    split = facts["split"]
    console().print(
        f"{preset} head, {trained.head.size:,} parameters, estimates {trained.label}; "
        f"best epoch {facts['best_epoch']} of {facts['epochs']}; {split['train']['positions']:,} positions of "
        f"{split['train']['prompts']:,} prompts; {seconds:.1f} s"
    )
    _print_areas(report)
    asked = trained.settings.drift
    if asked is not None and report.drift is not None and report.drift.low > asked:
        console().print(
            f"note: τ keeps drift {asked:g} on the {split['validation']['prompts']} prompts that it was chosen on, and "
            "not on these: label more prompts, or give a lower --drift"
        )
    console().print(f"saved in {out}")


def _train_on_mined(
    mined: list[Path], head: str, out: Path, recall: float | None, seed: int, repeats: int, json: bool
) -> None:
    from sprinter.training.harm import fit_harm, save_harm
    from sprinter.training.roc import few_prompts

    began = time.perf_counter()
    harm, found = fit_harm(mined, head, recall=0.9 if recall is None else recall, seed=seed, repeats=repeats)
    facts = save_harm(harm, found, out)
    seconds, counts = round(time.perf_counter() - began, 2), facts["mined"]
    if json:
        print_json({"out": str(out), "preset": head, "size": harm.head.size, "time_s": seconds, **facts})
        return
    console().print(
        f"{head} head, {harm.head.size:,} parameters; {counts['tokens']:,} tokens of {counts['prompts']:,} prompts, "
        f"{counts['harmless']:.1%} harmless; {seconds:.1f} s\n"
        f"AU-ROC by cross-validation {harm.auc}, of the token's ln p {harm.baseline}\n"
        f"at {harm.head.config.tau:.3f}: {harm.recall:.1%} of the harmful tokens below, "
        f"{harm.harmless:.1%} of the harmless ones stay\nsaved in {out}"
    )
    if (caveat := few_prompts(counts["prompts"])) is not None:
        console().print(f"note: {caveat}")


def _print_areas(report: Report) -> None:
    """Print AU-ROCs and rates at the head's own τ; for a gate also the expected cost of each τ."""
    title = f"AU-ROC on {report.positions:,} held-out positions of {report.prompts:,} prompts"
    columns = ("label", *report.signals, f"η_TP at τ = {report.tau:g}", "η_FP")
    rows = (
        (label, *(str(one.auc) for one in truth.signals.values()), *(f"{kept.value:.3f}" for kept in truth.at_tau))
        for label, truth in report.truths.items()
    )  # fmt: skip
    print_table(columns, rows, title=title, left=1 + len(report.signals))
    console().print(
        f"label {report.label}: mean {report.mean_label:.3f}, mean score {report.mean_score:.3f}, "
        f"R² {report.r2:.3f}, calibration error {report.calibration_error:.3f}"
    )
    if report.caveat is not None:
        console().print(f"note: {report.caveat}")
    if report.setting is not None:
        _print_dial(report, report.setting)


def _print_dial(report: Report, own: TauSetting) -> None:
    from sprinter.heads.load import extreme

    rows = (
        (
            f"{place.tau:g}", f"{place.drift:.3f}", f"{place.calls_per_token:.3f}", f"{place.trusted:.1%}",
            f"recorded; drift {report.drift}" if place == own else "",
        )
        for place in sorted({own, *report.dial}, key=lambda place: place.tau)
    )  # fmt: skip
    title = "What decoding at τ is expected to cost (temperature 1)"
    print_table(("τ", "drift", "target calls/token", "trusted", ""), rows, title=title, left=0)
    if (line := extreme(own.tau, own.trusted)) is not None:
        console().print(f"note: the gate {line}")


def _weight(text: str | None) -> float | str | None:
    if text is None or text == "balanced":
        return text
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--weight '{text}' is not a number: give a number such as 6, or balanced") from None


def _check_out(out: Path, force: bool) -> None:
    """Refuse an --out that holds anything but a head, and with a head unless ``force`` is set."""
    refuse_file(out)
    from sprinter.training.records import INFO

    if (out / INFO).is_file():
        raise UserError(f"--out '{out}' holds labels ({INFO}): give another directory for the head")
    config = out / "config.json"
    if not config.is_file():
        return
    try:
        kind = json_module.loads(config.read_text(encoding="utf-8")).get("speculators_model_type")
    except (ValueError, AttributeError, OSError):
        kind = None
    if kind != "sprinter":
        raise UserError(
            f"--out '{out}' holds something else (its config.json is not a head's): give another directory"
        )
    if not force:
        raise UserError(
            f"--out '{out}' holds a head already: give another directory, or --force to replace it"
        )


def _show_epoch(epoch: Epoch, epochs: int) -> None:
    """Show the losses of an epoch on standard error."""
    losses = f"loss {epoch.train_loss:.4f}, validation {epoch.validation_loss:.4f}{' best' * epoch.best}"
    print(f"epoch {epoch.number}/{epochs}: {losses}", file=sys.stderr, flush=True)


def roc(
    labels: LabelsOption,
    gate: Annotated[str, option("Directory or hub id of the gate or other head.", default=False)],
    more: MoreLabelsOption = None,
    out: Annotated[
        Path | None, option("Directory for report.json and three PNG files.", default="numbers only")
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
    _print_areas(report)
    print_files(files)


GROUP = {"label": label, "mine": mine, "train": train, "roc": roc}
