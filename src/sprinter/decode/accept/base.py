"""Base classes of accept rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sprinter.decode.checks import Parameters
from sprinter.decode.draft import Control
from sprinter.decode.sequence import Siblings, Tree
from sprinter.errors import SprinterError
from sprinter.laws import residual, tv_distance, wide
from sprinter.random import Draws, Purpose

__all__ = [
    "BLIND", "NOTHING", "AcceptRule", "ChainRule", "Ends", "Judge", "LengthRule", "TargetCall", "Verdict", "at_tokens",
    "chances", "control_of", "decide", "emitted", "ends_of", "longest_path", "ratios_at",
]  # fmt: skip


BLIND = frozenset({Siblings.ALONE, Siblings.CHOSEN})
"""``Judge.siblings`` of rules for positions that keep a token for sure or not at all, whatever q is."""
NOTHING: Mapping[str, Tensor] = MappingProxyType({})
_SLACK = 1e-3
"""Largest distance from 1 of the sum of a chain rule's outcomes, which float32 laws may need."""


Ends = tuple[Tensor, Callable[[int], Tensor]]
"""The probability that exactly k tokens of a chain stay ``[n + 1]``, and from k the law ``[V]`` of what follows."""


class Verdict(NamedTuple):
    """The nodes in ``path`` stay, each a child of the previous one; ``token`` follows them.

    ``drifts`` holds TV(π, p) for each of these positions, None if the rule defines no law of single positions.
    ``ratios``: see ``Token.ratio``; empty: 1 where the drift is 0, else unknown. ``trusted``: for the first nodes,
    whether trust decided on them; all others were judged.
    """

    path: Sequence[int]
    token: int
    drifts: Sequence[float | None]
    ratios: Sequence[float | None] = ()
    trusted: Sequence[bool] = ()

    def ratio(self, i: int) -> float | None:
        """The ratio of position i."""
        return self.ratios[i] if self.ratios else 1.0 if self.drifts[i] == 0.0 else None

    @property
    def accepted(self) -> int:
        """Number of draft tokens that stay."""
        return len(self.path)


class TargetCall(NamedTuple):
    """What a target call gives an accept rule.

    Attributes:
        tree: the untrusted draft tokens of the round; may be empty.
        p: the target's laws ``[nodes + 1, V]``: row 0 at ``position`` of the text, row i + 1 after node i.
        raw_p: the target's temperature-1 laws, same shape, or None.
        draws: random numbers, addressed by round and position.
        round: number of the round. position: in tokens from the beginning of the prompt.
        heads: by kind, for those that the rule ``needs``, scores of the target's states, ``[nodes + 1]`` as p.
    """

    tree: Tree
    p: Tensor
    raw_p: Tensor | None
    draws: Draws
    round: int
    position: int
    heads: Mapping[str, Tensor] = NOTHING

    def after(self, n: int) -> TargetCall:
        """The same for a chain without its first n tokens."""
        tree = Tree(self.tree.tokens[n:], self.tree.laws[n:], self.tree.raws[n:])
        heads = {kind: scores[n:] for kind, scores in self.heads.items()}
        raw_p = None if self.raw_p is None else self.raw_p[n:]
        return TargetCall(tree, self.p[n:], raw_p, self.draws, self.round, self.position + n, heads)

    def draw(self, stay: Sequence[float], law_after: Callable[[int], Tensor]) -> tuple[int, int, Tensor]:
        """Number of tokens of a chain that stay, each with its chance if all before it do; the token that follows them,
        and the law ``[V]`` that it was drawn from."""
        kept = self.draws.keep(stay, self.round, self.position)
        accepted = kept.index(False) if False in kept else len(stay)
        law = law_after(accepted)
        return accepted, self.draws.token(law, self.round, self.position + accepted, Purpose.TARGET), law

    def plain(self) -> Verdict:
        """The verdict where nothing was drafted: a token from p."""
        token = self.draws.token(self.p[0], self.round, self.position, Purpose.TARGET)
        return Verdict((), token, [0.0])


class Judge(Parameters, ABC):
    """Base class of all accept rules: judges the untrusted tokens of a round. Derive a rule from one of its subclasses:

    * ``AcceptRule``: judges each position on its own, given b and r;
    * ``ChainRule``: judges a chain as a whole, given the probabilities of all outcomes;
    * ``SeveralRule``: judges several independent drafts of one prefix;
    * ``TreeRule``: judges trees, node by node.
    """

    needs_raw: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    """Kinds of heads on the target's states that the rule reads."""
    max_drafts: ClassVar[int] = 1
    """Maximum number of independent drafts that the rule can judge."""
    draws_by_position: ClassVar[bool] = False
    """Whether the same numbers may be drawn at a position in every round (``PositionDraws``)."""
    siblings: ClassVar[frozenset[Siblings]] = frozenset({Siblings.ALONE})
    """How the siblings of a tree may have been made for the rule to judge it; by default it judges chains alone."""

    @property
    def lossless(self) -> bool:
        """Whether π = p for all p and q."""
        return False

    @property
    def needs_support(self) -> bool:
        """Whether it keeps no draft where q is 0 for a token that p is not, whatever was drafted."""
        return False

    @property
    def lossless_greedy(self) -> bool:
        """Whether π = p whenever p and q are one-hot (temperature 0)."""
        return self.lossless

    @property
    def per_position(self) -> AcceptRule | None:
        """The rule for a single position; None if the rule defines no law of single positions."""
        return None

    def settle(self, taus: Mapping[str, float]) -> Judge:
        """The rule with the heads' thresholds in place of "recorded"; ``taus`` by kind of head."""
        return self

    @abstractmethod
    def judge(self, call: TargetCall) -> Verdict:
        """Return which draft tokens stay, and the token that follows them."""

    def after(self, call: TargetCall, verdict: Verdict) -> Judge:
        """The rule that judges the text's next draft: itself, or one that knows what this one let pass."""
        return self


class AcceptRule(Judge):
    """Keeps x with probability b(x), else draws from r: π(x) = q(x)·b(x) + (1 − Σ q·b)·r(x).

    All laws are ``[..., V]``. ``control`` holds the raw temperature-1 laws for rules that decide on them
    (``needs_raw = True``; None means p and q themselves), and the scores of heads for rules that read some (``needs``:
    only kinds that do not see the token, as b is a function of all tokens).

    A rule whose b is 0 or 1 and does not depend on q can judge trees of chosen siblings too: ``siblings = BLIND``.
    """

    @property
    def per_position(self) -> AcceptRule:
        """The rule itself, which judges position by position."""
        return self

    @abstractmethod
    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b, the probability of keeping each token, in [0, 1]."""

    @abstractmethod
    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r, the law of the replacement after a rejection."""

    def both(self, p: Tensor, q: Tensor, control: Control | None = None) -> tuple[Tensor, Tensor]:
        """(b, r); override it if one computation gives both."""
        return self.keep(p, q, control), self.replacement(p, q, control)

    def law(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """π, the law of the token that this rule emits."""
        return emitted(q, *self.both(p, q, control))

    def drift(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """TV(π, p), ``[...]``; 0 by identity where the rule is lossless."""
        if self.lossless:
            return torch.zeros(p.shape[:-1], dtype=p.dtype)
        return tv_distance(self.law(p, q, control), p)

    def judge(self, call: TargetCall) -> Verdict:
        """Judge the tokens in order; the first rejection drops the rest, and one replacement is drawn.

        If all tokens are kept, a bonus token is drawn from p at the last position.
        """
        tree, p, n = call.tree, call.p, len(call.tree.tokens)
        if n == 0:
            return call.plain()
        if tree.parents is not None:
            return longest_path(self, call)
        control = control_of(call, n)
        if not self.lossless:
            q = torch.stack(list(tree.laws))
            b, r = self.both(p[:n], q, control)
            pi = emitted(q, b, r)
            return decide(call, b, r, pi, tv_distance(pi, p[:n]).tolist())
        # No drift to report, so that the laws are not needed as a whole.
        stay = self.keep_tokens(tree.tokens, p[:n], tree.laws, control).tolist()
        accepted, token, _ = call.draw(
            stay, lambda k: p[n] if k == n else self._replacement_at(k, p, tree.laws, control)
        )
        return Verdict(range(accepted), token, [0.0] * (n + 1))

    def keep_tokens(
        self, tokens: Sequence[int], p: Tensor, laws: Sequence[Tensor], control: Control | None = None
    ) -> Tensor:
        """b at the draft tokens alone, ``[n]``; override it if that needs less than ``keep``.

        Args:
            tokens: the n draft tokens. p: ``[n, V]``. laws: the n laws ``[V]`` that they were drawn from.
        """
        return at_tokens(self.keep(p, torch.stack(list(laws)), control), tokens)

    def _replacement_at(self, i: int, p: Tensor, laws: Sequence[Tensor], control: Control | None) -> Tensor:
        row = slice(i, i + 1)
        row_control = None
        if control is not None:
            heads = {kind: scores[row] for kind, scores in control.heads.items()}
            row_control = Control(control.p[row], control.q[row], heads)
        return self.replacement(p[row], laws[i].unsqueeze(0), row_control)[0]


class ChainRule(Judge):
    """Judges a chain as a whole: how many of its tokens stay may depend on all of them.

    A subclass gives the probabilities of all outcomes for a drafted chain, and the verdict is drawn from them. It
    defines a law of chains, not of positions: ``check_accept`` checks by enumeration that texts keep the target's law.
    """

    @abstractmethod
    def outcomes(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """The probabilities of all verdicts on a chain, ``[n + 1, V]``, with sum 1.

        Entry (k, y) is the probability that the first k tokens stay and y follows them.

        Args:
            tokens: the n draft tokens, n >= 1.
            p: the target's laws ``[n + 1, V]``, row k after the first k tokens.
            q: the draft's laws ``[n, V]``, row k the law that ``tokens[k]`` was drawn from.
            control: for rules with ``needs_raw`` or ``needs``: laws of the same shapes, scores ``[n + 1]``.
        """

    def ends(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Ends:
        """The same in two steps; override it if a round needs only the law after the tokens that stay."""
        outcomes = wide(self.outcomes(tokens, p, q, control))
        ending = outcomes.sum(-1)
        return ending, lambda k: (outcomes[k] / ending[k]).to(p)

    def judge(self, call: TargetCall) -> Verdict:
        """Draw the number of tokens that stay, then the token that follows them."""
        tree, p, n = call.tree, call.p, len(call.tree.tokens)
        if n == 0:
            return call.plain()
        control = control_of(call, n + 1)
        ending, law_after = self.ends(tree.tokens, p, torch.stack(list(tree.laws)), control)
        reached = wide(ending).flip(0).cumsum(0).flip(0).tolist()  # probability that k tokens stay or more
        if not abs(reached[0] - 1.0) < _SLACK:  # NaN too
            raise SprinterError(f"{self}: the chances of all outcomes sum to {reached[0]}, not 1")
        stay = [min(1.0, after / here) if here > 0 else 0.0 for here, after in pairwise(reached)]
        accepted, token, law = call.draw(stay, law_after)
        if self.lossless:
            return Verdict(range(accepted), token, [0.0] * (accepted + 1))
        own, exact = float(ending[accepted]) * float(law[token]), _exactly(tree, p, accepted, token)
        # On the first token, which is in the text wherever it ends.
        return Verdict(range(accepted), token, [None] * (accepted + 1), [exact / own, *[1.0] * accepted])


class LengthRule(ChainRule):
    """A chain rule that is given by how many tokens stay and by the law after them: a subclass defines ``ends``."""

    @abstractmethod
    def ends(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Ends:
        """As in ``ChainRule``."""

    def outcomes(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """The probabilities of all verdicts, ``[n + 1, V]``."""
        ending, law_after = self.ends(tokens, p, q, control)
        return torch.stack([ending[k].to(p) * law_after(k) for k in range(len(tokens) + 1)])


def longest_path(rule: AcceptRule, call: TargetCall) -> Verdict:
    """Judge a tree of chosen siblings by a rule whose b is 0 or 1 whatever q is: the longest path whose tokens all stay
    (Medusa, Cai et al. 2024, section 2.3.1); of equally long ones the first.

    The tree follows from the text alone, so that the law of each position is known: one-hot on the path, and r or p
    after it.
    """
    tree, p, raw_p, draws, round, position, heads = call
    control = Control(p if raw_p is None else raw_p, p, heads) if raw_p is not None or heads else None
    b, r = rule.both(p, p, control)
    parents = list(tree.parents or ())
    above, tokens = [parent + 1 for parent in parents], list(tree.tokens)
    masses, kept = p[above, tokens].tolist(), (b[above, tokens] == 1).tolist()
    reached = [True]  # the text, and each node
    for parent, stays in zip(above, kept, strict=True):
        reached.append(reached[parent] and stays)
    depths = [0, *tree.depths()]
    best = max((at for at, there in enumerate(reached) if there), key=lambda at: (depths[at], -at))
    path, law = tree.path_to(best - 1), p[best] if tree.is_leaf(best - 1) else r[best]
    token = draws.token(law, round, position + len(path), Purpose.TARGET)
    drift, ratio = float(tv_distance(law, p[best])), float(p[best, token] / law[token])
    own = [masses[node] for node in path]
    return Verdict(path, token, [*(1.0 - mass for mass in own), drift], [*own, ratio])


def decide(call: TargetCall, b: Tensor, r: Tensor, pi: Tensor, drifts: Sequence[float]) -> Verdict:
    """Judge the n tokens of a chain in order, given b, r and π of each position ``[n, V]`` and the drifts of π."""
    tree, p, n = call.tree, call.p, len(call.tree.tokens)
    stay = at_tokens(b, tree.tokens).tolist()
    accepted, token, _ = call.draw(stay, lambda k: p[n] if k == n else r[k])
    ratios = [*ratios_at([*tree.tokens[:accepted], token][:n], p, pi), 1.0]
    return Verdict(range(accepted), token, [*drifts, 0.0], ratios)


def control_of(call: TargetCall, rows: int) -> Control | None:
    """What a rule reads beside the laws of a chain: of the target the first ``rows`` rows."""
    tree, p, raw_p, heads = call.tree, call.p, call.raw_p, call.heads
    if raw_p is None and not heads:
        return None
    own, q = (p, tree.laws) if raw_p is None else (raw_p, tree.raws)
    scores = {kind: values[:rows] for kind, values in heads.items()}
    return Control(own[:rows], torch.stack(list(q)), scores)


def ends_of(stay: Tensor) -> Tensor:
    """The probability that exactly k tokens stay, ``[n + 1]``; ``stay [n]``: of each, if all before it do."""
    pad = torch.nn.functional.pad
    return pad(stay.cumprod(0), (1, 0), value=1.0) * pad(1 - stay, (0, 1), value=1.0)


def at_tokens(values: Tensor, tokens: Sequence[int]) -> Tensor:
    """The value of each row at its draft token: ``[n, V]`` -> ``[n]``."""
    return values.gather(-1, torch.tensor(tokens, device=values.device).unsqueeze(-1)).squeeze(-1)


def emitted(q: Tensor, b: Tensor, r: Tensor) -> Tensor:
    """π = q·b + (1 − Σ q·b)·r, ``[..., V]``."""
    kept = q * b
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp(min=0) * r


def chances(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q), 1 where q = 0. ``[..., V]``; p may be any non-negative weights."""
    return torch.where(q > 0, p / q, torch.ones_like(p)).clamp(max=1)


def ratios_at(tokens: Sequence[int], p: Tensor, pi: Tensor) -> list[float]:
    """p(x)/π(x) of each token; ``p`` and ``pi`` are ``[n, V]`` with at least as many rows."""
    n = len(tokens)
    mine = at_tokens(pi[:n], tokens)
    found: list[float] = torch.where(mine > 0, at_tokens(p[:n], tokens) / mine, 1.0).tolist()
    return found


def _exactly(tree: Tree, p: Tensor, accepted: int, token: int) -> float:
    """The probability that the exact rule keeps the first tokens of the draft, no more, and adds ``token``."""
    n, q = len(tree.tokens), torch.stack(list(tree.laws))
    stay = chances(wide(at_tokens(p[:n], tree.tokens)), wide(at_tokens(q, tree.tokens)))
    reached = float(stay[:accepted].prod())
    if accepted == n:
        return reached * float(p[n, token])
    return reached * float(1 - stay[accepted]) * float(residual(p[accepted], q[accepted])[token])
