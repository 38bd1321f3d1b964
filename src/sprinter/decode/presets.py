"""Published methods and our own, by name, with the documented defaults."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from sprinter.decode import accept, growers, stop, trust
from sprinter.decode.checks import at_least
from sprinter.decode.copies import LONGEST_COPY
from sprinter.decode.costs import ENTROPY
from sprinter.decode.draft_heads import Heads
from sprinter.decode.drafter import Allocated, Model, Nothing
from sprinter.decode.lookup import Lookup
from sprinter.decode.method import Method
from sprinter.decode.recycle import Recycle
from sprinter.decode.registry import METHODS
from sprinter.decode.sparse import Sparse
from sprinter.decode.suffix import Suffix
from sprinter.decode.trust import MEASURED, RECORDED

__all__ = ["preset"]

_COPIES = Lookup(4, 3, Model(), 11)  # for a real pair (docs/decisions/0051-hybrid.md)


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


def _composed(name: str, paper: str, about: str, shown: str = "", **parts: Any) -> None:
    """Register a method whose parameters are those of its rules.

    Args:
        about: what it does, in one sentence.
        shown: the parameters, in order, fields of its rules or ``cap``; ``name=3``: with another default;
            ``name:field``: by another name.
        parts: of ``Method``: rules, as classes where they have parameters, and values.
    """
    rules = {part: one for part, one in parts.items() if isinstance(one, type)}
    usual = parts | {one.name: one.default for rule in rules.values() for one in dataclasses.fields(rule)}
    words = [word.partition("=") for word in shown.split()]
    held = {key: field or key for key, _, field in (word.partition(":") for word, _, _ in words)}
    defaults = [
        int(own) if own else usual[field] for field, (_, _, own) in zip(held.values(), words, strict=True)
    ]
    signature = inspect.Signature(
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default)
            for key, default in zip(held, defaults, strict=True)
        ]
    )

    def build(**given: Any) -> Method:
        bound = signature.bind(**given)
        bound.apply_defaults()
        values = parts | {held[key]: value for key, value in bound.arguments.items()}
        made = {
            part: rule(
                **{one.name: values[one.name] for one in dataclasses.fields(rule) if one.name in values}
            )
            for part, rule in rules.items()
        }
        return Method(**{part: values[part] for part in parts} | made)

    build.__doc__, build.__signature__ = about, signature  # type: ignore[attr-defined]
    preset(name, paper, **{key: field for key, field in held.items() if key != field})(build)


# fmt: off
_composed("autoregressive", "plain decoding", "Decode with the target alone, one token per forward pass.",
          drafter=Nothing())
_composed("draft-only", "plain decoding", "Decode with the draft model alone; the target is never called.",
          trust=trust.Everyone(), stop=stop.Never())
_composed("speculative", "Leviathan et al. 2023; Chen et al. 2023",
          "Exact speculative decoding with gamma draft tokens per round.",
          "gamma", stop=stop.Fixed)
_composed("block", "block verification (Sun et al. 2024)",
          "Exact speculative decoding that judges all gamma draft tokens of a round together.",
          "gamma", stop=stop.Fixed, accept=accept.Block())
_composed("sprinter", "SPRINTER (2025), Algorithm 2",
          "A gate trusts draft tokens one by one; the target checks the first untrusted one, and a tail.",
          "tau cap tail", trust=trust.Gate, stop=stop.Untrusted, cap=20)
_composed("certain", "of this project; signals of SVIP (entropy), transformers (max q), margins",
          "SPRINTER without a gate: the draft's own certainty decides.",
          "signal threshold cap tail", trust=trust.Certain, stop=stop.Untrusted, cap=20)
_composed("online", "of this project; logistic regression, updated by the target's verdicts",
          "SPRINTER with a gate that is fitted while decoding, to the target's verdicts.",
          "signal tau after cap tail", trust=trust.Online, stop=stop.Untrusted, cap=20)
_composed("heuristic", "transformers, num_assistant_tokens_schedule",
          "Exact speculative decoding whose draft length grows after full acceptance and shrinks otherwise.",
          "start:first", stop=stop.Heuristic, cap=40)
_composed("confidence", "transformers, assistant_confidence_threshold",
          "Exact speculative decoding that stops a draft run where q(x) is low.",
          "c", stop=stop.Confidence, cap=40)
_composed("svip", "SVIP (Zhang et al. 2024), equation 6",
          "Exact speculative decoding that stops a draft run where the draft's entropy is high.",
          "h c", stop=stop.Svip, cap=40)
_composed("adaedl", "AdaEDL (Agrawal et al. 2024)",
          "Exact speculative decoding that stops at high entropy, with a threshold that adapts to the acceptance rate.",
          stop=stop.AdaEdl(), cap=40)
_composed("calibrated", "of this project; logistic regression, updated by the target's verdicts",
          "Exact speculative decoding that stops a run where its chance, learned while decoding, is low.",
          "rate signal", stop=stop.Calibrated, cap=40)
_composed("optimal", "of this project; expected tokens against measured costs",
          "Exact speculative decoding that stops a run where another draft token costs more than it gains.",
          "step token verify signal", stop=stop.Optimal, cap=40)
# fmt: on


@preset("auto", "of this project; `optimal`, copies that pay, `certain` in a budget")
def _auto(
    *,
    budget: float | None = None,
    step: float | str = MEASURED,
    token: float | str = MEASURED,
    verify: float | str = MEASURED,
    signal: str = MEASURED,
    reads: str = MEASURED,
) -> Method:
    """The fastest exact decoding that is known here, or with a budget that within it: costs are measured."""
    run = stop.Optimal(step, token, ENTROPY if budget else signal, verify=verify)
    copies = Suffix(8, factor=64.0, min_prob=0.0, otherwise=Model(), reads=reads, step=step)
    if not budget:
        return Method(stop=run, drafter=copies, cap=40)
    sure = trust.Certain().settle({})
    return Method(trust=sure, stop=stop.Untrusted(40, run), drafter=copies, cap=40, budget=budget)


# fmt: off
_composed("allocation", "Fuzzy Speculative Decoding, section 5.3",
          "Decode each text with the draft alone or the target alone, at random: the baseline for every dial.",
          "share", trust=trust.Everyone(), stop=stop.Never(), drafter=Allocated)
_composed("coin", "baseline of this project",
          "SPRINTER with random trust in place of a gate: the baseline for gates at the same trusted share.",
          "rate cap", trust=trust.Coin, stop=stop.Untrusted(), cap=20)
_composed("specdec++", "SpecDec++ (Huang et al. 2024)",
          "Exact speculative decoding that stops where a trained head predicts a rejection in the run.",
          "h", stop=stop.SpecDec, cap=20)
_composed("disco", "DISCO (Mamou et al. 2024)",
          "Exact speculative decoding that stops where a small network on the draft's law predicts a rejection.",
          "threshold", stop=stop.Disco, cap=40)
_composed("opt", "Yin et al. 2024, Theorem 4",
          "Acceptance with slack ε and the replacement law of least drift: on the Pareto front.",
          "epsilon gamma", stop=stop.Fixed, accept=accept.Opt)
_composed("uno", "Yin et al. 2024, baseline of Theorem 4",
          "Acceptance with slack ε, with replacements drawn from p.",
          "epsilon gamma", stop=stop.Fixed, accept=accept.Uno)
_composed("fuzzy", "Fuzzy Speculative Decoding (Holsman et al. 2025)",
          "Keep all tokens where the two laws are close.",
          "divergence threshold gamma", stop=stop.Fixed, accept=accept.Fuzzy)
_composed("mentored", "Tran-Thien 2024", "The highest acceptance rate within a budget of KL(p‖π).",
          "kl gamma", stop=stop.Fixed, accept=accept.Mentored)
_composed("lenient", "transformers, assistant_ensemble_weight",
          "Exact acceptance against a mixture of target and draft.",
          "w gamma", stop=stop.Fixed, accept=accept.Lenient)
_composed("typical", "Medusa (Cai et al. 2024)",
          "Keep tokens whose target probability exceeds an entropy-dependent threshold.",
          "epsilon delta gamma", stop=stop.Fixed, accept=accept.Typical)
_composed("margin", "MARS (arXiv 2601.15498)",
          "Keep the target's first choice, and its second where the two logits are near.",
          "theta gamma", stop=stop.Fixed, accept=accept.Margin)
_composed("bild", "Big Little Decoder (Kim et al. 2023)",
          "Stop where max q is low; the target replaces the first token with low p, and drops the rest.",
          "fallback:f rollback", stop=stop.BildFallback, accept=accept.Bild, cap=10)
_composed("fly", "FLy, as in vLLM",
          "Keep a refused token where the target is unsure and the draft goes on well behind it.",
          "window entropy top base gamma=8", stop=stop.Fixed, accept=accept.Fly)
_composed("asd", "ASD (arXiv 2608.03447)",
          "Greedy acceptance that lets mismatches of small regret pass, within an account of the whole text.",
          "total share most gamma=7", stop=stop.Fixed, accept=accept.Asd)
_composed("relaxed", "TensorRT-LLM, relaxed_topk and relaxed_delta",
          "Keep tokens that are among the target's likeliest and near its first choice.",
          "top_k delta gamma", stop=stop.Fixed, accept=accept.Relaxed)
_composed("threshold", "SGLang, speculative_accept_threshold_single and _acc",
          "Keep tokens that the target finds probable, without reading the draft's law.",
          "single total gamma", stop=stop.Fixed, accept=accept.Threshold)
_composed("cascade", "speculative cascades (Narasimhan et al. 2025)",
          "Keep all tokens where the draft is nearly as sure as the target; elsewhere accept exactly.",
          "deferral alpha gamma", stop=stop.Fixed, accept=accept.Cascade)
_composed("cactus", "Cactus (ICLR 2026)",
          "Exact acceptance with a slack in KL around the drafted token, as published.",
          "delta gamma", stop=stop.Fixed, accept=accept.Cactus)
_composed("diversed", "DIVERSED (arXiv 2604.07622)",
          "Exact against a mixture of target and draft; a head on the target's state sets the draft's weight.",
          "scale gamma", stop=stop.Fixed, accept=accept.Diversed)
_composed("judge", "AutoJudge (arXiv 2504.20039)",
          "Exact, and a refused token stays if a head on the target's state calls it harmless for the answer.",
          "threshold gamma", stop=stop.Fixed, accept=accept.Harmless)
_composed("random", "Fuzzy Speculative Decoding, Appendix E",
          "Keep each token with a fixed probability.",
          "rate gamma", stop=stop.Fixed, accept=accept.RandomAccept)
_composed("batch", "Yin et al. 2024, Algorithm 4 (corrected)",
          "Several drafts, tried in order for the first token; only the accepted draft is followed.",
          "drafts=2 gamma", stop=stop.Fixed, accept=accept.Batch(), drafter=Model)
_composed("specinfer", "SpecInfer (Miao et al. 2024)",
          "Several drafts, tried in order at every depth.",
          "drafts=2 gamma", stop=stop.Fixed, accept=accept.SpecInfer(), drafter=Model)
_composed("spectr", "SpecTr (Sun et al. 2023), k-SEQ",
          "Several drafts, chosen by k-SEQ at every depth.",
          "drafts=2 gamma", stop=stop.Fixed, accept=accept.SpecTr(), drafter=Model)
_composed("tree", "EAGLE-2's tree (Li et al. 2024), grown by the draft model",
          "A tree that grows where the draft model is sure; siblings are its most probable tokens.",
          "expand=8 depth=5 nodes=24", stop=stop.Never(), accept=accept.OneHot(), drafter=growers.Dynamic)
_composed("static-tree", "Medusa's tree (Cai et al. 2024), grown by the draft model",
          "A tree of fixed shape over the draft model's most probable tokens.",
          "widths", stop=stop.Never(), accept=accept.OneHot(), drafter=growers.Static)
_composed("cape", "GliDe with a CaPE (Du et al. 2024)",
          "A drafted chain; where the draft model was unsure, its next likely tokens are judged too.",
          "counts gamma", stop=stop.Fixed, accept=accept.Without(), drafter=growers.Widened)
_composed("traversal", "traversal verification (Weng et al. 2025)",
          "A tree of siblings drawn without replacement, judged from the leaves to the text.",
          "widths", stop=stop.Never(), accept=accept.Traversal(), drafter=growers.Drawn)
# fmt: on


@preset("heads", "Medusa (Cai et al. 2024), EAGLE-3 (Li et al. 2025): heads on the target")
def _heads(*, gamma: int = 4, kind: str | None = None) -> Method:
    """Exact speculative decoding of chains that heads on the target draft; no draft model."""
    return Method(stop=stop.Fixed(gamma), drafter=Heads(kind=kind))


@preset("medusa", "Medusa (Cai et al. 2024)")
def _medusa(*, nodes: int = 24, tree: str = RECORDED) -> Method:
    """The tree that the accuracies of Medusa's heads choose, judged exactly; no draft model."""
    return Method(stop=stop.Never(), accept=accept.OneHot(), drafter=Heads(Sparse(nodes, tree)))


@preset("eagle", "EAGLE-2's tree (Li et al. 2024), grown by heads on the target")
def _eagle(*, expand: int = 8, depth: int = 5, nodes: int = 24) -> Method:
    """A tree that grows where heads on the target are sure; no draft model."""
    grown = growers.Dynamic(expand, depth, nodes)
    return Method(stop=stop.Never(), accept=accept.OneHot(), drafter=Heads(grown))


@preset("lookup", "prompt lookup decoding (Saxena 2023)")
def _lookup(*, n: int = 3, gamma: int = 5) -> Method:
    """Draft by copying the tokens that followed an earlier occurrence of the last n tokens; no draft model."""
    at_least("n", n, 1)
    return Method(stop=stop.Fixed(gamma), drafter=Lookup(n, least=min(2, n)))


@preset(
    "hybrid", "of this project; prompt lookup (Saxena 2023) and SVIP (Zhang et al. 2024)", copies="length"
)
def _hybrid(
    *, n: int = _COPIES.n, least: int = _COPIES.least, copies: int = _COPIES.length, h: float = 0.3
) -> Method:
    """Exact speculative decoding that copies where the text repeats itself; elsewhere the draft model drafts."""
    at_least("copies", copies, 1, LONGEST_COPY)
    return Method(stop=stop.Svip(h), drafter=Lookup(n, least, Model(), copies), cap=max(40, copies))


@preset("recycle", "Token Recycling (Luo et al. 2024), as a chain")
def _recycle(*, length: int = 4) -> Method:
    """Draft what the target held most probable after each token, the last time; no draft model."""
    return Method(stop=stop.Never(), accept=accept.Match(), drafter=Recycle(length=length), cap=length)


@preset("suffix", "SuffixDecoding (Oliaro et al. 2024)")
def _suffix(
    *, depth: int = 64, factor: float = 1.0, min_prob: float = 0.1, length: int = 15, drawn: bool = False
) -> Method:
    """Draft what most often followed the text's ending, in this text and in earlier ones; no draft model."""
    drafter = Suffix(depth, factor=factor, min_prob=min_prob, length=length, drawn=drawn)
    return Method(
        stop=stop.Never(), accept=accept.Exact() if drawn else accept.Match(), drafter=drafter, cap=length
    )
