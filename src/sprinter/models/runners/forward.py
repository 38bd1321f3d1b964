"""What runners share: lengths, checks and chunks (all); the call and the hidden states (over transformers models)."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.models.interface import ModelOutput

__all__ = ["CHUNK", "BaseRunner", "ModelRunner", "StateFilter", "call_model", "head_of", "head_sizes"]

CHUNK = 512
"""Most tokens a row is fed in one pass; longer inputs go in pieces, so that memory stays bounded."""


def head_of(model: PreTrainedModel) -> nn.Module:
    """The output embedding, whose input are the hidden states.

    Raises:
        UserError: the model has none, so it is no language model.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Module):
        raise UserError(f"{type(model).__name__} has no output embedding: give a causal language model")
    return head


def head_sizes(model: PreTrainedModel) -> tuple[int, int]:
    """(vocabulary size, hidden size) of the output embedding; quantised weights keep them as attributes."""
    head: Any = head_of(model)
    if hasattr(head, "out_features") and hasattr(head, "in_features"):
        return int(head.out_features), int(head.in_features)
    vocab, hidden = head.weight.shape
    return int(vocab), int(hidden)


class BaseRunner(ABC):
    """The part of a runner that knows no library: lengths, checks, chunks. Subclasses hold model and cache."""

    def __init__(self, batch: int, max_len: int) -> None:
        if batch < 1 or max_len < 1:
            raise ValueError(f"batch={batch} and max_len={max_len} must be at least 1")
        self.batch, self.max_len = batch, max_len
        self._lengths = [0] * batch

    @property
    def lengths(self) -> list[int]:
        """Tokens held, one number a row."""
        return list(self._lengths)

    def extend(
        self,
        tokens: Tensor,
        counts: Sequence[int] | None = None,
        *,
        logits: bool = True,
        rows: Sequence[int] | None = None,
    ) -> ModelOutput:
        """Run the model over new tokens and keep them; long inputs go ``CHUNK`` tokens at a time."""
        n = self._check_extend(tokens, counts, rows)
        with torch.inference_mode():
            if n <= CHUNK:
                return self._extend(tokens, counts, logits, rows)
            steps = [
                self._extend(tokens[:, at : at + CHUNK], _counts_within(counts, at), logits, rows)
                for at in range(0, n, CHUNK)
            ]
            return ModelOutput(
                torch.cat([step.logits for step in steps if step.logits is not None], 1) if logits else None,
                torch.cat([step.hidden for step in steps], 1),
            )

    def _extend(
        self, tokens: Tensor, counts: Sequence[int] | None, logits: bool, rows: Sequence[int] | None
    ) -> ModelOutput:
        n = tokens.shape[1]
        if rows is None:
            step = self._step(tokens, counts, logits)
        else:
            step = self._step_some(tokens, [n] * len(rows) if counts is None else counts, logits, rows)
        # Only now: a pass that was interrupted leaves the rows as they were.
        for i, row in enumerate(range(self.batch) if rows is None else rows):
            self._lengths[row] += n if counts is None else counts[i]
        return step

    @abstractmethod
    def _step(self, tokens: Tensor, counts: Sequence[int] | None, logits: bool) -> ModelOutput:
        """One pass over at most ``CHUNK`` tokens a row, at the end of each row; ``_lengths`` are left alone."""

    def _step_some(
        self, tokens: Tensor, counts: Sequence[int], logits: bool, rows: Sequence[int]
    ) -> ModelOutput:
        """``_step`` for some rows: here the others take part with no tokens."""
        index = torch.tensor(rows, device=tokens.device)
        all_counts = [0] * self.batch
        for row, count in zip(rows, counts, strict=True):
            all_counts[row] = count
        step = self._step(
            tokens.new_zeros(self.batch, tokens.shape[1]).index_copy_(0, index, tokens), all_counts, logits
        )
        return ModelOutput(None if step.logits is None else step.logits[index], step.hidden[index])

    @abstractmethod
    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens of each row."""

    @abstractmethod
    def copy(self, from_row: int, to_rows: Sequence[int]) -> None:
        """Make each of ``to_rows`` hold what ``from_row`` holds."""

    @abstractmethod
    def wipe(self, row: int) -> None:
        """Let nothing that lies beyond the row's length reach a later pass."""

    def _check_extend(
        self, tokens: Tensor, counts: Sequence[int] | None, rows: Sequence[int] | None = None
    ) -> int:
        lengths = self._lengths
        if rows is not None:
            self._check_rows(rows)
            if not rows or len(set(rows)) < len(rows):
                raise ValueError(f"rows={list(rows)} must name at least one row, and none twice")
            lengths = [lengths[row] for row in rows]
        batch = len(lengths)
        if tokens.dim() != 2 or tokens.shape[0] != batch or tokens.shape[1] < 1:
            raise ValueError(f"tokens have shape {list(tokens.shape)}; wanted [{batch}, n] with n >= 1")
        n = tokens.shape[1]
        if counts is None:
            longest = max(lengths) + n
        else:
            if len(counts) != batch or min(counts) < 0 or max(counts) > n:
                raise ValueError(f"counts={list(counts)} must be {batch} numbers from 0 to {n}")
            longest = max(length + count for length, count in zip(lengths, counts, strict=True))
        if longest > self.max_len:
            raise ValueError(f"a row would hold {longest} tokens; this runner has max_len={self.max_len}")
        return n

    def _check_rewind(self, lengths: Sequence[int]) -> None:
        if len(lengths) != self.batch:
            raise ValueError(f"lengths={list(lengths)} must be {self.batch} numbers")
        for row, (length, present) in enumerate(zip(lengths, self._lengths, strict=True)):
            if not 0 <= length <= present:
                raise ValueError(f"row {row} holds {present} tokens and cannot be rewound to {length}")

    def _check_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            if not 0 <= row < self.batch:
                raise ValueError(f"row {row} does not exist: this runner has rows 0 to {self.batch - 1}")


class ModelRunner(BaseRunner):
    """A runner over a transformers causal language model; subclasses hold the cache. ``Runner`` says the verbs.

    The model is put into evaluation mode. Results are inference tensors: clone them to train on them.
    """

    name: str

    def __init__(self, model: PreTrainedModel, batch: int, max_len: int) -> None:
        super().__init__(batch, max_len)
        self.model = model
        model.train(False)
        self.vocab_size, self.hidden_size = head_sizes(model)
        self.device = torch.device(model.device)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def _call(self, tokens: Tensor, logits: bool, **kwargs: Any) -> ModelOutput:
        said, hidden = call_model(self.model, tokens, None if logits else _last, **kwargs)
        return ModelOutput(said if logits else None, hidden)


StateFilter = Callable[[Tensor], Tensor]
"""States ``[batch, n, d]`` → those that the output embedding is to see, ``[batch, k, d]``."""


def _last(hidden: Tensor) -> Tensor:
    return hidden[:, -1:]


def call_model(
    model: PreTrainedModel, tokens: Tensor, keep: StateFilter | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Call the model and catch what enters its output embedding: logits of what ``keep`` lets through, all states.

    The hook sees the true input of the output embedding whatever the model does before it, and what the
    model does after it (logit softcapping, scaling) stays in force. Where logits are not wanted everywhere, the
    product with the vocabulary is not paid for. It lives for one call: the model is left as it was, and several
    runners may share it.
    """
    head = head_of(model)
    caught: list[Tensor] | None = None

    def catch(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if caught is None or caught:
            return None  # an interrupt beside the pass has left this hook behind: it must not touch another's
        caught.append(args[0])
        return None if keep is None else (keep(args[0]),)

    with _turn(head):
        handle = head.register_forward_pre_hook(catch)
        try:
            caught = []
            output = model(input_ids=tokens, use_cache=True, return_dict=True, **kwargs)
        finally:
            handle.remove()
    return output.logits, caught[0]


_turns: WeakKeyDictionary[nn.Module, Lock] = WeakKeyDictionary()
_turns_guard = Lock()


def _turn(head: nn.Module) -> Lock:
    """The lock of a model: a hook on it must not catch the pass of another thread."""
    with _turns_guard:
        return _turns.setdefault(head, Lock())


def _counts_within(counts: Sequence[int] | None, at: int) -> list[int] | None:
    """How many of a row's tokens lie in the chunk that begins at ``at``.

    The last chunk may be narrower than ``CHUNK``; no count exceeds n, so none exceeds what is left.
    """
    return None if counts is None else [min(max(count - at, 0), CHUNK) for count in counts]
