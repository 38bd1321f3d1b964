"""Make the token ids of a sample's turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sprinter.bench.sample import Sample
from sprinter.engine.chat import ChatMessage, conversation, render_chat
from sprinter.engine.pair import Pair
from sprinter.engine.prompt import encode
from sprinter.engine.tokens import encoded
from sprinter.errors import UserError
from sprinter.models.pair import LoadedPair

__all__ = ["TurnPrompt", "turn_ids", "turn_prompt"]


class TurnPrompt(NamedTuple):
    """Token ids of a turn's prompt, and the tokens, besides the target's EOS, that end its answer."""

    ids: list[int]
    stop_token_ids: tuple[int, ...] = ()


def turn_ids(
    pair: Pair | LoadedPair, sample: Sample, turn: int, answers: Sequence[str], *, chat: bool = True
) -> list[int]:
    """Token ids of one turn with the conversation before it; see ``turn_prompt``."""
    return turn_prompt(pair, sample, turn, answers, chat=chat).ids


def turn_prompt(
    pair: Pair | LoadedPair, sample: Sample, turn: int, answers: Sequence[str], *, chat: bool = True
) -> TurnPrompt:
    """One turn with the conversation before it, as a prompt; it may exceed the context.

    A chat template is applied to the system's, user's and assistant's messages, see ``render_chat``. Without one, turns
    and answers are joined as text, separated by blank lines.

    Args:
        pair: pair that is asked.
        sample: the sample.
        turn: number of the turn, from 0.
        answers: texts of the answers to the turns before it.
        chat: False: join as text even if there is a chat template, for prompts that are texts to be continued.

    Raises:
        UserError: the pair has no tokenizer, its chat template fails, or an id is outside the vocabulary.
        ValueError: the number of ``answers`` differs from the number of turns before.
    """
    models = pair.models if isinstance(pair, Pair) else pair
    tokenizer = models.tokenizer
    if tokenizer is None:
        raise UserError("suites are text and this pair has no tokenizer: give one with --tokenizer")
    said = list(zip(sample.turns[:turn], answers, strict=True))
    if chat and tokenizer.chat_template:
        rendered = render_chat(_messages(sample, said, turn), models)
        end = rendered.end_of_turn
        return TurnPrompt(rendered.ids, () if end is None or end in models.target.eos_ids else (end,))
    text = "\n\n".join([*(part for pair_of_texts in said for part in pair_of_texts), sample.turns[turn]])
    return TurnPrompt(encode(encoded(tokenizer, text), models))


def _messages(sample: Sample, said: Sequence[tuple[str, str]], turn: int) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    for question, answer in said:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": sample.turns[turn]})
    return conversation(messages, sample.system or None)
