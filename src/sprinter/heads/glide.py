"""GliDe's layer (Du et al. 2024, arXiv 2402.02082): a decoder layer that also attends to the target's last layer.

It reads token embeddings, attends to the tokens so far, then to the keys and values of the target's last layer at the
tokens that the target has read, and ends in the target's norm and output layer. The keys and values are made from the
output of the layer before, by the target's own projections: they are those in its cache. Embedding and output layer are
the target's. Files: ``config.json`` with ``sprinter_head: glide``, and ``model.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from sprinter.errors import UserError
from sprinter.heads.attention import AttendingText, HeadAttention, KeptKeys, attend
from sprinter.heads.drafting import OutputLayer, TextOfHeads, TokenHeads, linear_weights
from sprinter.heads.files import HeadFiles, fill, fitting
from sprinter.heads.reading import HeadFields

__all__ = ["GlideHeads", "load_glide"]

_FAMILIES = ("llama", "mistral", "qwen2")
"""Types of targets whose last layer's keys are a projection of its normalised input, turned."""


class GlideHeads(TokenHeads):
    """One layer of self-attention, cross-attention to the target, and feed-forward.

    Args:
        config: of the layer; ``hidden_size``, ``vocab_size``, heads and their size are the target's.
        more: as in ``TokenHeads``.
    """

    kind = "glide"

    def __init__(self, config: LlamaConfig, **more: Any) -> None:
        super().__init__(config.hidden_size, config.vocab_size, **more)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.layer_config = config
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.self_attn = HeadAttention(config, size)
        self.cross_layernorm = LlamaRMSNorm(size, eps)
        self.cross_attn = HeadAttention(config, size, keys=False)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.norm = LlamaRMSNorm(size, eps)
        self._target: list[Any] = []  # the target's inner model, as ``_output``

    def join(self, target: nn.Module) -> None:
        """Take the target's embedding, last layer and output layer, and move to its device.

        Raises:
            UserError: a target of another family or shape, or with a single layer.
        """
        config: Any = target.config
        own, count = config.get_text_config(decoder=True), len(getattr(target.base_model, "layers", ()))
        if own.model_type not in _FAMILIES or count < 2:
            raise UserError(
                f"a glide head reads the keys of the target's last layer, of {', '.join(_FAMILIES)} models with two "
                f"layers or more, and this one is '{own.model_type}' with {count}: give medusa or eagle3 heads"
            )
        attention = target.base_model.layers[-1].self_attn  # type: ignore[union-attr, index]
        if (own.num_attention_heads, own.num_key_value_heads, attention.head_dim) != (
            self.self_attn.heads, self.self_attn.kv_heads, self.self_attn.size,
        ):  # fmt: skip
            raise UserError(
                "this glide head is for a target with other attention heads: give that of this target"
            )
        self.layers = (count - 2,)
        self.move_beside(target)
        self._target, self._output = [target.base_model], [OutputLayer(target, self.vocab_size)]

    def rope(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[n, size]`` of the target's rotary embedding at positions ``[n]``."""
        cos, sin = self._target[0].rotary_emb(x, positions[None])
        return cos[0], sin[0]

    def embedded(self, ids: Tensor) -> Tensor:
        """Embeddings ``[..., d]`` of token ids."""
        rows: Tensor = self._target[0].embed_tokens(ids)
        return rows.to(self.dtype)

    def target_keys(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the target's last layer ``[..., heads, n, size]``, given its inputs ``[..., n, d]``."""
        last = self._target[0].layers[-1]
        hidden = last.input_layernorm(states)
        keys, values = (one(hidden).to(self.dtype) for one in (last.self_attn.k_proj, last.self_attn.v_proj))
        return self.self_attn.repeated(keys, values, self.rope(keys, positions))

    def entries(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[..., heads, n, size]`` of tokens."""
        return self.self_attn.split(self.input_layernorm(embeds), self.rope(embeds, positions))

    def finish(
        self,
        embeds: Tensor,
        attended: Tensor,
        positions: Tensor,
        target: tuple[Tensor, Tensor],
        sees: Tensor | None = None,
    ) -> Tensor:
        """The output ``[..., n, d]`` of tokens, given the mean values ``[..., heads, n, size]`` of self-attention.

        Args:
            target: keys and values of the target. sees: ``[n, m]`` which of them; None: all.
        """
        x = embeds + self.self_attn.join(attended)
        query = self.cross_attn.query(self.cross_layernorm(x), self.rope(x, positions))
        x = x + self.cross_attn.join(attend(query, *target, sees))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def token_logits(self, x: Tensor) -> Tensor:
        """Logits ``[..., V]`` of outputs ``[..., d]``."""
        return self._output[0](self.norm(x))

    @property
    def flops(self) -> float:
        """Of one token, the target's output layer included, without attention itself."""
        return 2.0 * (linear_weights(self) + self.hidden_size * self.drafted)

    def begin(self) -> TextOfHeads:
        """The head in a new text."""
        return _GlideText(self)

    def file_config(self) -> dict[str, Any]:
        """Fields of the layer, and the target's name."""
        return {
            "sprinter_head": "glide",
            "base_model_name_or_path": self.target_id,
            "layer_config": self.layer_config.to_diff_dict(),
        }


class _GlideText(AttendingText):
    """Keys and values of the text's tokens, of the target's, and of the nodes that follow the text."""

    def __init__(self, heads: GlideHeads) -> None:
        super().__init__(heads.device, fewer=0)
        self._heads = heads
        self._kept_target = KeptKeys()
        self._target: tuple[Tensor, Tensor] | None = None  # of all tokens but the last

    def read_text(self, ids: list[int], known: int, states: Mapping[int, Tensor]) -> Tensor:
        first, read = min(known, len(ids) - 1), min(max(0, known - 1), len(ids) - 2)
        heads, places = self._heads, torch.arange(len(ids), device=self._device)
        self.tokens += len(ids) - first
        embeds = heads.embedded(torch.tensor(ids[first:], device=self._device))
        query, *new = heads.entries(embeds, places[first:])
        own_keys, own_values = self._kept.put(first, *new)
        made = heads.target_keys(states[heads.layers[0]][read:], places[read:-1])
        self._target = self._kept_target.put(read, *made)
        attended = attend(query[:, -1:], own_keys, own_values)
        return heads.finish(embeds[-1:], attended, places[-1:], self._target)[0]

    def read_nodes(
        self, ids: Tensor, parents: Tensor, positions: Tensor, start: int, sees: Tensor | None
    ) -> Tensor:
        assert self._target is not None
        embeds = self._heads.embedded(ids)
        query, key, value = self._heads.entries(embeds, positions)
        attended = attend(query, *self._kept.put(start, key, value), sees)
        return self._heads.finish(embeds, attended, positions, self._target)

    def logits_of(self, outs: Tensor) -> Tensor:
        return self._heads.token_logits(outs)


def load_glide(files: HeadFiles) -> GlideHeads:
    """Read a head from a folder.

    Raises:
        UserError: weights are missing, damaged, or do not fit the config.
    """
    fields, weights = HeadFields(files), files.weights()
    with fitting("glide head", files):
        heads = GlideHeads(
            HeadFields(files, "layer_config").layer(weights, "mlp"),
            **fields.of_target(fields.text("base_model_name_or_path")),
        )
        fill(heads, weights, files.directory)
    return heads
