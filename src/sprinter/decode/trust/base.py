"""The base class of trust rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from sprinter.decode.checks import Parameters

__all__ = ["State", "TrustRule"]

State = tuple[Tensor, ...]


class TrustRule(Parameters, ABC):
    """A pure function (signals, state) -> (decision, state) on tensors.

    ``needs`` names signals of ``sprinter.decode.signals``: signals of the draft's laws (``SIGNALS``, raw or with the
    suffix ``_processed``), scores of heads and ``uniform`` (``GIVEN``); ``drafted`` and ``copied`` are always given.
    Set ``sees_token = True`` if the decision depends on x beyond its prefix, for example through a signal that sees
    x: drift is then metered in its one-sample form (see ``decode.meter``).

    ``learns = True``: at each target call ``learn`` is given the overlaps β of the draft tokens of the round.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    sees_token: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    dial: ClassVar[str | None] = None
    """Name of the parameter that ``certainty`` is compared with, of which a budget takes the place."""

    @property
    def certainty(self) -> tuple[str, ...]:
        """Signals that the rule compares with a threshold, if that is all it does: a budget moves the threshold.

        Known are margin, entropy, max_prob and gate; with others the budget limits what the rule trusts. A subclass
        whose ``trust`` does more must return ().
        """
        return ()

    @property
    def never(self) -> bool:
        """Whether the rule trusts no token, for all signals."""
        return False

    def start(self) -> State:
        """State at the start of a sequence."""
        return ()

    def possible(self, state: State) -> bool:
        """Whether the rule can reach this state (shapes and dtypes as in ``start``); checks states given by users."""
        return True

    def settle(self, taus: Mapping[str, float]) -> TrustRule:
        """The rule with the heads' thresholds in place of "recorded".

        Args:
            taus: by kind of head, the threshold that it records.
        """
        return self

    @abstractmethod
    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decision (bool tensor, shape of the signals) and the next state."""

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        """The state after a target call, if the rule ``learns``.

        Args:
            signals: those in ``needs`` that come with a draft (of laws, scores of heads) at each of the round's n draft
                tokens in order, trusted or not, ``[n]`` each.
            overlaps: β = Σ min(p, q) of the processed laws at these positions, ``[n]``.
        """
        return state
