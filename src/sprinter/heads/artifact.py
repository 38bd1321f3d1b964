"""Heads on disk: a Hugging Face-style directory, named ``<target>-speculator.sprinter``.

* ``config.json`` with ``"speculators_model_type": "sprinter"``, every field of ``HeadConfig``, the calibration, facts
  about the training, and a checksum of all that and of the weights;
* ``model.safetensors`` with the network's weights, float32, and the knots of an isotonic calibration;
* ``README.md``, the model card.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from sprinter.errors import UserError, first_line
from sprinter.files import write_atomic
from sprinter.heads.calibration import read_calibration
from sprinter.heads.head import OF_TARGET, GateHead, Head, HeadConfig

__all__ = ["check_sum", "from_hub", "load_head", "save_head", "with_checksum"]

_TYPE = "sprinter"
_KNOTS = "calibration."
_CHECKSUM = "sha256"
_OWN = ("speculators_model_type", "calibration", _CHECKSUM)


def save_head(head: Head, directory: Path, card: str, extra: Mapping[str, Any] | None = None) -> None:
    """Write the artifact.

    config.json is written last, so that an interrupted call leaves no directory that looks like a head.

    Args:
        head: the head.
        directory: created if it does not exist.
        card: text of the model card.
        extra: further fields of config.json (training facts).

    Raises:
        UserError: the directory cannot be written (a full disk, for example); partly written files are removed.
    """
    optional = ("width", "layers", "drift", "trusted", *OF_TARGET)  # left out if None
    own = {
        key: value for key, value in asdict(head.config).items() if key not in optional or value is not None
    }
    config = {
        "speculators_model_type": _TYPE,
        **own,
        "calibration": head.calibration.to_dict(),
        **(extra or {}),
    }
    tensors = {
        **head.network.state_dict(),
        **{_KNOTS + name: values for name, values in head.calibration.state_dict().items()},
    }
    weights = to_bytes({name: values.detach().cpu().contiguous() for name, values in tensors.items()})
    files = {
        "model.safetensors": weights,
        "README.md": card.encode(),
        "config.json": with_checksum(config, weights),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").unlink(missing_ok=True)  # an old config must never describe new weights
        for name, content in files.items():
            write_atomic(directory / name, content)
    except OSError as error:
        raise UserError(
            f"cannot write the head into '{directory}' ({error.strerror}): free it or give another"
        ) from error


def with_checksum(config: Mapping[str, Any], weights: bytes) -> bytes:
    """The text of a config.json that also holds the SHA-256 of its fields and of the file of weights beside it."""
    fields = json.loads(json.dumps(config, allow_nan=False))
    total = _checksum(fields, hashlib.sha256(weights).digest())
    return (json.dumps({**fields, _CHECKSUM: total}, indent=2) + "\n").encode()


def check_sum(config: Mapping[str, Any], weights: Path) -> None:
    """Verify the checksum of a config and a file of weights; artifacts of others and of old versions have none.

    Raises:
        UserError: it differs.
        OSError: the file cannot be read.
    """
    if _CHECKSUM not in config:
        return
    with open(weights, "rb") as file:
        found = _checksum(config, hashlib.file_digest(file, "sha256").digest())
    if config[_CHECKSUM] != found:
        raise UserError(
            f"'{weights.parent}' is damaged: config.json and {weights.name} differ from what was written (by their "
            f'checksum): copy or make it again; after an edit on purpose, remove "{_CHECKSUM}" from config.json'
        )


def _checksum(config: Mapping[str, Any], weights: bytes) -> str:
    """Of the fields but the checksum itself, in whatever order, and the weights' own digest."""
    fields = {name: value for name, value in config.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode() + weights).hexdigest()


def load_head(source: str | os.PathLike[str]) -> Head:
    """Load a head of any kind from a directory or a hub id.

    Raises:
        UserError: the directory is missing or holds no head, it is damaged, or the hub cannot be reached.
    """
    directory = Path(source).expanduser()
    revision = None
    if not directory.is_dir():
        directory = from_hub(str(source))
        revision = directory.name
    fields = _read_config(directory)
    try:
        check_sum(fields, directory / "model.safetensors")
        known = {key: fields[key] for key in HeadConfig.__dataclass_fields__ if key in fields}
        config = HeadConfig(**known)
        tensors = load_file(directory / "model.safetensors")
        head = _assemble(config, fields.get("calibration"), tensors)
        head.id, head.revision = str(source), revision
        head.facts = {key: value for key, value in fields.items() if key not in (*known, *_OWN)}
        return head
    except UserError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UserError(
            f"the gate in '{directory}' lacks a field or a weight ({error}): make it again"
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"cannot read '{directory}/model.safetensors' ({error}): copy or make the gate again"
        ) from None


def _read_config(directory: Path) -> dict[str, Any]:
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
    assert isinstance(fields, dict)
    return fields


def _assemble(config: HeadConfig, calibration: Mapping[str, Any] | None, tensors: dict[str, Tensor]) -> Head:
    knots = {name: values for name, values in tensors.items() if name.startswith(_KNOTS)}
    weights = {name: values for name, values in tensors.items() if name not in knots}
    curve = read_calibration(calibration, knots)
    if GateHead.fits(config):
        return GateHead(config, weights["weight"], weights["bias"], curve)
    network = config.network()
    wanted = network.state_dict()
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in wanted or name not in weights or wanted[name].shape != weights[name].shape:
            raise UserError(
                f"the weight '{name}' does not fit the config of the gate: the artifact is damaged, make it again"
            )
    network.load_state_dict(weights)
    return Head(config, network, curve)


def from_hub(name: str, what: str = "gate") -> Path:
    """The files of a head on the hub, in the hub's cache.

    Args:
        what: what it is called, for messages.

    Raises:
        UserError: no such id, or no network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(
            f"there is no {what} directory '{name}': give a directory or a hub id such as org/name"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors", "README.md"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise UserError(
            f"cannot get {what} '{name}' from the hub ({first_line(error)}): check the id and the network"
        ) from None
