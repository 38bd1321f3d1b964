"""A runner's rows one by one, and the texts that a request keeps in some of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from sprinter.models.checks import check_finite
from sprinter.models.interface import Step
from sprinter.models.runner import Runner

__all__ = ["Feed", "Rows", "Side"]

Feed = tuple[int, Sequence[int]]
"""A row of the runner, and the tokens that it is to read next (at least one)."""


class Rows:
    """One model's rows, driven some at a time.

    Args:
        runner: the rows.
        vocab: size of the common vocabulary; logits beyond it are cut off.
        name: "target" or "draft", for errors.
    """

    def __init__(self, runner: Runner, vocab: int, name: str) -> None:
        self.runner, self.vocab, self.name = runner, vocab, name
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        runner.rewind([0] * runner.batch)

    def length(self, row: int) -> int:
        """Tokens that a row holds."""
        return self.runner.lengths[row]

    def rewind(self, row: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of one row."""
        lengths = self.runner.lengths
        if length != lengths[row]:
            lengths[row] = length
            self.runner.rewind(lengths)
            self._kept.pop(row, None)

    def copy(self, row: int, others: Sequence[int]) -> None:
        """Make ``others`` hold what ``row`` holds."""
        self.runner.copy(row, others)
        for other in others:
            self._kept.pop(other, None)

    def keep(self, row: int, logits: Tensor, hidden: Tensor) -> None:
        """Remember logits ``[V]`` and state ``[d]`` after a row's last token, until it is rewound or reads on."""
        self._kept[row] = logits, hidden

    def forget(self, row: int) -> None:
        """Drop what ``keep`` was given: the row has read on."""
        self._kept.pop(row, None)

    def kept(self, row: int) -> tuple[Tensor, Tensor] | None:
        """What ``keep`` was given, if it still stands."""
        return self._kept.get(row)

    def read(self, feeds: Sequence[Feed], logits: bool = True) -> Step:
        """One pass over some rows; they read as many tokens as they were given, others are left as they were.

        Returns:
            Logits ``[rows, n, V]`` and hidden states ``[rows, n, d]`` in the order of ``feeds``, n the longest feed;
            what lies beyond a row's own tokens means nothing.

        Raises:
            SprinterError: logits that are not finite; the rows are then as they were before.
        """
        if self._kept:
            for row, _ in feeds:
                self._kept.pop(row, None)
        if len(feeds) == self.runner.batch == 1:
            step = self.runner.extend(self._ids([list(feeds[0][1])]), logits=logits)
        else:
            step = self._read_some(feeds, logits)
        if step.logits is None:
            return step
        own = step.logits[..., : self.vocab]
        try:
            self._check(own, feeds)
        except BaseException:
            lengths = self.runner.lengths
            for row, tokens in feeds:
                lengths[row] -= len(tokens)
            self.runner.rewind(lengths)
            raise
        return Step(own, step.hidden)

    def read_prompts(self, feeds: Sequence[Feed]) -> None:
        """Read without a word about what follows, in a pass for each group of feeds that are about as long."""
        before = self.runner.lengths
        try:
            for group in _by_length(feeds):
                self.read(group, logits=False)
        except BaseException:
            self.runner.rewind(before)
            raise

    def _read_some(self, feeds: Sequence[Feed], logits: bool) -> Step:
        numbers, counts = [row for row, _ in feeds], [len(tokens) for _, tokens in feeds]
        n = max(counts)
        padded = [[*tokens, *[0] * (n - len(tokens))] for _, tokens in feeds]
        if numbers == list(range(self.runner.batch)):
            given = None if min(counts) == n else counts
            return self.runner.extend(self._ids(padded), given, logits=logits)
        return self.runner.extend(self._ids(padded), counts, logits=logits, rows=numbers)

    def _ids(self, tokens: list[list[int]]) -> Tensor:
        return torch.tensor(tokens, device=self.runner.device)

    def _check(self, logits: Tensor, feeds: Sequence[Feed]) -> None:
        """``check_finite`` on each row's own tokens; one synchronisation if all is well."""
        peaks = logits.amax(-1).tolist()  # NaN wins a maximum
        for i, (row, tokens) in enumerate(feeds):
            n = len(tokens)
            if not all(map(isfinite, peaks[i][:n])):
                check_finite(logits[i, :n], self.name, self.length(row) - n)


def _by_length(feeds: Sequence[Feed]) -> list[list[Feed]]:
    """Feeds in groups, few enough that a pass more costs less than the padding that it saves (a quarter and 8)."""
    groups: list[list[Feed]] = []
    least = 0.0
    for feed in sorted(feeds, key=lambda feed: -len(feed[1])):
        if not groups or len(feed[1]) < least:
            groups.append([])
            least = 0.75 * len(feed[1]) - 8
        groups[-1].append(feed)
    return [sorted(group) for group in groups]


class Side:
    """One model's part of a request: the rows that it has, and the texts that they stand for.

    Args:
        rows: the model's rows.
        numbers: those of this request: one, or one a draft.
        prompt: token ids.
    """

    def __init__(self, rows: Rows, numbers: Sequence[int], prompt: Sequence[int]) -> None:
        self.rows, self.numbers, self._prefill = rows, list(numbers), len(prompt) - 1
        self.texts = [list(prompt) for _ in numbers]
        self._parted = False  # whether the texts may differ
        self.clear()

    @property
    def cached(self) -> int:
        """Tokens in the cache, the same in all rows."""
        return self.rows.length(self.numbers[0])

    def clear(self) -> None:
        """Forget everything that the rows hold."""
        for number in self.numbers:
            self.rows.rewind(number, 0)

    def goto(self, start: int, tokens: Sequence[int], follow: int) -> None:
        """Follow text ``follow``: forget what lies beyond ``start`` and put ``tokens`` there, in all rows."""
        others = [other for other in range(len(self.numbers)) if other != follow]
        if self._parted and others:
            self.rows.copy(self.numbers[follow], [self.numbers[other] for other in others])
        self._parted = False
        if self.cached > start:
            for number in self.numbers:
                self.rows.rewind(number, start)
        self.texts[follow][start:] = tokens
        for other in others:
            self.texts[other] = list(self.texts[follow])

    def append(self, chains: Sequence[Sequence[int]]) -> None:
        """One chain a row."""
        self._parted = True
        for text, chain in zip(self.texts, chains, strict=True):
            text.extend(chain)

    def prompt_left(self, at_most: int | None) -> list[Feed]:
        """The next piece of the prompt's own pass, all but its last token, in all rows; [] if that is over."""
        cached = self.cached
        if cached >= self._prefill:
            return []
        end = self._prefill if at_most is None else min(self._prefill, cached + at_most)
        return [(number, text[cached:end]) for number, text in zip(self.numbers, self.texts, strict=True)]

    def unread(self) -> list[Sequence[int]]:
        """Tokens that each row has not read. () where all was read and what the model said of it is kept."""
        cached = self.cached
        if cached == len(self.texts[0]) and any(self.rows.kept(number) is None for number in self.numbers):
            cached -= 1
            for number in self.numbers:
                self.rows.rewind(number, cached)
        return [text[cached:] for text in self.texts]
