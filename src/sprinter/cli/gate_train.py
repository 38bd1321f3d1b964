"""``sprinter gate train``: trains a gate or a learned stop rule on labels."""

from __future__ import annotations

import json as json_module
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sprinter.cli.options import JsonOption, LabelsOption, MoreLabelsOption, RepeatsOption
from sprinter.cli.pages import console, print_json, print_table, refuse_file
from sprinter.cli.signature import option, stated_in, takes
from sprinter.errors import UserError
from sprinter.kinds import HEAD_KINDS
from sprinter.training.settings import TrainSettings

if TYPE_CHECKING:
    from sprinter.training.roc import Report
    from sprinter.training.threshold import TauSetting
    from sprinter.training.train import Epoch

__all__ = ["command", "print_areas"]


_FITTED = stated_in(TrainSettings)
_UNSAID: dict[str, Any] = dict.fromkeys(_FITTED)
_MORE: dict[str, Any] = {"weight": {"kind": str}}


@takes("fitting", dict, stated=_FITTED, without=("head", "seed"), more=_MORE, **_UNSAID)
def command(
    labels: LabelsOption,
    out: Annotated[Path, option("Directory for the head.", default=False)],
    more: MoreLabelsOption = None,
    head: Annotated[
        str,
        option(
            "linear, mlp, resnet: gates; disco, specdec++: stop rules; judge, diversed: accept rules, "
            "from tokens that 'sprinter gate mine' found. The paper's gate: --head linear "
            "--label 'ratio(lambda=1.2)' --tau 0.5."
        ),
    ] = "linear",
    fitting: Any = None,
    seed: Annotated[
        int, option("Seed of the split by prompt, the weights and the batches.", min=0, max=2**63 - 1)
    ] = 0,
    recall: Annotated[
        float | None,
        option("For judge: the threshold keeps this share of the harmful tokens out.", default="0.9"),
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

    if head in HEAD_KINDS and HEAD_KINDS[head].model == "target":
        for name in (*fitting, *(["recall"] if head == "diversed" and recall is not None else ())):
            raise UserError(f"--{name} is not for a {head} head, which is fitted in one way: leave it out")
        _check_out(out, force)
        _train_on_mined([*labels, *(more or ())], head, out, recall, seed, repeats, json)
        return
    if recall is not None:
        raise UserError("--recall is for a judge head: leave it out")
    fitting["weight"] = _weight(fitting.get("weight"))
    if classes := fitting.get("classes"):
        fitting["classes"] = tuple(word.strip() for word in classes.split(","))
    settings = TrainSettings(head=head, seed=seed, **fitting)
    _check_out(out, force)
    began = time.perf_counter()
    positions = read_positions([*labels, *(more or ())], settings.inputs)
    trained = train(positions, settings, lambda epoch: _show(epoch, settings.epochs))
    report = judge(trained.head, positions.select(positions.parts(seed) == 2), repeats)
    try:
        facts = save_trained(trained, report, positions, out)
    except UserError:
        if not json:
            print_areas(report)  # shows what to ask for instead
        raise
    seconds = round(time.perf_counter() - began, 2)
    if json:
        print_json({"out": str(out), "head": head, "size": trained.head.size, "time_s": seconds, **facts})
        return
    split = facts["split"]
    console().print(
        f"{head} head, {trained.head.size:,} parameters, estimates {trained.label}; "
        f"best epoch {facts['best_epoch']} of {facts['epochs']}; {split['train']['positions']:,} positions of "
        f"{split['train']['prompts']:,} prompts; {seconds:.1f} s"
    )
    print_areas(report)
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
        print_json({"out": str(out), "head": head, "size": harm.head.size, "time_s": seconds, **facts})
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


def print_areas(report: Report) -> None:
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


def _show(epoch: Epoch, epochs: int) -> None:
    """Show the losses of an epoch on standard error."""
    losses = f"loss {epoch.train_loss:.4f}, validation {epoch.validation_loss:.4f}{' best' * epoch.best}"
    print(f"epoch {epoch.number}/{epochs}: {losses}", file=sys.stderr, flush=True)
