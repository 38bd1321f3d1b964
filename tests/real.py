"""Real models for tests marked ``real``: GGUF files in ``SPRINTER_MODELS``, and why a test is skipped without them.

    @pytest.mark.real
    @needs_llama
    def test_something() -> None:
        pair = sprinter.load_pair(real_file("qwen"), draft=real_file("qwen-draft"))

``REAL`` names the models that a run may use: "all" (the default), or some keys of ``FILES`` separated by commas;
``make test-real`` sets it.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.models.gguf_files import NO_GGUF, NO_LLAMA

from sprinter.models.source import models_folder

__all__ = ["FILES", "needs_gguf", "needs_llama", "real_file"]

FILES = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen": "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    "qwen-draft": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "gemma": "gemma-3-270m.Q4_K_M.gguf",
}
"""Short name → file."""

needs_llama = pytest.mark.skipif(find_spec("llama_cpp") is None, reason=NO_LLAMA)
needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason=NO_GGUF)


def real_file(name: str) -> Path:
    """The file of a model; skips the test if the run may not use that model, or the file is missing.

    Args:
        name: a key of ``FILES``.
    """
    path = models_folder() / FILES[name]
    wanted = os.environ.get("REAL") or "all"
    if wanted != "all" and name not in wanted.split(","):
        pytest.skip(f"{path.name} is not used with REAL={wanted}: make test-real REAL=all")
    if not path.is_file():
        pytest.skip(f"there is no {path.name} in SPRINTER_MODELS ({path.parent})")
    return path
