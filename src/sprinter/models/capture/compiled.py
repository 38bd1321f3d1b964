"""Compiled code for the CPU, kept on disk: exported once, compiled by AOTInductor, loaded in milliseconds.

Weights are packed into the compiled code (``freezing``), and products with them are loops that the compiler generates
(``max_autotune`` with only the CPP backend, so that nothing is timed): on small models a library call would cost as
much as the product itself. The name of a file contains a hash of everything that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from threading import Lock
from typing import Any

import torch
import transformers
from filelock import FileLock
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.errors import UserError, first_line
from sprinter.models.cachedir import cache_dir, check_own, make_cache_dir
from sprinter.models.capture.attention import own_attention_kernel
from sprinter.models.capture.kernels import own_products
from sprinter.models.capture.marks import digest, hash_file

__all__ = [
    "Compiled", "Recipe", "build", "cache_dir", "compiled_files", "compiling", "cpu_flags",
    "exported", "find_compiled", "forget_compiled", "keep_compiled", "kind_of", "stem_if_missing",
]  # fmt: skip

_log = logging.getLogger("sprinter")
_SPRINTER = Path(__file__).parents[2]
_SOURCES = [
    _SPRINTER / folder / f"{name}.py"
    for folder, names in {
        ".": ("laws", "random"),
        "heads": ("calibration", "features", "head", "networks"),
        "models/capture": ("attention", "compiled", "kernels", "results", "runner", "trace", "units"),
        "models/runners": ("forward", "masks"),
    }.items()
    for name in names
]

Compiled = Callable[[list[Tensor]], list[Tensor]]
"""Flat inputs → flat outputs; buffers among the inputs are written in place."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Something to compile, and everything that the result depends on.

    Attributes:
        name: for messages and the file name, such as "pass-one".
        model: the model whose weights are packed into the code; None: it works on the results of any model.
        unit: the unit, whose weights are packed into the code too.
        facts: everything else that it depends on, as JSON values.
        export: makes the exported program; called only if no compiled code is on disk.
    """

    name: str
    model: PreTrainedModel | None
    unit: nn.Module
    facts: dict[str, Any]
    export: Callable[[], torch.export.ExportedProgram]


def find_compiled(recipe: Recipe, may_compile: bool) -> Compiled | None:
    """Load compiled code from disk, or compile it if allowed; None if it is not on disk and must not be compiled.

    Raises:
        UserError: there is no C++ compiler, the model cannot be compiled, or the cache is not this user's own; with
            ``may_compile`` also if the code cannot be loaded.
    """
    if not may_compile and not any(cache_dir().glob(f"{kind_of(recipe)}-*.pt2")):
        return None  # early, because the key below reads all weights
    make_cache_dir()
    stem = _stem(recipe)
    loaded = _find(stem, may_compile)
    if loaded is not None or not may_compile:
        return loaded
    for _ in range(2):  # what another process has written meanwhile may be damaged
        with compiling(lambda: not _on_disk(stem)) as cache:
            if cache is not None:
                _compile(recipe, stem, cache)
        loaded = loaded or _find(stem, True)
    assert loaded is not None, "compiled code that was just written cannot be read back"
    return loaded


@contextmanager
def compiling(needed: Callable[[], bool]) -> Iterator[Path | None]:
    """Context in which no other process compiles but helpers, the cache directory; None if ``needed`` says no by then.

    The compiler's own files are shared, and a waiting process may find its code compiled.
    """
    if not needed():
        yield None
        return
    make_cache_dir()
    cache = cache_dir()
    with FileLock(cache / "compiling.lock"):
        for stale in cache.glob("tmp*.part"):  # left by a compilation that was killed
            shutil.rmtree(stale, ignore_errors=True)  # its helper may still write
        yield cache if needed() else None


def _on_disk(stem: str) -> bool:
    return any(cache_dir().glob(f"{stem}.*.pt2"))


def stem_if_missing(recipe: Recipe) -> str | None:
    """The beginning of the recipe's file name if there is no such file, else None."""
    stem = _stem(recipe)
    return None if _on_disk(stem) else stem


def kind_of(recipe: Recipe) -> str:
    """Name and architecture, or name and facts."""
    config = json.dumps(recipe.facts, sort_keys=True) if recipe.model is None else _config(recipe.model)
    return f"{recipe.name}-{_hash(config)[:8]}"


def _stem(recipe: Recipe) -> str:
    return f"{kind_of(recipe)}-{_key(recipe)}"


def _find(stem: str, must: bool) -> Compiled | None:
    loaded = (_load(path, must) for path in sorted(cache_dir().glob(f"{stem}.*.pt2")))
    return next((code for code in loaded if code is not None), None)


def compiled_files() -> list[Path]:
    """All compiled code in the cache directory: captured forward passes, and the kernels of ``models.quantised``."""
    return [*cache_dir().glob("*.pt2"), *cache_dir().glob("*.so")]


def forget_compiled() -> None:
    """Delete all compiled code from the cache directory, and nothing else."""
    for path in compiled_files():
        path.unlink(missing_ok=True)


def _key(recipe: Recipe) -> str:
    model = recipe.model
    facts = {
        **recipe.facts,
        "config": model and _config(model),
        "parts": [digest(part) for part in (model, recipe.unit) if part is not None],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_flags(),
        "threads": torch.get_num_threads(),
        "sources": [hash_file(path) for path in _SOURCES],
    }
    return _hash(json.dumps(facts, sort_keys=True))[:32]


def _config(model: PreTrainedModel) -> str:
    """The config as JSON, without the path or id that the model was loaded from."""
    text = model.config.to_json_string(use_diff=False)
    kept = json.loads(text, object_hook=_without_place)
    return json.dumps(kept, sort_keys=True)


def _without_place(held: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in held.items() if key != "_name_or_path"}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def cpu_flags() -> str:
    """The instruction sets that the compiler may use on this CPU."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return (
            f"{torch.backends.cpu.get_cpu_capability()} {os.uname().machine if hasattr(os, 'uname') else ''}"
        )
    lines = path.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


_WORDS = {
    "draft": "the draft's steps", "target": "the target's passes", "pass": "passes", "read": "a prompt's passes",
    "one": "one token of one row",
    "any": "any number of tokens", "some": "some of the rows", "results": "what follows the model",
}  # fmt: skip
"""Parts of a recipe's name → words for messages."""


def _compile(recipe: Recipe, stem: str, cache: Path) -> None:
    """Compile and keep code in this process."""
    what, _, shape = recipe.name.partition("-")
    program, options = exported(recipe)
    long = "some ten seconds" if recipe.model is None else "about a minute"
    _log.warning("compiling %s (%s), once; %s", _WORDS.get(what, what), _WORDS.get(shape, shape), long)
    with TemporaryDirectory(prefix="tmp", suffix=".part", dir=cache) as folder:
        part = Path(folder) / "code.pt2"
        try:
            build(program, part, options)
        except Exception as error:  # models fail to compile in many ways
            raise UserError(_cannot(recipe, first_line(error))) from error
        keep_compiled(recipe, part, stem)


def exported(recipe: Recipe) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    """The program that ``build`` compiles, and the options for it."""
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        raise UserError("compile=True needs a C++ compiler: install g++ (or set CXX), or use compile=False")
    try:
        with torch.no_grad(), _quiet():
            return recipe.export(), _options(recipe.model)
    except Exception as error:  # models fail to export in many ways
        raise UserError(_cannot(recipe, first_line(error))) from error


def build(program: torch.export.ExportedProgram, path: Path, options: dict[str, Any]) -> None:
    """Compile ``program`` into the file ``path``."""
    with torch.no_grad(), _quiet():
        from torch._inductor import aoti_compile_and_package

        with own_products(), own_attention_kernel():
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def _cannot(recipe: Recipe, why: str) -> str:
    """The line for users."""
    return f"{_what(recipe)} cannot be compiled ({why[:200]}): use compile=False"


def _what(recipe: Recipe) -> str:
    return recipe.name if recipe.model is None else type(recipe.model).__name__


def keep_compiled(recipe: Recipe, part: Path, stem: str) -> None:
    """Move compiled code to ``stem.HASH.pt2``, with the hash of the file itself, atomically.

    Raises:
        UserError: the model has changed since ``stem`` was made.
    """
    if stem != _stem(recipe):
        raise UserError(
            f"{_what(recipe)} changed while it was compiled: ask again when its weights are at rest"
        )
    part.chmod(0o600)
    part.replace(cache_dir() / f"{stem}.{hash_file(part)[:16]}.pt2")


@contextmanager
def _quiet() -> Iterator[None]:
    """Context that hides the compiler's warnings, which are of no use to users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _options(model: PreTrainedModel | None) -> dict[str, Any]:
    # That backend has no kernel for a product of two activations, as in transformers' own attention.
    own = {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    products = own if model is None or model.config._attn_implementation == "sdpa" else {}
    return {"freezing": True, "assert_indirect_indexing": False, **products}


def _load(path: Path, must: bool) -> Compiled | None:
    """Load compiled code; None, with a warning, if that fails. A damaged file is deleted, because it must not run.

    Intact code may fail to load too (the runtime unpacks it into the temporary directory); that file is kept.

    Raises:
        UserError: other users could have written the file; or, with ``must``, it cannot be loaded.
    """
    check_own(path)
    try:
        if path.suffixes[-2] != f".{hash_file(path)[:16]}":
            _log.warning(
                "the compiled code in %s cannot be used (it is not what was written): it is compiled again when needed",
                path,
            )
            path.unlink(missing_ok=True)
            return None
        with _quiet():
            from torch._inductor import aoti_load_package

            loaded = aoti_load_package(str(path), run_single_threaded=True)
    except (OSError, RuntimeError) as error:
        why = first_line(error)
        line = f"the compiled code in {path} cannot be loaded ({why[:200]})"
        fix = f"see that {gettempdir()} has room and may hold programs, or set TMPDIR to another folder"
        if must:
            raise UserError(f"{line}: {fix}, or use compile=False") from error
        _log.warning("%s, forward passes run step by step: %s", line, fix)
        return None
    lock, run = Lock(), loaded.loader.boxed_run

    def locked(inputs: list[Tensor]) -> list[Tensor]:
        with lock:  # the code has a single workspace
            outputs: list[Tensor] = run(inputs)
        return outputs

    return locked
