"""Tokens that two tokenizers have in common, and how a text in the one is written in the other.

A token of the target's is read by a draft of another vocabulary as itself if both know it; else as the longest of the
draft's tokens that its bytes begin with, and so on. What a draft has read is thus a function of the target's ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = [
    "BYTE_LEVEL",
    "ONE_BYTE",
    "SAMPLE",
    "SAMPLES",
    "CommonTokens",
    "TokenMeanings",
    "added_first",
    "words_of",
]

SAMPLES = {
    "prose": "The lighthouse keeper counted twenty-seven ships before breakfast, and wrote their names into a long "
    "book.",
    "code": """def mean(values: list[float]) -> float:
    total = sum(value for value in values if value is not None)
    return total / max(len(values), 1)""",
    "a question": "What is the difference between weather and climate? Climate describes what one can expect over many "
    "years.",
}
"""Texts of whose tokens the common ones are counted."""
SAMPLE = "\n".join(SAMPLES.values())
_PRINTED = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED}
BYTE_LEVEL |= {chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in _PRINTED)}
"""Byte by character, in the vocabularies of byte-level BPE (GPT-2)."""
ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token that is one byte, in the vocabularies of SentencePiece."""
_SPACE = "▁"  # how SentencePiece spells a space

TokenMeanings = Mapping[int, tuple[bool, bytes]]
"""Of each token whether it is a special one, and the bytes that it stands for."""


def words_of(tokenizer: PreTrainedTokenizerBase) -> TokenMeanings | None:
    """What the tokens of a byte-level or SentencePiece tokenizer stand for; None for another kind."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "" if backend is None else str(json.loads(backend.to_str())["decoder"])
    by_letters = "ByteLevel" in decoder
    if not by_letters and _SPACE not in decoder:
        return None
    added = backend.get_added_tokens_decoder()
    found: dict[int, tuple[bool, bytes]] = {}
    for token, number in backend.get_vocab().items():
        if number in added:
            found[number] = bool(added[number].special), token.encode()
        elif by_letters:
            spelled = BYTE_LEVEL.keys() >= set(token)
            found[number] = False, bytes(map(BYTE_LEVEL.__getitem__, token)) if spelled else token.encode()
        elif byte := ONE_BYTE.fullmatch(token):
            found[number] = False, bytes.fromhex(byte[1])
        else:
            found[number] = False, token.replace(_SPACE, " ").encode()
    return found


def added_first(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that a tokenizer puts before a text (BOS), or none."""
    first = tokenizer.encode("")[:1]
    return list(first) if first == [tokenizer.bos_token_id] else []


class CommonTokens:
    """Of a target's and a draft's tokenizers.

    Attributes:
        ids: the target's id of a common token -> the draft's; no two have the same.
        first: the draft's tokens before every text, where the target's have none.

    Args:
        target, draft: what their tokens stand for.
    """

    def __init__(self, target: TokenMeanings, draft: TokenMeanings) -> None:
        ours, theirs = _numbers(target), _numbers(draft)
        self.ids = {number: theirs[word] for word, number in ours.items() if word in theirs}
        self.first: tuple[int, ...] = ()
        self._target = target
        self._bytes = {text: number for (special, text), number in theirs.items() if not special and text}
        self._longest = max(map(len, self._bytes), default=0)
        self._spelled: dict[int, tuple[int | None, ...]] = {one: (own,) for one, own in self.ids.items()}

    def join_ends(self, target: Sequence[int], draft: Sequence[int]) -> None:
        """Have a draft's EOS token count as the target's, if its own ends are nothing that the target knows."""
        if target and draft and not set(self.ids.values()) & set(draft) and target[0] not in self.ids:
            self.ids[target[0]] = draft[0]
            self._spelled[target[0]] = (draft[0],)

    def join_firsts(self, target: Sequence[int], draft: Sequence[int]) -> None:
        """Have the draft read its own BOS token at the beginning of a text, see ``added_first``."""
        if draft and target:
            self._spelled[target[0]] = tuple(draft)
        elif draft:
            self.first = tuple(draft)

    def share(self, ids: Sequence[int]) -> float:
        """Part of the tokens of a text in the target's ids that are common, 0 to 1."""
        return sum(one in self.ids for one in ids) / max(len(ids), 1)

    def read_as(self, token: int) -> tuple[int, ...]:
        """The draft's tokens for one of the target's: at least one. Token 0 stands for what it cannot spell."""
        return tuple(one or 0 for one in self.spelled(token)) or (0,)

    def spelled(self, token: int) -> tuple[int | None, ...]:
        """The draft's tokens for one of the target's. None stands for a byte that it cannot spell; an id that stands
        for nothing has no tokens."""
        if (known := self._spelled.get(token)) is None:
            text, found = self._target.get(token, (False, b""))[1], list[int | None]()
            while text:
                length = min(self._longest, len(text))
                while length > 1 and text[:length] not in self._bytes:
                    length -= 1
                found.append(self._bytes.get(text[:length]))
                text = text[length:]
            known = self._spelled[token] = tuple(found)
        return known


def _numbers(words: TokenMeanings) -> dict[tuple[bool, bytes], int]:
    """The first token for each meaning."""
    found: dict[tuple[bool, bytes], int] = {}
    for number, word in sorted(words.items()):
        found.setdefault(word, number)
    return found
