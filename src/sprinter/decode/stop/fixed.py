"""Stop rules that count: fixed length, first untrusted token with a tail, never, transformers' heuristic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.checks import Parameters, count
from sprinter.decode.registry import STOP
from sprinter.decode.stop.base import StopRule
from sprinter.decode.trust import State
from sprinter.errors import UserError

__all__ = ["Fixed", "Heuristic", "Never", "Untrusted"]


@STOP.rule("fixed")
@dataclass(frozen=True, slots=True)
class Fixed(StopRule):
    """Stops after gamma tokens (Leviathan et al. 2023).

    Args:
        gamma: draft length, tokens.
    """

    gamma: int = count(5)

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide drafted >= gamma."""
        return signals["drafted"] >= self.gamma, state


@STOP.rule("untrusted")
@dataclass(frozen=True, slots=True)
class Untrusted(StopRule):
    """Stops at the first untrusted token (SPRINTER, Algorithms 1 and 2), or ``tail`` tokens later.

    The tail is our extension: drafting continues after the first untrusted token for ``tail`` tokens, or until
    ``under`` stops it, so that one target call judges several tokens. Untrusted tokens keep the law p; tail = 0 is the
    paper's rule.

    Args:
        tail: number of untrusted tokens after the first.
        under: a stop rule that may end the tail earlier.
    """

    tail: int = count(0, 0)
    under: StopRule | None = None
    sees_token: ClassVar[bool] = False  # ``under`` decides only on tokens that are checked in any case

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        if self.under is not None and (not isinstance(self.under, StopRule) or self.under.discards):
            raise UserError(f"under={self.under} cannot end a tail: give a stop rule that does not discard")

    @property
    def needs(self) -> frozenset[str]:
        """Names of the signals that ``under`` reads."""
        return self.under.needs if self.under else frozenset()

    @property
    def learns(self) -> bool:
        """Whether ``under`` learns."""
        return self.under is not None and self.under.learns

    def start(self) -> State:
        """(number of untrusted tokens in this run, state of ``under``...)."""
        return (torch.tensor(0), *(self.under.start() if self.under else ()))

    def possible(self, state: State) -> bool:
        """Whether the count is not negative and ``under`` can reach its state."""
        return bool(state[0] >= 0) and (self.under is None or self.under.possible(state[1:]))

    def begin_round(self, state: State) -> State:
        """Reset the count of untrusted tokens."""
        return (torch.zeros_like(state[0]), *(self.under.begin_round(state[1:]) if self.under else ()))

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide more than ``tail`` tokens from the first untrusted one on, or the decision of ``under``.

        Copies end no run, unless ``under`` says so: one target call checks them all.
        """
        copied = signals.get("copied")
        if self.tail == 0 and self.under is None:  # nothing to count
            stop = ~signals["trusted"]
            return stop if copied is None else stop & ~copied, state
        begun = (state[0] > 0) | ~signals["trusted"]
        waiting = state[0] + begun.to(state[0].dtype)
        stop, rest = waiting > self.tail, state[1:]
        stop = stop if copied is None else stop & ~copied
        if self.under is not None:
            ended, after = self.under.stop(
                {**signals, "drafted": waiting}, rest
            )  # ``under`` counts the tail's tokens
            stop = stop | (begun & ended)
            rest = tuple(
                old if new is old else torch.where(begun, new, old)  # a fit has a shape of its own
                for new, old in zip(after, rest, strict=True)
            )
        return stop, (waiting, *rest)

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        """The state after ``under`` has learned."""
        if self.under is None or not self.under.learns:
            return state
        return (state[0], *self.under.learn(signals, overlaps, state[1:]))

    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> State:
        """Update the state of ``under``."""
        if self.under is None:
            return state
        return (state[0], *self.under.end_round(state[1:], drafted, checked, accepted))


@STOP.rule("never")
@dataclass(frozen=True, slots=True)
class Never(StopRule):
    """Never stops: only the cap and the end of the text end a run."""

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide False for every token."""
        return torch.zeros_like(signals["drafted"], dtype=torch.bool), state


@STOP.rule("heuristic")
@dataclass(frozen=True, slots=True)
class Heuristic(StopRule):
    """Stops after γ tokens: γ + 2 after a round in which all were accepted, else γ − 1, at least 1 (transformers'
    ``num_assistant_tokens_schedule="heuristic"``).

    Args:
        first: γ of the first run, tokens (``start`` in the preset).
        longest: upper bound of γ, tokens.
    """

    first: int = count(5)
    longest: int = count(40)

    def start(self) -> State:
        """(γ,), with γ = ``first``."""
        return (torch.tensor(self.first),)

    def possible(self, state: State) -> bool:
        """Whether γ is between 1 and the larger of ``longest`` and ``first``."""
        return 1 <= int(state[0]) <= max(self.first, self.longest)

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide drafted >= γ."""
        return signals["drafted"] >= state[0], state

    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> State:
        """γ + 2 if every checked token was accepted, else γ − 1, from 1 to ``longest``; without any, unchanged."""
        (gamma,) = state
        if checked == 0:
            return state
        return ((gamma + 2 if accepted == checked else gamma - 1).clamp(1, self.longest),)
