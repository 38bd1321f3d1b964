"""The gate: one linear layer and a sigmoid on the draft's last hidden state that produced q (SPRINTER, section 3).

d + 1 parameters for hidden size d. It sees the prefix, not the token that is judged.

Artifact: a Hugging Face-style directory named ``<target>-speculator.sprinter``:

* ``config.json`` with ``"speculators_model_type": "sprinter"``, the hidden size, the label it was trained on, the
  pair it was made for (ids, revisions, a fingerprint of the draft's weights);
* ``model.safetensors`` with ``weight [1, d]`` and ``bias [1]``, float32;
* ``README.md``, the model card.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sprinter.errors import UserError

__all__ = ["Gate", "GateConfig", "load_gate", "save_gate", "weights_fingerprint"]

_TYPE = "sprinter"


@dataclass(frozen=True, slots=True)
class GateConfig:
    """What a gate was made for.

    Attributes:
        hidden_size: d of the draft.
        draft_id, draft_revision, draft_fingerprint: the draft whose hidden states it reads.
        target_id: the target that it predicts.
        label: what the score estimates, e.g. "overlap" (β, the chance that exact acceptance keeps a draft token).
        tau: threshold at which its maker reports it.
    """

    hidden_size: int
    draft_id: str
    target_id: str
    draft_revision: str | None = None
    draft_fingerprint: str | None = None
    label: str = "overlap"
    tau: float = 0.5

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise UserError(f"hidden_size={self.hidden_size} is out of range: give the draft's hidden size")


class Gate(nn.Module):
    """score = sigmoid(w · h + b), computed in float32.

    Args:
        config: what it was made for.
        weight: ``[1, d]``; bias: ``[1]``.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, config: GateConfig, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        if tuple(weight.shape) != (1, config.hidden_size) or tuple(bias.shape) != (1,):
            raise UserError(
                f"the gate's weights have shape {tuple(weight.shape)} and {tuple(bias.shape)}, its config says "
                f"hidden_size={config.hidden_size}: the artifact is damaged, make it again"
            )
        self.config = config
        self.register_buffer("weight", weight.detach().float())
        self.register_buffer("bias", bias.detach().float())

    @torch.inference_mode()
    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., d]`` -> scores ``[...]`` in [0, 1], float32."""
        return torch.sigmoid(hidden.float() @ self.weight[0] + self.bias[0])

    @property
    def flops(self) -> float:
        """FLOPs of one score: a multiplication and an addition a weight."""
        return 2.0 * self.config.hidden_size

    def check_draft(self, *, id: str, revision: str | None, hidden_size: int, model: nn.Module) -> None:
        """Raise a UserError if this gate was made for another draft."""
        made_for = self.config
        if hidden_size != made_for.hidden_size:
            raise UserError(
                f"the gate reads hidden states of size {made_for.hidden_size}, draft '{id}' has size {hidden_size}: "
                f"use the gate made for this draft (this one was made for '{made_for.draft_id}')"
            )
        if made_for.draft_fingerprint is not None:
            if weights_fingerprint(model) != made_for.draft_fingerprint:
                raise UserError(
                    f"the gate was made for other weights of draft '{made_for.draft_id}' than those of '{id}': "
                    "train a gate for this draft, or load the draft that it was made for"
                )
        elif id != made_for.draft_id or (
            None not in (revision, made_for.draft_revision) and revision != made_for.draft_revision
        ):
            raise UserError(
                f"the gate was made for draft '{made_for.draft_id}' (revision {made_for.draft_revision or 'any'}), "
                f"not for '{id}' (revision {revision or 'unknown'}): use the gate made for this draft"
            )


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, shapes and the first 64 values (as bfloat16) of every parameter.

    The same for one checkpoint wherever it lies and whichever dtype it is loaded in; cheap for any size.
    """
    digest = hashlib.sha256()
    for name, values in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.detach().flatten()[:64].to("cpu", torch.bfloat16).float().numpy().tobytes())
    return digest.hexdigest()


def save_gate(gate: Gate, directory: Path, card: str, extra: Mapping[str, Any] | None = None) -> None:
    """Write the artifact. ``extra`` (training facts) goes into config.json beside the gate's own fields."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "speculators_model_type": _TYPE,
        "architecture": "linear",
        **asdict(gate.config),
        **(extra or {}),
    }
    save_file(
        {"weight": gate.weight.contiguous(), "bias": gate.bias.contiguous()},
        directory / "model.safetensors.part",
    )
    (directory / "model.safetensors.part").replace(directory / "model.safetensors")
    _write(directory / "README.md", card)
    _write(directory / "config.json", json.dumps(config, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def load_gate(source: str | Path) -> Gate:
    """Load a gate from a directory or a hub id.

    Raises:
        UserError: missing or wrong directory, not a gate, damaged weights, hub out of reach.
    """
    directory = Path(source).expanduser()
    if not directory.is_dir():
        directory = _from_hub(str(source))
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise UserError(f"'{directory}' is not a gate: it has no config.json")
    try:
        fields = json.loads(config_file.read_text(encoding="utf-8"))
        kind = fields.get("speculators_model_type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"'{config_file}' is not valid JSON ({error}): make the gate again") from None
    if kind != _TYPE:
        raise UserError(
            f'\'{directory}\' is not a gate: its config.json has no "speculators_model_type": "{_TYPE}"'
        )
    known = {key: fields[key] for key in GateConfig.__dataclass_fields__ if key in fields}
    try:
        config = GateConfig(**known)
        weights = load_file(directory / "model.safetensors")
        return Gate(config, weights["weight"], weights["bias"])
    except (TypeError, KeyError) as error:
        raise UserError(
            f"the gate in '{directory}' lacks a field or a weight ({error}): make it again"
        ) from None
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(
            f"cannot read '{directory}/model.safetensors' ({error}): copy or make the gate again"
        ) from None


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"there is no gate directory '{name}': give a directory or a hub id such as org/name")
    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "model.safetensors", "README.md"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"cannot get gate '{name}' from the hub ({first_line}): check the id and the network"
        ) from None
