"""Converts a model to a GGUF file, and prepares the models of a pair for the requested runner."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.cachedir import cache_dir, check_own, make_cache_dir
from sprinter.models.gguf import config, vocabulary, write
from sprinter.models.gguf.library import installed
from sprinter.models.gguf.write import write_gguf
from sprinter.models.pair import dtype_name, load_models
from sprinter.models.source import Provenance, Source, find

__all__ = ["RUNNERS", "convert_gguf", "for_runner"]

RUNNERS = ("auto", "torch", "llamacpp")

_log = logging.getLogger("sprinter")
_WRITERS = [Path(str(module.__file__)) for module in (write, config, vocabulary)]
_DTYPES = {"auto": "f16", "float32": "f32", "float16": "f16", "q8_0": "q8_0"}
"""dtype names of ``load_pair`` → storage type of the matrices in a GGUF file."""


def convert_gguf(
    source: str | Path,
    out: str | Path,
    dtype: str = "f16",
    tell: Callable[[int, int], None] = lambda done, wanted: None,
) -> Path:
    """Write a Llama-architecture model with a byte-level BPE tokenizer as one GGUF file.

    Args:
        source: directory or hub id.
        out: the new file, named ``*.gguf``; an existing one is replaced once the new file is complete.
        dtype: storage type of the matrices: "f32", "f16" or "q8_0".
        tell: progress callback, called with (tensors written, number of tensors).

    Raises:
        UserError: an unsupported architecture or tokenizer, a wrong file name, the package ``gguf`` missing, ...
    """
    path = Path(out).expanduser()
    if path.suffix != ".gguf":
        raise UserError(
            f"the new file {out} must end in .gguf, the extension that marks GGUF files: rename it"
        )
    models = load_models(source, device="cpu", dtype="float32")
    model = models.target.module("a conversion")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder '{path.parent}' ({error.strerror}): give another") from error
    write_gguf(
        model, models.tokenizer, path, dtype, name=models.target.id, vocab_size=models.target.vocab_size,
        eos_ids=models.target.eos_ids, fingerprint=weights_fingerprint(model), tell=tell,
    )  # fmt: skip
    return path


def for_runner(
    runner: str, target: Source, draft: Source | None, options: Mapping[str, Any]
) -> tuple[Source, Source | None, dict[str, Any]]:
    """Target, draft and options to pass to ``load_models`` so that the requested runner serves the pair.

    "auto" changes nothing: llama.cpp runs GGUF files, PyTorch all other models. With "torch" GGUF files are
    dequantised. For "llamacpp" models in other formats are converted once, with ``options["dtype"]`` (default:
    float16), and kept in the cache directory.

    Raises:
        UserError: an unknown runner, a model that it cannot serve, or the extra ``gguf`` is not installed.
    """
    if runner not in RUNNERS:
        raise UserError(f"there is no runner {runner!r}: use {', '.join(RUNNERS)}")
    if runner == "auto":
        return target, draft, dict(options)
    if runner == "torch":
        return target, draft, {**options, "dequantise": True}
    dtype = dtype_name(options.get("dtype", "auto"))
    installed()  # report what is missing before anything is fetched or converted
    if dtype not in _DTYPES:
        raise UserError(f"runner llamacpp has no dtype {dtype!r}: use {', '.join(_DTYPES)}")
    for name in ("attn_implementation", "quantization_config", "draft_vocabulary"):
        if options.get(name) is not None:
            raise UserError(
                f"{name}= is for models that transformers runs: leave it out, or use runner torch"
            )
    found = [find(target, "target", options.get("revision"))]
    found += [] if draft is None else [find(draft, "draft", options.get("draft_revision"))]
    files = [_kept_gguf(origin, _DTYPES[dtype]) for origin in found]
    rest = {
        name: value for name, value in options.items() if name not in ("dtype", "revision", "draft_revision")
    }
    return files[0], files[1] if draft is not None else None, rest


def _kept_gguf(origin: Provenance, stored: str) -> Path:
    """The GGUF file of a model in the cache directory, converted if it does not exist yet.

    Raises:
        UserError: the model is in memory, or the cache is not this user's own.
    """
    if origin.gguf is not None:
        return origin.gguf
    if isinstance(origin.at, PreTrainedModel):
        raise UserError(
            f"runner llamacpp needs a directory, a hub id or a GGUF file, and {origin.name} is a model in memory: "
            "save it with its tokenizer and give the directory"
        )
    cache = cache_dir()
    path = cache / f"{Path(origin.name).name}-{stored}-{_key(origin.at)}.gguf"
    if not path.is_file():
        make_cache_dir()
        with FileLock(cache / "converting.lock"):  # another process may be converting
            for stale in cache.glob("*.gguf.part"):  # left by a conversion that was killed
                stale.unlink()
            if not path.is_file():
                _log.warning("converting %s for llama.cpp (%s), once", origin.name, stored)
                convert_gguf(origin.at, path, stored)
                path.chmod(0o600)
    for kept in (cache, path):
        check_own(kept)
    return path


def _key(directory: Path) -> str:
    """Hash of everything that a conversion depends on: the model's files (weights by size and mtime) and our code."""
    digest = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        if file.suffix == ".safetensors":
            facts = file.stat()
            digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
        elif file.suffix in (".json", ".model", ".txt", ".jinja"):
            digest.update(file.name.encode() + file.read_bytes())
    for source in _WRITERS:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
