"""Log-probabilities of tokens in OpenAI's two shapes. They are the target's own, of its raw law at temperature 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from sprinter.decode.draft import Token, TopToken
from sprinter.engine.prompt import EncodedPrompt
from sprinter.engine.scoring import ScoredToken
from sprinter.engine.stream import Detokenizer, special_ids
from sprinter.models.common_tokens import BYTE_LEVEL, ONE_BYTE

__all__ = [
    "LawfulToken",
    "TokenNames",
    "chat_logprobs",
    "completion_logprobs",
    "names_of",
    "of_prompt",
    "of_tokens",
]

_UNKNOWN = "\ufffd"  # what a decoder writes for bytes that are no character
_SPELLED = {byte: character for character, byte in BYTE_LEVEL.items()}
_CACHED = 1 << 16
"""Number of tokens whose names are kept."""


@dataclass(frozen=True, slots=True)
class LawfulToken:
    """A token with its log-probability.

    Attributes:
        text: the text that it completes. offset: where it begins, in characters.
        logprob, top: None where the target has not been asked.
    """

    id: int
    text: str
    offset: int
    logprob: float | None
    top: Sequence[TopToken] | None


def of_tokens(tokens: Iterable[Token], offset: int = 0) -> list[LawfulToken]:
    """The tokens of a generated text, which begins at ``offset``."""
    return [
        LawfulToken(token.id, token.text, offset + token.text_offset, token.logprob, token.top_logprobs)
        for token in tokens
    ]


def of_prompt(
    prompt: EncodedPrompt, scored: Sequence[ScoredToken] | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[LawfulToken]:
    """The tokens of a prompt; the first one follows nothing and has no log-probability.

    Special tokens have text where the text of the prompt spells them out.
    """
    laws: list[ScoredToken | None] = [None] * len(prompt.ids)
    if scored is not None:
        laws[1:] = scored
    writer, found, offset = None if tokenizer is None else Detokenizer(tokenizer), [], 0
    for number, (id, law) in enumerate(zip(prompt.ids, laws, strict=True), 1):
        text = ""
        if writer is not None and tokenizer is not None:
            text = writer.push(id)
            if number == len(prompt.ids):
                text += writer.flush()
            if not text and prompt.text and id in tokenizer.all_special_ids:
                spelled = str(tokenizer.decode([id]))
                text = spelled if prompt.text.startswith(spelled, offset) else ""
        found.append(LawfulToken(id, text, offset, law and law.logprob, law and law.top))
        offset += len(text)
    return found


class TokenNames:
    """Names of tokens, different for each, and the bytes that they stand for.

    A name is the token's text within a text, so with the space before it; special tokens are written out. A part of a
    character is ``bytes:\\xc3``, as in OpenAI's completions. Of several tokens with one text, those that texts are not
    made of are ``bytes:\\x61`` if they are a byte, else ``token_id:17``, as in vLLM. So is a token without text.

    Args:
        tokenizer: None: all are ``token_id:17``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._letter = [] if tokenizer is None else _ids(tokenizer, "a")[-1:]  # shows the space behind it
        self._shown = self._decode(self._letter)
        self._special = frozenset[int]() if tokenizer is None else special_ids(tokenizer)
        self.name = lru_cache(_CACHED)(self._name)
        self.bytes_of = lru_cache(_CACHED)(self._bytes_of)

    def _name(self, id: int) -> str:
        """The name of a token."""
        text, data = self._text(id), self.bytes_of(id)
        if data != text.encode():
            return _escaped(data)
        unsure = _UNKNOWN in text and self._own_bytes(id) is None
        if text and not unsure and self._usual(text) in (None, id):
            return text
        return _escaped(data) if ONE_BYTE.fullmatch(str(self._piece(id))) else f"token_id:{id}"

    def _bytes_of(self, id: int) -> bytes:
        """The bytes of a token: those of a part of a character, else of its text in UTF-8."""
        text = self._text(id)
        own = self._own_bytes(id) if _UNKNOWN in text else None
        return text.encode() if own is None or own.decode(errors="replace") != text else own

    def _text(self, id: int) -> str:
        whole = self._decode([*self._letter, id])
        if id in self._special or not whole.startswith(self._shown):
            return self._decode([id])
        return whole[len(self._shown) :]

    def _own_bytes(self, id: int) -> bytes | None:
        """The bytes that the vocabulary spells a token with; None: it spells characters."""
        piece = self._piece(id)
        if isinstance(piece, bytes) or piece is None:
            return piece
        if byte := ONE_BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if not BYTE_LEVEL.keys() >= set(piece):
            return None
        return bytes(BYTE_LEVEL[character] for character in piece)

    def _usual(self, text: str) -> int | None:
        """The token that texts are made of, of those that have this text; None: it is not known."""
        byte_level = "".join(_SPELLED[byte] for byte in text.encode())
        for piece in dict.fromkeys((text.replace(" ", "▁"), byte_level, text)):
            id = None if self.tokenizer is None else self.tokenizer.convert_tokens_to_ids(piece)
            if isinstance(id, int) and self._piece(id) == piece and self._text(id) == text:
                return id
        return None

    def _piece(self, id: int) -> Any:
        """The token in the vocabulary's spelling: text or, in some, bytes; None: it is not in the vocabulary."""
        return None if self.tokenizer is None else self.tokenizer.convert_ids_to_tokens([id])[0]

    def _decode(self, ids: list[int]) -> str:
        return (
            ""
            if self.tokenizer is None
            else str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        )


@lru_cache(maxsize=2)
def names_of(tokenizer: PreTrainedTokenizerBase | None) -> TokenNames:
    """The names of a tokenizer's tokens, which are kept between requests."""
    return TokenNames(tokenizer)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _escaped(data: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(tokens: Sequence[LawfulToken], names: TokenNames) -> dict[str, Any]:
    """The object ``logprobs`` of a completion; its lists are iterators, as an answer may be large."""
    return {
        "tokens": (names.name(token.id) for token in tokens),
        "token_logprobs": (token.logprob for token in tokens),
        "top_logprobs": (_top(token, names) for token in tokens),
        "text_offset": (token.offset for token in tokens),
    }


def _top(token: LawfulToken, names: TokenNames) -> dict[str, float] | None:
    """By name: the token itself and the most probable ones."""
    if token.logprob is None:
        return None
    found = {names.name(token.id): token.logprob}
    for one in token.top or ():
        if one.id != token.id:
            name = names.name(one.id)
            found[f"token_id:{one.id}" if name in found else name] = one.logprob
    return found


def chat_logprobs(tokens: Sequence[LawfulToken], names: TokenNames) -> dict[str, Any]:
    """The object ``logprobs`` of a chat completion; its list is an iterator, as an answer may be large."""
    return {
        "content": (
            {
                **_chat_token(token.id, token.logprob, names),
                "top_logprobs": [_chat_token(one.id, one.logprob, names) for one in token.top or ()],
            }
            for token in tokens
        ),
        "refusal": None,
    }


def _chat_token(id: int, logprob: float | None, names: TokenNames) -> dict[str, Any]:
    return {"token": names.name(id), "logprob": logprob, "bytes": list(names.bytes_of(id))}
