"""Drafts apart from the method's: what a grammar forces, and copies in rounds that rest."""

from __future__ import annotations

from collections.abc import Generator

from sprinter.decode.decoding import Answer, Decoding, LoopRequest
from sprinter.decode.drafter import one_hot_rows
from sprinter.decode.lookup import Endings, Lookup
from sprinter.decode.sequence import Tree

__all__ = ["COPIES", "copy_run"]

COPIES = Lookup(n=4, least=3, length=7)  # of rounds that rest
_SEARCHED = 1024  # tokens of a prompt in which rounds that rest look for copies: their time is not charged


def copy_run(decoding: Decoding, copies: bool) -> Generator[LoopRequest, Answer, bool]:
    """A draft apart from the method's: what the grammar forces, else, with ``copies``, what followed the text's last
    tokens earlier (prompt lookup). Returns whether there is one."""
    at_most, text = min(decoding.room, COPIES.length), decoding.sequence.tokens
    if decoding.like is None or at_most < 1:
        return False
    must = None if decoding.limits.grammar is None else (yield from decoding.force())
    found, tokens = [] if must is None else list(must.tokens), list[int]()
    if copies and not found:
        pace = decoding.pace
        pace.endings = pace.endings or Endings(COPIES.n, COPIES.least, _SEARCHED)
        found = pace.endings.look_up(text, at_most)
    if not found:
        return False
    for x in found:
        text.append(x)
        tokens.append(x)
        if decoding.limits.reason(text) is not None or decoding.leaves(text):
            break
    laws = [*one_hot_rows(tokens, decoding.like.shape[-1], decoding.like)]
    decoding.sequence.tree = Tree(tokens, laws, laws if decoding.method.accept.needs_raw else [])
    decoding.pace.exact = True
    return True
