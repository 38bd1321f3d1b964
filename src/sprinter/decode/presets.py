"""Published methods and our own, by name, with the documented defaults."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from sprinter.decode.accept import (
    Batch,
    Bild,
    Block,
    Cactus,
    Cascade,
    Diversed,
    Fly,
    Fuzzy,
    Harmless,
    Lenient,
    Margin,
    Mentored,
    OneHot,
    Opt,
    RandomAccept,
    Relaxed,
    SpecInfer,
    SpecTr,
    Threshold,
    Traversal,
    Typical,
    Uno,
    Without,
)
from sprinter.decode.checks import at_least
from sprinter.decode.draft_heads import Heads
from sprinter.decode.drafter import Allocated, Model, Nothing
from sprinter.decode.growers import Drawn, Dynamic, Static, Widened
from sprinter.decode.lookup import LONGEST_COPY, Lookup
from sprinter.decode.method import Method
from sprinter.decode.registry import METHODS
from sprinter.decode.sparse import Sparse
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
    Svip,
    Untrusted,
)
from sprinter.decode.trust import DEFAULT, MEASURED, RECORDED, Certain, Coin, Everyone, Gate, Online

__all__ = ["preset"]

_SPECULATIVE = "Leviathan et al. 2023; Chen et al. 2023"
_SPRINTER = "SPRINTER (2025), Algorithm 2"
_COPIES = Lookup(4, 3, "model", 11)  # for a real pair (docs/decisions/0051-hybrid.md)


def preset(name: str, paper: str, **renamed: str) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    """Decorator: register a function with keyword parameters that returns a Method, with its documented defaults.

    Args:
        renamed: parameters that the rules hold under another name than the function.
    """

    def register(build: Callable[..., Method]) -> Callable[..., Method]:
        def named(**params: Any) -> Method:
            return dataclasses.replace(build(**params), preset=name, paper=paper)

        named.__doc__, named.__signature__ = build.__doc__, inspect.signature(build)  # type: ignore[attr-defined]
        named.paper, named.renamed = paper, renamed  # type: ignore[attr-defined]
        METHODS.add(name, named)
        return named

    return register


@preset("autoregressive", "plain decoding")
def autoregressive() -> Method:
    """Decode with the target alone, one token per forward pass."""
    return Method(drafter=Nothing())


@preset("draft-only", "plain decoding")
def draft_only() -> Method:
    """Decode with the draft model alone; the target is never called."""
    return Method(trust=Everyone(), stop=Never())


@preset("speculative", _SPECULATIVE)
def speculative(*, gamma: int = 5) -> Method:
    """Exact speculative decoding with gamma draft tokens per round."""
    return Method(stop=Fixed(gamma))


@preset("block", "block verification (Sun et al. 2024)")
def block(*, gamma: int = 5) -> Method:
    """Exact speculative decoding that judges all gamma draft tokens of a round together."""
    return Method(stop=Fixed(gamma), accept=Block())


@preset("sprinter", _SPRINTER)
def sprinter(*, tau: float | str = RECORDED, cap: int = 20, tail: int = 0) -> Method:
    """A gate trusts draft tokens one by one; the target checks the first untrusted one, and a tail."""
    return Method(trust=Gate(tau), stop=Untrusted(tail), cap=cap)


@preset("certain", "of this project; signals of SVIP (entropy), transformers (max q), margins")
def certain(
    *, signal: str = "entropy", threshold: float | str = DEFAULT, cap: int = 20, tail: int = 0
) -> Method:
    """SPRINTER without a gate: the draft's own certainty decides."""
    return Method(trust=Certain(signal, threshold), stop=Untrusted(tail), cap=cap)


@preset("online", "of this project; logistic regression, updated by the target's verdicts")
def online(
    *, signal: str = "entropy", tau: float = 0.6, after: int = 16, cap: int = 20, tail: int = 0
) -> Method:
    """SPRINTER with a gate that is fitted while decoding, to the target's verdicts."""
    return Method(trust=Online(signal, tau, after), stop=Untrusted(tail), cap=cap)


@preset("heuristic", "transformers, num_assistant_tokens_schedule")
def heuristic(*, start: int = 5) -> Method:
    """Exact speculative decoding whose draft length grows after full acceptance and shrinks otherwise."""
    return Method(stop=Heuristic(start), cap=40)


@preset("confidence", "transformers, assistant_confidence_threshold")
def confidence(*, c: float = 0.4) -> Method:
    """Exact speculative decoding that stops a draft run where q(x) is low."""
    return Method(stop=Confidence(c), cap=40)


@preset("svip", "SVIP (Zhang et al. 2024), equation 6")
def svip(*, h: float = 0.3, c: float = 0.15) -> Method:
    """Exact speculative decoding that stops a draft run where the draft's entropy is high."""
    return Method(stop=Svip(h, c), cap=40)


@preset("adaedl", "AdaEDL (Agrawal et al. 2024)")
def adaedl() -> Method:
    """Exact speculative decoding that stops at high entropy, with a threshold that adapts to the acceptance rate."""
    return Method(stop=AdaEdl(), cap=40)


@preset("calibrated", "of this project; logistic regression, updated by the target's verdicts")
def calibrated(*, rate: float = 0.4, signal: str = "entropy") -> Method:
    """Exact speculative decoding that stops a run where its chance, learned while decoding, is low."""
    return Method(stop=Calibrated(rate, signal), cap=40)


@preset("optimal", "of this project; expected tokens against measured costs")
def optimal(*, step: float = 0.25, token: float = 0.03, signal: str = "entropy") -> Method:
    """Exact speculative decoding that stops a run where another draft token costs more than it gains."""
    return Method(stop=Optimal(step, token, signal), cap=40)


@preset("auto", "of this project; `optimal`, copies that pay, `certain` in a budget")
def auto(
    *,
    budget: float = 0.0,
    step: float | str = MEASURED,
    token: float | str = MEASURED,
    reads: str = MEASURED,
) -> Method:
    """The fastest exact decoding that is known here, or with a budget that within it: costs are measured."""
    stop, copies = Optimal(step, token), Lookup(8, 2, "model", 15, reads, step)
    if budget == 0:
        return Method(stop=stop, drafter=copies, cap=40)
    trust = Certain().settle({})
    return Method(trust=trust, stop=Untrusted(40, stop), drafter=copies, cap=40, budget=budget)


@preset("allocation", "Fuzzy Speculative Decoding, section 5.3")
def allocation(*, share: float = 0.5) -> Method:
    """Decode each text with the draft alone or the target alone, at random: the baseline for every dial."""
    return Method(trust=Everyone(), stop=Never(), drafter=Allocated(share))


@preset("coin", "baseline of this project")
def coin(*, rate: float = 0.5, cap: int = 20) -> Method:
    """SPRINTER with random trust in place of a gate: the baseline for gates at the same trusted share."""
    return Method(trust=Coin(rate), stop=Untrusted(), cap=cap)


@preset("specdec++", "SpecDec++ (Huang et al. 2024)")
def specdec(*, h: float = 0.7) -> Method:
    """Exact speculative decoding that stops where a trained head predicts a rejection in the run."""
    return Method(stop=SpecDec(h), cap=20)


@preset("disco", "DISCO (Mamou et al. 2024)")
def disco(*, threshold: float = 0.5) -> Method:
    """Exact speculative decoding that stops where a small network on the draft's law predicts a rejection."""
    return Method(stop=Disco(threshold), cap=40)


@preset("opt", "Yin et al. 2024, Theorem 4")
def opt(*, epsilon: float = 0.01, gamma: int = 5) -> Method:
    """Acceptance with slack ε and the replacement law of least drift: on the Pareto front."""
    return Method(stop=Fixed(gamma), accept=Opt(epsilon))


@preset("uno", "Yin et al. 2024, baseline of Theorem 4")
def uno(*, epsilon: float = 0.01, gamma: int = 5) -> Method:
    """Acceptance with slack ε, with replacements drawn from p."""
    return Method(stop=Fixed(gamma), accept=Uno(epsilon))


@preset("fuzzy", "Fuzzy Speculative Decoding (Holsman et al. 2025)")
def fuzzy(*, divergence: str = "js_reference", threshold: float = 0.3, gamma: int = 5) -> Method:
    """Keep all tokens where the two laws are close."""
    return Method(stop=Fixed(gamma), accept=Fuzzy(divergence, threshold))


@preset("mentored", "Tran-Thien 2024")
def mentored(*, kl: float = 0.1, gamma: int = 5) -> Method:
    """The highest acceptance rate within a budget of KL(p‖π)."""
    return Method(stop=Fixed(gamma), accept=Mentored(kl))


@preset("lenient", "transformers, assistant_ensemble_weight")
def lenient(*, w: float = 0.8, gamma: int = 5) -> Method:
    """Exact acceptance against a mixture of target and draft."""
    return Method(stop=Fixed(gamma), accept=Lenient(w))


@preset("typical", "Medusa (Cai et al. 2024)")
def typical(*, epsilon: float = 0.09, delta: float = 0.3, gamma: int = 5) -> Method:
    """Keep tokens whose target probability exceeds an entropy-dependent threshold."""
    return Method(stop=Fixed(gamma), accept=Typical(epsilon, delta))


@preset("margin", "MARS (arXiv 2601.15498)")
def margin(*, theta: float = 0.9, gamma: int = 5) -> Method:
    """Keep the target's first choice, and its second where the two logits are near."""
    return Method(stop=Fixed(gamma), accept=Margin(theta))


@preset("bild", "Big Little Decoder (Kim et al. 2023)")
def bild(*, fallback: float = 0.6, rollback: float = 5.0) -> Method:
    """Stop where max q is low; the target replaces the first token with low p, and drops the rest."""
    return Method(stop=BildFallback(fallback), accept=Bild(rollback), cap=10)


@preset("fly", "FLy, as in vLLM")
def fly(
    *, window: int = 6, entropy: float = 0.3, top: int = 3, base: str = "exact", gamma: int = 8
) -> Method:
    """Keep a refused token where the target is unsure and the draft goes on well behind it."""
    return Method(stop=Fixed(gamma), accept=Fly(window, entropy, top, base))


@preset("relaxed", "TensorRT-LLM, relaxed_topk and relaxed_delta")
def relaxed(*, top_k: int = 10, delta: float = 0.6, gamma: int = 5) -> Method:
    """Keep tokens that are among the target's likeliest and near its first choice."""
    return Method(stop=Fixed(gamma), accept=Relaxed(top_k, delta))


@preset("threshold", "SGLang, speculative_accept_threshold_single and _acc")
def threshold(*, single: float = 1.0, total: float = 1.0, gamma: int = 5) -> Method:
    """Keep tokens that the target finds probable, without reading the draft's law."""
    return Method(stop=Fixed(gamma), accept=Threshold(single, total))


@preset("cascade", "speculative cascades (Narasimhan et al. 2025)")
def cascade(*, deferral: str = "opt", alpha: float = 0.5, gamma: int = 5) -> Method:
    """Keep all tokens where the draft is nearly as sure as the target; elsewhere accept exactly."""
    return Method(stop=Fixed(gamma), accept=Cascade(deferral, alpha))


@preset("cactus", "Cactus (ICLR 2026)")
def cactus(*, delta: float = 0.1, gamma: int = 5) -> Method:
    """Exact acceptance with a slack in KL around the drafted token, as published."""
    return Method(stop=Fixed(gamma), accept=Cactus(delta))


@preset("diversed", "DIVERSED (arXiv 2604.07622)")
def diversed(*, scale: float = 1.0, gamma: int = 5) -> Method:
    """Exact against a mixture of target and draft; a head on the target's state sets the draft's weight."""
    return Method(stop=Fixed(gamma), accept=Diversed(scale))


@preset("judge", "AutoJudge (arXiv 2504.20039)")
def judge(*, threshold: float | str = RECORDED, gamma: int = 5) -> Method:
    """Exact, and a refused token stays if a head on the target's state calls it harmless for the answer."""
    return Method(stop=Fixed(gamma), accept=Harmless(threshold))


@preset("random", "Fuzzy Speculative Decoding, Appendix E")
def random(*, rate: float = 0.5, gamma: int = 5) -> Method:
    """Keep each token with a fixed probability."""
    return Method(stop=Fixed(gamma), accept=RandomAccept(rate))


@preset("batch", "Yin et al. 2024, Algorithm 4 (corrected)")
def batch(*, drafts: int = 2, gamma: int = 5) -> Method:
    """Several drafts, tried in order for the first token; only the accepted draft is followed."""
    return Method(stop=Fixed(gamma), accept=Batch(), drafter=Model(drafts=drafts))


@preset("specinfer", "SpecInfer (Miao et al. 2024)")
def specinfer(*, drafts: int = 2, gamma: int = 5) -> Method:
    """Several drafts, tried in order at every depth."""
    return Method(stop=Fixed(gamma), accept=SpecInfer(), drafter=Model(drafts=drafts))


@preset("spectr", "SpecTr (Sun et al. 2023), k-SEQ")
def spectr(*, drafts: int = 2, gamma: int = 5) -> Method:
    """Several drafts, chosen by k-SEQ at every depth."""
    return Method(stop=Fixed(gamma), accept=SpecTr(), drafter=Model(drafts=drafts))


@preset("tree", "EAGLE-2's tree (Li et al. 2024), grown by the draft model")
def tree(*, expand: int = 8, depth: int = 5, nodes: int = 24) -> Method:
    """A tree that grows where the draft model is sure; siblings are its most probable tokens."""
    return Method(stop=Never(), accept=OneHot(), drafter=Dynamic(expand, depth, nodes))


@preset("static-tree", "Medusa's tree (Cai et al. 2024), grown by the draft model")
def static_tree(*, widths: str = "4x2x2") -> Method:
    """A tree of fixed shape over the draft model's most probable tokens."""
    return Method(stop=Never(), accept=OneHot(), drafter=Static(widths))


@preset("cape", "GliDe with a CaPE (Du et al. 2024)")
def cape(*, counts: str = "7x5x3x1", gamma: int = 5) -> Method:
    """A drafted chain; where the draft model was unsure, its next likely tokens are judged too."""
    return Method(stop=Fixed(gamma), accept=Without(), drafter=Widened(counts))


@preset("traversal", "traversal verification (Weng et al. 2025)")
def traversal(*, widths: str = "3x2x1x1") -> Method:
    """A tree of siblings drawn without replacement, judged from the leaves to the text."""
    return Method(stop=Never(), accept=Traversal(), drafter=Drawn(widths))


@preset("heads", "Medusa (Cai et al. 2024), EAGLE-3 (Li et al. 2025): heads on the target")
def heads(*, gamma: int = 4) -> Method:
    """Exact speculative decoding of chains that heads on the target draft; no draft model."""
    return Method(stop=Fixed(gamma), drafter=Heads())


@preset("medusa", "Medusa (Cai et al. 2024)")
def medusa(*, nodes: int = 24, tree: str = RECORDED) -> Method:
    """The tree that the accuracies of Medusa's heads choose, judged exactly; no draft model."""
    return Method(stop=Never(), accept=OneHot(), drafter=Heads(Sparse(nodes, tree)))


@preset("eagle", "EAGLE-2's tree (Li et al. 2024), grown by heads on the target")
def eagle(*, expand: int = 8, depth: int = 5, nodes: int = 24) -> Method:
    """A tree that grows where heads on the target are sure; no draft model."""
    return Method(stop=Never(), accept=OneHot(), drafter=Heads(Dynamic(expand, depth, nodes)))


@preset("lookup", "prompt lookup decoding (Saxena 2023)")
def lookup(*, n: int = 3, gamma: int = 5) -> Method:
    """Draft by copying the tokens that followed an earlier occurrence of the last n tokens; no draft model."""
    at_least("n", n, 1)
    return Method(stop=Fixed(gamma), drafter=Lookup(n, least=min(2, n)))


@preset(
    "hybrid", "of this project; prompt lookup (Saxena 2023) and SVIP (Zhang et al. 2024)", copies="length"
)
def hybrid(
    *, n: int = _COPIES.n, least: int = _COPIES.least, copies: int = _COPIES.length, h: float = 0.3
) -> Method:
    """Exact speculative decoding that copies where the text repeats itself; elsewhere the draft model drafts."""
    at_least("copies", copies, 1, LONGEST_COPY)
    return Method(stop=Svip(h), drafter=Lookup(n, least, "model", copies), cap=max(40, copies))
