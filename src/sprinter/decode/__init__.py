"""Rules, methods and what a plug-in needs; no models.

    >>> from sprinter.decode import Fuzzy, Gate, Method, Svip
    >>> Method(trust=Gate(0.5), stop=Svip(0.3), accept=Fuzzy("js", 0.4)).lossless()
    False

The built-in rules and their base classes (``TrustRule``, ``StopRule``, ``AcceptRule``, ``ChainRule``, ``SeveralRule``),
drafters, the registries, specs (``parse_method``), the public checks (``check_trust``, ``check_stop``,
``check_accept``, ``check_drafter``), and the results of decoding: tokens, stats, the rules' state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sprinter.lazy import lazy_names

# Imported when first used: the rules need torch, and a package must not import its own modules to be imported.
if TYPE_CHECKING:
    from sprinter.decode.accept import AcceptRule as AcceptRule
    from sprinter.decode.accept import Asd as Asd
    from sprinter.decode.accept import Batch as Batch
    from sprinter.decode.accept import Bild as Bild
    from sprinter.decode.accept import Block as Block
    from sprinter.decode.accept import Cactus as Cactus
    from sprinter.decode.accept import Cascade as Cascade
    from sprinter.decode.accept import ChainRule as ChainRule
    from sprinter.decode.accept import Diversed as Diversed
    from sprinter.decode.accept import Exact as Exact
    from sprinter.decode.accept import Fly as Fly
    from sprinter.decode.accept import Fuzzy as Fuzzy
    from sprinter.decode.accept import GreedyMatch as GreedyMatch
    from sprinter.decode.accept import Harmless as Harmless
    from sprinter.decode.accept import Judge as Judge
    from sprinter.decode.accept import Lenient as Lenient
    from sprinter.decode.accept import Margin as Margin
    from sprinter.decode.accept import Match as Match
    from sprinter.decode.accept import Mentored as Mentored
    from sprinter.decode.accept import OneHot as OneHot
    from sprinter.decode.accept import Opt as Opt
    from sprinter.decode.accept import RandomAccept as RandomAccept
    from sprinter.decode.accept import Relaxed as Relaxed
    from sprinter.decode.accept import SeveralRule as SeveralRule
    from sprinter.decode.accept import SpecInfer as SpecInfer
    from sprinter.decode.accept import SpecTr as SpecTr
    from sprinter.decode.accept import TargetCall as TargetCall
    from sprinter.decode.accept import Threshold as Threshold
    from sprinter.decode.accept import Traversal as Traversal
    from sprinter.decode.accept import TreeRule as TreeRule
    from sprinter.decode.accept import Typical as Typical
    from sprinter.decode.accept import Uno as Uno
    from sprinter.decode.accept import Verdict as Verdict
    from sprinter.decode.accept import Without as Without
    from sprinter.decode.checks import at_least as at_least
    from sprinter.decode.checks import between as between
    from sprinter.decode.checks import choice as choice
    from sprinter.decode.checks import count as count
    from sprinter.decode.checks import flag as flag
    from sprinter.decode.checks import number as number
    from sprinter.decode.conformance import check_accept as check_accept
    from sprinter.decode.draft import Control as Control
    from sprinter.decode.draft import LawPair as LawPair
    from sprinter.decode.draft import Origin as Origin
    from sprinter.decode.draft import Ranked as Ranked
    from sprinter.decode.draft import Stats as Stats
    from sprinter.decode.draft import Tips as Tips
    from sprinter.decode.draft import Token as Token
    from sprinter.decode.draft_heads import DraftHeads as DraftHeads
    from sprinter.decode.draft_heads import Heads as Heads
    from sprinter.decode.draft_heads import HeadText as HeadText
    from sprinter.decode.draft_heads import Parallel as Parallel
    from sprinter.decode.drafter import Allocated as Allocated
    from sprinter.decode.drafter import Context as Context
    from sprinter.decode.drafter import Drafter as Drafter
    from sprinter.decode.drafter import Model as Model
    from sprinter.decode.drafter import Nothing as Nothing
    from sprinter.decode.drafter import Proposal as Proposal
    from sprinter.decode.drafter import Proposer as Proposer
    from sprinter.decode.drafter_conformance import check_drafter as check_drafter
    from sprinter.decode.grow import Root as Root
    from sprinter.decode.grow import TreeBuilder as TreeBuilder
    from sprinter.decode.growers import Drawn as Drawn
    from sprinter.decode.growers import Dynamic as Dynamic
    from sprinter.decode.growers import Static as Static
    from sprinter.decode.growers import Widened as Widened
    from sprinter.decode.lookup import Lookup as Lookup
    from sprinter.decode.method import Method as Method
    from sprinter.decode.presets import preset as preset
    from sprinter.decode.recycle import Recycle as Recycle
    from sprinter.decode.registry import Registry as Registry
    from sprinter.decode.rule_conformance import check_stop as check_stop
    from sprinter.decode.rule_conformance import check_trust as check_trust
    from sprinter.decode.sequence import Chain as Chain
    from sprinter.decode.sequence import Siblings as Siblings
    from sprinter.decode.sequence import Tree as Tree
    from sprinter.decode.signals import SIGNALS as SIGNALS
    from sprinter.decode.signals import signal as signal
    from sprinter.decode.sparse import Sparse as Sparse
    from sprinter.decode.spec import ACCEPT as ACCEPT
    from sprinter.decode.spec import DRAFTER as DRAFTER
    from sprinter.decode.spec import METHODS as METHODS
    from sprinter.decode.spec import STOP as STOP
    from sprinter.decode.spec import TRUST as TRUST
    from sprinter.decode.spec import method_table as method_table
    from sprinter.decode.spec import parse_method as parse_method
    from sprinter.decode.state import RuleState as RuleState
    from sprinter.decode.stop import AdaEdl as AdaEdl
    from sprinter.decode.stop import BildFallback as BildFallback
    from sprinter.decode.stop import Calibrated as Calibrated
    from sprinter.decode.stop import Confidence as Confidence
    from sprinter.decode.stop import Disco as Disco
    from sprinter.decode.stop import Fixed as Fixed
    from sprinter.decode.stop import Heuristic as Heuristic
    from sprinter.decode.stop import Never as Never
    from sprinter.decode.stop import Optimal as Optimal
    from sprinter.decode.stop import SpecDec as SpecDec
    from sprinter.decode.stop import StopRule as StopRule
    from sprinter.decode.stop import Svip as Svip
    from sprinter.decode.stop import Untrusted as Untrusted
    from sprinter.decode.suffix import Suffix as Suffix
    from sprinter.decode.trust import DEFAULT as DEFAULT
    from sprinter.decode.trust import MEASURED as MEASURED
    from sprinter.decode.trust import RECORDED as RECORDED
    from sprinter.decode.trust import Certain as Certain
    from sprinter.decode.trust import Coin as Coin
    from sprinter.decode.trust import Everyone as Everyone
    from sprinter.decode.trust import Gate as Gate
    from sprinter.decode.trust import Nobody as Nobody
    from sprinter.decode.trust import Online as Online
    from sprinter.decode.trust import State as State
    from sprinter.decode.trust import TrustRule as TrustRule
    from sprinter.random import Draws as Draws
    from sprinter.random import Purpose as Purpose

__getattr__, __dir__, __all__ = lazy_names(__name__)
