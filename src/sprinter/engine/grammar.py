"""Structured output: what a request's text must be, as masks of tokens, by llguidance.

A mask needs the text alone, so it is computed in a thread while the model reads the text, and kept until both models
have used it. A matcher follows whichever text it is asked about, forwards and back. Owners take turns in the threads.

Where one string of bytes must follow, llguidance spells all of it before it answers: with a rule that repeats a string
without end, for minutes and in any amount of memory. So each text has two matchers. One allows every spelling, at a
bounded cost; the other is asked where what must follow is known to be short.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sprinter.decode.sequence import common_prefix
from sprinter.engine.grammar_trial import LIMITS, is_plain, on_deep_stack, trial
from sprinter.engine.mask_threads import MaskThreads, note_held
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError, install_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

__all__ = ["Grammars", "TextGrammar", "is_confined"]

_KEPT = 64  # masks of a text
_KEPT_BYTES = 512 << 20  # of compiled grammars of a pair
# As ``json.dumps`` writes: few places where a text may go on in several ways, and no endless white space.
_JSON: dict[str, Any] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_LONGEST = 1 << 20
"""Maximum number of characters of a grammar."""
_FREE = '%llguidance {"no_forcing": true}\n'
_SLOWEST_S = 0.05
"""CPU time for which a token may be read, with the interpreter's lock."""
_NO_TEXT = "NoExtensionBias"
_TOO_HARD = "takes too long, too much memory, or nests too deeply"
_CIRCLE = "a $ref or a rule must not need itself to begin"
_SPELLED = 48
"""Bytes that must follow, up to which they have their usual spelling; more are spelled in any way."""
_FEW = 16
"""Tokens that begin one string of bytes, at most."""
_FORCED = 8
"""Tokens that are found at once to be forced, at most: the other rows wait. A clock would make texts depend on it."""


_threads = cache(MaskThreads)


def is_confined(options: GenerationOptions) -> bool:
    """Whether options say what a text must be."""
    form = options.response_format
    return bool(options.grammar or options.regex or options.choices) or form not in (None, {"type": "text"})


class Grammars:
    """The compiled grammars of a pair's requests.

    Args:
        tokenizer: the pair's; None: there is none, and every grammar is refused.
        vocab: size of the pair's common vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._own: LLTokenizer | None = None
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
            self._tokens(_llguidance("grammar"), "grammar")

    def _tokens(self, llguidance: Any, name: str) -> LLTokenizer:
        with self._lock:
            if self._own is None:
                self._own = _own_tokenizer(llguidance, self._tokenizer, self._vocab, name)
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
        llguidance = _llguidance(name)
        own = self._tokens(llguidance, name)
        packages = Path(llguidance.__file__).resolve().parents[1]
        plain = name in ("response_format", "choices") and is_plain(grammar)
        if (size := 0 if plain else trial(grammar, packages)) is None:
            raise UserError(f"{name} cannot be followed: it {_TOO_HARD}; give a simpler one")

        def made(text: str) -> LLMatcher:
            limits = llguidance.LLParserLimits(**LIMITS)
            matcher: LLMatcher = llguidance.LLMatcher(own, text, log_level=0, limits=limits)
            if matcher.is_error():
                raise UserError(f"{name} cannot be followed: {_reason(matcher)}")
            return matcher

        # what is wrong with a grammar is said of its own text
        spelling, free = (on_deep_stack(partial(made, text)) for text in (grammar, _unforced(grammar)))
        first = TextGrammar((free, spelling), own, self._vocab)
        first.size += 2 * size
        try:
            first.begin()
        except UserError as error:
            if _NO_TEXT not in str(error):
                raise UserError(f"{name} cannot be followed: {_reason(free)}") from None
            raise UserError(f"{name} allows no text: {_CIRCLE}") from None
        return first


def _unforced(grammar: str) -> str:
    """A grammar in Lark's notation that allows all spellings."""
    if not grammar.startswith("{"):
        return _FREE + grammar
    (given,) = json.loads(grammar)["grammars"]
    return _FREE + (given["lark_grammar"] or f"start: %json {json.dumps(given['json_schema'])}")


def _reason(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:300]


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
        matchers: of all spellings of what must follow, and of the usual one alone, at the beginning; or the grammar
            whose matchers are copied when they are needed, which takes long for a large one.
        tokens: the bytes of tokens.
        vocab: size of the masks.
        ends: EOS and stop tokens.
        owner: whose text it is.

    Attributes:
        size: bytes that it takes, about, once it is compiled.
    """

    size = 4 << 20

    def __init__(
        self,
        matchers: tuple[LLMatcher, LLMatcher] | TextGrammar,
        tokens: LLTokenizer,
        vocab: int,
        ends: Sequence[int] = (),
        owner: str = "",
    ) -> None:
        self._matchers, self._tokens = matchers, tokens
        self._vocab, self._ends = vocab, list(dict.fromkeys(ends))
        self._known: OrderedDict[tuple[int, ...], tuple[NDArray[np.uint8], bool | None]] = OrderedDict()
        self._owner, self._lock = owner, Lock()
        self._must: tuple[list[int], list[int], bool] = [], [], False
        """A text and longest tokens that must follow, their sizes in bytes, and whether nothing more must."""

    def begin(self) -> None:
        """Find what may follow the empty text: a large grammar takes long over it, but its copies do not.

        Raises:
            UserError: nothing, or it cannot be found.
        """
        if not self._free.mask().any() and not self._free.matcher.is_accepting():
            raise UserError(_NO_TEXT)
        self._forced(())
        self._free.go(()), self._spelling.go(())

    def copy(self, ends: Sequence[int], owner: str) -> TextGrammar:
        """The grammar of another text, at its beginning, as this one is."""
        made = TextGrammar(self, self._tokens, self._vocab, ends, owner)
        path, sizes, over = self._must
        for text, (bits, may_end) in self._known.items():  # its own: the ends are written into them
            made._known[text] = bits.copy(), may_end
        made._must = path.copy(), sizes.copy(), over
        return made

    @cached_property
    def _followers(self) -> tuple[_Follower, _Follower]:
        given = self._matchers
        if isinstance(given, TextGrammar):
            with given._lock:
                free, spelling = (one.matcher.deep_copy() for one in given._followers)
        else:
            free, spelling = given
        return _Follower(free, self._vocab), _Follower(spelling, self._vocab)

    @property
    def _free(self) -> _Follower:
        return self._followers[0]

    @property
    def _spelling(self) -> _Follower:
        return self._followers[1]

    def masks(self, texts: Sequence[Sequence[int]]) -> Future[Tensor]:
        """See ``Grammar``."""
        return _threads().submit(self._owner, partial(self._masks, [tuple(text) for text in texts]))

    def kept(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """See ``Grammar``."""
        with self._lock:
            free = self._free
            if not free.go(text):
                return len(tokens)
            count = free.matcher.validate_tokens(list(tokens))
            ended = count < len(tokens) and tokens[count] in self._ends and free.go([*text, *tokens[:count]])
            return count + bool(ended and free.matcher.is_accepting())

    def forced(self, text: Sequence[int]) -> Future[Sequence[int]]:
        """See ``Grammar``."""
        return _threads().submit(self._owner, partial(self._forced, tuple(text)))

    def _forced(self, text: tuple[int, ...]) -> list[int]:
        found: list[int] = []
        with self._lock:
            while len(found) < _FORCED and self._free.go(path := (*text, *found)):
                if self._free.matcher.is_stopped():
                    return found or self._ends[:1]
                ids = _ids(self._mask(path), 2)
                if len(ids) != 1:
                    break
                found += ids
        return found

    def _masks(self, texts: Sequence[tuple[int, ...]]) -> Tensor:
        with self._lock:
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
        bits, may_end = known
        for id in self._ends if may_end is not None else ():
            byte, bit = id >> 3, np.uint8(1 << (id & 7))
            bits[byte] = bits[byte] | bit if may_end else bits[byte] & ~bit
        return bits

    def _compute(self, text: tuple[int, ...]) -> tuple[NDArray[np.uint8], bool | None]:
        """The tokens that may follow a text, and whether it may end there; None: all may follow."""
        free = self._free
        if not free.go(text):
            return np.full_like(free.bits, 255), None
        accepting, stopped = free.matcher.is_accepting(), free.matcher.is_stopped()
        bits = np.zeros_like(free.bits) if stopped else free.mask()
        if not accepting and self._is_short(text, bits) and self._spelling.go(text):
            bits = self._spelling.mask()
        return bits, accepting

    def _is_short(self, text: tuple[int, ...], bits: NDArray[np.uint8]) -> bool:
        """Whether some bytes must follow a text, and not many; ``bits``: all spellings."""
        free, (path, sizes, over) = self._free, self._must
        if len(path) < len(text) or path[: len(text)] != list(text):
            path, sizes, over = list(text), [0] * len(text), False
        while not over and sum(sizes[len(text) :]) < _SPELLED:
            if len(path) > len(text):
                over = not free.go(path) or free.matcher.is_accepting() or free.matcher.is_stopped()
                bits = np.zeros_like(bits) if over else free.mask()
            ids = _ids(bits, _FEW + 1)
            words = {id: self._tokens.decode_bytes([id]) for id in ids}
            longest = max(ids, key=lambda id: len(words[id]), default=0)
            if over := not 0 < len(ids) <= _FEW or not all(map(words[longest].startswith, words.values())):
                break
            path.append(longest)
            sizes.append(max(1, len(words[longest])))
        self._must = path, sizes, over
        return 0 < sum(sizes[len(text) :]) < _SPELLED


class _Follower:
    """A matcher at a text."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self.matcher = matcher
        self._at: list[int] = []  # tokens that it has read
        self._words = np.full((1, (vocab + 31) // 32), -1, np.int32)
        self.bits: NDArray[np.uint8] = self._words.view(np.uint8)[0]

    def go(self, text: Sequence[int]) -> bool:
        """Move to a text; False: the grammar does not allow it, or it has ended.

        Raises:
            UserError: it cannot be followed there.
        """
        text = list(text)
        same = common_prefix(self._at, text)
        if same < len(self._at):
            self.matcher.rollback(len(self._at) - same)
            del self._at[same:]
        if same < len(text):
            if self.matcher.is_stopped():
                return False
            began = time.thread_time()
            count = self.matcher.try_consume_tokens(text[same:])
            self._check(same + count)
            note_held(took_s := time.thread_time() - began)
            if took_s > _SLOWEST_S * (len(text) - same):
                raise UserError(f"the grammar is too slow after {same} new tokens: give a simpler one")
            self._at += text[same : same + count]
        return len(self._at) == len(text)

    def mask(self) -> NDArray[np.uint8]:
        """The tokens that may follow, one bit each."""
        self.matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check(len(self._at))
        return np.array(self.bits)

    def _check(self, count: int) -> None:
        if self.matcher.is_error():
            reason = _reason(self.matcher)
            raise UserError(
                f"the grammar cannot be followed after {count} new tokens: {reason}; give a simpler one"
            )


def _ids(bits: NDArray[np.uint8], at_most: int) -> list[int]:
    """The tokens of a mask if they are fewer than so many; else some that are as many."""
    bytes_ = np.flatnonzero(bits)[:at_most]
    found = [8 * int(byte) + bit for byte in bytes_ for bit in range(8) if int(bits[byte]) >> bit & 1]
    return found[:at_most]
