"""A GGUF file as a model: loaded by llama.cpp, described by its metadata."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from sprinter.errors import UserError
from sprinter.models.gguf.header import gguf_head
from sprinter.models.gguf.library import installed, last_words, library, loading
from sprinter.models.gguf.repack import repacking
from sprinter.models.gguf.runner import LlamaCppRunner
from sprinter.models.gguf.sequences import MOST
from sprinter.models.interface import Runner, ServedModel

__all__ = ["EOS_KEY", "FINGERPRINT_KEY", "GgufModel", "content_fingerprint"]

FINGERPRINT_KEY = "sprinter.weights_fingerprint"
"""Metadata key: ``weights_fingerprint`` of the checkpoint that a file was converted from."""

EOS_KEY = "sprinter.eos_token_ids"
"""Metadata key: all EOS ids, separated by commas; GGUF's own key holds only one."""

_TYPES = {"gptneox": "gpt_neox", "phi2": "phi", "codeshell": "gpt_bigcode"}
"""Architecture in GGUF → model type in transformers, for types whose FLOPs depend on it."""

_SIZES = {
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts_per_tok": "expert_used_count",
}
"""Sizes in transformers → their keys in GGUF, of what llama.cpp's API does not tell."""


class GgufModel(ServedModel):
    """A causal language model in a GGUF file; see ``ServedModel``.

    Attributes:
        path: the file.
        context: number of tokens that it was trained on.
        device: the CPU, even if llama.cpp computes on a GPU.
        repacking: whether its weights are repacked for this CPU, and why.
        weights: storage type of its weights, e.g. "F16", "Q8_0".
        nextn: number of its last blocks that are modules of multi-token prediction, which llama.cpp leaves out.
        cache_dtype: dtype of its runners' keys and values: float16, or float32 if the weights are float32.
        fingerprint: for files of ``sprinter convert gguf`` that of the original checkpoint (see
            ``weights_fingerprint``), so that its gates fit; for other files a hash of the file.

    Args:
        path: an existing file.
        device: "auto" (a GPU if this build of llama.cpp uses one), "cpu", or "cuda" or "mps" to insist on one.

    Raises:
        UserError: the file is damaged, its model cannot be rewound, the device is not available, or llama.cpp crashes
            on this machine.
    """

    runner = "llamacpp"

    def __init__(self, path: Path, device: str = "auto") -> None:
        self.path = path
        installed()
        head = gguf_head(path)
        self.repacking = repacking(head.types)  # before any of llama.cpp's code runs in this process
        self._llama = llama = library()
        self.on_gpu = _uses_gpu(llama, device)
        self.handle = _load(llama, path, self.on_gpu, bool(self.repacking.on))
        weakref.finalize(self, llama.llama_model_free, self.handle)
        self._check_kind()
        name = llama.llama_ftype_name(llama.llama_model_ftype(self.handle)) or b"unknown"
        self.weights = name.decode().replace("mostly ", "").replace("all ", "")
        self.cache_dtype = torch.float32 if self.weights == "F32" else torch.float16
        vocab = llama.llama_model_get_vocab(self.handle)
        self.vocab_size = int(llama.llama_vocab_n_tokens(vocab))
        self.hidden_size = int(llama.llama_model_n_embd_out(self.handle))
        self.context = int(llama.llama_model_n_ctx_train(self.handle))
        self.size = int(llama.llama_model_n_params(self.handle))
        self.architecture = head.metadata["general.architecture"]
        self.nextn = int(head.metadata.get(f"{self.architecture}.nextn_predict_layers", 0))
        self.config = self._config(head.metadata)
        self.eos_ids = _eos_ids(llama, vocab, head.metadata.get(EOS_KEY))
        self.fingerprint = head.metadata.get(FINGERPRINT_KEY) or content_fingerprint(
            np.memmap(path, np.uint8, "r")
        )
        self.token_bytes = self._token_bytes()

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the file."""
        return self.path.name

    @property
    def reason(self) -> str:  # type: ignore[override]
        """How llama.cpp runs it."""
        where = "its layers on a GPU" if self.on_gpu else "on the CPU"
        stored = "" if self.repacking.on else ", its weights as stored"
        return f"a GGUF file, {self.weights}, which llama.cpp runs {where}{stored}"

    def most_leaves(self, rows: int) -> int | None:
        """Each leaf is a sequence of llama.cpp."""
        return max(1, MOST // rows)

    def make_runner(self, batch: int, max_len: int, leaves: int) -> Runner:
        """See ``ServedModel``."""
        return LlamaCppRunner(self, batch, max_len, leaves)

    def _token_bytes(self) -> int:
        config: Any = self.config
        kv_size = int(config.num_key_value_heads) * int(
            config.head_dim or config.hidden_size // config.num_attention_heads
        )
        return 2 * int(config.num_hidden_layers) * kv_size * self.cache_dtype.itemsize

    def _check_kind(self) -> None:
        llama = self._llama
        kinds = {
            "is an encoder-decoder or embedding model": llama.llama_model_has_encoder,
            "holds a recurrent state, which cannot be rewound": llama.llama_model_is_recurrent,
            "holds recurrent layers, whose state cannot be rewound": llama.llama_model_is_hybrid,
            "is a diffusion model": llama.llama_model_is_diffusion,
        }
        for what, holds in kinds.items():
            if holds(self.handle):
                raise UserError(f"{self.path.name} {what}: give a decoder with attention in all layers")

    def _config(self, metadata: Mapping[str, Any]) -> PreTrainedConfig:
        llama, kind = self._llama, self.architecture
        heads = int(llama.llama_model_n_head(self.handle))
        config: Any = PreTrainedConfig()
        config.model_type = _TYPES.get(kind, kind)
        config.vocab_size, config.max_position_embeddings = self.vocab_size, self.context
        config.hidden_size = int(llama.llama_model_n_embd(self.handle))
        blocks = int(metadata.get(f"{kind}.block_count", llama.llama_model_n_layer(self.handle)))
        config.num_hidden_layers = blocks - self.nextn
        config.num_attention_heads = heads
        config.num_key_value_heads = int(llama.llama_model_n_head_kv(self.handle)) or heads
        for name, key in _SIZES.items():
            size = metadata.get(f"{kind}.{key}")
            setattr(config, name, size if isinstance(size, int) else None)  # a list: a size for each layer
        return config  # type: ignore[no-any-return]


def _uses_gpu(llama: Any, device: str) -> bool:
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"a GGUF model cannot be put on device {device!r}: use auto, cpu, cuda or mps")
    offload = bool(llama.llama_supports_gpu_offload())
    if device in ("cuda", "mps") and not offload:
        raise UserError(
            f"this build of llama-cpp-python uses no GPU, so device {device!r} is not available: use device=cpu, "
            "or install a build for your GPU"
        )
    return offload and device != "cpu"


def _load(llama: Any, path: Path, on_gpu: bool, repack: bool) -> Any:
    last_words("")
    with loading(on_gpu, repack) as params:
        handle = llama.llama_model_load_from_file(str(path).encode(), params)
    if not handle:
        raise UserError(f"llama.cpp cannot load {path}: {last_words('it does not say why')[:300]}")
    return handle


def _eos_ids(llama: Any, vocab: Any, recorded: str | None) -> tuple[int, ...]:
    """The EOS ids that our converter recorded, else those that llama.cpp names."""
    if recorded:
        return tuple(int(part) for part in recorded.split(","))
    return tuple(i for i in range(llama.llama_vocab_n_tokens(vocab)) if llama.llama_vocab_is_eog(vocab, i))


def content_fingerprint(content: NDArray[np.uint8]) -> str:
    """A fingerprint of a file's bytes ``[size]``: SHA-256 of its size and its first and last MiB."""
    size = len(content)
    ends = content[: 1 << 20].tobytes() + content[max(0, size - (1 << 20)) :].tobytes()
    return hashlib.sha256(f"gguf {size}".encode() + ends).hexdigest()
