"""A target on another machine: a Sprinter server answers with laws, ``load_pair("https://host/v1#model", draft)``.

A pass is one request over the tokens that the target has not read, with one entry for each row; the server keeps what
it has read. The laws are those of the server's own target (in float32), so methods keep their laws, to rounding.
"""

from __future__ import annotations

import os
import random
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
_TRIES, _WAIT_S, _MOST_S = 4, 0.25, 60.0
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same question is asked again: it changes nothing on the server."""


def is_remote(source: object) -> bool:
    """Whether a source is the address of a server."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


@dataclass(slots=True)
class RemoteUsage:
    """What a remote target was asked for, from when it was loaded.

    Attributes:
        round_trips: requests, those that were tried again included.
        laws: places whose laws were answered, which is what a server charges for.
        sent_bytes, received_bytes: of bodies. seconds: spent waiting for answers.
    """

    round_trips: int = 0
    laws: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0


class RemoteModel(ServedModel):
    """A target that a Sprinter server runs; see ``ServedModel``.

    Attributes:
        url: of the server, up to ``/v1``. model: its name there; None: the only one.
        usage: what was asked so far.

    Args:
        address: "https://host:port/v1#model". The key of a server that wants one is in ``SPRINTER_REMOTE_KEY``.
        dtype: of the laws that travel: "float32", or "float16", half as large and rounded.
        timeout: seconds to wait for an answer.
        transport: for tests, in place of the network.

    Raises:
        UserError: no such server, key or model; a server that is not Sprinter's.
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
        parts = urlsplit(address)
        self.model, self.name = parts.fragment or None, address
        self.url = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))
        self.laws_dtype, self.usage = dtype, RemoteUsage()
        key = os.environ.get(KEY)
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=timeout, transport=transport,
            limits=httpx2.Limits(max_connections=64),
        )  # fmt: skip
        weakref.finalize(self, self._http.close)
        self._sleep: Callable[[float], None] = time.sleep
        try:
            known = self._asked("GET").json()
            if self.model not in (None, known["model"]):
                raise UserError(
                    f"{self.url} serves {known['model']!r}, not {self.model!r}: give {self.url}#{known['model']}"
                )
            self.vocab_size, self.context = int(known["vocab_size"]), int(known["context"])
            self.eos_ids = tuple(map(int, known["eos_ids"]))
            self.size, self.weights = int(known["parameters"]), str(known["weights"])
            self.fingerprint, self.vocabulary = str(known["fingerprint"]), str(known["vocabulary"])
        except (EngineError, UserError) as error:
            raise UserError(str(error)) from None
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.url}/score does not answer as a Sprinter server: give the address of `sprinter serve`, to /v1"
            ) from None
        ones = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), 1)
        self.config = PreTrainedConfig(**{"vocab_size": self.vocab_size, **ones})  # type: ignore[arg-type]

    def check_vocabulary(self, words: Vocabulary) -> None:
        """Refuse a tokenizer other than the server's.

        Raises:
            UserError: the tokens differ.
        """
        if words_fingerprint(words) != self.vocabulary:
            raise UserError(
                f"the tokenizer is not that of the server {self.url}, whose ids mean other tokens: give its own as "
                "tokenizer=..., and a draft of the same family"
            )

    def most_leaves(self, rows: int) -> int | None:
        """Chains alone: the laws of a text are asked for, not those of a tree."""
        return 1

    def make_runner(self, batch: int, max_len: int, leaves: int) -> Runner:
        """See ``ServedModel``."""
        return RemoteRunner(self, batch, max_len)

    def laws(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[Tensor]:
        """Logarithms of the laws behind each token from a start on, ``[n, V]`` float32 for each (ids, start).

        Raises:
            EngineError: the server cannot be reached, or refuses, after some tries.
            UserError: it has another model now.
        """
        body = {
            "model": self.model, "fingerprint": self.fingerprint, "dtype": self.laws_dtype,
            "texts": [{"ids": list(ids), "start": start} for ids, start in texts],
        }  # fmt: skip
        answer = self._asked("POST", body).content
        numbers = torch.frombuffer(bytearray(answer), dtype=getattr(torch, self.laws_dtype)).float()
        counts = [len(ids) - start for ids, start in texts]
        if numbers.numel() != sum(counts) * self.vocab_size:
            raise EngineError(
                f"{self.url} answered with {numbers.numel()} numbers, not {sum(counts)} laws: ask its operator"
            )
        self.usage.laws += sum(counts)
        return list(torch.split(numbers.reshape(-1, self.vocab_size), counts))

    def _asked(self, verb: str, body: Mapping[str, Any] | None = None) -> httpx2.Response:
        """The answer of ``/score``; what may pass is asked again, for as long as the server says."""
        for tried in range(1, _TRIES + 1):
            began, wait = time.perf_counter(), _WAIT_S * 2**tried * random.uniform(0.5, 1)
            try:
                request = self._http.build_request(verb, f"{self.url}/score", json=body)
                answer = self._http.send(request)
            except httpx2.TimeoutException:
                why = (
                    f"{self.url} did not answer in time: try again, or ask a smaller draft run (--max-draft)"
                )
            except httpx2.HTTPError as error:
                why = f"{self.url} cannot be reached ({type(error).__name__}): check the address, and that it serves"
            else:
                self.usage.sent_bytes += len(request.content)
                self.usage.received_bytes += len(answer.content)
                if answer.status_code == 200:
                    return answer
                why = self._refusal(answer)
                if answer.status_code not in _AGAIN:
                    raise (UserError if answer.status_code in (401, 403, 404, 409) else EngineError)(why)
                wait = _seconds(answer.headers.get("retry-after"), wait)
            finally:
                self.usage.round_trips += 1
                self.usage.seconds += time.perf_counter() - began
            if tried < _TRIES and wait <= _MOST_S:
                self._sleep(wait)
            else:
                break
        raise EngineError(why)

    def _refusal(self, answer: httpx2.Response) -> str:
        try:
            said = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            said = answer.reason_phrase or "no reason given"
        fix = {
            401: f"set {KEY} to a key of this server", 403: f"set {KEY} to a key that may ask this",
            404: "give the address of `sprinter serve`, up to /v1, and the name of its model",
            409: "load the pair again", 429: "wait, or ask for a higher limit",
        }.get(answer.status_code, "try again later")  # fmt: skip
        return f"{self.url} answered {answer.status_code}, {said}: {fix}"


class RemoteRunner(BaseRunner):
    """Its rows hold token ids; prompts are read when laws behind them are first asked for."""

    name = "remote"

    def __init__(self, model: RemoteModel, batch: int, max_len: int) -> None:
        super().__init__(batch, max_len)
        self.model, self.device = model, model.device
        self.vocab_size, self.hidden_size = model.vocab_size, model.hidden_size
        self._texts: list[list[int]] = [[] for _ in range(batch)]

    @property
    def cache_bytes(self) -> int:
        """Of token ids; keys and values are on the server."""
        return 4 * sum(map(len, self._texts))

    def _drop(self, lengths: Sequence[int]) -> None:
        for text, length in zip(self._texts, lengths, strict=True):
            del text[length:]

    def _copy(self, from_row: int, row: int, length: int) -> None:
        self._texts[row] = self._texts[from_row][:length]

    def _adopt(self, other: RemoteRunner, length: int) -> None:
        self._texts[0] = other._texts[0][:length]

    def wipe(self, row: int) -> None:
        """See ``Runner``."""
        del self._texts[row][self._lengths[row] :]

    def _compact(self, row: int, path: Sequence[int], root: int) -> None:
        self._texts[row][root:] = [self._texts[row][slot] for slot in path]

    def _step(self, asked: Pass) -> ModelOutput:
        for i, (row, start, count) in enumerate(zip(asked.rows, asked.starts, asked.counts, strict=True)):
            self._texts[row][start:] = asked.tokens[i, :count].tolist()
        states = torch.zeros(*asked.tokens.shape, self.hidden_size)
        if not asked.logits:
            return ModelOutput(None, states)
        found = torch.zeros(*asked.tokens.shape, self.vocab_size)
        known = [i for i, count in enumerate(asked.counts) if count]
        given = [(self._texts[asked.rows[i]], asked.starts[i]) for i in known]
        for i, law in zip(known, self.model.laws(given) if given else (), strict=True):
            found[i, : len(law)] = law
        return ModelOutput(found, states)


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
