"""Base classes of the runners.

``BaseRunner``: lengths, trees, argument checks and prefill chunks, for all runners. ``ModelRunner``: the call of the
model and its hidden states, for runners over transformers models.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from operator import add
from threading import Lock
from typing import Any, NamedTuple, Protocol
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from sprinter.errors import UserError
from sprinter.models.cache_name import model_cache_name
from sprinter.models.devices import place_of, refuse_moved
from sprinter.models.interface import ModelOutput, Runner
from sprinter.models.runners.onednn import CopiedWeights
from sprinter.models.runners.tree import RowTree

__all__ = [
    "CHUNK", "BaseRunner", "ModelRunner", "Pass", "StateFilter",
    "call_model", "decoder_layers", "head_of", "head_sizes", "map_output", "turn",
]  # fmt: skip

CHUNK = 512
"""Maximum number of tokens per row in one forward pass; longer inputs are split, so that memory stays bounded."""


def head_of(model: PreTrainedModel) -> nn.Module:
    """The output embedding, whose inputs are the hidden states.

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


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers, first to last.

    Raises:
        NotImplementedError: the model's class does not expose them in a known way.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    raise NotImplementedError(f"the decoder layers of {type(model).__name__} are not found")


def map_output(step: ModelOutput, change: Callable[[Tensor], Tensor]) -> ModelOutput:
    """Apply a function to each tensor of an output."""
    return step._replace(
        logits=None if step.logits is None else change(step.logits),
        hidden=change(step.hidden),
        layers=tuple(map(change, step.layers)),
    )


class Pass(NamedTuple):
    """A forward pass over new tokens of some rows, checked.

    Attributes:
        tokens: ``[rows, n]``, right-padded.
        rows: their numbers. whole: whether they are all of the runner's, in order.
        starts: number of tokens that each holds before. counts: number of its new tokens, without padding.
        logits, layers, line: see ``Runner.extend``; layers are counted from the first.
        trees: by row, the new tokens included; None, also for a row: plain text.
        branches: whether tokens of a tree that branches are read; else all tokens are read like chains.
    """

    tokens: Tensor
    rows: Sequence[int]
    whole: bool
    starts: Sequence[int]
    counts: Sequence[int]
    logits: bool
    layers: tuple[int, ...]
    trees: Sequence[RowTree | None] | None = None
    branches: bool = False
    line: bool = False

    @property
    def aligned(self) -> bool:
        """Whether these are all rows, of the same length, with as many new tokens, of no tree that branches."""
        starts, counts = list(self.starts), list(self.counts)
        same = starts.count(starts[0]) == counts.count(self.tokens.shape[1]) == len(starts)
        return self.whole and same and not self.branches

    def chunk(self, at: int) -> Pass:
        """The part of it that begins with token ``at`` of each row."""
        own = self.tokens[:, at : at + CHUNK]
        starts = [start + min(count, at) for start, count in zip(self.starts, self.counts, strict=True)]
        # The last one may be narrower; no count exceeds its width, as no row has more than n tokens.
        counts = [min(max(count - at, 0), CHUNK) for count in self.counts]
        return self._replace(tokens=own, starts=starts, counts=counts)


class BaseRunner(Runner):
    """The library-independent part of a runner: lengths, trees, checks, chunks. Subclasses hold model and cache.

    The parents of a tree without branches are recorded, but its tokens are read and stored like a chain.
    """

    def __init__(self, batch: int, max_len: int) -> None:
        if batch < 1 or max_len < 1:
            raise ValueError(f"batch={batch} and max_len={max_len} must be at least 1")
        self.batch, self.max_len = batch, max_len
        self._lengths = [0] * batch
        self._trees: dict[int, RowTree] = {}  # by row; rows that are missing are linear

    # --- what subclasses do ---
    @abstractmethod
    def _step(self, asked: Pass) -> ModelOutput:
        """One forward pass over at most ``CHUNK`` new tokens per row; does not change ``_lengths``."""

    @abstractmethod
    def _copy(self, from_row: int, row: int, length: int) -> None:
        """Copy the first slots of a row to another; does not change ``_lengths``."""

    @abstractmethod
    def _adopt(self, other: Any, length: int) -> None:
        """``adopt`` from a runner of this class; does not change ``_lengths``."""

    def _drop(self, lengths: Sequence[int]) -> None:
        """Forget the tokens of rows beyond these lengths, before ``_lengths`` are lowered."""

    def _compact(self, row: int, path: Sequence[int], root: int) -> None:
        """Move the contents of a path's slots to the slots from ``root`` on; if interrupted, the row has its prefix."""
        assert list(path) == list(range(root, root + len(path))), "a chain lies there already"

    def _check_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Layer numbers counted from the first; raises if the runner cannot return these layers."""
        raise NotImplementedError(
            f"the {self.name} runner does not hand out states of layers: use hidden_layers=()"
        )

    # --- what callers see ---
    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each row."""
        return list(self._lengths)

    def extend(
        self,
        tokens: Tensor,
        counts: Sequence[int] | None = None,
        *,
        logits: bool = True,
        rows: Sequence[int] | None = None,
        parents: Sequence[Sequence[int] | None] | None = None,
        hidden_layers: Sequence[int] = (),
        line: bool = False,
    ) -> ModelOutput:
        """See ``Runner``; long inputs are read in chunks of ``CHUNK`` tokens."""
        asked = self._checked(tokens, counts, logits, rows, parents, hidden_layers)
        with torch.inference_mode():
            if tokens.shape[1] <= CHUNK:
                return self._read(asked._replace(line=line))
            steps = [self._read(asked.chunk(at)) for at in range(0, tokens.shape[1], CHUNK)]
            return ModelOutput(
                torch.cat([step.logits for step in steps if step.logits is not None], 1) if logits else None,
                torch.cat([step.hidden for step in steps], 1),
                tuple(torch.cat(parts, 1) for parts in zip(*(step.layers for step in steps), strict=True)),
            )

    def rewind(self, lengths: Sequence[int]) -> None:
        """See ``Runner``."""
        if len(lengths) != self.batch:
            raise ValueError(f"lengths={list(lengths)} must be {self.batch} numbers")
        for row, (length, present) in enumerate(zip(lengths, self._lengths, strict=True)):
            if not 0 <= length <= present:
                raise ValueError(f"row {row} holds {present} tokens and cannot be rewound to {length}")
        self._drop(lengths)
        self._lengths = list(lengths)
        for row in list(self._trees):
            self._set_tree(row, self._trees[row])

    def commit_path(self, row: int, path: Sequence[int]) -> None:
        """Keep one path of a row's tree and move it right behind the linear prefix."""
        self._check_rows([row])
        tree = self._trees.get(row) or RowTree(self._lengths[row])
        tree.check_path(path)
        try:
            self._compact(row, path, tree.root)
        except BaseException:
            self._lengths[row] = tree.root  # the prefix is unchanged
            self._trees.pop(row, None)
            raise
        lengths = self.lengths
        lengths[row] = tree.root + len(path)
        self.rewind(lengths)
        self._trees.pop(row, None)

    def copy(self, from_row: int, to_rows: Sequence[int], length: int | None = None) -> None:
        """See ``Runner``."""
        self._check_rows([from_row, *to_rows])
        length = self._lengths[from_row] if length is None else self._check_length(from_row, length)
        for row in to_rows:
            if row != from_row:
                with torch.inference_mode():
                    self._copy(from_row, row, length)
                self._lengths[row] = length
                self._set_tree(row, self._trees.get(from_row))
        if from_row in to_rows:
            self.rewind([length if row == from_row else own for row, own in enumerate(self._lengths)])

    def adopt(self, other: Runner, length: int) -> bool:
        """Copy the first slots of another runner's row 0, if it is of the same kind."""
        if not isinstance(other, BaseRunner) or type(other) is not type(self):
            return False
        assert self._lengths[0] == 0
        if other._check_length(0, length):
            with torch.inference_mode():
                self._adopt(other, length)
            self._lengths[0] = length
        return True

    # --- passes ---
    def _checked(
        self,
        tokens: Tensor,
        counts: Sequence[int] | None = None,
        logits: bool = True,
        rows: Sequence[int] | None = None,
        parents: Sequence[Sequence[int] | None] | None = None,
        layers: Sequence[int] = (),
    ) -> Pass:
        """The pass that ``extend`` is asked for.

        Raises:
            ValueError: see ``Runner.extend``.
        """
        lengths, numbers, whole = self._lengths, range(self.batch), True
        if rows is not None and list(rows) != list(numbers):
            self._check_rows(rows)
            if not rows or len(set(rows)) < len(rows):
                raise ValueError(f"rows={list(rows)} must name at least one row, and none twice")
            lengths, numbers, whole = [lengths[row] for row in rows], rows, False  # type: ignore[assignment]
        batch = len(lengths)
        if tokens.dim() != 2 or tokens.shape[0] != batch or tokens.shape[1] < 1:
            raise ValueError(f"tokens have shape {list(tokens.shape)}; wanted [{batch}, n] with n >= 1")
        n = tokens.shape[1]
        if counts is None:
            counts, longest = [n] * batch, max(lengths) + n
        else:
            if len(counts) != batch or min(counts) < 0 or max(counts) > n:
                raise ValueError(f"counts={list(counts)} must be {batch} numbers from 0 to {n}")
            longest = max(map(add, lengths, counts))
        if longest > self.max_len:
            raise ValueError(f"a row would hold {longest} tokens; this runner has max_len={self.max_len}")
        own = self._check_layers(layers) if layers else ()
        asked = Pass(tokens, numbers, whole, list(lengths), counts, logits, own)
        if parents is None and not self._trees:
            return asked
        return self._with_trees(asked, parents)

    def _with_trees(self, asked: Pass, parents: Sequence[Sequence[int] | None] | None) -> Pass:
        """A pass with the trees of its rows, new tokens included."""
        given = [None] * len(asked.rows) if parents is None else parents
        if len(given) != len(asked.rows):
            raise ValueError(
                f"parents has {len(given)} lists; wanted one for each of the {len(asked.rows)} rows"
            )
        trees: list[RowTree | None] = []
        for row, count, own in zip(asked.rows, asked.counts, given, strict=True):
            tree = self._trees.get(row)
            if own is None:
                if tree is not None and tree.branches and count:
                    raise ValueError(
                        f"row {row} holds a tree with branches: give parents, or keep a path of it first"
                    )
                trees.append(None if count else tree)
                continue
            if len(own) != count:
                raise ValueError(
                    f"parents has {len(own)} slots for row {row}; wanted one for each of its {count} tokens"
                )
            trees.append((tree or RowTree(self._lengths[row])).grown(own))
        branches = any(
            count and tree is not None and tree.branches
            for tree, count in zip(trees, asked.counts, strict=True)
        )
        if branches and not self.branches:
            raise ValueError(
                f"the {self.name} runner reads no branches: each token must follow the one before it"
            )
        if branches and (n := asked.tokens.shape[1]) > CHUNK:
            raise ValueError(f"a tree is read in one pass of at most {CHUNK} tokens, not {n}")
        return asked._replace(trees=trees, branches=branches)

    def _read(self, asked: Pass) -> ModelOutput:
        step = self._step(asked)
        self._advance(asked)  # last, so that an interrupted forward pass leaves the rows unchanged
        return step

    def _advance(self, asked: Pass) -> None:
        """Record the tokens and trees that were read."""
        for row, start, count in zip(asked.rows, asked.starts, asked.counts, strict=True):
            self._lengths[row] = start + count
        if asked.trees is not None:
            for row, tree in zip(asked.rows, asked.trees, strict=True):
                self._set_tree(row, tree)

    def _set_tree(self, row: int, tree: RowTree | None) -> None:
        """Give a row the part of a tree that is within its length."""
        left = tree and tree.upto(self._lengths[row])
        if left is None:
            self._trees.pop(row, None)
        else:
            self._trees[row] = left

    def _check_length(self, row: int, length: int) -> int:
        if not 0 <= length <= self._lengths[row]:
            raise ValueError(
                f"row {row} holds {self._lengths[row]} tokens, of which {length} cannot be copied"
            )
        return length

    def _check_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            if not 0 <= row < self.batch:
                raise ValueError(f"row {row} does not exist: this runner has rows 0 to {self.batch - 1}")


class ModelRunner(BaseRunner):
    """A runner over a transformers causal language model; subclasses hold the cache. See ``Runner`` for its methods.

    The model is put into evaluation mode. Results are inference tensors: clone them to train on them. ``straight``: a
    quicker way for some passes (``models.kernels``), or None. ``copies``: of weights that the model reads, or None.
    """

    def __init__(self, model: PreTrainedModel, batch: int, max_len: int) -> None:
        super().__init__(batch, max_len)
        self.model = model
        model.train(False)
        self.vocab_size, self.hidden_size = head_sizes(model)
        self._head = head_of(model)  # which takes a tenth of a draft step to find
        self.device, self._place = torch.device(model.device), place_of(model)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.straight: StraightPass | None = None
        self.copies: CopiedWeights | None = None

    def _call(self, asked: Pass, **kwargs: Any) -> ModelOutput:
        """The model's output for a pass; ``kwargs``: what else it is given."""
        try:
            if self.straight is not None:
                with turn(self._head):
                    return ModelOutput(
                        *self.straight(asked.tokens, asked.logits, layers=asked.layers, **kwargs)
                    )
            if self.copies is not None:
                if torch.is_autocast_enabled("cpu"):
                    with torch.autocast("cpu", enabled=False):  # oneDNN's layers read float32 alone
                        return self._call(asked, **kwargs)
                if any(one.data_ptr() != at or one._version != then for one, at, then in self.copies.read):
                    self.copies = self.copies.again()
            keep = None if asked.logits else _last
            said, hidden, *states = call_model(
                self.model, self._head, asked.tokens, keep, asked.layers, **kwargs
            )
        except RuntimeError as error:
            refuse_moved(self.model, self._place, error)
            raise
        return ModelOutput(said if asked.logits else None, hidden, tuple(states))

    def _check_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        count = len(decoder_layers(self.model))
        if any(not -count <= layer < count for layer in layers):
            raise ValueError(
                f"layers={list(layers)}: this model has layers 0 to {count - 1}, or -{count} to -1"
            )
        return tuple(layer % count for layer in layers)


class StraightPass(Protocol):
    """Passes of a model by our kernels.

    Attributes:
        drafts: whether ``draft`` can be called. size: number of parameters.
    """

    drafts: bool
    size: int

    def __call__(
        self,
        tokens: Tensor,
        logits: bool,
        position_ids: Tensor,
        attention_mask: Any,
        cache: Any,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor | None, Tensor, tuple[Tensor, ...]]:
        """Tokens, whether logits are wanted, what the model is given -> logits or None, states, those of layers."""

    def draft(
        self, first: Tensor, states: Tensor, cache: Any, **who: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See ``RowRunner.draft``."""


StateFilter = Callable[[Tensor], Tensor]
"""States ``[batch, n, d]`` → the states to compute logits for, ``[batch, k, d]``."""


def _last(hidden: Tensor) -> Tensor:
    return hidden[:, -1:]


def call_model(
    model: PreTrainedModel,
    head: nn.Module,
    tokens: Tensor,
    keep: StateFilter | None,
    layers: Sequence[int] = (),
    *,
    cache: Cache,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Call the model and capture the input of its output embedding, ``head``, with a hook.

    The hook sees the exact input of the output embedding, independent of the model's code before it; what the model
    does afterwards (logit softcapping, scaling) still applies. Positions that ``keep`` drops cost no product with the
    vocabulary. Hooks are removed after the call, so that several runners may share a model.

    Returns:
        Logits of the states that ``keep`` selects, all states, and the outputs of ``layers``, without the final norm.
    """
    caught: list[Tensor] | None = None
    states: dict[int, Tensor] = {}
    handles: list[Any] = []

    def catch(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if caught is None or caught:
            return None  # an interrupt left this hook behind: it must not change a later forward pass
        caught.append(args[0])
        return None if keep is None else (keep(args[0]),)

    def noting(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        # A function of this module, not a partial: the kernels know hooks that only note by it.
        def note(_: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            states[layer] = output if isinstance(output, Tensor) else output[0]

        return note

    with turn(head):
        try:
            each = ((layer, decoder_layers(model)[layer]) for layer in set(layers))
            handles += (part.register_forward_hook(noting(layer)) for layer, part in each)
            handles.append(head.register_forward_pre_hook(catch))
            caught = []
            kwargs[model_cache_name(type(model).forward)] = cache
            output = model(input_ids=tokens, use_cache=True, return_dict=True, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
    return (output.logits, caught[0], *(states[layer] for layer in layers))


_turns: dict[int, Lock] = {}
_turns_guard = Lock()


def turn(head: nn.Module) -> Lock:
    """The lock of a model, and of others that share its hooks: they must not see another thread's forward pass."""
    hooks = head._forward_pre_hooks
    with _turns_guard:
        if id(hooks) not in _turns:
            _turns[id(hooks)] = Lock()
            finalize(hooks, _turns.pop, id(hooks), None)
        return _turns[id(hooks)]
