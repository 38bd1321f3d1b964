"""Weights of 4 to 8 bits: what is refused, and libraries that are missing, damaged or wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tests.models.gguf_families import written
from tests.models.gguf_files import NO_GGUF
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import sprinter
from sprinter.errors import UserError
from sprinter.models.kernels import kernels, name_of, quantise
from sprinter.models.pair import builtin_paths, load_models

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
from sprinter_kernels.layout import FORMATS, four_bits
from sprinter_kernels.native import pack


def test_models_without_linear_layers_are_refused() -> None:
    """Most of these are embeddings of positions."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=5000)
    ).eval()
    with pytest.raises(UserError, match=r"of those of GPT2LMHeadModel are: use bfloat16"):
        quantise(model, "int8")


def test_a_model_that_reads_its_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                         num_attention_heads=2)).eval()  # fmt: skip
    forward = type(model).forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, *given, **more: (self.lm_head.weight.dtype, forward(self, *given, **more))[1],
    )
    with pytest.raises(UserError, match=r"does not run with quantised layers .*weight.*: use bfloat16"):
        quantise(model, "int4")


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    for dtype in ("int8", "int4", "gguf"):
        with pytest.raises(UserError, match=f"dtype {dtype} says how weights are stored: leave device_map"):
            load_models(builtin_paths()["target"], dtype=dtype, device_map="cpu")
        with pytest.raises(UserError, match=f"dtype {dtype} comes with attention of its own"):
            load_models(builtin_paths()["target"], dtype=dtype, attn_implementation="eager")
    with pytest.raises(UserError, match=r"dtype gguf is for GGUF files, and .*target is none: use int4"):
        load_models(builtin_paths()["target"], dtype="gguf")
    pytest.importorskip("gguf", reason=NO_GGUF)
    written("qwen2", tmp_path / "m.gguf", "F16")
    with pytest.raises(UserError, match=r"is stored as F16, not in 4 to 8 bits: use dtype=int8"):
        load_models(tmp_path / "m.gguf", dtype="gguf")


def test_llamacpp_has_its_own_types() -> None:
    pytest.importorskip("llama_cpp")
    with pytest.raises(UserError, match="runner llamacpp has no dtype 'int8'"):
        sprinter.load_pair(builtin_paths()["target"], runner="llamacpp", dtype="int8")


def test_an_instruction_set_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINTER_KERNELS", "avx3")
    with pytest.raises(UserError, match=r"SPRINTER_KERNELS='avx3' is none of this processor's: use .*plain"):
        kernels()


def test_kernels_that_are_installed_and_cannot_be_imported_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sprinter_kernels.native", None)
    with pytest.raises(
        UserError, match=r"^our kernels cannot be loaded: import of sprinter_kernels.native halted"
    ):
        kernels()
    assert name_of() is None


def test_without_the_kernels_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sprinter_kernels", None)
    with pytest.raises(UserError, match=r"need our kernels, which are not installed: pip install .*float32"):
        kernels()
    pair = sprinter.load_pair()
    assert pair.generate("The river", max_new_tokens=4).tokens
    with pytest.raises(UserError, match=r"cannot be compiled: .*kernels, which are not installed"):
        sprinter.load_pair(compile=True)


def test_parts_of_blocks_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="Q4_1 weights come in whole blocks of 20 bytes"):
        pack(four_bits(np.ones((4, 32), np.float32))[:, :19], FORMATS["Q4_1"])
