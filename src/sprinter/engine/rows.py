"""Access to single rows of a runner, and the text of a request in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sprinter.engine.prefix import HeldRows, common_prefix, up_to_boundary
from sprinter.errors import SprinterError
from sprinter.models.checks import find_fault
from sprinter.models.interface import ModelOutput, Runner

__all__ = ["FINAL", "After", "CacheRows", "Feed", "ForwardResult", "RequestRow"]

FINAL = -1
"""In place of a decoder layer's number: the hidden states after the final norm."""
After = tuple[Tensor, Tensor]
"""Output of a model after a text: logits ``[V]`` and hidden state ``[d]``."""


class Feed(NamedTuple):
    """Input of a row: ``tokens``, at least one, after the first ``start`` that it holds; later ones are discarded.

    So a feed can be read again after a failure. ``parents``: for tokens that branch, the slot in the row of each one's
    parent; None: each token follows the previous one.
    """

    row: int
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None


class ForwardResult(NamedTuple):
    """A forward pass over some rows: logits ``[rows, n, V]``, hidden states ``[rows, n, d]`` in the order of the feeds.

    n is the length of the longest feed; values at padding are undefined. ``faults``: by index of the feed, the error in
    a row's logits; the row keeps its previous content. ``layers``: hidden states after the requested decoder layers.
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
        # Row → end of the slots not yet verified by finite logits: to discard these (maybe NaN), a mask is not enough.
        self._doubtful: dict[int, int] = {}
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
        for row, length in lengths.items() if self._doubtful else ():
            if self._doubtful.get(row, 0) > length:
                self.runner.wipe(row)
                self._doubtful[row] = length

    def begin_text(self, row: int, prefix: Sequence[int]) -> int:
        """Begin a text in a row: keep, or copy from another row, the longest beginning of ``prefix`` that a row holds
        of a text of the same owner.

        Returns:
            Its number of tokens; the row holds no others.

        Raises:
            UserError: the model was changed since it was loaded, in a way that its runner would pass over.
        """
        self.held.check()
        self._idle.discard(row)
        if not self.held.on:
            return 0
        owner = self.owners.get(row, "")
        length, source = self.held.most_shared(prefix, row, owner)
        if length and self.held.outdated():
            length = 0
        if length and source != row:
            self._copy(source, [row], length)
        self.rewind({row: length})
        self.held.texts[row].owner = owner
        self.runner.renew(row)
        return length

    def best_row(self, free: Sequence[int], prefix: Sequence[int], owner: str = "") -> int:
        """The first of some rows that holds most of ``prefix`` and nothing else; if none holds any, an empty row, or
        else the first."""
        held = self.held
        shared = {row: held.shared(row, prefix, owner) * held.continues(row, prefix, owner) for row in free}
        if any(shared.values()):
            return max(free, key=lambda row: shared[row])
        return next((row for row in free if not held.texts[row].tokens), free[0])

    def end_text(self, row: int, text: Sequence[int] | None = None) -> None:
        """End the text of a row: only what another text may reuse stays; nothing after a failure or an interrupt.

        Of draft tokens that the last round rejected nothing stays either, if the whole ``text`` is given: with them the
        row would not be taken for the beginning of the conversation's next prompt.
        """
        failed, held = row in self._doubtful or not self.held.on, self.held.texts[row]
        length = 0 if failed else held.usable(self.held.cache.reuse)
        if text is not None and length and row not in self._idle:  # else this text has read nothing in it
            length = min(length, common_prefix(held.tokens, text))
        self.rewind({row: length})
        self._idle.add(row)
        if self.runner.soiled:  # it is cleaned when all rows are empty
            self.rewind(dict.fromkeys(self._idle, 0))

    def end_all(self, text: Sequence[int] | None = None) -> None:
        """``end_text`` of all rows; ``text``: the one that they were read for, if there is one."""
        for row in range(self.runner.batch):
            self.end_text(row, text)

    def _copy(self, source: int, rows: Sequence[int], length: int) -> None:
        """Replace the contents of rows by the first tokens of another row."""
        self.rewind(dict.fromkeys(rows, 0))
        self._doubtful |= dict.fromkeys(
            rows, length
        )  # if the copy is interrupted, they are wiped before they are used
        self.runner.copy(source, rows, length)
        for row in rows:
            self.held.texts[row].take(self.held.texts[source], length)
            del self._doubtful[row]

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Keep only the slots in ``path`` of the tree at the end of a row, as if they had been read as a chain."""
        self.runner.keep(row, path)
        self.held.texts[row].keep(path)

    def begin(self, feeds: Sequence[Feed], more: int = 0) -> None:
        """Rewind rows to the start of their feeds, before a forward pass over these and up to ``more`` tokens each.

        Until ``end`` has verified the slots that the forward pass wrote, a rewind overwrites them with zeros.
        """
        self.rewind({feed.row: feed.start for feed in feeds})
        for feed in feeds:
            end = feed.start + len(feed.tokens) + more
            self._doubtful[feed.row] = max(self._doubtful.get(feed.row, 0), end)

    def nothing_read(self, feeds: Sequence[Feed]) -> None:
        """Forget what ``begin`` noted if no forward pass was run; the caller runs an eager one next."""
        for feed in feeds:
            self._doubtful[feed.row] = feed.start

    def end(self, feed: Feed, peaks: Sequence[float], position: int) -> SprinterError | None:
        """Check a row after a forward pass; returns an error if its logits are not finite, and then rewinds the row.

        Args:
            peaks: the largest logit after each token from ``position`` of the text on. Logits depend on all slots of
                the row: if they are finite, so are the slots.
        """
        fault = find_fault(peaks, self.name, position)
        if fault is None:
            text = self.held.texts[feed.row]
            text.add(feed.start, feed.tokens, tree=feed.parents is not None)
            text.checked = len(text.tokens)
            self._doubtful.pop(feed.row, None)
        else:
            self.rewind({feed.row: feed.start})
        return fault

    def read(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> ForwardResult:
        """Run one forward pass over some rows, each at most once; other rows are unchanged.

        Args:
            layers: decoder layers whose hidden states to return.
        """
        output = self._pass(feeds, True, layers)
        assert output.logits is not None
        logits = output.logits[..., : self.vocab]
        peaks = logits.amax(-1).tolist()  # NaN wins a maximum; the one host synchronisation
        ends = [self.end(feed, peaks[i][: len(feed.tokens)], feed.start) for i, feed in enumerate(feeds)]
        faults = {i: fault for i, fault in enumerate(ends) if fault is not None}
        return ForwardResult(logits, output.hidden, faults, output.layers)

    def read_prompts(
        self, feeds: Sequence[Feed], layers: Sequence[int] | None = None
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
        try:
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
        except BaseException:
            self.rewind({feed.row: min(feed.start, self.runner.lengths[feed.row]) for feed in feeds})
            raise
        return states, copied

    def _note_block(self, feed: Feed, hidden: Tensor) -> None:
        """Record a block of a prompt. Every token sees itself: if all states are finite, so are keys and values."""
        text = self.held.texts[feed.row]
        text.add(feed.start, feed.tokens, prefill=True)
        # llama.cpp returns no states here, and nothing but a model's own weights can give NaN there.
        if self.held.on and text.checked == feed.start and bool(hidden.isfinite().all()):
            text.checked = len(text.tokens)

    def _twins(self, blocks: Sequence[Feed]) -> dict[int, int]:
        """Row → an earlier one that is about to read the same tokens after the same tokens."""
        if len(blocks) == 1 or not self.held.on:
            return {}
        first: dict[tuple[str | int, ...], int] = {}
        twins: dict[int, int] = {}
        for row, start, tokens, _ in blocks:
            text = self.held.texts[row]
            if len(text.tokens) >= start and not text.obsolete:
                other = first.setdefault((text.owner, start, *text.tokens[:start], *tokens), row)
                twins |= {} if other == row else {row: other}
        return twins

    def _copy_block(self, block: Feed, source: int) -> None:
        end = block.start + len(block.tokens)
        self.begin([block])
        self.runner.copy(source, [block.row], end)
        self.held.texts[block.row].take(self.held.texts[source], end)

    def _pass(self, feeds: Sequence[Feed], logits: bool, layers: Sequence[int] = ()) -> ModelOutput:
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


def _first_block(feed: Feed) -> Feed:
    """The beginning of a feed, up to the next boundary of prefill."""
    room = up_to_boundary(feed.start)
    return feed if len(feed.tokens) <= room else feed._replace(tokens=feed.tokens[:room])


def _rest(feed: Feed, block: Feed) -> Feed:
    n = len(block.tokens)
    return feed._replace(start=feed.start + n, tokens=feed.tokens[n:])


def _by_length(feeds: Sequence[Feed]) -> list[list[Feed]]:
    """Group feeds by length, so that padding is at most a quarter plus 8 tokens: another forward pass costs less."""
    groups: list[list[Feed]] = []
    least = 0.0
    for feed in sorted(feeds, key=lambda feed: -len(feed.tokens)):
        if not groups or len(feed.tokens) < least:
            groups.append([])
            least = 0.75 * len(feed.tokens) - 8
        groups[-1].append(feed)
    return [sorted(group) for group in groups]


class RequestRow:
    """The row of a request in one model, and its text.

    Args:
        rows: the model's rows.
        number: index of this request's row.
        prompt: token ids.
        layers: decoder layers whose hidden states are kept, or ``FINAL``.

    Attributes:
        text: token ids; a tree may follow them (``grow``).
        cached: number of the text's tokens in the KV cache. The row may hold more: discarded tokens, or tokens of a
            forward pass that was interrupted.
        after: the model's output after the whole text, if it is known.
        begun: whether ``begin`` was called.
    """

    def __init__(
        self, rows: CacheRows, number: int, prompt: Sequence[int], layers: Sequence[int] = ()
    ) -> None:
        self.rows, self.number, self._prefill = rows, number, len(prompt) - 1
        self.text, self.cached = list(prompt), 0
        self.after: After | None = None
        self.begun = False
        self.layers = tuple(layers)
        self._nodes: list[int] = []  # tokens of the tree
        self._parents: list[int] = []  # parent of each node, -1 for the text
        self._read = 0  # number of nodes that were read, in order
        self._root = 0  # start of the forward pass that read the first node
        self._states: dict[int, Tensor] = {}

    def begin(self) -> int:
        """Begin the text with what is cached of its prompt already; returns the number of these tokens.

        Hidden states are not cached: with ``layers`` the whole prompt is read.
        """
        self.begun = True
        self.cached = self.rows.begin_text(self.number, () if self.layers else self.text[: self._prefill])
        return self.cached

    def goto(self, start: int, tokens: Sequence[int], path: Sequence[int] = ()) -> None:
        """Keep the nodes in ``path`` of the tree, discard tokens beyond ``start`` and append ``tokens``."""
        if self._nodes:
            self._leave_tree(path)
        if self.cached > start:
            self.after = None
        self.cached = min(self.cached, start)
        self.text[start:] = tokens

    def _leave_tree(self, path: Sequence[int]) -> None:
        base, read = len(self.text), [node for node in path if node < self._read]
        if self._read:  # also if no node stays: the row must be a chain again
            self.rows.keep(self.number, [*range(self._root, base), *(base + node for node in read)])
            for layer, states in self._states.items():
                self._states[layer] = states[[*range(base), *(base + node for node in read)]]
            self.cached = base + len(read)
        self.text += [self._nodes[node] for node in path]
        self._nodes, self._parents, self._read, self.after = [], [], 0, None

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Add nodes to the tree after the text."""
        self._nodes += tokens
        self._parents += parents

    def prompt_left(self, at_most: int | None) -> Feed | None:
        """The next chunk of the prompt's prefill, which excludes its last token; None after the last chunk."""
        cached = self.cached
        if cached >= self._prefill:
            return None
        end = self._prefill if at_most is None else min(self._prefill, cached + at_most)
        return Feed(self.number, cached, self.text[cached:end])

    def unread(self) -> Feed:
        """Tokens and nodes that the row has not read; () if all are read and ``after`` is known."""
        if not self._nodes:
            if self.cached == len(self.text) and self.after is None:
                self.cached -= 1
            return Feed(self.number, self.cached, self.text[self.cached :])
        base, first = len(self.text), self.cached + self._read
        self._root = self._root if self._read else first
        tokens = [*self.text[self.cached :], *self._nodes[self._read :]]
        parents = [
            *range(self.cached - 1, base - 1),
            *(base + parent for parent in self._parents[self._read :]),
        ]
        return Feed(self.number, first, tokens, parents)

    def was_read(self, feed: Feed, states: Sequence[Tensor] = ()) -> None:
        """Record a forward pass over ``feed``; ``states``: hidden states ``[n, d]`` of each of ``layers``."""
        linear = len(feed.tokens) - (len(self._nodes) - self._read)
        for layer, new in zip(self.layers, states, strict=True) if self.layers else ():
            held = self._states.get(layer)
            self._states[layer] = new if held is None else torch.cat([held[: feed.start], new])
        self.cached += linear
        self._read = len(self._nodes)

    def states_of(self, text: Sequence[int]) -> dict[int, Tensor]:
        """Hidden states ``[known, d]`` of the longest beginning of a text that was read, by layer.

        It may end in the tree, of which no path has been kept yet.
        """
        known = common_prefix(self.text[: self.cached], text)
        along = self._along(text[known:]) if known == len(self.text) else []
        slots = [*range(known), *(known + node for node in along)]
        return {layer: each[slots] if along else each[:known] for layer, each in self._states.items()}

    def _along(self, tokens: Sequence[int]) -> list[int]:
        """Nodes of the longest path of the tree that has these tokens; of equal siblings, any has the same states."""
        level, last = [-1], -1
        for x in tokens:
            level = [i for i in range(self._read) if self._nodes[i] == x and self._parents[i] in level]
            if not level:
                break
            last = level[0]
        path: list[int] = []
        while last >= 0:
            path.append(last)
            last = self._parents[last]
        return path[::-1]
