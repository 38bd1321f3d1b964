"""What the rules of a method say of a draft run before the loop asks them: for drivers that draft it on a device.

A device stops a run where the loop will stop it, as far as it can tell: the loop asks its rules again of every token,
and for more tokens if it goes on. So a text does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sprinter.decode.stop import (
    AdaEdl,
    BildFallback,
    Confidence,
    Fixed,
    Heuristic,
    Never,
    StopRule,
    Svip,
    Untrusted,
)
from sprinter.decode.trust import Certain, Everyone, Gate, Nobody, TrustRule

__all__ = ["DeviceRules", "DraftRun", "RunRules", "run_rules"]

_PURE = frozenset({
    AdaEdl, BildFallback, Certain, Confidence, Everyone, Fixed, Gate, Heuristic, Never, Nobody, Svip, Untrusted,
})  # fmt: skip
"""Rules that compute on tensors alone, without a look at their values, and whose states are single numbers. Only the
loop asks the others (they fit a regression, or read random numbers), and rules of other packages."""


class DeviceRules(NamedTuple):
    """A trust and a stop rule as one function of tensors, for many runs at once."""

    trust: TrustRule
    stop: StopRule

    def ends(
        self, signals: Mapping[str, Tensor], drafted: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Whether each run's token is trusted, whether the run ends behind it, and the stop rule's next state,
        ``[rows]`` each.

        Args:
            drafted: number of tokens in the run, this one included. state: as ``RunRules.state``.
        """
        none = torch.zeros_like(drafted, dtype=torch.bool)
        given = {**signals, "drafted": drafted, "copied": none}
        trusted = none if self.trust.never else self.trust.trust(given, ())[0]
        own = tuple(one.to(usual.dtype) for one, usual in zip(state, self.stop.start(), strict=True))
        return trusted, *self.stop.stop({**given, "trusted": trusted}, own)


class DraftRun(Protocol):
    """What is read here of the ``Decoding`` whose draft run it is."""

    drafted: int
    forced: int

    @property
    def method(self) -> Any: ...
    @property
    def rules(self) -> Any: ...
    @property
    def left(self) -> int: ...
    @property
    def account(self) -> object | None: ...
    @property
    def guard(self) -> object | None: ...
    @property
    def guarded(self) -> bool: ...
    @property
    def accept(self) -> Any: ...


class RunRules(NamedTuple):
    """The rules of a run, number of its tokens so far, and the stop rule's state."""

    rules: DeviceRules
    drafted: int
    state: tuple[float, ...]


def run_rules(run: DraftRun) -> RunRules | None:
    """The rules that a device can ask of the next tokens of a run; None: the loop alone can, or the length is known."""
    trust, stop = run.method.trust, run.method.stop
    if trust.never and run.method.length is not None:
        return None
    if type(trust) not in _PURE or not _is_pure(stop) or run.account is not None or run.guarded:
        return None
    return RunRules(DeviceRules(trust, stop), run.drafted, tuple(float(one) for one in run.rules.stop))


def _is_pure(stop: StopRule) -> bool:
    under = stop.under if isinstance(stop, Untrusted) else None
    return type(stop) in _PURE and (under is None or _is_pure(under))
