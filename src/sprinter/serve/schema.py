"""The fields of requests, and of errors. Every other field of a request is refused, so that none is ignored.

Fields that ask for nothing are accepted: labels, and what the server does anyway.

The first mistake in a list ends its validation: a list may have hundreds of thousands of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from sprinter.engine.options import OPTIONS, Bias
from sprinter.parameters import like

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "ErrorAnswer",
    "GenerateRequest",
    "RequestObject",
    "SprinterOptions",
    "TokenizeRequest",
    "fields_of",
]

_MOST_STOPS = 64
_MOST_FIELDS = 64  # of an object, more than any has
_MOST_BIASES = 1024
_MOST_TOOLS = 128
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
PromptTexts = Annotated[list[str], Field(fail_fast=True)]
PromptIds = Annotated[list[TokenIds], Field(fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]


def _few(given: Any) -> Any:
    """Refuse a mapping with too many keys before any of them is looked at."""
    if isinstance(given, dict) and len(given) > _MOST_BIASES:
        raise PydanticCustomError("too_long", f"give at most {_MOST_BIASES} tokens")
    return given


def _all(top_k: int | None) -> int | None:
    """vLLM's -1 is all tokens."""
    return 0 if top_k == -1 else top_k


Biases = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,18}$")], Bias],
    BeforeValidator(_few),
]


class RequestObject(BaseModel):
    """Base of all objects in requests: exact types, and no further fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """A null is an absent field, as in OpenAI's interface."""
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:
            raise PydanticCustomError("too_many_fields", "the object has too many fields")
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The OpenAPI description says so too."""
        found = handler(core)
        own = handler.resolve_ref_schema(found)
        for name, field in own.get("properties", {}).items():
            if name not in own.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                own["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        own["additionalProperties"] = {"type": "null"}
        return found


def _as(option: str, **more: Any) -> Any:
    """A field with the bounds (but ``more``) and the description of an option of generation; None: it is absent."""
    return like(OPTIONS[option], default=None, **more)


class StreamOptions(RequestObject):
    """``include_usage``: a last event with the usage of the whole request; ``continuous_usage_stats``: in each event,
    that of its text so far. ``include_obfuscation`` asks for nothing."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(RequestObject):
    """A JSON schema; ``strict`` false is followed too."""

    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(RequestObject):
    """What a text is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "schema", "json_schema goes with the type 'json_schema', and with no other"
            )
        return self


class StructuredOutputs(RequestObject):
    """vLLM's: what a text is to be, one of these."""

    json_schema: dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)] | None
    ) = None
    grammar: Annotated[str, Field(min_length=1)] | None = None


class SprinterOptions(RequestObject):
    """How to decode a request, and what to report of it.

    Attributes:
        method: a spec such as "sprinter(tau=0.6)"; None: the server's.
        speculation: False: the target writes every token.
        tokens: report every token with its origin, drift and probabilities.
        only: the part of the text in which a lossy method may be lossy; None: the server's.
        require_lossless, budget, never_slower: as in ``GenerationOptions``; None: the server's.
    """

    method: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    speculation: bool = True
    tokens: bool = False
    only: Annotated[str, Field(max_length=64)] | None = None
    require_lossless: bool | None = _as("require_lossless")
    budget: float | None = _as("budget")
    never_slower: bool | None = _as("never_slower")


class NothingAsked(RequestObject):
    """Fields that ask for nothing: labels, which are not kept, and what is so anyway."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    spaces_between_special_tokens: bool | None = None  # of texts with special tokens; there are none


class GenerateRequest(NothingAsked):
    """What requests for completions and for chat completions have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: float | None = _as("temperature")
    top_p: float | None = _as("top_p")
    top_k: Annotated[int | None, AfterValidator(_all)] = _as("top_k", ge=-1)
    min_p: float | None = _as("min_p")
    presence_penalty: float | None = _as("presence_penalty")
    frequency_penalty: float | None = _as("frequency_penalty")
    repetition_penalty: float | None = _as("repetition_penalty")
    repeat_penalty: float | None = _as("repetition_penalty")  # llama.cpp's name of it, which Open WebUI sends
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = _as("seed")
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=_MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=_MOST_STOPS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = _as("ignore_eos")
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    sprinter: SprinterOptions | None = None


_PARTS: dict[str, type[RequestObject]] = {
    "stream_options": StreamOptions, "sprinter": SprinterOptions, "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
}  # fmt: skip


def fields_of(body: type[RequestObject]) -> dict[str, FieldInfo]:
    """The fields of a body by their places, as in "sprinter.budget"."""
    found = dict(body.model_fields)
    for name, part in _PARTS.items():
        if name in body.model_fields:
            found |= {f"{name}.{one}": field for one, field in part.model_fields.items()}
    return found


class CompletionRequest(GenerateRequest):
    """The body of ``/v1/completions``."""

    prompt: str | TokenIds | PromptTexts | PromptIds
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1024)] | None = None


class FunctionTool(RequestObject):
    """A function that an answer may call. ``strict`` asks for arguments that the schema allows."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestObject):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionTool


class ToolName(RequestObject):
    """The function that must be called."""

    name: Annotated[str, Field(max_length=64)]


class NamedTool(RequestObject):
    """The tool that must be called."""

    type: Literal["function"]
    function: ToolName


class ChatRequest(GenerateRequest):
    """The body of ``/v1/chat/completions``; the chat template says which roles and fields messages may have."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=_MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=_MOST_FIELDS)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=16)] | None = None
    modalities: list[Literal["text"]] | None = None  # asks for nothing


class TokenizeRequest(RequestObject):
    """The body of ``/tokenize``: a text, or messages, to which the chat template is applied."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(RequestObject):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: TokenIds


class LawsText(RequestObject):
    """A text, and the place from which on its laws are asked for."""

    ids: Annotated[TokenIds, Field(min_length=1)]
    start: Annotated[int, Field(ge=0)]


class ScoreRequest(RequestObject):
    """The body of ``/v1/score``: texts whose laws are asked for, and the model that they were begun with."""

    model: str | None = None
    fingerprint: str | None = None
    texts: Annotated[list[LawsText], Field(min_length=1, max_length=64)]
    dtype: Literal["float32", "float16"] = "float32"


class ErrorFields(BaseModel):
    """What is wrong, in OpenAI's fields."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer with status 4xx or 5xx, for the OpenAPI description."""

    error: ErrorFields
