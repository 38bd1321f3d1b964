"""What EAGLE's heads share (arXiv 2401.15077, 2406.16858, 2503.01840): decoder layers over entries, and their text.

Entry i joins the embedding of token i + 1 with a feature of token i: the target's where the target has read token i,
and beyond that the head's own output one entry earlier. The output of entry i gives the law of token i + 2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from sprinter.errors import UserError
from sprinter.heads.attention import AttendingText, HeadAttention, KeptKeys, attend, known_prefix, rope_of
from sprinter.heads.drafting import TextOfHeads, TokenHeads, linear_weights
from sprinter.heads.files import HeadFiles, fill

__all__ = [
    "PICKLE", "Attended", "EntryHeads", "EntryLayer", "EntryText", "NormedLayer", "OnePassText", "StateHeads",
    "check_layer", "kept_attention",
]  # fmt: skip

PICKLE = "pytorch_model.bin"

Attended = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Number of a layer, queries, keys and values ``[..., heads, n, size]`` of its inputs → mean values, as large."""


class EntryLayer(nn.Module):
    """Attention and feed-forward of Llama's decoder layer; what comes before the attention is each head's own.

    Args:
        config: of the layer. inputs: width of what the attention reads. attention: its class.
    """

    def __init__(
        self, config: LlamaConfig, inputs: int, attention: type[HeadAttention] = HeadAttention
    ) -> None:
        super().__init__()
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention(config, inputs)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]

    def finish(self, residual: Tensor, values: Tensor) -> Tensor:
        """The output ``[..., n, d]`` of entries, given the mean values ``[..., heads, n, size]`` of their attention."""
        hidden = residual + self.self_attn.join(values)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class NormedLayer(EntryLayer):
    """A decoder layer whose attention reads its normed input, as Llama's does."""

    def __init__(self, config: LlamaConfig, attention: type[HeadAttention] = HeadAttention) -> None:
        super().__init__(config, config.hidden_size, attention)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class StateHeads(TokenHeads):
    """Heads over entries, of any decoder layer."""

    def __init__(self, hidden_size: int, vocab_size: int, **more: Any) -> None:
        super().__init__(hidden_size, vocab_size, **more)
        self._embeds: list[nn.Module] = []  # in a list, as it is no part of this module

    @abstractmethod
    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """Features ``[..., d]``, given the target's states ``[..., d]`` of each of ``layers``."""

    @abstractmethod
    def whole_logits(self, out: Tensor) -> Tensor:
        """Logits ``[..., V]`` of outputs ``[..., d]``; −inf for tokens that it cannot draft."""

    def embedded(self, ids: Tensor) -> Tensor:
        """Embeddings ``[..., d]`` of token ids."""
        rows: Tensor = self._embeds[0](ids)
        return rows.to(self.dtype)


class EntryHeads(StateHeads):
    """Layers of Llama over entries of embeddings and features.

    Args:
        config: of the layers; ``hidden_size`` d and ``vocab_size`` are the target's.
        layer: the first of them.
        inputs: width of what the fusing layer reads. fusion_bias: whether that layer has a bias.
        more: as in ``TokenHeads``.

    Attributes:
        fc: the fusing layer. blocks: the decoder layers.
        embed: an embedding of its own; None: the target's.
    """

    def __init__(
        self, config: LlamaConfig, layer: EntryLayer, inputs: int, fusion_bias: bool, **more: Any
    ) -> None:
        super().__init__(config.hidden_size, config.vocab_size, **more)
        self.layer_config = config
        self.fc = nn.Linear(inputs, config.hidden_size, bias=fusion_bias)
        self.blocks = nn.ModuleList(
            [layer, *(NormedLayer(config) for _ in range(1, config.num_hidden_layers))]
        )
        self.rotary = LlamaRotaryEmbedding(config)
        self.embed: nn.Embedding | None = None

    @abstractmethod
    def inputs(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream ``[..., d]`` of entries, and what the first attention reads ``[..., inputs]``."""

    @abstractmethod
    def draft_logits(self, out: Tensor) -> Tensor:
        """Logits ``[..., k]`` of the k tokens that it can draft, given outputs ``[..., d]``."""

    def join(self, target: nn.Module) -> None:
        """Take the target's embedding, and move beside it."""
        table = target.get_input_embeddings()  # type: ignore[operator]
        self.move_beside(target)
        # Its frequencies stay in float32.
        self.rotary = LlamaRotaryEmbedding(self.layer_config).to(self.device)
        self._embeds = [table if self.embed is None else self.embed]

    def outputs(self, embeds: Tensor, features: Tensor, positions: Tensor, attended: Attended) -> Tensor:
        """Outputs ``[..., n, d]`` of entries.

        Args:
            embeds, features: ``[..., n, d]``. positions: ``[n]`` or ``[..., n]``.
        """
        x, read = self.inputs(embeds, features)
        rope = rope_of(self.rotary, embeds, positions)
        blocks: list[Any] = [*self.blocks]
        for number, block in enumerate(blocks):
            read = block.input_layernorm(x) if number else read
            x = block.finish(x, attended(number, *block.self_attn.split(read, rope)))
        return x

    @property
    def flops(self) -> float:
        """Of one entry, without attention itself."""
        return 2.0 * linear_weights(self)

    def fill(self, weights: Mapping[str, Tensor], directory: object) -> None:
        """Load weights by the names that files have, an embedding of its own ``[vocab_size, d]`` if there is one.

        Args:
            directory: of the files, for messages.

        Raises:
            KeyError, UserError: as ``heads.files.fill``; an embedding of another shape, or that is not finite.
        """
        own = {name.replace("layers.", "blocks.", 1): value for name, value in weights.items()}
        table = own.pop("embed_tokens.weight", None)
        fill(self, own, directory)
        if table is None:
            return
        finite = bool(torch.isfinite(table.float()).all())
        if table.shape != (self.vocab_size, self.hidden_size) or not finite:
            raise UserError(
                f"embed_tokens.weight in '{directory}' has shape {list(table.shape)} for a target of "
                f"{self.vocab_size} tokens and width {self.hidden_size}, or values that are not finite: copy it again"
            )
        self.embed = nn.Embedding(*table.shape, _weight=table.float())

    def file_weights(self) -> dict[str, Tensor]:
        """Weights by the names that the authors' files have."""
        return {
            name.replace("blocks.", "layers.").replace("embed.", "embed_tokens."): value
            for name, value in self.state_dict().items()
        }

    def begin(self) -> TextOfHeads:
        """The head in a new text."""
        return _LlamaText(self)


def check_layer(
    kind: str, files: HeadFiles, layer: Mapping[str, Any], most: int, hint: str, *more: tuple[str, bool]
) -> None:
    """Refuse what would be read wrongly.

    Args:
        kind: of the head. layer: fields of its layers. most: number of these. hint: of the heads that are read.
        more: what else it may have that is not supported, and whether it has.

    Raises:
        UserError: it has.
    """
    own, count = layer.get("model_type", "llama"), layer.get("num_hidden_layers", 1)
    types = layer.get("layer_types")
    other = [
        one
        for one in (own, *(types if isinstance(types, list) else ()))
        if one not in ("llama", "full_attention")
    ]
    several = isinstance(count, int) and count > most
    for what, wrong in (
        (f"a layer of type '{''.join(map(str, other[:1]))}'", bool(other)),
        (f"{count} layers", several),
        *more,
    ):
        if wrong:
            raise UserError(
                f"the {kind} head in '{files.directory}' has {what}, which is not supported: give one with at most "
                f"{most} layer{'s' * (most > 1)} of type 'llama', {hint}"
            )


def kept_attention(kept: Sequence[KeptKeys], start: int, sees: Tensor | None) -> Attended:
    """Attention of entries from number ``start`` on over those that each layer has kept; ``sees`` as in ``attend``."""
    return lambda number, query, key, value: attend(query, *kept[number].put(start, key, value), sees)


class EntryText(AttendingText):
    """A text of n tokens has n − 1 entries: entry i holds token i + 1."""

    def __init__(self, heads: StateHeads) -> None:
        super().__init__(heads.device, fewer=1)
        self._heads = heads

    @abstractmethod
    def outputs(
        self, embeds: Tensor, features: Tensor, positions: Tensor, start: int, sees: Tensor | None
    ) -> Tensor:
        """Outputs ``[n, d]`` of n entries, the first of which has the number ``start``; ``sees`` as in ``attend``."""

    def read_text(self, ids: list[int], known: int, states: Mapping[int, Tensor]) -> Tensor:
        first = min(
            max(0, known - 1), len(ids) - 2
        )  # the last entry is made again if it is known, for its output
        heads, device = self._heads, self._device
        self.tokens += len(ids) - 1 - first
        embeds = heads.embedded(torch.tensor(ids[first + 1 :], device=device))
        features = heads.fused([states[layer][first:] for layer in heads.layers])
        positions = torch.arange(first, len(ids) - 1, device=device)
        sees = torch.arange(len(ids) - 1, device=device)[None] <= positions[:, None]
        return self.outputs(embeds, features, positions, first, sees)[-1]

    def read_nodes(
        self, ids: Tensor, parents: Tensor, positions: Tensor, start: int, sees: Tensor | None
    ) -> Tensor:
        return self.outputs(self._heads.embedded(ids), parents, positions, start, sees)

    def logits_of(self, outs: Tensor) -> Tensor:
        return self._heads.whole_logits(outs)


class _LlamaText(EntryText):
    def __init__(self, heads: EntryHeads) -> None:
        super().__init__(heads)
        self._own, self._keys = heads, [KeptKeys() for _ in heads.blocks]

    def outputs(
        self, embeds: Tensor, features: Tensor, positions: Tensor, start: int, sees: Tensor | None
    ) -> Tensor:
        return self._own.outputs(embeds, features, positions, kept_attention(self._keys, start, sees))


class OnePassText(TextOfHeads):
    """Heads that draft all tokens in one pass: the law of each depends on the text alone, not on drafted tokens."""

    def __init__(self, heads: StateHeads) -> None:
        self._heads = heads
        self._text: list[int] = []
        self._outs: Tensor | None = None

    @abstractmethod
    def draft(self, ids: list[int], first: int, features: Tensor) -> Tensor:
        """One pass after a text; returns an output ``[count, d]`` for each token to come.

        Args:
            ids: the text. first: what was read of it before, in states. features: ``[n, d]`` of those from there on.
        """

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        ids = list(text)
        if ids == self._text:
            return
        first = min(max(0, known_prefix(ids, self._text) - 1), len(ids) - 2)
        self._text, self.steps = ids, self.steps + 1
        features = self._heads.fused([states[layer][first:] for layer in self._heads.layers])
        self._outs = self.draft(ids, first, features)

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        depth = len(paths[0])
        if self._outs is None or depth >= len(self._outs):
            return None
        return self._heads.whole_logits(self._outs[depth : depth + 1])
