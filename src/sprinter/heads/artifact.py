"""Heads that score, on disk: a Hugging Face-style directory, named ``<target>-speculator.sprinter``.

* ``config.json`` with ``"speculators_model_type": "sprinter"``, every field of ``HeadConfig``, the calibration, facts
  about the training, and a checksum (``heads.files``);
* ``model.safetensors`` with the network's weights, float32, and the knots of an isotonic calibration;
* ``README.md``, the model card.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sprinter.errors import UserError
from sprinter.heads.calibration import read_calibration
from sprinter.heads.files import CHECKSUM, HeadFiles, fill, fitting, read_files, write_files
from sprinter.heads.head import OF_TARGET, Head, HeadConfig

__all__ = ["load_head", "read_head", "save_head"]

_TYPE = "sprinter"
_KNOTS = "calibration."
_OWN = ("speculators_model_type", "calibration", CHECKSUM)
_OPTIONAL = ("width", "layers", "drift", "trusted", *OF_TARGET)  # left out if None


def save_head(head: Head, directory: Path, card: str, extra: Mapping[str, Any] | None = None) -> None:
    """Write the artifact.

    Args:
        head: the head.
        directory: created if it does not exist.
        card: text of the model card.
        extra: further fields of config.json (training facts).

    Raises:
        UserError: the directory cannot be written (a full disk, for example); partly written files are removed.
    """
    own = {
        key: value for key, value in asdict(head.config).items() if key not in _OPTIONAL or value is not None
    }
    config = {
        "speculators_model_type": _TYPE,
        **own,
        "calibration": head.calibration.to_dict(),
        **(extra or {}),
    }
    knots = {_KNOTS + name: values for name, values in head.calibration.state_dict().items()}
    write_files(directory, {**head.network.state_dict(), **knots}, config, card)


def load_head(source: str | os.PathLike[str]) -> Head:
    """Load a head of any kind that scores, from a directory or a hub id.

    Raises:
        UserError: the directory is missing or holds no head, it is damaged, or the hub cannot be reached.
    """
    return read_head(read_files(source, "gate"))


def read_head(files: HeadFiles) -> Head:
    """``load_head`` from a folder that was found."""
    fields = files.config
    if fields.get("speculators_model_type") != _TYPE:
        raise UserError(
            f'\'{files.directory}\' is not a gate: its config.json has no "speculators_model_type": "{_TYPE}"'
        )
    known = {key: fields[key] for key in HeadConfig.__dataclass_fields__ if key in fields}
    with fitting("gate", files):
        config, weights = HeadConfig(**known), files.weights()
        knots = {name: weights.pop(name) for name in list(weights) if name.startswith(_KNOTS)}
        network = config.network()
        fill(network, weights, files.directory)
        head = Head(config, network, read_calibration(fields.get("calibration"), knots))
    head.id, head.revision = files.id, files.revision
    head.facts = {key: value for key, value in fields.items() if key not in (*known, *_OWN)}
    return head
