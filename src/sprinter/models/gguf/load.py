"""A GGUF file as a model: loaded by llama.cpp, described by its metadata."""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from sprinter.errors import UserError
from sprinter.models.gguf.library import gguf_package, installed, last_words, library, loading
from sprinter.models.gguf.output_head import check_whole, gguf_head
from sprinter.models.gguf.repack import Repacking, repacking
from sprinter.models.gguf.runner import LlamaCppRunner
from sprinter.models.gguf.sequences import MOST
from sprinter.models.interface import Runner, ServedModel

__all__ = ["EOS_KEY", "FINGERPRINT_KEY", "GgufModel", "content_fingerprint", "file_fingerprint"]

FINGERPRINT_KEY = "sprinter.weights_fingerprint"
"""Metadata key: ``weights_fingerprint`` of the checkpoint that a file was converted from."""

EOS_KEY = "sprinter.eos_token_ids"
"""Metadata key: all EOS ids, separated by commas; GGUF's own key holds only one."""

_TYPES = {"gptneox": "gpt_neox", "phi2": "phi", "codeshell": "gpt_bigcode"}
"""Architecture in GGUF → model type in transformers, for types whose FLOPs depend on it."""


class GgufModel(ServedModel):
    """A causal language model in a GGUF file; see ``ServedModel``.

    Attributes:
        path: the file.
        context: number of tokens that it was trained on.
        device: the CPU, even if llama.cpp computes on a GPU.
        repacking: whether its weights are repacked for this CPU, and why.
        weights: storage type of its weights, e.g. "F16", "Q8_0".
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
        self.repacking = _repacking(path)  # before any of llama.cpp's code runs in this process
        self._llama = llama = library()
        self.on_gpu = _uses_gpu(llama, device)
        self.handle = _load(llama, path, self.on_gpu, bool(self.repacking.on))
        weakref.finalize(self, llama.llama_model_free, self.handle)
        self._vocab = llama.llama_model_get_vocab(self.handle)
        self._check_kind()
        name = llama.llama_ftype_name(llama.llama_model_ftype(self.handle)) or b"unknown"
        self.weights = name.decode().replace("mostly ", "").replace("all ", "")
        self.cache_dtype = torch.float32 if self.weights == "F32" else torch.float16
        self.vocab_size = int(llama.llama_vocab_n_tokens(self._vocab))
        self.hidden_size = int(llama.llama_model_n_embd_out(self.handle))
        self.context = int(llama.llama_model_n_ctx_train(self.handle))
        self.size = int(llama.llama_model_n_params(self.handle))
        self.architecture = self._metadata("general.architecture")
        self.config = self._config()
        self.eos_ids = self._eos_ids()
        self.fingerprint = self._metadata(FINGERPRINT_KEY) or file_fingerprint(path)
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

    def _metadata(self, key: str, room: int = 256) -> str:
        """A metadata value as text; "" if there is none."""
        buffer = ctypes.create_string_buffer(room)
        found = self._llama.llama_model_meta_val_str(self.handle, key.encode(), buffer, room)
        return buffer.value.decode("utf-8", "replace") if found >= 0 else ""

    def _number(self, key: str) -> int | None:
        value = self._metadata(f"{self.architecture}.{key}")
        return int(value) if value.isdigit() else None

    def _check_kind(self) -> None:
        llama = self._llama
        check_whole(self.path, int(self._metadata("split.count") or 0))
        kinds = {
            "is an encoder-decoder or embedding model": llama.llama_model_has_encoder,
            "holds a recurrent state, which cannot be rewound": llama.llama_model_is_recurrent,
            "holds recurrent layers, whose state cannot be rewound": llama.llama_model_is_hybrid,
            "is a diffusion model": llama.llama_model_is_diffusion,
        }
        for what, holds in kinds.items():
            if holds(self.handle):
                raise UserError(f"{self.path.name} {what}: give a decoder with attention in all layers")

    def _config(self) -> PreTrainedConfig:
        llama, number = self._llama, self._number
        heads = int(llama.llama_model_n_head(self.handle))
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": int(llama.llama_model_n_embd(self.handle)),
            "num_hidden_layers": int(llama.llama_model_n_layer(self.handle)),
            "num_attention_heads": heads,
            "num_key_value_heads": int(llama.llama_model_n_head_kv(self.handle)) or heads,
            "head_dim": number("attention.key_length"),
            "intermediate_size": number("feed_forward_length"),
            "moe_intermediate_size": number("expert_feed_forward_length"),
            "num_experts_per_tok": number("expert_used_count"),
            "max_position_embeddings": self.context,
        }
        config: Any = PreTrainedConfig()
        config.model_type = _TYPES.get(self.architecture, self.architecture)
        for name, value in sizes.items():
            setattr(config, name, value)
        return config  # type: ignore[no-any-return]

    def _eos_ids(self) -> tuple[int, ...]:
        """The EOS ids that our converter recorded, else those that llama.cpp names."""
        if recorded := self._metadata(EOS_KEY):
            return tuple(int(part) for part in recorded.split(","))
        ends = self._llama.llama_vocab_is_eog
        return tuple(i for i in range(self.vocab_size) if ends(self._vocab, i))


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


def _repacking(path: Path) -> Repacking:
    installed()
    gguf_package()
    try:
        types = gguf_head(path).types
    except UserError as error:  # leave the message to llama.cpp's own loading
        return Repacking(False, str(error))
    return repacking(types)


def _load(llama: Any, path: Path, on_gpu: bool, repack: bool) -> Any:
    last_words("")
    with loading(on_gpu, repack) as params:
        handle = llama.llama_model_load_from_file(str(path).encode(), params)
    if not handle:
        raise UserError(f"llama.cpp cannot load {path}: {last_words('it does not say why')[:300]}")
    return handle


def file_fingerprint(path: Path) -> str:
    """A fingerprint of the file, see ``content_fingerprint``."""
    return content_fingerprint(np.memmap(path, np.uint8, "r"))


def content_fingerprint(content: NDArray[np.uint8]) -> str:
    """A fingerprint of a file's bytes ``[size]``: SHA-256 of its size and its first and last MiB."""
    size = len(content)
    ends = content[: 1 << 20].tobytes() + content[max(0, size - (1 << 20)) :].tobytes()
    return hashlib.sha256(f"gguf {size}".encode() + ends).hexdigest()
