"""The real models that benchmarks run."""

from __future__ import annotations

from pathlib import Path

import sprinter

TARGET = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
DRAFT = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf"


def dequantised(folder: Path, dtype: str, model: str) -> Path:
    """The weights of a GGUF file as a transformers model, for engines that read no GGUF files."""
    if not (folder / "config.json").is_file():
        pair = sprinter.load_pair(model, runner="torch", dtype=dtype, compile=False)
        pair.models.target.model.save_pretrained(folder)  # type: ignore[operator,union-attr]
        assert pair.tokenizer is not None
        pair.tokenizer.save_pretrained(folder)
    return folder
