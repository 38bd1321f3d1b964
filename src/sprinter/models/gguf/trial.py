"""The script that ``repack`` runs in a child process: forward passes of several sizes over a GGUF file.

It exists to crash instead of its parent. It imports nothing from this package and leaves no core dump. Arguments: the
file, and "on" or "off" for repacked weights. Writes "ran" when all forward passes have run.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from importlib import import_module

_SIZES = (1, 2, 5, 16, 33)
"""Tokens per forward pass: llama.cpp has separate code for one, for few, and for whole tiles with a remainder."""


def _no_core_dump() -> None:
    with suppress(ImportError):  # Windows has no such limits
        resource = import_module("resource")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: piped core dump handlers ignore the limit


def main(path: str, repack: str) -> None:
    """Load the file and run the forward passes.

    Raises:
        RuntimeError: llama.cpp refuses the file or a forward pass.
    """
    llama = import_module("llama_cpp").llama_cpp
    llama.llama_backend_init()
    loading = llama.llama_model_default_params()
    loading.n_gpu_layers, loading.use_extra_bufts = 0, repack == "on"
    model = llama.llama_model_load_from_file(path.encode(), loading)
    if not model:
        raise RuntimeError("llama.cpp cannot load the file of the trial")
    room = max(_SIZES)
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = room
    params.n_threads = params.n_threads_batch = 1
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp makes no cache for the file of the trial")
    batch = llama.llama_batch_init(room, 0, 1)
    for n in _SIZES:
        batch.n_tokens = n
        for i in range(n):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = i, i, 1, True
            batch.seq_id[i][0] = 0
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        if status := llama.llama_decode(context, batch):
            raise RuntimeError(f"llama.cpp failed on {n} tokens of the trial with status {status}")
    sys.stdout.write("ran\n")


if __name__ == "__main__":
    _no_core_dump()
    main(*sys.argv[1:])
