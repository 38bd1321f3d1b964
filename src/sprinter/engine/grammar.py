"""Structured output: what a request's text must be, as masks of tokens, by llguidance.

A mask needs the text alone, so it is computed in a thread while the model reads the text, and kept until both models
have used it. The matcher follows whichever text it is asked about, forwards and back.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sprinter.decode.sequence import common_prefix
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError, install_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

__all__ = ["Grammars", "TextGrammar"]

_KEPT = 64  # masks of a text, and compiled grammars of a pair
# As ``json.dumps`` writes: few places where a text may go on in several ways, and no endless white space.
_JSON: dict[str, Any] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_LONGEST = 1 << 20
"""Maximum number of characters of a grammar."""


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "sprinter-masks")


class Grammars:
    """The compiled grammars of a pair's requests.

    Args:
        tokenizer: the pair's; None: there is none, and every grammar is refused.
        vocab: size of the pair's common vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._own: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def of(self, options: GenerationOptions, ends: Sequence[int]) -> TextGrammar | None:
        """The grammar of a new text; None: its options name none.

        Args:
            ends: EOS and stop tokens, which may be written where the grammar may end, and nowhere else.

        Raises:
            UserError: it cannot be read or followed, or the pair has no tokenizer or no EOS token.
        """
        if (asked := _asked(options)) is None:
            return None
        name, text = asked
        if not ends:
            raise UserError(f"{name} needs an EOS token, and this pair has none: give stop_token_ids=[...]")
        with self._lock:
            known = self._compiled.get(text)
        if known is None:  # without the lock: another request need not wait for a slow one
            known = self._compile(name, text)
        with self._lock:
            self._compiled[text] = known
            self._compiled.move_to_end(text)  # the one that was used longest ago is first
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return TextGrammar(known.deep_copy(), self._vocab, ends)

    def _compile(self, name: str, grammar: str) -> LLMatcher:
        llguidance = _llguidance(name)
        with self._lock:
            if self._own is None:
                self._own = _own_tokenizer(llguidance, self._tokenizer, self._vocab, name)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher: LLMatcher = llguidance.LLMatcher(self._own, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:300]
            raise UserError(f"{name} cannot be followed: {reason}")
        return matcher


def _llguidance(name: str) -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError:
        raise UserError(f"{name} needs llguidance: {install_line('grammar')}") from None
    return llguidance


def _own_tokenizer(
    llguidance: Any, tokenizer: PreTrainedTokenizerBase | None, vocab: int, name: str
) -> LLTokenizer:
    if tokenizer is None:
        raise UserError(f"{name} needs a tokenizer, and this pair has none: load it with tokenizer=...")
    size = max(vocab, max(tokenizer.get_vocab().values(), default=0) + 1)
    eos = 0 if tokenizer.eos_token_id is None else tokenizer.eos_token_id  # not read: ends are ours
    try:
        made: LLTokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=eos)
    except Exception as error:
        raise UserError(f"{name} cannot be followed with this pair's tokenizer: {error}") from None
    return made


def _asked(options: GenerationOptions) -> tuple[str, str] | None:
    """The option that names a grammar, and the grammar in llguidance's terms; None: none does."""
    given: dict[str, Any] = {
        "response_format": options.response_format, "grammar": options.grammar, "regex": options.regex,
        "choices": list(options.choices),
    }  # fmt: skip
    if given["response_format"] == {"type": "text"}:
        del given["response_format"]
    named = [name for name, value in given.items() if value]
    if not named:
        return None
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)} both say what the text must be: give one of them")
    (name,) = named
    text = _READ[name](given[name])
    if len(text) > _LONGEST:
        raise UserError(f"{name} has more than {_LONGEST} characters: give a smaller one")
    return name, text


def _read_format(given: Mapping[str, Any]) -> str:
    kind = given.get("type")
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise UserError("response_format names no schema: give {'json_schema': {'schema': {...}}}")
    else:
        raise UserError(f"response_format has type {kind!r}: give 'text', 'json_object' or 'json_schema'")
    llguidance = _llguidance("response_format")
    try:
        return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"response_format cannot be followed: {error}") from None


def _reader(name: str, kind: str) -> Callable[[Any], str]:
    def read(given: Any) -> str:
        try:
            return str(_llguidance(name).grammar_from(kind, json.dumps(given) if kind == "choice" else given))
        except ValueError as error:
            raise UserError(f"{name} cannot be followed: {error}") from None

    return read


_READ: Mapping[str, Callable[[Any], str]] = {
    "response_format": _read_format, "grammar": _reader("grammar", "grammar"), "regex": _reader("regex", "regex"),
    "choices": _reader("choices", "choice"),
}  # fmt: skip


class TextGrammar:
    """See ``Grammar``.

    Args:
        matcher: of this text alone, at its beginning.
        vocab: size of the masks.
        ends: EOS and stop tokens.
    """

    def __init__(self, matcher: LLMatcher, vocab: int, ends: Sequence[int]) -> None:
        self._matcher, self._vocab, self._ends = matcher, vocab, list(dict.fromkeys(ends))
        self._at: list[int] = []  # tokens that the matcher has read
        self._words = np.full((1, (vocab + 31) // 32), -1, np.int32)
        self._known: OrderedDict[tuple[int, ...], NDArray[np.uint8]] = OrderedDict()
        self._pending: Future[Tensor] | None = None

    def masks(self, texts: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        """See ``Grammar``."""
        self._wait()
        self._pending = _threads().submit(self._masks, [tuple(text) for text in texts])
        return self._pending.result

    def kept(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """See ``Grammar``."""
        self._wait()
        if not self._go(text):
            return len(tokens)
        count = self._matcher.validate_tokens(list(tokens))
        ended = count < len(tokens) and tokens[count] in self._ends and self._go([*text, *tokens[:count]])
        return count + bool(ended and self._matcher.is_accepting())

    def forced(self, text: Sequence[int]) -> list[int]:
        """See ``Grammar``."""
        self._wait()
        if not self._go(text):
            return []
        if self._matcher.is_stopped():
            return self._ends[:1]
        return self._matcher.compute_ff_tokens()

    def _wait(self) -> None:
        """The matcher is asked by one thread at a time."""
        if self._pending is not None:
            self._pending.exception()

    def _masks(self, texts: Sequence[tuple[int, ...]]) -> Tensor:
        bits = np.stack([self._mask(text) for text in texts])
        return torch.from_numpy(
            np.unpackbits(bits, axis=1, count=self._vocab, bitorder="little").view(np.bool_)
        )

    def _mask(self, text: tuple[int, ...]) -> NDArray[np.uint8]:
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._compute(text)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return known

    def _compute(self, text: tuple[int, ...]) -> NDArray[np.uint8]:
        words, matcher = self._words, self._matcher
        if not self._go(text):
            return np.full(words.nbytes, 255, np.uint8)
        accepting, stopped = matcher.is_accepting(), matcher.is_stopped()
        if stopped:
            words.fill(0)
        else:
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:300]
            raise UserError(f"the grammar cannot be followed after {len(text)} new tokens: {reason}")
        bits: NDArray[np.uint8] = words.view(np.uint8)[0].copy()
        for id in self._ends:
            byte, bit = id >> 3, np.uint8(1 << (id & 7))
            bits[byte] = bits[byte] | bit if accepting else bits[byte] & ~bit
        return bits

    def _go(self, text: Sequence[int]) -> bool:
        """Move the matcher to a text; False: the grammar does not allow it, or it has ended."""
        text = list(text)
        same = common_prefix(self._at, text)
        if same < len(self._at):
            self._matcher.rollback(len(self._at) - same)
            del self._at[same:]
        if same < len(text):
            if self._matcher.is_stopped():
                return False
            count = self._matcher.try_consume_tokens(text[same:])
            self._at += text[same : same + count]
        return len(self._at) == len(text)
