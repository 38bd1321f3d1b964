"""The public check for drafters, built-in or from plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from sprinter.decode.accept import Traversal
from sprinter.decode.conformance import check_lossless
from sprinter.decode.drafter import Context, Drafter, Proposal, Proposer
from sprinter.decode.enumerate import MarkovPair
from sprinter.decode.grow import Root, grow_from
from sprinter.decode.method import Method
from sprinter.decode.stop import Fixed, Svip
from sprinter.decode.tree import Siblings
from sprinter.decode.tree_conformance import check_trees
from sprinter.random import AddressedDraws, Draws, Purpose

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
    watched = _WatchedDrafter(drafter)
    for stop in (Fixed(2), Fixed(3), Svip(0.6)):
        for ahead in (1, 3):
            check_lossless(
                Method(stop=stop, drafter=watched, cap=3), f"{drafter} with ahead={ahead}", ahead, longest=3
            )


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


class _WatchedDrafter(Drafter):
    """A drafter whose proposals are checked."""

    def __init__(self, drafter: Drafter) -> None:
        self._of = drafter
        self.greedy, self.target_states = drafter.greedy, drafter.target_states

    @property
    def proposes(self) -> bool:
        return self._of.proposes

    @property
    def uses_model(self) -> bool:
        return self._of.uses_model

    @property
    def by_heads(self) -> bool:
        return self._of.by_heads

    @property
    def needs_target(self) -> bool:
        return self._of.needs_target

    @property
    def proposer(self) -> Callable[[], Proposer] | None:
        make = self._of.proposer
        return make and (lambda: _WatchedProposer(self._of, make(), make()))

    def begin(self, draws: Draws) -> bool:
        return self._of.begin(draws)


class _WatchedProposer(Proposer):
    """Asks two proposers with the same context, and compares and checks their proposals."""

    def __init__(self, drafter: Drafter, first: Proposer, second: Proposer) -> None:
        self._drafter, self._first, self._second = drafter, first, second

    def propose(self, context: Context) -> Proposal | None:
        """The first proposer's answer, checked."""
        drafter, drawn = self._drafter, _Repeated(context.draws)
        made = self._first.propose(replace(context, draws=drawn))
        again = self._second.propose(replace(context, draws=drawn.again()))
        assert (made is None) == (again is None), f"{drafter}: proposes one time and not another"
        if made is None or again is None:
            assert drafter.uses_model, (
                f"{drafter}: leaves a proposal to the draft model and says uses_model=False"
            )
            return made
        tokens, laws = list(made.tokens), made.laws
        assert tokens == list(again.tokens), (
            f"{drafter}: proposes {tokens} one time and {list(again.tokens)} another"
        )
        assert tokens or drafter.needs_target, f"{drafter}: proposes nothing and says needs_target=False"
        assert len(tokens) <= context.at_most, (
            f"{drafter}: proposes {len(tokens)} tokens, asked for {context.at_most}"
        )
        assert laws.shape == (len(tokens), context.vocab), f"{drafter}: laws have shape {list(laws.shape)}"
        if tokens:
            assert float(laws.min()) >= 0, f"{drafter}: a law has a negative entry"
            gap = float((laws.double().sum(-1) - 1).abs().max())
            assert gap <= 1e-6, f"{drafter}: a law sums to 1 only within {gap}"
            least = float(laws[range(len(tokens)), tokens].min())
            assert least > 0, f"{drafter}: a token has no chance in the law that it was drawn from"
        return made


class _Repeated:
    """Draws that are recorded so that they can be replayed."""

    def __init__(self, draws: Draws | None, given: list[object] | None = None) -> None:
        self._draws, self._given, self._next = draws, [] if given is None else given, 0

    def again(self) -> _Repeated:
        """Draws that replay the recorded values in order."""
        return _Repeated(None, self._given)

    def _one(self, ask: Callable[[Draws], object]) -> object:
        if self._draws is not None:
            self._given.append(ask(self._draws))
        self._next += 1
        assert self._next <= len(self._given), "the drafter draws more numbers one time than another"
        return self._given[self._next - 1]

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        """One token id from ``law [V]``."""
        made = self._one(lambda draws: draws.token(law, round, position, purpose, row))
        assert isinstance(made, int)
        return made

    def uniform(self, round: int, position: int, purpose: Purpose, row: int = 0) -> float:
        """One number in [0, 1)."""
        made = self._one(lambda draws: draws.uniform(round, position, purpose, row))
        assert isinstance(made, float)
        return made

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        """For tokens at ``position, position + 1, ...``: u < chance."""
        made = self._one(lambda draws: draws.keep(chances, round, position, row))
        assert isinstance(made, list)
        return made
