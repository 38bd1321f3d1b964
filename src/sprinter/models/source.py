"""Finds a model (directory, hub id, GGUF file or memory) and checks it before its weights are loaded.

A hub model is downloaded into the hub's own cache (its config first, then the files that a model needs, never pickles).
From then on it is a directory like any other, so that all checks are made in one place.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from sprinter.errors import UserError, first_line
from sprinter.models.interface import ServedModel
from sprinter.models.remote import RemoteModel, is_remote

__all__ = ["Provenance", "Source", "find", "load_error", "models_folder"]

Source = str | Path | PreTrainedModel | ServedModel
"""A model: directory, hub id, GGUF file (local, or as org/name/file.gguf in the models folder or on the hub), or a
loaded model."""

_log = logging.getLogger("sprinter")
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_HUB_FILE = re.compile(r"(\w[\w.-]*/[\w.-]+)/(.+\.gguf)")
_FETCHED = ("*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER_FILES = (*_VOCABULARY_FILES, "tokenizer_config.json")

_ADAPTER = "adapter_config.json"
"""What PEFT calls an adapter's config; transformers without PEFT reads the base weights beside it, and only those."""

_ADVICE = {
    "GatedRepoError": "is gated: ask for access on its page, then run `hf auth login`",
    "RemoteEntryNotFoundError": "is not in that repository on the hub: check the name of the file",
    "RevisionNotFoundError": "has no such revision on the hub: check the revision",
    "RepositoryNotFoundError": "is neither a directory here nor a model on the hub that you may read: "
    "check the name, or run `hf auth login` if it is private",
    "HFValidationError": "is neither a directory here nor a hub id: check the name",
    "OfflineModeIsEnabled": "is not in the hub's cache and HF_HUB_OFFLINE is set: unset it, or give a directory",
    "LocalEntryNotFoundError": "is neither a directory here nor in the hub's cache, and the hub cannot be reached: "
    "check the name and the network, or give a directory",
    "SafetensorError": "has a corrupt or truncated safetensors file: fetch it again",
}
"""Class of an error in the chain of causes of a failed load → message. The first match is reported."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a model was found.

    Attributes:
        at: its directory, its GGUF file, or the model itself.
        name: directory, hub id, or the class of a model in memory.
        revision: commit on the hub; None for other sources.
    """

    at: Path | PreTrainedModel | ServedModel
    name: str
    revision: str | None = None

    @property
    def gguf(self) -> Path | None:
        """Path of the GGUF file; None for other models."""
        return self.at if isinstance(self.at, Path) and self.at.suffix == ".gguf" else None

    @property
    def tokenizer_dir(self) -> Path | None:
        """Directory of its tokenizer, None if it has none (transformers would create an empty one)."""
        if isinstance(self.at, ServedModel):
            return None
        at = _folder_of(self.at) if isinstance(self.at, PreTrainedModel) else self.at
        return at if any((at / name).is_file() for name in _TOKENIZER_FILES) else None

    def config(self, trust: bool) -> PreTrainedConfig | None:
        """Its config; None for a GGUF file, and if it cannot be read (the loading of the model then says why).

        Args:
            trust: run code that comes with a checkpoint.
        """
        if isinstance(self.at, PreTrainedModel | ServedModel):
            return self.at.config
        if self.gguf is not None:
            return None
        try:
            config = AutoConfig.from_pretrained(self.at, trust_remote_code=trust)
        except Exception:  # code of a checkpoint may raise anything
            return None
        return config if isinstance(config, PreTrainedConfig) else None


def find(source: Source, which: str, revision: str | None = None) -> Provenance:
    """Find a model and check it: everything that can be refused without loading weights is refused here.

    Args:
        source: directory, hub id, GGUF file or model.
        which: "target" or "draft", for messages.
        revision: branch, tag or commit on the hub.

    Raises:
        UserError: one line that says what is wrong and how to fix it.
    """
    if isinstance(source, nn.Module) and hasattr(source, "_orig_mod"):
        raise UserError(
            f"the {which} is a model that torch.compile made, whose passes cannot be captured: give the model itself, "
            "and compile=True"
        )
    if isinstance(source, nn.Module):
        source = _adapted(source, which)
    if isinstance(source, PreTrainedModel):
        return Provenance(source, source.name_or_path or type(source).__name__, _commit(source) or revision)
    if isinstance(source, ServedModel):
        return Provenance(source, source.name, revision)
    if is_remote(source):
        if which == "draft":
            raise UserError("a draft on a server costs a round trip a token: give a draft that runs here")
        served = RemoteModel(str(source))
        return Provenance(served, served.name, revision)
    if not isinstance(source, str | Path):
        raise UserError(
            f"the {which} ({type(source).__name__}) is not a model: give a directory, a hub id, a GGUF file or a "
            "loaded causal language model of transformers"
        )
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and not path.is_dir():
        return _find_gguf(path, str(source), which, revision)
    if path.is_file():
        raise UserError(
            f"the {which} {source} is a file: give the directory that holds it and its config.json"
        )
    if path.is_dir():
        if revision is not None:
            name = "revision" if which == "target" else "draft_revision"
            raise UserError(
                f"{name}={revision} is of a model on the hub, and {source} is a directory: leave it out"
            )
        _check_config(path, str(source), which)
        _check_weights(path, str(source), which)
        return Provenance(path, str(source))
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source):
        raise UserError(f"the {which} directory {source} does not exist: check the path")
    _check_config(_fetched(source, which, revision, ["config.json", _ADAPTER]), source, which)
    path = _fetched(source, which, revision, _FETCHED)
    _check_weights(path, source, which)
    return Provenance(path, source, path.name)


def _find_gguf(path: Path, name: str, which: str, revision: str | None) -> Provenance:
    if path.is_file():
        return Provenance(path, name)
    on_hub = _HUB_FILE.fullmatch(name)
    if on_hub is None:
        raise UserError(f"the {which} file {name} does not exist: check the path")
    if revision is None and (kept := _kept(on_hub[1], on_hub[2])) is not None:
        return Provenance(kept, name)
    try:
        # asks for the repository alone: without a network this fails at once, and a download after 23 s of retries
        snapshot_download(on_hub[1], revision=revision, allow_patterns=[])
        path = Path(hf_hub_download(on_hub[1], on_hub[2], revision=revision))
    except Exception as error:
        raise load_error(error, name, which) from error
    depth = len(Path(on_hub[2]).parts)
    return Provenance(path, name, path.parents[depth - 1].name)


def models_folder() -> Path:
    """The directory of GGUF files that are looked for by hub id: ``SPRINTER_MODELS``, else ~/.cache/sprinter-models."""
    return Path(os.environ.get("SPRINTER_MODELS") or "~/.cache/sprinter-models").expanduser()


def _kept(repository: str, file: str) -> Path | None:
    """A repository's file in the models folder: at its own path, or by its name alone if that names the model.

    Converters differ in case, and in what separates parts of a name. A file name such as ``model-q4_k_m.gguf``, which
    does not hold the repository's name, may be any model's.
    """
    folder, name = models_folder(), Path(file).name
    if (own := folder / repository / file).is_file():
        return own
    model = _plain(repository.partition("/")[2]).removesuffix("-gguf")
    files = sorted(folder.glob("*.gguf"), key=lambda one: (one.name != name, one.name))
    found = next((one for one in files if _plain(one.name) == _plain(name)), None)
    if found is not None and _tell_once(f"{repository}/{file}", found, model in _plain(name)):
        return found
    return None


@cache
def _tell_once(asked: str, found: Path, named: bool) -> bool:
    """Say which local file stands for a hub id, or that one of the same name does not; returns ``named``."""
    if named:
        _log.warning("%s: using %s", asked, found)
    else:
        _log.warning(
            "%s: not using %s, whose name does not say that it is of this repository; to use it, give its path",
            asked, found,
        )  # fmt: skip
    return named


def _plain(name: str) -> str:
    return re.sub(r"[-._]+", "-", name.lower())


def _adapted(model: nn.Module, which: str) -> Any:
    """The model inside a ``PeftModel``, whose active adapters are layers of it; any other model as it is."""
    if type(model).__module__.partition(".")[0] != "peft":
        return model
    wrapper: Any = model
    if wrapper.active_peft_config.is_prompt_learning:
        raise UserError(
            f"the {which} ({type(model).__name__}) puts learned vectors before each prompt, which are no tokens that a "
            "draft could read too: give a model with adapters in its layers, such as LoRA's"
        )
    return wrapper.get_base_model()


def _folder_of(model: PreTrainedModel) -> Path:
    """The directory that a model in memory was loaded from, of a hub id its snapshot in the hub's cache."""
    name, nowhere = model.name_or_path, Path("/nowhere")
    if not name or Path(name).is_dir() or not _HUB_ID.fullmatch(name):
        return Path(name) if name else nowhere
    found = (try_to_load_from_cache(name, file, revision=_commit(model)) for file in _VOCABULARY_FILES)
    return next((Path(file).parent for file in found if isinstance(file, str)), nowhere)


def _commit(model: PreTrainedModel) -> str | None:
    commit = getattr(model.config, "_commit_hash", None)
    return None if commit is None else str(commit)


def _fetched(name: str, which: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download a model from the hub, without files in subdirectories; returns a directory named after its commit."""
    try:
        snapshot = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*", "*.fp16.*"]
        )
    except Exception as error:
        raise load_error(error, name, which) from error
    return Path(snapshot)


def _check_config(directory: Path, name: str, which: str) -> None:
    """Refuse anything but a decoder model, judged by its raw ``config.json``; and an adapter, with or without base."""
    if (directory / _ADAPTER).is_file():
        raise UserError(
            f"the {which} {name} is a PEFT adapter ({_ADAPTER}), not a model: give its base, and the folder to "
            "pair.with_lora or 'sprinter serve --lora NAME=FOLDER', or new_dir of "
            "AutoPeftModelForCausalLM.from_pretrained(dir).merge_and_unload().save_pretrained(new_dir)"
        )
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(f"the {which} {name} has no config.json: give a Hugging Face model directory")
    try:
        config: Any = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise UserError(f"the {which} {name} has a config.json that is not a JSON object: fetch it again")
    if "speculators_model_type" in config:
        raise UserError(f"the {which} {name} is a gate, not a language model: give it as the gate")
    if config.get("is_encoder_decoder"):
        raise UserError(f"the {which} {name} is an encoder-decoder model: give a decoder-only model")


def _check_weights(directory: Path, name: str, which: str) -> None:
    if any(directory.glob("*.safetensors")):
        return
    if any(path for kind in ("*.bin", "*.pt", "*.pth") for path in directory.glob(kind)):
        raise UserError(
            f"the {which} {name} holds pickled weights only, which are never loaded (they can run code): convert "
            "them where you trust them, AutoModelForCausalLM.from_pretrained(dir).save_pretrained(new_dir)"
        )
    raise UserError(
        f"the {which} {name} has no *.safetensors, and nothing else is loaded: fetch the weights, or convert them"
    )


def load_error(error: BaseException, name: str, which: str) -> UserError:
    """The error, in one line, for a model that could not be downloaded or read."""
    kinds = {cls.__name__ for each in _chain(error) for cls in type(each).__mro__}
    for kind, advice in _ADVICE.items():
        if kind in kinds:
            return UserError(f"the {which} {name} {advice}")
    if "mismatched" in str(error):
        return UserError(
            f"the {which} {name} has weights whose shapes do not fit its config.json: fetch it again"
        )
    return UserError(f"the {which} {name} cannot be loaded: {first_line(error)[:300]}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
