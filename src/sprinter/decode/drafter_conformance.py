"""The public check for drafters, built-in or from plug-ins."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from sprinter.decode.accept import Traversal
from sprinter.decode.conformance import check_lossless, check_trees
from sprinter.decode.drafter import Context, Drafter, Proposal, Proposer
from sprinter.decode.enumerate import MarkovPair, states_of
from sprinter.decode.grow import Root, grow_from
from sprinter.decode.method import Method
from sprinter.decode.sequence import Siblings
from sprinter.decode.stop import Fixed, Svip
from sprinter.decode.successors import Successors
from sprinter.random import AddressedDraws

__all__ = ["check_drafter"]


def check_drafter(drafter: Drafter) -> None:
    """Check that proposals are valid and repeatable, and that texts keep the target's law under exact acceptance.

    Of a drafter that grows trees: that each node's token has positive probability in its law, that siblings that are
    chosen without chance are all different, that no tree is larger than ``slots`` says, and that texts keep the
    target's law under ``traversal``, which judges every kind of siblings. Small trees are checked sooner: every draw of
    every node is enumerated.

    A proposal is valid if it is no longer than asked for, each row of its laws is a law, and each token has positive
    probability in its law. It is repeatable if two proposers with the same context and the same draws propose the same
    tokens and laws; resuming and replaying a text rely on that.

    Raises:
        AssertionError: says which check failed.
    """
    assert isinstance(drafter, Drafter), f"{drafter!r}: a drafter is a Drafter"
    assert not (drafter.proposer and drafter.drafts > 1), (
        f"{drafter}: several drafts are the draft model's alone"
    )
    if drafter.siblings is not Siblings.ALONE:
        _check_growth(drafter)
        check_trees(Traversal(), drafter)
        return
    if drafter.proposer is not None:
        _check_proposals(drafter, drafter.proposer)
    for stop, ahead in itertools.product((Fixed(2), Fixed(3), Svip(0.6)), (1, 3)):
        method = Method(stop=stop, drafter=drafter, cap=3)
        check_lossless(method, f"{drafter} with ahead={ahead}", ahead, longest=3)


def _check_growth(drafter: Drafter) -> None:
    pair, depth = MarkovPair(4, 2, sharp=2.0, zeros=0.3), min(3, drafter.levels or 3)
    for seed in range(8):
        growth = drafter.growth(Root(AddressedDraws(seed), 1, 1, depth))
        grow_from(growth, lambda path: pair.q((0, *path)))
        tree, _ = growth.finish()
        for node, x in enumerate(tree.tokens):
            law = tree.law(node)
            assert law is None or float(law[x]) > 0, f"{drafter}: a token has no chance in its law"
        if drafter.siblings is Siblings.CHOSEN:
            for own in tree.children():
                tokens = [tree.tokens[node] for node in own]
                assert len(set(tokens)) == len(tokens), (
                    f"{drafter}: siblings that were chosen are the same token"
                )
        most = drafter.slots(depth)
        assert len(tree.tokens) <= most, f"{drafter}: a tree has more than the {most} nodes of slots()"


def _check_proposals(drafter: Drafter, make: Callable[[], Proposer]) -> None:
    """Two proposers are asked alike along random texts, several times a round."""
    for seed in range(32):
        pair, draws, text = MarkovPair(3, seed), AddressedDraws(seed), [0]
        chance, both = torch.Generator().manual_seed(seed), (make(), make())
        for round in range(1, 5):
            for at_most in (1, 3):
                states = {layer: states_of(pair, text[:-1]) for layer in drafter.target_states}
                like = torch.empty(0, dtype=torch.float64)
                successors = Successors()
                laws = [pair.p(tuple(text[: end + 1])) for end in range(len(text))]
                successors.note(text, [int(law.argmax()) for law in laws])
                context = Context(
                    tuple(text), round, at_most, pair.vocab, draws, like, states, successors=successors
                )
                made, again = (proposer.propose(context) for proposer in both)
                _check_proposal(drafter, context, made, again)
                if made is None:  # the draft model drafts what is left of the round
                    break
                text += made.tokens
            text += torch.randint(pair.vocab, (1,), generator=chance).tolist()  # the target's


def _check_proposal(
    drafter: Drafter, context: Context, made: Proposal | None, again: Proposal | None
) -> None:
    """Check a proposal, and that another proposer made the same."""
    assert (made is None) == (again is None), f"{drafter}: proposes one time and not another"
    if made is None or again is None:
        assert drafter.uses_model or drafter.by_heads, (
            f"{drafter}: leaves a proposal to the draft model and says uses_model=False"
        )
        return
    tokens, others, laws = list(made.tokens), list(again.tokens), made.laws
    assert tokens == others, f"{drafter}: proposes {tokens} one time and {others} another"
    assert tokens or drafter.needs_target, f"{drafter}: proposes nothing and says needs_target=False"
    most = context.at_most
    assert len(tokens) <= most, f"{drafter}: proposes {len(tokens)} tokens, asked for {most}"
    assert laws.shape == (len(tokens), context.vocab), f"{drafter}: laws have shape {list(laws.shape)}"
    if tokens:
        assert float(laws.min()) >= 0, f"{drafter}: a law has a negative entry"
        gap = float((laws.double().sum(-1) - 1).abs().max())
        assert gap <= 1e-6, f"{drafter}: a law sums to 1 only within {gap}"
        least = float(laws[range(len(tokens)), tokens].min())
        assert least > 0, f"{drafter}: a token has no chance in the law that it was drawn from"
