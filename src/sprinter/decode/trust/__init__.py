"""Trust rules decide, after each draft token, whether to keep it without a target check."""

from sprinter.decode.costs import MEASURED
from sprinter.decode.threshold import DEFAULT, RECORDED
from sprinter.decode.trust.base import State, TrustRule
from sprinter.decode.trust.certain import Certain
from sprinter.decode.trust.fixed import Coin, Everyone, Nobody
from sprinter.decode.trust.gate import Gate
from sprinter.decode.trust.online import Online

__all__ = [
    "DEFAULT", "MEASURED", "RECORDED", "Certain", "Coin", "Everyone", "Gate", "Nobody", "Online", "State", "TrustRule",
]  # fmt: skip
