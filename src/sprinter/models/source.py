"""Where a model comes from: a directory or a hub id, looked at before anything heavy is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from sprinter.errors import UserError

__all__ = ["has_tokenizer", "hub_error", "local_directory", "read_config"]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip

_HUB_ADVICE = {
    "GatedRepoError": "is gated: ask for access on its page, then run `hf auth login`",
    "RevisionNotFoundError": "has no such revision: check `revision`",
    "RepositoryNotFoundError": "is not a directory here, nor a model on the hub that you may read: "
    "check the name, or run `hf auth login` if it is private",
    "HFValidationError": "is neither a directory nor a hub id: check the name",
    "OfflineModeIsEnabled": "is not in the local cache and offline mode is on: "
    "unset HF_HUB_OFFLINE, or give a directory",
    "LocalEntryNotFoundError": "is not in the local cache and the hub cannot be reached: "
    "check the network, or give a directory",
    "ConnectError": "cannot be fetched, the hub cannot be reached: check the network, or give a directory",
    "ConnectionError": "cannot be fetched, the hub cannot be reached: check the network, or give a directory",
    "TimeoutException": "cannot be fetched, the hub does not answer: try again, or give a directory",
    "EntryNotFoundError": "lacks a file that a model needs (config.json, *.safetensors): choose another",
}
"""Class of an error below a failed fetch → what to tell the user. The first that fits is told."""


def local_directory(source: str | Path, which: str) -> Path | None:
    """The directory that ``source`` names, looked through; None where it is to be taken as a hub id.

    Raises:
        UserError: it is a path and not a usable model directory.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        _check_directory(path, which)
        return path
    if path.is_file():
        raise UserError(
            f"the {which} {source} is a file: give the directory that holds it and its config.json"
        )
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source) or source.startswith("."):
        raise UserError(f"the {which} directory {source} does not exist: check the path")
    return None


def _check_directory(path: Path, which: str) -> None:
    if not (path / "config.json").is_file():
        raise UserError(
            f"the {which} directory {path} has no config.json: give a Hugging Face model directory"
        )
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
        check_config(config, str(path), which)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path / 'config.json'} cannot be read as JSON: fetch the {which} again") from error
    if any(path.glob("*.safetensors")):
        return
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise UserError(
            f"the {which} {path} holds pickled weights only, which are never loaded (they can run code): convert "
            "them where you trust them, AutoModelForCausalLM.from_pretrained(dir).save_pretrained(new_dir)"
        )
    raise UserError(f"the {which} directory {path} has no *.safetensors: the weights are missing, fetch them")


def check_config(config: Any, name: str, which: str) -> None:
    """Refuse what is no decoder model, by its raw ``config.json``.

    Raises:
        UserError: a gate, an encoder-decoder model, or no model's config at all.
    """
    if not isinstance(config, dict):
        raise UserError(f"the {which} {name} has a config.json that is no JSON object: fetch it again")
    if "speculators_model_type" in config:
        raise UserError(f"the {which} {name} is a gate, not a language model: give it as the gate")
    if config.get("is_encoder_decoder"):
        raise UserError(f"the {which} {name} is an encoder-decoder model: give a decoder-only model")


def read_config(name: str, which: str, revision: str | None) -> None:
    """Fetch and check a hub model's raw config: a wrong model is refused before its weights are fetched.

    Raises:
        UserError: the hub cannot be reached, has no such model, or it is no decoder model.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except Exception as error:
        raise hub_error(error, name, which) from error
    check_config(config, name, which)


def hub_error(error: BaseException, name: str, which: str) -> UserError:
    """One line for whatever went wrong while fetching or reading a model."""
    kinds = [cls.__name__ for each in _chain(error) for cls in type(each).__mro__]
    for kind, advice in _HUB_ADVICE.items():
        if kind in kinds:
            return UserError(f"the {which} {name} {advice}")
    if "SafetensorError" in kinds:
        return UserError(f"the {which} {name} has a corrupt or truncated safetensors file: fetch it again")
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UserError(
        f"the {which} {name} cannot be loaded ({first}): check that it is a causal language model"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def has_tokenizer(directory: Path) -> bool:
    """Whether a model directory comes with a tokenizer (transformers would invent an empty one)."""
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)
