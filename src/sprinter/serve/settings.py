"""Settings of a server."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from sprinter.errors import UserError
from sprinter.parameters import Checked, WholeNumber

__all__ = ["ServeSettings"]


Seconds = Annotated[float, Field(gt=0)]
Positive = Annotated[WholeNumber, Field(ge=1)]
Natural = Annotated[WholeNumber, Field(ge=0)]


class ServeSettings(Checked):
    """What a server is started with.

    Attributes:
        host, port: address to listen on; port 0: any free port.
        model: name of the model in requests and answers; None: that of the target.
        method: method of requests that name none; None: exact, the pair's default.
        budget: maximum mean drift a token of requests that name none; None: what the method says. It needs a method, or
            a pair with a profile.
        require_lossless: refuse lossy methods for all requests.
        never_slower: stop drafting while it does not pay, where neither ``method`` nor the request names a method.
        rows: maximum number of texts that are generated at the same time.
        max_len: length of a row in tokens, prompt included; None: the models' context, at most 2,048.
        memory_bytes: maximum size of the KV caches; None: 90 % of the free memory.
        max_waiting: maximum number of texts that wait for a row; of one key at most as many as there are places left.
        max_prompt_tokens, max_new_tokens: limits of a request in tokens; None: the row's length.
        max_choices: maximum number of texts of a request: n for each of its prompts.
        max_draft: maximum of γ and other counts of a method that a request names, unless the default is larger.
        max_logprobs: maximum number of log-probabilities in an answer, and of tokens that it reports one by one.
        max_body_bytes: maximum size of a request's body.
        queue_timeout_s, request_timeout_s: maximum time that a request waits for rows, and takes altogether.
        header_timeout_s, body_timeout_s: maximum time that a client takes to send a request's header and its body.
        drain_timeout_s: maximum time for open requests after SIGTERM.
        max_connections: maximum number of requests that are open; /health and /ready are answered beyond it.
        min_free_bytes: free memory below which no request is taken.
        api_keys: file of keys; None: no key is needed.
        allow_anonymous: whether other machines may reach a server without keys.
        allowed_hosts: names in the header Host that are accepted beside the loopback ones and ``host``; "*": all.
        rate_limit: texts per minute of a key (without keys: of an address), at least one a request; None: no limit.
        token_limit: tokens per minute of a key, of prompts and texts; None: no limit.
        tls_cert, tls_key: files of a certificate and its key; None: plain HTTP.
        log_prompts: whether logs hold the text of prompts and answers.

    Raises:
        UserError: a value out of range, or an address that other machines reach without keys.
    """

    host: str = "127.0.0.1"
    port: WholeNumber = Field(8000, ge=0, le=65535)
    model: str | None = None
    method: str | None = None
    budget: float | None = Field(None, ge=0, le=1)
    require_lossless: bool = False
    never_slower: bool = True
    rows: Positive = 8
    max_len: Positive | None = None
    memory_bytes: WholeNumber | None = None
    max_waiting: Natural = 64
    max_prompt_tokens: Positive | None = None
    max_new_tokens: Positive | None = None
    max_choices: Positive = 64
    max_draft: Positive = 64
    max_logprobs: Positive = 2**18
    max_body_bytes: Positive = 4 * 2**20
    queue_timeout_s: Seconds = 60.0
    request_timeout_s: Seconds = 600.0
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    drain_timeout_s: Seconds = 30.0
    max_connections: Positive = 512
    min_free_bytes: Natural = 64 * 2**20
    api_keys: Path | None = None
    allow_anonymous: bool = False
    allowed_hosts: tuple[str, ...] = ()
    rate_limit: Positive | None = None
    token_limit: Positive | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_prompts: bool = False

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("tls_cert=FILE and tls_key=FILE go together: give both, or neither")
        if self.api_keys is None and not self.allow_anonymous and not self.is_loopback:
            raise UserError(
                f"host={self.host!r} is reached by other machines, and no key is asked for: give api_keys=FILE, or "
                "allow_anonymous=True"
            )
        return self

    @property
    def has_owners(self) -> bool:
        """Whether requests may come from several owners, of whom none is to fill the queue."""
        return self.api_keys is not None or not self.is_loopback

    @property
    def most_texts(self) -> int:
        """Maximum number of texts that an owner may have running and waiting."""
        return self.rows + ((self.max_waiting + 1) // 2 if self.has_owners else self.max_waiting)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
