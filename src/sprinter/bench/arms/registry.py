"""Arms by name, and those that other packages add."""

from __future__ import annotations

from dataclasses import dataclass

from sprinter.decode.checks import at_least
from sprinter.decode.registry import Registry

__all__ = ["ARMS", "LookupSettings"]

ARMS = Registry("arm", "sprinter.bench_arms")
"""Name ("transformers:assisted") → class or function with keyword parameters, all with defaults, that gives an ``Arm``.

Other packages add theirs through entry points of the group ``sprinter.bench_arms``. Making an arm must be cheap: what
costs time belongs in its ``start``.
"""


@dataclass(eq=False, kw_only=True)
class LookupSettings:
    """What other engines' prompt lookups are told, here with the defaults of both.

    Args:
        tokens: most tokens that are copied at once. ngram: longest run of last tokens that is looked for.
    """

    tokens: int = 10
    ngram: int = 2

    def __post_init__(self) -> None:
        at_least("tokens", self.tokens, 1)
        at_least("ngram", self.ngram, 1)
