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

if TYPE_CHECKING:
    from sprinter.decode.accept import (
        AcceptRule,
        Batch,
        Bild,
        Block,
        Cactus,
        Cascade,
        ChainRule,
        Diversed,
        Exact,
        Fly,
        Fuzzy,
        GreedyMatch,
        Harmless,
        Judge,
        Lenient,
        Margin,
        Mentored,
        OneHot,
        Opt,
        RandomAccept,
        Relaxed,
        SeveralRule,
        SpecInfer,
        SpecTr,
        TargetCall,
        Threshold,
        Traversal,
        TreeRule,
        Typical,
        Uno,
        Without,
    )
    from sprinter.decode.checks import at_least, between
    from sprinter.decode.conformance import check_accept, check_stop, check_trust
    from sprinter.decode.draft import Control, LawPair, Origin, Ranked, Stats, Tips, Token, Verdict
    from sprinter.decode.draft_heads import DraftHeads, Heads, HeadText
    from sprinter.decode.drafter import (
        Allocated,
        Context,
        Drafter,
        Model,
        Nothing,
        Proposal,
        Proposer,
    )
    from sprinter.decode.drafter_conformance import check_drafter
    from sprinter.decode.grow import Root, TreeBuilder
    from sprinter.decode.growers import Drawn, Dynamic, Static, Widened
    from sprinter.decode.lookup import Lookup
    from sprinter.decode.method import Method
    from sprinter.decode.presets import preset
    from sprinter.decode.registry import Registry
    from sprinter.decode.sequence import Chain, Siblings, Tree
    from sprinter.decode.signals import SIGNALS, signal
    from sprinter.decode.sparse import Sparse
    from sprinter.decode.spec import ACCEPT, DRAFTER, METHODS, STOP, TRUST, method_table, parse_method
    from sprinter.decode.state import RuleState
    from sprinter.decode.stop import (
        AdaEdl,
        BildFallback,
        Calibrated,
        Confidence,
        Disco,
        Fixed,
        Heuristic,
        Never,
        Optimal,
        SpecDec,
        StopRule,
        Svip,
        Untrusted,
    )
    from sprinter.decode.trust import (
        DEFAULT,
        MEASURED,
        RECORDED,
        Certain,
        Coin,
        Everyone,
        Gate,
        Nobody,
        Online,
        State,
        TrustRule,
    )
    from sprinter.random import Draws, Purpose

__all__ = [
    "ACCEPT",
    "DEFAULT",
    "DRAFTER",
    "MEASURED",
    "METHODS",
    "RECORDED",
    "SIGNALS",
    "STOP",
    "TRUST",
    "AcceptRule",
    "AdaEdl",
    "Allocated",
    "Batch",
    "Bild",
    "BildFallback",
    "Block",
    "Cactus",
    "Calibrated",
    "Cascade",
    "Certain",
    "Chain",
    "ChainRule",
    "Coin",
    "Confidence",
    "Context",
    "Control",
    "Disco",
    "Diversed",
    "DraftHeads",
    "Drafter",
    "Drawn",
    "Draws",
    "Dynamic",
    "Everyone",
    "Exact",
    "Fixed",
    "Fly",
    "Fuzzy",
    "Gate",
    "GreedyMatch",
    "Harmless",
    "HeadText",
    "Heads",
    "Heuristic",
    "Judge",
    "LawPair",
    "Lenient",
    "Lookup",
    "Margin",
    "Mentored",
    "Method",
    "Model",
    "Never",
    "Nobody",
    "Nothing",
    "OneHot",
    "Online",
    "Opt",
    "Optimal",
    "Origin",
    "Proposal",
    "Proposer",
    "Purpose",
    "RandomAccept",
    "Ranked",
    "Registry",
    "Relaxed",
    "Root",
    "RuleState",
    "SeveralRule",
    "Siblings",
    "Sparse",
    "SpecDec",
    "SpecInfer",
    "SpecTr",
    "State",
    "Static",
    "Stats",
    "StopRule",
    "Svip",
    "TargetCall",
    "Threshold",
    "Tips",
    "Token",
    "Traversal",
    "Tree",
    "TreeBuilder",
    "TreeRule",
    "TrustRule",
    "Typical",
    "Uno",
    "Untrusted",
    "Verdict",
    "Widened",
    "Without",
    "at_least",
    "between",
    "check_accept",
    "check_drafter",
    "check_stop",
    "check_trust",
    "method_table",
    "parse_method",
    "preset",
    "signal",
]  # fmt: skip

# Imported when first used: the rules need torch, and a package must not import its own modules to be imported.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "sprinter.decode.accept": (
            "AcceptRule", "Batch", "Bild", "Block", "Cactus", "Cascade", "ChainRule", "Diversed", "Exact", "Fly",
            "Fuzzy", "GreedyMatch", "Harmless", "Judge", "Lenient", "Margin", "Mentored", "OneHot", "Opt",
            "RandomAccept", "Relaxed", "SeveralRule", "SpecInfer", "SpecTr", "TargetCall", "Threshold", "Traversal",
            "TreeRule", "Typical", "Uno", "Without",
        ),
        "sprinter.decode.drafter_conformance": ("check_drafter",),
        "sprinter.decode.checks": ("at_least", "between"),
        "sprinter.decode.conformance": ("check_accept", "check_stop", "check_trust"),
        "sprinter.decode.draft_heads": ("DraftHeads", "HeadText", "Heads"),
        "sprinter.decode.sparse": ("Sparse",),
        "sprinter.decode.draft": ("Control", "LawPair", "Origin", "Ranked", "Stats", "Tips", "Token", "Verdict"),
        "sprinter.decode.drafter": (
            "Allocated", "Context", "Drafter", "Model", "Nothing", "Proposal", "Proposer",
        ),
        "sprinter.decode.lookup": ("Lookup",),
        "sprinter.decode.grow": ("TreeBuilder", "Root"),
        "sprinter.decode.growers": ("Drawn", "Dynamic", "Static", "Widened"),
        "sprinter.decode.method": ("Method",),
        "sprinter.decode.signals": ("SIGNALS", "signal"),
        "sprinter.decode.spec": (
            "ACCEPT", "DRAFTER", "METHODS", "STOP", "TRUST", "method_table", "parse_method",
        ),
        "sprinter.decode.presets": ("preset",),
        "sprinter.decode.registry": ("Registry",),
        "sprinter.decode.state": ("RuleState",),
        "sprinter.decode.stop": (
            "AdaEdl", "BildFallback", "Calibrated", "Confidence", "Disco", "Fixed", "Heuristic", "Never", "Optimal",
            "SpecDec", "StopRule", "Svip", "Untrusted",
        ),
        "sprinter.decode.sequence": ("Chain", "Siblings", "Tree"),
        "sprinter.decode.trust": (
            "DEFAULT", "MEASURED", "RECORDED", "Certain", "Coin", "Everyone", "Gate", "Nobody", "Online", "State",
            "TrustRule",
        ),
        "sprinter.random": ("Draws", "Purpose"),
    },
)  # fmt: skip
