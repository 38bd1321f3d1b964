"""GliDe's layer (Du et al. 2024, arXiv 2402.02082): a decoder layer that also attends to the target's last layer.

It reads token embeddings, attends to the tokens so far, then to the keys and values of the target's last layer at the
tokens that the target has read, and ends in the target's norm and output layer. The keys and values are made from the
output of the layer before, by the target's own projections: they are those in its cache. Embedding and output layer are
the target's. Files: ``config.json`` with ``sprinter_head: glide``, and ``model.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from sprinter.errors import UserError
from sprinter.heads.attention import HeadAttention, KeptKeys, attend, known_prefix, seen_by_nodes
from sprinter.heads.drafting import (
    HeadFiles,
    OutputLayer,
    TextOfHeads,
    TokenHeads,
    linear_weights,
    write_files,
)
from sprinter.heads.reading import HeadFields, fill, fitting

__all__ = ["GlideHeads", "load_glide", "save_glide"]

WEIGHTS = "model.safetensors"
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
        self._target: list[
            Any
        ] = []  # its inner model and output layer; in a list, as they are no part of this module

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
        self._target = [target.base_model, OutputLayer(target, self.vocab_size)]

    @property
    def output(self) -> OutputLayer | None:
        """The target's."""
        layer: OutputLayer | None = self._target[1] if self._target else None
        return layer

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
        logits: Tensor = self._target[1](self.norm(x))
        return logits

    @property
    def flops(self) -> float:
        """Of one token, the target's output layer included, without attention itself."""
        return 2.0 * (linear_weights(self) + self.hidden_size * self.drafted)

    def begin(self) -> TextOfHeads:
        """The head in a new text."""
        return _GlideText(self)


class _GlideText(TextOfHeads):
    """Keys and values of the text's tokens, of the target's, and of the nodes that follow the text."""

    def __init__(self, heads: GlideHeads) -> None:
        self._heads = heads
        self._text: list[int] = []
        self._kept, self._kept_target = KeptKeys(), KeptKeys()  # own: of the text's tokens, then of the nodes
        self._target: tuple[Tensor, Tensor] | None = None  # of all tokens but the last
        self._forget()

    def _forget(self) -> None:
        self._nodes: dict[tuple[int, ...], int] = {}
        self._logits: dict[tuple[int, ...], Tensor] = {}

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        ids, before = list(text), self._text
        if ids == before:
            return
        known = known_prefix(ids, before)
        first, read = min(known, len(ids) - 1), min(max(0, known - 1), len(ids) - 2)
        heads, self._text = self._heads, ids
        self._forget()
        self.steps, self.tokens = self.steps + 1, self.tokens + len(ids) - first
        device = heads.device
        places = torch.arange(len(ids), device=device)
        embeds = heads.embedded(torch.tensor(ids[first:], device=device))
        query, *new = heads.entries(embeds, places[first:])
        own_keys, own_values = self._kept.put(first, *new)
        made = heads.target_keys(states[heads.layers[0]][read:], places[read:-1])
        self._target = self._kept_target.put(read, *made)
        attended = attend(query[:, -1:], own_keys, own_values)
        out = heads.finish(embeds[-1:], attended, places[-1:], self._target)
        self._logits[()] = heads.token_logits(out)[0]

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        new = [path for path in dict.fromkeys(paths) if path not in self._logits]
        if new:
            self._grow(new)
        return torch.stack([self._logits[path] for path in paths])

    def _grow(self, paths: Sequence[tuple[int, ...]]) -> None:
        """Add nodes: each sees the text, its ancestors and itself, and what the target has read."""
        assert self._target is not None
        heads, base, before = self._heads, len(self._text), len(self._nodes)
        device = heads.device
        self.steps, self.tokens = self.steps + 1, self.tokens + len(paths)
        self._nodes |= {path: before + i for i, path in enumerate(paths)}
        embeds = heads.embedded(torch.tensor([path[-1] for path in paths], device=device))
        positions = torch.tensor([base + len(path) - 1 for path in paths], device=device)
        query, key, value = heads.entries(embeds, positions)
        keys, values = self._kept.put(base + before, key, value)
        sees = seen_by_nodes(paths, self._nodes, base, device)
        attended = attend(query, keys, values, sees)
        out = heads.finish(embeds, attended, positions, self._target)
        self._logits |= dict(zip(paths, heads.token_logits(out), strict=True))


def save_glide(heads: GlideHeads, directory: Path, card: str, facts: Mapping[str, Any] | None = None) -> None:
    """Write the head; weights in bfloat16.

    Args:
        facts: further fields of config.json.

    Raises:
        UserError: the directory cannot be written.
    """
    config = {
        "sprinter_head": "glide",
        "base_model_name_or_path": heads.target_id,
        "target_fingerprint": heads.target_fingerprint,
        "layer_config": heads.layer_config.to_diff_dict(),
        "accuracies": [[round(value, 4) for value in row] for row in heads.accuracies],
        **(facts or {}),
    }
    weights = {name: value.bfloat16() for name, value in heads.state_dict().items()}
    write_files(directory, WEIGHTS, weights, config, card)


def load_glide(files: HeadFiles) -> GlideHeads:
    """Read a head from a folder.

    Raises:
        UserError: weights are missing, damaged, or do not fit the config.
    """
    fields, weights = HeadFields(files), files.weights((WEIGHTS,))
    with fitting("glide head", files):
        heads = GlideHeads(
            HeadFields(files, "layer_config").layer(weights, "mlp"),
            target_id=fields.text("base_model_name_or_path") or "",
            target_fingerprint=fields.text("target_fingerprint"), accuracies=fields.accuracies(),
        )  # fmt: skip
        fill(heads, weights, files.directory)
    heads.id, heads.revision = files.id, files.revision
    return heads
