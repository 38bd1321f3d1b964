"""Attention of heads that draft: projections and rotary positions, over rows of entries, and the heads in a text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import rotate_half

from sprinter.heads.drafting import TextOfHeads

__all__ = ["AttendingText", "HeadAttention", "KeptKeys", "attend", "known_prefix", "rope_of"]

_ROOM = 128  # entries, at first


def known_prefix(ids: Sequence[int], before: Sequence[int]) -> int:
    """Number of tokens that a text has in common with one that was read before."""
    pairs = enumerate(zip(ids, before, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(ids), len(before)))


def _seen_by_nodes(
    paths: Sequence[tuple[int, ...]], nodes: Mapping[tuple[int, ...], int], base: int, device: torch.device
) -> Tensor | None:
    """What nodes of a tree attend to ``[m, base + nodes]``: the text, their ancestors and themselves. None: all.

    Args:
        paths: tokens from the text to each of m nodes. nodes: number of every node by path, theirs included.
        base: number of entries of the text.
    """
    if len(paths) == 1 and len(nodes) == len(paths[0]):  # a chain
        return None
    sees = torch.zeros(len(paths), base + len(nodes), dtype=torch.bool)
    sees[:, :base] = True
    for i, path in enumerate(paths):
        sees[i, [base + nodes[path[:end]] for end in range(1, len(path) + 1)]] = True
    return sees.to(device)


def attend(query: Tensor, keys: Tensor, values: Tensor, sees: Tensor | None = None) -> Tensor:
    """Mean values ``[..., heads, n, size]`` of queries ``[..., heads, n, size]`` over keys and values
    ``[..., heads, k, size]``.

    Args:
        sees: ``[n, k]`` bool; None: all of them.
    """
    if query.ndim > 3:
        return nn.functional.scaled_dot_product_attention(query, keys, values, sees)
    # PyTorch's fused attention on a CPU wants a batch.
    return nn.functional.scaled_dot_product_attention(query[None], keys[None], values[None], sees)[0]


def rope_of(rotary: nn.Module, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a rotary embedding for inputs ``[..., n, d]`` at positions ``[n]`` or ``[..., n]``."""
    cos, sin = rotary(x, positions if positions.ndim == 2 else positions[None])
    return (cos[0], sin[0]) if positions.ndim == 1 and x.ndim == 2 else (cos, sin)


class KeptKeys:
    """Keys and values of a row of entries, in one piece of memory that grows."""

    def __init__(self) -> None:
        self._held: Tensor | None = None  # [2, heads, room, size]

    def put(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write entries ``[heads, n, size]`` from number ``start`` on; returns views of all up to the last."""
        end = start + keys.shape[1]
        if self._held is None or end > self._held.shape[2]:
            more = keys.new_empty(2, keys.shape[0], max(_ROOM, 2 * end), keys.shape[2])
            if self._held is not None:
                more[:, :, :start] = self._held[:, :, :start]
            self._held = more
        self._held[0, :, start:end], self._held[1, :, start:end] = keys, values
        return self._held[0, :, :end], self._held[1, :, :end]


class HeadAttention(nn.Module):
    """Llama's projections for inputs of any width.

    Args:
        config: number and size of heads, and the width of the output.
        inputs: width of the inputs.
        keys: whether it has keys and values of its own; else only queries.
    """

    def __init__(self, config: LlamaConfig, inputs: int, keys: bool = True) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads or config.num_attention_heads
        self.size = config.head_dim or config.hidden_size // config.num_attention_heads
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(inputs, self.heads * self.size, bias=bias)
        if keys:
            self.k_proj = nn.Linear(inputs, self.kv_heads * self.size, bias=bias)
            self.v_proj = nn.Linear(inputs, self.kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=bias)

    def query(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Queries ``[..., heads, n, size]`` of inputs ``[..., n, inputs]``."""
        return self.turned(self.q_proj(x), rope)

    def split(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[..., heads, n, size]`` of inputs ``[..., n, inputs]``; keys are repeated."""
        keys, values = self.repeated(self.k_proj(x), self.v_proj(x), rope)
        return self.query(x, rope), keys, values

    def repeated(self, keys: Tensor, values: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values ``[..., heads, n, size]`` from projections ``[..., n, kv_heads · size]``."""
        times = self.heads // self.kv_heads
        apart = values.reshape(*values.shape[:-1], -1, self.size).transpose(-2, -3)
        return self.turned(keys, rope).repeat_interleave(times, -3), apart.repeat_interleave(times, -3)

    def turned(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """``[..., n, heads · size]`` -> ``[..., heads, n, size]``, turned to their positions."""
        apart, (cos, sin) = x.reshape(*x.shape[:-1], -1, self.size).transpose(-2, -3), rope
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
        return apart * cos + rotate_half(apart) * sin  # type: ignore[no-untyped-call,no-any-return]

    def join(self, values: Tensor) -> Tensor:
        """``[..., heads, n, size]`` -> ``[..., n, d]``."""
        out: Tensor = self.o_proj(values.transpose(-2, -3).flatten(-2))
        return out


class AttendingText(TextOfHeads):
    """Heads with attention in one text: keys and values of the text's entries, and of the nodes that follow it.

    Args:
        device: of the heads. fewer: number of entries that a text has fewer than tokens.
    """

    def __init__(self, device: torch.device, fewer: int) -> None:
        self._device, self._fewer = device, fewer
        self._text: list[int] = []
        self._kept = KeptKeys()  # of the text's entries, then of the nodes'
        self._nodes: dict[tuple[int, ...], int] = {}  # path -> number among the nodes' entries
        self._outs: dict[tuple[int, ...], Tensor] = {}  # path -> output [d]; (): of the text's last entry

    @abstractmethod
    def read_text(self, ids: list[int], known: int, states: Mapping[int, Tensor]) -> Tensor:
        """Read a text of which the first ``known`` tokens were read before; the output ``[d]`` of its last entry."""

    @abstractmethod
    def read_nodes(
        self, ids: Tensor, parents: Tensor, positions: Tensor, start: int, sees: Tensor | None
    ) -> Tensor:
        """Read m nodes; returns their outputs ``[m, d]``.

        Args:
            ids: ``[m]`` tokens. parents: outputs ``[m, d]`` of their parents. positions: ``[m]``.
            start: number of their first entry. sees: as in ``attend``.
        """

    @abstractmethod
    def logits_of(self, outs: Tensor) -> Tensor:
        """Logits ``[m, V]`` of outputs ``[m, d]``."""

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        ids = list(text)
        if ids == self._text:
            return
        known, self._text, self._nodes = known_prefix(ids, self._text), ids, {}
        self.steps += 1
        self._outs = {(): self.read_text(ids, known, states)}

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        new = [path for path in dict.fromkeys(paths) if path not in self._outs]
        if new:
            self._grow(new)
        return self.logits_of(torch.stack([self._outs[path] for path in paths]))

    def _grow(self, paths: Sequence[tuple[int, ...]]) -> None:
        """Add nodes: each sees the text, its ancestors and itself."""
        base, before = len(self._text) - self._fewer, len(self._nodes)
        self.steps, self.tokens = self.steps + 1, self.tokens + len(paths)
        self._nodes |= {path: before + i for i, path in enumerate(paths)}
        ids = torch.tensor([path[-1] for path in paths], device=self._device)
        parents = torch.stack([self._outs[path[:-1]] for path in paths])
        positions = torch.tensor([base + len(path) - 1 for path in paths], device=self._device)
        sees = _seen_by_nodes(paths, self._nodes, base, self._device)
        outs = self.read_nodes(ids, parents, positions, base + before, sees)
        self._outs |= dict(zip(paths, outs, strict=True))
