"""Saved chats: JSON that can be loaded again, and Markdown."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sprinter.cli.chat_session import Session, Turn
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError
from sprinter.files import write_atomic

__all__ = ["as_dict", "load_chat", "save_chat"]

_MOST_BYTES = 64 * 2**20


def as_dict(chat: Session) -> dict[str, Any]:
    """The JSON object of a chat.

    "messages" have role and content; "answers" holds, for each message of the assistant, method, costs and drift (null
    if unknown); "options" are those of the next answer.
    """
    from sprinter.engine.record import models_record, versions

    return {
        "messages": chat.messages(),
        "options": chat.options.to_dict(),
        "answers": [dict(turn.facts) or None for turn in chat.turns],
        "models": models_record(chat.pair.models, chat.pair.heads, chat.pair.drafting),
        "version": versions(),
    }


def save_chat(chat: Session, path: Path, *, replace: bool) -> None:
    """Write a chat atomically: Markdown if the name ends in .md, else JSON.

    Args:
        replace: whether an existing file may be replaced.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    text = _markdown(chat) if path.suffix == ".md" else json.dumps(as_dict(chat), indent=1) + "\n"
    try:
        if os.path.lexists(path) and not replace:
            raise UserError(f"'{path}' exists already: /save! replaces it, or give another name")
        write_atomic(path, text)
    except OSError as error:
        raise UserError(f"cannot write '{path}' ({error.strerror}): give another file") from None


def load_chat(chat: Session, path: Path) -> bool:
    """Continue the conversation of a file: one that ``save_chat`` wrote, or any JSON with a list of messages.

    Returns:
        Whether ``save_chat`` wrote it.

    Raises:
        UserError: the file cannot be read, is no chat, or holds options that this pair cannot run.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"'{path}' has more than {_MOST_BYTES // 2**20} MiB: give a saved chat")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read '{path}' ({error.strerror}): give a file that /save wrote") from None
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        raise UserError(f"'{path}' is not JSON in UTF-8: give a file that /save wrote, not .md") from None
    try:
        system, turns, options = _parts(value)
        chat.restore(system, turns, options)
    except UserError as error:
        raise UserError(f"'{path}': {error}") from None
    return isinstance(value, dict) and value.keys() == as_dict(chat).keys()


def _parts(value: Any) -> tuple[str | None, list[Turn], Any]:
    """System prompt, turns and options (None: not in the file) of a JSON value."""
    whole = value if isinstance(value, Mapping) else {"messages": value}
    if not isinstance(messages := whole.get("messages"), list) or not all(map(_is_message, messages)):
        raise UserError('it holds no list "messages" of {"role": ..., "content": text}: give a saved chat')
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    said = messages[0 if system is None else 1 :]
    for number, message in enumerate(said):
        wanted = ("user", "assistant")[number % 2]
        if message["role"] != wanted:
            place = number + len(messages) - len(said) + 1
            raise UserError(
                f"message {place} is of role {message['role']!r} where {wanted!r} is due: user and assistant take turns"
            )
    if len(said) % 2:
        raise UserError("the last message has no answer: end with a message of role 'assistant'")
    answers = whole.get("answers", [None] * (len(said) // 2))
    if not isinstance(answers, list) or len(answers) != len(said) // 2 or not all(map(_is_record, answers)):
        raise UserError(
            '"answers" does not fit the messages: give an object or null for each answer, or leave it out'
        )
    pairs = zip(said[::2], said[1::2], answers, strict=True)
    turns = [Turn(user["content"], answer["content"], None, facts or {}) for user, answer, facts in pairs]
    return system, turns, _options(whole.get("options"))


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _is_record(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _options(value: Any) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise UserError('"options" is no object: give names and values, or leave it out')
    return None if value is None else dict(value)


def _markdown(chat: Session) -> str:
    models = chat.pair.models
    names = models.target.id if models.draft is None else f"{models.target.id} with {models.draft.id}"
    parts = [f"# Chat with {names}"]
    if chat.system is not None:
        parts.append(f"**System**\n\n{chat.system}")
    for turn in chat.turns:
        parts += [f"**User**\n\n{turn.user}", f"**Assistant**\n\n{turn.answer}"]
        if turn.meter:
            parts.append(f"*{turn.meter}*")
    return "\n\n".join([*parts, f"Options: {_spelled(chat.options)}"]) + "\n"


def _spelled(options: GenerationOptions) -> str:
    """The options that differ from their defaults."""
    defaults = GenerationOptions().to_dict()
    changed = {name: value for name, value in options.to_dict().items() if value != defaults[name]}
    return ", ".join(f"`{name}={value}`" for name, value in changed.items()) or "defaults"
