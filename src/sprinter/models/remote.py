"""A target on another machine: a server answers with laws, ``load_pair("https://host/v1#model", draft)``.

A pass is one request over the tokens that the target has not read, with one entry for each row; the server keeps what
it has read. The laws are those of the server's own target (in float32), so methods keep their laws, to rounding. Of
several servers of one model, each row has its own, and another one while that does not answer.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx2
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sprinter.errors import EngineError, UserError
from sprinter.fingerprint import words_fingerprint
from sprinter.models.interface import ModelOutput, Runner, ServedModel
from sprinter.models.runners.forward import BaseRunner, Pass
from sprinter.models.vocabulary import Vocabulary

__all__ = ["RemoteModel", "RemoteUsage", "is_remote"]

KEY = "SPRINTER_REMOTE_KEY"
"""Environment variable with the server's API key."""
_TRIES, _WAIT_S, _MOST_S, _REST_S = 4, 0.25, 60.0, 30.0
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same question is asked again: it changes nothing on the server."""
_SERVERS = "`sprinter serve`, or of vLLM with VLLM_PLUGINS=sprinter"
_log = logging.getLogger("sprinter")


def is_remote(source: object) -> bool:
    """Whether a source is the address of a server."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


@dataclass(slots=True)
class RemoteUsage:
    """What a remote target was asked for, from when it was loaded. Of one text: ``Stats.remote``.

    Attributes:
        round_trips: requests, those that were tried again included.
        laws: places whose laws were answered.
        paid_tokens: tokens that the server had to read, which is what it charges for, if it has kept its texts.
        sent_bytes, received_bytes: of bodies. seconds: spent waiting for answers.
    """

    round_trips: int = 0
    laws: int = 0
    paid_tokens: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0


class RemoteModel(ServedModel):
    """A target that one or more Sprinter servers run; see ``ServedModel``.

    Attributes:
        urls: of the servers, up to ``/v1``. models: its name at each; None: the only one there.
        usage: what was asked so far.

    Args:
        address: "https://host:port/v1#model"; with commas between them, several servers of one model. The key of
            servers that want one is in ``SPRINTER_REMOTE_KEY``.
        dtype: of the laws that travel: "float32", or "float16", half as large and rounded.
        timeout: seconds to wait for an answer.
        transport: for tests, in place of the network.

    Raises:
        UserError: no such server, key or model; a server that is not Sprinter's; servers of different models.
    """

    runner, reason, on_gpu, token_bytes = "remote", "a server answers with its laws", False, 4
    hidden_size = 1

    def __init__(
        self,
        address: str,
        dtype: str = "float32",
        timeout: float = 60.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        given = [urlsplit(one) for one in re.split(r",\s*(?=https?://)", address)]
        self.name, self.models = address, [parts.fragment or None for parts in given]
        self.urls = [
            urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))
            for parts in given
        ]
        self.laws_dtype, self.usage = dtype, RemoteUsage()
        self._rests, self._runners, self._lock = [0.0] * len(given), itertools.count(), threading.Lock()
        key = os.environ.get(KEY)
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=timeout, transport=transport,
            limits=httpx2.Limits(max_connections=64),
        )  # fmt: skip
        weakref.finalize(self, self._http.close)
        self._sleep: Callable[[float], None] = time.sleep
        answers = dict[str, dict[str, Any]]()
        for home, (url, model) in enumerate(zip(self.urls, self.models, strict=True)):
            try:
                answer, _ = self._asked(home, "GET", tries=1 if len(given) > 1 else _TRIES)
                answers[url] = known = answer.json()
                if model not in (None, known["model"]):
                    raise UserError(
                        f"{url} serves {known['model']!r}, not {model!r}: give {url}#{known['model']}"
                    )
                self.vocab_size, self.context = int(known["vocab_size"]), int(known["context"])
                self.eos_ids = tuple(map(int, known["eos_ids"]))
                self.size, self.weights = int(known["parameters"]), str(known["weights"])
                self.fingerprint, self.vocabulary = str(known["fingerprint"]), str(known["vocabulary"])
            except UserError:  # a ValueError, too
                raise
            except EngineError as error:
                if home == len(given) - 1 and not answers:
                    raise UserError(str(error)) from None
                self._rest(home, error)
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{url}/score does not answer as a Sprinter server: give the address of {_SERVERS}, up to /v1"
                ) from None
        self.context = min(int(known["context"]) for known in answers.values())
        if len({(known["fingerprint"], known["vocabulary"]) for known in answers.values()}) > 1:
            raise UserError(f"{' and '.join(answers)} serve different models: give servers of one")
        ones = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), 1)
        self.config = PreTrainedConfig(**{"vocab_size": self.vocab_size, **ones})  # type: ignore[arg-type]

    def check_vocabulary(self, words: Vocabulary) -> None:
        """Refuse a tokenizer other than the server's.

        Raises:
            UserError: the tokens differ.
        """
        if words_fingerprint(words) != self.vocabulary:
            raise UserError(
                f"the tokenizer is not that of the server {self.urls[0]}, whose ids mean other tokens: give its own as "
                "tokenizer=..., and a draft of the same family"
            )

    def most_leaves(self, rows: int) -> int | None:
        """Chains alone: the laws of a text are asked for, not those of a tree."""
        return 1

    def make_runner(self, batch: int, max_len: int, leaves: int) -> Runner:
        """See ``ServedModel``."""
        return RemoteRunner(self, batch, max_len)

    def laws(self, texts: Sequence[tuple[Sequence[int], int]], homes: Sequence[int] = ()) -> list[Tensor]:
        """Logarithms of the laws behind each token from a start on, ``[n, V]`` float32 for each (ids, start).

        ``homes``: the servers that should be asked, 0 the first one, counted around; empty: the first one.

        Raises:
            EngineError: no server can be reached, or all refuse, after some tries.
            UserError: it has another model now.
        """
        return [law for law, _ in self.answers(texts, homes)]

    def answers(
        self, texts: Sequence[tuple[Sequence[int], int]], homes: Sequence[int] = ()
    ) -> list[tuple[Tensor, Counter[str]]]:
        """``laws``, each with the round trips that it waited for, and its share of the bytes."""
        own = [home % len(self.urls) for home in homes] or [0] * len(texts)
        places = {home: [i for i, one in enumerate(own) if one == home] for home in own}
        if len(places) == 1:
            return self._laws_of(own[0], texts)
        with ThreadPoolExecutor(len(places)) as pool:
            asked = {
                home: pool.submit(self._laws_of, home, [texts[i] for i in at]) for home, at in places.items()
            }
        found = {
            i: answer
            for home, at in places.items()
            for i, answer in zip(at, asked[home].result(), strict=True)
        }
        return [found[i] for i in range(len(texts))]

    def _laws_of(
        self, home: int, texts: Sequence[tuple[Sequence[int], int]]
    ) -> list[tuple[Tensor, Counter[str]]]:
        body = {
            "fingerprint": self.fingerprint, "dtype": self.laws_dtype,
            "texts": [{"ids": list(ids), "start": start} for ids, start in texts],
        }  # fmt: skip
        answer, trips = self._answered(home, body)
        numbers = torch.frombuffer(bytearray(answer.content), dtype=getattr(torch, self.laws_dtype)).float()
        counts = [len(ids) - start for ids, start in texts]
        if numbers.numel() != sum(counts) * self.vocab_size:
            raise EngineError(
                f"{self.urls[home]} answered with {numbers.numel()} numbers, not {sum(counts)} laws: ask its operator"
            )
        with self._lock:
            self.usage.laws += sum(counts)
        each, sent = len(answer.content) // sum(counts), len(answer.request.content)
        read = sum(len(ids) for ids, _ in texts)
        return [
            (
                law,
                Counter(
                    round_trips=trips, sent_bytes=sent * len(ids) // read, received_bytes=each * len(law)
                ),
            )
            for law, (ids, _) in zip(
                torch.split(numbers.reshape(-1, self.vocab_size), counts), texts, strict=True
            )
        ]

    def _answered(self, home: int, body: Mapping[str, Any]) -> tuple[httpx2.Response, int]:
        """The answer of a server, or while it rests or fails, of the next one; and the number of requests."""
        several, trips = len(self.urls) > 1, 0
        for at in [*range(home, len(self.urls)), *range(home)] if several else ():
            if self._rests[at] > time.monotonic():
                continue
            trips += 1
            try:
                return self._asked(at, "POST", body, tries=1)[0], trips
            except (EngineError, UserError) as error:
                self._rest(at, error)
        answer, tried = self._asked(home, "POST", body)
        return answer, trips + tried

    def _rest(self, home: int, error: Exception) -> None:
        self._rests[home] = time.monotonic() + _REST_S
        _log.warning("%s; for %g s its texts go to another server", error, _REST_S)

    def _asked(
        self, home: int, verb: str, body: Mapping[str, Any] | None = None, tries: int = _TRIES
    ) -> tuple[httpx2.Response, int]:
        """The answer of ``/score``, and the number of requests: what may pass is asked again, when the server says."""
        url = self.urls[home]
        given = None if body is None else {"model": self.models[home], **body}
        for tried in range(1, tries + 1):
            began, wait = time.perf_counter(), _WAIT_S * 2**tried * random.uniform(0.5, 1)
            spent = RemoteUsage(round_trips=1)
            try:
                request = self._http.build_request(verb, f"{url}/score", json=given)
                answer = self._http.send(request)
            except httpx2.TimeoutException:
                why = f"{url} did not answer in time: try again, or ask a smaller draft run (--max-draft)"
            except httpx2.HTTPError as error:
                why = (
                    f"{url} cannot be reached ({type(error).__name__}): check the address, and that it serves"
                )
            else:
                spent.sent_bytes, spent.received_bytes = len(request.content), len(answer.content)
                if answer.status_code == 200:
                    return answer, tried
                why = _refusal(url, answer)
                if answer.status_code not in _AGAIN:
                    raise (UserError if answer.status_code in (401, 403, 404, 409) else EngineError)(why)
                wait = _seconds(answer.headers.get("retry-after"), wait)
            finally:
                spent.seconds = time.perf_counter() - began
                self._count(spent)
            if tried < tries and wait <= _MOST_S:
                self._sleep(wait)
            else:
                break
        raise EngineError(why)

    def _count(self, spent: RemoteUsage) -> None:
        with self._lock:
            for key, value in asdict(spent).items():
                setattr(self.usage, key, getattr(self.usage, key) + value)


def _refusal(url: str, answer: httpx2.Response) -> str:
    try:
        said = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = answer.reason_phrase or "no reason given"
    fix = {
        401: f"set {KEY} to a key of this server", 403: f"set {KEY} to a key that may ask this",
        404: f"give the address of {_SERVERS}, up to /v1, and the name of its model",
        409: "load the pair again", 429: "wait, or ask for a higher limit", 501: "ask its operator",
    }.get(answer.status_code, "try again later")  # fmt: skip
    return f"{url} answered {answer.status_code}, {said}: {fix}"


class RemoteRunner(BaseRunner):
    """Its rows hold token ids; prompts are read when laws behind them are first asked for.

    The rows stay with a server each, which then holds what it has read of them.
    """

    name = "remote"

    def __init__(self, model: RemoteModel, batch: int, max_len: int) -> None:
        super().__init__(batch, max_len)
        self.model, self.device = model, model.device
        self.vocab_size, self.hidden_size = model.vocab_size, model.hidden_size
        self._texts: list[list[int]] = [[] for _ in range(batch)]
        self._paid = [0] * batch  # tokens that the server has read
        self._home = next(model._runners)

    @property
    def cache_bytes(self) -> int:
        """Of token ids; keys and values are on the server."""
        return 4 * sum(map(len, self._texts))

    def _drop(self, lengths: Sequence[int]) -> None:
        for text, length in zip(self._texts, lengths, strict=True):
            del text[length:]

    def _copy(self, from_row: int, row: int, length: int) -> None:
        self._texts[row], self._paid[row] = self._texts[from_row][:length], min(self._paid[from_row], length)

    def _adopt(self, other: RemoteRunner, length: int) -> None:
        self._texts[0], self._paid[0], self._home = (
            other._texts[0][:length],
            min(other._paid[0], length),
            other._home,
        )

    def wipe(self, row: int) -> None:
        """See ``Runner``."""
        del self._texts[row][self._lengths[row] :]

    def _compact(self, row: int, path: Sequence[int], root: int) -> None:
        self._texts[row][root:] = [self._texts[row][slot] for slot in path]

    def _step(self, asked: Pass) -> ModelOutput:
        for i, (row, start, count) in enumerate(zip(asked.rows, asked.starts, asked.counts, strict=True)):
            self._texts[row][start:] = asked.tokens[i, :count].tolist()
            self._paid[row] = min(self._paid[row], start)
        states = torch.zeros(*asked.tokens.shape, self.hidden_size)
        if not asked.logits:
            return ModelOutput(None, states)
        found, spent = torch.zeros(*asked.tokens.shape, self.vocab_size), [Counter[str]() for _ in asked.rows]
        known = [i for i, count in enumerate(asked.counts) if count]
        given = [(self._texts[asked.rows[i]], asked.starts[i]) for i in known]
        answers = self.model.answers(given, [self._home + asked.rows[i] for i in known]) if given else ()
        for i, (law, cost) in zip(known, answers, strict=True):
            found[i, : len(law)] = law
            row = asked.rows[i]
            paid, self._paid[row] = len(self._texts[row]) - self._paid[row], len(self._texts[row])
            self.model._count(RemoteUsage(paid_tokens=paid))
            spent[i] = cost + Counter(paid_tokens=paid)
        return ModelOutput(found, states, spent=spent)


def _seconds(header: str | None, usual: float) -> float:
    """What Retry-After says, in seconds: a number, or a date."""
    if header is None:
        return usual
    if header.isdecimal():
        return float(header[:9])
    try:
        return max(parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except ValueError:
        return usual
