"""What speculation did for a request, in three forms: vLLM's metrics, llama.cpp's timings, and ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sprinter.decode.draft import Origin, Token
from sprinter.decode.state import RuleState
from sprinter.engine.generation import Generation, stats_dict, token_dict

__all__ = [
    "TargetRounds", "llamacpp_timings", "price_headers", "sprinter_report", "token_report", "vllm_metrics",
]  # fmt: skip

_KEPT = (Origin.TRUSTED, Origin.ACCEPTED)


@dataclass(frozen=True, slots=True)
class TargetRounds:
    """The rounds of one or more texts that called the target.

    Attributes:
        kept: of each such round, the number of draft tokens in the text: trusted and accepted ones.
        added: the number of tokens that these rounds added to the text, the target's own included.
        longest: maximum length of a draft in texts as long as these; None: the method has none.
    """

    kept: tuple[int, ...]
    added: int
    longest: int | None

    @classmethod
    def of(cls, outs: Sequence[Generation]) -> TargetRounds:
        """The rounds of these texts. Tokens that were trusted after the last target call belong to none."""
        kept: list[int] = []
        added = 0
        lengths: list[int] = []
        for out in outs:
            rounds: dict[int, list[Origin]] = {}
            for token in out.tokens:
                rounds.setdefault(token.round, []).append(token.origin)
            called = [one for one in rounds.values() if any(origin is not Origin.TRUSTED for origin in one)]
            kept += [sum(origin in _KEPT for origin in one) for one in called]
            added += sum(map(len, called))
            method = None if out.request is None else out.request.method
            if method is not None and method.drafter.proposes and method.levels is not None:
                lengths.append(min(method.levels, len(out.tokens)))  # what was asked for has no bound
        return cls(tuple(kept), added, max(lengths, default=None))

    @property
    def histogram(self) -> list[int]:
        """Index j: the number of rounds that kept j draft tokens."""
        size = max(self.longest or 0, *self.kept, 0)
        counts = Counter(self.kept)
        return [counts[j] for j in range(size + 1)]

    @property
    def per_position(self) -> list[int]:
        """Index i: the number of rounds that kept the draft token at position i of their drafts."""
        left, found = len(self.kept), list[int]()
        counts = Counter(self.kept)
        for i in range(max(self.kept, default=0)):
            left -= counts[i]
            found.append(left)
        return found


def vllm_metrics(outs: Sequence[Generation]) -> dict[str, Any]:
    """The object ``metrics.speculative_decoding`` of vLLM's answers; over all texts of a request."""
    steps = TargetRounds.of(outs)
    accepted, drafted = sum(steps.kept), sum(out.stats.drafted for out in outs)
    histogram = steps.histogram
    return {
        # Not 1 + accepted / steps: the last draft token of a text has no token of the target behind it.
        "mean_acceptance_length": steps.added / len(steps.kept) if steps.kept else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps.kept),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(histogram) - 1,
    }


def llamacpp_timings(outs: Sequence[Generation]) -> dict[str, Any]:
    """The object ``timings`` of llama.cpp's answers, with the number of target calls."""
    cached = sum(out.stats.cached_tokens for out in outs)
    read = sum(out.prompt_tokens for out in outs) - cached
    written = sum(out.stats.new_tokens for out in outs)
    prompt_ms = 1e3 * sum(out.stats.prefill_s for out in outs)
    predicted_ms = max(0.0, 1e3 * sum(out.stats.wall_s for out in outs) - prompt_ms)
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / read if read else 0.0,
        "prompt_per_second": 1e3 * read / prompt_ms if prompt_ms else 0.0,
        "predicted_n": written,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / written if written else 0.0,
        "predicted_per_second": 1e3 * written / predicted_ms if predicted_ms else 0.0,
        "draft_n": sum(out.stats.drafted for out in outs),
        "draft_n_accepted": sum(out.stats.trusted + out.stats.accepted for out in outs),
        "target_calls": sum(out.stats.target_calls for out in outs),
    }


def sprinter_report(out: Generation) -> dict[str, Any]:
    """Our own report of one text: method, drift and coverage, origins, and all counts and times."""
    origins = Counter(token.origin.value for token in out.tokens)
    stats, rules = stats_dict(out.stats), None if out.request is None else out.request.rules
    return {
        "method": out.method,
        "lossless": out.stats.lossless,
        "seed": None if out.request is None else out.request.seed,
        "mean_drift": stats.pop("mean_drift"),
        "coverage": stats.pop("drift_coverage"),
        "origins": {origin.value: origins[origin.value] for origin in Origin},
        "accept_lengths": out.accept_lengths,
        "rules": rules.to_dict() if isinstance(rules, RuleState) else rules,
        **stats,
    }


def price_headers(outs: Sequence[Generation]) -> dict[str, str]:
    """Headers with what the texts of a request cost, for clients that drop fields which OpenAI's answers lack."""
    if not outs:
        return {}
    written = sum(out.stats.new_tokens for out in outs)
    seconds = sum(out.stats.wall_s for out in outs)
    known = [out for out in outs if out.stats.mean_drift is not None]
    found = {
        "x-sprinter-method": outs[0].method.encode("ascii", "replace").decode(),
        "x-sprinter-target-calls": str(sum(out.stats.target_calls for out in outs)),
        "x-sprinter-tokens-per-s": f"{written / seconds:.1f}" if seconds else "0.0",
    }
    if known:
        mean = sum(out.stats.mean_drift or 0.0 for out in known) / len(known)
        found["x-sprinter-mean-drift"] = f"{mean:.4f}"
    return found


def token_report(token: Token, index: int) -> Mapping[str, Any]:
    """A token as ``generate --json`` writes it, with its index in the text."""
    return {"index": index, **token_dict(token)}
