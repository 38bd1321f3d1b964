"""``sprinter draft``: makes a draft for a target."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import (
    ON_TARGET,
    READING,
    DataOption,
    JsonOption,
    MoreOption,
    PlacingOptions,
    RestartOption,
)
from sprinter.cli.pages import console, print_json, print_table
from sprinter.cli.signature import Decorator, option, stated_in, takes
from sprinter.training.drafts.settings import HeadSettings, StudentSettings, TextSettings, TrainingSettings
from sprinter.training.sources import ReadingSettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from sprinter.decode.costs import PassCosts
    from sprinter.engine.pair import Pair
    from sprinter.models.pair import LoadedModel
    from sprinter.training.drafts.data import TextsProgress
    from sprinter.training.drafts.run import LossPoint

__all__ = ["GROUP"]

_OPTIONS: Any = None
"""Default of a parameter that options replace: settings of training import torch when they are made."""


def _writes() -> Decorator:
    """Decorator of a command: its parameter ``texts`` becomes options of what the target writes."""
    own = "seed", "prompt_share", "top", "rows", "shard"
    panels = {"Texts": f"{READING} new_tokens prompt_tokens temperature held_out"}
    return takes("texts", TextSettings, without=own, panels=panels)


def _trains(*only: str, **defaults: Any) -> Decorator:
    """Decorator of a command: its parameter ``training`` becomes options of training a draft.

    Args:
        only: names of the options; none: all. defaults: the command's own.
    """
    every = [name for name in stated_in(TrainingSettings) if name != "decay"]
    panels = {"Training": " ".join(every)}
    return takes("training", TrainingSettings, only=only or every, panels=panels, **defaults)


def _load_target(loading: Loading) -> tuple[Pair, PreTrainedModel]:
    """The target as it was asked for, and its weights in float32, where to train."""
    from torch import nn

    from sprinter import load_pair
    from sprinter.models.pair import builtin_paths, load_models

    source = loading.target or builtin_paths()["target"]
    given = {name: value for name, value in loading.given().items() if name != "target"}

    pair = load(loading) if loading.target is not None else load_pair(source, **given)
    target = pair.models.target
    device = _place_of_training(target, "device_map" in given)
    if isinstance(target.model, nn.Module) and target.weights == "float32" and target.model.device == device:
        return pair, target.module("distilling")
    options = {name: given[name] for name in ("tokenizer", "revision", "trust_remote_code") if name in given}
    floats = load_models(source, device=str(device), dtype="float32", dequantise=True, **options)
    return pair, floats.target.module("distilling")


def _place_of_training(target: LoadedModel, spread: bool) -> torch.device:
    """The target's GPU, if it is on one alone that has room for weights in float32 and as much again, else the CPU."""
    import torch
    from torch import nn

    from sprinter.models.memory import free_bytes

    model = target.model
    if spread or not isinstance(model, nn.Module) or model.device.type != "cuda":
        return torch.device("cpu")
    more = 0 if target.weights == "float32" else 4 * target.size
    room = free_bytes(model.device)
    if room is None or 2 * more < room:
        return model.device
    _say(f"training on the CPU: {more / 1e9:.0f} GB of weights in float32 leave too little room on the GPU")
    return torch.device("cpu")


def _on_texts(progress: TextsProgress) -> None:
    """Report written texts on standard error."""
    speed = progress.tokens / max(1e-9, progress.seconds)
    left = ""
    if progress.tokens and progress.done < progress.wanted:
        left = f", about {progress.seconds / progress.done * (progress.wanted - progress.done):.0f} s left"
    _say(f"texts {progress.done}/{progress.wanted}, {speed:.0f} tokens/s{left}")


def _on_states(done: int, wanted: int) -> None:
    """Report the target's states that are on disk on standard error."""
    _say(f"states of {done}/{wanted} texts")


def _on_training(point: LossPoint, steps: int, label: str = "") -> None:
    """Report a checkpoint on standard error."""
    shown = point.held_out or point.train
    where = "held out" if point.held_out else "training"
    left = (
        f", about {point.seconds / point.step * (steps - point.step):.0f} s left"
        if point.step < steps
        else ""
    )
    firsts = [f"{value:.2f}" for name, value in shown.items() if name.endswith("_top1")]
    ranked = f", first choice right {' '.join(firsts)}" if firsts else ""
    _say(
        f"{label}step {point.step}/{steps}: {where} β {1 - shown['tv']:.3f}, ce {shown['ce']:.3f}, "
        f"kl {shown['kl']:.3f}{ranked}; {point.tokens:,} positions, {point.seconds:.0f} s{left}"
    )


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


@loads(*ON_TARGET)
@_writes()
@_trains()
@takes("student", StudentSettings, only=("layers", "start", "width", "vocabulary", "parallel"))
def distill(
    data: DataOption,
    out: Annotated[Path, option("Folder of the draft.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    student: StudentSettings = StudentSettings(),
    training: TrainingSettings = _OPTIONS,
    texts: TextSettings = TextSettings(),
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Distil a draft from a target: it writes texts, a small model learns its laws on them, and is measured.

    To continue a run that was interrupted, give the same command again.
    """
    from sprinter.training.drafts.distill import distill

    texts, student = replace(texts, seed=training.seed), replace(student, seed=training.seed)
    pair, weights = _load_target(loading)
    facts = distill(
        pair, weights, [*data, *(more or ())], out, texts, student, training, restart=restart,
        on_texts=_on_texts, on_training=_on_training,
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


@loads(*ON_TARGET)
@_writes()
@_trains("tokens", "lr", "seed", "threads")
def sizes(
    data: DataOption,
    out: Annotated[Path, option("Folder for texts and checkpoints.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    shape: Annotated[
        list[str] | None,
        option("LAYERS, LAYERSxWIDTH or LAYERS/VOCABULARY; may be repeated.", default="1, 2 and 4 layers"),
    ] = None,
    steps: Annotated[int, option("Steps of each short training.")] = 200,
    positions: Annotated[float, option("Positions of the full training, for the expected β.")] = 1e6,
    draft_dtype: Annotated[
        str | None, option("dtype of the draft when its steps are timed.", default="the target's")
    ] = None,
    training: TrainingSettings = _OPTIONS,
    texts: TextSettings = TextSettings(),
    json: JsonOption = False,
) -> None:
    """Find the best size of a draft: train several shapes briefly, and time their steps on this machine.

    Give --out of a distillation to use its texts. An interrupted run continues.
    """
    from sprinter.training.drafts.data import write_texts
    from sprinter.training.drafts.sizes import check_plan, table_of, try_shapes

    texts = replace(texts, seed=training.seed)
    training = replace(training, steps=steps, checkpoint=max(1, steps // 8))
    shapes = shape or ["1", "2", "4"]
    check_plan(shapes, steps, positions)
    pair, weights = _load_target(loading)
    written = write_texts(pair, [*data, *(more or ())], out / "texts", texts, _on_texts)
    dtype = draft_dtype or (loading.dtype if loading.dtype != "gguf" else "int8") or "auto"
    found = try_shapes(
        pair, weights, written, shapes, training, out / "shapes",
        lambda student, shape: _time_steps(pair, student, dtype),
        lambda shape, point, wanted: _on_training(point, wanted, f"{shape}: "),
    )  # fmt: skip
    result = table_of(found, positions)
    if json:
        print_json(result)
        return
    _show_sizes(result)


def _time_steps(pair: Pair, student: PreTrainedModel, dtype: str) -> PassCosts:
    """Time the student's steps and the target's passes, as the engine runs them."""
    from sprinter.engine.pair import Pair as EnginePair
    from sprinter.models.pair import load_models
    from sprinter.theory.passes import measure_passes
    from sprinter.training.drafts.student import save_student

    models = pair.models
    assert models.tokenizer is not None
    with tempfile.TemporaryDirectory() as folder:
        save_student(student, models.tokenizer, Path(folder), models.target.eos_ids)  # type: ignore[arg-type]
        draft = load_models(folder, tokenizer=models.tokenizer, dtype=dtype).target
    return measure_passes(EnginePair(replace(models, draft=draft)))


def _show_sizes(result: dict[str, Any]) -> None:
    columns = ("shape", "parameters", "step ms", "β now", "β expected", "γ", "speed", "training s")
    rows = (
        (
            row["shape"], f"{row['parameters']:,}", f"{row['draft_step_s'] * 1e3:.2f}", f"{row['beta']:.3f}",
            f"{row['expected_beta']:.3f}", str(row["gamma"] or "–"), f"{row['expected_speed']:.2f}",
            f"{row['training_s']:.0f}",
        )
        for row in result["shapes"]
    )  # fmt: skip
    print_table(columns, rows, title=f"expected after {result['tokens']:,.0f} positions, exact decoding")
    fit = result["fit"]
    console().print(
        f"1 − β ∝ parameters^{fit['size']:.2f} · positions^{fit['tokens']:.2f}, fitted within {fit['error']:.3f} of β; "
        "speed is relative to plain decoding, for positions that are independent, without the loop's own time"
    )
    best = result["best"]
    console().print(
        f"shape {best} pays most" if best else "no shape pays: plain decoding is faster on this machine"
    )


_TRAINING = [
    name for name in stated_in(TrainingSettings)
    if name not in ("decay", "freeze_embeddings", "on_policy", "gamma")
]  # fmt: skip


@loads(*ON_TARGET)
@_writes()
@_trains(*_TRAINING, loss="ce+kl", warm_up=0.0)
@takes("shape", HeadSettings, without=("seed",))
@takes("placing", PlacingOptions)
def train(
    data: DataOption,
    out: Annotated[Path, option("Folder of the heads.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    shape: HeadSettings = HeadSettings(),
    placing: PlacingOptions = PlacingOptions(),
    training: TrainingSettings = _OPTIONS,
    texts: TextSettings = TextSettings(),
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Train heads on the target that draft in place of a draft model: it writes texts, and the heads learn its laws.

    To continue a run that was interrupted, give the same command again. Load them with --head.
    """
    from sprinter.training.drafts.heads import train_heads

    texts, shape = replace(texts, seed=training.seed), replace(shape, seed=training.seed)
    placing.check(loading)
    pair, weights = _load_target(loading)
    facts = train_heads(
        pair, weights, [*data, *(more or ())], out, texts, shape, training, restart=restart, **asdict(placing),
        on_texts=_on_texts, on_states=_on_states, on_training=_on_training,
    )  # fmt: skip
    if json:
        print_json({"out": str(out), **facts})
        return
    rows = (
        [str(number), *(f"{value:.3f}" for value in row[:5])]
        for number, row in enumerate(facts["heads"]["accuracies"], 1)
    )
    title = f"rank of the target's token, {facts['heads']['accuracies_on']} texts"
    print_table(("head", "1st", "2nd", "3rd", "4th", "5th"), rows, title=title, left=0)
    for task, row in facts["tasks"].items():
        console().print(
            f"{task}: {row['chain_tokens_per_call']:.2f} tokens a target call as a chain, "
            f"{row['tree_tokens_per_call']:.2f} as a tree"
        )
    console().print(
        f"{facts['heads']['parameters']:,} parameters, trained in {facts['training']['seconds']:.0f} s; saved in {out}"
    )


@loads(*ON_TARGET, "profile")
@takes("reading", ReadingSettings, without=("chat", "system"), panels={"Texts": READING})
def vocabulary(
    data: DataOption,
    out: Annotated[Path, option("File to write.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    size: Annotated[int, option("Number of tokens.")] = 32768,
    reading: ReadingSettings = ReadingSettings(),
    json: JsonOption = False,
) -> None:
    """Choose the tokens that a draft may write, the most frequent ones of your texts, for --draft-vocabulary.

    If the vocabulary is large, the output layer is a large part of a small draft. Exact methods stay exact.
    """
    from sprinter.training.drafts.vocabulary import choose_vocabulary

    models = load(loading).models
    facts = choose_vocabulary(
        models,
        [*data, *(more or ())],
        size,
        out,
        field=reading.field,
        split=reading.split,
        limit=reading.limit,
    )
    if json:
        print_json({"out": str(out), **facts})
        return
    rows = ((f"{int(count):,}", f"{share:.2%}") for count, share in facts["covered"].items())
    title = f"{facts['texts']} texts, one in ten apart"
    print_table(("tokens", "covered, of the texts apart"), rows, title=title, left=0)
    console().print(f"saved in {out}; use it with --draft-vocabulary {out}")


GROUP = {"distill": distill, "sizes": sizes, "train": train, "vocabulary": vocabulary}
