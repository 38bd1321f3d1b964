"""The guards ``tail_ratio=`` and ``budget=``: trusted tokens are final at the target call that scores them.

With a ratio a trusted x stays if p(x)/q(x) >= the ratio; else with probability p(x)/q(x), as under the exact rule,
whose replacement follows it. At ratio 0 every trusted token stays, and at 1 each is judged exactly: a point between
SPRINTER and exact speculative decoding whose trust rule only ends the runs. A budget has those judged exactly whose
drift does not fit; if trust looked at the token, by the lossless rule that judges untrusted tokens: two exact rules in
turn, by the token, are not exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule, Judge
from sprinter.decode.accept.base import TargetCall, Verdict, at_tokens, chances, emitted, ratios_at
from sprinter.decode.budget import DriftAccount
from sprinter.decode.draft import Control, LawPair
from sprinter.decode.meter import becomes, control_at, one_sample
from sprinter.laws import residual, tv_distance
from sprinter.random import Purpose

__all__ = ["TailRatio", "review"]


@dataclass(frozen=True, slots=True)
class TailRatio(AcceptRule):
    """b = 1 where p >= ratio q, else p/q; r = [p - q]_+, normalised.

    Args:
        ratio: least p(x)/q(x) at which x stays for sure, in [0, 1].
    """

    ratio: float

    @property
    def lossless(self) -> bool:
        """Whether the ratio is 1: the exact rule."""
        return self.ratio == 1

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b, the probability of keeping each token."""
        return (p >= self.ratio * q).to(p.dtype).maximum(chances(p, q))

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r, the exact rule's."""
        return residual(p, q)


def review(
    ratio: float,
    saw_token: Sequence[bool],
    rule: Judge,
    meter_rule: AcceptRule | None,
    call: TargetCall,
    account: DriftAccount | None = None,
) -> Verdict:
    """Judge a chain whose first tokens were trusted: these by ``TailRatio``, the others, if all stay, by ``rule``.

    Args:
        saw_token: for each trusted token, whether the decision to trust it depended on x. The drift of its position is
            then a one-sample bound: TV(π₀, p) + TV(K, K₀), with π₀ the law of ``meter_rule``, and K and K₀ the laws of
            what becomes of x under ``TailRatio`` and ``meter_rule``.
        meter_rule: the rule that would have judged a trusted token; None: such positions have no drift.
        account: of the text's drift; a trusted token whose drift does not fit is judged exactly (``rule`` is lossless).
    """
    tree, p, raw_p, draws, round, position, heads = call
    n = len(saw_token)
    q, own_p = torch.stack(list(tree.laws[:n])), p[:n]
    b, r = TailRatio(ratio).both(own_p, q)

    def control(i: int) -> Control | None:
        return control_at(i, p, raw_p, q[i], tree.raws[i] if tree.raws else None, heads)

    def sampled(i: int, y: int) -> tuple[float | None, float | None]:
        """(drift, ratio) where the decision saw the token and y is in the text."""
        if meter_rule is None:
            return None, None
        x = tree.tokens[i]
        return one_sample(meter_rule, LawPair(p[i], q[i]), control(i), x, y, becomes(x, b[i], r[i]))

    pi, fits = emitted(q, b, r), [True] * n
    drifts: list[float | None] = list(tv_distance(pi, own_p).tolist())
    if account is not None:
        costs = [sampled(i, tree.tokens[i])[0] if saw else drifts[i] for i, saw in enumerate(saw_token)]
        fits = account.fitting([1.0 if cost is None else cost for cost in costs], position)
        if not all(fits):
            b = torch.where(torch.tensor(fits, device=b.device).unsqueeze(-1), b, chances(own_p, q))
            for i, fit in enumerate(fits):
                if saw_token[i] and not fit:
                    assert meter_rule is not None
                    b[i], r[i] = meter_rule.both(p[i], q[i], control(i))
            pi = emitted(q, b, r)
            drifts = [drift if fit else 0.0 for drift, fit in zip(drifts, fits, strict=True)]
    kept = draws.keep(at_tokens(b, tree.tokens[:n]).tolist(), round, position)
    accepted = kept.index(False) if False in kept else n
    end = [] if accepted == n else [draws.token(r[accepted], round, position + accepted, Purpose.TARGET)]
    texts = [*tree.tokens[:accepted], *end]
    ratios: list[float | None] = list(ratios_at(texts, p, pi))
    for i, y in enumerate(texts):
        if saw_token[i]:
            drifts[i], ratios[i] = sampled(i, y)
    if accepted < n:
        return Verdict(range(accepted), end[0], drifts[: accepted + 1], ratios, fits)
    later = rule.judge(call.after(n))
    ratios += [later.ratio(i) for i in range(later.accepted + 1)]
    return Verdict(range(n + later.accepted), later.token, [*drifts, *later.drifts], ratios, fits)
