"""Acceptance of what the target draws itself, as in llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sprinter.decode.accept.base import Judge, TargetCall, Verdict
from sprinter.decode.registry import ACCEPT
from sprinter.decode.sequence import Siblings
from sprinter.random import Purpose

__all__ = ["Match"]


@ACCEPT.rule("match")
@dataclass(frozen=True, slots=True)
class Match(Judge):
    """Draw the target's token at each position; a draft token stays where it is that one (llama.cpp,
    ``common_sampler_sample_and_accept_n``).

    Every token of the text is drawn from p, whatever was drafted: with ``draws_by_position`` it is the same token as
    in plain decoding. A draft token stays with p(x), as under the exact rule where its law is one-hot; else with less.
    """

    lossless: ClassVar[bool] = True
    draws_by_position: ClassVar[bool] = True
    siblings: ClassVar[frozenset[Siblings]] = frozenset({Siblings.ALONE, Siblings.CHOSEN})

    def judge(self, call: TargetCall) -> Verdict:
        """Follow the tree as long as it has the token that was drawn."""
        tree, children, path = call.tree, call.tree.children(), list[int]()
        while True:
            at = path[-1] if path else -1
            place = call.position + len(path)
            token = call.draws.token(call.p[at + 1], call.round, place, Purpose.TARGET)
            node = next((one for one in children[at + 1] if tree.tokens[one] == token), None)
            if node is None:
                return Verdict(path, token, [0.0] * (len(path) + 1))
            path.append(node)
