"""The conversation of ``sprinter chat``: system prompt, turns, options, and its saved form. Knows no terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sprinter.cli.prompts import check_utf8
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.decode import Method
    from sprinter.decode.draft import Token
    from sprinter.engine.generation import Generation
    from sprinter.engine.pair import Pair

__all__ = ["Session", "Turn"]

_RECORDED = ("method", "lossless", "finish_reason", "prompt_tokens", "request", "stats")
"""Keys of ``Generation.to_dict()`` that a saved chat holds for each answer."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the user and its answer.

    Attributes:
        options: those of the answer; None if it was loaded from a file.
        facts: JSON values for a saved chat: method, costs, drift, and the meter line under "meter". {}: unknown.
    """

    user: str
    answer: str
    options: GenerationOptions | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def meter(self) -> str:
        """The meter line of the answer; "" if unknown."""
        return str(self.facts.get("meter", ""))


class Session:
    """A conversation with a pair. A method that raises leaves it as it was.

    Attributes:
        options: for the next answers. system: the system prompt; None: no system message (some templates add their
            own). turns: the conversation so far, oldest first.

    Raises:
        UserError: the pair has no chat template, cannot run the method, or its template refuses the system prompt.
    """

    def __init__(self, pair: Pair, options: GenerationOptions, system: str | None = None) -> None:
        if getattr(pair.tokenizer, "chat_template", None) is None:
            raise UserError(
                f"the target {pair.models.target.id} has no chat template: give --template FILE, or a chat model as "
                "--target"
            )
        self.pair = pair
        self.restore(system, (), options)

    @property
    def method(self) -> Method:
        """The method of the next answer."""
        return self.pair.method_for(self.options)

    def restore(self, system: str | None, turns: Sequence[Turn], options: GenerationOptions) -> None:
        """Continue another conversation; raises a UserError if the pair or its chat template refuses it."""
        short = options.replace(chat_template_kwargs=None, max_new_tokens=1, min_new_tokens=0)
        self.pair.stream([0], short).close()
        self._length(_messages(system, turns, "Hello"), options)
        self.system, self.turns, self.options = system, tuple(turns), options

    def change(self, **keywords: Any) -> None:
        """Replace options; raises a UserError if the pair cannot run them."""
        self.restore(self.system, self.turns, self.options.replace(**keywords))

    def ask(
        self, text: str, show: Callable[[Token], None], options: GenerationOptions | None = None
    ) -> Generation:
        """Answer a message. Ctrl-C stops the answer: the text so far is kept; without any, the message is dropped.

        Args:
            show: called with each token of the answer.
            options: of the answer; None: those of the session.

        Raises:
            UserError: the message does not fit into the context; the error says what would help.
            SprinterError: generation failed.
        """
        options = options or self.options
        self._check_room(text, options)
        with self.pair.stream(_messages(self.system, self.turns, text), options) as stream:
            try:
                for token in stream:
                    show(token)
            except KeyboardInterrupt:
                stream.close()
            out = stream.generation
        if out.tokens or not out.stopped:
            prompt = f"prompt {out.prompt_tokens} tokens ({out.stats.cached_tokens} reused)"
            meter = f"{out.stats.summary}; {prompt}, prefill {out.stats.prefill_s:.2f} s"
            record = out.to_dict()
            facts = {name: record[name] for name in _RECORDED} | {"meter": meter}
            self.turns = (*self.turns, Turn(text, out.text, options, facts))
        return out

    def retry(self, show: Callable[[Token], None]) -> Generation:
        """Answer the last message again: with the next seed, or with the same seed if other options have changed.

        Raises:
            UserError: there is no turn, or the answer would be the same (greedy, same options).
        """
        kept, options = self.turns, self.options
        self.drop(1, newest=True)
        try:
            last = kept[-1]
            if last.options is not None and last.options == options.replace(seed=last.options.seed):
                if options.sampling.greedy:
                    raise UserError(
                        "temperature 0 gives the same answer again: /set temperature 0.7 or choose another /method "
                        "first"
                    )
                from sprinter.random import ANY_SEED, following_seed

                if options.seed != ANY_SEED:
                    options = options.replace(seed=following_seed(last.options.seed, 1))
            return self.ask(last.user, show, options)
        finally:
            if len(self.turns) < len(kept):
                self.turns = kept

    def drop(self, count: int, *, newest: bool = False) -> None:
        """Remove the oldest or the newest turns; raises a UserError if there are fewer than ``count``."""
        there = len(self.turns)
        if not there:
            raise UserError("the conversation has no turns yet: write a message first")
        if not 1 <= count <= there:
            raise UserError(f"cannot drop {count} turns: the conversation has {there}, give 1 to {there}")
        self.turns = self.turns[:-count] if newest else self.turns[count:]

    def _length(self, messages: list[dict[str, str]], options: GenerationOptions) -> int:
        """Number of tokens of a request."""
        for message in messages:
            check_utf8(message["content"], "a message")
        return len(self.pair.render_chat(messages, options.chat_template_kwargs).ids)

    def _check_room(self, text: str, options: GenerationOptions) -> None:
        """Raise a UserError that offers ways out if a message leaves no room for its answer."""
        method, new = self.pair.method_for(options), options.max_new_tokens or 1
        scored = method.needs_target or options.meter == "complete"
        room = self.pair.models.room(scored, method.drafter.uses_model)

        def length(dropped: int) -> int:
            return self._length(_messages(self.system, self.turns[dropped:], text), options)

        whole = length(0)
        if room is None or whole + new <= room:
            return
        ways, counts = [], range(1, len(self.turns) + 1)
        if (count := next((count for count in counts if length(count) + new <= room), None)) is not None:
            oldest = "the oldest turn" if count == 1 else f"the {count} oldest turns"
            ways += [f"/drop {count} removes {oldest}", "/reset all turns"]
        if whole < room:
            ways.append(f"/set max_new_tokens {room - whole} shortens the answer")
        raise UserError(
            f"the conversation is full: {whole} tokens with this message, and {new} for the answer, exceed the "
            f"context of {room}: {', '.join(ways) or 'shorten the message'} (the message was not sent)"
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of a saved chat: messages, options of the next answer, facts of each answer, versions."""
        from sprinter.engine.record import models_record, versions

        return {
            "messages": _messages(self.system, self.turns),
            "options": self.options.to_dict(),
            "answers": [dict(turn.facts) or None for turn in self.turns],
            "models": models_record(self.pair.models, self.pair.heads, self.pair.drafting),
            "version": versions(),
        }

    def load(self, value: Any) -> bool:
        """Continue a saved chat, or any list of messages; returns whether it was the former.

        Raises:
            UserError: it is not a chat, or holds options that this pair cannot run.
        """
        whole = value if isinstance(value, Mapping) else {"messages": value}
        if (options := whole.get("options")) is None:
            options = self.options.to_dict()
        if not isinstance(options, Mapping):
            raise UserError('"options" is not an object: give names and values, or leave it out')
        self.restore(*_conversation(whole), GenerationOptions(**options))
        return whole.keys() == self.to_dict().keys()

    def markdown(self) -> str:
        """The conversation as Markdown."""
        models, defaults = self.pair.models, GenerationOptions().to_dict()
        names = models.target.id if models.draft is None else f"{models.target.id} with {models.draft.id}"
        parts = [f"# Chat with {names}"] + ([] if self.system is None else [f"**System**\n\n{self.system}"])
        for turn in self.turns:
            parts += [f"**User**\n\n{turn.user}", f"**Assistant**\n\n{turn.answer}"]
            parts += [f"*{turn.meter}*"] if turn.meter else []
        changed = {name: value for name, value in self.options.to_dict().items() if value != defaults[name]}
        spelled = ", ".join(f"`{name}={value}`" for name, value in changed.items()) or "defaults"
        return "\n\n".join([*parts, f"Options: {spelled}"]) + "\n"


def _messages(system: str | None, turns: Sequence[Turn], *questions: str) -> list[dict[str, str]]:
    """The messages of a conversation, and of a question after it."""
    said = [("system", system)] if system is not None else []
    for turn in turns:
        said += [("user", turn.user), ("assistant", turn.answer)]
    said += [("user", question) for question in questions]
    return [{"role": role, "content": content} for role, content in said]


def _conversation(whole: Mapping[str, Any]) -> tuple[str | None, list[Turn]]:
    """System prompt and turns of a saved chat."""
    try:
        said = [(one["role"], one["content"] + "") for one in whole["messages"]]  # + "": it is text
    except (KeyError, TypeError):
        raise UserError(
            'it holds no list "messages" of {"role": ..., "content": text}: give a saved chat'
        ) from None
    first = 1 if said and said[0][0] == "system" else 0
    for number, (role, _) in enumerate(said[first:]):
        if role != (due := ("user", "assistant")[number % 2]):
            raise UserError(
                f"message {number + first + 1} is of role {role!r} where {due!r} is due: user and assistant take turns"
            )
    texts = [text for _, text in said]
    if (len(texts) - first) % 2:
        raise UserError("the last message has no answer: end with a message of role 'assistant'")
    users, answers = texts[first::2], texts[first + 1 :: 2]
    facts = whole.get("answers", [None] * len(answers))
    if not isinstance(facts, list) or [type(one) in (dict, type(None)) for one in facts] != [True] * len(
        users
    ):
        raise UserError(
            '"answers" does not fit the messages: give an object or null for each answer, or leave it out'
        )
    turns = zip(users, answers, facts, strict=True)
    return texts[0] if first else None, [Turn(user, text, None, one or {}) for user, text, one in turns]
