"""Laws: distributions over the vocabulary, and the operations on them that the rules use.

Notation: p = target's law, q = draft's law, V = vocabulary size, entropies in nats. Every function works on the
last axis, on tensors of shape ``[..., V]``, and keeps the dtype of its input (tests use float64).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sprinter.parameters import Sampling

__all__ = [
    "Sampling",
    "entropy",
    "first_largest",
    "js_divergence",
    "kl_divergence",
    "one_hot",
    "overlap",
    "process",
    "process_rows",
    "raw_law",
    "residual",
    "truncation",
    "tv_distance",
    "wide",
]


def raw_law(logits: Tensor) -> Tensor:
    """Softmax at temperature 1 of the model's own logits: rules' signals are computed from it. ``[..., V]`` -> same.

    Half-precision logits are converted to float32 first: a law in half precision does not sum to one.
    """
    return torch.softmax(_full(logits), -1)


def process(logits: Tensor, sampling: Sampling) -> Tensor:
    """The law that tokens are drawn from. ``[..., V]`` -> ``[..., V]``, float32 (float64 stays float64)."""
    full = _full(logits)
    if sampling.temperature == 0:
        return one_hot(full)
    if 0 < sampling.top_k < full.shape[-1]:
        full = _keep_top_k(full, sampling.top_k)
    if sampling.top_p < 1.0:
        full = _keep_top_p(full, sampling)
    law = _heated(full, sampling)
    if sampling.min_p > 0.0:
        law = law.masked_fill(law < sampling.min_p * law.amax(-1, keepdim=True), 0.0)
        law = law / law.sum(-1, keepdim=True)
    return law


def wide(law: Tensor) -> Tensor:
    """Convert to float64, on the CPU if the device does not support it. ``x.to(law)`` converts a result back."""
    return law.cpu().double() if law.device.type == "mps" else law.double()


def _full(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


_FEW = 256
"""Number of tokens that are ranked first; all are ranked only if these do not reach top_p."""

_WHOLE = 2.0**50
_SLACK = {torch.float32: 1e-6, torch.float64: 1e-9}
"""Tolerance of a sum of probabilities for rounding errors, see ``Sampling``."""


_BITS, _ROOM = 4, 1 << 21
"""Of a value that are searched at once, at most, and numbers that may be computed for it: 16 MiB in float64."""


def _parts(law: Tensor) -> Tensor:
    """Probabilities in integer multiples of 2^-50, as float64: their sums are exact in any order."""
    return (law.double() * _WHOLE).floor()


def _goal(top_p: Tensor, law: Tensor) -> Tensor:
    """Number of parts that reach ``top_p``, at least one."""
    return ((top_p.double() - _SLACK[law.dtype]) * _WHOLE).clamp(min=1.0)


def _keep_top_k(full: Tensor, k: int) -> Tensor:
    return full.masked_fill(~_largest(full, k, full.topk(k, -1).values[..., -1:]), -torch.inf)


def _heated(full: Tensor, sampling: Sampling) -> Tensor:
    return torch.softmax(full if sampling.temperature == 1.0 else full / sampling.temperature, -1)


def _keep_top_p(full: Tensor, sampling: Sampling) -> Tensor:
    law, top_p = _heated(full, sampling), torch.tensor(sampling.top_p, dtype=full.dtype)
    if top_p >= 1.0:  # rounded to the law's precision
        return full
    goal = _goal(top_p, law)
    ranked, ids = full.topk(min(_FEW, full.shape[-1]), -1)
    parts = _parts(law.gather(-1, ids))
    if ranked.shape[-1] < full.shape[-1] and not bool((parts.sum(-1) >= goal).all()):
        ranked, ids = full.sort(dim=-1, descending=True)
        parts = _parts(law.gather(-1, ids))
    kept = (parts.cumsum(-1) - parts < goal).sum(
        -1, keepdim=True
    )  # keep a token if the mass before it is below top_p
    kept = kept.clamp(min=1)  # none where logits are NaN, which is found later
    return full.masked_fill(~_largest(full, kept, ranked.gather(-1, kept - 1)), -torch.inf)


def _largest(values: Tensor, n: int | Tensor, least: Tensor) -> Tensor:
    """Mask of the n largest values, ``[..., V]``; ``least`` is the n-th, and ties with it are taken in order of id."""
    tied = values == least
    places = n - (values > least).sum(-1, keepdim=True)
    return (values > least) | (tied & (tied.cumsum(-1) <= places))


@lru_cache(maxsize=256)
def truncation(sampling: Sampling) -> tuple[int, float, float]:
    """What our kernels need to truncate float32 laws as ``process`` does: top_k, the parts that top_p stands for, 0
    where it keeps all, and min_p."""
    top_p = torch.tensor(sampling.top_p, dtype=torch.float32)
    goal = 0.0 if top_p >= 1.0 else float(_goal(top_p, top_p))
    return sampling.top_k, goal, sampling.min_p


def process_rows(
    logits: Tensor, temperature: Tensor, truncation: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    """``process`` with parameters per row, as tensors: used in captured steps.

    Nothing is sorted: a search finds the smallest value that is kept, some bits at a time, by counting (or summing the
    mass of) the values above it.

    Args:
        logits: ``[rows, V]``.
        temperature: ``[rows]``; 0 means greedy.
        truncation: top_k, top_p and min_p as in ``Sampling``, each ``[rows]``; None: no row truncates. Like the
            temperature they should be float64, which is rounded as ``process`` rounds.
    """
    kept = full = _full(logits)
    greedy = temperature[:, None] == 0
    divisor = torch.where(greedy, 1.0, temperature[:, None].to(full.dtype))
    if truncation is not None:
        top_k, top_p = truncation[0][:, None], truncation[1][:, None].to(full.dtype)
        top_k = torch.where((top_k > 0) & (top_k < full.shape[-1]), top_k, full.shape[-1])
        kept = torch.where(_first_k(full, top_k), full, -torch.inf)
        law = torch.softmax(kept / divisor, -1)
        kept = torch.where((top_p >= 1) | _first_p(kept, law, top_p), kept, -torch.inf)
    law = torch.softmax(kept / divisor, -1)
    if truncation is not None:
        min_p = truncation[2][:, None].to(full.dtype)
        truncated = torch.where(law < min_p * law.amax(-1, keepdim=True), 0.0, law)
        law = torch.where(min_p > 0, truncated / truncated.sum(-1, keepdim=True), law)
    ids = torch.arange(full.shape[-1], device=full.device)
    return torch.where(greedy, (ids == full.argmax(-1, keepdim=True)).to(law.dtype), law)


def _first_k(full: Tensor, k: Tensor) -> Tensor:
    order = _ordered(full)
    # Counted in floating point; exact up to 2^24 tokens.
    least = _least_kept(order, lambda above: above.sum(-1, dtype=torch.float32) >= k)
    return _largest(order, k, least)


def _first_p(full: Tensor, law: Tensor, top_p: Tensor) -> Tensor:
    order, parts, goal = _ordered(full), _parts(law), _goal(top_p, law)
    least = _least_kept(order, lambda above: torch.where(above, parts[:, None], 0.0).sum(-1) >= goal)
    above, tied = order > least, order == least
    mass = torch.where(above, parts, 0.0).sum(-1, keepdim=True)
    each = torch.where(tied, parts, 0.0).amax(-1, keepdim=True)
    return above | (tied & (mass + (tied.cumsum(-1) - 1) * each < goal))


def _ordered(values: Tensor) -> Tensor:
    """Map floating-point values to integers in the same order; +0 and −0 are equal."""
    kind = torch.int32 if values.dtype == torch.float32 else torch.int64
    bits, last = values.view(kind), torch.iinfo(kind)
    bits = torch.where(bits == last.min, 0, bits)
    return torch.where(bits < 0, bits ^ last.max, bits)


def _least_kept(order: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest integer x for which the values >= x are ``enough``, ``[rows, 1]``.

    A step tries all values of some bits at once, as many as fit ``_ROOM``. On a device each is some launches, which
    take longer than what they compute for few rows.

    Args:
        enough: of ``[rows, n, V]``, which values are above each of n, ``[rows, n]``.
    """
    info, room = torch.iinfo(order.dtype), _ROOM // max(1, order.numel())
    each, left = max(1, min(_BITS, (room + 1).bit_length() - 1)), info.bits - 1
    # The lowest integers do not occur (they would be NaN), so the sign alone decides the first bit.
    zero = torch.zeros_like(order[:, :1])
    found = torch.where(enough((order >= zero)[:, None]), zero, info.min)
    parts = torch.arange(1, 2**each, device=order.device, dtype=order.dtype)
    while left > 0:
        left -= (now := min(each, left))
        tried = torch.add(found, parts[: 2**now - 1], alpha=1 << left)
        reached = enough(order[:, None] >= tried[:, :, None])
        if now == 1:
            found = torch.where(reached, tried, found)
        else:
            found = torch.add(found, reached.sum(-1, keepdim=True, dtype=order.dtype), alpha=1 << left)
    return found


def one_hot(weights: Tensor) -> Tensor:
    """All mass on the first largest entry. ``[..., V]`` -> ``[..., V]``."""
    if weights.device.type == "cpu" and weights.dtype == torch.float32:  # zeros of memory that is not touched
        law = torch.from_numpy(np.zeros(weights.shape, np.float32))
    else:
        law = torch.zeros_like(weights)
    return law.scatter_(-1, first_largest(weights), 1.0)


def first_largest(weights: Tensor) -> Tensor:
    """Index of the first largest entry. ``[..., V]`` -> ``[..., 1]``.

    On a CPU numpy finds it about ten times as fast as torch.
    """
    if weights.device.type != "cpu":
        return weights.argmax(-1, keepdim=True)
    return torch.from_numpy(np.asarray(_full(weights).detach().numpy().argmax(-1))).unsqueeze(-1)


def entropy(law: Tensor) -> Tensor:
    """Shannon entropy in nats. ``[..., V]`` -> ``[...]``."""
    terms: Tensor = torch.special.entr(law)
    return terms.sum(-1)


def tv_distance(p: Tensor, q: Tensor) -> Tensor:
    """Total variation ½ Σ|p − q|, in [0, 1]. ``[..., V]`` -> ``[...]``."""
    return (p - q).abs().sum(-1) / 2


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """β = Σ min(p, q) = 1 − TV(p, q): the acceptance rate of exact acceptance. ``[..., V]`` -> ``[...]``."""
    return torch.minimum(p, q).sum(-1)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p‖q) = Σ p ln(p/q) in nats; inf where p has mass and q has none. ``[..., V]`` -> ``[...]``.

    Clamped at 0, because rounding errors could make it negative for nearly equal laws.
    """
    terms = torch.where(p > 0, p * (p.log() - q.log()), torch.zeros_like(p))
    return terms.sum(-1).clamp(min=0)


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence ½KL(p‖M) + ½KL(q‖M), M = (p+q)/2, in [0, ln 2]. ``[..., V]`` -> ``[...]``."""
    mean = (p + q) / 2
    return (kl_divergence(p, mean) + kl_divergence(q, mean)) / 2


def residual(p: Tensor, q: Tensor) -> Tensor:
    """[p − q]₊, normalised: the law of the replacement after an exact rejection (Leviathan et al. 2023, Alg. 1).

    If p = q nothing is left (and a rejection has probability 0); p is returned so that the result is a law.
    """
    excess = (p - q).clamp_(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total, p)
