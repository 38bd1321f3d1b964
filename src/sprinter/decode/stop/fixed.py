"""Stop rules that count: fixed length, first untrusted token with a tail, never, transformers' heuristic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.decode.checks import at_least
from sprinter.decode.registry import STOP
from sprinter.decode.stop.base import StopRule
from sprinter.decode.trust import State
from sprinter.errors import UserError

__all__ = ["Fixed", "Heuristic", "Never", "Untrusted"]


@STOP.rule("fixed")
@dataclass(frozen=True, slots=True)
class Fixed(StopRule):
    """Stop after gamma tokens (Leviathan et al. 2023).

    Args:
        gamma: draft length, tokens.
    """

    gamma: int = 5

    def __post_init__(self) -> None:
        at_least("gamma", self.gamma, 1)

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """drafted >= gamma."""
        return signals["drafted"] >= self.gamma, state


@STOP.rule("untrusted")
@dataclass(frozen=True, slots=True)
class Untrusted(StopRule):
    """Stop at the first token that the trust rule refused (SPRINTER, Algorithms 1 and 2), or a tail later.

    A tail is ours: after the first refusal drafting goes on for ``tail`` untrusted tokens, or until ``under`` stops
    it, so that one target call judges several tokens. Untrusted tokens keep the law p; tail = 0 is the paper.

    Args:
        tail: untrusted tokens after the first.
        under: a stop rule that may end the tail sooner.
    """

    tail: int = 0
    under: StopRule | None = None

    def __post_init__(self) -> None:
        at_least("tail", self.tail, 0)
        if self.under is not None and (not isinstance(self.under, StopRule) or self.under.discards):
            raise UserError(f"under={self.under} cannot end a tail: give a stop rule that does not discard")

    @property
    def needs(self) -> frozenset[str]:
        """What ``under`` needs."""
        return self.under.needs if self.under else frozenset()

    @property
    def sees_token(self) -> bool:
        """The tail's rule only decides about tokens that are checked anyway."""
        return False

    def start(self) -> State:
        """(untrusted tokens in this run, state of ``under``...)."""
        return (torch.tensor(0), *(self.under.start() if self.under else ()))

    def possible(self, state: State) -> bool:
        """A count, and what ``under`` says."""
        return bool(state[0] >= 0) and (self.under is None or self.under.possible(state[1:]))

    def begin_round(self, state: State) -> State:
        """No untrusted token yet."""
        return (torch.zeros_like(state[0]), *(self.under.begin_round(state[1:]) if self.under else ()))

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """More than ``tail`` tokens since the first refusal, that one included."""
        if self.tail == 0 and self.under is None:  # nothing to count
            return ~signals["trusted"], state
        begun = (state[0] > 0) | ~signals["trusted"]
        waiting = state[0] + begun.to(state[0].dtype)
        stop, rest = waiting > self.tail, state[1:]
        if self.under is not None:
            ended, after = self.under.stop(
                {**signals, "drafted": waiting}, rest
            )  # it counts the tail's tokens
            stop = stop | (begun & ended)
            rest = tuple(torch.where(begun, new, old) for new, old in zip(after, rest, strict=True))
        return stop, (waiting, *rest)

    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> State:
        """Passed on to ``under``."""
        if self.under is None:
            return state
        return (state[0], *self.under.end_round(state[1:], drafted, checked, accepted))


@STOP.rule("never")
@dataclass(frozen=True, slots=True)
class Never(StopRule):
    """Only the cap and the end of the text stop a run."""

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Always no."""
        return torch.zeros_like(signals["drafted"], dtype=torch.bool), state


@STOP.rule("heuristic")
@dataclass(frozen=True, slots=True)
class Heuristic(StopRule):
    """Fixed length that follows success: +2 after a round in which all was accepted, else −1, at least 1
    (transformers' ``num_assistant_tokens_schedule="heuristic"``).

    Args:
        first: length of the first run, tokens (the preset calls it start).
        longest: bound of γ, tokens.
    """

    first: int = 5
    longest: int = 40

    def __post_init__(self) -> None:
        at_least("first", self.first, 1)
        at_least("longest", self.longest, 1)

    def start(self) -> State:
        """(γ,)."""
        return (torch.tensor(self.first),)

    def possible(self, state: State) -> bool:
        """γ within 1 and ``longest``, or ``first`` if that is more."""
        return 1 <= int(state[0]) <= max(self.first, self.longest)

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """drafted >= γ."""
        return signals["drafted"] >= state[0], state

    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> State:
        """γ + 2 if every checked token was accepted, else γ − 1, within 1 and ``longest``; unchanged if none was."""
        (gamma,) = state
        if checked == 0:
            return state
        return ((gamma + 2 if accepted == checked else gamma - 1).clamp(1, self.longest),)
