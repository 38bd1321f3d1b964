"""Scoring: make records from both models' logits. Laws are raw (temperature 1) and complete: no label is approximated.

All five divergences, the entropy and the overlap come from a few reductions over the vocabulary: with
H(a, b) = −Σ a ln b, M = (p + q)/2 and H(M) = H(M, M),

    KL(p‖q) = H(p, q) − H(p, p)             KL(q‖p) = H(q, p) − H(q, q)
    JS = H(M) − (H(p, p) + H(q, q))/2       JS of the reference code = ½KL(M‖p) + ½KL(M‖q)
                                              = (H(p, p) + H(q, p) + H(p, q) + H(q, q))/4 − H(M)

``decode.accept.fuzzy.DIVERGENCES`` defines them; the tests compare the two. Positions are processed in blocks that fit
in a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sprinter.laws import Sampling, first_largest, overlap, process
from sprinter.random import AddressedDraws, Purpose
from sprinter.training.prefixes import PrefixRow, Readings
from sprinter.training.records import FIELDS, LAMBDAS, TEMPERATURES, TOP, Records

__all__ = ["law_columns", "make_records"]

_BLOCK = 64  # positions at once
_LEAST = -1e4  # replaces ln 0, so that 0 · ln 0 is 0 and no divergence is infinite
_MOST = 80.0  # maximum of ln q(x)/p(x): e^80 is still a float32
_LABEL_ROW = 1  # draft row in the address of x, which no other draw of a text uses

NewColumns = dict[str, Tensor]


def make_records(rows: Sequence[PrefixRow], readings: Readings, seed: int, eos_ids: Sequence[int]) -> Records:
    """The records of a step, text by text, position by position.

    Positions after an end-of-sequence token are left out.

    Args:
        rows: R texts of N new tokens.
        readings: their logits and hidden states.
        seed: seed of the drawn x.
        eos_ids: token ids that end a text.
    """
    tokens = readings.tokens
    ended = torch.isin(tokens, torch.tensor(list(eos_ids), dtype=torch.long)).cumsum(1)
    alive = torch.cat([torch.ones(len(rows), 1, dtype=torch.bool), ended[:, :-1] == 0], 1)
    at = alive.nonzero()
    step = at[:, 1]
    place = torch.tensor([len(row.ids) for row in rows])[at[:, 0]] + step
    draws = [row.draws(seed) for row in rows]
    parts = []
    for block in range(0, len(at), _BLOCK):
        here = at[block : block + _BLOCK]
        who = [
            (draws[i], int(t))
            for i, t in zip(here[:, 0].tolist(), place[block : block + _BLOCK], strict=True)
        ]
        index = here[:, 0], here[:, 1]
        parts.append(law_columns(readings.q[index], readings.p[index], tokens[index], who))
    index = at[:, 0], step
    own = {
        "prompt": torch.tensor([row.prompt for row in rows])[at[:, 0]],
        "kind": torch.tensor([row.kind for row in rows], dtype=torch.uint8)[at[:, 0]],
        "position": place.int(),
        "step": step.int(),
        "token": tokens[index].int(),
        "hidden": readings.hidden[index].cpu(),
        "hidden_x": readings.hidden[index[0], step + 1].cpu(),
    }
    laws = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Records(**own, **laws)


@torch.inference_mode()
def law_columns(
    q_logits: Tensor, p_logits: Tensor, tokens: Tensor, draws: Sequence[tuple[AddressedDraws, int]]
) -> NewColumns:
    """Columns of a record that depend on the two laws.

    Args:
        q_logits, p_logits: ``[n, vocab]``.
        tokens: ``[n]``, the text's own tokens.
        draws: random numbers and position in the text for each x.

    Returns:
        The columns of ``FIELDS`` that come from laws, on the CPU.
    """
    p_logits = p_logits.to(q_logits.device)
    log_q, log_p = (torch.log_softmax(logits, -1).clamp_(min=_LEAST) for logits in (q_logits, p_logits))
    q, p = log_q.exp(), log_p.exp()
    x, (best, target_best) = _draw(q, draws), (first_largest(one)[:, 0] for one in (q_logits, p_logits))
    columns = {"x": x, "max_q": _at(q, best)} | _divergences(q, p, log_q, log_p) | _tops(q, p)
    for name, ids in (("", x), ("_token", tokens.to(q.device))):
        columns["log_q" + name], columns["log_p" + name] = _at(log_q, ids), _at(log_p, ids)
    overlaps = {1.0: 1 - columns["tv"], 0.0: (best == target_best).to(q.dtype)}
    for at in set(TEMPERATURES) - overlaps.keys():
        overlaps[at] = overlap(
            *(process(logits, Sampling(temperature=at)) for logits in (p_logits, q_logits))
        )
    columns["overlap"] = torch.stack([overlaps[at] for at in TEMPERATURES], -1)
    gap = log_q.sub_(log_p)
    columns["greedy_ratio"] = _at(gap, best).clamp(max=_MOST).exp()
    # Comparisons are written as floats into a buffer that is no longer needed, which saves an allocation and a cast.
    within = (torch.le(gap, math.log(most), out=log_p) for most in LAMBDAS)
    columns["expected_ratio"] = torch.stack([_cross(q, kept) for kept in within], -1)
    return {name: column.to("cpu", FIELDS[name][0]) for name, column in columns.items()}


def _draw(q: Tensor, draws: Sequence[tuple[AddressedDraws, int]]) -> Tensor:
    laws = q.cpu()  # one copy instead of one host synchronisation per draw
    drawn = [
        who.token(law, 0, place, Purpose.DRAFT, _LABEL_ROW)
        for law, (who, place) in zip(laws, draws, strict=True)
    ]
    return torch.tensor(drawn, device=q.device)


def _at(values: Tensor, ids: Tensor) -> Tensor:
    return values.gather(-1, ids[:, None])[:, 0]


def _divergences(q: Tensor, p: Tensor, log_q: Tensor, log_p: Tensor) -> NewColumns:
    """Divergences, overlap and entropy by the formulas in the module's docstring; ``−_cross(a, log b)`` is H(a, b)."""
    mean = torch.add(q, p).div_(2)
    pp, qq, pq, qp = (_cross(a, b) for a, b in ((p, log_p), (q, log_q), (p, log_q), (q, log_p)))
    mm = _cross(mean, mean.log().clamp_(min=_LEAST))
    values = {
        "js": (pp + qq) / 2 - mm,
        "kl": pp - pq,
        "kl_reversed": qq - qp,
        "js_reference": mm - (pp + qp + pq + qq) / 4,
        "tv": 1 - overlap(p, q),
        "entropy": -qq,
    }
    return {name: value.clamp_(min=0) for name, value in values.items()}


def _cross(law: Tensor, logs: Tensor) -> Tensor:
    """Σ law · logs, a negative cross-entropy. ``[n, vocab]`` -> ``[n]``."""
    return torch.mul(law, logs).sum(-1)


def _tops(q: Tensor, p: Tensor) -> NewColumns:
    """Union of both models' most likely tokens: those of q first, then those of p that q's do not include."""
    k = min(TOP, q.shape[-1])
    mine, theirs = _likeliest(q, k), _likeliest(p, k)
    ids = torch.full((len(q), 2 * TOP), -1, device=q.device)
    ids[:, :k] = mine
    twice = torch.zeros_like(q, dtype=torch.bool).scatter_(-1, mine, True).gather(-1, theirs)
    ids[:, TOP : TOP + k] = theirs.masked_fill(twice, -1)
    tops = [law.gather(-1, ids.clamp(min=0)).masked_fill_(ids < 0, 0) for law in (q, p)]
    rests = [(1 - top.sum(-1)).clamp_(min=0) for top in tops]
    return {"top_ids": ids, "top_q": tops[0], "top_p": tops[1], "rest_q": rests[0], "rest_p": rests[1]}


def _likeliest(law: Tensor, k: int) -> Tensor:
    """Ids of the k most likely tokens, ``[n, k]``, in order of falling probability."""
    if law.device.type != "cpu":
        return law.topk(k, -1).indices
    # numpy selects about five times as fast as torch here
    ids = torch.from_numpy(law.numpy().argpartition(-k, -1)[:, -k:])
    order = law.gather(-1, ids).argsort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order)
