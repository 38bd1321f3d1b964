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
from sprinter.models.gguf.sequences import MOST, TreeSequences
from sprinter.models.interface import ModelOutput, Runner
from sprinter.models.runners.forward import CHUNK, BaseRunner, Pass

__all__ = ["LlamaCppRunner"]

_F32, _F16 = 0, 1  # GGML_TYPE_F32, GGML_TYPE_F16
_POOLING_NONE = 0
_FLASH_AUTO, _FLASH_OFF = -1, 0


class LlamaCppRunner(BaseRunner):
    """See ``Runner``. Any batch, ragged rows, trees, rewind and copy by marking cells; float32 results on the CPU.

    One context serves all rows, with room for ``batch`` rows of ``max_len`` tokens. llama.cpp computes the output
    embedding at each position with a hidden state. Prefill (``logits=False``, several tokens) therefore returns no
    states, and skips all computation that the cache does not need.

    Args:
        model: the ``GgufModel`` to run; several runners may share it.
        batch: number of rows.
        max_len: maximum number of tokens in a row.
        leaves: largest number of leaves of a tree in a row. Each further one is a sequence, of which llama.cpp has 256,
            and makes each call a little slower; 1: chains alone.

    Raises:
        RowsError: too many rows, or too many for their trees.
    """

    name = "llamacpp"

    def __init__(self, model: Any, batch: int, max_len: int, leaves: int = 1) -> None:
        super().__init__(batch, max_len)
        if batch > MOST:
            raise RowsError(f"llama.cpp holds at most {MOST} rows at a time, not {batch}: use fewer")
        self.model, self._llama = model, library()
        self.vocab_size, self.hidden_size, self.device = model.vocab_size, model.hidden_size, model.device
        if batch * leaves > MOST:
            fewer = f"rows={MOST // leaves}, or " if batch > 1 and leaves <= MOST else ""
            raise RowsError(
                f"llama.cpp holds {MOST} sequences, one for each leaf of a tree, too few for {batch} row(s) with trees "
                f"of up to {leaves} leaves: use {fewer}smaller trees"
            )
        self.leaves: int = leaves
        self.branches = leaves > 1
        sequences = batch * leaves
        self._context = self._make_context(sequences)
        weakref.finalize(self, _free, self._llama, self._context, model)
        self._memory = self._llama.llama_get_memory(self._context)
        self._room = int(self._llama.llama_n_batch(self._context))
        self._sequences = TreeSequences(self._llama, self._memory, batch, sequences)
        self._batch = _LlamaBatch(self._llama, self._room)
        self._places = np.arange(max_len, dtype=np.int32)

    @property
    def cache_bytes(self) -> int:
        """Size of the context's cells, and of the outputs of trees."""
        more = (self.leaves - 1) * self.batch * self.vocab_size * 4  # an output of each sequence is reserved
        return self.batch * self.max_len * int(self.model.token_bytes) + more

    def _drop(self, lengths: Sequence[int]) -> None:
        for row, (length, present) in enumerate(zip(lengths, self._lengths, strict=True)):
            self._cut(row, length)
            if length < present:
                self._forget(row, length)
        self._empty(lengths)

    def _cut(self, row: int, length: int) -> None:
        """Forget what a tree holds beyond a row's first ``length`` slots, and what an interrupt may have left."""
        if row in self._sequences:
            tree = self._trees.get(row)
            self._sequences.cut(row, length, tree and tree.upto(length))

    def _compact(self, row: int, path: Sequence[int], root: int) -> None:
        if row in self._sequences:
            self._sequences.straighten(row, path)

    def _copy(self, from_row: int, row: int, length: int) -> None:
        tree = self._trees.get(from_row)  # the rows share cells; later tokens have their own
        self._sequences.copy(from_row, row, length, tree and tree.upto(length))

    def adopt(self, other: Runner, length: int) -> bool:
        """Copy tokens of another context. llama.cpp hands out whole rows, for which there must be room; no trees."""
        if other.lengths[0] > self.max_len or (isinstance(other, LlamaCppRunner) and 0 in other._sequences):
            return False
        return super().adopt(other, length)

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
        self._cut(row, self._lengths[row])
        self._forget(row, self._lengths[row])
        self.may_hold_nan = True
        self._empty(self._lengths)

    def _empty(self, lengths: Sequence[int]) -> None:
        if self.may_hold_nan and not any(lengths):
            self._llama.llama_memory_clear(self._memory, True)
            self._sequences.reset()
            self.may_hold_nan = False

    def _forget(self, row: int, length: int) -> None:
        if not self._llama.llama_memory_seq_rm(self._memory, row, length, -1):
            raise SprinterError(f"llama.cpp cannot forget the last tokens of {self.model.path.name}")

    def _step(self, asked: Pass) -> ModelOutput:
        ids, counts, logits = asked.tokens.cpu().numpy(), asked.counts, asked.logits
        n, quiet = ids.shape[1], not (logits or asked.branches) and ids.shape[1] > 1
        positions: list[NDArray[Any]] = []
        sequences: list[list[int]] = []
        for i, (row, start, count) in enumerate(zip(asked.rows, asked.starts, counts, strict=True)):
            tree = asked.trees[i] if asked.trees is not None else None
            if count and tree is not None and tree.branches:
                position, own = self._sequences.mark(row, tree, count)
            else:  # linear text is in the row's own sequence
                self._cut(row, start)  # what an interrupt left
                position, own = self._places[start : start + count], [[row]] * count
            positions.append(position)
            sequences += own
        if asked.branches:
            return self._decode_rows(ids, counts, positions, sequences, logits, quiet)
        if len(counts) == 1 and counts[0] == n <= self._room:
            self._batch.put(ids[0], positions[0], asked.rows[0])
            values, states = self._decode(n, logits, quiet)
            return ModelOutput(values, states)
        return self._decode_rows(
            ids, counts, positions, np.repeat(np.array(asked.rows), counts), logits, quiet
        )

    def _decode_rows(
        self,
        ids: NDArray[Any],
        counts: Sequence[int],
        positions: Sequence[NDArray[Any]],
        sequences: NDArray[Any] | list[list[int]],
        logits: bool,
        quiet: bool,
    ) -> ModelOutput:
        """Decode the rows' tokens as one list, with as many entries per call as the context takes.

        ``positions``: of each row's tokens. ``sequences``: that each token of the list belongs to.
        """
        token = np.concatenate([row[:count] for row, count in zip(ids, counts, strict=True)])
        position = np.concatenate(positions)
        values, states = [torch.empty(1, 0, self.vocab_size)], [torch.empty(1, 0, self.hidden_size)]
        for at in range(0, len(token), self._room):
            part = slice(at, at + self._room)
            self._batch.put(token[part], position[part], sequences[part])
            value, state = self._decode(len(token[part]), logits, quiet)
            states.append(state)
            if value is not None:
                values.append(value)
        shape = len(counts), ids.shape[1]
        if quiet:
            return ModelOutput(None, torch.empty(shape[0], 0, self.hidden_size))
        holes = any(count < shape[1] for count in counts)
        kept = torch.arange(shape[1]) < torch.tensor(counts)[:, None] if holes else None
        return ModelOutput(
            _placed(torch.cat(values, 1)[0], shape, kept) if logits else None,
            _placed(torch.cat(states, 1)[0], shape, kept),
        )

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

    def _make_context(self, sequences: int) -> Any:
        llama, params = self._llama, self._llama.llama_context_default_params()
        params.n_ctx = self.batch * self.max_len
        params.n_batch = params.n_ubatch = min(CHUNK, params.n_ctx)
        params.n_seq_max, params.kv_unified = sequences, True
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
    """The input of ``llama_decode``, in our own memory: each token belongs to one sequence, or to several.

    ``asked`` marks the entries that return results.
    """

    def __init__(self, llama: Any, room: int) -> None:
        self._token, self._position = np.zeros(room, np.int32), np.zeros(room, np.int32)
        self._row, self._rows = np.zeros(room, np.int32), np.ones(room, np.int32)
        self._several: NDArray[np.int32] | None = None  # the sequences of tokens that belong to several
        self.asked = np.ones(room, np.int8)
        self._row_of = self._pointers(self._row, np.arange(room))
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

    def put(
        self, token: NDArray[Any], position: NDArray[Any], row: NDArray[Any] | int | list[list[int]]
    ) -> None:
        """Write tokens, positions and rows, or all sequences of each token, into the first entries."""
        n = self.struct.n_tokens = len(token)
        self._token[:n], self._position[:n] = token, position
        if isinstance(row, list):
            self._several = np.array([one for own in row for one in own], np.int32)
            self._rows[:n] = [len(own) for own in row]
            self._row_of[:n] = self._pointers(self._several, np.cumsum(self._rows[:n]) - self._rows[:n])
            return
        if self._several is not None:
            self._several, self._rows[:] = None, 1
            self._row_of[:] = self._pointers(self._row, np.arange(len(self._row)))
        self._row[:n] = row

    @staticmethod
    def _pointers(array: NDArray[np.int32], places: NDArray[Any]) -> NDArray[np.uint64]:
        made: NDArray[np.uint64] = np.uint64(array.ctypes.data) + np.uint64(4) * places.astype(np.uint64)
        return made


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


def _free(llama: Any, context: Any, model: Any) -> None:
    """Free a context. ``model`` is an argument only so that it outlives the context."""
    llama.llama_free(context)
