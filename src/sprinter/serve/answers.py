"""Answers in OpenAI's shapes: whole ones, and the parts that they share with events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sprinter.engine.generation import Generation
from sprinter.serve.asked import TextRequest
from sprinter.serve.choices import AnswerChoice
from sprinter.serve.logprobs import (
    LawfulToken,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    of_prompt,
    of_tokens,
)
from sprinter.serve.speculation import llamacpp_timings, sprinter_report, token_report, vllm_metrics
from sprinter.version import __version__

__all__ = ["ServerAnswer", "finish_of", "speculation_of", "usage_of"]

_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The frame of an answer, the same in all of its events.

    Attributes:
        id: of the request. created: time in seconds since 1970. model: its name. names: of tokens.
    """

    asked: TextRequest
    id: str
    created: int
    model: str
    names: TokenNames = field(repr=False)

    def frame(self, choices: list[dict[str, Any]], *, event: bool = False) -> dict[str, Any]:
        """The object around choices."""
        kind = "chat.completion" if self.asked.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.asked.chat else 'cmpl'}-{self.id}",
            "object": f"{kind}.chunk" if event and self.asked.chat else kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"sprinter-{__version__}",
            "choices": choices,
        }

    def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """The answer as one object."""
        return {
            **self.frame([self._choice(choice) for choice in choices]),
            "usage": usage_of(self.asked, choices),
            **speculation_of(choices),
        }

    def _choice(self, choice: AnswerChoice) -> dict[str, Any]:
        out = choice.out
        prompt, before = (self.echoed(choice), self.prompt_tokens(choice)) if self.asked.echo else ("", [])
        text = prompt if out is None else prompt + out.text
        tokens = [*before, *of_tokens([] if out is None else out.tokens, len(prompt))]
        found: dict[str, Any] = {"index": choice.index, "logprobs": self.logprobs(tokens)}
        if self.asked.chat:
            found["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            found["text"] = text
        found["finish_reason"] = finish_of(out)
        if out is not None:
            report = sprinter_report(out)
            if self.asked.tokens:
                report["tokens"] = [token_report(token, i) for i, token in enumerate(out.tokens)]
            found["sprinter"] = report
        return found

    def echoed(self, choice: AnswerChoice) -> str:
        """The prompt as text."""
        if choice.prompt.text is not None:
            return choice.prompt.text
        return "".join(token.text for token in self.prompt_tokens(choice))

    def prompt_tokens(self, choice: AnswerChoice) -> list[LawfulToken]:
        """The prompt's tokens."""
        return of_prompt(choice.prompt, choice.scored, self.names.tokenizer)

    def logprobs(self, tokens: Sequence[LawfulToken]) -> dict[str, Any] | None:
        """The object ``logprobs`` of a choice; None if it was not asked for."""
        if self.asked.logprobs is None:
            return None
        if self.asked.chat:
            return chat_logprobs(tokens, self.names)
        return completion_logprobs(tokens, self.names)


def finish_of(out: Generation | None) -> str:
    """OpenAI's reason why a text ended."""
    return "length" if out is None else _FINISH.get(out.finish_reason, out.finish_reason)


def _outs(choices: Sequence[AnswerChoice]) -> list[Generation]:
    return [choice.out for choice in choices if choice.out is not None]


def usage_of(asked: TextRequest, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """Numbers of tokens; a prompt counts once, whatever the number of its texts."""
    outs = _outs(choices)
    prompt = sum(len(choice.prompt.ids) for choice in choices[:: asked.n])
    written = sum(out.stats.new_tokens for out in outs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(out.stats.cached_tokens for out in outs[:: asked.n])},
    }


def speculation_of(choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """vLLM's ``metrics`` and llama.cpp's ``timings``."""
    outs = _outs(choices)
    if not outs:
        return {}
    return {"metrics": {"speculative_decoding": vllm_metrics(outs)}, "timings": llamacpp_timings(outs)}
