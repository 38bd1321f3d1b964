"""Which runner serves a pair of GGUF files fastest on this machine: what a probe found, for ``runner="auto"``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sprinter.engine.record import cpu_name
from sprinter.errors import UserError
from sprinter.files import write_atomic
from sprinter.models.cachedir import cache_dir, check_own, make_cache_dir
from sprinter.models.devices import device_of
from sprinter.models.gguf.load import GgufModel
from sprinter.models.pair import LoadedPair
from sprinter.models.quantised.quantise import GGUF
from sprinter.models.source import Source, find
from sprinter.version import __version__

__all__ = ["RIVALS", "fastest_options", "keep_fastest", "rival_of"]

USUAL = "llamacpp"
"""The way in which GGUF files run unless a probe has found another to be faster."""
RIVALS: Mapping[str, Mapping[str, Any]] = {
    USUAL: {"runner": "llamacpp"},
    "torch, dtype gguf": {"runner": "torch", "dtype": GGUF},
}
"""Ways to run a GGUF file's own weights on a CPU -> options of ``load_pair``."""
_FOLDER = "runners"
_SETTLING = (
    "dtype",
    "device",
    "device_map",
    "quantization_config",
    "attn_implementation",
    "draft_vocabulary",
)
"""Options that ask for a runner, or exclude one."""


def rival_of(pair: LoadedPair) -> str | None:
    """The way in which both models of a pair run; None if it is none of ``RIVALS``."""
    models = [model for model in (pair.target, pair.draft) if model is not None]
    if all(isinstance(model.model, GgufModel) and not model.model.on_gpu for model in models):
        return USUAL
    return "torch, dtype gguf" if all(model.quantised == GGUF for model in models) else None


def keep_fastest(target: Source, draft: Source | None, options: Mapping[str, Any], name: str) -> None:
    """Have ``runner="auto"`` run these files in the way ``name`` of ``RIVALS`` from now on, on this machine.

    Args:
        options: revision and draft_revision, as for ``load_pair``.

    Raises:
        UserError: the cache directory cannot be written.
    """
    place = _place(target, draft, options)
    if place is None:
        raise UserError("only pairs of GGUF files have several runners: give two as target and draft")
    make_cache_dir()
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(place, json.dumps({"fastest": name}))
        place.chmod(0o600)
    except OSError as error:
        raise UserError(f"cannot write '{place}' ({error.strerror}): make room, and probe again") from error


def fastest_options(target: Source, draft: Source | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``runner="auto"`` stands for: options of the fastest way if a probe has found it, else none.

    Options that were given are never replaced: a dtype or a device settles the runner.
    """
    asked = [options.get(name) for name in _SETTLING]
    if not str(target).endswith(".gguf") or any(one not in (None, "auto") for one in asked):
        return {}
    if options.get("compile") or device_of("auto").type != "cpu":
        return {}
    try:
        if not (cache_dir() / _FOLDER).is_dir():
            return {}
        place = _place(target, draft, options)
        if place is None or not place.is_file():
            return {}
        check_own(place)
        name = json.loads(place.read_text(encoding="utf-8"))["fastest"]
        return {} if name == USUAL else dict(RIVALS[name])
    except (
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        UserError,
    ):  # no home, damaged, another version
        return {}


def _place(target: Source, draft: Source | None, options: Mapping[str, Any]) -> Path | None:
    """The file that keeps the choice for these models; None if they are not GGUF files."""
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
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]
    return cache_dir() / _FOLDER / f"{digest}.json"


def _versions() -> list[str]:
    found = [__version__, torch.__version__]
    try:
        found.append(version("llama-cpp-python"))
    except PackageNotFoundError:
        found.append("none")
    return found
