"""The crop runner: one row over transformers' own growing cache, which a rewind crops.

It is the fallback for models that build their masks themselves (GPT-Neo's local layers, ALiBi).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from sprinter.models.interface import ModelOutput
from sprinter.models.runners.forward import ModelRunner, Pass, map_output

__all__ = ["CropRunner"]


class CropRunner(ModelRunner):
    """See ``Runner``. One row; each forward pass copies the cache, as transformers' own decoding does.

    Args:
        model: a model whose cache can be cropped.
        max_len: maximum number of tokens in the row.
    """

    name = "crop"

    def __init__(self, model: PreTrainedModel, max_len: int) -> None:
        super().__init__(model, 1, max_len)
        # Created without the model's config: sliding layers then keep all keys (a cache of the window alone could not
        # be rewound), and the model masks those outside the window.
        self._cache = DynamicCache()
        self._positions = torch.arange(max_len, device=self.device)[None]

    @property
    def _layers(self) -> list[Any]:
        """Those of the cache that have keys and values."""
        held: list[Any] = self._cache.layers
        return [layer for layer in held if layer.keys is not None]

    @property
    def cache_bytes(self) -> int:
        """Memory of the tensors that the cache holds, or of which it holds a slice."""
        return sum(x.untyped_storage().nbytes() for own in self._layers for x in (own.keys, own.values))

    def _drop(self, lengths: Sequence[int]) -> None:
        for layer in self._layers:  # its tensors are sliced, not copied
            if (excess := layer.get_seq_length() - lengths[0]) > 0:
                layer.crop(-excess)

    def _copy(self, from_row: int, row: int, length: int) -> None:
        raise AssertionError("there is one row")

    def _adopt(self, other: CropRunner, length: int) -> None:
        self._drop([0])  # an interrupted forward pass may have left tokens
        for number, layer in enumerate(other._layers):
            self._cache.update(layer.keys[:, :, :length], layer.values[:, :, :length], number)

    def wipe(self, row: int) -> None:
        """Crop tokens that an interrupted forward pass may have left; rewound tokens are cropped already."""
        self._check_rows([row])
        self._drop(self._lengths)

    def _step(self, asked: Pass) -> ModelOutput:
        (start,), (count,), n = asked.starts, asked.counts, asked.tokens.shape[1]
        if count == 0:
            nothing = torch.zeros(1, n, self.hidden_size, dtype=self.model.dtype, device=self.device)
            said = nothing.new_zeros(1, n, self.vocab_size) if asked.logits else None
            states = nothing.new_zeros(1, n, self.model.config.get_text_config(decoder=True).hidden_size)
            return ModelOutput(said, nothing, (states,) * len(asked.layers))
        positions = (
            {"position_ids": self._positions[:, start : start + count]} if self._takes_positions else {}
        )
        try:
            own = asked._replace(tokens=asked.tokens[:, :count])
            step = self._call(own, cache=self._cache, **positions)
        except BaseException:
            self._drop([start])  # some layers may hold the new tokens already
            raise
        return step if count == n else map_output(step, lambda x: pad(x, (0, 0, 0, n - count)))
