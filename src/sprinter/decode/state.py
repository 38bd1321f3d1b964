"""What rules remember from one text to the next, if the user wants them to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sprinter.decode.stop import StopRule
from sprinter.decode.trust import State, TrustRule
from sprinter.errors import UserError

__all__ = ["RuleState"]


@dataclass(frozen=True, slots=True)
class RuleState:
    """State of the rules at the end of a text: AdaEDL's λ, the heuristic's γ.

    A text begins anew unless it is given the state that another text left. transformers carries its heuristic's
    length over ("heuristic") or not ("heuristic_transient") by the name of the schedule; here the caller says so.

    Attributes:
        trust, stop: the rules whose state it is.
        trust_state, stop_state: theirs, tensors.
    """

    trust: TrustRule
    stop: StopRule
    trust_state: State
    stop_state: State

    def to_dict(self) -> dict[str, Any]:
        """The numbers alone, for JSON; ``begin`` takes them too."""
        return {
            "trust": [part.tolist() for part in self.trust_state],
            "stop": [part.tolist() for part in self.stop_state],
        }

    @classmethod
    def begin(
        cls, trust: TrustRule, stop: StopRule, earlier: RuleState | Mapping[str, Any] | None = None
    ) -> RuleState:
        """The state to begin a text with: the rules' own, or what an earlier text left.

        Raises:
            UserError: ``earlier`` is the state of other rules.
        """
        if isinstance(earlier, Mapping):
            return cls(
                trust, stop, _read(earlier, "trust", trust.start()), _read(earlier, "stop", stop.start())
            )
        if earlier is None:
            return cls(trust, stop, trust.start(), stop.start())
        if not isinstance(earlier, RuleState):
            raise UserError(
                f"rules={earlier!r} is no state of rules: give the .rules of an earlier generation"
            )
        if (earlier.trust, earlier.stop) != (trust, stop):
            raise UserError(
                f"the state given is that of trust={earlier.trust}, stop={earlier.stop}, not of "
                f"trust={trust}, stop={stop}: give the .rules of a generation by the same method, or none"
            )
        return earlier


def _read(told: Mapping[str, Any], which: str, like: State) -> State:
    """A state of the kind of ``like``, from the numbers of ``to_dict``."""
    try:
        parts = [torch.tensor(value, dtype=part.dtype) for value, part in zip(told[which], like, strict=True)]
    except (KeyError, TypeError, ValueError):
        parts = []
    if [part.shape for part in parts] != [part.shape for part in like]:
        raise UserError(
            f"rules={dict(told)} is no state of the {which} rule: give what an earlier record holds"
        )
    return tuple(parts)
