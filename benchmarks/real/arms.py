"""The real models that benchmarks run, and what they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sprinter
from sprinter.bench.sample import Sample, Suite
from sprinter.bench.suites import turn_prompt

TARGET = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
DRAFT = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf"
RUNNING_TEXT = ("wiki-summary",)
"""Suites that are continued as they are, not asked in chat."""


@dataclass(frozen=True)
class Question:
    """A prompt in token ids, and what ends its answer."""

    suite: str
    sample: Sample
    ids: Sequence[int]
    ends: Sequence[int]
    new_tokens: int


def questions(pair: sprinter.Pair, suites: Sequence[Suite]) -> list[Question]:
    """Every sample's first turn."""
    return [
        Question(
            suite.name,
            sample,
            *turn_prompt(pair, sample, 0, [], chat=suite.chat),
            new_tokens=suite.new_tokens,
        )
        for suite in suites
        for sample in suite.samples
    ]


def dequantised(folder: Path, dtype: str, model: str) -> Path:
    """The weights of a GGUF file as a transformers model, for engines that read no GGUF files."""
    if not (folder / "config.json").is_file():
        pair = sprinter.load_pair(model, runner="torch", dtype=dtype, compile=False)
        pair.models.target.model.save_pretrained(folder)  # type: ignore[operator,union-attr]
        assert pair.tokenizer is not None
        pair.tokenizer.save_pretrained(folder)
    return folder
