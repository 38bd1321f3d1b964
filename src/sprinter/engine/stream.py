"""The text of a request as it is written: tokens become text, a stop string ends it, a stream hands it out.

The text of a generation excludes the prompt, the EOS or stop token that ended it, special tokens, and the stop string
with everything after it; its tokens include all of these but the prompt. The ``text`` of a token is the text that it
completes, so that the tokens' texts, streamed or not, join to the text of the generation. A text that continues its
prompt is decoded behind it: decode(prompt + new) = decode(prompt) + text. Stop rules, which end drafts, are in
``decode.stop``.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sprinter.decode.draft import Record, Token
from sprinter.decode.method import Method
from sprinter.engine.executor import Executor, RequestRun
from sprinter.engine.generation import Generation
from sprinter.engine.shares import pass_shares, without_chain
from sprinter.engine.tokens import check_text
from sprinter.errors import UserError

__all__ = [
    "Detokenizer",
    "Ending",
    "Spelling",
    "Stream",
    "TextWriter",
    "TokenReader",
    "advance",
    "continued_text",
    "cut_at_stop",
    "prompt_end",
    "special_ids",
]

_UNKNOWN = "\ufffd"
"""The replacement character, which stands for bytes that are no character, or not yet."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the tokens of a request become text.

    Attributes:
        silent: tokens without text: special tokens, EOS and stop tokens.
        stop: stop strings; they may also match the written form of silent tokens.
        before: last tokens of the prompt that the text continues, by ``prompt_end``; empty: it is a text by itself.

    Raises:
        UserError: a stop string that is empty or not text.
    """

    tokenizer: PreTrainedTokenizerBase
    silent: frozenset[int]
    stop: tuple[str, ...] = ()
    before: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(not isinstance(word, str) or not word for word in self.stop):
            raise UserError("a stop string is empty or not text: give non-empty strings")
        for word in self.stop:
            check_text("a stop string", word)

    def written(self, id: int) -> str:
        """The written form of a silent token, for example ``<|im_end|>``; "" for other tokens."""
        return str(self.tokenizer.decode([id])) if id in self.silent else ""

    def detokenizer(self) -> Detokenizer:
        """Create a detokenizer of the text."""
        return Detokenizer(self.tokenizer, self.silent, self.before)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokenizer's special tokens."""
    return frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)


class Ending:
    """Returns "stop" for a text in which its last token completes a stop string, else None.

    Each text must extend an earlier one by one token, as in the loop, where drafted tokens may have been dropped in
    between. So a call decodes one token, independent of the length of the text.

    Args:
        prompt_len: length of the prompt in tokens; only later tokens can end the text.
        spelling: holds the stop strings, which may span tokens and match within a draft.
    """

    def __init__(self, prompt_len: int, spelling: Spelling) -> None:
        self._prompt_len = prompt_len
        self._writers = [TextWriter(spelling)]  # writer i has read i tokens of the text

    def __call__(self, text: Sequence[int]) -> str | None:
        del self._writers[len(text) - self._prompt_len :]
        for id in text[self._prompt_len + len(self._writers) - 1 :]:
            writer = self._writers[-1].copy()
            writer.push(id)
            self._writers.append(writer)
        return "stop" if self._writers[-1].found else None


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    places = [place for place in (text.find(word) for word in stop) if place >= 0]
    return text[: min(places)] if places else text


class TextWriter:
    """The text of a generation, token by token; text that may be the beginning of a stop string is held back.

    Stop strings are searched for in the text, and in the text with silent tokens written out; the text ends before the
    match. The cost of a token does not depend on its position.

    Attributes:
        found: whether a stop string has ended the text; no text follows it.
        written: number of characters of the tokens so far, whatever is held back.
    """

    __slots__ = ("_detokenizer", "_full", "_kept", "_shown", "_spelling", "found", "written")

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._detokenizer = spelling.detokenizer()
        self._kept = ""  # text that is held back
        # The end of the text with silent tokens written out; for each character, "1" if it is in the text, else "0".
        self._full = self._shown = ""
        self.found, self.written = False, 0

    def copy(self) -> TextWriter:
        """An independent writer in the same state."""
        other = copy(self)
        other._detokenizer = copy(self._detokenizer)
        return other

    def push(self, id: int) -> str:
        """Add a token; returns the text that it completes."""
        if self.found:
            return ""
        text = self._detokenizer.push(id)
        self.written += len(text)
        return self._search(text, self._spelling.written(id)) if self._spelling.stop else text

    def finish(self) -> str:
        """End the text; returns held-back text that is not a stop string, and an unfinished character."""
        rest = self._detokenizer.flush()
        if self.found:
            return rest
        piece = self._search(rest, "")
        kept, self._kept = self._kept, ""
        return piece + kept

    def render(self, tokens: Sequence[Token], last: bool) -> None:
        """Fill in the text of each token, and where it is; ``last``: whether the last one gets the rest of the text."""
        for token in tokens:
            token.text_offset = self.written
            token.text = self.push(token.id)
        if last and tokens:
            tokens[-1].text += self.finish()

    def _search(self, text: str, hidden: str) -> str:
        stop = self._spelling.stop
        self._kept += text
        self._full += text + hidden
        self._shown += "1" * len(text) + "0" * len(hidden)
        at = len(cut_at_stop(self._full, stop))
        cut = min(len(cut_at_stop(self._kept, stop)), len(self._kept) - self._shown.count("1", at))
        if at < len(self._full) or cut < len(self._kept):
            self.found = True
            if cut < len(self._kept):  # else an unfinished character precedes the stop string
                self._detokenizer.flush()
            piece, self._kept = self._kept[:cut], ""
            return piece
        unsure = len(self._full) - _beginning(self._full, stop)
        self._full, self._shown = (
            self._full[len(self._full) - unsure :],
            self._shown[len(self._shown) - unsure :],
        )
        cut = min(_beginning(self._kept, stop), len(self._kept) - self._shown.count("1"))
        piece, self._kept = self._kept[:cut], self._kept[cut:]
        return piece


def _beginning(text: str, stop: Sequence[str]) -> int:
    """Index of the first possible beginning of an incomplete stop string; the text's length if there is none."""
    first = max(0, len(text) - max((len(word) for word in stop), default=1) + 1)
    places = range(first, len(text))
    return next((at for at in places if any(word.startswith(text[at:]) for word in stop)), len(text))


_CONTEXT = 16
"""Maximum number of earlier tokens that are decoded again with each new token."""
_PATIENCE = 8
"""Number of tokens after which bytes that form no character are emitted as is."""
_CHARACTER = 4
"""Maximum number of bytes, and so of tokens, of a character."""


def prompt_end(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], special: frozenset[int]
) -> tuple[int, ...]:
    """The last tokens of a prompt that a text behind it must be decoded with; without special tokens, which have no
    text. They begin with a whole character: where bytes are tokens, others do not show what they are."""
    longest = _CONTEXT + _CHARACTER - 1
    visible = tuple(islice((id for id in reversed(prompt) if id not in special), longest))[::-1]
    ends = [visible[-length:] for length in range(_CONTEXT, len(visible) + 1)] or [visible]
    return next((end for end in ends if not _whole(tokenizer, end)[1].startswith(_UNKNOWN)), ends[0])


def _whole(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[int, str]:
    """The number of tokens before an unfinished character, and their text; all tokens if it is no character."""
    for count in range(len(ids), max(0, len(ids) - _CHARACTER), -1):
        text = _decode(tokenizer, ids[:count])
        if not text.endswith(_UNKNOWN):
            return count, text
    return (len(ids), _decode(tokenizer, ids)) if len(ids) >= _CHARACTER else (0, "")


def continued_text(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens that continue a prompt."""
    special = special_ids(tokenizer)
    detokenizer = Detokenizer(tokenizer, special, prompt_end(tokenizer, prompt, special))
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


class Detokenizer:
    """Decodes tokens one by one into texts that join to the whole; a text is "" inside a character.

    Tokenization spaces are not cleaned up, as this would change text that was returned before.

    Args:
        tokenizer: any transformers tokenizer.
        silent: tokens without text; None: the special tokens.
        before: tokens that the first one follows, by ``prompt_end``. A character that they begin and a later token ends
            is in the later one's text.
    """

    __slots__ = ("_decode", "_ids", "_known", "_open", "_read", "_silent")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        silent: frozenset[int] | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self._decode = _decoder(tokenizer)
        self._silent = special_ids(tokenizer) if silent is None else silent
        self._ids = tuple(before)  # context, then tokens whose text is not returned in full
        # numbers of these tokens, and of characters of their text, that were returned
        self._read, text = _whole(tokenizer, self._ids)
        self._known = len(text.rstrip(_UNKNOWN))
        # replacement characters behind them that the prompt's own text shows
        self._open = len(self._decode(self._ids)) - self._known

    def push(self, id: int) -> str:
        """Add a token; returns the text that it completes."""
        if id in self._silent:
            return ""
        self._ids += (id,)
        whole = self._decode(self._ids)
        sure = len(whole.rstrip(_UNKNOWN))  # the rest may become a character
        if sure < len(whole) and len(self._ids) - self._read > _PATIENCE:
            sure = len(whole) - 1
        piece = self._take(whole, sure)
        if sure == len(whole):
            if len(self._ids) > _CONTEXT:
                self._ids = self._ids[self._read :]
                self._known = len(self._decode(self._ids))
            self._read = len(self._ids)
        elif len(self._ids) - self._read > _PATIENCE:
            self._ids, self._read = self._ids[-_PATIENCE // 2 :], 0
            self._known = len(self._decode(self._ids).removesuffix(_UNKNOWN))
        return piece

    def flush(self) -> str:
        """End the text; returns the rest, with an unfinished character."""
        whole = self._decode(self._ids)
        piece = self._take(whole, len(whole))
        self._ids, self._read, self._known = (), 0, 0
        return piece

    def _take(self, whole: str, end: int) -> str:
        """The text up to a character, without what was returned before."""
        begin = self._known
        if end > begin:
            while self._open and whole.startswith(_UNKNOWN, begin):
                begin, self._open = begin + 1, self._open - 1
            self._open = 0
        self._known = max(begin, end)
        return whole[begin:end]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """``_decode`` by a tokenizer; without transformers around it where that adds nothing, in a fifth of the time."""
    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    if isinstance(tokenizer, plain) and (kind.decode, kind._decode) == (plain.decode, plain._decode):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(_decode, tokenizer)


def advance(models: Executor, runs: Sequence[RequestRun], pads: tuple[bool, bool] = (True, True)) -> None:
    """One pass for requests whose inputs are of one kind, or the beginning of requests that have none yet.

    A pass either happens or its requests end: an exception in it is the error of each, and so is an interrupt, which is
    raised. What others hold in their rows is as it was.

    Args:
        pads: whether passes of target and draft cost what the longest row does in each row; see ``pass_shares``.
    """
    taken = 0
    try:
        given = [run.input for run in runs if run.input is not None]
        done = models.run(given) if given else ()
        if given and any(run.charged for run in runs):  # before the result is taken
            ran = [without_chain(one, made) for one, made in zip(given, done, strict=True)]
            for run, shares in zip(runs, pass_shares(ran, *pads), strict=True):
                if (switch := run.charged) is not None:
                    for share in shares:
                        switch.charge(share)
        for run in runs:
            if given:
                run.take(done[taken])
            else:
                run.begin()
            taken += 1
    except BaseException as error:
        for run in runs[taken:]:
            run.fail(error)
        if not isinstance(error, Exception):
            raise


class Streamed(Protocol):
    """What a stream needs of its request; see ``Request``."""

    method: Method
    record: Record

    def writer(self) -> TextWriter | None: ...
    def take(self) -> Executor: ...
    def give_back(self, models: Executor) -> None: ...
    def begin(self, models: Executor, row: int) -> RequestRun: ...
    def generation(self) -> Generation: ...


class TokenReader:
    """Returns each token of a request once, with its text."""

    def __init__(self, request: Streamed) -> None:
        self._request, self._given, self._writer = request, 0, request.writer()

    @property
    def left(self) -> int:
        """Number of tokens that were not returned yet."""
        return len(self._request.record.tokens) - self._given

    def read(self, at_most: int | None = None) -> list[Token]:
        """Return the next tokens. The last token of a finished text also has the rest of the text."""
        record, given, writer = self._request.record, self._given, self._writer
        tokens = record.tokens[given : None if at_most is None else given + at_most]
        given += len(tokens)
        if tokens and writer is not None:
            writer = writer.copy()
            writer.render(tokens, last=record.finish is not None and given == len(record.tokens))
        self._given, self._writer = given, writer
        return tokens


class Stream:
    """Iterator over tokens as they become final. Closing it early is safe; ``generation`` is the result so far.

    The ``text`` of a token is the text that it completes: "" inside a character, and while a stop string may have
    begun. The texts of a whole stream join to ``generation.text``; those of a stream that was closed early, to a prefix
    of it.

    A trusted token is returned at once, and its ``drift`` is filled in when the target has scored it; under ``budget``
    and ``tail_ratio`` it is returned then.

    What fails ends the text: logits that are not finite, an exception of a rule or a pass (``finish_reason`` "error"),
    an interrupt in a step (Ctrl-C, "interrupted"). It is raised once, and the final tokens stay in ``generation``.
    """

    def __init__(self, request: Streamed) -> None:
        self._request, self._reader = request, TokenReader(request)
        self._models: Executor | None = None
        self._run: RequestRun | None = None
        self._closed = False

    def __repr__(self) -> str:
        record = self._request.record
        return f"Stream({self._request.method.name}, {len(record.tokens)} tokens, {record.finish or 'unfinished'})"

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        while not self._reader.left:
            if not self._step():
                raise StopIteration
        if self._request.record.finish is not None and self._reader.left == 1:
            self.finish()  # may run a closing forward pass
        (token,) = self._reader.read(1)
        return token

    def finish(self) -> Generation:
        """Decode to the end, and return the whole result."""
        while self._step():
            pass
        return self.generation

    def close(self) -> None:
        """Stop decoding and release the caches."""
        self._closed = True
        if self._models is not None:
            self._give_back()

    def _step(self) -> bool:
        """Run one pass; False if there is none left. ``wall_s`` excludes the time between calls."""
        if self._closed:
            return False
        request, began = self._request, time.perf_counter()
        try:
            if self._models is None:
                models = request.take()
                # when the stream is closed or garbage-collected
                self._give_back = weakref.finalize(self, request.give_back, models)
                self._give_back.atexit = False
                self._models = models
                self._run = request.begin(models, 0)
            assert self._run is not None
            advance(self._models, [self._run])
        finally:
            request.record.stats.wall_s += time.perf_counter() - began
            if self._run is not None and self._run.over:  # after an interrupt too
                self.close()
        if self._run.error is not None:
            raise self._run.error
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """The result so far; ``finish_reason`` is "cancelled" if the text is unfinished."""
        return self._request.generation()
