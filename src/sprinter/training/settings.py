"""Presets and settings of training a head.

Presets (``--preset``): ``paper`` (the SPRINTER paper's gate, label and τ), ``linear``, ``mlp`` and ``resnet`` are
gates; ``specdec++`` and ``disco`` are heads of stop rules. Each sets features, label, weight on rejections, calibration
and τ; all can be changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from sprinter.decode.checks import between, one_of
from sprinter.errors import UserError
from sprinter.kinds import HEAD_KINDS
from sprinter.parameters import LISTED, Natural, Positive, RealNumber, checked, stated
from sprinter.training.label_settings import KINDS

if TYPE_CHECKING:  # the command line reads the settings before it imports torch
    from sprinter.training.objectives import Label

__all__ = ["PRESETS", "TrainSettings"]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "linear": {"kind": "gate", "architecture": "linear"},
    "paper": {
        "kind": "gate", "architecture": "linear", "label": "ratio(lambda=1.2)", "calibration": "none", "tau": 0.5,
    },
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
"""Values of each preset; ``_USUAL`` has the others."""
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


@checked
class TrainSettings:
    """Settings of training. None takes the preset's value."""

    preset: str = stated("linear", "Kind of head, with the values that suit it.")
    label: str | None = stated(
        None, "What to estimate: overlap, overlap(temperature=0.7), overlap(temperature=own), ratio(lambda=1.2), "
        "ratio(lambda=1.2, at=greedy), expected-ratio(lambda=1.2), agreement, accept, fuzzy(divergence=js, "
        "threshold=0.3). None: overlap; ratio(lambda=1.2) for paper; accept(at=text) for specdec++.",
    )  # fmt: skip
    features: Annotated[tuple[str, ...] | str | None, LISTED] = stated(
        None, "Features, separated by commas: hidden, entropy, max_q, top_q(k=10), position, temperature; for "
        "specdec++ also hidden_x, log_q. None: by head. See ``sprinter.heads.features``.",
    )  # fmt: skip
    seed: Natural = stated(0, "Seed of the split by prompt, the weights and the batches.", le=2**63 - 1)
    epochs: Positive = stated(20, "At most.")
    lr: Annotated[RealNumber, Field(ge=1e-8, le=10)] = stated(5e-4, "Learning rate of Adam.")
    batch: Positive | None = stated(None, "Positions per step. None: about 400 steps per epoch.")
    patience: Positive = stated(3, "Stop after this many epochs without a better validation loss.")
    weight: RealNumber | str | None = stated(
        None, "Weight of rejections in the loss: a number, or balanced. None: 1; 6 for specdec++. Balanced gives both "
        "classes the same total weight.",
    )  # fmt: skip
    calibration: str | None = stated(
        None, "Calibration: none, temperature or isotonic. None: temperature; none for paper and specdec++."
    )
    width: int | None = stated(None, "Hidden units of mlp and disco. None: by head.")
    layers: int | None = stated(None, "Hidden layers or residual blocks. None: by head.")
    tau: Annotated[RealNumber, Field(ge=0, le=1)] | None = stated(
        None,
        "The tau itself, instead of --drift. None: by --drift. Of paper, and of a head that is no gate, 0.5.",
    )
    drift: Annotated[RealNumber, Field(ge=0, le=1)] | None = stated(
        None, "Choose a gate's tau for this mean drift, on held-out prompts. None: 0.1."
    )
    mix: Annotated[RealNumber, Field(ge=0, le=0.5)] = stated(
        _MIX, "Share of target tokens in the context, for heads that see the token."
    )
    classes: Annotated[tuple[str, ...] | None, LISTED] = stated(
        None, "Prefix classes to train on, separated by commas. None: all that fit."
    )

    def __post_init__(self) -> None:
        one_of("preset", self.preset, [*PRESETS, *_MINED])
        if self.preset in _MINED:
            raise UserError(f"a {self.preset} head is fitted to mined tokens: use training.harm.fit_harm")
        self._check_network()
        usual = {**_USUAL, **PRESETS[self.preset]}
        if self.drift is not None:
            usual.pop("tau", None)
        for field in fields(self):
            if getattr(self, field.name) is None and field.name in usual:
                object.__setattr__(self, field.name, usual[field.name])
        object.__setattr__(self, "label", str(self.target))
        object.__setattr__(self, "features", self.inputs)
        if self.tau is None and self.drift is None:
            name, value = ("drift", _DRIFT) if self.kind == "gate" else ("tau", 0.5)
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        from sprinter.heads.calibration import CALIBRATIONS
        from sprinter.heads.features import sees_token

        self._check_threshold()
        if self.weight != "balanced":
            between("weight", self.weight, 1e-3, 1e3)
        one_of("calibration", self.calibration, CALIBRATIONS)
        for name in self.classes or ():
            one_of("prefix class", name, KINDS)
        if self.mix != _MIX and not (self.own_token and self.classes is None):
            why = "which reads no token" if self.classes is None else "whose classes were chosen"
            raise UserError(f"mix={self.mix} is of no use to {_a(self.preset)} head {why}: leave it out")
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
            if (value := getattr(self, name)) is not None and name not in PRESETS[self.preset]:
                raise UserError(
                    f"{name}={value} is of no use to {_a(self.preset)} head: leave it out, or train mlp"
                )

    def _check_threshold(self) -> None:
        if self.tau is not None and self.drift is not None:
            raise UserError(
                f"tau={self.tau} and drift={self.drift} were given: a drift chooses tau, give one of them"
            )
        if self.tau is None and self.kind != "gate":
            raise UserError(
                f"a {self.kind} head does not change the text: leave drift={self.drift} out, or train a gate"
            )

    @property
    def kind(self) -> str:
        """Kind of the head: "gate", "specdec++" or "disco"."""
        return str(PRESETS[self.preset]["kind"])

    @property
    def target(self) -> Label:
        """The parsed label."""
        from sprinter.training.objectives import parse_label

        return parse_label(self.label or "")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the features, in their canonical spelling."""
        from sprinter.heads.features import parse_features

        return parse_features(self.features or ())

    @property
    def own_token(self) -> bool:
        """Whether label or features depend on the text's own token."""
        from sprinter.heads.features import sees_token

        return self.target.at_text or sees_token(self.inputs)


def _a(name: str) -> str:
    """The name after its indefinite article: "a linear", "an mlp"."""
    return f"{'an' if name == 'mlp' else 'a'} {name}"
