"""Stop rules: end this draft run and call the target now? Asked after each draft token.

A cap, the end of the text and the limits always stop; they are the loop's business.
"""

from sprinter.decode.stop.base import StopRule
from sprinter.decode.stop.confidence import AdaEdl, BildFallback, Confidence, Svip
from sprinter.decode.stop.fixed import Fixed, Heuristic, Never, Untrusted
from sprinter.decode.stop.learned import Disco, SpecDec

__all__ = [
    "AdaEdl",
    "BildFallback",
    "Confidence",
    "Disco",
    "Fixed",
    "Heuristic",
    "Never",
    "SpecDec",
    "StopRule",
    "Svip",
    "Untrusted",
]
