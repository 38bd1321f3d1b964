"""The state of the rules, which can be carried from one text to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sprinter.decode.stop import StopRule
from sprinter.decode.trust import State, TrustRule
from sprinter.errors import UserError

__all__ = ["RuleState"]


@dataclass(frozen=True, slots=True)
class RuleState:
    """State of the rules at the end of a text: AdaEDL's λ, the heuristic's γ.

    A text starts from a fresh state unless it is given the state of an earlier text. transformers selects this for its
    heuristic by the name of the schedule ("heuristic" or "heuristic_transient"); here the caller passes the state.

    Attributes:
        trust, stop: the rules.
        trust_state, stop_state: their states, tuples of tensors.
    """

    trust: TrustRule
    stop: StopRule
    trust_state: State
    stop_state: State

    def to_dict(self) -> dict[str, Any]:
        """The states as JSON values, which ``begin`` also accepts."""
        return {
            "trust": [part.tolist() for part in self.trust_state],
            "stop": [part.tolist() for part in self.stop_state],
        }

    def toward(self, other: RuleState, share: float) -> RuleState:
        """Between this state and another of the same rules, where they are fractions; else the other's."""

        def mixed(mine: State, theirs: State) -> State:
            both = zip(mine, theirs, strict=True)
            return tuple(a + share * (b - a) if b.is_floating_point() else b for a, b in both)

        trust_state = mixed(self.trust_state, other.trust_state)
        return RuleState(self.trust, self.stop, trust_state, mixed(self.stop_state, other.stop_state))

    @classmethod
    def begin(
        cls, trust: TrustRule, stop: StopRule, earlier: RuleState | Mapping[str, Any] | None = None
    ) -> RuleState:
        """The state at the start of a text: the rules' own start, or that of an earlier text.

        Raises:
            UserError: ``earlier`` is the state of other rules, or one that the rules cannot reach.
        """
        if isinstance(earlier, Mapping):
            return cls(trust, stop, _read(earlier, "trust", trust), _read(earlier, "stop", stop))
        if earlier is None:
            return cls(trust, stop, trust.start(), stop.start())
        if not isinstance(earlier, RuleState):
            raise UserError(
                f"rules={earlier!r} is not a state of rules: give the .rules of an earlier generation"
            )
        if (earlier.trust, earlier.stop) != (trust, stop):
            raise UserError(
                f"the state given is that of trust={earlier.trust}, stop={earlier.stop}, not of "
                f"trust={trust}, stop={stop}: give the .rules of a generation by the same method, or none"
            )
        return earlier


def _read(given: Mapping[str, Any], which: str, rule: TrustRule | StopRule) -> State:
    """Read and check a state of ``rule`` from the output of ``to_dict``."""
    like, values = rule.start(), given.get(which)
    if set(given) == {"trust", "stop"} and isinstance(values, list | tuple) and len(values) == len(like):
        parts = [_part(value, part) for value, part in zip(values, like, strict=True)]
        state = tuple(part for part in parts if part is not None)
        if len(state) == len(like) and rule.possible(state):
            return state
    raise UserError(
        f"rules={dict(given)} is not a state of the {which} rule: give what an earlier record holds"
    )


def _part(value: Any, like: Tensor) -> Tensor | None:
    """The numbers as a tensor of the dtype of ``like``; None unless they are finite and match its shape and dtype."""
    try:
        numbers = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        return None
    kinds = "b" if like.dtype == torch.bool else "if"
    if numbers.dtype.kind not in kinds or numbers.shape != like.shape or not np.isfinite(numbers).all():
        return None
    given = torch.tensor(numbers.tolist(), dtype=torch.float64)
    part = torch.tensor(numbers).to(like.dtype)
    same = part.isfinite().all() if like.dtype.is_floating_point else (part.double() == given).all()
    return part if bool(same) else None
