"""vLLM's V2 model runner on a CPU: its Triton kernels run in Triton's interpreter. Import it before vLLM."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "TRITON_INTERPRET": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip

import pytest

pytest.importorskip("vllm", exc_type=ImportError)
backends = pytest.importorskip("triton.backends", exc_type=ImportError).backends
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

# vLLM looks for a backend of this name, and the interpreter needs none.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def _with_flags(function: Any, at: int) -> Any:
    """The interpreter's loads and stores refuse masks that are numbers, not flags."""

    def call(self: Any, *args: Any) -> Any:
        mask = args[at]
        flags = TensorHandle(mask.data.astype(bool), mask.dtype)
        return function(self, *args[:at], flags, *args[at + 1 :])

    return call


InterpreterBuilder.create_masked_load = _with_flags(InterpreterBuilder.create_masked_load, 1)
InterpreterBuilder.create_masked_store = _with_flags(InterpreterBuilder.create_masked_store, 2)
