"""The result of a request: a text, its tokens, its costs, and how to reproduce it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sprinter.decode.draft import Stats, Token
from sprinter.decode.state import RuleState
from sprinter.engine.html import to_html
from sprinter.engine.options import GenerationOptions
from sprinter.engine.record import versions

__all__ = ["Generation", "logprobs_dict", "stats_dict", "token_dict"]

_SHOWN = 60  # characters of a text that its repr shows


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated text with the provenance of every token.

    Attributes:
        text: the text without the prompt, special tokens, the EOS or stop token that ended it, and the stop string.
        tokens: every new token, including those without text, with id, text, origin, round and drift. Their texts join
            to ``text``.
        stats: counts, drift, times, FLOPs.
        method: the method's full name.
        finish_reason: "eos", "stop", "length", "error", "cancelled" or "interrupted".
        accept_lengths: number of tokens that each round added.
        rules: state of the method's rules at the end, from which another text can continue.
        request: the options, with the method and ``max_new_tokens`` as they were used: ``pair.generate(prompt_ids,
            request)`` reproduces the tokens.
        prompt, prompt_ids: the prompt as text (None if it was given as ids; messages as the chat template writes them),
            and its token ids.
        models: target, draft, gate, other heads and tokenizer: id, revision, and how they were loaded.
        messages, chat_template_kwargs: the conversation that was the prompt, contents as text, and the arguments of its
            chat template; None for other prompts.
    """

    text: str
    tokens: list[Token]
    stats: Stats
    method: str
    finish_reason: str
    prompt_tokens: int
    accept_lengths: list[int] = field(default_factory=list)
    rules: RuleState | None = None
    request: GenerationOptions | None = None
    prompt: str | None = None
    prompt_ids: list[int] = field(default_factory=list)
    models: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    @property
    def stopped(self) -> bool:
        """Whether the text was stopped before its end, by its caller or an interrupt."""
        return self.finish_reason in ("cancelled", "interrupted")

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"Generation({text!r}, {self.method}, {self.finish_reason}: {self.stats.summary})"

    def _repr_html_(self) -> str:
        """For notebooks: each token in the colour of its origin, with a legend and the costs."""
        return to_html(self.prompt, self.tokens, self.stats, f"{self.method}, {self.finish_reason}")

    def _logprobs(self) -> list[dict[str, Any]] | None:
        """Log-probabilities of each token; None if they were not asked for."""
        if self.request is None or self.request.logprobs is None:
            return None
        return [logprobs_dict(token) for token in self.tokens]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of ``sprinter generate --json``.

        It is enough to reproduce the tokens: load the models and heads under "models", and call ``generate`` on
        ``["prompt"]["token_ids"]`` with ``**["request"]``, where the method's rules are registered.
        """
        stats = self.stats
        return {
            "text": self.text,
            "token_ids": [token.id for token in self.tokens],
            "origins": [token.origin.value for token in self.tokens],
            "rounds": [token.round for token in self.tokens],
            "drifts": [token.drift for token in self.tokens],
            "ratios": [token.ratio for token in self.tokens],
            "gate_scores": [token.gate_score for token in self.tokens],
            "logprobs": self._logprobs(),
            "method": self.method,
            "lossless": stats.lossless,
            "exactness": (self.models.get("target") or {}).get("exactness"),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "accept_lengths": self.accept_lengths,
            "prompt": {"text": self.prompt, "token_ids": self.prompt_ids},
            "messages": self.messages,
            "chat_template_kwargs": None
            if self.chat_template_kwargs is None
            else dict(self.chat_template_kwargs),
            "request": None if self.request is None else self.request.to_dict(),
            "models": dict(self.models),
            "version": versions(),
            "stats": stats_dict(stats),
        }


_COUNTS = (
    "new_tokens", "target_calls", "draft_steps", "rounds", "drafted", "trusted", "accepted", "checked",
    "taken_back", "closing_passes", "cached_tokens", "draft_cached_tokens", "mean_drift", "worst_drift",
    "drift_sum", "drift_by_origin", "least_ratio", "largest_ratio", "changed", "text_drift", "drift_coverage",
    "budget", "budget_left", "spent_drift", "switches", "copy_switches", "tokens_per_target_call", "wall_s",
    "tokens_per_s", "estimated_speed_up",
)  # fmt: skip
_TIMES = ("prefill_s", "draft_s", "gate_s", "target_s", "closing_s", "other_s")


def stats_dict(stats: Stats) -> dict[str, Any]:
    """Counts, drift, times and FLOPs as JSON values."""
    counts = {name: getattr(stats, name) for name in _COUNTS}
    return {
        **{name: list(value) if isinstance(value, list) else value for name, value in counts.items()},
        "times": {name: getattr(stats, name) for name in _TIMES},
        "flops": {"passes": stats.flops_passes, "tokens": stats.flops_tokens},
        **({"remote": dict(stats.remote)} if stats.remote else {}),
    }


def logprobs_dict(token: Token) -> dict[str, Any]:
    """Log-probabilities of a token as JSON values; null where they are unknown."""
    return {
        "logprob": token.logprob,
        "draft_logprob": token.draft_logprob,
        "top": None if token.top_logprobs is None else [one._asdict() for one in token.top_logprobs],
    }


def token_dict(token: Token) -> dict[str, Any]:
    """A token as a JSON object: what the lists of ``Generation.to_dict`` say about it, and its text."""
    return {
        "id": token.id,
        "text": token.text,
        "origin": token.origin.value,
        "round": token.round,
        "drift": token.drift,
        "ratio": token.ratio,
        "gate_score": token.gate_score,
        **logprobs_dict(token),
    }
