"""Which runner serves a pair of GGUF files fastest on this machine: what a probe found, for ``runner="auto"``."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from sprinter.engine.record import cpu_name, versions
from sprinter.errors import UserError
from sprinter.models.cachedir import cache_dir, read_kept, write_kept
from sprinter.models.devices import device_of
from sprinter.models.gguf.load import GgufModel
from sprinter.models.pair import LoadedModel, LoadedPair
from sprinter.models.quantised.quantise import GGUF
from sprinter.models.source import Source, find

__all__ = ["MIXED", "OURS", "RIVALS", "USUAL", "fastest_options", "keep_fastest", "rival_of"]

USUAL = "llamacpp"
"""The way in which GGUF files run unless a probe has found another to be faster."""
OURS = "torch, dtype gguf"
"""Their own blocks through ``models.quantised``."""
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
    key = _key(target, draft, options)
    if key is None:
        raise UserError("only pairs of GGUF files have several runners: give two as target and draft")
    try:
        write_kept(_FOLDER, key, json.dumps({"fastest": name}))
    except OSError as error:
        raise UserError(
            f"cannot write into '{cache_dir()}' ({error.strerror}): make room, and probe again"
        ) from error


def fastest_options(target: Source, draft: Source | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``runner="auto"`` stands for: options of the fastest way if a probe has found it, else none.

    Options that were given are never replaced: a dtype or a device settles the runner. A choice that cannot be read is
    none, and is logged.

    Raises:
        UserError: a model is not found.
    """
    asked = [options.get(name) for name in _SETTLING]
    if not str(target).endswith(".gguf") or any(one not in (None, "auto") for one in asked):
        return {}
    if options.get("compile") or device_of("auto").type != "cpu" or not _probed():
        return {}
    key = _key(target, draft, options)
    if key is None:
        return {}
    try:
        text = read_kept(_FOLDER, key)
        name = USUAL if text is None else json.loads(text)["fastest"]
        if name == USUAL:
            return {}
        return dict(MIXED[name][2] if name in MIXED else RIVALS[name])
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        _LOG.warning(
            "the runner that a probe has found for %s cannot be read (%s): probe again", target, error
        )
        return {}


def _probed() -> bool:
    """Whether any pair was probed on this machine."""
    try:
        return (cache_dir() / _FOLDER).is_dir()
    except (OSError, RuntimeError):  # no home directory, or one that cannot be searched
        return False


def _key(target: Source, draft: Source | None, options: Mapping[str, Any]) -> str | None:
    """Name of the file that keeps the choice for these models; None if they are not GGUF files."""
    sources = {"target": (target, "revision"), "draft": (draft, "draft_revision")}
    files = []
    for which, (source, revision) in sources.items():
        if source is None:
            continue
        if not str(source).endswith(".gguf"):
            return None
        file = find(source, which, options.get(revision)).gguf
        if file is None:
            return None
        facts = file.stat()
        files.append((file.name, facts.st_size, facts.st_mtime_ns))
    known = {"files": files, "threads": torch.get_num_threads(), "cpu": cpu_name(), "versions": _versions()}
    return f"{hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _versions() -> dict[str, str]:
    try:
        return {**versions(), "llama-cpp-python": version("llama-cpp-python")}
    except PackageNotFoundError:
        return versions()
