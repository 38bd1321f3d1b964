"""Conversations as prompts: the messages are checked, and the tokenizer's chat template is applied once.

The template is transformers' Jinja template, applied as ``apply_chat_template`` does: with the generation prompt, or,
if the last message is the assistant's, open at its end, with the white space that it ends with, also where the template
trims it; no BOS is added to those that the template writes. Special
tokens are read in what the template writes; in what messages and tools say they are ordinary text, so that a user's
"<|im_end|>" ends no turn.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sprinter.engine.tokens import text_ids
from sprinter.errors import UserError, first_line
from sprinter.models.pair import LoadedPair

__all__ = ["ChatMessage", "EncodedPrompt", "conversation", "render_chat", "template_reads"]

ChatMessage = Mapping[str, Any]
"""One message: "role", "content" (text, or a list of text parts), and what else the chat template reads."""

_ROLES = ("system", "user", "assistant")
_LONGEST_NAME = 64  # of a role or field: a template is searched for it
_OURS = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    "tools", "documents", "chat_template",
}  # fmt: skip
"""Arguments that are not the user's: what to render, and what to do with it."""
_OPEN, _CLOSE = "\ue000\ue001"  # private use; they stand around the number of a special token that was said
_SAID = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_END = "\ue002"  # private use; it stands for the end of a message that is continued


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids.

    Attributes:
        ids: token ids, at least one.
        text: the prompt as text, a conversation as its chat template writes it; None: it was given as ids.
        messages: the conversation, contents as text; None: the prompt was text or ids.
        end_of_turn: id of the special token that the template writes after an assistant's message, where a text after
            this prompt ends, besides EOS; None: there is none.
    """

    ids: list[int]
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    end_of_turn: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """``end_of_turn``, if there is one."""
        return () if self.end_of_turn is None else (self.end_of_turn,)

    @property
    def continued(self) -> bool:
        """Whether a text continues the prompt's; else it is a text by itself: the answer to a conversation."""
        return not self.messages or self.messages[-1]["role"] == "assistant"


def conversation(prompt: str | Sequence[ChatMessage], system: str | None = None) -> list[ChatMessage]:
    """A prompt as messages: a text is what the user says; ``system`` goes before.

    Raises:
        UserError: ``system`` for messages that have one.
    """
    messages: list[ChatMessage] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    )
    if system is None:
        return messages
    if any(isinstance(message, Mapping) and message.get("role") == "system" for message in messages):
        raise UserError("the messages have a system message already: leave the system text out")
    return [{"role": "system", "content": system}, *messages]


def render_chat(
    messages: Sequence[ChatMessage],
    pair: LoadedPair,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    longest: int | None = None,
) -> EncodedPrompt:
    """Apply the chat template of a pair's tokenizer to a conversation.

    Args:
        messages: the conversation. It ends with a message to answer, or with one of the assistant to continue.
        pair: the loaded models.
        template_kwargs: further arguments of the template, for example ``{"enable_thinking": False}``, ``tools``,
            ``documents``, or the name or text of a ``chat_template``.
        longest: as in ``text_ids``.

    Raises:
        UserError: a pair without tokenizer or chat template; messages that are malformed, that the template refuses, or
            that it would leave out; arguments that it does not read; special tokens that cannot be encoded as text.
    """
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise UserError("the prompt is messages and this pair has no tokenizer: give token ids")
    given = dict(template_kwargs or {})
    template = _template(tokenizer, given)
    talk = [_checked(message, number, template) for number, message in enumerate(messages)]
    _check_end(talk)
    chat = _Chat(tokenizer, given)
    text, ids = chat.encode(talk, pair, longest)
    return EncodedPrompt(ids, text, talk, chat.end_of_turn(talk))


def _template(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> str:
    """The template's text, if it reads every given argument."""
    if tokenizer.chat_template is None and "chat_template" not in given:
        raise UserError(
            "the prompt is messages and the pair's tokenizer has no chat template: give text or a chat model, "
            "or set pair.tokenizer.chat_template (on the command line --template FILE)"
        )
    try:
        template = tokenizer.get_chat_template(given.get("chat_template"), given.get("tools"))
    except Exception as error:
        raise _failed(error) from None
    for name in given:
        if name in _OURS:
            raise UserError(f"chat_template_kwargs has {name!r}, which is not the caller's: leave it out")
        if name != "chat_template" and not template_reads(template, name):
            raise UserError(
                f"chat_template_kwargs has {name!r}, which this chat template does not read: leave it out"
            )
    return template


def template_reads(template: str, name: str, mark: str = r"\b") -> bool:
    """Whether a template mentions a variable or field, or a role in quotation marks."""
    return len(name) <= _LONGEST_NAME and re.search(mark + re.escape(name) + mark, template) is not None


def _checked(message: Any, number: int, template: str) -> dict[str, Any]:
    """A message with its content as text, without fields that are None or empty."""
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise UserError(
            f"{where} is of type {type(message).__name__}: give messages such as "
            '{"role": "user", "content": "..."}'
        )
    role = message.get("role")
    if role not in _ROLES and not (isinstance(role, str) and template_reads(template, role, """["']""")):
        known = "the chat template does not know: give 'user', 'assistant' or 'system'"
        raise UserError(f"the role of {where} is {role!r}, which {known}")
    others = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content") and value not in (None, [], {}, "")
    }
    if unread := next((name for name in others if not template_reads(template, str(name))), None):
        raise UserError(
            f"{where} has a field {unread!r}, which the chat template does not read: leave it out"
        )
    try:
        others = deepcopy(others)
    except RecursionError:
        raise UserError(f"{where} has a field that is nested too deeply: flatten it") from None
    if message.get("content") is None and "tool_calls" in others:
        return {"role": role, **others}
    return {"role": role, "content": _text(message.get("content"), where), **others}


def _text(content: Any, where: str) -> str:
    """The text of a content; several parts are joined by line breaks, as vLLM and llama.cpp do."""
    if isinstance(content, str):
        return content
    if content is None:
        raise UserError(f"{where} has no content: give its text as 'content'")
    if not isinstance(content, list | tuple) or not content:
        what = "an empty list" if isinstance(content, list | tuple) else f"of type {type(content).__name__}"
        raise UserError(f"the content of {where} is {what}: give text")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise UserError(
                f"{where} has a part of type {kind!r}, and the models read text alone: leave it out"
            )
        if not isinstance(part.get("text"), str):
            raise UserError(f"{where} has a text part without text: give {{'type': 'text', 'text': '...'}}")
    return "\n".join(part["text"] for part in content)


def _check_end(talk: Sequence[Mapping[str, Any]]) -> None:
    if not talk:
        raise UserError("there are no messages: give at least one of the user")
    last, role = talk[-1], talk[-1]["role"]
    if role == "assistant" and not last.get("content"):
        raise UserError(
            "the last message is the assistant's and has no text to continue: leave it out for a whole answer"
        )
    if role == "system":
        raise UserError("the last message has the role 'system': end with a message of the user")


def _failed(error: Exception) -> UserError:
    """Templates are code that comes with checkpoints: what they raise on purpose, and their faults."""
    first = first_line(error)
    if type(error) is TemplateError:  # its raise_exception
        return UserError(f"the chat template of the tokenizer fails on these messages ({first}): change them")
    return UserError(f"the chat template of the tokenizer fails ({first}): give another tokenizer")


def _left_out(number: int, message: Mapping[str, Any]) -> UserError:
    return UserError(
        f"the chat template leaves out message {number} (role {message['role']!r}): leave it out too, or say it in "
        "another role"
    )


class _Chat:
    """A chat template with its arguments.

    Args:
        tokenizer: has the template. given: further arguments of the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> None:
        self._tokenizer, self._given = tokenizer, given
        added = tokenizer.added_tokens_decoder
        self._special = {str(token.content): id for id, token in added.items() if token.special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = "|".join(map(re.escape, longest_first)) or "(?!)"  # (?!) matches nothing

    def _render(
        self, talk: Sequence[Mapping[str, Any]], *, asks: bool, given: Mapping[str, Any] | None = None
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in talk],
                tokenize=False,
                add_generation_prompt=asks,
                **(self._given if given is None else given),
            )
        except Exception as error:
            raise _failed(error) from None
        return str(text)

    def _open(self, talk: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> str:
        """The conversation up to the end of its last message, which is the assistant's."""
        *before, last = talk
        said = str(last["content"])
        shown = said.rstrip()  # templates may trim the rest
        ended = [*before, {**last, "content": shown + _END}]
        text, found, _ = self._render(ended, asks=False, given=given).rpartition(_END)
        if not found:
            raise _left_out(len(talk) - 1, last)
        return text + said[len(shown) :]

    def encode(
        self, talk: Sequence[dict[str, Any]], pair: LoadedPair, longest: int | None = None
    ) -> tuple[str, list[int]]:
        """Text and token ids of a conversation."""
        said: list[str] = []
        special = re.compile(f"{self._pattern}|{_OPEN}")
        try:
            marked = [_marked(message, special, said) for message in talk]
            given = {
                name: value if name == "chat_template" else _marked(value, special, said)
                for name, value in self._given.items()
            }
        except RecursionError:
            raise UserError("a message, tool or template argument is nested too deeply: flatten it") from None
        goes_on = talk[-1]["role"] == "assistant"
        text = self._open(marked, given) if goes_on else self._render(marked, asks=True, given=given)
        if not said:
            return text, text_ids(text, pair, self._tokenizer, special=False, longest=longest)
        whole = _SAID.sub(lambda match: said[int(match[1])], text)
        text_ids(whole, pair, self._tokenizer, special=False, longest=longest)  # refuses what is far too long
        return whole, self._ids_as_text(text, said)

    def _ids_as_text(self, marked: str, said: Sequence[str]) -> list[int]:
        """Token ids of a text whose marks stand for special tokens that are to be ordinary text.

        The text is split at the template's own special tokens, as the tokenizer does. That the parts are encoded as in
        the whole (some tokenizers add a space to each) is checked with a letter instead of each mark.
        """

        def split(letters: Sequence[str]) -> list[int]:
            ids: list[int] = []
            for part in re.split(f"({self._pattern})", marked):
                if part in self._special:
                    ids.append(self._special[part])
                elif part:
                    plain = _SAID.sub(lambda match: letters[int(match[1])], part)
                    found = self._tokenizer(
                        plain, add_special_tokens=False, split_special_tokens=True, verbose=False
                    )["input_ids"]
                    if not self._special.keys().isdisjoint(self._tokenizer.convert_ids_to_tokens(found)):
                        raise refused
                    ids += found
            return ids

        first = next((word for word in said if word != _OPEN), _OPEN)
        refused = UserError(
            f"a message holds the special token {first!r}, which this tokenizer cannot encode as text: take it out"
        )
        letters = ["x"] * len(said)
        usual = self._tokenizer(_SAID.sub("x", marked), add_special_tokens=False, verbose=False)["input_ids"]
        if split(letters) != list(usual):
            raise refused
        return split(said)

    def end_of_turn(self, talk: Sequence[dict[str, Any]]) -> int | None:
        """Id of the special token after an assistant's message; None: there is none.

        Raises:
            UserError: the template leaves out a message.
        """
        everything = "".join(str(message) for message in talk)
        taken = set(re.findall("mark([0-9]+)of", everything))  # messages may hold any number of them
        stem = next(f"mark{n}of" for n in itertools.count() if str(n) not in taken)
        probe = [
            {**message, "content": f"{message['content']}{stem}{number}x"}
            if "content" in message
            else message
            for number, message in enumerate(talk)
        ]
        if talk[-1]["role"] != "assistant":
            probe.append({"role": "assistant", "content": f"{stem}{len(talk)}x"})
        text = self._render(probe, asks=False)
        found = set(re.findall(f"{stem}([0-9]+)x", text))
        for number, message in enumerate(talk):
            if "content" in message and str(number) not in found:
                raise _left_out(number, message)
        _, _, rest = text.rpartition(f"{stem}{len(probe) - 1}x")
        end = re.match(rf"\s*({self._pattern})", rest)
        return None if end is None else self._special[end[1]]


def _marked(value: Any, special: re.Pattern[str], said: list[str]) -> Any:
    """A message with a mark for each special token in its strings; the tokens are appended to ``said``."""

    def mark(match: re.Match[str]) -> str:
        said.append(match[0])
        return f"{_OPEN}{len(said) - 1}{_CLOSE}"

    if isinstance(value, str):
        return special.sub(mark, value)
    if isinstance(value, Mapping):
        return {name: _marked(one, special, said) for name, one in value.items()}
    return [_marked(one, special, said) for one in value] if isinstance(value, list | tuple) else value
