"""Settings of a server."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from sprinter.decode.spans import check_only
from sprinter.errors import UserError
from sprinter.parameters import LISTED, Natural, Positive, WholeNumber, checked, stated

__all__ = ["ServeSettings"]

Seconds = Annotated[float, Field(gt=0)]


@checked
class ServeSettings:
    """What a server is started with.

    Raises:
        UserError: a value out of range, or an address that other machines reach without keys.
    """

    host: str = stated("127.0.0.1", "Address to listen on.")
    port: WholeNumber = stated(8000, "0: any free port.", ge=0, le=65535)
    model_name: str | None = stated(None, "Name of the model in requests and answers. None: the target's.")
    aliases: Annotated[tuple[str, ...], LISTED] = stated(
        (), "Further name of the model. Requests may give it."
    )
    method: str | None = stated(None, "Method of requests that name none. None: exact.")
    budget: float | None = stated(
        None, "With --method or --profile: maximum mean drift per token of requests that name none. None: what the "
        "method says.", ge=0, le=1,
    )  # fmt: skip
    only: str | None = stated(
        None,
        "Part of a text in which lossy methods may be lossy, such as think or code, not-code. None: all of it.",
    )
    require_lossless: bool = stated(False, "Refuse lossy methods.")
    never_slower: bool = stated(
        True, "Stop drafting while it gives no speedup, in requests without a method."
    )
    rows: Positive = stated(8, "Texts generated at the same time.")
    max_len: Positive | None = stated(
        None, "Tokens of a row, prompt included. None: the context, at most 2048."
    )
    memory_bytes: Positive | None = stated(
        None, "Maximum size of the KV caches. None: 90 % of the free memory."
    )
    models_bytes: Positive | None = stated(
        None,
        "With several models: memory of the weights and KV caches of those that are loaded. None: no limit.",
    )
    step_tokens: Positive | None = stated(
        None,
        "Tokens of prompts that a step reads, of all texts together. None: on a CPU 64, with keys 24; else 2048.",
    )
    max_waiting: Natural = stated(
        64, "Texts that wait for a row. Of one key at most as many as there are places left."
    )
    max_prompt_tokens: Positive | None = stated(None, "Longest prompt. None: the row.")
    max_new_tokens: Positive | None = stated(None, "Longest text. None: the row.")
    refuse_long: bool = stated(
        False,
        'Refuse max_tokens beyond the row or --max-new-tokens. Otherwise the text ends there, by "length".',
    )
    max_choices: Positive = stated(64, "Texts of a request: n for each of its prompts.")
    max_draft: Positive = stated(
        40, "Largest γ, and other counts, of a method that a request names. A larger default counts instead."
    )
    max_logprobs: Positive = stated(
        2**18, "Log-probabilities in an answer, and tokens that it reports one by one."
    )
    max_body_bytes: Positive = stated(4 * 2**20, "Largest request.")
    queue_timeout_s: Seconds = stated(60.0, "Seconds that a request waits for a row.")
    request_timeout_s: Seconds = stated(600.0, "Seconds that a request takes.")
    header_timeout_s: Seconds = stated(10.0, "Seconds that a client takes to send a request's header.")
    body_timeout_s: Seconds = stated(30.0, "Seconds that a client takes to send a request's body.")
    drain_timeout_s: Seconds = stated(30.0, "Seconds for open requests after SIGTERM.")
    max_connections: Positive = stated(
        512, "Requests that are open. /health and /ready are answered beyond it."
    )
    min_free_bytes: Natural = stated(64 * 2**20, "Free memory below which no request is taken.")
    api_keys: Path | None = stated(None, "File of keys, one per line; read again when it changes.")
    allow_anonymous: bool = stated(False, "Let other machines in without a key.")
    allowed_hosts: Annotated[tuple[str, ...], LISTED] = stated(
        (), "Further name of this server in the header Host. Beside the loopback ones and ``host``; *: all."
    )
    share_prefixes: bool = stated(
        False,
        "Share cached prefixes among all keys. Response times may then reveal what others have sent.",
    )
    rate_limit: Positive | None = stated(
        None, "Texts per minute of a key. None: none. Without keys of an address; at least one a request."
    )
    token_limit: Positive | None = stated(
        None, "Tokens per minute of a key, of prompts and texts. None: none."
    )
    tls_cert: Path | None = stated(None, "Certificate (PEM).")
    tls_key: Path | None = stated(None, "Key of the certificate (PEM).")
    log_prompts: bool = stated(False, "Write prompts and answers to the log.")

    def __post_init__(self) -> None:
        if self.only is not None:
            check_only(self.only)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("tls_cert=FILE and tls_key=FILE go together: give both, or neither")
        if self.api_keys is None and not self.allow_anonymous and not self.is_loopback:
            raise UserError(
                f"host={self.host!r} is reached by other machines, and no key is asked for: give api_keys=FILE, or "
                "allow_anonymous=True"
            )

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
