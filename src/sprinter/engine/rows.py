"""A runner's rows one by one, and the texts that a request keeps in some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.errors import SprinterError
from sprinter.models.checks import find_fault
from sprinter.models.interface import ModelOutput
from sprinter.models.runner import Runner

__all__ = ["After", "CacheRows", "Feed", "ForwardResult", "RequestRows"]

After = tuple[Tensor, Tensor]
"""What a model says after a text: logits ``[V]`` and state ``[d]``."""


class Feed(NamedTuple):
    """What a row is to read: ``tokens``, at least one, after the first ``start`` that it holds; the rest is forgotten.

    So a feed may be read again, whatever became of it the first time.
    """

    row: int
    start: int
    tokens: Sequence[int]


class ForwardResult(NamedTuple):
    """A pass over some rows: logits ``[rows, n, V]`` and states ``[rows, n, d]`` in the order of the feeds.

    n is the longest feed; what lies beyond a row's own tokens means nothing. ``faults``: by place in the feeds, what is
    wrong with the logits of a row; it holds what it held before.
    """

    logits: Tensor
    hidden: Tensor
    faults: dict[int, SprinterError]


class CacheRows:
    """One model's rows, driven some at a time.

    Args:
        runner: the rows.
        vocab: size of the common vocabulary; logits beyond it are cut off.
        name: "target" or "draft", for errors.
    """

    def __init__(self, runner: Runner, vocab: int, name: str) -> None:
        self.runner, self.vocab, self.name = runner, vocab, name
        # Row → the end of what no finite logits have vouched for yet: it must be wiped before it is masked.
        self._doubtful: dict[int, int] = {}
        runner.rewind([0] * runner.batch)

    def rewind(self, lengths: Mapping[int, int]) -> None:
        """Forget all but the first tokens of some rows, by row."""
        held = self.runner.lengths
        wanted = [lengths.get(row, length) for row, length in enumerate(held)]
        if wanted != held:
            self.runner.rewind(wanted)
        for row, length in lengths.items() if self._doubtful else ():
            if self._doubtful.get(row, 0) > length:
                self.runner.wipe(row)
                self._doubtful[row] = length

    def clear(self) -> None:
        """Forget everything."""
        self.rewind(dict.fromkeys(range(self.runner.batch), 0))

    def copy(self, row: int, others: Sequence[int], length: int) -> None:
        """Make ``others`` hold the first ``length`` tokens of ``row``."""
        self.rewind({row: length})
        self.runner.copy(row, others)

    def begin(self, feeds: Sequence[Feed], more: int = 0) -> None:
        """Bring rows to where their feeds start, before a pass over those and perhaps ``more`` tokens each.

        Until ``end`` has vouched for what the pass wrote, forgetting it means wiping it.
        """
        self.rewind({feed.row: feed.start for feed in feeds})
        for row, start, tokens in feeds:
            self._doubtful[row] = max(self._doubtful.get(row, 0), start + len(tokens) + more)

    def nothing_read(self, feeds: Sequence[Feed]) -> None:
        """After ``begin``: there was no pass, and another way is taken at once."""
        for feed in feeds:
            self._doubtful[feed.row] = feed.start

    def end(self, feed: Feed, peaks: Sequence[float], position: int) -> SprinterError | None:
        """After a pass: what is wrong with a row's logits, if anything is; the row is then as it was before.

        Args:
            peaks: the largest logit after each token from ``position`` of the text on. Logits depend on all that the
                row holds: where they are finite, so is that.
        """
        fault = find_fault(peaks, self.name, position)
        if fault is None:
            self._doubtful.pop(feed.row, None)
        else:
            self.rewind({feed.row: feed.start})
        return fault

    def read(self, feeds: Sequence[Feed]) -> ForwardResult:
        """One pass over some rows, each at most once; others are left as they are."""
        step = self._pass(feeds, logits=True)
        assert step.logits is not None
        logits = step.logits[..., : self.vocab]
        peaks = logits.amax(-1).tolist()  # NaN wins a maximum; the one synchronisation
        ends = [self.end(feed, peaks[i][: len(feed.tokens)], feed.start) for i, feed in enumerate(feeds)]
        return ForwardResult(
            logits, step.hidden, {i: fault for i, fault in enumerate(ends) if fault is not None}
        )

    def read_prompts(self, feeds: Sequence[Feed]) -> None:
        """Read without a word about what follows, in a pass for each group of feeds that are about as long."""
        try:
            for group in _by_length(feeds):
                self._pass(group, logits=False)
        except BaseException:
            self.rewind({feed.row: min(feed.start, self.runner.lengths[feed.row]) for feed in feeds})
            raise

    def _pass(self, feeds: Sequence[Feed], logits: bool) -> ModelOutput:
        self.begin(feeds)
        if len(feeds) == self.runner.batch == 1:
            return self.runner.extend(self._ids([list(feeds[0].tokens)]), logits=logits)
        numbers, counts = [feed.row for feed in feeds], [len(feed.tokens) for feed in feeds]
        n = max(counts)
        padded = self._ids([[*feed.tokens, *[0] * (n - len(feed.tokens))] for feed in feeds])
        if numbers == list(range(self.runner.batch)):
            given = None if min(counts) == n else counts
            return self.runner.extend(padded, given, logits=logits)
        return self.runner.extend(padded, counts, logits=logits, rows=numbers)

    def _ids(self, tokens: list[list[int]]) -> Tensor:
        return torch.tensor(tokens, device=self.runner.device)


def _by_length(feeds: Sequence[Feed]) -> list[list[Feed]]:
    """Feeds in groups, few enough that a pass more costs less than the padding that it saves (a quarter and 8)."""
    groups: list[list[Feed]] = []
    least = 0.0
    for feed in sorted(feeds, key=lambda feed: -len(feed.tokens)):
        if not groups or len(feed.tokens) < least:
            groups.append([])
            least = 0.75 * len(feed.tokens) - 8
        groups[-1].append(feed)
    return [sorted(group) for group in groups]


class RequestRows:
    """One model's part of a request: the rows that it has, and the texts that they stand for.

    Args:
        rows: the model's rows.
        numbers: those of this request: one, or one a draft.
        prompt: token ids.

    Attributes:
        cached: tokens that were read and answered for, the same in all rows. A row may hold more: what was forgotten,
            or read by a pass that was broken off.
        after: of each row, what the model says after its whole text, where it was asked.
    """

    def __init__(self, rows: CacheRows, numbers: Sequence[int], prompt: Sequence[int]) -> None:
        self.rows, self.numbers, self._prefill = rows, list(numbers), len(prompt) - 1
        self.texts = [list(prompt) for _ in numbers]
        self.cached = 0
        self.after: list[After | None] = [None] * len(self.numbers)
        self._parted = False  # whether the texts may differ

    def goto(self, start: int, tokens: Sequence[int], follow: int) -> None:
        """Follow text ``follow``: forget what lies beyond ``start`` and put ``tokens`` there, in all rows."""
        others = [other for other in range(len(self.numbers)) if other != follow]
        if self.cached > start or self._parted:
            self.after = [None] * len(self.numbers)
        self.cached = min(self.cached, start)
        if self._parted and others:
            self.rows.copy(self.numbers[follow], [self.numbers[other] for other in others], self.cached)
        self._parted = False
        self.texts[follow][start:] = tokens
        for other in others:
            self.texts[other] = list(self.texts[follow])

    def append(self, chains: Sequence[Sequence[int]]) -> None:
        """One chain a row."""
        self._parted = len(self.numbers) > 1
        for text, chain in zip(self.texts, chains, strict=True):
            text.extend(chain)

    def prompt_left(self, at_most: int | None) -> list[Feed]:
        """The next piece of the prompt's own pass, all but its last token, in all rows; [] if that is over."""
        cached = self.cached
        if cached >= self._prefill:
            return []
        end = self._prefill if at_most is None else min(self._prefill, cached + at_most)
        texts = zip(self.numbers, self.texts, strict=True)
        return [Feed(number, cached, text[cached:end]) for number, text in texts]

    def unread(self) -> list[Feed]:
        """Tokens that each row has not read. () where all was read and ``after`` tells what the model says."""
        if self.cached == len(self.texts[0]) and None in self.after:
            self.cached -= 1
        cached = self.cached
        return [
            Feed(number, cached, text[cached:]) for number, text in zip(self.numbers, self.texts, strict=True)
        ]
