"""SPRINTER's theorems: a gate that trusts draft tokens one by one (Zhong et al. 2025, section 3.1, appendices A.1-A.4).

The paper's model: after a target call the draft's first r tokens are acceptable (q(x) <= p(x)) and all later ones are
not; the gate trusts an acceptable token with probability η_TP and an unacceptable one with probability η_FP,
independently of everything else. N is the number of tokens that it trusts before it rejects one.

``cap`` is the maximum length of a run, as in a method: the token at the cap is checked, so at most cap − 1 are trusted.
None is the paper's unlimited run. With η_FP = 1 and no cap, means are infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sprinter.decode.checks import at_least
from sprinter.errors import UserError
from sprinter.theory.numbers import Number, as_tensor, chance, geometric, non_negative

__all__ = [
    "acceptance_rate", "emitted_law", "emitted_tv", "expected_stop_time", "expected_trusted",
    "run_lengths", "sequential_flops", "sequential_speed_up", "sequential_tokens_per_call",
    "speculative_flops", "survival", "trusted_law",
]  # fmt: skip


# --- what is emitted -------------------------------------------------------------------------------------------------
def emitted_law(p: Tensor, q: Tensor, eta_fp: Number) -> Tensor:
    """Theorem 3.1: p_S = (1 − η_FP)·p + η_FP·q, ``[..., V]``, for any η_TP.

    It holds for a gate whose decision is independent of x within the acceptable and within the unacceptable tokens.
    With a gate that reads the prefix alone, each position has the law q (trusted) or p (not trusted) instead.
    """
    rate = chance("eta_fp", eta_fp).unsqueeze(-1)
    return (1 - rate) * p + rate * q


def emitted_tv(eta_fp: Number, tv: Number) -> Tensor:
    """Theorem 3.1: TV(p, p_S) = η_FP·TV(p, q)."""
    return chance("eta_fp", eta_fp) * chance("tv", tv)


def acceptance_rate(eta_fp: Number, tv: Number) -> Tensor:
    """Theorem A.4: the probability that a draft token is kept, trusted or checked, 1 − (1 − η_FP)·TV(p, q)."""
    return 1 - (1 - chance("eta_fp", eta_fp)) * chance("tv", tv)


# --- how many tokens are trusted -------------------------------------------------------------------------------------
def survival(i: Number, eta_tp: Number, eta_fp: Number, r: Number, cap: int | None = None) -> Tensor:
    """P(N >= i): η_TP^i up to i = r, then η_TP^r·η_FP^(i−r); 0 from i = cap on."""
    tp, fp = chance("eta_tp", eta_tp), chance("eta_fp", eta_fp)
    i, r = non_negative("i", i), non_negative("r", r)
    alive = tp ** torch.minimum(i, r) * fp ** (i - r).clamp(min=0)
    return torch.where(i > _most(cap), torch.zeros_like(alive), alive)


def trusted_law(longest: int, eta_tp: Number, eta_fp: Number, r: Number, cap: int | None = None) -> Tensor:
    """Theorem 3.3: P(N = i) for i = 0 ... longest, ``[..., longest + 1]``.

    η_TP^i·(1 − η_TP) for i < r, η_TP^r·η_FP^(i−r)·(1 − η_FP) for i >= r; with a cap the tail's mass is at cap − 1.
    """
    i = torch.arange(longest + 2, dtype=torch.float64)
    tp, fp, after = (as_tensor(value).unsqueeze(-1) for value in (eta_tp, eta_fp, r))
    alive = survival(i, tp, fp, after, cap)
    return alive[..., :-1] - alive[..., 1:]


def expected_trusted(eta_tp: Number, eta_fp: Number, r: Number, cap: int | None = None) -> Tensor:
    """Theorem 3.3: E[N] = (η_TP − η_TP^r)/(1 − η_TP) + η_TP^r/(1 − η_FP), and its limits at rates of 1.

    For random r average the results over r: E[N] at the mean of r would be wrong.
    """
    tp, fp = chance("eta_tp", eta_tp), chance("eta_fp", eta_fp)
    r, most = non_negative("r", r), _most(cap)
    reached = tp**r
    late = geometric(fp, (most - r).clamp(min=0))
    # 0·∞: runs never get that far, so the product is 0
    return geometric(tp, torch.minimum(r, most)) + torch.where(
        reached == 0, torch.zeros_like(late), reached * late
    )


def expected_stop_time(
    eta_tp: Number, eta_fp: Number, r: Number, t_draft: Number, cap: int | None = None
) -> Tensor:
    """Theorem 3.4: E[T_stop] = t_d·(1 + E[N]), in the unit of ``t_draft``: the rejected token is drafted too."""
    return non_negative("t_draft", t_draft) * (1 + expected_trusted(eta_tp, eta_fp, r, cap))


# --- what that is worth ----------------------------------------------------------------------------------------------
def sequential_tokens_per_call(
    eta_tp: Number, eta_fp: Number, r: Number, cap: int | None = None, kept: Number = 0.0
) -> Tensor:
    """Expected tokens per target call: N trusted ones, the checked one or its replacement, and a bonus if it was kept.

    An acceptable token that the gate rejects (N < r) is always kept by the target. ``kept`` is the probability that
    exact acceptance keeps an unacceptable one, E[p(x)/q(x)] over them; 0 is the worst case.
    """
    reached = torch.where(
        as_tensor(r) > _most(cap), torch.zeros(()), chance("eta_tp", eta_tp) ** as_tensor(r)
    )
    return expected_trusted(eta_tp, eta_fp, r, cap) + 2 - (1 - chance("kept", kept)) * reached


def sequential_speed_up(
    eta_tp: Number,
    eta_fp: Number,
    r: Number,
    t_draft: Number,
    t_target: Number,
    t_gate: Number = 0.0,
    cap: int | None = None,
    kept: Number = 0.0,
) -> Tensor:
    """Speed relative to plain decoding: tokens per round · t_t / ((E[N] + 1)·(t_d + t_v) + t_t), times in one unit."""
    tokens = sequential_tokens_per_call(eta_tp, eta_fp, r, cap, kept)
    steps = expected_trusted(eta_tp, eta_fp, r, cap) + 1
    target = non_negative("t_target", t_target)
    return tokens * target / (steps * (as_tensor(t_draft) + as_tensor(t_gate)) + target)


def speculative_flops(gamma: Number, draft: Number, target: Number) -> Tensor:
    """Equation 5: FLOPs of a round of speculative decoding, γ·F_d + γ·F_t."""
    return as_tensor(gamma) * (as_tensor(draft) + as_tensor(target))


def sequential_flops(gamma: Number, draft: Number, gate: Number, target: Number) -> Tensor:
    """Equation 6: γ·F_d + γ·F_v + F_t.

    It counts a forward pass of the target as one token, although the KV cache needs all γ tokens; the count by tokens
    is ``speculative_flops`` plus γ·F_v.
    """
    return as_tensor(gamma) * (as_tensor(draft) + as_tensor(gate)) + as_tensor(target)


def run_lengths(labels: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Law of r from labels: the number of acceptable tokens in a row from a random position on, ``[longest + 1]``.

    Runs that reach the end of a text are censored observations (the estimator of Kaplan and Meier 1958): an entry is a
    product of shares of runs that continue, and the last entry holds the mass of runs of at least that length.

    Args:
        labels: bool ``[texts, positions]``, True where q(x)/p(x) <= λ.
        lengths: number of positions of each text that count; None: all.

    Raises:
        UserError: ``labels`` is not a non-empty table.
    """
    if labels.dim() != 2 or labels.numel() == 0:
        raise UserError("labels must be a table [texts, positions] with at least one entry")
    texts, positions = labels.shape
    lengths = torch.full((texts,), positions) if lengths is None else lengths
    at_least("the shortest text", int(lengths.min()), 1)
    valid = torch.arange(positions) < lengths.unsqueeze(-1)
    run = torch.zeros(texts, dtype=torch.long)
    lasts, at_end = [], []
    for t in reversed(range(positions)):  # the run that begins at t, and whether the text's end censors it
        run = torch.where(labels[:, t] & valid[:, t], run + 1, torch.zeros_like(run))
        lasts.append(run[valid[:, t]])
        at_end.append((run + t == lengths)[valid[:, t]])
    last, censored = torch.cat(lasts), torch.cat(at_end)
    longest = int(last.max())
    ended = torch.bincount(last[~censored], minlength=longest + 1).double()
    at_risk = len(last) - torch.bincount(last + 1, minlength=longest + 2).cumsum(0)[: longest + 1].double()
    # token k + 1 of a run censored at length k was not observed
    at_risk = at_risk - torch.bincount(last[censored], minlength=longest + 1).double()
    share = torch.where(at_risk > 0, ended / at_risk, torch.zeros_like(ended))
    alive = torch.cat([torch.ones(1, dtype=torch.float64), (1 - share).cumprod(0)])
    law = alive[:-1] - alive[1:]
    law[-1] += alive[-1]
    return law


def _most(cap: int | None) -> Tensor:
    """Maximum number of trusted tokens in a run."""
    if cap is None:
        return torch.tensor(torch.inf, dtype=torch.float64)
    at_least("cap", cap, 1)
    return torch.tensor(cap - 1.0, dtype=torch.float64)
