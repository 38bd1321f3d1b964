"""Compiled code for the CPU, kept on disk: exported once, compiled by AOTInductor, loaded in milliseconds.

Weights are packed into the compiled code (``freezing``), and products with them are the compiler's own loops
(``max_autotune`` with the CPP backend alone, so that nothing is timed): a library call a product would cost as much as
the product itself on small models. A file is named after everything that it depends on.
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
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import torch
import transformers
from filelock import FileLock
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.models.attention import own_attention_kernel
from sprinter.models.kernels import own_products
from sprinter.models.marks import digest, hash_file

__all__ = ["Compiled", "Recipe", "cache_dir", "cpu_flags", "find_compiled", "forget_compiled"]

_log = logging.getLogger("sprinter")
_HERE = Path(__file__).parent
_SOURCES = [
    *(
        _HERE / f"{name}.py"
        for name in ("attention", "captured", "compiled", "forward", "kernels", "masks", "trace")
    ),
    *(_HERE.parent / f"{name}.py" for name in ("laws", "random")),
    *(_HERE.parent / "heads" / f"{name}.py" for name in ("calibration", "features", "head", "networks")),
]

Compiled = Callable[[list[Tensor]], list[Tensor]]
"""Flat inputs → flat outputs; buffers among the inputs are written in place."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is to be compiled.

    Attributes:
        name: for people and for the key, such as "pass-one".
        model: whose weights go into it. unit: as well.
        facts: whatever else it depends on, JSON.
        export: makes the exported program; called only if nothing is on the disk.
    """

    name: str
    model: PreTrainedModel
    unit: nn.Module
    facts: dict[str, Any]
    export: Callable[[], torch.export.ExportedProgram]


def cache_dir() -> Path:
    """Where compiled code lies: ``SPRINTER_CACHE``, else the user's cache directory."""
    if own := os.environ.get("SPRINTER_CACHE"):
        return Path(own)
    root = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(root) if root else Path.home() / ".cache") / "sprinter"


def find_compiled(recipe: Recipe, may_compile: bool) -> Compiled | None:
    """The compiled code; None if it is not on the disk and may not be made now.

    Raises:
        UserError: there is no C++ compiler.
    """
    kind = f"{recipe.name}-{_hash(_config(recipe.model))[:8]}"
    if not may_compile and not any(cache_dir().glob(f"{kind}-*.pt2")):
        return None  # before all weights are read for nothing
    stem = f"{kind}-{_key(recipe)}"
    loaded = _find(stem)
    if loaded is not None or not may_compile:
        return loaded
    cache_dir().mkdir(parents=True, exist_ok=True)
    # One process at a time: the compiler's own files are shared, and the next one may find what it wants.
    with FileLock(cache_dir() / "compiling.lock"):
        loaded = _find(stem) or _load(_compile(recipe, stem))
    assert loaded is not None, "what was just written cannot be read back"
    return loaded


def _find(stem: str) -> Compiled | None:
    loaded = (_load(path) for path in sorted(cache_dir().glob(f"{stem}.*.pt2")))
    return next((code for code in loaded if code is not None), None)


def forget_compiled() -> None:
    """Delete all compiled code, and nothing else that lies there."""
    for path in cache_dir().glob("*.pt2"):
        path.unlink(missing_ok=True)


def _key(recipe: Recipe) -> str:
    model = recipe.model
    facts = {
        **recipe.facts,
        "config": _config(model),
        "parts": [digest(model), digest(recipe.unit)],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_flags(),
        "threads": torch.get_num_threads(),
        "sources": [hash_file(path) for path in _SOURCES],
    }
    return _hash(json.dumps(facts, sort_keys=True))[:32]


def _config(model: PreTrainedModel) -> str:
    """The configuration, without the place that the model came from."""
    text = model.config.to_json_string(use_diff=False)
    kept = json.loads(text, object_hook=_without_place)
    return json.dumps(kept, sort_keys=True)


def _without_place(held: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in held.items() if key != "_name_or_path"}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def cpu_flags() -> str:
    """What the compiler may use of this processor."""
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
    "any": "any number of tokens", "some": "some of the rows",
}  # fmt: skip
"""Of a recipe's name, for people."""


def _compile(recipe: Recipe, stem: str) -> Path:
    """Write ``stem.HASH.pt2``, the hash being that of the file itself, whole or not at all."""
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        raise UserError("compile=True needs a C++ compiler: install g++ (or set CXX), or use compile=False")
    what, _, shape = recipe.name.partition("-")
    _log.warning("compiling %s (%s), once; about a minute", _WORDS.get(what, what), _WORDS.get(shape, shape))
    with TemporaryDirectory(suffix=".part", dir=cache_dir()) as folder:
        part = Path(folder) / "code.pt2"
        try:
            with torch.no_grad(), _quiet():
                from torch._inductor import aoti_compile_and_package

                with own_products(), own_attention_kernel():
                    aoti_compile_and_package(
                        recipe.export(), package_path=str(part), inductor_configs=_options(recipe.model)
                    )
        except Exception as error:  # Whatever a model does that cannot be exported or compiled.
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            name = type(recipe.model).__name__
            raise UserError(f"{name} cannot be compiled ({why[:200]}): use compile=False") from error
        path = cache_dir() / f"{stem}.{hash_file(part)[:16]}.pt2"
        part.replace(path)
    return path


@contextmanager
def _quiet() -> Iterator[None]:
    """The compiler's own warnings are not for our users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _options(model: PreTrainedModel) -> dict[str, Any]:
    # Products of two matrices that change, as in transformers' own attention, have no kernel there.
    own = {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    products = own if model.config._attn_implementation == "sdpa" else {}
    return {"freezing": True, "assert_indirect_indexing": False, **products}


def _load(path: Path) -> Compiled | None:
    """None, and one line said, if the file is damaged: damaged machine code must not be run."""
    try:
        if path.suffixes[-2] != f".{hash_file(path)[:16]}":
            raise ValueError("it is not what was written")
        with _quiet():
            from torch._inductor import aoti_load_package

            loaded = aoti_load_package(str(path), run_single_threaded=True)
    except (OSError, RuntimeError, ValueError) as error:
        _log.warning("the compiled code in %s cannot be used (%s): it is made anew when needed", path, error)
        path.unlink(missing_ok=True)
        return None
    lock, run = Lock(), loaded.loader.boxed_run

    def locked(inputs: list[Tensor]) -> list[Tensor]:
        with lock:  # the code has one set of workspaces
            outputs: list[Tensor] = run(inputs)
        return outputs

    return locked
