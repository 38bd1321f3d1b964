"""llama.cpp by its low-level Python API (llama-cpp-python), imported when it is first needed. Keeps its error log."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from sprinter.errors import UserError, install_line

__all__ = ["gguf_package", "installed", "last_words", "library", "loading"]

_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_NEWEST = "llama_ftype_name"
_errors: deque[str] = deque(maxlen=8)
_kept: list[Any] = []  # the log callback: C calls it until the process ends


def installed() -> Any:
    """The module ``llama_cpp.llama_cpp``, without starting llama.cpp's backend.

    Raises:
        UserError: it is not installed, too old, or its shared library cannot be loaded.
    """
    llama = _imported("llama_cpp", "llama-cpp-python").llama_cpp
    if not hasattr(llama, _NEWEST):
        raise UserError(
            f"the installed llama-cpp-python is too old (it has no {_NEWEST}): {install_line('gguf')}"
        )
    return llama


@cache
def library() -> Any:
    """The module ``llama_cpp.llama_cpp`` with its backend started and its terminal output switched off.

    Raises:
        UserError: see ``installed``.
    """
    llama = installed()
    callback = llama.llama_log_callback(_listen)
    _kept.append(callback)
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    llama.llama_backend_init()
    return llama


def gguf_package() -> Any:
    """The package ``gguf``, which reads and writes GGUF files.

    Raises:
        UserError: it is not installed.
    """
    return _imported("gguf", "gguf")


@contextmanager
def loading(on_gpu: bool, repack: bool) -> Iterator[Any]:
    """Context with llama.cpp's parameters for loading a model; llama-cpp-python's own classes use them too.

    Args:
        on_gpu: put all layers on a GPU.
        repack: copy weights into layouts that this CPU has instructions for; see ``llama_repack``.
    """
    llama = library()
    defaults = llama.llama_model_default_params

    def params() -> Any:
        made = defaults()
        made.n_gpu_layers, made.use_extra_bufts = -1 if on_gpu else 0, repack
        return made

    llama.llama_model_default_params = params
    try:
        yield params()
    finally:
        llama.llama_model_default_params = defaults


def last_words(otherwise: str) -> str:
    """The first error that llama.cpp has logged since the last call: later errors usually follow from it.

    Args:
        otherwise: returned if it has logged none.
    """
    words = next(iter(_errors), otherwise)
    _errors.clear()
    return words


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"GGUF files need the package {package}, which cannot be imported ({error}): "
            f"{install_line('gguf')}"
        ) from error
    except (OSError, RuntimeError) as error:  # its shared library
        raise UserError(
            f"{package} is installed and its library cannot be loaded ({error}): install it again"
        ) from error


def _listen(level: int, text: bytes, _: Any) -> None:
    """Log callback: keeps errors for ``last_words``."""
    line = text.decode("utf-8", "replace").strip()
    if level == _ERROR and line:
        _errors.append(line.partition(": ")[2] or line)  # without the name of the function
