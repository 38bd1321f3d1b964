"""The texts in one model's rows: what they begin with, their prompts' prefill, and what they leave for others."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sprinter.decode.sequence import ReadState, TokenSequence
from sprinter.engine.backends.base import FINAL, PromptRead, PromptRow, RowInput
from sprinter.engine.prefix import HeldRows, up_to_boundary
from sprinter.models.interface import ModelOutput, Runner

__all__ = ["TextRows"]


class TextRows(ABC):
    """One model's rows and the texts in them; subclasses run passes.

    Args:
        runner: holds the rows.
        vocab: size of the common vocabulary; logits beyond it are dropped.
        name: "target" or "draft", for errors.
        held: what the rows hold from earlier texts; None: they are emptied, and nothing is reused.

    Attributes:
        owners: by row, of the text that is about to begin in it; "" where nobody says so.
    """

    def __init__(self, runner: Runner, vocab: int, name: str, held: HeldRows | None = None) -> None:
        self.runner, self.vocab, self.name = runner, vocab, name
        self.held = HeldRows(runner.batch) if held is None else held
        # Rows with slots that no finite logits have verified: to discard these (maybe NaN), a mask is not enough.
        self._unverified: set[int] = set()
        self._idle = set(range(runner.batch))
        self.owners: dict[int, str] = {}
        if held is None:
            runner.rewind([0] * runner.batch)

    def rewind(self, lengths: Mapping[int, int]) -> None:
        """Discard all but the first tokens of some rows; ``lengths``: tokens to keep, by row."""
        present = self.runner.lengths
        for row, length in lengths.items():
            self.held.texts[row].cut(length)
        wanted = [lengths.get(row, length) for row, length in enumerate(present)]
        if wanted != present:
            self.runner.rewind(wanted)

    def begin_text(self, view: ReadState, prefix: Sequence[int]) -> None:
        """Begin a text in its row: keep, or copy from another row, the longest beginning of ``prefix`` that a row holds
        of a text of the same owner. ``view.read`` is its number of tokens; the row holds no others.
        """
        row = view.row
        view.begun, view.read = True, 0
        self._idle.discard(row)
        if not self.held.on:
            return
        owner = self.owners.get(row, "")
        shared = {one: self.held.shared(one, prefix, owner) for one in (row, *range(self.runner.batch))}
        source = max(shared, key=lambda one: shared[one])  # this row, if no other shares more
        length = shared[source]
        if length and source != row:
            self._unverified.add(row)  # if the copy is interrupted
            self.rewind({row: 0})
            self.runner.copy(source, [row], length)
            self.held.texts[row].take(self.held.texts[source], length)
            self._unverified.discard(row)
        self.rewind({row: length})
        self.held.texts[row].owner = owner
        view.read = length

    def best_row(self, free: Sequence[int], prefix: Sequence[int], owner: str = "") -> int:
        """The first of some rows that holds most of ``prefix`` and nothing else; if none holds any, an empty row, or
        else the first."""
        held = self.held
        shared = {row: held.shared(row, prefix, owner) * held.continues(row, prefix, owner) for row in free}
        if any(shared.values()):
            return max(free, key=lambda row: shared[row])
        return next((row for row in free if not held.texts[row].tokens), free[0])

    def end_text(
        self, row: int, sequence: TokenSequence | None = None, view: ReadState | None = None
    ) -> None:
        """End the text of a row: only what another text may reuse stays; nothing after a failure or an interrupt.

        Of draft tokens that the last round rejected nothing stays either: with them the row would not be taken for the
        beginning of the conversation's next prompt.
        """
        held, length = self.held.texts[row], 0
        if row not in self._unverified and self.held.on:
            if sequence is not None and view is not None and view.begun:
                chain = view.base if view.nodes else view.read  # a path of a tree has not been moved yet
                held.end(sequence.tokens[: min(chain, view.read, sequence.final)], view.chained)
            length = held.usable(self.held.cache.reuse)
        self.rewind({row: length})
        if row in self._unverified:
            self.runner.wipe(row)
            self._unverified.discard(row)
        self._idle.add(row)
        if self.runner.may_hold_nan:  # it is cleaned when all rows are empty
            self.rewind(dict.fromkeys(self._idle, 0))

    def end_all(self) -> None:
        """``end_text`` of the rows whose texts have not ended."""
        for row in set(range(self.runner.batch)) - self._idle:
            self.end_text(row)

    @abstractmethod
    def begin(self, feeds: Iterable[RowInput]) -> None:
        """Rewind rows to the start of their feeds, before a forward pass over these."""

    @abstractmethod
    def _pass(self, feeds: Sequence[RowInput], logits: bool, layers: Sequence[int] = ()) -> ModelOutput:
        """One forward pass over some rows, each at most once; other rows are unchanged."""

    @torch.inference_mode()
    def read(self, prompts: Sequence[PromptRow]) -> list[PromptRead]:
        """Prefill without logits: passes over blocks of the texts, one per group of blocks of similar length.

        A block that several rows read after the same tokens is read once, and copied.
        """
        began = time.perf_counter()
        layers = sorted({layer for one in prompts for layer in one.layers} - {FINAL})
        wanted = any(one.layers for one in prompts)
        states: dict[int, list[list[Tensor]]] = {one.feed.row: [] for one in prompts}
        copied = dict.fromkeys(states, 0)
        left = [one.feed for one in prompts]
        while left:
            blocks = [feed._replace(tokens=feed.tokens[: up_to_boundary(feed.start)]) for feed in left]
            twins = {} if wanted else _twins(self.held, blocks)
            for group in _by_length([block for block in blocks if block.row not in twins]):
                output = self._pass(group, False, layers)
                for i, feed in enumerate(group):
                    made = [one[i, : len(feed.tokens)] for one in (output.hidden, *output.layers)]
                    # Every token sees itself: if all states are finite, so are keys and values. llama.cpp returns no
                    # states here, and nothing but a model's own weights can give NaN there.
                    finite = self.held.on and bool(made[0].isfinite().all())
                    self.held.texts[feed.row].add(feed.start, feed.tokens, finite=finite)
                    if wanted:
                        states[feed.row].append(made)
            for block in blocks:
                if block.row in twins:
                    self._copy_block(twins[block.row], block)
                    copied[block.row] += len(block.tokens)
            left = [
                feed._replace(start=feed.start + len(block.tokens), tokens=feed.tokens[len(block.tokens) :])
                for feed, block in zip(left, blocks, strict=True)
                if len(block.tokens) < len(feed.tokens)
            ]
        seconds = (time.perf_counter() - began) / len(prompts)
        whole = {
            row: dict(zip((FINAL, *layers), map(torch.cat, zip(*parts, strict=True)), strict=False))
            for row, parts in states.items()
        }
        return [
            PromptRead(seconds, [whole[one.feed.row][layer] for layer in one.layers], copied[one.feed.row])
            for one in prompts
        ]

    def _copy_block(self, source: int, block: RowInput) -> None:
        end = block.start + len(block.tokens)
        self.begin([block])
        self.runner.copy(source, [block.row], end)
        self.held.texts[block.row].take(self.held.texts[source], end)


def _twins(held: HeldRows, blocks: Sequence[RowInput]) -> dict[int, int]:
    """Row → an earlier one that is about to read the same tokens after the same tokens."""
    if len(blocks) == 1 or not held.on:
        return {}
    first: dict[tuple[str | int, ...], int] = {}
    twins: dict[int, int] = {}
    for row, start, tokens, *_ in blocks:
        text = held.texts[row]
        if len(text.tokens) >= start:
            other = first.setdefault((text.owner, start, *text.tokens[:start], *tokens), row)
            twins |= {} if other == row else {row: other}
    return twins


def _by_length(feeds: Sequence[RowInput]) -> list[list[RowInput]]:
    """Group feeds by length, so that padding is at most a quarter plus 8 tokens: another forward pass costs less."""
    groups: list[list[RowInput]] = []
    least = 0.0
    for feed in sorted(feeds, key=lambda feed: -len(feed.tokens)):
        if not groups or len(feed.tokens) < least:
            groups.append([])
            least = 0.75 * len(feed.tokens) - 8
        groups[-1].append(feed)
    return [sorted(group) for group in groups]
