"""Client of an OpenAI-compatible chat completions endpoint, with retries. It uses only the standard library."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from sprinter.errors import SprinterError, UserError

__all__ = ["KEYS", "Endpoint", "JudgeError", "Refused", "Reply", "key_from_environment"]

KEYS = ("SPRINTER_JUDGE_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the key; the first that is set is used."""

_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_THIS_ONE = frozenset({400, 413, 422})
"""HTTP status codes for an invalid question (too long, ...); others concern the endpoint."""
_MOST_BYTES = 4 * 2**20
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """Text of a reply, and its token counts (None: not reported by the endpoint)."""

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None


class JudgeError(SprinterError):
    """The judge cannot continue; the message is one line."""


class Refused(Exception):
    """The endpoint rejects this question; it may answer others."""


class _Failed(Exception):
    """One attempt failed and can be repeated. ``wait_s``: waiting time requested by the endpoint."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects, so that the key is sent to no other host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def key_from_environment() -> str | None:
    """The key, from the first of ``KEYS`` that is set."""
    return next((value.strip() for name in KEYS if (value := os.environ.get(name, "")).strip()), None)


@dataclass(slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint and a model.

    Attributes:
        url: base URL, such as "http://localhost:8000/v1".
        model: name of the model.
        key: API key, sent as bearer token; None: no key. It is never stored.
        timeout_s: timeout of one attempt.
        attempts: attempts per question, with pauses of 1, 2, 4, ... seconds or as requested by the endpoint.
        longest_wait_s: maximum pause between two attempts.
        options: sampling options; an option that the endpoint does not support is left out from then on.

    Raises:
        UserError: no http address, no model, a number out of range.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 120.0
    attempts: int = 5
    longest_wait_s: float = 60.0
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0, "max_tokens": 1024})
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            fine = False
        if not fine or not self.url.isascii() or any(c.isspace() for c in self.url):
            raise UserError(
                f"--judge '{self.url}' is not an address: give one such as http://localhost:8000/v1"
            )
        if parts.username or parts.password:  # results contain the URL
            raise UserError(f"--judge holds a name or password: give the key in {KEYS[0]} instead")
        if not self.model:
            raise UserError("a judge needs the name of its model: give --judge-model NAME")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise UserError(f"the judge's key ({' or '.join(KEYS)}) holds odd characters: set it again")

    def ask(self, messages: Sequence[Message]) -> Reply:
        """Request one chat completion.

        Raises:
            Refused: the endpoint rejects this question.
            JudgeError: the endpoint is down, limits the rate for too long, or denies access.
        """
        why = ""
        for attempt in range(self.attempts):
            try:
                return self._once(messages)
            except _Failed as error:
                why = str(error)
                if attempt + 1 < self.attempts:
                    self.sleep(min(error.wait_s or 2.0**attempt, self.longest_wait_s))
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        raise JudgeError(f"the judge at {self.url} did not answer, asked {times}: {why}")

    def _once(self, messages: Sequence[Message]) -> Reply:
        sent = dict(self.options)
        body = json.dumps({"model": self.model, "messages": list(messages), **sent}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "sprinter-bench"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        address = self.url.rstrip("/")
        if not address.endswith("/chat/completions"):
            address += "/chat/completions"
        request = urllib.request.Request(address, body, headers)
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=self.timeout_s) as response:
                return _read(response.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                return self._refusal(error, messages, sent)
        except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
            raise _Failed(self._line(getattr(error, "reason", error))) from None

    def _refusal(
        self, error: urllib.error.HTTPError, messages: Sequence[Message], sent: dict[str, Any]
    ) -> Reply:
        """Raise the exception for an HTTP error; repeat the request without an unsupported option."""
        try:
            said = error.read(_MOST_BYTES).decode(errors="replace")
        except (OSError, HTTPException):
            said = ""
        why = f"HTTP {error.code}: {self._line(_message(said) or error.reason)}"
        if error.code in _AGAIN:
            raise _Failed(why, _seconds(error.headers.get("Retry-After")))
        unknown = [name for name in sent if name in said]
        if error.code in _THIS_ONE and unknown:
            for name in unknown:
                self.options.pop(name, None)
            return self._once(messages)
        if error.code in _THIS_ONE:
            raise Refused(why)
        raise JudgeError(f"the judge at {self.url} says {why}: check address, model and key")

    def _line(self, what: object) -> str:
        line = " ".join(str(what).split())[:200] or type(what).__name__
        return line.replace(self.key, "***") if self.key else line


def _read(body: bytes) -> Reply:
    try:
        answer = json.loads(body)
        text = answer["choices"][0]["message"]["content"]
        usage = answer.get("usage") or {}
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _Failed(f"no chat completion came back, but {body[:60]!r}") from None
    known = [count if isinstance(count, int) else None for count in counts]
    return Reply(text if isinstance(text, str) else "", *known)


def _message(said: str) -> str:
    """Message in an error's body, in OpenAI's format, or the body's first line."""
    try:
        error = json.loads(said)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return said.strip().partition("\n")[0]


def _seconds(value: str | None) -> float | None:
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:  # a date: use the default pauses
        return None
