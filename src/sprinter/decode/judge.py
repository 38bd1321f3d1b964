"""The target call's verdict on untrusted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule, Judge, SeveralRule
from sprinter.decode.accept.base import emitted
from sprinter.decode.draft import Chain, LawPair, Verdict
from sprinter.laws import tv_distance
from sprinter.random import Draws, Purpose

__all__ = ["judge"]


def judge(
    rule: Judge,
    chains: Sequence[Chain],
    p: Tensor,
    raw_p: Tensor | None,
    draws: Draws,
    round: int,
    position: int,
) -> Verdict:
    """The verdict on one chain, or on several that were drafted after one prefix.

    Args:
        p: ``[n + 1, V]`` for a chain of n tokens, ``[rows, n + 1, V]`` for several; entry i of a row is the target's
            law at ``position + i``. ``raw_p`` likewise, or None.
    """
    if isinstance(rule, SeveralRule):
        return rule.judge(chains, p if p.dim() == 3 else p.unsqueeze(0), draws, round, position)
    assert isinstance(rule, AcceptRule) and len(chains) == 1, f"{rule} judges one chain, not {len(chains)}"
    return _judge_chain(rule, chains[0], p, raw_p, draws, round, position)


def _judge_chain(
    rule: AcceptRule, chain: Chain, p: Tensor, raw_p: Tensor | None, draws: Draws, round: int, position: int
) -> Verdict:
    """Walk the chain in order; the first refusal drops everything after it and one replacement is drawn.

    If none is refused one more token is drawn from p at the last position.
    """
    n = len(chain.tokens)
    if n == 0:
        return Verdict(0, draws.token(p[0], round, position, Purpose.TARGET), [0.0])
    q = torch.stack(list(chain.laws))
    control = LawPair(raw_p[:n], torch.stack(list(chain.raws))) if raw_p is not None else None
    at_tokens = torch.tensor(chain.tokens, device=q.device).unsqueeze(-1)
    b, r = (rule.keep(p[:n], q, control), None) if rule.lossless else rule.both(p[:n], q, control)
    kept = draws.keep(b.gather(-1, at_tokens).squeeze(-1).tolist(), round, position)
    accepted = kept.index(False) if False in kept else n
    if accepted == n:
        law = p[n]
    elif r is not None:
        law = r[accepted]
    else:  # no drift to know: one row's replacement will do
        law = _one_replacement(rule, accepted, p, q, control)
    token = draws.token(law, round, position + accepted, Purpose.TARGET)
    drifts = [0.0] * n if r is None else tv_distance(emitted(q, b, r), p[:n]).tolist()
    return Verdict(accepted, token, [*drifts, 0.0])


def _one_replacement(rule: AcceptRule, i: int, p: Tensor, q: Tensor, control: LawPair | None) -> Tensor:
    row = slice(i, i + 1)
    row_control = LawPair(*(law[row] for law in control)) if control is not None else None
    return rule.replacement(p[row], q[row], row_control)[0]
