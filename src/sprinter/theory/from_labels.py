"""Recordings made from labels (``sprinter.training``), which hold both models' 64 likeliest tokens at every position.

``theory`` and ``training`` are on the same floor and do not import each other: the records come as columns by name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sprinter.decode.signals import ENDINGS, prefix_signals, read_signals
from sprinter.errors import UserError
from sprinter.heads.features import DraftStep, read_features
from sprinter.heads.head import Head
from sprinter.laws import one_hot
from sprinter.theory.outcomes import split_rest
from sprinter.theory.recording import DYNAMIC, Author, Recording, static_signals

__all__ = ["from_labels"]

_KINDS: dict[Author, int] = {"draft": 1, "target": 2}
"""Prefix classes (``sprinter.training``) of texts that one model wrote alone."""


def from_labels(
    columns: Mapping[str, Tensor],
    writer: Author,
    *,
    temperature: float = 1.0,
    new_tokens: int | None = None,
    heads: Mapping[str, Head] | None = None,
) -> Recording:
    """The texts of one writer as a recording.

    What lies beyond the 64 likeliest tokens of each model is known by its sums alone, the exact TV among them (see
    ``split_rest``); rules that look at single small probabilities are replayed less exactly than from a probe.

    Args:
        columns: of the records, as ``sprinter.training.records.FIELDS`` names them.
        temperature: that the texts were written at; 1, or 0 for greedy laws.
        new_tokens: limit of the texts; None: the longest.
        heads: by kind, those whose scores methods will read.

    Raises:
        UserError: no text by this writer, a temperature that the labels do not tell laws of.
    """
    if temperature not in (0.0, 1.0):
        raise UserError(
            f"labels tell laws at temperature 1 or 0, and their texts have {temperature}: probe instead"
        )
    here = columns["kind"] == _KINDS[writer]
    if not bool(here.any()):
        raise UserError(f"the labels hold no text by the {writer}: label with all prefix classes")
    columns = {name: values[here] for name, values in columns.items()}
    order = (columns["prompt"].long() * (1 << 20) + columns["step"].long()).argsort()
    columns = {name: values[order] for name, values in columns.items()}
    lengths = _lengths(columns["prompt"], columns["step"])
    raw_p, raw_q, outcomes, tokens = _laws(columns)
    p, q = (raw_p, raw_q) if temperature else (one_hot(raw_p), one_hot(raw_q))
    heads = heads or {}
    features = _features(columns, heads, temperature)
    signals = read_signals(prefix_signals(), q, raw_q, state=columns["hidden"])
    for of in ENDINGS if temperature else ("raw",):  # of the whole vocabulary, as labelled
        signals |= {"entropy" + ENDINGS[of]: columns["entropy"], "max_prob" + ENDINGS[of]: columns["max_q"]}
    signals = {name: values.double() for name, values in signals.items()} | static_signals(heads, features)
    return Recording(
        p, q, raw_p, raw_q,
        tokens=tokens,
        ids=columns["token"].long(),
        signals=signals,
        lengths=lengths,
        prompts=((),) * len(lengths),
        new_tokens=max(lengths) if new_tokens is None else new_tokens,
        writer=writer,
        outcomes=outcomes,
        heads={kind: head for kind, head in heads.items() if kind not in signals},
        features=features,
    )  # fmt: skip


def _lengths(prompts: Tensor, steps: Tensor) -> tuple[int, ...]:
    """Positions of each text; steps must run from 0 without a gap."""
    first = steps == 0
    wanted = torch.where(first, torch.zeros_like(steps), torch.cat([steps[:1], steps[:-1] + 1]))
    if not bool(first[0]) or not bool((steps == wanted).all()):
        raise UserError(
            "the labels lack positions of a text: a replay needs every position from the prompt's end on"
        )
    starts = first.nonzero().squeeze(-1).tolist()
    return tuple(b - a for a, b in zip(starts, [*starts[1:], len(steps)], strict=True))


def _laws(columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(p, q, ids of the outcomes, the tokens' outcomes)."""
    top_p, top_q, ids = columns["top_p"].double(), columns["top_q"].double(), columns["top_ids"].long()
    beyond = 1 - columns["tv"].double() - torch.minimum(top_p, top_q).sum(-1)
    rest_p, rest_q = split_rest((1 - top_p.sum(-1)).clamp(min=0), (1 - top_q.sum(-1)).clamp(min=0), beyond)
    p, q = (torch.cat([top, rest], -1).float() for top, rest in ((top_p, rest_p), (top_q, rest_q)))
    groups = rest_p.shape[-1]
    outcomes = torch.cat([torch.where(ids < 0, -2, ids), torch.full((len(ids), groups), -1)], -1)
    same = outcomes == columns["token"].long().unsqueeze(-1)
    # a token beyond the top is one of the groups: on which side of p = q is known
    better = columns["log_p_token"] >= columns["log_q_token"]
    other = ids.shape[-1] + torch.where(better, groups // 2, 0)
    return p, q, outcomes, torch.where(same.any(-1), same.int().argmax(-1), other)


def _features(
    columns: Mapping[str, Tensor], heads: Mapping[str, Head], temperature: float
) -> dict[str, Tensor]:
    """What heads read of a position, by the names of ``sprinter.heads.features``; entropy and max q are whole."""
    names = {name for head in heads.values() for name in head.features} - DYNAMIC
    whole = {"entropy": columns["entropy"], "max_q": columns["max_q"]}
    step = DraftStep(
        columns["hidden"], law=columns["top_q"], hidden_x=columns["hidden_x"],
        temperature=torch.full_like(columns["entropy"], temperature),
    )  # fmt: skip
    return {name: whole[name] for name in names & whole.keys()} | read_features(
        sorted(names - whole.keys()), step
    )
