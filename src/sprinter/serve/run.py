"""The process of a server: listens at once, loads the models, ends on a signal or with a reason."""

from __future__ import annotations

import gc
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence

import uvicorn

from sprinter.engine.pair import Pair
from sprinter.errors import SprinterError, UserError
from sprinter.serve.app import make_app
from sprinter.serve.connections import timed_connections
from sprinter.serve.logs import error_fields
from sprinter.serve.registry import Models, NamedSource
from sprinter.serve.service import Service
from sprinter.serve.settings import ServeSettings

__all__ = ["make_server", "serve"]

_SPARE = 64
"""Connections beyond those of requests that are served: for /health, and to refuse what is too much."""
_ACCEPTED = 16
"""Connections that are accepted in one iteration of the event loop: what they send is read in the next one."""
_BACKLOG = 2048
"""Connections that wait for it."""
_log = logging.getLogger("sprinter.serve")


class _Server(uvicorn.Server):
    """Logs the address that it listens on, with the port that port 0 became.

    asyncio accepts as many connections an iteration as its backlog says, so that of the system is set by itself.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for one in server.sockets:
                with one.dup() as same:
                    same.listen(_BACKLOG)
                host, port = one.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                url = f"http{'s' if self.config.is_ssl else ''}://{shown}:{port}"
                _log.info("listening", extra={"fields": {"host": host, "port": port, "url": url}})


def make_server(served: Service | Models) -> uvicorn.Server:
    """A server that is not started yet; it ends when its only pair fails."""
    own, models = served.settings, Models.of(served)
    config = uvicorn.Config(
        make_app(models), host=own.host, port=own.port, loop="asyncio",
        http=timed_connections(own.header_timeout_s, own.max_connections + _SPARE, _tls(own)),  # type: ignore[arg-type]
        ws="none", lifespan="on", log_config=None, access_log=False, server_header=False, proxy_headers=False,
        timeout_keep_alive=5, backlog=_ACCEPTED,
        timeout_graceful_shutdown=max(1, round(own.drain_timeout_s)),
    )  # fmt: skip
    server = _Server(config)

    def end() -> None:
        server.should_exit = True

    models.on_failure = end
    return server


def _tls(settings: ServeSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except OSError as error:
        raise UserError(
            f"the certificate '{settings.tls_cert}' and its key '{settings.tls_key}' cannot be used ({error}): "
            "give PEM files that belong together, the key without a password"
        ) from None
    return context


def serve(
    settings: ServeSettings,
    load: Callable[[], Pair] | Sequence[NamedSource],
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT: open requests are finished, within ``drain_timeout_s``.

    Args:
        settings: of the server.
        load: loads the only pair, while the server answers 503; or pairs and adapters, which are loaded when they are
            asked for.
        aliases: further names, and the name of the model of each.

    Raises:
        UserError: what is wrong with the settings or the models.
        SprinterError: the engine of the only pair has failed.
    """
    service = Models(settings, [NamedSource(None, load)] if callable(load) else load, aliases)
    server = make_server(service)
    try:
        server.run()
    except SystemExit as error:  # uvicorn's answer to an address that is taken; its log has the reason
        raise UserError(
            f"the server cannot listen on {settings.host}:{settings.port}: choose another host or port"
        ) from error
    finally:
        gc.unfreeze()
        _log.info("closed")
    if isinstance(service.error, SprinterError | OSError):
        raise service.error
    if service.error is not None:
        _log.critical("engine_failed", extra={"fields": error_fields(service.error)})
        raise SprinterError(
            f"the engine has stopped with an error ({type(service.error).__name__}: {service.error})"
        ) from service.error
