"""What a request is, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sprinter.decode.checks import at_least, whole
from sprinter.decode.draft import Stats, Token
from sprinter.decode.methods import Method, parse_method
from sprinter.decode.state import RuleState
from sprinter.engine.ahead import AUTO
from sprinter.errors import UserError
from sprinter.laws import Sampling

__all__ = ["Generation", "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """One text to generate. Built by ``Pair.generate`` and ``Pair.stream`` from their keywords.

    Attributes:
        method: the decoding method.
        max_new_tokens: exact limit of new tokens.
        sampling: temperature and truncation, applied to both models alike.
        seed: the same seed gives the same text.
        stop: strings that end the text; they are cut off.
        meter: "running" scores trusted tokens at the next target call; "complete" adds closing passes, counted apart.
        ahead: draft tokens an answer of the driver; changes speed only. None: as many as pays.
        rules: state of the rules to go on from, the ``rules`` of an earlier generation; None begins anew.
    """

    method: Method
    max_new_tokens: int
    sampling: Sampling
    seed: int = 0
    stop: tuple[str, ...] = ()
    meter: Literal["running", "complete"] = "running"
    ahead: int | None = 1
    rules: RuleState | None = None

    def __post_init__(self) -> None:
        at_least("max_new_tokens", self.max_new_tokens, 1)
        if self.ahead is not None:
            at_least("ahead", self.ahead, 1)
        if self.meter not in ("running", "complete"):
            raise UserError(f"meter='{self.meter}' is unknown: give 'running' or 'complete'")

    @classmethod
    def make(
        cls,
        method: str | Method,
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        stop: str | Sequence[str] | None,
        meter: Literal["running", "complete"],
        ahead: int | Literal["auto"],
        rules: RuleState | None = None,
    ) -> Request:
        """From the keywords of the public calls."""
        words = (stop,) if isinstance(stop, str) else tuple(stop or ())
        sampling = Sampling(temperature, whole("top_k", top_k), top_p, min_p)
        new, seed = whole("max_new_tokens", max_new_tokens), whole("seed", seed)
        if isinstance(ahead, str) and ahead != AUTO:
            raise UserError(f"ahead={ahead!r} is unknown: give a whole number >= 1, or {AUTO!r}")
        steps = None if ahead == AUTO else whole("ahead", ahead)
        return cls(parse_method(method), new, sampling, seed, words, meter, steps, rules)


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished text with the provenance of every token.

    Attributes:
        text: without the prompt, the EOS token and the stop string.
        tokens: every token with id, text, origin, round and drift.
        stats: counts, drift, times, FLOPs.
        method: the method's full name; ``finish_reason``: "eos", "stop", "length", or "cancelled".
        accept_lengths: tokens that each round added.
        rules: state of the method's rules at the end, for a text that is to go on from it.
    """

    text: str
    tokens: list[Token]
    stats: Stats
    method: str
    finish_reason: str
    prompt_tokens: int
    accept_lengths: list[int] = field(default_factory=list)
    rules: RuleState | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of ``sprinter generate --json``."""
        stats = self.stats
        return {
            "text": self.text,
            "token_ids": [token.id for token in self.tokens],
            "origins": [token.origin.value for token in self.tokens],
            "rounds": [token.round for token in self.tokens],
            "drifts": [token.drift for token in self.tokens],
            "method": self.method,
            "lossless": stats.lossless,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "accept_lengths": self.accept_lengths,
            "stats": {
                "new_tokens": stats.new_tokens,
                "target_calls": stats.target_calls,
                "draft_steps": stats.draft_steps,
                "rounds": stats.rounds,
                "trusted": stats.trusted,
                "accepted": stats.accepted,
                "checked": stats.checked,
                "closing_passes": stats.closing_passes,
                "mean_drift": stats.mean_drift,
                "drift_coverage": stats.drift_coverage,
                "tokens_per_target_call": stats.tokens_per_target_call,
                "wall_s": stats.wall_s,
                "tokens_per_s": stats.tokens_per_s,
                "times": {
                    "prefill_s": stats.prefill_s,
                    "draft_s": stats.draft_s,
                    "gate_s": stats.gate_s,
                    "target_s": stats.target_s,
                    "closing_s": stats.closing_s,
                    "other_s": stats.other_s,
                },
                "flops": {"passes": stats.flops_passes, "tokens": stats.flops_tokens},
            },
        }
