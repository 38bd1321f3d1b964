"""What the commands of ``sprinter draft`` share: the target in float32, and lines of progress."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from sprinter.cli.loading import Loading, load
from sprinter.cli.options import READING
from sprinter.cli.signature import Decorator, stated_in, takes
from sprinter.training.drafts.settings import TextSettings, TrainingSettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from sprinter.engine.pair import Pair
    from sprinter.models.pair import LoadedModel
    from sprinter.training.drafts.data import TextsProgress
    from sprinter.training.drafts.run import LossPoint

__all__ = ["load_target", "on_states", "on_texts", "on_training", "trains", "writes"]


def writes() -> Decorator:
    """Decorator of a command: its parameter ``texts`` becomes options of what the target writes."""
    own = "seed", "prompt_share", "top", "rows", "shard"
    panels = {"Texts": f"{READING} new_tokens prompt_tokens temperature held_out"}
    return takes("texts", TextSettings, without=own, panels=panels)


def trains(*only: str, **defaults: Any) -> Decorator:
    """Decorator of a command: its parameter ``training`` becomes options of training a draft.

    Args:
        only: names of the options; none: all. defaults: the command's own.
    """
    every = [name for name in stated_in(TrainingSettings) if name != "decay"]
    panels = {"Training": " ".join(every)}
    return takes("training", TrainingSettings, only=only or every, panels=panels, **defaults)


def load_target(loading: Loading) -> tuple[Pair, PreTrainedModel]:
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


def on_texts(progress: TextsProgress) -> None:
    """Report written texts on standard error."""
    speed = progress.tokens / max(1e-9, progress.seconds)
    left = ""
    if progress.tokens and progress.done < progress.wanted:
        left = f", about {progress.seconds / progress.done * (progress.wanted - progress.done):.0f} s left"
    _say(f"texts {progress.done}/{progress.wanted}, {speed:.0f} tokens/s{left}")


def on_states(done: int, wanted: int) -> None:
    """Report the target's states that are on disk on standard error."""
    _say(f"states of {done}/{wanted} texts")


def on_training(point: LossPoint, steps: int, label: str = "") -> None:
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
