"""Train a head on records: Adam, binary cross-entropy on hard or soft labels, early stopping, calibration.

Labels of the text's own token, and features that read x, need tokens that the draft wrote. They are taken from
draft-written and from interleaved texts in proportions that make 15 % of the context tokens the target's (SpecDec++,
token mixing). In an interleaved text a token has law ½p + ½q; the importance weight q / (½p + ½q) makes it count as
drawn from q.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.errors import UserError
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.networks import Network
from sprinter.training.calibrate import fit_calibration
from sprinter.training.dataset import PARTS, Positions
from sprinter.training.objectives import Label
from sprinter.training.records import FEW, KINDS, TEMPERATURES
from sprinter.training.settings import PRESETS, TrainSettings
from sprinter.training.threshold import choose

__all__ = ["Epoch", "Trained", "position_weights", "score", "train"]

_STEPS = 400
"""Number of steps per epoch if no batch size is given."""


class Epoch(NamedTuple):
    """Losses after an epoch (mean weighted cross-entropy, nats). ``best``: the validation loss is the lowest so far."""

    number: int
    train_loss: float
    validation_loss: float
    best: bool


@dataclass(frozen=True, slots=True)
class Trained:
    """A head and its training history.

    Attributes:
        head: the calibrated head.
        settings: the settings, with every default filled in.
        label: what the head estimates.
        history: one entry per epoch; the head has the weights of the best epoch.
        split: part -> {"prompts", "positions"} that were used.
        weight: weight of rejections in the loss, as a number.
    """

    head: Head
    settings: TrainSettings
    label: Label
    history: tuple[Epoch, ...]
    split: dict[str, dict[str, int]]
    weight: float


class _Part(NamedTuple):
    """Standardised inputs ``[n, m]``, labels and weights ``[n]``."""

    inputs: Tensor
    labels: Tensor
    weights: Tensor


def train(
    positions: Positions, settings: TrainSettings, progress: Callable[[Epoch], None] | None = None
) -> Trained:
    """Train a head on the training part; use the validation part for early stopping, calibration and a gate's τ.

    The test part is not used.

    Args:
        positions: positions with the features of ``settings``, as ``read_positions`` gives them.
        settings: how to train.
        progress: called after every epoch.

    Raises:
        UserError: a part without prompts, labels of one class only, no text that fits label and features.
    """
    label = settings.target
    values, weights = label.values(positions.columns), position_weights(positions, settings)
    parts = torch.where(weights > 0, positions.parts(settings.seed), -1)
    _check_parts(positions, parts, values, label)
    mean, spread, first, second = _standardised(positions.inputs, values, weights, parts)
    weight = _weight_of(settings, first)
    config = _config(positions, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = config.network()
    history = _fit(network, first, second, settings, weight, progress)
    with torch.no_grad():
        curve = fit_calibration(
            str(settings.calibration), network(second.inputs), second.labels, second.weights
        )
    network.fold(mean, spread)
    head = Head(config, network, curve)
    if settings.drift is not None:
        held = positions.select((parts == 1) & positions.at_temperature(1.0))
        tau = choose(
            settings.drift, score(head, held.inputs), held.columns["overlap"][:, TEMPERATURES.index(1.0)]
        )
        head.config = replace(config, tau=tau)
    split = {
        name: {
            "prompts": len(torch.unique(positions.group[parts == number])),
            "positions": int(((parts == number) & positions.at_temperature(1.0)).sum()),
        }
        for number, name in enumerate(PARTS)
    }
    return Trained(head, settings, label, history, split, weight)


@torch.inference_mode()
def score(head: Head, inputs: Tensor) -> Tensor:
    """Scores ``[n]`` of concatenated features ``[n, m]``."""
    parts = [head.calibration(head.network(part)) for part in torch.split(inputs, 65536)]
    return torch.cat(parts).clone()


def position_weights(positions: Positions, settings: TrainSettings) -> Tensor:
    """Weight of each position in the loss, ``[n]`` float32; 0 leaves it out.

    Raises:
        UserError: prefix classes do not fit label and features, or there is no text of a fitting class.
    """
    label, names = settings.target, settings.inputs
    own_token = settings.own_token
    fitting = ("draft", "interleaved") if own_token else ("draft",) if "position" in names else KINDS
    classes = settings.classes or fitting
    if wrong := [name for name in classes if name not in fitting]:
        raise UserError(
            f"prefix class '{wrong[0]}' does not fit label {label} and features {', '.join(names)}, "
            f"which need texts of class {' or '.join(fitting)}"
        )
    rows = positions.of_kinds(classes)
    if not bool(rows.any()):
        raise UserError(
            f"the labels hold no text of class {' or '.join(classes)}: label texts with that class"
        )
    weights = rows.float()
    if own_token:
        _mix(weights, positions, settings.mix if settings.classes is None else None)
    return weights


def _mix(weights: Tensor, positions: Positions, mix: float | None) -> None:
    """Reweight in place: interleaved tokens count as drawn from q, and a share ``mix`` of all tokens are the target's.

    ``mix`` None keeps the proportions of the data.
    """
    own, mixed = positions.of_kinds(["draft"]) & (weights > 0), positions.of_kinds(["interleaved"])
    mixed &= weights > 0
    log_ratio = positions.columns["log_p_token"] - positions.columns["log_q_token"]
    weights[mixed] = (2 / (1 + log_ratio.exp()))[mixed]
    if mix is not None and bool(own.any()) and bool(mixed.any()):
        share = 2 * mix  # half of an interleaved text is the target's
        weights[own] *= (1 - share) / weights[own].sum()
        weights[mixed] *= share / weights[mixed].sum()
        weights *= len(weights)


def _check_parts(positions: Positions, parts: Tensor, values: Tensor, label: Label) -> None:
    for number, name in enumerate(PARTS):
        if not bool((parts == number).any()):
            raise UserError(
                f"no prompt fell into the {name} part ({len(positions.prompts)} prompts in all): "
                f"label more prompts, some {FEW} at least"
            )
    for number, name in enumerate(PARTS[:2]):
        here = values[parts == number]
        if float(here.max() - here.min()) < 1e-6:
            raise UserError(
                f"label {label} is {float(here[0]):g} at every position of the {name} part: there is nothing to learn; "
                "choose another label or threshold"
            )


def _standardised(
    inputs: Tensor, values: Tensor, weights: Tensor, parts: Tensor
) -> tuple[Tensor, Tensor, _Part, _Part]:
    """Mean and standard deviation of the training inputs, then the standardised training and validation parts."""
    chosen = [(parts == number).nonzero().squeeze(1) for number in (0, 1)]
    own = [inputs[rows] for rows in chosen]
    mean = own[0].mean(0)
    spread = own[0].std(0, correction=0)
    spread = torch.where(spread > 1e-6, spread, torch.ones_like(spread))  # do not scale a constant feature
    for part in own:
        part.sub_(mean).div_(spread)
    first, second = (_Part(x, values[rows], weights[rows]) for x, rows in zip(own, chosen, strict=True))
    return mean, spread, first, second


def _weight_of(settings: TrainSettings, part: _Part) -> float:
    if isinstance(settings.weight, str):
        kept = float((part.weights * part.labels).sum())
        return kept / max(1e-9, float(part.weights.sum()) - kept)
    assert settings.weight is not None
    return float(settings.weight)


def _config(positions: Positions, settings: TrainSettings) -> HeadConfig:
    info, preset = positions.infos[0], PRESETS[settings.preset]
    return HeadConfig(
        hidden_size=info.hidden_size, draft_id=info.draft_id, target_id=info.target_id,
        draft_revision=info.draft_revision, draft_fingerprint=info.draft_fingerprint,
        label=str(settings.target), tau=0.5 if settings.tau is None else settings.tau,
        kind=preset["kind"], architecture=preset["architecture"],
        features=settings.inputs, width=settings.width, layers=settings.layers,
    )  # fmt: skip


def _fit(
    network: Network, first: _Part, second: _Part, settings: TrainSettings, weight: float,
    progress: Callable[[Epoch], None] | None,
) -> tuple[Epoch, ...]:  # fmt: skip
    """Run Adam until the validation loss stops falling; the network ends with the weights of its best epoch."""
    optimiser = torch.optim.Adam(network.parameters(), lr=settings.lr, fused=True)
    chance = torch.Generator().manual_seed(settings.seed)
    batch = settings.batch or min(1024, max(8, len(first.labels) // _STEPS))
    history: list[Epoch] = []
    lowest, best, since = float("inf"), deepcopy(network.state_dict()), 0
    for number in range(1, settings.epochs + 1):
        total, steps = 0.0, 0
        order = torch.randperm(len(first.labels), generator=chance)
        for rows in torch.split(order, batch):
            optimiser.zero_grad()
            loss = _loss(network, _Part(*(column[rows] for column in first)), weight)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total, steps = total + float(loss.detach()), steps + 1
        with torch.no_grad():
            validation = float(_loss(network, second, weight))
        if not math.isfinite(validation):
            raise UserError(f"the loss is no longer a number in epoch {number}: lower lr={settings.lr:g}")
        better = validation < lowest - 1e-6
        history.append(Epoch(number, total / steps, validation, better))
        if progress is not None:
            progress(history[-1])
        since = 0 if better else since + 1
        if better:
            lowest, best = validation, deepcopy(network.state_dict())
        if since >= settings.patience:
            break
    network.load_state_dict(best)
    return tuple(history)


def _loss(network: Network, part: _Part, weight: float) -> Tensor:
    """Mean cross-entropy with soft labels; rejections have ``weight`` times the weight."""
    logits, kept = network(part.inputs), part.weights * part.labels
    refused = weight * (part.weights - kept)
    softplus = torch.nn.functional.softplus
    total: Tensor = (kept * softplus(-logits) + refused * softplus(logits)).sum()
    return total / (kept + refused).sum().clamp(min=1e-12)
