"""Converts a model to a GGUF file, and prepares the models of a pair for the requested runner."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.cachedir import cache_dir, kept_file
from sprinter.models.devices import dtype_name
from sprinter.models.gguf import config, vocabulary, write
from sprinter.models.gguf.library import installed
from sprinter.models.gguf.write import write_gguf
from sprinter.models.pair import load_models
from sprinter.models.source import Source, find
from sprinter.models.tokenizers import common_tokenizer

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
    runner: str,
    target: Source,
    draft: Source | None,
    options: Mapping[str, Any],
    draft_runner: str | None = None,
) -> tuple[Source, Source | None, dict[str, Any]]:
    """Target, draft and options to pass to ``load_models`` so that the requested runners serve the pair.

    "auto", where ``choose_runner`` has chosen nothing, changes nothing: llama.cpp runs GGUF files, PyTorch all other
    models. With "torch" GGUF files are dequantised. For "llamacpp" models in other formats are converted once, with
    ``options["dtype"]`` (default: float16; of a draft ``options["draft_dtype"]`` if it is there), and kept in the cache
    directory.

    Args:
        draft_runner: of the draft; None: as the target's.

    Raises:
        UserError: an unknown runner, a draft's runner without a draft, a model that it cannot serve, or
            the extra ``gguf`` is not installed.
    """
    if unknown := {runner, draft_runner or runner} - {*RUNNERS}:
        raise UserError(f"there is no runner {unknown.pop()!r}: use {', '.join(RUNNERS)}")
    if draft_runner is not None and draft is None:
        raise UserError(
            f"draft_runner={draft_runner} was given without a draft: give draft=..., or leave it out"
        )
    given = dict(options)
    drafting = runner if draft_runner is None else draft_runner
    if "llamacpp" in (runner, drafting):
        installed()  # report what is missing before anything is fetched or converted
    others = ("attn_implementation", "quantization_config") if runner == drafting == "llamacpp" else ()
    for name in (*others, *(["draft_vocabulary"] if drafting == "llamacpp" and draft is not None else [])):
        if given.get(name) is not None:
            raise UserError(
                f"{name}= is for models that transformers runs: leave it out, or use runner torch"
            )
    if draft is not None and "llamacpp" in (runner, drafting):
        _check_tokens(target, draft, given)
    own, kind = given.get("draft_dtype"), given.get("dtype", "auto")
    if draft is not None and drafting == "llamacpp":
        asked = own if own is not None else kind if runner == "llamacpp" else "auto"
        draft = _converted(draft, "draft", given.pop("draft_revision", None), asked)
        given |= {"draft_dtype": "auto", "draft_dequantise": False}
    elif draft is not None and drafting != runner:
        by_llamacpp = drafting == "auto" and str(draft).endswith(".gguf")  # unless its dtype says otherwise
        if own is None and (runner == "llamacpp" or by_llamacpp):
            own = "auto"  # the target's is not one of theirs
        given |= {"draft_dtype": own, "draft_dequantise": drafting == "torch"}
    if runner == "llamacpp":
        target = _converted(target, "target", given.pop("revision", None), kind)
        given.pop("dtype", None)
    return target, draft, given | ({"dequantise": True} if runner == "torch" else {})


def _check_tokens(target: Source, draft: Source, options: Mapping[str, Any]) -> None:
    """Refuse different vocabularies before a model is converted, which takes minutes."""
    origins = (
        find(target, "target", options.get("revision")),
        find(draft, "draft", options.get("draft_revision")),
    )
    if all(isinstance(one.at, Path) for one in origins):
        common_tokenizer(options.get("tokenizer"), *origins, bool(options.get("trust_remote_code")))


def _converted(source: Source, which: str, revision: str | None, dtype: Any) -> Path:
    """The GGUF file that llama.cpp runs in place of a model: in the cache directory, converted if it is not there yet.

    Raises:
        UserError: no such dtype, the model is in memory, or the cache is not this user's own.
    """
    if (name := dtype_name(dtype)) not in _DTYPES:
        raise UserError(f"runner llamacpp has no dtype {name!r}: use {', '.join(_DTYPES)}")
    origin, stored = find(source, which, revision), _DTYPES[name]
    if origin.gguf is not None:
        return origin.gguf
    if not isinstance(origin.at, Path):
        raise UserError(
            f"runner llamacpp needs a directory, a hub id or a GGUF file, and {origin.name} is a model in memory: "
            "save it with its tokenizer and give the directory"
        )

    directory = origin.at

    def write(part: Path) -> None:
        _log.warning("converting %s for llama.cpp (%s), once", origin.name, stored)
        convert_gguf(directory, part, stored)

    return kept_file(cache_dir() / f"{Path(origin.name).name}-{stored}-{_key(directory)}.gguf", write)


def _key(directory: Path) -> str:
    """Hash of everything that a conversion depends on: the model's files (weights by size and mtime) and our code."""
    digest = hashlib.sha256()
    for file in [*sorted(directory.iterdir()), *_WRITERS]:
        if file.suffix == ".safetensors":
            facts = file.stat()
            digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
        elif file.suffix in (".json", ".model", ".txt", ".jinja", ".py"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]
