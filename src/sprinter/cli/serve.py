"""``sprinter serve``: an OpenAI-compatible server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sprinter.cli.loading import Loading, load, loads
from sprinter.errors import UserError, first_line, install_line

__all__ = ["serve"]

_MIB = 2**20
_limit = partial(typer.Option, min=1, rich_help_panel="Limits")
_access = partial(typer.Option, rich_help_panel="Access")


@loads()
def serve(
    loading: Loading = Loading(),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="Name of the model in requests.", show_default="the target's")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", "-m", help="Method of requests that name none.", show_default="exact"),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="With --method or --profile: maximum mean drift a token of requests that name none.",
            show_default="what the method says",
        ),
    ] = None,
    require_lossless: Annotated[
        bool, typer.Option("--require-lossless", help="Refuse lossy methods.")
    ] = False,
    never_slower: Annotated[
        bool, typer.Option(help="Stop drafting while it does not pay, in requests without a method.")
    ] = True,
    rows: Annotated[int, _limit(help="Texts generated at the same time.")] = 8,
    max_len: Annotated[
        int | None,
        _limit(help="Tokens of a row, prompt included.", show_default="the context, at most 2048"),
    ] = None,
    memory_mib: Annotated[
        int | None, _limit(help="Maximum size of the KV caches.", show_default="90 % of the free memory")
    ] = None,
    max_waiting: Annotated[int, _limit(min=0, help="Texts that wait for a row.")] = 64,
    max_prompt_tokens: Annotated[int | None, _limit(help="Longest prompt.", show_default="the row")] = None,
    max_new_tokens: Annotated[int | None, _limit(help="Longest text.", show_default="the row")] = None,
    max_draft: Annotated[
        int, _limit(help="Largest γ, and other counts, of a method that a request names.")
    ] = 64,
    max_body_mib: Annotated[int, _limit(help="Largest request.")] = 4,
    queue_timeout: Annotated[float, _limit(min=None, help="Seconds that a request waits for a row.")] = 60.0,
    request_timeout: Annotated[float, _limit(min=None, help="Seconds that a request takes.")] = 600.0,
    drain_timeout: Annotated[float, _limit(min=None, help="Seconds for open requests after SIGTERM.")] = 30.0,
    rate_limit: Annotated[int | None, _limit(help="Texts per minute of a key.", show_default="none")] = None,
    token_limit: Annotated[
        int | None, _limit(help="Tokens per minute of a key.", show_default="none")
    ] = None,
    api_keys: Annotated[
        Path | None, _access(help="File of keys, one per line; read again when it changes.")
    ] = None,
    allow_anonymous: Annotated[
        bool, _access("--allow-anonymous", help="Let other machines in without a key.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        _access(help="Further name of this server in the header Host; may be repeated.", show_default=False),
    ] = None,
    tls_cert: Annotated[Path | None, _access(help="Certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, _access(help="Key of the certificate (PEM).")] = None,
    log_prompts: Annotated[
        bool, _access("--log-prompts", help="Write prompts and answers to the log.")
    ] = False,
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
