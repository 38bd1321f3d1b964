"""Statistics of a pair's laws along texts, for the figures of the report.

SVIP's Figures 2 to 4: the draft's entropy against acceptance and accepted length, the ratio H_{q,p}/H_q, bounds on the
acceptance rate against the truth; and acceptance by position in the draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.laws import Sampling, kl_divergence, overlap
from sprinter.theory.bounds import bretagnolle_huber, entropy_bound, pinsker
from sprinter.theory.recording import Recording, probe

__all__ = ["acceptance_by_position", "analyse"]

CAP = 40
"""Maximum length of the accepted runs that are analysed (SVIP's cap); at most half of a text."""
ENTROPY_STEP, ENTROPY_MOST = 0.25, 7.0
RATIO_STEP, RATIO_MOST = 0.05, 3.0
LEAST_ENTROPY = 1e-2
"""Minimum entropy in nats; below it the ratio H_{q,p}/H_q is dominated by rounding errors and left out."""
GROUPS = 100
C = 0.15
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)


def analyse(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = Sampling(),
    new_tokens: int = 64,
    progress: Callable[[int, int], None] | None = None,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Generate one text per prompt with the target and summarise both models' laws along it as JSON values.

    Under exact acceptance a text has the same law, and given a token x the probability that it was an accepted draft
    token is min(1, q(x)/p(x)). Products of these probabilities give accepted lengths without running the methods.

    Args:
        pair: target and draft.
        prompts: token ids.
        sampling: sampling parameters of the texts and of acceptance. The draft's entropy, the ratio and the bounds are
            those of the temperature-1 laws, as in SVIP. (Vocabularies over 4,096 tokens are reduced to fewer outcomes,
            which keeps overlaps and entropies and lowers KL slightly; see ``sprinter.theory.outcomes``.)
        progress: called with (texts done, texts in total).

    Returns:
        {"sampling", "new_tokens", "texts", "positions", "overlap": mean β, "entropy_overlap_correlation",
        "entropy": {"edges" in nats, "count", "overlap": {"mean", "p10", ..., "p90"}, "length": of accepted runs up
        to "cap" tokens, with the same keys as "overlap"},
        "ratio": {"edges", "count", "above" the last edge, "left_out", "p10", ..., "p90", "share_to_1_3"},
        "bounds": {"share": place in the order of the truth, "truth", "pinsker", "bretagnolle_huber", "entropy": means
        of each hundredth, "c", "violations": {bound: share of positions where it is above the truth}},
        "position": {"reached", "kept"}: drafts begun anywhere that reach token 1, 2, ... and the share kept there}.
        Lists by bin hold None for an empty bin.

    Raises:
        UserError: no draft, no prompt, a prompt that does not fit.
    """
    if not prompts:
        raise UserError("an analysis needs at least one prompt")
    parts = []
    for i, prompt in enumerate(prompts):  # one at a time: laws take memory
        parts.append(_read(probe(pair, [prompt], new_tokens=new_tokens, sampling=sampling, seed=seed + i)))
        if progress is not None:
            progress(i + 1, len(prompts))
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    cap = min(CAP, max(1, new_tokens // 2))
    runs = [_survival(part["kept"], cap) for part in parts]
    survival, h, beta = torch.cat(runs), columns["entropy"], columns["overlap"]
    starts = torch.cat([part["entropy"][: len(run)] for part, run in zip(parts, runs, strict=True)])
    return {
        "sampling": sampling.model_dump(), "new_tokens": new_tokens, "texts": len(prompts), "positions": len(h),
        "overlap": _number(beta.mean()), "cap": cap,
        "entropy_overlap_correlation": _correlation(h, beta),
        "entropy": _by_entropy(h, beta, starts, survival.sum(-1)),
        "ratio": _ratio(h, columns["kl"]),
        "bounds": _bounds(columns),
        "position": _positions(survival),
    }  # fmt: skip


def acceptance_by_position(histogram: Sequence[int]) -> dict[str, list[float]]:
    """Measured counterpart of ``analyse``'s "position", from the number of rounds that added 0, 1, 2, ... tokens.

    A round that adds k tokens kept k − 1 of its draft. Drafts that ended before a position (by a stop rule or the end
    of the text) count as not kept there. The position after the longest draft is left out.

    Returns:
        {"reached": rounds whose draft reached position 1, 2, ..., "kept": share of them that kept the token there}.
    """
    rounds = [sum(histogram[k:]) for k in range(1, len(histogram) + 1)]
    places = [i for i in range(len(rounds) - 1) if rounds[i + 1] > 0]
    return {"reached": [rounds[i] for i in places], "kept": [rounds[i + 1] / rounds[i] for i in places]}


def _read(recording: Recording) -> dict[str, Tensor]:
    """Columns of the analysis, one entry per position, ``[N]`` float64 each."""
    p, q, raw_p, raw_q = (
        one.double() for one in (recording.p, recording.q, recording.raw_p, recording.raw_q)
    )
    own = recording.tokens.unsqueeze(-1)
    return {
        "entropy": recording.signals["entropy"],
        "overlap": overlap(p, q),
        "raw_overlap": overlap(raw_p, raw_q),
        "kl": kl_divergence(raw_q, raw_p),
        "pinsker": pinsker(raw_p, raw_q),
        "bretagnolle_huber": bretagnolle_huber(raw_p, raw_q),
        "kept": (q.gather(-1, own) / p.gather(-1, own)).squeeze(-1).clamp(max=1),
    }


def _survival(kept: Tensor, cap: int) -> Tensor:
    """Probability that a draft begun at a position is kept for 1 ... cap tokens, ``[N]`` -> ``[N − cap + 1, cap]``.

    Positions closer to the end of the text than ``cap`` are dropped, because their runs are too short.
    """
    return kept.unfold(0, cap, 1).cumprod(-1) if len(kept) >= cap else kept.new_zeros(0, cap)


def _by_entropy(h: Tensor, beta: Tensor, starts: Tensor, lengths: Tensor) -> dict[str, Any]:
    """Acceptance by the draft's entropy h, and accepted lengths by the entropy at the draft's first position."""
    most = int(ENTROPY_MOST / ENTROPY_STEP) - 1
    at, begun = ((values / ENTROPY_STEP).long().clamp(0, most) for values in (h, starts))
    last = int(at.max()) + 1
    return {
        "edges": [ENTROPY_STEP * i for i in range(last + 1)],
        "count": [int((at == i).sum()) for i in range(last)],
        "overlap": _spread([beta[at == i] for i in range(last)]),
        "length": _spread([lengths[begun == i] for i in range(last)]),
    }


def _spread(parts: Sequence[Tensor]) -> dict[str, list[float | None]]:
    """Mean and quantiles of each part; None for an empty part."""
    found = [{"mean": _number(part.mean()), **_quantiles(part)} if len(part) else {} for part in parts]
    return {name: [each.get(name) for each in found] for name in ("mean", *_quantiles(torch.zeros(1)))}


def _quantiles(values: Tensor) -> dict[str, float | None]:
    """Quantiles by name, "p10" to "p90"; None of no values."""
    found = values.quantile(values.new_tensor(LEVELS)) if len(values) else [None] * len(LEVELS)
    return {f"p{round(100 * level)}": _number(value) for level, value in zip(LEVELS, found, strict=True)}


def _ratio(h: Tensor, kl: Tensor) -> dict[str, Any]:
    """H_{q,p}/H_q = 1 + KL(q‖p)/H_q; it is at least 1."""
    there = h > LEAST_ENTROPY
    ratio = 1 + kl[there] / h[there]
    bins = round((RATIO_MOST - 1) / RATIO_STEP)
    at = ((ratio - 1) / RATIO_STEP).clamp(0, bins).long()
    counts = at.bincount(minlength=bins + 1).tolist()
    return {
        "edges": [round(1 + RATIO_STEP * i, 10) for i in range(bins + 1)],
        "count": counts[:bins],
        "above": counts[bins],
        "left_out": int((~there).sum()),
        **_quantiles(ratio),
        "share_to_1_3": _number((ratio <= 1.3).double().mean()) if len(ratio) else None,
    }


def _bounds(columns: dict[str, Tensor]) -> dict[str, Any]:
    """Means of the true acceptance rate and of its bounds, over positions sorted by the true rate."""
    truth = columns["raw_overlap"]
    order = truth.argsort()
    lines = {
        "truth": truth,
        "pinsker": columns["pinsker"],
        "bretagnolle_huber": columns["bretagnolle_huber"],
        "entropy": entropy_bound(columns["entropy"], C),
    }
    parts = torch.arange(len(order)).tensor_split(min(GROUPS, len(order)))
    rounding = 1e-6  # laws are of single precision
    return {
        "share": [(float(part[0]) + float(part[-1]) + 1) / 2 / len(order) for part in parts],
        **{name: [_number(line[order[part]].mean()) for part in parts] for name, line in lines.items()},
        "c": C,
        "violations": {
            name: _number((line > truth + rounding).double().mean())
            for name, line in lines.items()
            if name != "truth"
        },
    }


def _positions(survival: Tensor) -> dict[str, Any]:
    if not len(survival):
        return {"reached": [], "kept": []}
    kept = survival.mean(0)
    reached = torch.cat([kept.new_ones(1), kept[:-1]])
    return {"reached": reached.tolist(), "kept": [_number(value) for value in kept / reached]}


def _correlation(a: Tensor, b: Tensor) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    return _number((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())


def _number(value: Tensor | None) -> float | None:
    """A JSON number; None if there is no value, or if it is not finite."""
    return float(value) if value is not None and math.isfinite(float(value)) else None
