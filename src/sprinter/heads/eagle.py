"""EAGLE's head (Li et al. 2024, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, drafts trees with the same one).

Its entries (``heads.entries``) join the embedding of a token with the target's last state before it by a linear layer.
One decoder layer without a first norm turns them into an estimate of the target's next state, from which the target's
own output layer makes the law.

Files are those of the authors: the fields of the layer in ``config.json``, ``fc``, ``layers.0`` and perhaps
``embed_tokens`` in ``model.safetensors``. Those of speculators' former type ``eagle`` are read too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from sprinter.errors import UserError
from sprinter.heads.drafting import OutputLayer
from sprinter.heads.entries import PICKLE, EntryHeads, EntryLayer, check_layer
from sprinter.heads.files import WEIGHTS, HeadFiles, fitting
from sprinter.heads.reading import HeadFields

__all__ = ["EagleHeads", "is_eagle", "load_eagle"]

_SPECULATORS = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
"""Names of speculators, and the authors'."""


class EagleHeads(EntryHeads):
    """EAGLE's layer, and the fusion of embeddings and states.

    Args:
        config: of the layer; ``hidden_size`` d and ``vocab_size`` are the target's.
        fusion_bias: whether the fusing layer has a bias.
        more: as in ``TokenHeads``.
    """

    kind = "eagle"

    def __init__(self, config: LlamaConfig, fusion_bias: bool = False, **more: Any) -> None:
        layer = EntryLayer(config, config.hidden_size)
        super().__init__(config, layer, 2 * config.hidden_size, fusion_bias, **more)

    def join(self, target: nn.Module) -> None:
        """Take the target's embedding and output layer, and move to its device."""
        super().join(target)
        self._output = [OutputLayer(target, self.vocab_size)]

    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """The target's states ``[..., d]`` after its final norm."""
        return states[0].to(self.dtype)

    def inputs(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and features fused: the residual stream, and what the attention reads."""
        joined: Tensor = self.fc(torch.cat([embeds, features], -1))
        return joined, joined

    def draft_logits(self, out: Tensor) -> Tensor:
        """Logits ``[..., V]`` of estimated states ``[..., d]``."""
        return self._output[0](out)

    def whole_logits(self, out: Tensor) -> Tensor:
        """Logits ``[..., V]``."""
        return self.draft_logits(out)

    @property
    def flops(self) -> float:
        """Of one entry, the target's output layer included, without attention itself."""
        return super().flops + 2.0 * self.hidden_size * self.drafted

    def file_config(self) -> dict[str, Any]:
        """Fields as the authors name them."""
        return {
            **self.layer_config.to_diff_dict(),
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "bias": self.fc.bias is not None,  # of the fusing layer
            "sprinter_head": self.kind,
            "base_model_name_or_path": self.target_id,
        }


def is_eagle(files: HeadFiles) -> bool:
    """Whether a folder is of such a head: marked, or as its authors publish it, a config of one decoder layer.

    Raises:
        UserError: it is of EAGLE-3, as its authors publish it.
    """
    config = files.config
    marked = config.get("sprinter_head") == "eagle" or config.get("speculators_model_type") == "eagle"
    named = config.keys() & {"sprinter_head", "speculators_model_type", "medusa_num_heads"}
    if "draft_vocab_size" in config and not named:
        raise UserError(
            f"'{files.directory}' holds an EAGLE-3 head as its authors publish it: convert it to the format of "
            "speculators, which is read"
        )
    return marked or (not named and config.get("num_hidden_layers") == 1 and "hidden_size" in config)


def load_eagle(files: HeadFiles) -> EagleHeads:
    """Read a head from a folder.

    Raises:
        UserError: a variant that is not supported, or weights that are missing, damaged, or do not fit the config.
    """
    fields, weights = HeadFields(files), files.weights((WEIGHTS,), (PICKLE,))
    inner, verified = fields, fields.text("base_model_name_or_path")
    if files.config.get("speculators_model_type") == "eagle":
        inner = HeadFields(files, "transformer_layer_config")
        verified = fields.verifier()
        for theirs, ours in _SPECULATORS.items():
            weights = {name.replace(theirs, ours, 1): value for name, value in weights.items()}
    normed = any("layernorm" in name and "post_attention" not in name for name in weights)
    check_layer(
        "EAGLE", files, inner.fields, 1, "without norms before it",
        ("further norms", normed or bool(files.config.get("layernorms"))),
        ("no fc.weight, as heads of EAGLE have", "fc.weight" not in weights),
    )  # fmt: skip
    copies = ("lm_head.", "rotary")  # of the target's
    weights = {name: value for name, value in weights.items() if not name.startswith(copies)}
    known = LlamaConfig().to_dict().keys() | {"rope_theta", "rope_scaling"}
    with fitting("EAGLE head", files):
        layer = inner.layer(weights, "layers.0.mlp", known)
        heads = EagleHeads(layer, "fc.bias" in weights, **fields.of_target(verified))
        heads.fill(weights, files.directory)
    return heads
