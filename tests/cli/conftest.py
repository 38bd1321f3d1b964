"""Tiny models with a tokenizer, saved as directories, and ways to run the command line."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sprinter.cli import main
from sprinter.heads.gate import Gate, GateConfig, save_gate, weights_fingerprint

SRC = Path(__file__).resolve().parents[2] / "src"
CONTEXT, HIDDEN = 16384, 32  # long enough for a stream that outlasts a test


class Ended(NamedTuple):
    """What a run of the command line left."""

    status: int
    out: str
    err: str


Run = Callable[..., Ended]


@dataclass(frozen=True)
class Places:
    """Directories of the tiny pair, good and broken."""

    target: Path
    draft: Path
    gate: Path
    root: Path

    @property
    def pair(self) -> list[str]:
        return ["--target", str(self.target), "--draft", str(self.draft)]

    @property
    def gated(self) -> list[str]:
        return [*self.pair, "--gate", str(self.gate)]


def tiny_tokenizer(extra: int = 0) -> PreTrainedTokenizerFast:
    """One token a byte, and ``extra`` words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*(f"<{i}>" for i in range(extra)), *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_tiny(
    directory: Path, seed: int, layers: int = 2, extra: int = 0, broken: bool = False
) -> LlamaForCausalLM:
    """A random Llama that writes printable ASCII."""
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer(extra)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    letters = torch.tensor([len(tokenizer.decode([i]).strip()) == 1 and tokenizer.decode([i]).isascii()
                            for i in range(len(tokenizer))])  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight[letters] *= 20
        if broken:
            model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("models")
    found = Places(root / "target", root / "draft", root / "gate", root)
    save_tiny(found.target, seed=1)
    draft = save_tiny(found.draft, seed=2, layers=1)
    for directory, fingerprint in ((found.gate, weights_fingerprint(draft)), (root / "other-gate", "0" * 64)):
        config = GateConfig(HIDDEN, str(found.draft), str(found.target), None, fingerprint)
        gate = Gate(config, torch.randn(1, HIDDEN), torch.zeros(1))
        save_gate(gate, directory, "# A random gate\n")
    save_tiny(root / "other-words", seed=3, layers=1, extra=3)
    save_tiny(root / "nan", seed=4, layers=1, broken=True)
    corrupt = shutil.copytree(found.target, root / "corrupt") / "model.safetensors"
    corrupt.write_bytes(corrupt.read_bytes()[: corrupt.stat().st_size // 2])
    pickled = shutil.copytree(found.target, root / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (root / "empty").mkdir()
    return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process."""

    def call(*args: str, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        status = main(args)
        return Ended(status, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For real processes: one thread, no colours asked for, this checkout's package."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("SPRINTER_", "TRANSFORMERS_"))
    }
    return kept | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
