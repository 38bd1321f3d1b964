"""The page at ``/``: static files, and what it must know of the pair.

The files need no API key; what they ask the server for does. They load nothing from elsewhere, and the content security
policy forbids it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from sprinter.decode.spec import method_table, parse_method
from sprinter.engine.chat import EncodedPrompt
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.serve.api_errors import Refusal
from sprinter.serve.conversations import template_arguments
from sprinter.serve.message_parsing import parts_of
from sprinter.serve.registry import Models
from sprinter.serve.service import Service, shown_id

__all__ = ["add_page", "page_files", "page_methods", "without_json", "without_tools"]

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
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


def page_files() -> dict[str, Response]:
    """The files of the page as answers, by name."""
    there = files("sprinter.serve").joinpath("static").iterdir()
    types = ((one, _TYPES.get(Path(one.name).suffix)) for one in there)
    return {one.name: Response(one.read_bytes(), 200, _HEADERS, kind) for one, kind in types if kind}


def add_page(
    app: FastAPI, models: Models, taken: Callable[[Models, Request, str | None], Awaitable[Service]]
) -> None:
    """Add the routes of the page; ``taken`` gives a request what serves a model."""
    answers = page_files()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return answers["index.html"]

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        return answers.get(name) or Response(status_code=404)

    @app.get("/page/pair", include_in_schema=False)
    async def pair(request: Request, model: str | None = None) -> Any:
        """The pair, the methods that it can run, with the numbers that their defaults stand for, and what it lacks."""
        service = await taken(models, request, model)
        found, settings = service.pair, service.settings
        if service.methods is None:  # every method is parsed and checked: once, and beside the event loop
            lossless = settings.require_lossless
            service.methods = await asyncio.to_thread(page_methods, found, lossless=lossless)
        return {
            "model": model or service.model,
            "draft": found.models.draft and shown_id(found.models.draft.id),
            "chat": bool(found.tokenizer is not None and found.tokenizer.chat_template),
            "no_json": without_json(found),
            "no_tools": without_tools(found),
            "default_method": settings.method or found.default_method,
            "methods": service.methods,
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


def without_json(pair: Pair) -> str | None:
    """Why the pair cannot write JSON on request; None: it can."""
    try:
        pair.stream([0], response_format={"type": "json_object"}, max_new_tokens=1).close()
    except UserError as error:
        return str(error)
    return None


def without_tools(pair: Pair) -> str | None:
    """Why the pair takes no tools; None: it does."""
    tokenizer = pair.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return "this pair has no chat template"
    tools, said = [{"type": "function", "function": {"name": "f"}}], [{"role": "user", "content": ""}]
    try:
        template_arguments(tokenizer, None, tools, None)
        parts_of(tokenizer, EncodedPrompt([], "", messages=said), (), tools=tools)
    except Refusal as error:
        return error.message
    return None
