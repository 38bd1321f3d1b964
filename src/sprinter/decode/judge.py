"""The target call's verdict on one chain of untrusted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule
from sprinter.decode.draft import LawPair
from sprinter.random import Draws, Purpose

__all__ = ["Chain", "Verdict", "judge"]


class Chain(NamedTuple):
    """Untrusted draft tokens in order, each with the law it was drawn from (``[V]``) and, if asked for, the raw one."""

    tokens: Sequence[int]
    laws: Sequence[Tensor]
    raws: Sequence[Tensor] = ()


class Verdict(NamedTuple):
    """``accepted`` leading tokens stay, ``token`` follows them; ``drifts`` holds TV(π, p) for each of these positions."""

    accepted: int
    token: int
    drifts: list[float]


def judge(
    rule: AcceptRule, chain: Chain, p: Tensor, raw_p: Tensor | None, draws: Draws, round: int, position: int
) -> Verdict:
    """Walk the chain in order; the first refusal drops everything after it and one replacement is drawn.

    If none is refused one more token is drawn from p at the last position.

    Args:
        p: ``[n + 1, V]`` for n tokens; row i is the target's law at ``position + i``. ``raw_p`` likewise, or None.
    """
    n = len(chain.tokens)
    if n == 0:
        return Verdict(0, draws.token(p[0], round, position, Purpose.TARGET), [0.0])
    q = torch.stack(list(chain.laws))
    control = LawPair(raw_p[:n], torch.stack(list(chain.raws))) if raw_p is not None else None
    at_tokens = torch.tensor(chain.tokens, device=q.device).unsqueeze(-1)
    chances = rule.keep(p[:n], q, control).gather(-1, at_tokens).squeeze(-1).tolist()
    kept = draws.keep(chances, round, position)
    accepted = kept.index(False) if False in kept else n
    if accepted < n:
        row = slice(accepted, accepted + 1)
        row_control = LawPair(*(law[row] for law in control)) if control is not None else None
        law = rule.replacement(p[row], q[row], row_control)[0]
    else:
        law = p[n]
    token = draws.token(law, round, position + accepted, Purpose.TARGET)
    drifts = [0.0] * n if rule.lossless else rule.drift(p[:n], q, control).tolist()
    return Verdict(accepted, token, [*drifts, 0.0])
