"""``sprinter serve``: an OpenAI-compatible server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.signature import option
from sprinter.errors import UserError, first_line, install_line

__all__ = ["serve"]

_MIB = 2**20
_limit = partial(option, min=1, panel="Limits")
_access = partial(option, panel="Access")


@loads()
def serve(
    loading: Loading = Loading(),
    host: Annotated[str, option("Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, option("0: any free port.", min=0, max=65535)] = 8000,
    model_name: Annotated[
        str | None, option("Name of the model in requests.", default="the target's")
    ] = None,
    method: Annotated[
        str | None, option("Method of requests that name none.", "--method", "-m", default="exact")
    ] = None,
    budget: Annotated[
        float | None,
        option(
            "With --method or --profile: maximum mean drift a token of requests that name none.",
            default="what the method says",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    require_lossless: Annotated[bool, option("Refuse lossy methods.", "--require-lossless")] = False,
    never_slower: Annotated[
        bool, option("Stop drafting while it does not pay, in requests without a method.")
    ] = True,
    rows: Annotated[int, _limit("Texts generated at the same time.")] = 8,
    max_len: Annotated[
        int | None, _limit("Tokens of a row, prompt included.", default="the context, at most 2048")
    ] = None,
    memory_mib: Annotated[
        int | None, _limit("Maximum size of the KV caches.", default="90 % of the free memory")
    ] = None,
    max_waiting: Annotated[int, _limit("Texts that wait for a row.", min=0)] = 64,
    max_prompt_tokens: Annotated[int | None, _limit("Longest prompt.", default="the row")] = None,
    max_new_tokens: Annotated[int | None, _limit("Longest text.", default="the row")] = None,
    max_draft: Annotated[int, _limit("Largest γ, and other counts, of a method that a request names.")] = 64,
    max_body_mib: Annotated[int, _limit("Largest request.")] = 4,
    queue_timeout: Annotated[float, _limit("Seconds that a request waits for a row.", min=None)] = 60.0,
    request_timeout: Annotated[float, _limit("Seconds that a request takes.", min=None)] = 600.0,
    drain_timeout: Annotated[float, _limit("Seconds for open requests after SIGTERM.", min=None)] = 30.0,
    rate_limit: Annotated[int | None, _limit("Texts per minute of a key.", default="none")] = None,
    token_limit: Annotated[int | None, _limit("Tokens per minute of a key.", default="none")] = None,
    api_keys: Annotated[
        Path | None, _access("File of keys, one per line; read again when it changes.")
    ] = None,
    allow_anonymous: Annotated[
        bool, _access("Let other machines in without a key.", "--allow-anonymous")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        _access("Further name of this server in the header Host; may be repeated.", default=False),
    ] = None,
    tls_cert: Annotated[Path | None, _access("Certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, _access("Key of the certificate (PEM).")] = None,
    log_prompts: Annotated[bool, _access("Write prompts and answers to the log.", "--log-prompts")] = False,
) -> int:
    """Serve the pair over HTTP, with OpenAI's interface: completions, chat completions, models.

    Logs are JSON lines on standard error. SIGTERM ends the server when its open requests have ended.
    """
    try:
        from sprinter.serve.logs import logs_to
        from sprinter.serve.run import serve as run
        from sprinter.serve.settings import ServeSettings
    except ImportError as error:
        raise UserError(
            f"the server needs FastAPI, Uvicorn and prometheus-client ({first_line(error)}): {install_line('serve')}"
        ) from None
    settings = ServeSettings(
        host=host, port=port, model=model_name, method=method, budget=budget,
        require_lossless=require_lossless, never_slower=never_slower, rows=rows,
        max_len=max_len, memory_bytes=None if memory_mib is None else memory_mib * _MIB, max_waiting=max_waiting,
        max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, max_draft=max_draft,
        max_body_bytes=max_body_mib * _MIB,
        queue_timeout_s=queue_timeout, request_timeout_s=request_timeout, drain_timeout_s=drain_timeout,
        rate_limit=rate_limit, token_limit=token_limit, api_keys=api_keys, allow_anonymous=allow_anonymous,
        allowed_hosts=tuple(allowed_host or ()), tls_cert=tls_cert, tls_key=tls_key, log_prompts=log_prompts,
    )  # fmt: skip
    with logs_to():
        run(settings, lambda: load(loading))
    return 0
