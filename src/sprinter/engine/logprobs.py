"""Log-probabilities of the tokens of a text under both models' raw laws (temperature 1, nothing adjusted or truncated).

The run of a request reports the raw laws of drafts and scores as they are made; tokens are looked up in them once they
are final. So the log-probability of a trusted token is known after the next target call, as its drift is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sprinter.decode.draft import AskScore, Draft, Origin, Token, TopToken

__all__ = ["LogProbs"]

_DRAWN_BY_TARGET = (Origin.BONUS, Origin.TARGET)


class LogProbs:
    """Fills in ``logprob``, ``draft_logprob`` and ``top_logprobs`` of the tokens of one text.

    Args:
        prompt_len: length of the prompt in tokens.
        top: number of most probable tokens to name for each token.
    """

    def __init__(self, prompt_len: int, top: int) -> None:
        self._prompt_len, self._top = prompt_len, top
        self._known = 0  # number of final tokens that were looked up in the draft's laws
        self._drafted: dict[int, Tensor] = {}  # by position, raw q after the text before it
        self._tips: dict[tuple[int, ...], Tensor] = {}  # by path from the text, raw q at the tips of a tree
        self._tree_start = 0
        self._scored: tuple[AskScore, Tensor] | None = None

    def drafted(self, start: int, draft: Draft) -> None:
        """Note the draft model's raw laws; the first token of the draft is at position ``start`` of the text."""
        assert draft.raw is not None
        self._drafted |= {start + i: law for i, law in enumerate(draft.raw)}

    def read_tips(self, start: int, paths: Sequence[tuple[int, ...]], raws: Sequence[Tensor]) -> None:
        """Note the draft model's raw laws at the tips of a tree, which begins at position ``start`` of the text."""
        if () in paths:
            self._tips.clear()
        self._tips |= dict(zip(paths, raws, strict=True))
        self._tree_start = start

    def scored(self, request: AskScore, raw: Tensor) -> None:
        """Note the target's raw laws ``[n, V]`` after each token of the request."""
        self._scored = request, raw

    def settle(self, tokens: Sequence[Token]) -> None:
        """Look up the text's final tokens, after the loop has used the last answer."""
        if self._tips:
            path = tuple(token.id for token in tokens[self._tree_start - self._prompt_len :])
            known = {i: self._tips.get(path[:i]) for i in range(len(path))}
            self._drafted |= {self._tree_start + i: law for i, law in known.items() if law is not None}
        for place in range(self._known, len(tokens)):
            token, law = tokens[place], self._drafted.pop(self._prompt_len + place, None)
            if law is not None and token.origin not in _DRAWN_BY_TARGET:
                token.draft_logprob = float(_log(law[token.id]))
        self._known = len(tokens)
        if self._scored is not None:
            self._read_scores(tokens, *self._scored)

    def _read_scores(self, tokens: Sequence[Token], asked: AskScore, raw: Tensor) -> None:
        self._scored = None
        if not asked.closing:  # what was drafted beyond the final tokens is discarded
            self._drafted, self._tips = {}, {}
        linear = asked.end - asked.start
        first = asked.start + 1 - self._prompt_len  # the token that row 0 is the law of
        scored = [(i, i) for i in range(linear) if first + i < len(tokens)]
        tail = _follow(tokens[first + linear - 1 :], asked.nodes, asked.parents)
        scored += [(linear - 1 + i, linear + node) for i, node in enumerate(tail) if i]
        found = [tokens[first + i] for i, _ in scored]
        rows = [row for _, row in scored]
        # Of a chain they are consecutive: no copy of laws over large vocabularies.
        consecutive = rows == [*range(rows[0], rows[0] + len(rows))] if rows else False
        laws = raw[rows[0] : rows[-1] + 1] if consecutive else raw[rows]
        ids = torch.tensor([token.id for token in found], device=raw.device)
        own = _log(laws.gather(-1, ids[:, None])).squeeze(-1).tolist()
        best, best_ids = (each.tolist() for each in _log_top(laws, self._top))
        for token, logprob, values, names in zip(found, own, best, best_ids, strict=True):
            token.logprob = logprob
            token.top_logprobs = [TopToken(*one) for one in zip(names, values, strict=True)]


def _follow(tokens: Sequence[Token], nodes: Sequence[int], parents: Sequence[int]) -> list[int]:
    """For each of ``tokens``, the node of a tree that it follows (-1: the text), as long as they are in the tree."""
    child: dict[tuple[int, int], int] = {}
    same: list[int] = []  # siblings with equal tokens are one place
    for node, (parent, x) in enumerate(zip(parents, nodes, strict=True)):
        same.append(child.setdefault((same[parent] if parent >= 0 else -1, x), node))
    followed: list[int] = []
    at: int | None = -1
    for token in tokens:
        if at is None:
            break
        followed.append(at)
        at = child.get((at, token.id))
    return followed


def _log(probabilities: Tensor) -> Tensor:
    """Logarithms; those of probabilities below the smallest normal number (ln 1.2e-38 = -87.3) are that number's."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def _log_top(laws: Tensor, n: int) -> tuple[Tensor, Tensor]:
    if n == 1:  # topk sorts, also for one
        values, indices = laws.max(-1, keepdim=True)
    else:
        values, indices = laws.topk(n, -1)
    return _log(values), indices
