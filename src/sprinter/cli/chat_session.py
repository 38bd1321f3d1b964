"""The state of ``sprinter chat``: system prompt, turns, options. Knows no terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sprinter.engine.options import GenerationKeywords, GenerationOptions
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.decode import Method
    from sprinter.decode.draft import Stats, Token
    from sprinter.engine.generation import Generation
    from sprinter.engine.pair import Pair

__all__ = ["Session", "Turn", "meter_line"]

_RECORDED = ("method", "lossless", "finish_reason", "prompt_tokens", "request", "stats")
"""Keys of ``Generation.to_dict()`` that a saved chat holds for each answer."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the user and its answer.

    Attributes:
        user, answer: the texts.
        options: the options of the answer; None if it was loaded from a file.
        facts: JSON values for a saved chat: method, costs, drift, and the meter line under "meter". {}: unknown.
    """

    user: str
    answer: str
    options: GenerationOptions | None
    facts: Mapping[str, Any]

    @property
    def meter(self) -> str:
        """The meter line of the answer; "" if unknown."""
        return str(self.facts.get("meter", ""))


class Session:
    """A conversation with a pair. A method that raises leaves it as it was.

    Attributes:
        options: for the next answers; ``change`` replaces some.
        system: the system prompt; None: no system message (some templates then add one of their own).
        turns: the conversation so far, oldest first.

    Raises:
        UserError: the pair has no chat template, cannot run the method, or its template refuses the system prompt.
    """

    def __init__(self, pair: Pair, options: GenerationOptions, system: str | None = None) -> None:
        if getattr(pair.tokenizer, "chat_template", None) is None:
            raise UserError(
                f"the target {pair.models.target.id} has no chat template: give --template FILE, or a chat model as "
                "--target"
            )
        self.pair, self.options, self.system = pair, options, system
        self.turns: Sequence[Turn] = ()
        self._check(system, (), options)

    @property
    def method(self) -> Method:
        """The method of the next answer."""
        return self._method_of(self.options)

    def change(self, **keywords: Any) -> None:
        """Replace options, after checking that the pair can run them.

        Raises:
            UserError: what is wrong with them.
        """
        options = self.options.replace(**keywords)
        self._check(self.system, (), options)
        self.options = options

    def instruct(self, system: str | None) -> None:
        """Set the system prompt, which earlier turns then follow too; None removes it.

        Raises:
            UserError: the chat template refuses it.
        """
        self._check(system, (), self.options)
        self.system = system

    def ask(self, text: str, show: Callable[[Token], None]) -> Generation:
        """Answer a message. Ctrl-C stops the answer: the text so far is kept; without any, the message is dropped.

        Args:
            show: called with each token of the answer.

        Raises:
            UserError: the message does not fit into the context; the message says what would help.
            SprinterError: generation failed.
        """
        return self._answer(text, self.turns, self.options, show)

    def retry(self, show: Callable[[Token], None]) -> Generation:
        """Answer the last message again: with the next seed, or with the same seed if other options have changed.

        Raises:
            UserError: there is no turn, or the answer would be the same (greedy, same options).
        """
        *before, last = self._at_least(1)
        options = self.options
        if last.options is not None and last.options == options.replace(seed=last.options.seed):
            if options.sampling.greedy:
                raise UserError(
                    "temperature 0 gives the same answer again: /set temperature 0.7 or choose another /method first"
                )
            from sprinter.random import ANY_SEED, following_seed

            if options.seed != ANY_SEED:
                options = options.replace(seed=following_seed(last.options.seed, 1))
        return self._answer(last.user, before, options, show)

    def undo(self) -> None:
        """Remove the last turn; raises a UserError if there is none."""
        self.turns = self._at_least(1)[:-1]

    def drop(self, count: int) -> None:
        """Remove the oldest ``count`` turns; raises a UserError if there are fewer."""
        if count < 1:
            raise UserError(f"cannot drop {count} turns: give 1 or more")
        self.turns = self._at_least(count)[count:]

    def reset(self) -> None:
        """Remove all turns; system prompt and options stay."""
        self.turns = ()

    def messages(self) -> list[dict[str, str]]:
        """The conversation as a list of ``{"role", "content"}``."""
        return _messages(self.system, self.turns, None)

    def restore(self, system: str | None, turns: Sequence[Turn], options: GenerationKeywords | None) -> None:
        """Continue another conversation. ``options``: None keeps the present ones.

        Raises:
            UserError: the pair cannot run the options, or the template refuses the messages.
        """
        wanted = self.options if options is None else GenerationOptions(**options)
        self._check(system, turns, wanted)
        self.system, self.turns, self.options = system, tuple(turns), wanted

    def _check(self, system: str | None, turns: Sequence[Turn], options: GenerationOptions) -> None:
        """Raise a UserError if the pair cannot run the options, or its template refuses the messages."""
        short = options.replace(chat_template_kwargs=None, max_new_tokens=1, min_new_tokens=0)
        self.pair.stream([0], short).close()
        self._prompt(_messages(system, turns, "Hello"), options)

    def _at_least(self, count: int) -> Sequence[Turn]:
        if not self.turns:
            raise UserError("the conversation has no turns yet: write a message first")
        if len(self.turns) < count:
            raise UserError(f"the conversation has {len(self.turns)} turns: give {len(self.turns)} or fewer")
        return self.turns

    def _answer(
        self, text: str, before: Sequence[Turn], options: GenerationOptions, show: Callable[[Token], None]
    ) -> Generation:
        messages = _messages(self.system, before, text)
        self._check_room(text, before, options)
        with self.pair.stream(messages, options) as stream:
            try:
                for token in stream:
                    show(token)
            except KeyboardInterrupt:
                stream.close()
            out = stream.generation
        if out.tokens or out.finish_reason != "cancelled":
            record = out.to_dict()
            facts = {name: record[name] for name in _RECORDED} | {"meter": meter_line(out.stats, out)}
            self.turns = (*before, Turn(text, out.text, options, facts))
        return out

    def _prompt(self, messages: list[dict[str, str]], options: GenerationOptions) -> list[int]:
        """Token ids of a request."""
        for message in messages:
            try:
                message["content"].encode()
            except UnicodeEncodeError:
                raise UserError("a message is not valid UTF-8: convert it to UTF-8") from None
        return self.pair.render_chat(messages, options.chat_template_kwargs).ids

    def _check_room(self, text: str, before: Sequence[Turn], options: GenerationOptions) -> None:
        """Raise a UserError that offers ways out if a message leaves no room for its answer."""

        def length(turns: Sequence[Turn]) -> int:
            return len(self._prompt(_messages(self.system, turns, text), options))

        room, new, whole = self._room(options), options.max_new_tokens or 1, length(before)
        if room is None or whole + new <= room:
            return
        ways = []
        for count in range(1, len(before) + 1):
            if length(before[count:]) + new <= room:
                oldest = "the oldest turn" if count == 1 else f"the {count} oldest turns"
                ways += [f"/drop {count} removes {oldest}", "/reset all turns"]
                break
        if whole < room:
            ways.append(f"/set max_new_tokens {room - whole} shortens the answer")
        raise UserError(
            f"the conversation is full: {whole} tokens with this message, and {new} for the answer, exceed the "
            f"context of {room}: {', '.join(ways) or 'shorten the message'} (the message was not sent)"
        )

    def _method_of(self, options: GenerationOptions) -> Method:
        return self.pair.method_for(options)

    def _room(self, options: GenerationOptions) -> int | None:
        """Maximum length of a text, prompt included, in tokens; None: unknown."""
        method = self._method_of(options)
        needs_target = method.needs_target or options.meter == "complete"
        return self.pair.models.room(needs_target, method.drafter.uses_model)


def meter_line(stats: Stats, out: Generation) -> str:
    """One line with speed, target calls, drift, and what the prompt cost."""
    calls = f"{stats.target_calls} target call{'' if stats.target_calls == 1 else 's'}"
    if stats.tokens_per_target_call is not None:
        calls += f" ({stats.tokens_per_target_call:.1f} tokens each)"
    drift = "not measured" if stats.mean_drift is None else f"{stats.mean_drift:.3f}"
    if stats.budget is not None:
        drift += f" of {stats.budget:g}"
    return (
        f"{stats.new_tokens} token{'' if stats.new_tokens == 1 else 's'}, {stats.speed}, {calls}, "
        f"drift {drift}, coverage {stats.drift_coverage:.0%}, {'lossless' if stats.lossless else 'lossy'}; "
        f"prompt {out.prompt_tokens} tokens ({stats.cached_tokens} reused), prefill {stats.prefill_s:.2f} s"
    )


def _messages(system: str | None, turns: Sequence[Turn], question: str | None) -> list[dict[str, str]]:
    """The messages of a request, or, with ``question=None``, of a saved chat."""
    found = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        found.append({"role": "user", "content": turn.user})
        found.append({"role": "assistant", "content": turn.answer})
    return found if question is None else [*found, {"role": "user", "content": question}]
