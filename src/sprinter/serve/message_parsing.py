"""A text as it is answered: an assistant's reasoning, content and tool calls apart.

transformers' response parser reads them by a response template: the tokenizer's own or, by what the chat template
writes, one of those below.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from sprinter.decode.draft import Token
from sprinter.engine.prompt import EncodedPrompt
from sprinter.engine.stream import special_ids
from sprinter.serve.api_errors import Refusal

__all__ = ["TextParts", "joined", "parts_of"]

_THINK = "<think>"
_NEVER = "\0"  # a response template must have an anchor; ours get no prompt to look for it
_SPACE = r"(?:(?<!\s)\s*+)?"
"""White space before a mark. ``\\s*`` would be tried from each of its places: a long one would hold up the server."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a family of models writes tool calls.

    Attributes:
        mark: what its chat templates have, and no others do. field: of a response template.
        around: what stands around a call that could not be read.
        bare: whether small models of the family write calls without the marks, or in a block of code.
    """

    mark: str
    field: Mapping[str, Any]
    around: tuple[str, str] = ("", "")
    bare: bool = False


_FORMS = (
    ToolForm("<function=", {  # Qwen3-Coder, Qwen 3.5
        "open_pattern": _SPACE + r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>", "value_parser": {"name": "text"},
        },
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},  # the parser casts arguments by tools
    }),
    ToolForm("<tool_call>", {  # Hermes, Qwen 2.5 and 3
        "open_pattern": _SPACE + r"<tool_call>\s*", "close_pattern": _SPACE + r"</tool_call>\s*", "repeats": True,
    }, ("<tool_call>\n", "\n</tool_call>"), bare=True),
    ToolForm("[TOOL_CALLS]", {"open_pattern": _SPACE + r"\[TOOL_CALLS\]\s*"}, ("[TOOL_CALLS]", "")),  # Mistral
    ToolForm('"parameters": dictionary', {  # Llama 3
        "open_pattern": r'\A\s*+(?:<\|python_tag\|>\s*+)?(?P<head>\{\s*"(?:name|type)"\s*:)',
        "content_args": {"strip": False}, "transform": {"head": "{head}", "text": "{content}"},
    }),
)  # fmt: skip
_READ = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<tool_call>",
    "</tool_call>",
    _THINK,
    "</think>",
)
"""Special tokens that our response templates read."""
_BARE = tuple(fence + '{"name":' for fence in ("", "```", "```json"))
"""How a call begins that has no marks, without white space."""


class TextParts:
    """The parts of one text, as it is written: each call returns what is new, as the ``delta`` of an event.

    A tool call is returned as a whole. What cannot be read as one is content.

    Attributes:
        calls: number of tool calls so far. reasoning_tokens: of tokens before the content.

    Args:
        parser: of transformers; None: all is content.
        spelled: special tokens that are written out.
        form: of tool calls; None: the tokenizer's own response template has it.
        several: whether more than the first tool call is returned.
        forced: the whole text is JSON: a list of calls if it is "", else the arguments of this tool.
        bare: tools of which a call is read without marks too, if the whole text is calls.
    """

    def __init__(
        self, parser: Any = None, spelled: Mapping[int, str] | None = None, form: ToolForm | None = None,
        *, several: bool = True, forced: str | None = None, bare: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._bare, self._held = bare, ""  # what may become such a call
        self._parser, self._spelled, self._form, self._several = parser, spelled or {}, form, several
        self._forced = forced
        self._raw = ""  # of a tool call that is being written
        self.calls, self.reasoning_tokens = 0, 0

    def feed(self, tokens: Iterable[Token]) -> dict[str, Any]:
        """Add tokens."""
        return joined([self._push(token.text or self._spelled.get(token.id, "")) for token in tokens])

    def finish(self) -> dict[str, Any]:
        """End the text."""
        if self._forced is not None:
            return self._called({"name": self._forced, "arguments": self._raw} if self._forced else self._raw)
        if self._parser is None:
            return {}
        try:
            _, events = self._parser.finalize()
        except Exception:  # as below
            return self._unread("")
        self._parser = None
        found = joined(self._parts(events))
        text, self._held = self._held, ""
        return joined([found, self._bare_calls(text)]) if text.strip() else found

    def _push(self, text: str) -> dict[str, Any]:
        if self._forced is not None:
            self._raw += text
            return {}
        if self._parser is None:
            return {"content": text} if text else {}
        try:
            events = self._parser.feed(text)
        except Exception:  # what it does not read; and the types of a tool's arguments may be anything
            return self._unread(text)
        found = joined(self._parts(events))
        self.reasoning_tokens += found.keys() == {"reasoning_content"}
        return found

    def _unread(self, text: str) -> dict[str, Any]:
        """The rest of a text that the parser has failed on."""
        self._parser, raw = None, self._held + self._raw + text
        return {"content": raw} if raw else {}

    def _parts(self, events: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            kind, field = event["type"], event["field"]
            if field == "tool_calls":
                if kind == "region_chunk":
                    self._raw += event["text"]
                elif kind == "region_close":
                    self._raw = ""
                    yield self._called(event["value"])
            elif kind == "region_chunk" and field != "content":
                yield {"reasoning_content": event["text"]}
            elif kind == "region_chunk":
                yield self._content(event["text"])

    def _content(self, text: str) -> dict[str, Any]:
        """More content, but for what may become a call without marks."""
        if not self._bare:
            return {"content": text}
        self._held += text
        begun = "".join(self._held.split())
        if any(mark.startswith(begun) or begun.startswith(mark) for mark in _BARE):
            return {}
        self._bare, text, self._held = (), self._held, ""
        return {"content": text}

    def _bare_calls(self, text: str) -> dict[str, Any]:
        """The calls that a whole text without marks is; content, if it is something else."""
        plain = re.sub(r"^\s*```(?:json)?\s*$", "", text, flags=re.MULTILINE)
        try:
            found = [_call(one) for one in _decoded(plain)]
        except (ValueError, RecursionError):
            found = []
        if found and all(name in self._bare for name, _ in found):
            return self._called(plain)
        return {"content": text}

    def _called(self, value: Any) -> dict[str, Any]:
        """The calls of a region."""
        before, after = ("", "") if self._form is None else self._form.around
        try:
            found = [_call(one) for one in _values(value)]
        except (ValueError, RecursionError):
            text = value["head"] + value["text"] if isinstance(value, dict) and "head" in value else value
            return {"content": f"{before}{text if self._forced is None else self._raw}{after}"}
        calls: list[dict[str, Any]] = []
        for name, arguments in found if self._several else found[: max(0, 1 - self.calls)]:
            function = {"name": name, "arguments": arguments}
            calls.append({"index": self.calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
                          "function": function})  # fmt: skip
            self.calls += 1
        return {"tool_calls": calls} if calls else {}


def joined(deltas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Several deltas as one."""
    found: dict[str, Any] = {}
    for delta in deltas:
        for name, part in delta.items():
            found[name] = found[name] + part if name in found else part
    return found


def _values(value: Any) -> Iterator[Any]:
    """The calls that a region holds: objects, or the text of some."""
    if isinstance(value, dict) and "head" in value:
        value = value["head"] + value["text"]
    if isinstance(value, list):
        for one in value:
            yield from _values(one)
        return
    if not isinstance(value, str):
        yield value
        return
    for part in value.split("[TOOL_CALLS]"):  # Mistral's newer models: name[ARGS]{...}
        name, args, text = part.partition("[ARGS]")
        if args:
            yield {"name": name.partition("[CALL_ID]")[0].strip(), "arguments": json.loads(text)}
        else:
            yield from _decoded(part)


def _decoded(text: str) -> Iterator[Any]:
    """The JSON values of a text, one behind the other."""
    decoder, rest = json.JSONDecoder(), text.lstrip()
    while rest:
        value, end = decoder.raw_decode(rest)
        yield from value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip(" \t\r\n;,")


def _call(value: Any) -> tuple[str, str]:
    """Name and arguments, as JSON, of a call.

    Raises:
        ValueError: it is none.
    """
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("no call")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        json.loads(arguments)
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(
        arguments, ensure_ascii=False
    )


def parts_of(
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: EncodedPrompt,
    ends: Sequence[int],
    *,
    tools: Sequence[dict[str, Any]] = (),
    several: bool = True,
    special: bool = False,
    forced: str | None = None,
) -> TextParts:
    """What reads the text after a prompt.

    Args:
        ends: tokens that end a text, which are never written out.
        tools: that may be called; several: by more than one call.
        special: whether special tokens are written out in a text that is not parsed.
        forced: as of ``TextParts``.

    Raises:
        Refusal: it is not known how this model writes tool calls.
    """
    if tokenizer is None or forced is not None:
        return TextParts(forced=forced, several=several)
    if prompt.messages is None and not special:
        return TextParts()
    added = tokenizer.added_tokens_decoder
    spelled = {id: added[id].content for id in special_ids(tokenizer).difference(ends)}
    if special:
        return TextParts(spelled=spelled)
    own, form = getattr(tokenizer, "response_template", None), None
    if own is None:
        written = str(tokenizer.get_chat_template(None, list(tools) or None))
        spelled = {id: text for id, text in spelled.items() if text in _READ}
        fields: dict[str, Any] = {"content": {}}
        if _THINK in written or "</think>" in written:
            fields["reasoning_content"] = {
                "open_pattern": _THINK + r"\s*",
                "close_pattern": _SPACE + r"</think>\s*",
            }
        if tools:
            form = next((one for one in _FORMS if one.mark in written), None)
            if form is None:
                message = (
                    "how this model writes tool calls is not known: give its tokenizer a response_template"
                )
                raise Refusal(400, message, "unsupported_field", "tools")
            fields["tool_calls"] = dict(form.field)
        if len(fields) == 1:
            return TextParts()
        own = {"start_anchor": _NEVER, "fields": fields}
        before = _THINK + "\n" if _thinks(prompt) else ""
    else:
        before = prompt.text or ""
    parser = tokenizer.get_response_parser(own, prefix=before, tools=list(tools) or None)
    names = [one["function"]["name"] for one in tools] if form is not None and form.bare else ()
    return TextParts(parser, spelled, form, several=several, bare=names)


def _thinks(prompt: EncodedPrompt) -> bool:
    """Whether the reasoning has begun in the prompt, by the template or by a message that is continued."""
    if prompt.continued and prompt.messages:
        said = str(prompt.messages[-1].get("content", ""))
        return said.rfind(_THINK) > said.rfind("</think>")
    return (prompt.text or "").rstrip().endswith(_THINK)
