"""What all models of a server share: keys, what their owners may ask for a minute, turns, and counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sprinter.engine.fair_queue import Shares
from sprinter.serve.api_errors import Refusal
from sprinter.serve.keys import ApiKeys, RateLimit
from sprinter.serve.prometheus import ServeMetrics, ServeState
from sprinter.serve.settings import ServeSettings
from sprinter.serve.turns import Turns

__all__ = ["Owners"]

_LAWS = 1 << 27
"""Probabilities in the answers that are not read yet; one takes four bytes, and up to two more as it is sent."""


class Owners:
    """The owners of requests to a server, whichever models they ask.

    Args:
        settings: of the server.
        states: of its models, for the metrics.

    Attributes:
        keys: None: no key is needed.
        open: places of requests that are open.
        asking: places of requests whose answers are not complete.
        metrics: what has been served.
        turns: where owners' work is done that would hold up the event loop.
    """

    def __init__(self, settings: ServeSettings, states: Callable[[], Sequence[ServeState]]) -> None:
        self._settings = settings
        self.asking = Shares(settings.max_connections)
        self.open = Shares(settings.max_connections, shared=settings.has_owners)
        self._laws = Shares(_LAWS, shared=settings.has_owners)
        self.turns = Turns(self.open.others, lambda owner: self.asking.of(owner) > 1)
        self.metrics = ServeMetrics(states)
        self.keys = None if settings.api_keys is None else ApiKeys(settings.api_keys)
        self._texts, self._tokens = RateLimit(settings.rate_limit), RateLimit(settings.token_limit)

    def hold_laws(self, owner: str, count: int) -> Callable[[], None]:
        """Take places of so many probabilities of an answer; returns what leaves them.

        Raises:
            Refusal: there are too few.
        """
        if self._laws.room(owner) < count:
            message = "too many laws are asked for, or not read, at the same time: try again later"
            raise Refusal(503, message, "no_memory", retry_after_s=1)
        self._laws.take(owner, count)
        return lambda: self._laws.take(owner, -count)

    def charge_texts(self, owner: str, count: int, paid: int = 0) -> None:
        """Count texts of an owner, of which some were counted before.

        Raises:
            Refusal: they are too many for now.
        """
        _charge(self._texts, owner, count, f"{self._settings.rate_limit} texts", paid)

    def charge_tokens(self, owner: str, count: int) -> None:
        """As ``charge_texts``, for tokens."""
        _charge(self._tokens, owner, count, f"{self._settings.token_limit} tokens")

    def give_back_tokens(self, owner: str, count: int) -> None:
        """Uncount tokens that an owner's texts were charged for and have not written."""
        self._tokens.give_back(owner, count)


def _charge(rates: RateLimit, owner: str, cost: int, limit: str, paid: int = 0) -> None:
    if wait := rates.wait_s(owner, cost, paid=paid):
        message = f"more than {limit} a minute: slow down"
        raise Refusal(429, message, "rate_limit_exceeded", retry_after_s=math.ceil(wait))
