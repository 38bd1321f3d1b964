"""Access to single rows of a runner: what a text begins with, passes over some rows, and what a text leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sprinter.decode.sequence import ReadState, TokenSequence
from sprinter.engine.prefix import HeldRows, up_to_boundary
from sprinter.errors import SprinterError
from sprinter.models.checks import find_fault
from sprinter.models.interface import ModelOutput, Runner

__all__ = ["FINAL", "After", "CacheRows", "ForwardResult", "RowInput"]

FINAL = -1
"""In place of a decoder layer's number: the hidden states after the final norm."""
After = tuple[Tensor, Tensor]
"""Output of a model after a text: logits ``[V]`` and hidden state ``[d]``."""


class RowInput(NamedTuple):
    """Input of a row: ``tokens``, at least one, after the first ``start`` that it holds; later ones are discarded.

    ``parents``: for tokens that branch, the slot in the row of each one's parent; None: each token follows the
    previous one.
    """

    row: int
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None


class ForwardResult(NamedTuple):
    """A forward pass over some rows: logits ``[rows, n, V]``, hidden states ``[rows, n, d]`` in the order of the feeds.

    n is the length of the longest feed; values at padding are undefined. ``faults``: by index of the feed, the error in
    a row's logits, which must not be read again. ``layers``: hidden states after the requested decoder layers.
    """

    logits: Tensor
    hidden: Tensor
    faults: dict[int, SprinterError]
    layers: tuple[Tensor, ...] = ()


class CacheRows:
    """One model's rows, of which any subset can be read at a time.

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
        length, source = self.held.most_shared(prefix, row, owner)
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

    def begin(self, feeds: Sequence[RowInput]) -> None:
        """Rewind rows to the start of their feeds, before a forward pass over these."""
        lengths = self.runner.lengths
        if any(lengths[feed.row] != feed.start for feed in feeds):
            self.rewind({feed.row: feed.start for feed in feeds})
        self._unverified.update(feed.row for feed in feeds)

    def check(self, feed: RowInput, peaks: Sequence[float]) -> SprinterError | None:
        """Check a row after a forward pass over a feed; returns an error if its logits are not finite.

        Args:
            peaks: the largest logit after each token of the feed, or after the last ones. Logits depend on all slots of
                the row: if they are finite, so are the slots.
        """
        if not all(map(isfinite, peaks)):
            return find_fault(peaks, self.name, feed.start + len(feed.tokens) - len(peaks))
        self._unverified.discard(feed.row)
        text = self.held.texts[feed.row]
        text.checked = len(text.tokens)
        return None

    def read(self, feeds: Sequence[RowInput], layers: Sequence[int] = ()) -> ForwardResult:
        """Run one forward pass over some rows, each at most once; other rows are unchanged.

        Args:
            layers: decoder layers whose hidden states to return.
        """
        output = self._pass(feeds, True, layers)
        assert output.logits is not None
        logits = output.logits[..., : self.vocab]
        peaks = logits.amax(-1).tolist()  # NaN wins a maximum; the one host synchronisation
        ends = [self.check(feed, peaks[i][: len(feed.tokens)]) for i, feed in enumerate(feeds)]
        faults = {i: fault for i, fault in enumerate(ends) if fault is not None}
        return ForwardResult(logits, output.hidden, faults, output.layers)

    def read_prompts(
        self, feeds: Sequence[RowInput], layers: Sequence[int] | None = None
    ) -> tuple[dict[int, list[Tensor]], dict[int, int]]:
        """Prefill without logits: forward passes over blocks of the texts, one per group of blocks of similar length.

        A block that several rows read after the same tokens is read once, and copied.

        Returns:
            By row, hidden states ``[n, d]`` after the final norm and of each of ``layers`` ({} if ``layers`` is None),
            and the number of tokens that were copied.
        """
        states: dict[int, list[Tensor]] = {}
        copied: dict[int, int] = {}
        left = list(feeds)
        while left:
            blocks = [_first_block(feed) for feed in left]
            twins = self._twins(blocks) if layers is None else {}
            for group in _by_length([block for block in blocks if block.row not in twins]):
                output = self._pass(group, False, layers or ())
                for i, feed in enumerate(group):
                    n = len(feed.tokens)
                    made = [states_[i, :n] for states_ in (output.hidden, *output.layers)]
                    self._note_block(feed, made[0])
                    if layers is not None:
                        held = states.get(feed.row)
                        states[feed.row] = (
                            made if held is None else [*map(torch.cat, zip(held, made, strict=True))]
                        )
            for block in blocks:
                if block.row in twins:
                    self._copy_block(block, twins[block.row])
                    copied[block.row] = copied.get(block.row, 0) + len(block.tokens)
            left = [_rest(feed, block) for feed, block in zip(left, blocks, strict=True) if feed != block]
        return states, copied

    def _note_block(self, feed: RowInput, hidden: Tensor) -> None:
        """Record a block of a prompt. Every token sees itself: if all states are finite, so are keys and values."""
        # llama.cpp returns no states here, and nothing but a model's own weights can give NaN there.
        text, on = self.held.texts[feed.row], self.held.on
        text.add(feed.start, feed.tokens, finite=on and bool(hidden.isfinite().all()))

    def _twins(self, blocks: Sequence[RowInput]) -> dict[int, int]:
        """Row → an earlier one that is about to read the same tokens after the same tokens."""
        if len(blocks) == 1 or not self.held.on:
            return {}
        first: dict[tuple[str | int, ...], int] = {}
        twins: dict[int, int] = {}
        for row, start, tokens, _ in blocks:
            text = self.held.texts[row]
            if len(text.tokens) >= start:
                other = first.setdefault((text.owner, start, *text.tokens[:start], *tokens), row)
                twins |= {} if other == row else {row: other}
        return twins

    def _copy_block(self, block: RowInput, source: int) -> None:
        end = block.start + len(block.tokens)
        self.begin([block])
        self.runner.copy(source, [block.row], end)
        self.held.texts[block.row].take(self.held.texts[source], end)

    def _pass(self, feeds: Sequence[RowInput], logits: bool, layers: Sequence[int] = ()) -> ModelOutput:
        self.begin(feeds)
        more: dict[str, Any] = {"hidden_layers": layers} if layers else {}
        if any(feed.parents is not None for feed in feeds):
            more["parents"] = [feed.parents for feed in feeds]
        if len(feeds) == self.runner.batch == 1:
            return self.runner.extend(self._ids([list(feeds[0].tokens)]), logits=logits, **more)
        numbers, counts = [feed.row for feed in feeds], [len(feed.tokens) for feed in feeds]
        n = max(counts)
        padded = self._ids([[*feed.tokens, *[0] * (n - len(feed.tokens))] for feed in feeds])
        if numbers == list(range(self.runner.batch)):
            given = None if min(counts) == n else counts
            return self.runner.extend(padded, given, logits=logits, **more)
        return self.runner.extend(padded, counts, logits=logits, rows=numbers, **more)

    def _ids(self, tokens: list[list[int]]) -> Tensor:
        return torch.tensor(tokens, device=self.runner.device)


def _first_block(feed: RowInput) -> RowInput:
    """The beginning of a feed, up to the next boundary of prefill."""
    room = up_to_boundary(feed.start)
    return feed if len(feed.tokens) <= room else feed._replace(tokens=feed.tokens[:room])


def _rest(feed: RowInput, block: RowInput) -> RowInput:
    n = len(block.tokens)
    return feed._replace(start=feed.start + n, tokens=feed.tokens[n:])


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
