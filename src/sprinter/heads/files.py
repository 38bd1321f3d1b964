"""Files of heads, of those that score and of those that draft: a folder with a config, weights in safetensors, a card.

``config.json`` also holds a checksum of its own fields and of the weights, and is written last: a folder that has it is
complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from sprinter.errors import UserError, first_line
from sprinter.files import write_atomic, writing

__all__ = ["CHECKSUM", "WEIGHTS", "HeadFiles", "fill", "fitting", "read_files", "write_files"]

WEIGHTS = "model.safetensors"
CHECKSUM = "sha256"


class HeadFiles:
    """A folder of heads: its config.json, and the weights, read when they are asked for.

    Attributes:
        directory: the folder. config: fields of config.json.
        id, revision: directory or hub id that was asked for, and the commit.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], id: str, revision: str | None) -> None:
        self.directory, self.config, self.id, self.revision = directory, config, id, revision

    def weights(self, names: Sequence[str] = (WEIGHTS,), pickled: Sequence[str] = ()) -> dict[str, Tensor]:
        """Weights by name, out of the first of some safetensors files that is there.

        Args:
            pickled: names of files of pickles, which are never loaded.

        Raises:
            UserError: there is none, or it or config.json is damaged.
        """
        found = next((self.directory / name for name in names if (self.directory / name).is_file()), None)
        if found is None:
            for name in pickled:
                if (self.directory / name).is_file():
                    raise UserError(
                        f"'{self.directory / name}' is a pickle, which can run code and is never loaded: where you "
                        'trust it, convert it once with python -c "import torch, safetensors.torch as s; '
                        f"s.save_file(torch.load('{name}', map_location='cpu'), '{names[0]}')\""
                    )
            raise UserError(f"'{self.directory}' has no weights: it needs {' or '.join(names)}")
        try:
            self._check_sum(found)
            return load_file(found)
        except UserError:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"cannot read '{found}' ({error}): copy or make the heads again") from None

    def _check_sum(self, weights: Path) -> None:
        """Verify the checksum; heads of others and of old versions have none."""
        if CHECKSUM not in self.config:
            return
        with open(weights, "rb") as file:
            found = _checksum(self.config, hashlib.file_digest(file, "sha256").digest())
        if self.config[CHECKSUM] != found:
            raise UserError(
                f"'{self.directory}' is damaged: config.json and {weights.name} differ from what was written (by their "
                f'checksum): copy or make it again; after an edit on purpose, remove "{CHECKSUM}" from config.json'
            )


def read_files(source: str | os.PathLike[str], what: str = "head") -> HeadFiles:
    """The folder of heads, or of a hub id.

    Args:
        what: what it is called, for messages.

    Raises:
        UserError: there is no such folder or id, or config.json is missing or damaged.
    """
    directory, revision = Path(source).expanduser(), None
    if not directory.is_dir():
        directory = _from_hub(str(source), what)
        revision = directory.name
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(f"'{source}' is not a {what}: it has no config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise UserError(f"'{file}' is not valid JSON ({error}): make the {what} again") from None
    return HeadFiles(directory, config, str(source), revision)


def write_files(
    directory: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], card: str, name: str = WEIGHTS
) -> None:
    """Write a folder of heads; config.json comes last, so that an interrupted call leaves none that looks complete.

    Args:
        name: of the file of weights.

    Raises:
        UserError: the directory cannot be written, for example because the disk is full.
    """
    content = to_bytes({key: each.detach().cpu().contiguous() for key, each in weights.items()})
    fields = json.loads(json.dumps(config, allow_nan=False))
    fields[CHECKSUM] = _checksum(fields, hashlib.sha256(content).digest())
    files: dict[str, bytes | str] = {
        name: content,
        "README.md": card,
        "config.json": json.dumps(fields, indent=2) + "\n",
    }
    with writing(directory, "free some space or give another folder, and run the same command again"):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").unlink(missing_ok=True)  # it must never describe other weights
        for path, text in files.items():
            write_atomic(directory / path, text)


def _checksum(config: Mapping[str, Any], weights: bytes) -> str:
    """Of the fields but the checksum itself, in whatever order, and the weights' own digest."""
    fields = {name: value for name, value in config.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode() + weights).hexdigest()


def _from_hub(name: str, what: str) -> Path:
    """The files of a head on the hub, in the hub's cache."""
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


@contextmanager
def fitting(what: str, files: HeadFiles) -> Iterator[None]:
    """Turn what weights raise that do not fit their config into one line.

    Args:
        what: the heads, for the message.

    Raises:
        UserError: in place of a KeyError, TypeError, ValueError or AttributeError; a UserError stays.
    """
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        lack = "lack or misfit" if what.endswith("s") else "lacks or misfits"
        raise UserError(
            f"the {what} in '{files.directory}' {lack} {error}: config.json and the weights do not belong together, "
            "copy or make them again"
        ) from None


def fill(module: nn.Module, weights: Mapping[str, Tensor], directory: object) -> None:
    """Load weights into heads, in float32.

    Raises:
        KeyError: the name of the first weight that is missing, unknown or of another shape.
        UserError: a weight is NaN or infinite.
    """
    wanted = module.state_dict()
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in wanted or name not in weights or wanted[name].shape != weights[name].shape:
            raise KeyError(name)
        if not bool(torch.isfinite(weights[name].float()).all()):
            raise UserError(
                f"the weight '{name}' of the heads in '{directory}' has values that are NaN or infinite: copy or make "
                "them again"
            )
    module.load_state_dict(
        {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}
    )
