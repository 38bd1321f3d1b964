"""The crop runner: one row over transformers' own growing cache, which a rewind crops.

It is the fallback for models that build their masks themselves (GPT-Neo's local layers, ALiBi).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from sprinter.models.interface import ModelOutput
from sprinter.models.runners.forward import ModelRunner, map_output

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
    def cache_bytes(self) -> int:
        """Memory of the tensors that the cache holds, or of which it holds a slice."""
        return sum(x.untyped_storage().nbytes() for pair in self._keys_values() for x in pair)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[0]`` tokens: every layer's tensors are sliced, not copied."""
        self._check_rewind(lengths)
        self._set_lengths(lengths)
        self._crop()

    def copy(self, from_row: int, to_rows: Sequence[int], length: int | None = None) -> None:
        """Nothing to copy: there is one row, whose other tokens are forgotten."""
        self.rewind([self._check_copy(from_row, to_rows, length)])

    def _adopt(self, other: CropRunner, length: int) -> None:
        self._crop()  # an interrupted forward pass may have left tokens
        with torch.inference_mode():
            for number, (keys, values) in enumerate(other._keys_values()):
                self._cache.update(keys[:, :, :length], values[:, :, :length], number)

    def _keys_values(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of each layer that has any."""
        for layer in self._cache.layers:
            assert isinstance(layer, DynamicLayer)
            if layer.keys is not None and layer.values is not None:
                yield layer.keys, layer.values

    def wipe(self, row: int) -> None:
        """Crop tokens that an interrupted forward pass may have left; rewound tokens are cropped already."""
        self._check_rows([row])
        self._crop()

    def _step(
        self, tokens: Tensor, counts: Sequence[int] | None, logits: bool, layers: Sequence[int]
    ) -> ModelOutput:
        n = tokens.shape[1]
        count = n if counts is None else counts[0]
        if count == 0:
            nothing = torch.zeros(1, n, self.hidden_size, dtype=self.model.dtype, device=self.device)
            said = nothing.new_zeros(1, n, self.vocab_size) if logits else None
            states = nothing.new_zeros(1, n, self.model.config.get_text_config(decoder=True).hidden_size)
            return ModelOutput(said, nothing, (states,) * len(layers))
        step = self._pass(tokens[:, :count], logits, layers)
        return step if count == n else map_output(step, lambda x: pad(x, (0, 0, 0, n - count)))

    def _pass(self, tokens: Tensor, logits: bool, layers: Sequence[int]) -> ModelOutput:
        start, n = self._lengths[0], tokens.shape[1]
        positions = {"position_ids": self._positions[:, start : start + n]} if self._takes_positions else {}
        try:
            return self._call(tokens, logits, layers, cache=self._cache, **positions)
        except BaseException:
            self._crop()  # some layers may hold the new tokens already
            raise

    def _crop(self) -> None:
        """Crop every layer to the row's length."""
        for layer in self._cache.layers:
            assert isinstance(layer, DynamicLayer)
            excess = layer.get_seq_length() - self._lengths[0]
            if excess > 0:
                layer.crop(-excess)
