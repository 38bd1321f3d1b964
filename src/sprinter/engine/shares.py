"""What each row of a forward pass is charged, where rows decide from the costs of passes whether to draft.

A pass over one token of each row is charged to all of them alike. What more tokens cost is charged to the rows that
have more, by the number of their tokens: where shorter rows are padded, the longer ones cause it, and the others wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sprinter.decode.switch import PassShare
from sprinter.engine.backends.base import Drafted, DraftRow, PassInput, PassOutput, TargetRow, TreeRow

__all__ = ["pass_shares", "without_chain"]


def without_chain(given: PassInput, made: PassOutput) -> PassInput:
    """What ran of an input: not the target pass behind a draft, where that was refused. It is an input of its own."""
    if isinstance(given, DraftRow) and given.chain and isinstance(made, Drafted) and made.scored is None:
        return replace(given, chain=None)
    return given


def pass_shares(inputs: Sequence[PassInput], target_pads: bool, draft_pads: bool) -> list[list[PassShare]]:
    """The shares of each of some inputs, which run together: of one kind, or drafts and what the target reads with
    them. A prompt's prefill is not charged.

    Args:
        target_pads, draft_pads: whether a pass of the model costs what the longest row does in each row.
    """
    shares: list[list[PassShare]] = [[] for _ in inputs]
    # What the draft model must read after a rest is not charged: else it reads one token or two before the first one
    # that it drafts, or the nodes of a tree and one more.
    trees = {i: row for i, row in enumerate(inputs) if isinstance(row, TreeRow)}
    if trees:
        levels = {i: min(len(row.feed.tokens), row.count + 1) for i, row in trees.items()}
        _share(shares, levels, False, draft_pads)
        return shares
    steps = {i: row for i, row in enumerate(inputs) if isinstance(row, DraftRow)}
    for step in range(max((row.count for row in steps.values()), default=0)):
        counts = {i: 1 if step else min(2, len(row.tokens)) for i, row in steps.items() if row.count > step}
        _share(shares, counts, False, draft_pads)
    reads = {i: len(row.feed.tokens) for i, row in enumerate(inputs) if isinstance(row, TargetRow)}
    # The target pass behind drafts.
    reads |= {i: len(row.chain.feed.tokens) + row.count for i, row in steps.items() if row.chain is not None}
    if reads:
        _share(shares, reads, True, target_pads)
    # A step whose head reads the state at x runs the model on its own token, and the first one on the text too.
    if at_x := {i: 1 for i, row in steps.items() if row.plan.reads_x and row.tokens}:
        _share(shares, at_x, False, draft_pads)
    return shares


def _share(shares: list[list[PassShare]], counts: dict[int, int], target: bool, pads: bool) -> None:
    """Add the shares of a pass over so many tokens of each row."""
    # A row whose state is known already is counted with the others.
    each = {i: max(1, n) for i, n in counts.items()}
    rows, longest, total = len(each), max(each.values()), sum(each.values())
    tokens, more = float(longest) if pads else total / rows, max(1, total - rows)
    made = {n: PassShare(target, rows, tokens, (n - 1) / more) for n in set(each.values())}
    for i, n in each.items():
        shares[i].append(made[n])
