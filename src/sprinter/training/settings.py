"""Presets and settings of training a head.

Presets (``--head``): ``linear`` (the SPRINTER paper), ``mlp`` and ``resnet`` are gates; ``specdec++`` and ``disco`` are
heads of stop rules. Each sets features, label, weight on rejections and calibration; all can be changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sprinter.decode.checks import between, one_of, positive
from sprinter.errors import UserError
from sprinter.heads.calibration import CALIBRATIONS
from sprinter.heads.features import parse_features, sees_token
from sprinter.kinds import HEAD_KINDS
from sprinter.training.objectives import Label, parse_label
from sprinter.training.records import KINDS

__all__ = ["PRESETS", "TrainSettings"]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "linear": {"kind": "gate", "architecture": "linear"},
    "mlp": {"kind": "gate", "architecture": "mlp", "width": 64, "layers": 1},
    "resnet": {"kind": "gate", "architecture": "resnet", "layers": 3},
    "specdec++": {
        "kind": "specdec++", "architecture": "resnet", "layers": 3, "features": ("hidden_x",),
        "label": "accept(at=text)", "weight": 6.0, "calibration": "none",
    },
    "disco": {
        "kind": "disco", "architecture": "ffn", "width": 32, "layers": 1,
        "features": ("top_q(k=10)", "entropy", "position"), "weight": "balanced", "calibration": "none",
    },
}  # fmt: skip
"""Values of each ``head`` preset; ``_USUAL`` has the others."""
_MINED = tuple(name for name, kind in HEAD_KINDS.items() if kind.model == "target")
"""Heads that ``training.harm`` fits instead."""
_DRIFT = 0.1
"""Default drift that a gate's τ is chosen for."""
_MIX = 0.15
"""Default share of target tokens in the context."""
_USUAL: Mapping[str, Any] = {
    "features": ("hidden",), "label": "overlap", "weight": 1.0, "calibration": "temperature", "width": None,
    "layers": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings of training. None takes the preset's value.

    Attributes:
        head: name of a preset.
        label: what to estimate, a spec of ``sprinter.training.objectives``.
        features: what the head reads, see ``sprinter.heads.features``.
        seed: seed of the split, the initial weights and the order of batches.
        epochs: maximum number of epochs.
        lr: Adam's learning rate.
        patience: number of epochs without a better validation loss after which training stops early.
        batch: positions per step; None takes about 400 steps per epoch, so that small data sets are learned as well.
        weight: weight of rejections in the loss; "balanced" gives both classes the same total weight.
        calibration: none, temperature or isotonic, fitted on the validation part.
        width, layers: size of the network.
        tau: threshold of the head; None: for a gate the lowest that keeps ``drift``, else 0.5.
        drift: for a gate, the mean drift that its τ is chosen for; None: 0.1, unless ``tau`` is given.
        mix: share of target tokens in the context, for labels and features that depend on the text's token.
        classes: prefix classes to train on; None takes those that fit label and features.
    """

    head: str = "linear"
    label: str | None = None
    features: tuple[str, ...] | str | None = None
    seed: int = 0
    epochs: int = 20
    lr: float = 5e-4
    batch: int | None = None
    patience: int = 3
    weight: float | str | None = None
    calibration: str | None = None
    width: int | None = None
    layers: int | None = None
    tau: float | None = None
    drift: float | None = None
    mix: float = _MIX
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        one_of("head", self.head, [*PRESETS, *_MINED])
        if self.head in _MINED:
            raise UserError(f"a {self.head} head is fitted to mined tokens: use training.harm.fit_harm")
        self._check_network()
        preset = {**_USUAL, **PRESETS[self.head]}
        for field in fields(self):
            if getattr(self, field.name) is None and field.name in preset:
                object.__setattr__(self, field.name, preset[field.name])
        object.__setattr__(self, "label", str(parse_label(self.label or "")))
        object.__setattr__(self, "features", parse_features(self.features or ()))
        if self.tau is None and self.drift is None:
            name, value = ("drift", _DRIFT) if self.kind == "gate" else ("tau", 0.5)
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        positive(self, "epochs", "patience", "batch")
        between("lr", self.lr, 1e-8, 10.0)
        self._check_threshold()
        between("mix", self.mix, 0.0, 0.5)
        if self.weight != "balanced":
            between("weight", self.weight, 1e-3, 1e3)
        one_of("calibration", self.calibration, CALIBRATIONS)
        for name in self.classes or ():
            one_of("prefix class", name, KINDS)
        if self.mix != _MIX and not (self.own_token and self.classes is None):
            why = "which reads no token" if self.classes is None else "whose classes were chosen"
            raise UserError(f"mix={self.mix} is of no use to {_a(self.head)} head {why}: leave it out")
        label, kind = self.target, self.kind
        if sees_token(self.inputs) and label.sees_token and not label.at_text:
            raise UserError(
                f"label {label} is about another token than the features {', '.join(self.inputs)}: "
                f"use {label.name}(at=text)"
            )
        if sees_token(self.inputs) and not HEAD_KINDS[kind].sees_token:
            seeing = " or ".join(name for name in PRESETS if HEAD_KINDS[PRESETS[name]["kind"]].sees_token)
            raise UserError(
                f"a {kind} head that reads {', '.join(self.inputs)} depends on the token that it judges, "
                f"which would bias texts: give features of the prefix, or train {seeing}"
            )

    def _check_network(self) -> None:
        for name in ("width", "layers"):
            if (value := getattr(self, name)) is not None and name not in PRESETS[self.head]:
                raise UserError(
                    f"{name}={value} is of no use to {_a(self.head)} head: leave it out, or train mlp"
                )

    def _check_threshold(self) -> None:
        if self.tau is not None and self.drift is not None:
            raise UserError(
                f"tau={self.tau} and drift={self.drift} were given: a drift chooses tau, give one of them"
            )
        if self.tau is not None:
            between("tau", self.tau, 0.0, 1.0)
        elif self.kind != "gate":
            raise UserError(
                f"a {self.kind} head does not change the text: leave drift={self.drift} out, or train a gate"
            )
        else:
            between("drift", self.drift, 0.0, 1.0)

    @property
    def kind(self) -> str:
        """Kind of the head: "gate", "specdec++" or "disco"."""
        return str(PRESETS[self.head]["kind"])

    @property
    def target(self) -> Label:
        """The parsed label."""
        return parse_label(self.label or "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the features, in their canonical spelling."""
        return parse_features(self.features or ())

    @property
    def own_token(self) -> bool:
        """Whether label or features depend on the text's own token."""
        return self.target.at_text or sees_token(self.inputs)


def _a(name: str) -> str:
    """The name after its indefinite article: "a linear", "an mlp"."""
    return f"{'an' if name == 'mlp' else 'a'} {name}"
