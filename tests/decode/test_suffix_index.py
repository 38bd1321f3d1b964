"""The index of suffixes against a search by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sprinter.decode.suffix_index import END, Occurrences, SuffixIndex, TextIndex

Found = list[tuple[int, list[int]]]


def by_hand(text: Sequence[int], ending: Sequence[int], length: int, own: bool) -> Found:
    """Matched tokens and what followed, longest match first, of equal ones the latest."""
    found: list[tuple[int, int, list[int]]] = []
    for at in range(len(text) - 1 - own, -1, -1):
        size = 0
        while size < len(ending) and at - size >= 0 and text[at - size] == ending[-1 - size]:
            size += 1
        if size < 2:
            continue
        if own:
            row = [text[at + 1 + step % (len(text) - 1 - at)] for step in range(length)]
        else:
            after = [*text[at + 1 : at + 1 + length], -1]
            row = (after[: after.index(-1)] + [-1] * length)[:length]
        found.append((size, at, row))
    return [(size, row) for size, _, row in sorted(found, key=lambda one: (-one[0], -one[1]))]


def pairs(found: Occurrences | None) -> Found:
    return [] if found is None else list(zip(found.sizes, found.rows, strict=True))


@pytest.mark.parametrize("window", [37, 5000])
def test_occurrences_are_those_that_a_search_finds(window: int) -> None:
    """The window, too, is the last tokens: what was there before is found no longer."""
    chance = random.Random(window)
    matched = 0
    for _ in range(60):
        vocab, index, text = chance.choice((2, 3, 6)), SuffixIndex(window, depth=30, most=10**6), list[int]()
        for _ in range(chance.randint(1, 8)):
            part = [chance.randrange(vocab) for _ in range(chance.randint(0, 40))]
            index.extend(part)
            text += [*part, -1]
            index.extend([END])
        ending = [chance.randrange(vocab) for _ in range(20)]
        wanted = by_hand(text[-window:], ending, 7, False)
        assert pairs(index.find(ending, 7)) == wanted
        assert index.tokens().tolist() == text[-window:] and len(index) == min(window, len(text))
        matched += bool(wanted)
    assert matched > 40


def test_of_its_own_text_occurrences_are_those_that_a_search_finds() -> None:
    chance = random.Random(1)
    matched = 0
    for _ in range(60):
        vocab, index, text = chance.choice((2, 3, 6)), TextIndex(depth=30, most=10**6), list[int]()
        for _ in range(chance.randint(1, 8)):
            part = [chance.randrange(vocab) for _ in range(chance.randint(0, 40))]
            index.extend(part)
            text += part
            wanted = by_hand(text, text[-30:], 7, True)
            assert pairs(index.find(7)) == wanted and len(index) == len(text)
            matched += bool(wanted)
    assert matched > 150


def test_it_does_not_matter_how_a_text_is_given() -> None:
    text = [i * i % 7 for i in range(3000)]
    whole, parts = SuffixIndex(2000), SuffixIndex(2000)
    whole.extend(text)
    for first in range(0, len(text), 13):
        parts.extend(text[first : first + 13])
    assert pairs(whole.find(text[-64:], 5)) == pairs(parts.find(text[-64:], 5)) != []


def test_the_latest_occurrences_are_looked_at_and_the_longest_match_is_among_them() -> None:
    index = SuffixIndex(10_000, most=4)
    index.extend([*range(10, 30), 5])
    index.extend([END])
    for follows in range(100, 150):
        index.extend([28, 29, follows])
        index.extend([END])
    assert pairs(index.find(list(range(10, 30)), 1))[0] == (20, [5])
    latest = [(2, [149]), (2, [148]), (2, [147]), (2, [146])]
    assert pairs(index.find([28, 29], 1)) == latest


def test_memory_is_bounded_and_grows_with_the_tokens() -> None:
    index = SuffixIndex(1 << 14)
    small = index.nbytes
    for _ in range(5):
        index.extend(range(10_000))
    assert len(index) == 1 << 14 and small < index.nbytes <= 36 * (1 << 14)
    index.clear()
    assert len(index) == 0 and index.nbytes == small and index.find([1, 2, 3], 4) is None


def test_short_endings_are_not_found() -> None:
    index = SuffixIndex(100)
    assert index.find([1, 2], 3) is None
    index.extend([1, 2, 3])
    assert index.find([2], 3) is None and index.find([], 3) is None
    assert pairs(index.find([1, 2], 0)) == [(2, [])]
