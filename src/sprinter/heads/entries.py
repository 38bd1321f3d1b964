"""What EAGLE's heads share (arXiv 2401.15077, 2406.16858, 2503.01840): a decoder layer over entries, and its text.

Entry i joins the embedding of token i + 1 with a feature of token i: the target's where the target has read token i,
and beyond that the head's own output one entry earlier. The output of entry i gives the law of token i + 2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from sprinter.errors import UserError
from sprinter.heads.attention import HeadAttention, KeptKeys, attend, known_prefix, seen_by_nodes
from sprinter.heads.drafting import TextOfHeads, TokenHeads, linear_weights

__all__ = ["EntryHeads", "EntryLayer"]


class EntryLayer(nn.Module):
    """Attention and feed-forward of Llama's decoder layer; what comes before the attention is each head's own.

    Args:
        config: of the layer. inputs: width of what the attention reads.
    """

    def __init__(self, config: LlamaConfig, inputs: int) -> None:
        super().__init__()
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = HeadAttention(config, inputs)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]


class EntryHeads(TokenHeads):
    """One decoder layer over entries of embeddings and features.

    Args:
        config: of the layer; ``hidden_size`` d and ``vocab_size`` are the target's.
        layer: its modules.
        inputs: width of what the fusing layer reads. fusion_bias: whether that layer has a bias.
        more: as in ``TokenHeads``.

    Attributes:
        fc: the fusing layer. block: the decoder layer.
        embed: an embedding of its own; None: the target's.
    """

    def __init__(
        self, config: LlamaConfig, layer: EntryLayer, inputs: int, fusion_bias: bool, **more: Any
    ) -> None:
        super().__init__(config.hidden_size, config.vocab_size, **more)
        self.layer_config = config
        self.fc = nn.Linear(inputs, config.hidden_size, bias=fusion_bias)
        self.block = layer
        self.rotary = LlamaRotaryEmbedding(config)
        self.embed: nn.Embedding | None = None
        self._embeds: list[nn.Module] = []

    @abstractmethod
    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """Features ``[..., d]``, given the target's states ``[..., d]`` of each of ``layers``."""

    @abstractmethod
    def inputs(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream ``[..., d]`` of entries, and what their attention reads ``[..., inputs]``."""

    @abstractmethod
    def draft_logits(self, out: Tensor) -> Tensor:
        """Logits ``[..., k]`` of the k tokens that it can draft, given outputs ``[..., d]``."""

    @abstractmethod
    def whole_logits(self, out: Tensor) -> Tensor:
        """Logits ``[..., V]``; −inf for tokens that it cannot draft."""

    def join(self, target: nn.Module) -> None:
        """Take the target's embedding, and move beside it."""
        table = target.get_input_embeddings()  # type: ignore[operator]
        self.move_beside(target)
        # Its frequencies stay in float32.
        self.rotary = LlamaRotaryEmbedding(self.layer_config).to(self.device)
        self._embeds = [table if self.embed is None else self.embed]

    def embedded(self, ids: Tensor) -> Tensor:
        """Embeddings ``[..., d]`` of token ids."""
        rows: Tensor = self._embeds[0](ids)
        return rows.to(self.dtype)

    def entries(
        self, embeds: Tensor, features: Tensor, positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The residual stream, and queries, keys and values ``[..., heads, n, size]``, of entries.

        Args:
            embeds, features: ``[..., n, d]``. positions: ``[n]`` or ``[..., n]``.
        """
        residual, both = self.inputs(embeds, features)
        flat = positions if positions.ndim == 2 else positions[None]
        cos, sin = self.rotary(embeds, flat)
        if positions.ndim == 1 and embeds.ndim == 2:
            cos, sin = cos[0], sin[0]
        return residual, self.block.self_attn.split(both, (cos, sin))

    def finish(self, residual: Tensor, values: Tensor) -> Tensor:
        """The output ``[..., n, d]`` of entries, given the mean values ``[..., heads, n, size]`` of their attention."""
        hidden = residual + self.block.self_attn.join(values)
        out: Tensor = hidden + self.block.mlp(self.block.post_attention_layernorm(hidden))
        return out

    @property
    def flops(self) -> float:
        """Of one entry, without attention itself."""
        return 2.0 * linear_weights(self)

    def take_table(self, table: Tensor, directory: object) -> None:
        """Take an embedding of its own out of files.

        Args:
            table: ``[vocab_size, d]``. directory: of the files, for the message.

        Raises:
            UserError: another shape, or values that are not finite.
        """
        if table.shape != (self.vocab_size, self.hidden_size) or not bool(
            torch.isfinite(table.float()).all()
        ):
            raise UserError(
                f"embed_tokens.weight in '{directory}' has shape {list(table.shape)} for a target of "
                f"{self.vocab_size} tokens and width {self.hidden_size}, or values that are not finite: copy it again"
            )
        self.embed = nn.Embedding(*table.shape, _weight=table.float())

    def files_weights(self) -> dict[str, Tensor]:
        """Weights by the names that files have, in bfloat16."""
        return {
            name.replace("block.", "layers.0.").replace("embed.", "embed_tokens."): value.bfloat16()
            if value.is_floating_point()
            else value
            for name, value in self.state_dict().items()
        }

    def begin(self) -> TextOfHeads:
        """The head in a new text."""
        return _EntryText(self)


class _EntryText(TextOfHeads):
    """Keys and values of the entries of the text, and of the nodes that follow it."""

    def __init__(self, heads: EntryHeads) -> None:
        self._heads = heads
        self._text: list[int] = []  # whose entries, one fewer than tokens, are cached
        self._kept = KeptKeys()  # of the text's entries, then of the nodes'
        self._forget()

    def _forget(self) -> None:
        self._nodes: dict[tuple[int, ...], int] = {}  # path -> number among the nodes' entries
        self._outs: dict[tuple[int, ...], Tensor] = {}  # path -> output [d]; (): of the text's last entry

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        ids = list(text)
        if ids == self._text:
            return
        known = known_prefix(ids, self._text)
        # Entry i holds token i + 1; the last one is made again if it is known, for its output.
        first = min(max(0, known - 1), len(ids) - 2)
        heads, self._text = self._heads, ids
        self._forget()
        self.steps, self.tokens = self.steps + 1, self.tokens + len(ids) - 1 - first
        device = heads.device
        embeds = heads.embedded(torch.tensor(ids[first + 1 :], device=device))
        features = heads.fused([states[layer][first:] for layer in heads.layers])
        positions = torch.arange(first, len(ids) - 1, device=device)
        residual, (query, key, value) = heads.entries(embeds, features, positions)
        keys, values = self._kept.put(first, key, value)
        sees = torch.arange(keys.shape[1], device=device)[None] <= positions[:, None]
        attended = attend(query, keys, values, sees)
        self._outs[()] = heads.finish(residual, attended)[-1]

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        new = [path for path in dict.fromkeys(paths) if path not in self._outs]
        if new:
            self._grow(new)
        return self._heads.whole_logits(torch.stack([self._outs[path] for path in paths]))

    def _grow(self, paths: Sequence[tuple[int, ...]]) -> None:
        """Add the entries of nodes: each sees the text, its ancestors and itself."""
        heads = self._heads
        device = heads.device
        self.steps, self.tokens = self.steps + 1, self.tokens + len(paths)
        base, before = len(self._text) - 1, len(self._nodes)
        embeds = heads.embedded(torch.tensor([path[-1] for path in paths], device=device))
        features = torch.stack([self._outs[path[:-1]] for path in paths])
        positions = torch.tensor([base + len(path) - 1 for path in paths], device=device)
        residual, (query, key, value) = heads.entries(embeds, features, positions)
        self._nodes |= {path: before + i for i, path in enumerate(paths)}
        keys, values = self._kept.put(base + before, key, value)
        sees = seen_by_nodes(paths, self._nodes, base, device)
        attended = attend(query, keys, values, sees)
        self._outs |= dict(zip(paths, heads.finish(residual, attended), strict=True))
