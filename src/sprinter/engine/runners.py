"""Which runner serves GGUF files with ``runner="auto"``: the fastest that a probe has found, else our kernels."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sprinter.engine.record import cpu_name, versions
from sprinter.errors import UserError
from sprinter.models.cachedir import cache_dir, read_kept, write_kept
from sprinter.models.devices import device_of, dtype_name
from sprinter.models.gguf.dequantise import why_not_as_stored
from sprinter.models.gguf.load import GgufModel
from sprinter.models.kernels import BITS, GGUF, name_of
from sprinter.models.pair import LoadedModel, LoadedPair
from sprinter.models.source import Source, find

__all__ = ["MIXED", "OURS", "RIVALS", "USUAL", "ChosenOptions", "choose_runner", "keep_fastest", "rival_of"]

USUAL = "llamacpp"
"""The way in which GGUF files run where our kernels cannot."""
OURS = "torch, dtype gguf"
"""Their own blocks through ``models.kernels``."""
RIVALS: Mapping[str, Mapping[str, Any]] = {
    USUAL: {"runner": "llamacpp"},
    OURS: {"runner": "torch", "dtype": GGUF},
}
"""Ways to run a GGUF file's own weights on a CPU -> options of ``load_pair``."""
MIXED: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llamacpp, draft torch": (
        USUAL,
        OURS,
        {"runner": "llamacpp", "draft_runner": "torch", "draft_dtype": GGUF},
    ),
    "torch, dtype gguf, draft llamacpp": (OURS, USUAL, {**RIVALS[OURS], "draft_runner": "llamacpp"}),
}
"""Pairs whose models run in different ways -> that of the target, that of the draft, options of ``load_pair``."""
_FOLDER = "runners"  # of the cache directory
_SETTLING = (
    "dtype", "draft_dtype", "device", "device_map", "quantization_config", "attn_implementation", "draft_vocabulary",
)  # fmt: skip
"""Options that ask for a runner, or exclude one."""
_LLAMACPP = "llama.cpp"
_LOG = logging.getLogger(__name__)


def rival_of(pair: LoadedPair) -> str | None:
    """The way in which the models of a pair run; None if it is none of ``RIVALS`` and ``MIXED``."""
    target, draft = _way(pair.target), _way(pair.target if pair.draft is None else pair.draft)
    if target == draft:
        return target
    return next((name for name, (own, other, _) in MIXED.items() if (own, other) == (target, draft)), None)


def _way(model: LoadedModel) -> str | None:
    if isinstance(model.model, GgufModel):
        return None if model.model.on_gpu else USUAL
    return OURS if model.quantised == GGUF else None


def keep_fastest(target: Source, draft: Source | None, options: Mapping[str, Any], name: str) -> None:
    """Have ``runner="auto"`` run these files in a way of ``RIVALS`` or ``MIXED`` from now on, on this machine.

    Args:
        options: revision and draft_revision, as for ``load_pair``.

    Raises:
        UserError: a model is no GGUF file, or the cache directory cannot be written.
    """
    files = _files_of(target, draft, options)
    if files is None:
        raise UserError("only pairs of GGUF files have several runners: give two as target and draft")
    try:
        write_kept(_FOLDER, _key(files), json.dumps({"fastest": name}))
    except OSError as error:
        raise UserError(
            f"cannot write into '{cache_dir()}' ({error.strerror}): make room, and probe again"
        ) from error


class ChosenOptions(NamedTuple):
    """What ``runner="auto"`` stands for.

    Attributes:
        options: of ``load_pair``. reason: which runner was chosen for GGUF files, and why; None: nothing was chosen.
    """

    options: Mapping[str, Any]
    reason: str | None


def choose_runner(target: Source, draft: Source | None, options: Mapping[str, Any]) -> ChosenOptions:
    """The runner of GGUF files: the fastest one if a probe has found it, else on a CPU our kernels where they are
    installed and know the files, else llama.cpp.

    Options that were given are never replaced: a dtype, or another device than the CPU, settles the runner. What a
    probe has found and cannot be read counts as nothing, and is logged.

    Raises:
        UserError: a model is not found.
    """
    device = device_of(options.get("device") or "auto")
    own, drafting = (_by_dtype(options, name, device) for name in ("dtype", "draft_dtype"))
    if not str(target).endswith(".gguf"):
        mixed = f"{drafting} for the draft: it is a GGUF file, and the target is not"
        return ChosenOptions({}, mixed if str(draft).endswith(".gguf") else None)
    asked = [name for name in (*_SETTLING, "compile") if options.get(name) not in (None, "auto", False)]
    if device.type == "cpu" and "device" in asked:
        asked.remove("device")
    if asked:  # the user has chosen
        if own != drafting and str(draft).endswith(".gguf"):
            return ChosenOptions({}, f"{own} for the target, {drafting} for the draft: as their dtypes say")
        by_dtype = "was given" if own != _LLAMACPP else "was given without runner=torch (--runner torch)"
        return ChosenOptions({}, f"{own}: {asked[0]} {by_dtype}")
    if device.type != "cpu":
        return ChosenOptions({}, "llama.cpp: our kernels for GGUF files are for CPUs")
    files = _files_of(target, draft, options)
    if files is None:
        return ChosenOptions({}, "llama.cpp: the draft is not a GGUF file")
    if (found := _found(target, files)) is not None:
        return found
    if name_of() is None:
        missing = "without our kernels, which are often faster ('sprinter doctor' says how to get them)"
        return ChosenOptions({}, f"llama.cpp {missing}")
    why = next(filter(None, map(why_not_as_stored, files)), None)
    if why is not None:
        return ChosenOptions({}, f"llama.cpp: {why}")
    return ChosenOptions(RIVALS[OURS], "our kernels, the default where they are installed")


def _by_dtype(options: Mapping[str, Any], name: str, device: torch.device) -> str:
    """What runs a GGUF file whose dtype is the option ``name``, else that of the target."""
    kind = options.get(name) or options.get("dtype") or "auto"
    if dtype_name(kind) not in (*BITS, GGUF):
        return _LLAMACPP
    return "our kernels" if device.type == "cpu" else "PyTorch"


def _found(target: Source, files: Sequence[Path]) -> ChosenOptions | None:
    """What a probe has found for these files; None: there was none, or it cannot be read."""
    try:
        if not (cache_dir() / _FOLDER).is_dir() or (text := read_kept(_FOLDER, _key(files))) is None:
            return None
        name = json.loads(text)["fastest"]
        found = {} if name == USUAL else MIXED[name][2] if name in MIXED else RIVALS[name]
        return ChosenOptions(found, f"{name}: the fastest in 'sprinter doctor --probe'")
    except RuntimeError:  # there is no home directory
        return None
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        _LOG.warning(
            "the runner that a probe has found for %s cannot be read (%s): probe again", target, error
        )
        return None


def _files_of(target: Source, draft: Source | None, options: Mapping[str, Any]) -> list[Path] | None:
    """The GGUF files of these models; None if one of them is another model."""
    files = []
    for which, source, revision in (("target", target, "revision"), ("draft", draft, "draft_revision")):
        if source is None:
            continue
        file = find(source, which, options.get(revision)).gguf if str(source).endswith(".gguf") else None
        if file is None:
            return None
        files.append(file)
    return files


def _key(files: Sequence[Path]) -> str:
    """Name of the file that keeps the choice for these models."""
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    known = {"files": facts, "threads": torch.get_num_threads(), "cpu": cpu_name(), "versions": _versions()}
    return f"{hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _versions() -> dict[str, str | None]:
    ours = {**versions(), "kernels": name_of()}
    try:
        return {**ours, "llama-cpp-python": version("llama-cpp-python")}
    except PackageNotFoundError:
        return ours
