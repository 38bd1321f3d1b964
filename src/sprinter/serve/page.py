"""The page at ``/``: static files, and what it must know of the pair.

The files need no API key; what they ask the server for does. They load nothing from elsewhere, and the content security
policy forbids it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from sprinter.decode.spec import method_table, parse_method
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.serve.guard import note_of
from sprinter.serve.service import Service
from sprinter.serve.static_files import TYPES, read_static

__all__ = ["add_page", "page_methods"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI, service: Service) -> None:
    """Add the routes of the page."""
    offered: list[dict[str, Any]] = []

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        note_of(request.scope).path = "/"
        return _file("index.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        note_of(request.scope).path = "/static"
        return _file(name) if name in TYPES else Response(status_code=404)

    @app.get("/page/pair", include_in_schema=False)
    async def pair(request: Request) -> Any:
        """The pair, and the methods that it can run, with the numbers that their defaults stand for."""
        note_of(request.scope).path = "/page/pair"
        found, settings = service.pair, service.settings
        if not offered:  # every method is parsed and checked: once, and beside the event loop
            offered.extend(await asyncio.to_thread(page_methods, found, lossless=settings.require_lossless))
        tokenizer = found.tokenizer
        return {
            "model": service.model,
            "draft": found.models.draft and _short(found.models.draft.id),
            "chat": bool(tokenizer is not None and tokenizer.chat_template),
            "default_method": settings.method or found.default_method,
            "methods": offered,
        }


def page_methods(pair: Pair, *, lossless: bool = False) -> list[dict[str, Any]]:
    """The methods that a pair can run: "name", "spec" with numbers for recorded thresholds, "lossless", "paper".

    Args:
        lossless: only lossless ones.
    """
    found = []
    for row in method_table():
        if lossless and not row["lossless"]:
            continue
        try:
            method = parse_method(row["name"])
            pair.stream([0], method=method, max_new_tokens=1).close()  # checks the request, does no work
            method = pair._runtime.settle(method)
        except UserError:  # a draft or a head is missing
            continue
        found.append(
            {"name": row["name"], "spec": method.name, "lossless": row["lossless"], "paper": row["paper"]}
        )
    return found


def _short(id: str) -> str:
    """A model's id without the folders of a path on this machine."""
    return Path(id).name if Path(id).exists() else id


def _file(name: str) -> Response:
    return Response(read_static(name), media_type=TYPES[name], headers=_HEADERS)
