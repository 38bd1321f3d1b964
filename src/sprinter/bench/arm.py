"""Interface of arms. Methods of this package and other engines answer the same ``Ask``, timed by the same clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sprinter.decode.checks import at_least
from sprinter.engine.pair import Pair
from sprinter.laws import Sampling

__all__ = ["Arm", "ArmAnswer", "Ask", "LookupSettings"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. All arms get the same token ids.

    Attributes:
        ids: token ids of the prompt.
        new_tokens: maximum number of new tokens; a text also ends at an end-of-sequence token of the target, or at one
            of ``stop_token_ids``.
        sampling: temperature and truncation.
        seed: seed for arms that sample.
        stop_token_ids: further tokens that end a text: the end of a turn in chat form.
    """

    ids: tuple[int, ...]
    new_tokens: int
    sampling: Sampling
    seed: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class ArmAnswer:
    """An arm's answer. Values that the arm does not know are None.

    Attributes:
        ids: token ids of the new tokens, an end-of-sequence token included.
        wall_s: time from the request to the last token, with prefill, without forward passes that only meter drift.
        arrivals_s: for each new token the time from the request until the caller had it; empty: unknown.
        accept_lengths: number of tokens that each round (target call) added.
        target_calls, draft_steps: number of forward passes, without prefill.
        origins: number of new tokens by origin (trusted, accepted, replacement, bonus, target).
        drifts: TV(π, p) of each metered token; of rules of chains one-sample estimates (``Token.distance``).
        remote: what a target on a server was asked (``Stats.remote``); empty: there is none.
        extra: additional facts, JSON values.
    """

    ids: list[int]
    wall_s: float
    arrivals_s: list[float] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    target_calls: int | None = None
    draft_steps: int | None = None
    origins: dict[str, int] = field(default_factory=dict)
    drifts: list[float] | None = None
    remote: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Arm(Protocol):
    """One way to answer; ``sprinter.bench.arms`` has the built-in ones and describes plug-ins.

    Attributes:
        name: name in tables, unique in a run.
        spec: spec that the arm was made from, with which the run can be repeated.
        engine: "sprinter", "transformers", "vllm", ...
    """

    name: str
    spec: str
    engine: str

    def start(self, pair: Pair) -> None:
        """Prepare to answer for this pair (load, compile, start a process).

        Raises:
            UserError: the arm cannot serve this pair or its software is not installed.
        """
        ...

    def lossless(self, sampling: Sampling) -> bool | None:
        """Whether the arm's texts follow the target's law; None: not known."""
        ...

    def versions(self) -> dict[str, str]:
        """Versions of the software that it runs on, except this package."""
        ...

    def answer(self, ask: Ask) -> ArmAnswer:
        """Answer one request; the device is idle when it returns."""
        ...

    def close(self) -> None:
        """Release all resources; may be called twice."""
        ...


@dataclass(eq=False, kw_only=True)
class LookupSettings:
    """Settings of other engines' prompt lookup, with the defaults of both.

    Args:
        tokens: maximum number of tokens copied at once.
        ngram: maximum length of the suffix that is searched for.
    """

    tokens: int = 10
    ngram: int = 2

    def __post_init__(self) -> None:
        at_least("tokens", self.tokens, 1)
        at_least("ngram", self.ngram, 1)
