"""``sprinter serve``: an OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.signature import takes
from sprinter.errors import UserError, first_line, install_line
from sprinter.serve.settings import ServeSettings

__all__ = ["serve"]

_PANELS = {
    "Limits": "rows max_len memory_bytes max_waiting max_prompt_tokens max_new_tokens max_draft max_body_bytes "
    "queue_timeout_s request_timeout_s drain_timeout_s rate_limit token_limit",
    "Access": "api_keys allow_anonymous allowed_hosts tls_cert tls_key log_prompts",
}
_KEPT = (
    "max_choices",
    "max_logprobs",
    "header_timeout_s",
    "body_timeout_s",
    "max_connections",
    "min_free_bytes",
)
"""Settings that no command line changes."""


@loads()
@takes("settings", ServeSettings, without=_KEPT, panels=_PANELS)
def serve(loading: Loading = Loading(), settings: Any = None) -> int:
    """Serve the pair over HTTP, with OpenAI's interface: completions, chat completions, models.

    Logs are JSON lines on standard error. SIGTERM ends the server when its open requests have ended.
    """
    try:
        from sprinter.serve.logs import logs_to
        from sprinter.serve.run import serve as run
    except ImportError as error:
        raise UserError(
            f"the server needs FastAPI, Uvicorn and prometheus-client ({first_line(error)}): {install_line('serve')}"
        ) from None
    with logs_to():
        run(settings, lambda: load(loading))
    return 0
