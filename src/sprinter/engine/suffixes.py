"""Earlier texts of each owner, which drafters by suffixes read; kept in a file on request."""

from __future__ import annotations

import io
import weakref
import zipfile
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from sprinter.decode.checks import at_least
from sprinter.decode.successors import Successors
from sprinter.decode.suffix_index import END, SuffixIndex
from sprinter.errors import UserError
from sprinter.files import write_atomic, writing

__all__ = ["DEFAULT_TOKENS", "SuffixCache"]

DEFAULT_TOKENS = 1 << 17
"""Tokens that are kept of an owner's texts."""
_OWNERS = 64  # whose texts are kept
_MOST_ENDED = 1 << 12  # tokens of texts that wait until they are read
_PROMPT = 64  # tokens at the end of a prompt that are kept before its text


class SuffixCache:
    """The latest tokens of each owner's texts, and what the target said after them. A text reads those of its own owner
    alone.

    Every owner has the same room, which no other one's texts fill. Of more than 64 owners the one whose texts were used
    longest ago loses them.

    Args:
        tokens: number that is kept of each owner; 0: nothing is kept.
        file: the texts are read from it, if it exists, and written to it by ``save`` and when the cache is released or
            the program ends. It holds what users have written and read. None: they are gone then.
        vocabulary: fingerprint of the token ids. size: number of token ids.

    Raises:
        UserError: an invalid value, a file that cannot be read, is damaged or is of another vocabulary.
    """

    def __init__(
        self,
        tokens: int = DEFAULT_TOKENS,
        file: str | Path | None = None,
        vocabulary: str = "",
        size: int = 0,
    ) -> None:
        at_least("suffix_cache_tokens", tokens, 0)
        if file is not None and not tokens:
            raise UserError(
                "suffix_cache_tokens=0 keeps no texts, and suffix_cache= names a file of them: give one"
            )
        self._store = _Store(tokens, None if file is None else Path(file), vocabulary)
        if file is not None:
            self._store.read(size)
            weakref.finalize(self, self._store.save)

    def of(self, owner: str) -> SuffixIndex | None:
        """An owner's texts; None: nothing is kept."""
        return self._store.of(owner) if self._store.window else None

    def successors(self, owner: str) -> Successors | None:
        """What the target said after each token of an owner's texts, which no file holds; None: nothing is kept."""
        return self._store.successors_of(owner) if self._store.window else None

    def add(self, owner: str, prompt: Sequence[int], text: Sequence[int]) -> None:
        """Keep a text that has ended, and what stood before it."""
        if self._store.window and text:
            self._store.add(owner, [*prompt[-_PROMPT:], *text])

    def clear(self) -> None:
        """Forget all texts, but for those in the file until it is written again."""
        self._store.clear()

    def save(self) -> None:
        """Write the file, if there is one and texts were added since.

        Raises:
            UserError: it cannot be written.
        """
        self._store.save()


class _Store:
    """What outlives the cache until it is saved."""

    def __init__(self, window: int, file: Path | None, vocabulary: str) -> None:
        self.window, self._file, self._vocabulary = window, file, vocabulary
        self.texts: dict[str, SuffixIndex] = {}  # the owner whose texts were used last stands last
        self.successors: dict[str, Successors] = {}
        # Texts of each owner that its next text reads: to take in many at once costs less.
        self._ended: dict[str, list[int]] = {}
        self._lock, self._changed = Lock(), False

    def of(self, owner: str) -> SuffixIndex:
        with self._lock:
            return self._of(owner)

    def _of(self, owner: str) -> SuffixIndex:
        index = self.texts.pop(owner, None) or SuffixIndex(self.window)
        self.texts[owner] = index
        if len(self.texts) > _OWNERS:
            del self.texts[gone := next(iter(self.texts))]
            self.successors.pop(gone, None)
            self._ended.pop(gone, None)
        if ended := self._ended.pop(owner, None):
            index.extend(ended)
        return index

    def clear(self) -> None:
        with self._lock:
            for kept in (self.texts, self.successors, self._ended):
                kept.clear()

    def successors_of(self, owner: str) -> Successors:
        self.of(owner)
        with self._lock:
            return self.successors.setdefault(owner, Successors())

    def add(self, owner: str, tokens: Sequence[int]) -> None:
        with self._lock:
            if owner in self.texts:
                self.texts[owner] = self.texts.pop(owner)
            else:
                self._of(owner)
            ended = self._ended.setdefault(owner, [])
            ended += (*tokens, END)
            if len(ended) >= _MOST_ENDED:
                self._of(owner)
            self._changed = True

    def save(self) -> None:
        with self._lock:
            if self._file is None or not self._changed:
                return
            for owner in [*self._ended]:
                self._of(owner)
            kept = {owner: index.tokens() for owner, index in self.texts.items()}
            content = io.BytesIO()
            np.savez(
                content, vocabulary=np.array(self._vocabulary), owners=np.array(list(kept), np.str_),
                lengths=np.array([len(own) for own in kept.values()], np.int64),
                tokens=np.concatenate([np.zeros(0, np.int32), *kept.values()]),
            )  # fmt: skip
            with writing(self._file, "give another suffix cache"):
                write_atomic(self._file, content.getvalue())
            self._changed = False

    def read(self, size: int) -> None:
        file = self._file
        if file is None or not file.exists():
            return
        try:
            with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as given:
                known, owners, lengths, tokens = (
                    given[name] for name in ("vocabulary", "owners", "lengths", "tokens")
                )
            parts = np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
            damaged = tokens.dtype != np.int32 or lengths.sum() != len(tokens) or len(owners) != len(lengths)
            damaged |= len(tokens) > 0 and not -1 <= tokens.min() <= tokens.max() < size
        except OSError as error:
            raise UserError(f"cannot read the suffix cache '{file}' ({error}): give another file") from None
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            damaged = True
        if damaged:
            raise UserError(
                f"the suffix cache '{file}' is damaged, or is not such a file: delete it, or give another"
            )
        if str(known) != self._vocabulary:
            raise UserError(
                f"the suffix cache '{file}' is of another vocabulary: give one file to each target"
            )
        for owner, part in zip(owners.tolist(), parts, strict=True):
            index = self.of(owner)
            index.extend(part)
