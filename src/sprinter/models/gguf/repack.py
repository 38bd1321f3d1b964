"""Whether llama.cpp may repack a file's weights on this machine, found by a trial in a child process.

If the CPU has instructions for it (AMX, wide vectors), llama.cpp copies matrices into its own layouts while loading,
its "extra buffers". On some builds and machines the code for one of these layouts crashes (illegal instruction,
segmentation fault) in a forward pass over several tokens. So a tiny model with weights of the same types is run in a
child process first: repacked, then as stored. The verdict is kept in the cache directory, keyed by the library's files,
the machine and the types.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from sprinter.errors import UserError, first_line
from sprinter.models.cachedir import cache_dir, hash_file, read_kept, write_kept
from sprinter.models.devices import cpu_flags
from sprinter.models.gguf import trial
from sprinter.models.gguf.library import gguf_package

__all__ = ["ASKED", "Repacking", "repacking"]

ASKED = "SPRINTER_LLAMACPP_REPACK"
"""Environment variable: "auto" (try, the default), "on" or "off"."""

_log = logging.getLogger("sprinter")
_FOLDER = "llamacpp"  # of the cache directory
_PATIENCE_S = 60.0
_CRASHES = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS")
"""Signals of crashes; other signals come from outside and say nothing about the code."""
_WINDOWS_CRASH = 0xC0000000
_WIDTH, _WORDS = 256, 64  # of the tiny model: one block of the widest types, a few tiles of AMX


@dataclass(frozen=True, slots=True)
class Repacking:
    """The verdict of a trial.

    Attributes:
        on: whether weights are repacked; None: llama.cpp crashes either way.
        reason: why, in words.
    """

    on: bool | None
    reason: str


def repacking(types: Iterable[str]) -> Repacking:
    """Whether weights of these types may be repacked on this machine; ``on`` of the result is True or False.

    Args:
        types: names of GGML types, as in ``GgufHead.types``.

    Raises:
        UserError: llama.cpp crashes either way, or could not be tried.
    """
    asked = os.environ.get(ASKED, "auto")
    if asked not in ("auto", "on", "off"):
        raise UserError(f"{ASKED}={asked!r} is none of its values: use auto, on or off")
    if asked != "auto":
        return Repacking(asked == "on", f"{ASKED}={asked}")
    verdict = _verdict(tuple(sorted(types)), cache_dir())
    if verdict.on is None:
        raise UserError(
            f"llama.cpp cannot be used here, {verdict.reason}: install a build of llama-cpp-python for this CPU "
            f"(CMAKE_ARGS=-DGGML_NATIVE=OFF pip install --no-cache-dir --force-reinstall llama-cpp-python)"
        )
    return verdict


@cache
def _verdict(types: tuple[str, ...], folder: Path) -> Repacking:
    """The verdict in the cache directory, else that of a new trial."""
    facts = {
        "build": _build(),
        "machine": [cpu_flags(), platform.system(), platform.release(), platform.machine()],
        "types": types,
    }
    name = f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"
    with suppress(OSError, ValueError):  # a file that is damaged counts as none
        if (text := read_kept(_FOLDER, name)) is not None:
            return TypeAdapter(Repacking).validate_json(text, strict=True)
    verdict, sure = _try(types)
    if sure:
        try:
            write_kept(_FOLDER, name, json.dumps(asdict(verdict)))
        except (OSError, UserError) as error:
            _log.warning("llama.cpp is tried again by each process: %s", first_line(error))
    return verdict


@cache
def _try(types: tuple[str, ...]) -> tuple[Repacking, bool]:
    """The verdict of a new trial, and whether it may be kept."""
    names = ", ".join(types)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trial.gguf"
        _write_model(file, types)
        repacked, sure = _end(file, "on")
        if repacked is None:
            return Repacking(True, f"a trial with {names} ran"), True
        stored, sure_too = _end(file, "off")
    if stored is None:
        verdict = Repacking(False, f"a trial with {names} repacked {repacked}")
        _log.warning("llama.cpp's repacked weights are not used on this machine: %s", verdict.reason)
        return verdict, sure
    return Repacking(None, f"a trial with {names} {stored}"), sure and sure_too


def _end(file: Path, repack: str) -> tuple[str | None, bool]:
    """Run a trial in a child process.

    Returns:
        How it failed, None if it ran well; and whether it would always end so.

    Raises:
        UserError: the child process could not run the trial.
    """
    command = [sys.executable, "-P", str(trial.__file__), str(file), repack]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, env=environment, timeout=_PATIENCE_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"did not end within {_PATIENCE_S:g} s", False
    if done.returncode == 0 and done.stdout.split()[-1:] == [b"ran"]:
        return None, True
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"died of {name}", name in _CRASHES
    if done.returncode >= _WINDOWS_CRASH:
        return f"died of {done.returncode:#x}", True
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it does not say why"]
    raise UserError(
        f"llama.cpp could not be tried in a process of its own ({said[0][:200]}): install llama-cpp-python again, or "
        f"set {ASKED}=on (or off) to go without a trial"
    )


def _build() -> dict[str, str]:
    """Name → hash of the files that determine the code that llama.cpp runs on a CPU."""
    own = os.environ.get("LLAMA_CPP_LIB_PATH")
    spec = find_spec("llama_cpp")
    package = Path(str(spec.origin)).parent if spec else Path("/nowhere")
    files = [package / "__init__.py", Path(trial.__file__), Path(__file__)]
    for name in ("*llama*", "*ggml-base*", "*ggml-cpu*"):
        files += [
            file
            for file in (Path(own) if own else package / "lib").glob(name)
            if file.suffix in (".so", ".dylib", ".dll")
        ]
    return {file.name: hash_file(file) for file in sorted(files)}


def _write_model(path: Path, types: Iterable[str]) -> None:
    """Write a tiny Llama with one layer per type, whose matrices are zeros stored in that type."""
    gguf = gguf_package()
    kinds = [
        gguf.GGMLQuantizationType[name] for name in types if name in gguf.GGMLQuantizationType.__members__
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(len(kinds))
    writer.add_context_length(_WORDS)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_WORDS)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, rows: int, kind: Any) -> None:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        data = np.zeros((rows, _WIDTH // block * block_bytes), np.uint8)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))

    whole = gguf.GGMLQuantizationType.F32
    add("token_embd", _WORDS, whole)
    for layer, kind in enumerate(kinds):
        for norm in ("attn_norm", "ffn_norm"):
            add_norm(f"blk.{layer}.{norm}")
        for matrix in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            add(f"blk.{layer}.{matrix}", _WIDTH, kind)
    add_norm("output_norm")
    add("output", _WORDS, kinds[0] if kinds else whole)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
