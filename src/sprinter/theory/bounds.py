"""Bounds on the acceptance rate (SVIP) and on the law of a whole text (Fuzzy Speculative Decoding)."""

from __future__ import annotations

import torch
from torch import Tensor

from sprinter.errors import UserError
from sprinter.laws import kl_divergence
from sprinter.theory.numbers import Number, as_tensor, chance, non_negative

__all__ = ["bretagnolle_huber", "entropy_bound", "fuzzy_bound", "pinsker"]


def pinsker(p: Tensor, q: Tensor) -> Tensor:
    """β >= 1 − sqrt(KL(q‖p)/2) (SVIP, equations 4 and 5; Pinsker), ``[..., V]`` -> ``[...]``; may be negative."""
    return 1 - (kl_divergence(q, p) / 2).sqrt()


def bretagnolle_huber(p: Tensor, q: Tensor) -> Tensor:
    """β >= 1 − sqrt(1 − exp(−KL(q‖p))) (SVIP, Appendix B), ``[..., V]`` -> ``[...]``; always in [0, 1]."""
    return 1 - (-torch.expm1(-kl_divergence(q, p))).sqrt()


def entropy_bound(h: Number, c: Number = 0.15) -> Tensor:
    """SVIP's estimate of Pinsker's bound, 1 − sqrt(c·H(q)), which assumes that H_{q,p} is a multiple of H_q.

    It is not a bound.
    """
    return 1 - (as_tensor(c) * non_negative("h", h)).sqrt()


def fuzzy_bound(
    divergence: str, tokens: Number, threshold: Number, draft_share: Number, other_share: Number | None = None
) -> Tensor:
    """Bound on the divergence between the laws of whole texts, target's and method's (FSD, section 4.2, Appendix B).

    N·share·T, for sampled drafts and divergences of the processed laws. The share of tokens from the draft is counted
    in the target's text for kl = KL(target‖method), and in the method's own text for kl_reversed and tv. For js the
    paper's derivation has a gap: the divergence of whole texts does not split into positions. Splitting it against the
    product of the positions' mixtures gives N·T·(share + other share), one share counted in each of the two texts.

    Args:
        divergence: "kl", "kl_reversed", "tv" or "js".
        tokens: number of tokens N.
        threshold: threshold T of the divergence.
        draft_share: share of tokens from the draft in [0, 1], in the text named above (js: the target's).
        other_share: for js, the share in the method's own text.
    """
    if divergence not in ("kl", "kl_reversed", "tv", "js"):
        raise UserError(f"there is no bound for divergence '{divergence}': give kl, kl_reversed, tv or js")
    share = chance("draft_share", draft_share)
    if divergence == "js":
        if other_share is None:
            raise UserError(
                "the bound for js needs both shares: give other_share, counted in the method's own text"
            )
        share = share + chance("other_share", other_share)
    return non_negative("tokens", tokens) * non_negative("threshold", threshold) * share
