"""A model over cache rows as a plain function of tensors, which can be captured.

``RowPass`` takes everything that changes from call to call as a tensor (tokens, positions, slots, visible keys, the
cache's buffers) and has no state of its own, so that it can be recorded as a graph. It calls the transformers model
unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from sprinter.models.runners.forward import StateFilter, call_model
from sprinter.models.runners.row import window_mask

__all__ = ["RowBuffers", "RowPass"]


class _RowBuffer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Writes K and V of one layer to each row's slots and returns the first ``seen`` keys.

    Args:
        rows: numbers of the rows in the buffers.
        gather: whether these are not simply all rows in order.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor, seen: int, gather: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self.slots, self.seen = keys, values, slots, seen
        self.rows, self._gather = rows, gather
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the buffers exist from the start")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        head = torch.arange(key_states.shape[1], device=key_states.device)[None, :, None]
        place = (self.rows[:, None, None], head, self.slots[:, None, :])
        self.keys.index_put_(place, key_states)
        self.values.index_put_(place, value_states)
        seen = self.keys.narrow(2, 0, self.seen), self.values.narrow(2, 0, self.seen)
        if not self._gather:
            return seen
        return seen[0].index_select(0, self.rows), seen[1].index_select(0, self.rows)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen, 0

    def get_max_length(self) -> int:
        return -1


class RowBuffers(Cache):
    """transformers' view of the buffers of a forward pass."""

    def __init__(self, layers: Sequence[_RowBuffer]) -> None:
        super().__init__(layers=list(layers))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class RowPass(nn.Module):
    """One forward pass over rows.

    Args:
        model: a model that the row runner serves.
        windows: the masks that its layers need, by layer type; a single key "": one mask for all.
        gather: True: some rows of the buffers take part, in any order; False: all rows, in order.
    """

    def __init__(self, model: PreTrainedModel, windows: dict[str, int | None], gather: bool = False) -> None:
        super().__init__()
        self.model, self._windows, self._gather = model, windows, gather
        self._mask_dtype = torch.bool if model.config._attn_implementation == "sdpa" else model.dtype

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        rows: Tensor,
        keys: Tensor,
        buffers: Sequence[Tensor],
        keep: StateFilter | None = None,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor, ...]:
        """Logits ``[batch, n, vocab]`` (of the states that ``keep`` selects), states ``[batch, n, d]``, and the states
        of ``layers``.

        Args:
            tokens, positions, slots: ``[batch, n]``: ids, positions, and the slots that keys and values are written to.
            rows: ``[batch]``, numbers of the rows in the buffers.
            keys: ``[k]``, 0, 1, ..., k − 1: the visible keys; a query at position t sees those up to t. With trees
                ``[batch, n, k]``: each key's position for each query, ``NOWHERE`` if the query must not see it.
            buffers: K and V of each layer in turn, ``[batch, heads, slots, d]``; written in place.
        """
        pairs = zip(buffers[::2], buffers[1::2], strict=True)
        cache = RowBuffers([_RowBuffer(k, v, rows, slots, keys.shape[-1], self._gather) for k, v in pairs])
        masks = {
            kind: window_mask(keys, positions, window, self._mask_dtype)
            for kind, window in self._windows.items()
        }
        mask = masks.get("", masks)
        return call_model(
            self.model,
            tokens,
            keep,
            layers,
            position_ids=positions,
            attention_mask=mask,
            cache=cache,
        )
