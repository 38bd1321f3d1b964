"""Structured output: what a request's text must be, as masks of tokens, by llguidance.

A mask needs the text alone, so it is computed in a thread while the model reads the text, and kept until both models
have used it. A hard grammar is followed in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sprinter.engine.grammar_process import GrammarProcess, GrammarProcesses, ProcessText
from sprinter.engine.grammar_text import GrammarError, GrammarText, compiled, is_plain, tokenizer_of
from sprinter.engine.mask_threads import MaskThreads
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError, install_line

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["Grammars", "TextGrammar", "is_confined"]

_KEPT_BYTES = 512 << 20  # of compiled grammars of a pair
_PROCESS = 1 << 20  # bytes of a grammar here that is followed in a process
# As ``json.dumps`` writes: few places where a text may go on in several ways, and no endless white space.
_JSON: dict[str, Any] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_LONGEST = 1 << 20
"""Maximum number of characters of a grammar."""
_FORMATS = frozenset((
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
    "color", "host-name", "ip-address", "phone", "style", "utc-millisec",
))  # fmt: skip
"""Formats of strings that a version of JSON Schema defines."""
_threads = cache(MaskThreads)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a fork has none of them


def is_confined(options: GenerationOptions) -> bool:
    """Whether options say what a text must be."""
    form = options.response_format
    return bool(options.grammar or options.regex or options.choices) or form not in (None, {"type": "text"})


class _Own(NamedTuple):
    """What grammars need of a tokenizer, and the processes that have it too."""

    tokens: LLTokenizer
    processes: GrammarProcesses


class Grammars:
    """The compiled grammars of a pair's requests.

    Args:
        tokenizer: the pair's; None: there is none, and every grammar is refused.
        vocab: size of the pair's common vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._own: _Own | None = None
        self._compiled: OrderedDict[str, TextGrammar] = OrderedDict()
        self._used: WeakValueDictionary[str, TextGrammar] = WeakValueDictionary()
        self._last: tuple[Any, tuple[str, str] | None] = None, None  # a response_format, and what it asks
        self._lock = Lock()

    def of(self, options: GenerationOptions, ends: Sequence[int], owner: str = "") -> TextGrammar | None:
        """The grammar of a new text; None: its options name none.

        Args:
            ends: EOS and stop tokens, which may be written where the grammar may end, and nowhere else.
            owner: whose text it is.

        Raises:
            UserError: it cannot be read or followed, or the pair has no tokenizer or no EOS token.
        """
        if (asked := self._asked(options)) is None:
            return None
        if not ends:
            raise UserError(
                f"{asked[0]} needs an EOS token, and this pair has none: give stop_token_ids=[...]"
            )
        return self._known(*asked).copy(ends, owner)

    def prepare(self, options: GenerationOptions) -> TextGrammar | None:
        """Compile the grammar of texts to come, which is known as long as it is held; errors as for ``of``."""
        return None if (asked := self._asked(options)) is None else self._known(*asked)

    def warm(self) -> None:
        """Make what the first grammar needs, which takes up to a second, if llguidance is there."""
        with suppress(UserError):
            self._tokens("grammar")

    def _tokens(self, name: str) -> _Own:
        with self._lock:
            if self._own is None:
                self._own = _own_tokenizer(self._tokenizer, self._vocab, name)
            return self._own

    def _asked(self, options: GenerationOptions) -> tuple[str, str] | None:
        """``_asked``, once for all texts of a request."""
        form = None if options.grammar or options.regex or options.choices else options.response_format
        with self._lock:
            last, asked = self._last
        if form is None or form is not last:
            asked = _asked(options)
            with self._lock:
                self._last = form, asked
        return asked

    def _known(self, name: str, text: str) -> TextGrammar:
        with self._lock:
            known = self._compiled.get(text) or self._used.get(text)
        if known is None:  # without the lock: another request need not wait for a slow one
            known = self._compile(name, text)
        with self._lock:
            self._compiled[text] = self._used[text] = known
            self._compiled.move_to_end(text)  # the one that was used longest ago is first
            while sum(one.size for one in self._compiled.values()) > _KEPT_BYTES and len(self._compiled) > 1:
                self._compiled.popitem(last=False)
        return known

    def _compile(self, name: str, grammar: str) -> TextGrammar:
        own = self._tokens(name)
        try:
            if is_plain(name, grammar):
                return TextGrammar(compiled(grammar, own.tokens, self._vocab), self._vocab)
            process = own.processes.follow(grammar)
        except GrammarError as error:
            raise UserError(f"{name} {error}") from None
        return TextGrammar(process, self._vocab, size=_PROCESS)


def _llguidance(name: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError(f"{name} needs llguidance: {install_line('grammar')}") from None
    return llguidance


def _own_tokenizer(tokenizer: PreTrainedTokenizerBase | None, vocab: int, name: str) -> _Own:
    _llguidance(name)
    if tokenizer is None:
        raise UserError(f"{name} needs a tokenizer, and this pair has none: load it with tokenizer=...")
    size = max(vocab, max(tokenizer.get_vocab().values(), default=0) + 1)
    eos = 0 if tokenizer.eos_token_id is None else tokenizer.eos_token_id  # not read: ends are ours
    try:
        backend = copy(tokenizer.backend_tokenizer)  # what it pads and cuts off is no part of texts
        backend.no_padding(), backend.no_truncation()
        given = backend.to_str(), size, eos
        return _Own(tokenizer_of(*given), GrammarProcesses(given))
    except Exception as error:
        raise UserError(f"{name} cannot be followed with this pair's tokenizer: {error}") from None


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
        text = json.dumps(schema, default=dict)  # mappings of other types
        if not _FORMATS.issuperset(
            re.findall(r'"format": "(.*?)"', text)
        ):  # a walk that takes longer than all else
            text = json.dumps(_checked(schema))
        return str(llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_JSON))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"response_format cannot be followed: {error}") from None


def _checked(schema: Any) -> Any:
    """A schema without formats that no version of JSON Schema defines: they are notes, such as pydantic's "path"."""
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_checked(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value if name in ("const", "enum") else _checked(value) for name, value in schema.items()
        if name != "format" or not isinstance(value, str) or value in _FORMATS
    }  # fmt: skip


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
    """See ``Grammar``; its questions are answered in threads, in which owners take turns.

    Args:
        text: what answers. vocab: size of the masks. owner: whose text it is.

    Attributes:
        size: bytes that it takes, about.
    """

    def __init__(
        self,
        text: GrammarText | GrammarProcess | ProcessText,
        vocab: int,
        owner: str = "",
        size: int = 4 << 20,
    ) -> None:
        self._text, self._vocab, self._owner, self.size = text, vocab, owner, size
        self._lock = Lock()

    def copy(self, ends: Sequence[int], owner: str) -> TextGrammar:
        """The grammar of another text.

        Args:
            ends: EOS and stop tokens, which may be written where the grammar may end, and nowhere else.
        """
        assert not isinstance(self._text, ProcessText)
        return TextGrammar(self._text.copy(ends), self._vocab, owner, self.size)

    def masks(self, texts: Sequence[Sequence[int]]) -> Future[Tensor]:
        """See ``Grammar``."""
        return _threads().submit(self._owner, partial(self._masks, [tuple(text) for text in texts]))

    def kept(self, text: Sequence[int], tokens: Sequence[int]) -> Future[int]:
        """See ``Grammar``."""
        return _threads().submit(self._owner, partial(self._answer, "kept", tuple(text), tuple(tokens)))

    def forced(self, text: Sequence[int]) -> Future[Sequence[int]]:
        """See ``Grammar``."""
        return _threads().submit(self._owner, partial(self._answer, "forced", tuple(text)))

    def _answer(self, name: str, *given: Any) -> Any:
        try:
            with self._lock:
                return getattr(self._text, name)(*given)
        except GrammarError as error:
            raise UserError(f"the grammar {error}") from None

    def _masks(self, texts: Sequence[tuple[int, ...]]) -> Tensor:
        bits = self._answer("masks", texts)
        return torch.from_numpy(
            np.unpackbits(bits, axis=1, count=self._vocab, bitorder="little").view(np.bool_)
        )
