"""A request as prompts and options of generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sprinter.decode import Never
from sprinter.decode.method import Method
from sprinter.decode.spec import parse_method
from sprinter.engine.options import OPTIONS, GenerationOptions
from sprinter.engine.prompt import PromptInput
from sprinter.errors import UserError
from sprinter.random import ANY_SEED, drawn_seed
from sprinter.serve.api_errors import Refusal
from sprinter.serve.schema import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    ScoreRequest,
    SprinterOptions,
    StreamOptions,
)
from sprinter.serve.settings import ServeSettings
from sprinter.serve.structured import forced_tool, structure_of

__all__ = ["TextRequest", "asked_of", "check_laws"]

_COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions; chat completions end with the answer or the row."""

_LAWS_BYTES = 1 << 26
"""Largest answer of laws."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a request asks for.

    Attributes:
        chat: whether it is a chat completion.
        prompts: the prompts, each of which gets ``n`` texts.
        options: of the first text of each prompt; the i-th has the seed ``options.seed + i``.
        generates: False if only the prompt is to be scored (``max_tokens`` 0).
        echo: whether the answer begins with the prompt.
        logprobs: number of most probable tokens to name for each token; None: no log-probabilities.
        stream: whether to answer with events; include_usage: with a last one that has the usage.
        tokens: whether to report every token.
        running_usage: whether each event has the usage so far.
        special: whether special tokens are written out.
        suffix: the text after the one that is to be written; None: there is none.
        forced: the tool that an answer must call; "": any; None: it need not.
        tools: that an answer may call; several_calls: by more than one call.
        template_kwargs, effort: arguments of the chat template.
        alias: the name of the model that was asked for; None: none was.
    """

    chat: bool
    prompts: list[PromptInput]
    n: int
    options: GenerationOptions
    generates: bool
    echo: bool
    logprobs: int | None
    stream: bool
    include_usage: bool
    tokens: bool
    running_usage: bool = False
    special: bool = False
    suffix: str | None = None
    tools: Sequence[dict[str, Any]] = ()
    forced: str | None = None
    several_calls: bool = True
    template_kwargs: Mapping[str, Any] | None = None
    effort: str | None = None
    alias: str | None = None

    @property
    def count(self) -> int:
        """Number of texts."""
        return self.n * len(self.prompts)


def asked_of(body: CompletionRequest | ChatRequest, settings: ServeSettings) -> TextRequest:
    """Translate the body of a request.

    Raises:
        Refusal, UserError: fields that contradict each other, values out of range.
    """
    ours = body.sprinter or SprinterOptions()
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options goes with stream=true: leave it out", param="stream_options")
    if isinstance(body, ChatRequest):
        prompts: list[PromptInput] = [body.messages]
        logprobs, most = _chat_logprobs(body), _chat_limit(body)
    else:
        prompts, logprobs = _prompts(body), body.logprobs
        most = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    echo = isinstance(body, CompletionRequest) and bool(body.echo)
    if most == 0 and not echo:
        raise Refusal(
            400,
            "max_tokens=0 goes with echo=true, which scores the prompt: give 1 or more",
            param="max_tokens",
        )
    if settings.max_new_tokens is not None:
        if most is not None and most > settings.max_new_tokens and settings.refuse_long:
            raise Refusal(
                400,
                f"max_tokens={most} is more than this server allows: give at most {settings.max_new_tokens}",
                param="max_tokens",
            )
        most = settings.max_new_tokens if most is None else min(most, settings.max_new_tokens)
    if ours.method is not None and ours.speculation:
        _check_draft(parse_method(ours.method), settings.max_draft)
    more = _chat_fields(body) if isinstance(body, ChatRequest) else _completion_fields(body)
    events = body.stream_options or StreamOptions()
    asked = TextRequest(
        chat=isinstance(body, ChatRequest), prompts=prompts, n=body.n or 1,
        options=_options(body, ours, settings, most, logprobs), generates=most != 0,
        echo=echo, logprobs=logprobs, stream=bool(body.stream),
        include_usage=events.include_usage, tokens=ours.tokens, running_usage=events.continuous_usage_stats,
        special=body.skip_special_tokens is False, alias=body.model, **more,
    )  # fmt: skip
    if asked.count > settings.max_choices:
        raise Refusal(
            400,
            f"{asked.count} texts in one request: this server writes at most {settings.max_choices}",
            param="n",
        )
    return asked


def _check_draft(method: Method, most: int) -> None:
    """Refuse a method with long or wide drafts: rows share their passes, and wait for those of the longest.

    Raises:
        UserError: it has, or may have.
    """
    method.check_counts(most, "this server takes in a request")
    if method.levels is None and method.drafter.proposes and not isinstance(method.stop, Never):
        raise UserError(f"the drafts of method {method.name} have no largest length: give cap={most} or less")


def _options(
    body: GenerateRequest,
    ours: SprinterOptions,
    settings: ServeSettings,
    most: int | None,
    logprobs: int | None,
) -> GenerationOptions:
    given = body.model_dump(
        include={*OPTIONS} - {"logprobs", "chat_template_kwargs", "response_format"}, exclude_none=True
    )
    given |= structure_of(body)
    if body.min_tokens is not None:
        given["min_new_tokens"] = body.min_tokens
    if body.repeat_penalty is not None and given.setdefault("repetition_penalty", body.repeat_penalty) != (
        body.repeat_penalty
    ):
        message = "repetition_penalty and repeat_penalty say the same thing: give one of them"
        raise Refusal(400, message, param="repeat_penalty")
    given["seed"] = drawn_seed(given.get("seed", ANY_SEED))
    if ours.method is not None and not ours.speculation:
        raise Refusal(
            400, "sprinter.method and sprinter.speculation=false exclude each other: give one of them",
            param="sprinter.method",
        )  # fmt: skip
    if logprobs is not None:  # those of trusted tokens after the last target call too
        given |= {"logprobs": logprobs, "meter": "complete"}
    elif ours.tokens:
        given["logprobs"] = 0
    return GenerationOptions(
        **given,
        method=_method(ours, settings) if ours.speculation else "autoregressive",
        max_new_tokens=most or (None if most is None else 1),
        require_lossless=settings.require_lossless or bool(ours.require_lossless),
        budget=settings.budget if ours.budget is None else ours.budget,
        # None: where no method is named, and with auto
        never_slower=ours.never_slower if ours.never_slower is not None or settings.never_slower else False,
    )


def _method(ours: SprinterOptions, settings: ServeSettings) -> Method | str | None:
    """The method of a request; a lossy one is confined to a part of the text, if it names none itself."""
    spec, only = ours.method or settings.method, ours.only or settings.only
    if spec is None or only is None:
        return spec
    method = parse_method(spec)
    return method if method.lossless() or method.only is not None else replace(method, only=only)


def _completion_fields(body: CompletionRequest) -> dict[str, Any]:
    if body.best_of not in (None, body.n or 1):
        message = (
            f"best_of={body.best_of} texts are not compared here: give n={body.best_of}, or leave it out"
        )
        raise Refusal(400, message, "unsupported_field", "best_of")
    if body.suffix and body.echo:
        raise Refusal(400, "suffix and echo exclude each other: give one of them", param="suffix")
    return {"suffix": body.suffix or None}


def _chat_fields(body: ChatRequest) -> dict[str, Any]:
    tools = (
        [] if body.tool_choice == "none" else [one.model_dump(exclude_none=True) for one in body.tools or ()]
    )
    return {
        "tools": tools,
        "forced": forced_tool(body),
        "several_calls": body.parallel_tool_calls is not False,
        "template_kwargs": body.chat_template_kwargs,
        "effort": body.reasoning_effort,
    }


def _prompts(body: CompletionRequest) -> list[PromptInput]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Refusal(400, "the prompt is empty: give at least one token", param="prompt")
    if isinstance(prompt[0], int):
        return [_ids(prompt)]
    return [one if isinstance(one, str) else _ids(one) for one in prompt]


def _ids(prompt: Sequence[Any]) -> list[int]:
    return [int(id) for id in prompt]


def _chat_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise Refusal(400, "top_logprobs goes with logprobs=true: give it too", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _chat_limit(body: ChatRequest) -> int | None:
    """The limit of new tokens; None: to the end of the row."""
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and body.max_tokens != body.max_completion_tokens
    ):
        raise Refusal(
            400,
            "max_tokens and max_completion_tokens say the same thing: give one of them",
            param="max_tokens",
        )
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def check_laws(asked: ScoreRequest, fingerprint: str, vocab_size: int) -> int:
    """The number of probabilities in an answer of laws.

    Raises:
        Refusal: of another target than the one that the client began with, or more than an answer may hold.
    """
    if asked.fingerprint not in (None, fingerprint):
        raise Refusal(409, "this server has another model now: load the pair again", "model_changed")
    places = sum(max(len(one.ids) - one.start, 0) for one in asked.texts)
    size = places * vocab_size * (4 if asked.dtype == "float32" else 2)
    if size > _LAWS_BYTES:
        raise Refusal(
            400, f"{places} laws are {size / 2**20:.0f} MiB, at most {_LAWS_BYTES >> 20} fit into an answer"
        )
    return places * vocab_size
