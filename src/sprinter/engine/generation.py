"""What a request is, and what it gives back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sprinter.decode.checks import at_least, whole
from sprinter.decode.draft import Stats, Token
from sprinter.decode.spec import Method, full_spec, parse_method
from sprinter.decode.state import RuleState
from sprinter.engine.ahead import AUTO
from sprinter.engine.html import to_html
from sprinter.engine.record import versions
from sprinter.errors import UserError
from sprinter.laws import Sampling

__all__ = ["Generation", "Request"]

_SHOWN = 60  # characters of a text that its repr shows


@dataclass(frozen=True, slots=True)
class Request:
    """One text to generate. Built by ``Pair.generate`` and its kin from their keywords.

    Attributes:
        method: the decoding method.
        max_new_tokens: exact limit of new tokens; None: as many as there is room for.
        sampling: temperature and truncation, applied to both models alike.
        seed: the same seed gives the same text.
        stop: strings that end the text, also those of special tokens; cut off with all that follows.
        stop_token_ids: tokens that end the text beside EOS; without text, as EOS is.
        meter: "running" scores trusted tokens at the next target call; "complete" adds closing passes, counted apart.
        ahead: draft tokens an answer of the driver; changes speed only. None: as many as pays.
        rules: state of the rules to go on from, the ``rules`` of an earlier generation; None begins anew.
    """

    method: Method
    max_new_tokens: int | None
    sampling: Sampling
    seed: int = 0
    stop: tuple[str, ...] = ()
    meter: Literal["running", "complete"] = "running"
    ahead: int | None = 1
    rules: RuleState | Mapping[str, Any] | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            at_least("max_new_tokens", self.max_new_tokens, 1)
        if self.ahead is not None:
            at_least("ahead", self.ahead, 1)
        if self.meter not in ("running", "complete"):
            raise UserError(f"meter='{self.meter}' is unknown: give 'running' or 'complete'")

    @classmethod
    def make(
        cls,
        method: str | Method,
        max_new_tokens: int | None,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        stop: str | Sequence[str] | None,
        meter: Literal["running", "complete"],
        ahead: int | Literal["auto"],
        rules: RuleState | Mapping[str, Any] | None = None,
        stop_token_ids: int | Sequence[int] | None = (),
    ) -> Request:
        """From the keywords of the public calls."""
        ids = () if stop_token_ids is None else stop_token_ids
        ends = tuple(whole("stop_token_ids", id) for id in (ids if isinstance(ids, Iterable) else (ids,)))
        if stop is not None and not isinstance(stop, Iterable):
            raise UserError(f"stop={stop!r} is neither text nor a list of texts: give stop=['...']")
        words = (stop,) if isinstance(stop, str) else tuple(stop or ())
        sampling = Sampling(temperature, whole("top_k", top_k), top_p, min_p)
        new = None if max_new_tokens is None else whole("max_new_tokens", max_new_tokens)
        if isinstance(ahead, str) and ahead != AUTO:
            raise UserError(f"ahead={ahead!r} is unknown: give a whole number >= 1, or {AUTO!r}")
        steps = None if ahead == AUTO else whole("ahead", ahead)
        seed = whole("seed", seed)
        return cls(parse_method(method), new, sampling, seed, words, meter, steps, rules, ends)

    def to_dict(self) -> dict[str, Any]:
        """The keywords of ``Pair.generate`` that ask for this, each a value of JSON."""
        sampling = self.sampling
        return {
            "method": full_spec(self.method),
            "max_new_tokens": self.max_new_tokens,
            "temperature": float(sampling.temperature),
            "top_k": sampling.top_k,
            "top_p": float(sampling.top_p),
            "min_p": float(sampling.min_p),
            "seed": self.seed,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "meter": self.meter,
            "ahead": AUTO if self.ahead is None else self.ahead,
            "rules": self.rules.to_dict() if isinstance(self.rules, RuleState) else self.rules,
        }


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished text with the provenance of every token.

    Attributes:
        text: without the prompt, special tokens, the EOS or stop token that ended it, and the stop string.
        tokens: every new token, those that ``text`` leaves out too, with id, text, origin, round and drift. Their
            texts join to ``text``.
        stats: counts, drift, times, FLOPs.
        method: the method's full name; ``finish_reason``: "eos", "stop", "length", or "cancelled".
        accept_lengths: tokens that each round added.
        rules: state of the method's rules at the end, for a text that is to go on from it.
        request: what was asked, ``max_new_tokens`` as it was used.
        prompt, prompt_ids: the prompt as text (None if it was given as ids), and its token ids.
        models: target, draft, gate, other heads and tokenizer: id, revision, and how they were loaded.
    """

    text: str
    tokens: list[Token]
    stats: Stats
    method: str
    finish_reason: str
    prompt_tokens: int
    accept_lengths: list[int] = field(default_factory=list)
    rules: RuleState | None = None
    request: Request | None = None
    prompt: str | None = None
    prompt_ids: list[int] = field(default_factory=list)
    models: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"Generation({text!r}, {self.method}, {self.finish_reason}: {self.stats.summary})"

    def _repr_html_(self) -> str:
        """For notebooks: each token in the colour of its origin, with a legend and what it cost."""
        return to_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of ``sprinter generate --json``.

        It says how to make the same tokens again: the models and heads under "models", and ``generate`` on
        ``["prompt"]["token_ids"]`` with ``**["request"]``.
        """
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
            "prompt": {"text": self.prompt, "token_ids": self.prompt_ids},
            "request": None if self.request is None else self.request.to_dict(),
            "models": dict(self.models),
            "version": versions(),
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
