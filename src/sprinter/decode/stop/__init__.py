"""Stop rules: end this draft run and call the target now? Asked after each draft token.

A cap, the end of the text and the limits always stop; they are the loop's business.
"""

from sprinter.decode.stop.base import StopRule
from sprinter.decode.stop.confidence import AdaEdl, BildFallback, Confidence, Svip
from sprinter.decode.stop.fixed import Fixed, Heuristic, Never, Untrusted

__all__ = [
    "AdaEdl",
    "BildFallback",
    "Confidence",
    "Fixed",
    "Heuristic",
    "Never",
    "StopRule",
    "Svip",
    "Untrusted",
]
