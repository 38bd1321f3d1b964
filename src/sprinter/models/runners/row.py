"""The row runner: preallocated rows with a length each; a rewind lowers a length.

Serves transformers models whose layers attend to the whole past or to a sliding window, and that accept a mask. K and V
are written at each row's own positions into ``[batch, heads, max_len, d]`` buffers, and the model is called with
explicit position ids and a mask from the lengths: a view of one buffer for aligned rows, built anew for ragged ones.

A mask is ``[1 or batch, 1, n, keys]``, in one of two forms: bool (True = visible) for scaled_dot_product_attention, and
additive in the model's dtype (0 = visible) for transformers' eager attention, which adds it to the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.models.interface import ModelOutput
from sprinter.models.runners.forward import CHUNK, ModelRunner, map_output
from sprinter.models.runners.row_cache import RowCache, RowLayer
from sprinter.models.runners.tree import RowTree, TreePass, tree_pass

__all__ = ["BOOLEAN", "RowRunner", "Windows", "window_mask"]

BOOLEAN = ("sdpa",)
"""Implementations of attention that take bool masks."""
Windows = dict[str, int | None]
"""Layer type → sliding window (None: the whole past). A single key "": one mask serves all layers."""

_SHORT = 8  # tokens of a row up to which a pass may read padding in rows that do not take part
_FEW = 7  # rows that take part for each of those, at the least

Mask = Tensor | dict[str, Tensor | None] | None


class RowRunner(ModelRunner):
    """See ``Runner``. Any batch, ragged rows, trees, rewind in constant time.

    Args:
        model: a model for which ``choose.runner_kind`` gives "row".
        batch: number of rows.
        max_len: maximum number of tokens in a row; buffers of that size are allocated at the first forward pass.
        windows: the masks that the model's layers need, see ``Windows``.
        flat: whether its layers can read the tokens of all rows in one line (``models.kernels``), so that a
            forward pass over rows of different lengths costs nothing for padding.
    """

    name = "row"
    branches = True

    def __init__(
        self, model: PreTrainedModel, batch: int, max_len: int, windows: Windows, flat: bool = False
    ) -> None:
        super().__init__(model, batch, max_len)
        self._cache = RowCache(max_len, torch.arange(batch, device=self.device)[:, None])
        self._windows = windows
        self._sdpa = model.config._attn_implementation in BOOLEAN
        self._mask_dtype = torch.bool if self._sdpa else model.dtype
        self._bands = {w: Band(max_len, w, self._mask_dtype, self.device) for w in set(windows.values())}
        self._positions = torch.arange(max_len, device=self.device)[None]
        self._made = False  # whether all layers have allocated their buffers
        self._takes_flat = flat

    @property
    def cache_bytes(self) -> int:
        """Size of the buffers; 0 before the first forward pass."""
        return self._cache.nbytes

    def rewind(self, lengths: Sequence[int]) -> None:
        """Lower the lengths; keys and values beyond them are overwritten later."""
        self._check_rewind(lengths)
        self._set_lengths(lengths)

    def copy(self, from_row: int, to_rows: Sequence[int], length: int | None = None) -> None:
        """Copy the keys and values of ``from_row``, its length and its tree."""
        length = self._check_copy(from_row, to_rows, length)
        with torch.inference_mode():
            for layer in self._cache.layers:
                assert isinstance(layer, RowLayer)
                layer.copy_rows(from_row, to_rows, length)
        self._copy_length(from_row, to_rows, length)

    def _adopt(self, other: RowRunner, length: int) -> None:
        with torch.inference_mode():
            if not self._made:
                self._cache.make_like(other._cache, self.batch, self.max_len)
                self._made = True
            for own, given in zip(self._cache.buffers(), other._cache.buffers(), strict=True):
                own[:1, :, :length] = given[:1, :, :length]

    def wipe(self, row: int) -> None:
        """Zero the keys and values beyond the row's length."""
        self._check_rows([row])
        with torch.inference_mode():
            for layer in self._cache.layers:
                assert isinstance(layer, RowLayer)
                layer.wipe(row, self._lengths[row])

    def _compact(self, row: int, path: Sequence[int], root: int) -> None:
        if list(path) == list(range(root, root + len(path))):
            return
        try:
            with torch.inference_mode():
                for layer in self._cache.layers:
                    assert isinstance(layer, RowLayer)
                    layer.compact(row, path, root)
        except BaseException:
            self._lengths[row] = root  # some layers have moved, others not; the prefix is unchanged
            self._trees.pop(row, None)
            raise

    def _step(
        self, tokens: Tensor, counts: Sequence[int] | None, logits: bool, layers: Sequence[int]
    ) -> ModelOutput:
        n = tokens.shape[1]
        if self._are_aligned(n, counts):
            positions, mask = self._aligned(self._lengths[0], n)
        elif counts is not None and self._goes_flat(n, counts):
            return self._flat(tokens, counts, logits, range(self.batch), layers)
        else:
            positions, mask = self._ragged(n, [n] * self.batch if counts is None else counts)
        step = self._call(
            tokens, logits, layers, position_ids=positions, attention_mask=mask, cache=self._cache
        )
        self._made = True
        return step

    def _are_aligned(self, n: int, counts: Sequence[int] | None) -> bool:
        """Whether all rows have the same length and get n real tokens."""
        if counts is not None and any(count != n for count in counts):
            return False
        return self.batch == 1 or all(length == self._lengths[0] for length in self._lengths)

    def _aligned(self, start: int, n: int) -> tuple[Tensor, Mask]:
        """Positions and masks of rows that all start at ``start`` with n real tokens: slices of precomputed tensors."""
        span = self._cache.span
        span.start, span.keys, span.index = start, start + n, None
        positions = self._positions[:, start : start + n]
        if self.batch > 1:
            positions = positions.expand(self.batch, n)
        return positions, self._masks(lambda window: self._band(window, start, n))

    def _band(self, window: int | None, start: int, n: int) -> Tensor | None:
        # Fused attention needs no mask for one query that sees all keys, nor at the start of the text.
        if self._sdpa and (n == 1 or start == 0) and (window is None or start + n <= window):
            return None
        return self._bands[window].view(start, n)

    def _step_some(
        self, tokens: Tensor, counts: Sequence[int], logits: bool, rows: Sequence[int], layers: Sequence[int]
    ) -> ModelOutput:
        """Only some rows: their keys and values are gathered, which costs less than a pass over all rows, unless
        few are missing, which then read padding."""
        if not self._made:  # the first forward pass allocates buffers for all rows
            if (self.batch - len(rows)) * tokens.shape[1] < CHUNK:  # little padding for the other rows
                return super()._step_some(tokens, counts, logits, rows, layers)
            self._make_buffers()
        if self._goes_flat(tokens.shape[1], counts):
            return self._flat(tokens, counts, logits, rows, layers)
        if self._are_most(rows, counts, tokens.shape[1]):
            return super()._step_some(tokens, counts, logits, rows, layers)
        span, lengths = self._cache.span, self._lengths
        every = span.rows
        try:
            span.rows, span.some = torch.tensor(rows, device=self.device)[:, None], True
            self._lengths = [lengths[row] for row in rows]
            positions, mask = self._ragged(tokens.shape[1], counts)
            return self._call(
                tokens,
                logits,
                layers,
                position_ids=positions,
                attention_mask=mask,
                cache=self._cache,
            )
        finally:
            self._lengths, span.rows, span.some = lengths, every, False

    def _are_most(self, rows: Sequence[int], counts: Sequence[int], n: int) -> bool:
        """Whether few rows are missing in a short pass, none of them longer than the others, and attention would have
        to copy the keys of all others."""
        missing = self.batch - len(rows)
        if self._takes_flat or n > _SHORT or missing * _FEW > len(rows):
            return False
        ends = max(self._lengths[row] + count for row, count in zip(rows, counts, strict=True))
        return max(self._lengths) <= ends

    def _goes_flat(self, n: int, counts: Sequence[int]) -> bool:
        """Whether rows stand in one line: if a tenth would be padding, and each layer has its buffers."""
        return self._takes_flat and self._made and 0 < sum(counts) <= 0.9 * n * len(counts)

    def _flat(
        self, tokens: Tensor, counts: Sequence[int], logits: bool, rows: Sequence[int], layers: Sequence[int]
    ) -> ModelOutput:
        """The tokens of all rows in one line, without padding, whose outputs are zeros."""
        span = self._cache.span
        every, n = span.rows, tokens.shape[1]
        lengths, given = torch.tensor([[self._lengths[row] for row in rows], counts], device=self.device)
        each = torch.arange(n, device=self.device)
        real = each < given[:, None]
        positions = (lengths[:, None] + each)[real][None]
        try:
            numbers = torch.tensor(rows, device=self.device)
            span.rows, span.index = numbers[:, None].expand(-1, n)[real][None], positions
            span.flat, span.start, span.keys = True, int(lengths.max()), int(positions.max()) + 1
            step = self._call(
                tokens[real][None],
                logits,
                layers,
                position_ids=positions,
                attention_mask=self._masks(
                    lambda window: ragged_mask(positions, span.keys, window, self._mask_dtype)
                ),
                cache=self._cache,
            )
        finally:
            span.rows, span.flat = every, False
        return map_output(step, lambda states: _spread(states[0], real))

    def _step_trees(
        self,
        tokens: Tensor,
        counts: Sequence[int] | None,
        logits: bool,
        rows: Sequence[int] | None,
        layers: Sequence[int],
        trees: Sequence[RowTree | None],
    ) -> ModelOutput:
        if rows is not None and not self._made:
            self._make_buffers()
        span = self._cache.span
        every = span.rows
        positions, span.index, keys = self._tree_pass(tokens.shape[1], counts, rows, trees)
        span.start, span.keys = 0, keys.shape[2]
        try:
            if rows is not None:
                span.rows, span.some = torch.tensor(rows, device=self.device)[:, None], True
            step = self._call(
                tokens,
                logits,
                layers,
                position_ids=positions,
                attention_mask=self._masks(lambda w: window_mask(keys, positions, w, self._mask_dtype)),
                cache=self._cache,
            )
        finally:
            span.rows, span.some = every, False
        self._made = True
        return step

    def _tree_pass(
        self,
        n: int,
        counts: Sequence[int] | None,
        rows: Sequence[int] | None,
        trees: Sequence[RowTree | None],
    ) -> TreePass:
        """Positions, slots and visible keys of a forward pass over trees; rows without one read a chain."""
        numbers = range(self.batch) if rows is None else rows
        given = [n] * len(trees) if counts is None else counts
        whole = [
            RowTree(self._lengths[row]).chained(count) if tree is None else tree
            for row, count, tree in zip(numbers, given, trees, strict=True)
        ]
        return tree_pass(whole, given, n, self.max_len, self.device)

    def _make_buffers(self) -> None:
        """Allocate the buffers by a forward pass over one dummy token per row, which is overwritten later."""
        assert not any(self._lengths)
        RowRunner._step(
            self, torch.zeros(self.batch, 1, dtype=torch.long, device=self.device), None, False, ()
        )

    def _ragged(self, n: int, counts: Sequence[int]) -> tuple[Tensor, Mask]:
        """Positions and masks of rows with different lengths or counts."""
        span = self._cache.span
        positions, span.index, span.keys = self._places(n, counts, self._lengths)
        span.start = max(self._lengths)

        def mask(window: int | None) -> Tensor:
            return ragged_mask(positions, span.keys, window, self._mask_dtype)

        return positions, self._masks(mask)

    def _places(self, n: int, counts: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor, int]:
        """Positions ``[rows, n]``, slots ``[rows, n]`` and the number of visible keys of ragged rows."""
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        starts, stops = torch.tensor([lengths, ends], device=self.device)[:, :, None]
        wanted = starts + torch.arange(n, device=self.device)
        # Padding goes to the spare slot, which is never visible: a mask would not hide a NaN.
        slots = wanted.where(wanted < stops, self.max_len)
        # Padding repeats its row's last position: a query that sees no key at all gives NaN.
        return wanted.minimum((stops - 1).clamp(min=0)), slots, max(1, *ends)

    def _masks(self, make: Callable[[int | None], Tensor | None]) -> Mask:
        """The mask in the form that the model takes: one tensor, or a dict with one per layer type."""
        if "" in self._windows:
            return make(self._windows[""])
        return {kind: make(window) for kind, window in self._windows.items()}


def _spread(states: Tensor, real: Tensor) -> Tensor:
    """States ``[tokens, d]`` -> ``[rows, n, d]``; zeros, of memory that is not touched, where ``real`` is false."""
    made = torch.from_numpy(np.zeros((*real.shape, states.shape[-1]), np.float32))
    made[real] = states
    return made


# --- masks ---
def _in_form(visible: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


def ragged_mask(positions: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask of queries at ``positions [batch, n]`` over the first ``keys`` keys: ``[batch, 1, n, keys]``.

    A query at position t sees keys max(0, t - window + 1)..t.
    """
    return window_mask(torch.arange(keys, device=positions.device), positions, window, dtype)


def window_mask(key: Tensor, positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask over keys at positions ``key``: ``[k]``, or ``[batch, n, k]`` if each query has its own."""
    query = positions[:, None, :, None]
    if key.dim() == 3:
        key = key[:, None]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    return _in_form(visible, dtype)


class Band:
    """Masks of aligned rows, as views: a call builds no tensor.

    The mask of n queries from ``start`` on depends only on key − query, so that all masks are windows of one buffer:
    row i, column x is visible iff x <= i + max_len (and x > i + max_len − window).
    """

    def __init__(self, max_len: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._max_len, self._window, self._dtype, self._device = max_len, window, dtype, device
        self._rows = 0
        self._buffer: Tensor | None = None

    def view(self, start: int, n: int) -> Tensor:
        """Mask ``[1, 1, n, start + n]`` of the queries at positions start..start+n−1."""
        if self._buffer is None or n > self._rows:
            self._buffer = self._build(n)
        return self._buffer[:, :, :n, self._max_len - start : self._max_len + n]

    def _build(self, n: int) -> Tensor:
        # Powers of two: short drafts need a small buffer, and growing drafts rebuild it rarely.
        self._rows = max(8, 1 << (n - 1).bit_length())
        positions = torch.arange(self._max_len, self._max_len + self._rows, device=self._device)[None]
        return ragged_mask(positions, self._max_len + self._rows, self._window, self._dtype)
