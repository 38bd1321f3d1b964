"""Losses between a draft's laws q and a target's laws p that are known on their most probable tokens.

A target's law is stored as its k most probable tokens; all others are one further outcome, whose probability is what is
left. The divergences are those of the laws on these k + 1 outcomes. They are lower bounds of the full divergences
(merging outcomes lowers neither total variation nor Kullback-Leibler divergence), and equal to them for k = vocabulary.

    tv = 1 − Σ min(p, q): one minus the chance that exact speculative decoding accepts a token (Leviathan et al. 2023,
         arXiv 2211.17192, theorem 3.5; as a loss: DistillSpec, arXiv 2310.08461).
    kl = Σ p ln(p/q), reverse-kl = Σ q ln(q/p), ce = −ln q(x) of the token x that the target drew.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.decode.checks import one_of
from sprinter.errors import UserError

__all__ = ["LOSSES", "Loss", "TopLaws", "divergences", "on_kept", "parse_loss", "tempered"]

LOSSES = ("ce", "kl", "reverse-kl", "tv")
_TERM = re.compile(r"(?:(?P<weight>[0-9.]+(?:e-?[0-9]+)?)\s*\*\s*)?(?P<name>[a-z-]+)")
_LEAST = (
    -30.0
)  # replaces ln q of a token outside a cut vocabulary, which has no gradient: a loss stays finite
_FLOOR = 1e-9  # probability below which ln is not taken: the merged outcome may be empty


@dataclass(frozen=True, slots=True)
class Loss:
    """A weighted sum of losses, as (weight, name) pairs in the order of ``LOSSES``."""

    terms: tuple[tuple[float, str], ...]

    def __str__(self) -> str:
        return "+".join(name if weight == 1 else f"{weight:g}*{name}" for weight, name in self.terms)

    def of(self, parts: dict[str, Tensor]) -> Tensor:
        """The loss of each position ``[n]`` from those of ``divergences``."""
        return torch.stack([weight * parts[name] for weight, name in self.terms]).sum(0)


def parse_loss(text: str) -> Loss:
    """Parse ``tv`` or ``0.1*ce+0.9*tv``.

    Raises:
        UserError: no sum of losses, an unknown name, a weight of 0 or below, or a loss that is given twice.
    """
    found: dict[str, float] = {}
    for part in str(text).split("+"):
        match = _TERM.fullmatch(part.strip())
        if match is None:
            raise UserError(f"loss {text!r} is not a sum of losses: give one such as tv or 0.1*ce+0.9*tv")
        name = match["name"]
        one_of("loss", name, LOSSES)
        try:
            weight = float(match["weight"] or 1.0)
        except ValueError:
            weight = 0.0
        if not 0 < weight < math.inf or name in found:
            wrong = f"{name} twice" if name in found else f"a weight of {match['weight']}"
            raise UserError(f"loss {text!r} has {wrong}: give each loss once, with a weight above 0")
        found[name] = weight
    return Loss(tuple((found[name], name) for name in LOSSES if name in found))


class TopLaws(NamedTuple):
    """Target laws of n positions on their k most probable tokens.

    Attributes:
        ids: ``[n, k]`` token ids.
        probs: ``[n, k]`` their probabilities; what they lack to 1 is that of all other tokens.
        tokens: ``[n]`` the token that follows in the text.
    """

    ids: Tensor
    probs: Tensor
    tokens: Tensor


def divergences(log_q: Tensor, laws: TopLaws) -> dict[str, Tensor]:
    """Every loss at each position.

    Args:
        log_q: ``[n, V]`` log-probabilities of the draft; −inf where q is 0.
        laws: the target's.

    Returns:
        "ce", "kl", "reverse-kl", "tv": ``[n]`` each, nats except tv.
    """
    own = log_q.gather(-1, laws.ids)
    q, p = own.exp(), laws.probs
    q_rest, p_rest = (1 - q.sum(-1)).clamp(min=0), (1 - p.sum(-1)).clamp(min=0)
    ln_q, ln_p = own.clamp(min=_LEAST), p.clamp(min=_FLOOR).log()
    ln_q_rest, ln_p_rest = q_rest.clamp(min=_FLOOR).log(), p_rest.clamp(min=_FLOOR).log()
    return {
        "ce": -log_q.gather(-1, laws.tokens[:, None]).squeeze(-1).clamp(min=_LEAST),
        "kl": (p * (ln_p - ln_q)).sum(-1) + p_rest * (ln_p_rest - ln_q_rest),
        "reverse-kl": (q * (ln_q - ln_p)).sum(-1) + q_rest * (ln_q_rest - ln_p_rest),
        "tv": 1 - torch.minimum(p, q).sum(-1) - torch.minimum(p_rest, q_rest),
    }


def on_kept(log_q: Tensor, laws: TopLaws, ids: Tensor, vocab: int) -> tuple[Tensor, TopLaws]:
    """Laws on a cut vocabulary, with one further column, which stands for all tokens outside: their ln q is −inf.

    Args:
        log_q: ``[n, kept]`` of the kept tokens. laws: of the target, by token id.
        ids: ``[kept]`` the kept tokens. vocab: size of the whole vocabulary.

    Returns:
        ``[n, kept + 1]``, and the target's laws with columns in place of ids.
    """
    column = torch.full((vocab,), len(ids), device=log_q.device)
    column[ids] = torch.arange(len(ids), device=log_q.device)
    outside = log_q.new_full((len(log_q), 1), -math.inf)
    return torch.cat([log_q, outside], -1), TopLaws(column[laws.ids], laws.probs, column[laws.tokens])


def tempered(laws: TopLaws, temperature: float) -> TopLaws:
    """The laws at a temperature T <= 1, from raw ones.

    The sum of p^(1/T) over the tokens that are not among the k is not known. It is taken at its upper bound,
    p_rest · p_k^(1/T − 1) with the least p_k of the k: small where T is well below 1, and exact at T = 1.

    Raises:
        UserError: a temperature of 0 or above 1.
    """
    if not 0 < temperature <= 1:
        raise UserError(
            f"temperature={temperature:g} of a loss is out of range: laws are stored on their most probable tokens, "
            "which tells those at temperatures above 0 and up to 1"
        )
    if temperature == 1:
        return laws
    power = 1 / temperature
    heated = laws.probs.pow(power)
    rest = (1 - laws.probs.sum(-1)).clamp(min=0) * laws.probs.amin(-1).pow(power - 1)
    total = (heated.sum(-1) + rest).clamp(min=_FLOOR)
    return TopLaws(laws.ids, heated / total[:, None], laws.tokens)
