"""The routes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from sprinter.errors import SprinterError
from sprinter.serve.api_errors import Refusal, of_error, of_fields
from sprinter.serve.completion_streams import (
    AnswerChoice,
    ClientLeft,
    finish_texts,
    in_time,
    open_choices,
    wait_for_rows,
    while_connected,
)
from sprinter.serve.events import Events
from sprinter.serve.guard import RequestGuard, note_of
from sprinter.serve.logprobs import names_of
from sprinter.serve.logs import error_fields, text_fields
from sprinter.serve.page import add_page
from sprinter.serve.registry import Models
from sprinter.serve.request_parsing import TextRequest, asked_of
from sprinter.serve.responses import BytesParts, JsonParts, ServerAnswer
from sprinter.serve.responses_api import ResponseAnswer, ResponseEvents, ResponsesRequest, as_chat
from sprinter.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorAnswer,
    RequestObject,
    ScoreRequest,
    TokenizeRequest,
)
from sprinter.serve.service import Service
from sprinter.serve.speculation import price_headers
from sprinter.version import __version__

__all__ = ["make_app"]

_log = logging.getLogger("sprinter.serve")
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
# What the OpenAPI description says of answers.
_Responses = dict[int | str, dict[str, Any]]
_REFUSED: _Responses = {
    "4XX": {"model": ErrorAnswer, "description": "What is wrong with the request."},
    "5XX": {"model": ErrorAnswer, "description": "Why the server cannot answer it."},
}
_STATE: _Responses = {"4XX": _REFUSED["4XX"], 503: {"description": "Not now; the status says why."}}
_SCRAPED: _Responses = {200: {"description": "Counts and gauges.", "content": {"text/plain": {}}}, **_REFUSED}
_WRITTEN: _Responses = {
    200: {
        "description": "The answer, or with stream=true its events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **_REFUSED,
}


_LAWS: _Responses = {
    200: {"description": "little-endian numbers, [places, V]", "content": {"application/octet-stream": {}}},
    **_REFUSED,
}


def make_app(served: Service | Models) -> ASGIApp:
    """The server as an ASGI application; it loads its only pair when it starts, and closes all models at the end."""
    models = Models.of(served)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        models.begin()
        yield
        await models.aclose()

    app = FastAPI(
        title="Sprinter", version=__version__, lifespan=life, docs_url=None, redoc_url=None, redirect_slashes=False,
    )  # fmt: skip
    _add_errors(app)
    _add_state(app, models)
    _add_tokens(app, models)
    _add_laws(app, models)
    _add_texts(app, models)
    add_page(app, models, _taken)
    return RequestGuard(app, models)


async def _taken(models: Models, request: Request, name: str | None) -> Service:
    """What serves a model, until the request is over.

    Raises:
        Refusal: there is no such model; it cannot be loaded, or not in time.
    """
    model, note = models.find(name), note_of(request.scope)
    taking = models.take(model, note.after, note.owner)
    return await taking if model.at_hand else await while_connected(request.receive, taking)


def _add_errors(app: FastAPI) -> None:
    def answer(refusal: Refusal) -> JSONResponse:
        return JSONResponse(refusal.body(), refusal.status, refusal.headers)

    def refused(request: Request, error: Exception) -> JSONResponse:
        refusal = of_error(error)
        note_of(request.scope).fields.update(error=type(error).__name__, code=refusal.code)
        return answer(refusal)

    def failed(request: Request, error: Exception) -> JSONResponse:
        _log.error("failed", extra={"fields": {"id": note_of(request.scope).id, **error_fields(error)}})
        return refused(request, error)

    def left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; for the log

    for kind in (Refusal, SprinterError, ExceptionGroup):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(ClientLeft, left)
    app.add_exception_handler(Exception, failed)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        body = get_type_hints(request.scope["route"].endpoint).get("body", RequestObject)
        return answer(of_fields(error.errors(), body))

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> JSONResponse:
        what = {404: "there is no such path", 405: "this path has another method"}
        message = what.get(error.status_code, "the request cannot be read")
        refusal = Refusal(error.status_code, message, code={404: "not_found"}.get(error.status_code))
        return JSONResponse(refusal.body(), refusal.status, error.headers)


def _add_state(app: FastAPI, models: Models) -> None:
    @app.get("/health", responses=_STATE)
    async def health() -> Response:
        """200 as long as the models run; 503 while they are loaded, and after they have failed."""
        state = models.state
        return JSONResponse({"status": state}, 200 if state in ("ready", "closing") else 503)

    @app.get("/ready", responses=_STATE)
    async def ready() -> Response:
        """200 if new requests are taken."""
        return JSONResponse({"status": models.state}, 200 if models.state == "ready" else 503)

    @app.get("/metrics", response_class=Response, responses=_SCRAPED)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return PlainTextResponse(models.owners.metrics.scrape(), media_type=_METRICS)

    @app.get("/v1/models", responses=_REFUSED)
    async def listed() -> Any:
        """The models that are served, loaded or not."""
        return {"object": "list", "data": models.described()}

    @app.get("/v1/models/{model:path}", responses=_REFUSED)
    async def model(model: str) -> Any:
        """The model of this name."""
        return models.described(model)[0]


def _add_tokens(app: FastAPI, models: Models) -> None:
    @app.post("/tokenize", responses=_REFUSED)
    async def tokenize(request: Request, body: TokenizeRequest) -> Any:
        """Token ids of a text, or of messages."""
        owner, service = note_of(request.scope).owner, await _taken(models, request, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal(400, "give either prompt or messages", param="prompt")
        ids = await service.turns.run(owner, lambda: service.tokenized(body, owner))
        return {"count": len(ids), "max_model_len": service.engine.max_len, "tokens": ids}

    @app.post("/detokenize", responses=_REFUSED)
    async def detokenize(request: Request, body: DetokenizeRequest) -> Any:
        """The text of token ids."""
        owner, service = note_of(request.scope).owner, await _taken(models, request, body.model)
        return {"prompt": await service.turns.run(owner, lambda: service.text_of(body.tokens, owner))}

    @app.get("/tokenizer_info", responses=_REFUSED)
    async def tokenizer_info(request: Request, model: str | None = None) -> Any:
        """Special tokens and chat template: what lm-evaluation-harness asks for to tokenize here."""
        service = await _taken(models, request, model)
        known = service.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": type(known).__name__,
            **{name: getattr(known, name, None) for name in names},
            "chat_template": known.chat_template,
            "model_max_length": service.engine.max_len,
        }


def _add_laws(app: FastAPI, models: Models) -> None:
    """What a target on another machine is asked (``sprinter.models.remote``)."""

    @app.get("/v1/score", responses=_REFUSED)
    async def scored_model(request: Request, model: str | None = None) -> Any:
        """Sizes of the target, and fingerprints of its weights and of its vocabulary."""
        service = await _taken(models, request, model)
        return await service.turns.run(note_of(request.scope).owner, service.scored_model)

    @app.post("/v1/score", response_class=Response, responses=_LAWS)
    async def score(request: Request, body: ScoreRequest) -> Response:
        """Logarithms of the target's raw laws, text by text, behind each token from its start on, as raw numbers."""
        service, note = await _taken(models, request, body.model), note_of(request.scope)
        laws = await while_connected(request.receive, service.laws(body, note.owner, note.after))
        return BytesParts(laws)


def _add_texts(app: FastAPI, models: Models) -> None:
    @app.post("/v1/completions", responses=_WRITTEN)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue prompts: OpenAI's completions."""
        return await _serve(models, request, body)

    @app.post("/v1/chat/completions", responses=_WRITTEN)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation: OpenAI's chat completions."""
        return await _serve(models, request, body)

    @app.post("/v1/responses", responses=_WRITTEN)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation: OpenAI's responses. Nothing is stored."""
        return await _serve(models, request, body)

    @app.post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> None:
        message = "this server writes texts and has no embeddings: ask a server with an embedding model"
        raise Refusal(400, message, "unsupported_endpoint")


async def _serve(
    models: Models, request: Request, body: CompletionRequest | ChatRequest | ResponsesRequest
) -> Response:
    note = note_of(request.scope)
    owner, _ = note.owner, models.find(body.model)  # nothing is loaded for a request that is wrong

    def read() -> TextRequest:
        return asked_of(as_chat(body) if isinstance(body, ResponsesRequest) else body, models.settings)

    asked = await models.owners.turns.run(owner, read) if note.is_large else read()
    if asked.count > 1:  # the guard has counted one
        models.owners.charge_texts(owner, asked.count, paid=1)
    service = await _taken(models, request, body.model)
    if note.first:
        note.after.append(service.engine.expect(owner))
    pair = service.pair
    name = asked.alias or service.model
    frame = asked, note.id, service.now(), name, names_of(pair.tokenizer)
    kind, answer = Events, ServerAnswer(*frame)
    if isinstance(body, ResponsesRequest):
        kind, answer = ResponseEvents, ResponseAnswer(*frame, body=body)

    texts: list[AnswerChoice] = []

    def log() -> None:
        note.fields.update(text_fields(texts, prompts=service.settings.log_prompts))

    async with AsyncExitStack() as leave:
        leave.callback(log)  # when the texts below are closed
        note.fields["stream"] = asked.stream
        opening = leave.enter_async_context(open_choices(service, asked, owner))
        texts += await while_connected(request.receive, in_time(service, opening, note.deadline))
        for stream in (one.stream for one in texts if one.stream and note.first):
            stream.begun = note.first
        await while_connected(
            request.receive, wait_for_rows(service, texts)
        )  # errors have a status until here
        if asked.stream:
            return kind(service, answer, texts, leave.pop_all())
        ends = in_time(service, finish_texts(service, asked, texts), note.deadline)
        await while_connected(request.receive, ends)
        price = price_headers([text.out for text in texts if text.out is not None])
        return JsonParts(service, owner, lambda: answer.whole(texts), price)
    raise AssertionError  # the block above leaves in one of three ways
