"""Log-probabilities of tokens in OpenAI's two shapes. They are the target's own, of its raw law at temperature 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from sprinter.decode.draft import Token, TopToken
from sprinter.engine.ending import Detokenizer
from sprinter.engine.scoring import ScoredToken

__all__ = ["LawfulToken", "chat_logprobs", "completion_logprobs", "of_prompt", "of_tokens"]


@dataclass(frozen=True, slots=True)
class LawfulToken:
    """A token with its log-probability.

    Attributes:
        text: the text that it completes. logprob, top: None where the target has not been asked.
    """

    id: int
    text: str
    logprob: float | None
    top: Sequence[TopToken] | None


def of_tokens(tokens: Iterable[Token]) -> list[LawfulToken]:
    """The tokens of a generated text."""
    return [LawfulToken(token.id, token.text, token.logprob, token.top_logprobs) for token in tokens]


def of_prompt(
    ids: Sequence[int], scored: Sequence[ScoredToken] | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[LawfulToken]:
    """The tokens of a prompt; the first one follows nothing and has no log-probability."""
    writer = None if tokenizer is None else Detokenizer(tokenizer)
    texts = ["" if writer is None else writer.push(id) for id in ids]
    if writer is not None and texts:
        texts[-1] += writer.flush()
    laws: list[ScoredToken | None] = [None] * len(ids)
    if scored is not None:
        laws[1:] = scored
    return [
        LawfulToken(id, text, law and law.logprob, law and law.top)
        for id, text, law in zip(ids, texts, laws, strict=True)
    ]


def completion_logprobs(
    tokens: Sequence[LawfulToken], tokenizer: PreTrainedTokenizerBase | None, offset: int
) -> dict[str, Any]:
    """The object ``logprobs`` of a completion.

    Args:
        offset: number of characters of the answer before these tokens.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [_spelled(token.id, tokenizer) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token, tokenizer) for token in tokens],
        "text_offset": offsets,
    }


def _top(token: LawfulToken, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, float] | None:
    """By text: the token itself and the most probable ones; of two with one text, the more probable."""
    if token.logprob is None:
        return None
    found = {_spelled(token.id, tokenizer): token.logprob}
    for one in token.top or ():
        text = _spelled(one.id, tokenizer)
        found[text] = max(one.logprob, found.get(text, one.logprob))
    return found


def chat_logprobs(tokens: Sequence[LawfulToken], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """The object ``logprobs`` of a chat completion."""
    return {
        "content": [
            {
                **_chat_token(token.id, token.logprob, tokenizer),
                "top_logprobs": [_chat_token(one.id, one.logprob, tokenizer) for one in token.top or ()],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _chat_token(id: int, logprob: float | None, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    text = _spelled(id, tokenizer)
    partial = "\ufffd" in text  # a part of a character, whose bytes are not known here
    return {"token": text, "logprob": logprob, "bytes": None if partial else list(text.encode())}


def _spelled(id: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A token's text by itself, special tokens included."""
    if tokenizer is None:
        return f"token_id:{id}"
    return str(tokenizer.decode([id], clean_up_tokenization_spaces=False))
