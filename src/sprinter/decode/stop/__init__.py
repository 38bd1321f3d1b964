"""Stop rules decide, after each draft token, whether to end the draft run and call the target.

The loop itself ends a run at the cap and at the end of the text. Stop strings end a text: see ``engine.stream``.
"""

from sprinter.decode.stop.base import StopRule
from sprinter.decode.stop.calibrated import Calibrated
from sprinter.decode.stop.confidence import AdaEdl, BildFallback, Confidence, Svip
from sprinter.decode.stop.fixed import Fixed, Heuristic, Never, Untrusted
from sprinter.decode.stop.learned import Disco, SpecDec
from sprinter.decode.stop.optimal import Optimal

__all__ = [
    "AdaEdl", "BildFallback", "Calibrated", "Confidence", "Disco", "Fixed", "Heuristic", "Never", "Optimal", "SpecDec",
    "StopRule", "Svip", "Untrusted",
]  # fmt: skip
