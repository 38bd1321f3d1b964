"""What a grammar says of texts, by llguidance: which tokens may follow, and which must.

llguidance holds the interpreter's lock while it reads tokens, for a tenth of a second if a grammar is hard. It may take
hours and all memory over a few characters (``multipleOf``, patterns that must all hold), and overflows its thread's
stack where rules nest deeply. So hard grammars are followed in processes of their own, with limits, whose end ends no
server. For them this file runs as a script, in a Python that need not know this package: it makes the tokenizer, and
forks for each grammar that it is sent.

Where one string of bytes must follow, llguidance spells all of it before it answers: with a rule that repeats a string
without end, for minutes and in any amount of memory. So each text has two matchers. One allows every spelling, at a
bounded cost; the other is asked where what must follow is known to be short.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

if __name__ == "__main__":  # the folders that have packages, in the process that began this one
    sys.path[:] = json.loads(sys.argv[1])

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

__all__ = ["GrammarError", "GrammarText", "compiled", "is_plain", "receive", "send", "tokenizer_of"]

Made = TypeVar("Made")
_PLAIN = 1 << 12  # characters of a schema that needs no process
_HARD = ('"multipleOf"', '"pattern', '"allOf"', '"format"')
_LIMITS = {"verbose_errors": False, "max_items_in_row": 50_000, "max_grammar_size": 1 << 14}
"""Limits of a parser. Of a row each alternative of a schema has some items. A token takes up to the square of the
grammar's size: a tenth of a second at this one."""
_COMPILE_S, _FOLLOW_S, _TOKEN_S = 5, 2, 0.005
"""CPU time after which a process ends that compiles a grammar, or answers about one; more for each token of the text,
which a new process reads anew."""
_WALL_S = 60
"""Time after which it ends too: others may have all CPU time."""
_COMPILED, _FOLLOWED = 48 << 20, 256 << 20
"""Bytes that a process may take to compile a grammar, and in all."""
_STACK = 64 << 20  # bytes
_NICE = 10  # of processes
_KEPT = 64  # masks of a text
_FREE = '%llguidance {"no_forcing": true}\n'
_SLOWEST_S = 0.05
"""CPU time for which a token may be read."""
_NO_TEXT = "NoExtensionBias"
_CIRCLE = "a $ref or a rule must not need itself to begin"
_SPELLED = 48
"""Bytes that must follow, up to which they have their usual spelling; more are spelled in any way."""
_FEW = 16
"""Tokens that begin one string of bytes, at most."""
_FORCED = 8
"""Tokens that are found at once to be forced, at most: the other rows wait. A clock would make texts depend on it."""
_stacks = threading.Lock()


class GrammarError(ValueError):
    """A grammar cannot be compiled or followed; the message goes on from its name, or from "the grammar"."""


def is_plain(name: str, grammar: str) -> bool:
    """Whether a schema, or choices, are so few and simple that they need no process of their own.

    Args:
        name: of the option that asks for it.
    """
    few = name in ("response_format", "choices") and len(grammar) < _PLAIN
    return few and not any(word in grammar for word in _HARD)


def tokenizer_of(json: str, vocab: int, eos: int) -> LLTokenizer:
    """What matchers know of a tokenizer, given as the text of ``tokenizer.json``; a large one takes a second."""
    from llguidance import LLTokenizer

    return LLTokenizer(json, n_vocab=vocab, eos_token=eos)


def compiled(grammar: str, tokens: LLTokenizer, vocab: int) -> GrammarText:
    """A grammar in llguidance's terms at the beginning of its texts, to be copied for each.

    Args:
        vocab: size of the masks.

    Raises:
        GrammarError: it cannot be compiled, or allows no text.
    """
    from llguidance import LLMatcher, LLParserLimits

    def made(text: str) -> LLMatcher:
        matcher = LLMatcher(tokens, text, log_level=0, limits=LLParserLimits(**_LIMITS))  # type: ignore[arg-type]
        if matcher.is_error():
            raise GrammarError(f"cannot be followed: {_reason(matcher)}")
        return matcher

    # what is wrong with a grammar is said of its own text
    spelling, free = _on_deep_stack(lambda: (made(grammar), made(_unforced(grammar))))
    first = GrammarText((free, spelling), tokens, vocab)
    try:
        first.begin()
    except GrammarError as error:
        if _NO_TEXT not in str(error):
            raise
        raise GrammarError(f"allows no text: {_CIRCLE}") from None
    return first


def _unforced(grammar: str) -> str:
    """A grammar in Lark's notation that allows all spellings."""
    if not grammar.startswith("{"):
        return _FREE + grammar
    (given,) = json.loads(grammar)["grammars"]
    return _FREE + (given["lark_grammar"] or f"start: %json {json.dumps(given['json_schema'])}")


def _reason(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:300]


class GrammarText:
    """The grammar of one text. It follows whichever text it is asked about, forwards and back. For one thread.

    Args:
        matchers: of all spellings of what must follow, and of the usual one alone, at the beginning; or the grammar
            whose matchers are copied when they are needed, which takes long for a large one.
        tokens: the bytes of tokens.
        vocab: size of the masks.
        ends: EOS and stop tokens, which may be written where the grammar may end, and nowhere else.
    """

    def __init__(
        self,
        matchers: tuple[LLMatcher, LLMatcher] | GrammarText,
        tokens: LLTokenizer,
        vocab: int,
        ends: Sequence[int] = (),
    ) -> None:
        self._matchers, self._tokens = matchers, tokens
        self._vocab, self._ends = vocab, list(dict.fromkeys(ends))
        self._known: OrderedDict[tuple[int, ...], tuple[NDArray[np.uint8], bool | None]] = OrderedDict()
        self._lock = threading.Lock()  # of the matchers, of which others are copied
        self._must: tuple[list[int], list[int], bool] = [], [], False
        """A text and longest tokens that must follow, their sizes in bytes, and whether nothing more must."""

    def begin(self) -> None:
        """Find what may follow the empty text: a large grammar takes long over it, but its copies do not.

        Raises:
            GrammarError: nothing, or it cannot be found.
        """
        if not self._free.mask().any() and not self._free.matcher.is_accepting():
            raise GrammarError(_NO_TEXT)
        self.forced(())
        self._free.go(()), self._spelling.go(())

    def copy(self, ends: Sequence[int]) -> GrammarText:
        """The grammar of another text, at its beginning, as this one is."""
        made = GrammarText(self, self._tokens, self._vocab, ends)
        path, sizes, over = self._must
        for text, (bits, may_end) in self._known.items():  # its own: the ends are written into them
            made._known[text] = bits.copy(), may_end
        made._must = path.copy(), sizes.copy(), over
        return made

    @cached_property
    def _followers(self) -> tuple[_Follower, _Follower]:
        given = self._matchers
        if isinstance(given, GrammarText):
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

    def masks(self, texts: Sequence[tuple[int, ...]]) -> NDArray[np.uint8]:
        """The tokens that may follow each text, a bit each: uint8 ``[n, 4 * ceil(V / 32)]``, lowest bits first."""
        return np.stack([self._mask(text) for text in texts])

    def kept(self, text: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        """Number of the first tokens that may follow a text one after the other."""
        for i, id in enumerate(tokens):
            if not int(self._mask((*text, *tokens[:i]))[id >> 3]) >> (id & 7) & 1:
                return i
        return len(tokens)

    def forced(self, text: tuple[int, ...]) -> list[int]:
        """Tokens that must follow a text, in their usual spelling if the grammar allows others of the same bytes."""
        found: list[int] = []
        while len(found) < _FORCED and self._free.go(path := (*text, *found)):
            if self._free.matcher.is_stopped():
                return found or self._ends[:1]
            ids = _ids(self._mask(path), 2)
            if len(ids) != 1:
                break
            found += ids
        return found

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
            GrammarError: it cannot be followed there.
        """
        text = list(text)
        pairs = enumerate(zip(self._at, text, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(self._at), len(text)))
        if same < len(self._at):
            self.matcher.rollback(len(self._at) - same)
            del self._at[same:]
            self._check(same)
        for i in range(same, len(text)):
            if self.matcher.is_stopped():
                return False
            if (
                i > same
            ):  # only masks give the lexer means to go on: without them it may not read what they allow
                self.mask()
            began = time.thread_time()
            count = self.matcher.try_consume_tokens(text[i : i + 1])
            self._check(i + count)
            if not count:
                self.mask()  # fails if it was not the grammar that did not allow the token
                return False
            self._at.append(text[i])
            if time.thread_time() - began > _SLOWEST_S:
                raise GrammarError(f"is too slow after {i} new tokens: give a simpler one")
        return True

    def mask(self) -> NDArray[np.uint8]:
        """The tokens that may follow, one bit each."""
        self.matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check(len(self._at))
        return np.array(self.bits)

    def _check(self, count: int) -> None:
        if self.matcher.is_error():
            reason = _reason(self.matcher)
            raise GrammarError(f"cannot be followed after {count} new tokens: {reason}; give a simpler one")


def _ids(bits: NDArray[np.uint8], at_most: int) -> list[int]:
    """The tokens of a mask if they are fewer than so many; else some that are as many."""
    bytes_ = np.flatnonzero(bits)[:at_most]
    found = [8 * int(byte) + bit for byte in bytes_ for bit in range(8) if int(bits[byte]) >> bit & 1]
    return found[:at_most]


def _on_deep_stack(work: Callable[[], Made]) -> Made:
    """The result of work that recurses, in a thread with a large stack."""
    found: list[Made] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="sprinter-grammar")
    with _stacks:  # the size is that of all threads that begin meanwhile
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


# --- a process ---
def send(stream: IO[bytes], given: Any, bits: NDArray[np.uint8] | None = None) -> None:
    """Write a message, and masks behind it."""
    shape = None if bits is None else bits.shape
    text = json.dumps([given, shape]).encode()
    stream.write(b"%d\n" % len(text) + text + (b"" if bits is None else bits.tobytes()))
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The message that comes, or its masks.

    Raises:
        EOFError: none comes.
    """
    size = stream.readline()
    text = stream.read(int(size or 0))
    if not text or len(text) < int(size):
        raise EOFError
    given, shape = json.loads(text)
    if shape is None:
        return given
    bits = stream.read(shape[0] * shape[1])
    if len(bits) < shape[0] * shape[1]:
        raise EOFError
    return np.frombuffer(bits, np.uint8).reshape(shape)


def _serve(tokens: LLTokenizer, vocab: int, asked: IO[bytes], answers: IO[bytes]) -> None:
    """Say that this process is there, compile the grammar that comes, and answer questions about its texts until they
    end. An answer is what is found, which may follow as masks, what is wrong, and the bytes that all takes."""
    send(answers, None)
    before, grammar, texts = _peak(), receive(asked), dict[int, GrammarText]()

    def answer(work: Callable[[], Any]) -> bool:
        found, error = None, None
        _alarm(_WALL_S)
        try:
            found = work()
        except GrammarError as wrong:
            error = str(wrong)
        _alarm(0)  # not while it waits for a question
        masks = isinstance(found, np.ndarray)
        send(answers, [None if masks else found, error, _peak() - before])
        if masks:
            send(answers, None, found)
        return error is None

    _limit(_COMPILE_S, _COMPILED)
    first: list[GrammarText] = []
    if not answer(lambda: first.append(compiled(grammar, tokens, vocab))):
        return
    _limit(_COMPILE_S, _FOLLOWED)
    while True:
        gone, text, ends, name, given = receive(asked)
        for one in gone:
            texts.pop(one, None)
        if text not in texts:
            texts[text] = first[0].copy(ends)
        asks = [tuple(map(_hashable, one)) for one in given]
        _limit(_FOLLOW_S + _TOKEN_S * max(len(one) for one in (asks[0] if name == "masks" else asks)))
        answer(partial(getattr(texts[text], name), *asks))


def _hashable(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _limit(cpu_s: float, more: int = 0) -> None:
    """Let this process end where it takes much more CPU time or, of bytes, so many more than now."""
    with suppress(ImportError, OSError, ValueError):  # another system, or harder limits already
        import resource

        used, hard = time.process_time(), resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + cpu_s) + 1, hard))
        if more:
            pages = int(Path("/proc/self/statm").read_text().split()[5])
            most = pages * resource.getpagesize() + more + _STACK
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _alarm(after_s: int) -> None:
    """Let this process end after so long; 0: not."""
    import signal

    if hasattr(signal, "alarm"):
        signal.alarm(after_s)


def _peak() -> int:
    """The most memory that this process has had, bytes; 0: the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def _main(control: int | None) -> None:
    """Make the tokenizer that the standard input has, then follow grammars: the one that it has next, or in a process
    each those of sockets that ``control`` brings."""
    given = receive(sys.stdin.buffer)
    tokens, vocab = tokenizer_of(*given), given[1]
    with suppress(OSError):
        os.nice(_NICE)  # behind the models
        # Linux shares time among sessions first, and this process has its own; the file is only there if so.
        if (shared := Path("/proc/self/autogroup")).exists():
            shared.write_text(str(_NICE))
    if control is None:
        _serve(tokens, vocab, sys.stdin.buffer, sys.stdout.buffer)
        return
    import signal
    import socket

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with suppress(OSError):  # whatever takes the system's memory, they end first, and are begun again
        Path("/proc/self/oom_score_adj").write_text("1000")
    first = os.getpid()
    with socket.socket(fileno=control) as bring:
        while True:
            word, (*found,), *_ = socket.recv_fds(bring, 1, 1)
            if not word:
                return
            with suppress(OSError):  # no process more can be made, and who asked finds the end of the socket
                if os.fork() == 0:
                    bring.close()
                    try:
                        _end_with(first)
                        stream: Any = socket.socket(fileno=found[0]).makefile("rwb")
                        _serve(tokens, vocab, stream, stream)
                    finally:
                        os._exit(0)
            os.close(found[0])


def _end_with(parent: int) -> None:
    """Let this process end with the one that forked it, whatever it computes; where the system cannot, it ends by its
    limits."""
    import ctypes
    import signal

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    _main(int(sys.argv[2]) if len(sys.argv) > 2 else None)
