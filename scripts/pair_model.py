"""Models of the built-in pair: sizes, optimiser, and the folders that `AutoModelForCausalLM` loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from pair_data import EOS, PreparedData, UsageError

CONTEXT = 1024


@dataclass(frozen=True)
class Shape:
    """Size of one model."""

    layers: int
    width: int
    heads: int
    feed_forward: int

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.feed_forward) < 1:
            raise ValueError(f"every size must be at least 1: {self}")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} does not give {self.heads} heads of even size")


@dataclass(frozen=True)
class Preset:
    """Sizes, batch and learning rates that go together."""

    vocab_size: int
    target: Shape
    draft: Shape
    batch_tokens: int
    matrix_lr: float
    vector_lr: float

    def __post_init__(self) -> None:
        if not 300 <= self.vocab_size <= 65535:
            raise ValueError(f"vocabulary must lie in 300..65535 (uint16 stream), got {self.vocab_size}")
        if self.batch_tokens % (2 * CONTEXT):
            raise ValueError(f"batch_tokens must be a multiple of {2 * CONTEXT}, got {self.batch_tokens}")
        if self.matrix_lr <= 0 or self.vector_lr <= 0:
            raise ValueError("learning rates must be positive")


PRESETS: dict[str, Preset] = {
    # Many narrow layers: a decoding step on a CPU costs per layer, so depth makes the target's pass
    # dear while training stays cheap.
    "cpu-3m": Preset(3072, Shape(12, 128, 2, 384), Shape(1, 192, 3, 768), 4096, 0.02, 0.004),
    "cpu-6m": Preset(4096, Shape(12, 192, 3, 512), Shape(1, 192, 3, 768), 4096, 0.02, 0.004),
    "gpu-14m": Preset(4096, Shape(14, 256, 4, 768), Shape(1, 256, 4, 1024), 32768, 0.02, 0.004),
    "cpu-2m": Preset(2048, Shape(6, 128, 2, 384), Shape(1, 96, 2, 256), 4096, 0.02, 0.004),
    "tiny": Preset(512, Shape(3, 32, 2, 64), Shape(1, 32, 2, 64), 2048, 0.02, 0.004),
}


def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate orthogonal factor of a stack of matrices (Muon's quintic iteration)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    flip = x.size(-2) > x.size(-1)
    x = x.mT if flip else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if flip else x


class StackedMuon(torch.optim.Optimizer):
    """Muon over stacks of equal shapes, in the weights' own precision.

    torch.optim.Muon iterates one matrix at a time in bfloat16, which a CPU without AMX runs several
    times slower.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix; `closure` is not used."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                directions = newton_schulz(
                    torch.stack([self._nesterov(p, group["momentum"]) for p in parameters])
                )
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter.add_(direction, alpha=-scale)

    def _nesterov(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        gradient = parameter.grad
        if gradient is None:
            raise RuntimeError("a matrix has no gradient")
        buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(gradient))
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def build_model(shape: Shape, vocab_size: int, eos_id: int, seed: int) -> nn.Module:
    """A fresh float32 Llama with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
    )
    model: nn.Module = LlamaForCausalLM(config)
    with torch.no_grad():  # padding shares the end-of-text row, which transformers zeroes
        nn.init.normal_(model.get_input_embeddings().weight, std=0.02)  # type: ignore[operator]
    model.get_input_embeddings().padding_idx = None  # type: ignore[operator]
    return model


@torch.no_grad()
def inherit_embedding(draft: nn.Module, target: nn.Module) -> None:
    """Start a draft from the target's token embedding, as far as both widths reach: it learns sooner."""
    own = draft.get_input_embeddings().weight  # type: ignore[operator]
    learnt = target.get_input_embeddings().weight  # type: ignore[operator]
    width = min(own.shape[1], learnt.shape[1])
    own[:, :width] = learnt[:, :width]


def make_optimizers(model: nn.Module, preset: Preset) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the tied embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in name)]
    adam = torch.optim.AdamW(others, lr=preset.vector_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return StackedMuon(matrices, lr=preset.matrix_lr), adam


def export(model: nn.Module, data: PreparedData, folder: Path) -> None:
    """Write a bfloat16 copy that AutoModelForCausalLM loads; files appear whole or not at all."""
    from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    copy = LlamaForCausalLM(model.config)  # type: ignore[arg-type]
    copy.load_state_dict(model.state_dict())
    copy.bfloat16().save_pretrained(partial)
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=data.eos_id, pad_token_id=data.eos_id
    )
    generation.save_pretrained(partial)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=data.tokenizer, eos_token=EOS, pad_token=EOS, model_max_length=CONTEXT
    )
    tokenizer.save_pretrained(partial)
    (partial / "tokenizer.json").write_text(data.tokenizer.to_str(pretty=False), encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for item in partial.iterdir():
        item.chmod(0o644)  # safetensors writes weights that only their owner may read
        item.replace(folder / item.name)
    partial.rmdir()


def load_exported(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """An exported model, ready to be a teacher or to be measured."""
    from transformers import AutoModelForCausalLM

    if not (folder / "model.safetensors").is_file():
        raise UsageError(f"no exported model in {folder}; train it first")
    model = cast(nn.Module, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    return model.to(device).eval()
