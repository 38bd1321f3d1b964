"""Registry of arms by name, including those of other packages."""

from __future__ import annotations

from dataclasses import dataclass

from sprinter.decode.checks import at_least
from sprinter.decode.registry import Registry

__all__ = ["ARMS", "LookupSettings"]

ARMS = Registry("arm", "sprinter.bench_arms")
"""Name ("transformers:assisted") → class or function with keyword parameters, all with defaults, that gives an ``Arm``.

Other packages add arms through entry points of the group ``sprinter.bench_arms``. Constructing an arm must be cheap;
slow work belongs in its ``start``.
"""


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
