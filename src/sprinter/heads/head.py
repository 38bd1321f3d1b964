"""A head: feature spec + network + calibration, on top of a frozen draft or target.

Kinds: ``gate`` (SPRINTER's verifier: may this token be kept without asking the target?), and the heads of stop rules,
``specdec++`` (probability that the target accepts x, from the state at x) and ``disco`` (the same from the law alone).
On the target, for accept rules: ``judge`` and ``diversed``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sprinter.errors import UserError, did_you_mean
from sprinter.fingerprint import weights_fingerprint
from sprinter.heads.calibration import Calibration
from sprinter.heads.features import feature_width, parse_features, sees_token, stack_features
from sprinter.heads.networks import ARCHITECTURES, Network, build_network
from sprinter.kinds import HEAD_KINDS

__all__ = ["KINDS", "OF_TARGET", "Head", "HeadConfig"]

KINDS = tuple(HEAD_KINDS)
OF_TARGET = ("target_revision", "target_fingerprint")
"""Fields of the configuration that only heads on the target have."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Configuration of a head: what it reads, and the pair that it was trained for.

    By default it is the gate of the SPRINTER paper (section 3): one linear layer and a sigmoid on the hidden state that
    produced q, d + 1 parameters. It reads the prefix, not the token that it judges.

    Attributes:
        hidden_size: hidden size d of the model that it reads.
        draft_id, draft_revision, draft_fingerprint: the draft whose hidden states and laws it reads; of a head on the
            target, the draft whose tokens it was trained on.
        target_id: the target that it predicts, or whose hidden states it reads, then with target_revision and
            target_fingerprint.
        label: what the score estimates, e.g. "overlap" (β, the probability that exact acceptance keeps a draft token).
        tau: threshold chosen in training; for a gate, the default τ of ``sprinter``.
        drift: for a gate, the mean drift expected at tau and temperature 1 on held-out texts; None: not measured.
        trusted: for a gate, the share of draft tokens that score at least tau on those texts; None: not measured.
        kind: one of ``KINDS``.
        architecture: "linear", "mlp", "ffn" or "resnet".
        features: features in order; see ``sprinter.heads.features``.
        width, layers: size of the network, for architectures that have one.

    Raises:
        UserError: a value is out of range, or a name is unknown.
    """

    hidden_size: int
    draft_id: str
    target_id: str
    draft_revision: str | None = None
    draft_fingerprint: str | None = None
    label: str = "overlap"
    tau: float = 0.5
    kind: str = "gate"
    architecture: str = "linear"
    features: tuple[str, ...] = ("hidden",)
    width: int | None = None
    layers: int | None = None
    drift: float | None = None
    trusted: float | None = None
    target_revision: str | None = None
    target_fingerprint: str | None = None

    def __post_init__(self) -> None:
        if type(self.hidden_size) is not int or self.hidden_size < 1:
            raise UserError(f"hidden_size={self.hidden_size} is out of range: give the draft's hidden size")
        for name, share in (("tau", self.tau), ("drift", self.drift), ("trusted", self.trusted)):
            if share is None and name != "tau":
                continue
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise UserError(f"{name}={share} is out of range: give a number in [0, 1]")
        for what, value, known in (
            ("kind of head", self.kind, KINDS),
            ("architecture", self.architecture, ARCHITECTURES),
        ):
            if value not in known:
                raise did_you_mean(what, value, known)
        object.__setattr__(self, "features", parse_features(self.features))
        if self.model == "target" and self.features != ("hidden",):
            raise UserError(
                f"a {self.kind} head reads the target's hidden state alone: give features=hidden, "
                f"not {', '.join(self.features)}"
            )

    @property
    def model(self) -> str:
        """The model whose hidden states it reads, "draft" or "target"."""
        return HEAD_KINDS[self.kind].model

    @property
    def inputs(self) -> int:
        """Number of inputs of the network."""
        return sum(feature_width(name, self.hidden_size) for name in self.features)

    def network(self) -> Network:
        """Build a network of this configuration with initial weights."""
        sizes = {"width": self.width, "layers": self.layers}
        given = {name: value for name, value in sizes.items() if value is not None}
        return build_network(self.architecture, self.inputs, **given)


class Head(nn.Module):
    """Scores in [0, 1], computed in float32.

    Args:
        config: what the head reads, and the pair that it was trained for.
        network: network with ``config.inputs`` inputs.
        calibration: turns the logit into a probability; None: a sigmoid.

    Attributes:
        facts: additional fields of the artifact's config.json (how the head was trained).
        id, revision: directory or hub id that it was loaded from, and the commit; None if it was made in memory.

    Raises:
        UserError: the network has another number of inputs.
    """

    def __init__(self, config: HeadConfig, network: Network, calibration: Calibration | None = None) -> None:
        super().__init__()
        if network.inputs != config.inputs:
            raise UserError(
                f"the head's network reads {network.inputs} numbers, its features are {config.inputs}: "
                "the artifact is damaged, make it again"
            )
        self.config = config
        self.facts: Mapping[str, Any] = {}
        self.id: str | None = None
        self.revision: str | None = None
        self.network = network.float().requires_grad_(False)
        self.calibration = Calibration() if calibration is None else calibration
        self.train(False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over config, calibration and all weights."""
        facts = {**asdict(self.config), "calibration": self.calibration.to_dict()}
        for name in OF_TARGET:  # heads on the draft have none, and had no such fields
            if facts[name] is None:
                del facts[name]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for name, values in sorted(self.state_dict().items()):
            digest.update(f"{name}{tuple(values.shape)}{values.dtype}".encode())
            digest.update(values.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that ``forward`` takes; ``heads.features.read_features`` computes them."""
        return self.config.features

    @property
    def sees_token(self) -> bool:
        """Whether it reads the token x, not only its prefix."""
        return sees_token(self.features)

    def score(self, features: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Scores ``[...]``, float32, by tensor operations that can be captured.

        Args:
            features: features by name, each ``[..., d]``, ``[..., k]`` or ``[...]``; for a head with a single feature
                also the bare tensor (``[..., d]`` for the paper's gate).

        Raises:
            UserError: a feature is missing.
        """
        scores: Tensor = self.calibration(self.network(self._stacked(features)))
        return scores

    @torch.inference_mode()
    def forward(self, features: Tensor | Mapping[str, Tensor]) -> Tensor:
        """``score``, without gradients."""
        return self.score(features)

    def _stacked(self, features: Tensor | Mapping[str, Tensor]) -> Tensor:
        if not isinstance(features, Tensor):
            return stack_features(self.features, features)
        if len(self.features) > 1:
            raise UserError(f"the head reads {', '.join(self.features)}: give each by its name")
        return stack_features(self.features, {self.features[0]: features})

    @property
    def size(self) -> int:
        """Number of parameters of the network."""
        return self.network.size

    @property
    def flops(self) -> float:
        """FLOPs of one score: one multiplication and one addition per weight."""
        return self.network.flops

    def check_model(self, *, id: str, revision: str | None, hidden_size: int, model: Any) -> None:
        """Raise a UserError if this head was made for another model than this draft, or target (``config.model``)."""
        made_for, name = self.config, "gate" if self.config.kind == "gate" else f"{self.config.kind} head"
        which = made_for.model
        own_id, own_revision, own_fingerprint = (
            getattr(made_for, f"{which}_{part}") for part in ("id", "revision", "fingerprint")
        )
        if hidden_size != made_for.hidden_size:
            raise UserError(
                f"the {name} reads hidden states of size {made_for.hidden_size}, {which} '{id}' has size "
                f"{hidden_size}: use the {name} made for this {which} (this one was made for '{own_id}')"
            )
        if own_fingerprint is not None:
            if weights_fingerprint(model) != own_fingerprint:
                raise UserError(
                    f"the {name} was made for other weights of {which} '{own_id}' than those of '{id}': "
                    f"train a {name} for this {which}, or load the {which} that it was made for"
                )
        elif id != own_id or (None not in (revision, own_revision) and revision != own_revision):
            raise UserError(
                f"the {name} was made for {which} '{own_id}' (revision {own_revision or 'any'}), "
                f"not for '{id}' (revision {revision or 'unknown'}): use the {name} made for this {which}"
            )
