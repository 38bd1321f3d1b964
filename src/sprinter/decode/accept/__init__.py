"""Accept rules decide, at each target call, which untrusted tokens stay and from which law a replacement is drawn.

Every rule computes its own law π: tests check identities on it, and the meter reports TV(π, p).
"""

from sprinter.decode.accept.asd import Asd
from sprinter.decode.accept.base import AcceptRule, ChainRule, Judge, TargetCall, Verdict
from sprinter.decode.accept.block import Block
from sprinter.decode.accept.cactus import Cactus
from sprinter.decode.accept.choice import Bild, GreedyMatch, Margin, RandomAccept, Typical
from sprinter.decode.accept.engines import Relaxed, Threshold
from sprinter.decode.accept.exact import Exact
from sprinter.decode.accept.fly import Fly
from sprinter.decode.accept.fuzzy import Fuzzy
from sprinter.decode.accept.harmless import Harmless
from sprinter.decode.accept.match import Match
from sprinter.decode.accept.mentored import Mentored
from sprinter.decode.accept.mixture import Cascade, Diversed, Lenient
from sprinter.decode.accept.several import Batch, SeveralRule, SpecInfer, SpecTr
from sprinter.decode.accept.slack import Opt, Uno
from sprinter.decode.accept.traversal import Traversal
from sprinter.decode.accept.tree import OneHot, TreeRule, Without

__all__ = [
    "AcceptRule", "Asd", "Batch", "Bild", "Block", "Cactus", "Cascade", "ChainRule", "Diversed", "Exact", "Fly",
    "Fuzzy", "GreedyMatch", "Harmless", "Judge", "Lenient", "Margin", "Match", "Mentored", "OneHot", "Opt",
    "RandomAccept", "Relaxed", "SeveralRule", "SpecInfer", "SpecTr", "TargetCall", "Threshold", "Traversal",
    "TreeRule", "Typical", "Uno", "Verdict", "Without",
]  # fmt: skip
