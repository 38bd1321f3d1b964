"""A model over cache rows as a plain function of tensors, which can be captured.

``RowPass`` takes everything that changes from call to call as a tensor (tokens, positions, slots, visible keys, the
cache's buffers) and has no state of its own, so that it can be exported, compiled, or recorded as a graph. It calls the
transformers model unchanged; only on a CPU ``own_attention`` replaces its attention function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sprinter.errors import SprinterError
from sprinter.models.capture.attention import attention
from sprinter.models.runners.forward import StateFilter, call_model
from sprinter.models.runners.masks import window_mask

__all__ = ["RowBuffers", "RowPass", "own_attention"]

_OWN = "sprinter_rows"


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


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context in which a model that uses scaled_dot_product_attention uses our ``attention`` instead."""
    config = model.config
    before = config._attn_implementation
    if before != "sdpa":
        yield
        return
    ALL_ATTENTION_FUNCTIONS.register(_OWN, partial(_attend, get_ident(), ALL_ATTENTION_FUNCTIONS[before]))
    config._attn_implementation = _OWN
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    owner: int,
    others: Callable[..., tuple[Tensor, None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function with the signature of transformers'; ``attention_mask``: bool ``[1 or batch, 1, n, k]``.

    A forward pass of another thread, while this model is traced, uses the model's usual attention.
    """
    if get_ident() != owner:
        return others(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    _check(kwargs)
    assert attention_mask is not None, "a traced forward pass has a mask"
    batch, _, n, d = query.shape
    mask = attention_mask[:, 0].expand(batch, n, key.shape[2])
    return attention(query, key, value, mask, d**-0.5 if scaling is None else scaling), None


def _check(kwargs: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise SprinterError(f"its attention uses {name}, which compiled attention does not support")
