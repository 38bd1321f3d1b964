"""The llama.cpp runner: rows are sequences of one context; a rewind removes cells from its memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sprinter.errors import RowsError, SprinterError, UserError
from sprinter.models.gguf.library import last_words, library
from sprinter.models.gguf.load import GgufModel
from sprinter.models.interface import ModelOutput, Runner
from sprinter.models.runners.forward import CHUNK, BaseRunner

__all__ = ["LlamaCppRunner"]

_MOST_ROWS = 256  # LLAMA_MAX_SEQ
_F32, _F16 = 0, 1  # GGML_TYPE_F32, GGML_TYPE_F16
_POOLING_NONE = 0
_FLASH_AUTO, _FLASH_OFF = -1, 0


class LlamaCppRunner(BaseRunner):
    """See ``Runner``. Any batch, ragged rows, rewind and copy by marking cells; float32 results on the CPU.

    One context serves all rows, with room for ``batch`` rows of ``max_len`` tokens. llama.cpp computes the output
    embedding at each position with a hidden state. Prefill (``logits=False``, several tokens) therefore returns no
    states, and skips all computation that the cache does not need.

    Args:
        model: the model to run; several runners may share it.
        batch: number of rows.
        max_len: maximum number of tokens in a row.
    """

    name = "llamacpp"

    def __init__(self, model: GgufModel, batch: int, max_len: int) -> None:
        super().__init__(batch, max_len)
        if batch > _MOST_ROWS:
            raise RowsError(f"llama.cpp holds at most {_MOST_ROWS} rows at a time, not {batch}: use fewer")
        self.model, self._llama = model, library()
        self.vocab_size, self.hidden_size, self.device = model.vocab_size, model.hidden_size, model.device
        self._context = self._make_context()
        weakref.finalize(self, _free, self._llama, self._context, model)
        self._memory = self._llama.llama_get_memory(self._context)
        self._room = int(self._llama.llama_n_batch(self._context))
        self._batch = _LlamaBatch(self._llama, self._room)
        self._places = np.arange(max_len, dtype=np.int32)

    @property
    def cache_bytes(self) -> int:
        """Size of the context's cells."""
        return self.batch * self.max_len * self.model.token_bytes

    def rewind(self, lengths: Sequence[int]) -> None:
        """Remove the cells beyond the lengths from the memory."""
        self._check_rewind(lengths)
        for row, (length, present) in enumerate(zip(lengths, self._lengths, strict=True)):
            if length < present:
                self._forget(row, length)
        self._set_lengths(lengths)
        self._empty()

    def copy(self, from_row: int, to_rows: Sequence[int], length: int | None = None) -> None:
        """Let the rows share the cells of ``from_row``; later tokens have their own cells."""
        length = self._check_copy(from_row, to_rows, length)
        for row in to_rows:
            if row != from_row:
                self._forget(row, 0)
                self._llama.llama_memory_seq_cp(self._memory, from_row, row, 0, length)
                self._copy_length(from_row, [row], length)

    def adopt(self, other: Runner, length: int) -> bool:
        """Copy tokens of another context. llama.cpp hands out whole rows, for which there must be room."""
        return other.lengths[0] <= self.max_len and super().adopt(other, length)

    def _adopt(self, other: LlamaCppRunner, length: int) -> None:
        llama = self._llama
        size = llama.llama_state_seq_get_size(other._context, 0)
        state = (ctypes.c_uint8 * size)()
        if llama.llama_state_seq_get_data(other._context, state, size, 0) != size or (
            llama.llama_state_seq_set_data(self._context, state, size, 0) != size
        ):
            raise SprinterError(f"llama.cpp cannot copy a cache of {self.model.path.name}")
        self._forget(0, length)

    def wipe(self, row: int) -> None:
        """Remove cells that an interrupted forward pass may have left. llama.cpp cannot zero single cells, so the whole
        memory is cleared as soon as all rows are empty."""
        self._check_rows([row])
        self._forget(row, self._lengths[row])
        self.soiled = True
        self._empty()

    def _empty(self) -> None:
        if self.soiled and not any(self._lengths):
            self._llama.llama_memory_clear(self._memory, True)
            self.soiled = False

    def _forget(self, row: int, length: int) -> None:
        if not self._llama.llama_memory_seq_rm(self._memory, row, length, -1):
            raise SprinterError(f"llama.cpp cannot forget the last tokens of {self.model.path.name}")

    def _step(
        self, tokens: Tensor, counts: Sequence[int] | None, logits: bool, layers: Sequence[int]
    ) -> ModelOutput:
        every = [tokens.shape[1]] * self.batch if counts is None else counts
        return self._step_some(tokens, every, logits, range(self.batch), layers)

    def _step_some(
        self, tokens: Tensor, counts: Sequence[int], logits: bool, rows: Sequence[int], layers: Sequence[int]
    ) -> ModelOutput:
        n, ids = tokens.shape[1], tokens.cpu().numpy()
        quiet = not logits and n > 1
        if len(rows) == 1 and counts[0] == n <= self._room:
            start = self._lengths[rows[0]]
            self._batch.put(ids[0], self._places[start : start + n], rows[0])
            values, states = self._decode(n, logits, quiet)
            return ModelOutput(values, states)
        values, states = self._decode_rows(ids, counts, logits, quiet, rows)
        if quiet:
            return ModelOutput(None, states.new_empty(len(rows), 0, self.hidden_size))
        holes = any(count < n for count in counts)
        kept = torch.arange(n) < torch.tensor(counts)[:, None] if holes else None
        shape = len(rows), n
        return ModelOutput(
            None if values is None else _placed(values, shape, kept), _placed(states, shape, kept)
        )

    def _decode_rows(
        self, ids: NDArray[Any], counts: Sequence[int], logits: bool, quiet: bool, rows: Sequence[int]
    ) -> tuple[Tensor | None, Tensor]:
        """Decode the rows' tokens as one list, with as many entries per call as the context takes."""
        token = np.concatenate([row[:count] for row, count in zip(ids, counts, strict=True)])
        starts = zip([self._lengths[row] for row in rows], counts, strict=True)
        position = np.concatenate([self._places[start : start + count] for start, count in starts])
        row = np.repeat(np.array(rows), counts)
        values, states = [torch.empty(1, 0, self.vocab_size)], [torch.empty(1, 0, self.hidden_size)]
        for at in range(0, len(token), self._room):
            part = slice(at, at + self._room)
            self._batch.put(token[part], position[part], row[part])
            value, state = self._decode(len(token[part]), logits, quiet)
            states.append(state)
            if value is not None:
                values.append(value)
        return torch.cat(values, 1)[0] if logits else None, torch.cat(states, 1)[0]

    def _decode(self, n: int, logits: bool, quiet: bool) -> tuple[Tensor | None, Tensor]:
        """One call over n batch entries: logits ``[1, n, vocab]``, states ``[1, n, d]``; none if ``quiet``."""
        llama, context = self._llama, self._context
        try:
            if quiet:
                self._ask(n, nothing=True)
            if status := llama.llama_decode(context, self._batch.struct):
                why = last_words(f"status {status}")[:300]
                raise SprinterError(f"llama.cpp failed on {n} tokens of {self.model.path.name}: {why}")
            if quiet:
                return None, torch.empty(1, 0, self.hidden_size)
            values = _read(llama.llama_get_logits(context), n, self.vocab_size) if logits else None
            return values, _read(llama.llama_get_embeddings(context), n, self.hidden_size)
        except BaseException:
            for row, length in enumerate(self._lengths):  # some tokens may be in the memory already
                self._forget(row, length)
            raise
        finally:
            if quiet:
                self._ask(n, nothing=False)

    def _ask(self, n: int, *, nothing: bool) -> None:
        """Set whether the first ``n`` entries of the batch, and the context, return results."""
        self._llama.llama_set_embeddings(self._context, not nothing)
        self._batch.asked[:n] = not nothing

    def _make_context(self) -> Any:
        llama, params = self._llama, self._llama.llama_context_default_params()
        params.n_ctx = self.batch * self.max_len
        params.n_batch = params.n_ubatch = min(CHUNK, params.n_ctx)
        params.n_seq_max, params.kv_unified = self.batch, True
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.embeddings, params.pooling_type = True, _POOLING_NONE
        params.swa_full = True  # cells beyond a sliding window stay, so that a row can be rewound
        exact = self.model.cache_dtype == torch.float32
        params.type_k = params.type_v = _F32 if exact else _F16
        # Fused attention rounds keys and values to float16, and is slower on a CPU for a few tokens.
        params.flash_attn_type = _FLASH_OFF if exact or not self.model.on_gpu else _FLASH_AUTO
        last_words("")
        context = llama.llama_init_from_model(self.model.handle, params)
        if not context:
            raise UserError(
                f"llama.cpp cannot make a cache for {self.batch} x {self.max_len} tokens of {self.model.path.name} "
                f"({last_words('no reason given')[:200]}): use fewer or shorter rows"
            )
        return context


class _LlamaBatch:
    """The input of ``llama_decode``, in our own memory: each token belongs to one sequence.

    ``asked`` marks the entries that return results.
    """

    def __init__(self, llama: Any, room: int) -> None:
        self._token, self._position = np.zeros(room, np.int32), np.zeros(room, np.int32)
        self._row, self._rows = np.zeros(room, np.int32), np.ones(room, np.int32)
        self.asked = np.ones(room, np.int8)
        self._row_of = self._row.ctypes.data + 4 * np.arange(room, dtype=np.uint64)  # pointers, one a token
        self.struct = llama.llama_batch()
        fields: dict[str, NDArray[Any]] = {
            "token": self._token,
            "pos": self._position,
            "n_seq_id": self._rows,
            "seq_id": self._row_of,
            "logits": self.asked,
        }
        kinds = dict(llama.llama_batch._fields_)
        for name, array in fields.items():
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, kinds[name]))

    def put(self, token: NDArray[Any], position: NDArray[Any], row: NDArray[Any] | int) -> None:
        """Write tokens, positions and rows into the first entries."""
        n = self.struct.n_tokens = len(token)
        self._token[:n], self._position[:n], self._row[:n] = token, position, row


def _read(pointer: Any, rows: int, columns: int) -> Tensor:
    """A copy of ``[1, rows, columns]`` floats; the next call overwrites the original."""
    if not pointer:
        raise SprinterError("llama.cpp gave no result")
    values = torch.empty(1, rows, columns)
    ctypes.memmove(values.data_ptr(), pointer, values.nbytes)
    return values


def _placed(values: Tensor, shape: tuple[int, int], kept: Tensor | None) -> Tensor:
    """Values of a list of positions as ``[batch, n, ...]``, with zeros at positions without a result."""
    if kept is None:
        return values.view(*shape, -1)
    whole = torch.zeros(*shape, values.shape[-1])
    whole[kept] = values
    return whole


def _free(llama: Any, context: Any, model: GgufModel) -> None:
    """Free a context. ``model`` is an argument only so that it outlives the context."""
    llama.llama_free(context)
