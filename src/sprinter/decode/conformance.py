"""Public checks for rules, built-in or from plug-ins: ``check_accept``; ``rule_conformance`` has the others.

Each raises an AssertionError that says which property does not hold. They need no model: identities are checked in
float64 on many pairs of laws, joint laws by enumerating every random draw through the real loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule, ChainRule, Judge, TargetCall, Verdict
from sprinter.decode.accept.base import at_tokens, ends_of
from sprinter.decode.draft import Control
from sprinter.decode.drafter import Drafter, Model
from sprinter.decode.enumerate import (
    JOINT,
    EnumeratedDraws,
    MarkovPair,
    check_same_law,
    joint_law,
    target_joint_law,
)
from sprinter.decode.grow import Root, grow_from
from sprinter.decode.growers import Drawn, Dynamic, Static, Widened
from sprinter.decode.sequence import Siblings, Tree
from sprinter.decode.spec import Method
from sprinter.decode.stop import AdaEdl, Calibrated, Fixed, Svip
from sprinter.kinds import HEAD_KINDS
from sprinter.laws import overlap, tv_distance

__all__ = [
    "check_accept", "check_lossless", "check_same_law", "check_trees", "law_pairs",
]  # fmt: skip

IDENTITY = 1e-12


def law_pairs(count: int = 1000, vocab: int = 8, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """(p, q) in float64, ``[vocab]`` each: edge cases first, then random ones (sharp, flat, truncated, close)."""
    one = torch.eye(vocab, dtype=torch.float64)
    flat = torch.full((vocab,), 1 / vocab, dtype=torch.float64)
    half = torch.cat([torch.ones(vocab // 2), torch.zeros(vocab - vocab // 2)]).double()
    half, other = half / half.sum(), (1 - half) / (1 - half).sum()
    tiny = torch.full((vocab,), 1e-300, dtype=torch.float64)
    tiny[0] = 1.0
    yield from [
        (one[0], one[0]),
        (one[0], one[1]),
        (flat, flat),
        (flat, one[2]),
        (one[2], flat),
        (half, other),
    ]
    yield from [(half, flat), (flat, half), (tiny, flat), (flat, tiny)]
    chance = torch.Generator().manual_seed(seed)
    for i in range(count):
        sharp = 4.0 * float(torch.rand((), generator=chance))
        logits = sharp * torch.randn(2, vocab, generator=chance, dtype=torch.float64)
        if i % 4 == 1:  # truncated supports, as after top-k and top-p
            logits = logits.masked_fill(torch.rand(2, vocab, generator=chance) < 0.4, -torch.inf)
            logits[:, i % vocab] = 0.0
        if i % 4 == 2:  # p close to q
            logits[1] = logits[0] + 0.01 * logits[1]
        p, q = torch.softmax(logits, -1)
        yield p, q


def check_accept(rule: Judge, count: int = 1000, seed: int = 0) -> None:
    """Check that the rule's declared laws are laws, and that its claims (``lossless``, ...) are true.

    The joint law of texts, with every draw enumerated, must be the target's if the rule is lossless, else the law that
    the rule declares.

    * ``AcceptRule``: b is a probability, r a law, and π = q·b + (1 − Σ q·b)·r to 1e-12.
    * ``ChainRule``: outcomes are non-negative and sum to 1, also for draft lengths that depend on the drafted tokens.
    * ``SeveralRule``: the joint law with two drafts is the target's.
    * Rules for trees (``Judge.siblings``): the joint law with trees of each kind is the target's; of a lossy
      ``AcceptRule`` for trees that of its longest paths.

    Raises:
        AssertionError: says which property does not hold.
    """
    if isinstance(rule, AcceptRule):
        _check_positions(rule, count, seed)
        if Siblings.CHOSEN in rule.siblings:
            check_longest(rule)
    elif isinstance(rule, ChainRule):
        _check_chains(rule)
    else:
        assert rule.lossless, (
            f"{rule}: a lossy rule for several drafts or trees needs a law to be checked against"
        )
        for drafter in TREES:
            if drafter.siblings in rule.siblings:
                check_trees(rule, drafter)
        if Siblings.ALONE in rule.siblings:
            check_lossless(Method(accept=rule, stop=Fixed(2)), f"{rule} on chains", longest=3)


def _check_chains(rule: ChainRule) -> None:
    for pair in (MarkovPair(3, 1), MarkovPair(3, 2, sharp=2.0, zeros=0.3), MarkovPair(4, 3, distance=0.1)):
        for n in (1, 2, 3):
            for tokens, p, q in _drafted(pair, n):
                chances = _outcomes(rule, pair, (0,), tokens, p, q)
                assert chances.shape == p.shape, f"{rule}: outcomes must have the shape of p, [n + 1, V]"
                assert float(chances.min()) >= 0, f"{rule}: an outcome has a negative chance"
                gap = abs(float(chances.sum()) - 1)
                assert gap <= IDENTITY * 10, f"{rule}: the chances of all outcomes sum to 1 only within {gap}"
    if rule.lossless:
        # Wide enough that a residual has several tokens: of two tokens, one alone can have p > q.
        for pair in (
            MarkovPair(4, 1),
            MarkovPair(4, 2, sharp=2.0, zeros=0.3),
            MarkovPair(4, 3, distance=0.3),
        ):
            for n in (1, 2, 3):
                law = _declared_law(rule, pair, n, n + 1)
                check_same_law(law, target_joint_law(pair, n + 1), f"{rule}, {n} tokens drafted, on {pair}")
        # Draft runs of fixed length, and of lengths that depend on the drafted tokens' laws.
        for stop, longest in ((Fixed(1), 3), (Fixed(2), 4), (Fixed(3), 4), (Svip(0.6), 4), (AdaEdl(), 3)):
            for ahead in (1, 3):
                check_lossless(Method(accept=rule, stop=stop, cap=3), f"{rule} under {stop}", ahead, longest)
        return
    pair = MarkovPair(seed=6)
    found = joint_law(Method(accept=rule, stop=Fixed(2)), pair, 3)
    check_same_law(found, _declared_law(rule, pair, 2, 3), f"{rule} against its own outcomes")
    target = target_joint_law(pair, 3)
    apart = max(abs(found.get(text, 0.0) - target.get(text, 0.0)) for text in found.keys() | target.keys())
    assert apart > JOINT, f"{rule}: does not claim lossless, but never differs from p"
    if rule.lossless_greedy:
        for seed in range(4):
            greedy = MarkovPair(3, seed, sharp=1e6)  # one-hot laws
            method = Method(accept=rule, stop=Fixed(2))
            check_exact(method, greedy, 4, f"{rule} claims lossless_greedy, on {greedy}")


def _drafted(
    pair: MarkovPair, n: int, text: tuple[int, ...] = (0,)
) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Yield each chain of n tokens that the draft may draw after a text: tokens, p ``[n + 1, V]``, q ``[n, V]``."""
    for tokens in itertools.product(range(pair.vocab), repeat=n):
        q = torch.stack([pair.q((*text, *tokens[:i])) for i in range(n)])
        if all(float(q[i, x]) > 0 for i, x in enumerate(tokens)):
            yield tokens, torch.stack([pair.p((*text, *tokens[:i])) for i in range(n + 1)]), q


def _outcomes(
    rule: AcceptRule | ChainRule,
    pair: MarkovPair,
    text: tuple[int, ...],
    tokens: Sequence[int],
    p: Tensor,
    q: Tensor,
) -> Tensor:
    """The chances of all verdicts on a chain after a text, as in ``ChainRule.outcomes``, of other rules by b and r."""
    n, prefixes = len(tokens), [(*text, *tokens[:i]) for i in range(len(tokens) + 1)]
    if isinstance(rule, ChainRule):
        return rule.outcomes(tokens, p, q, control_of_pair(rule, pair, prefixes, p, q))
    b, r = rule.both(p[:n], q, control_of_pair(rule, pair, prefixes[:n], p[:n], q))
    return ends_of(at_tokens(b, tokens)).unsqueeze(-1) * torch.cat([r, p[n:]])


def _declared_law(
    rule: AcceptRule | ChainRule, pair: MarkovPair, gamma: int, length: int
) -> dict[tuple[int, ...], float]:
    """The law of texts that the outcomes imply for fixed drafts, round by round, without the loop."""
    # By the text and what the rule has become: rounds depend on nothing else that was before.
    reached = [dict[tuple[tuple[int, ...], Judge], float]() for _ in range(length + 1)]
    reached[0][(), rule] = 1.0

    def add(text: tuple[int, ...], now: Judge, chance: float) -> None:
        if chance > 0:
            reached[len(text)][text, now] = reached[len(text)].get((text, now), 0.0) + chance

    for done in range(length):
        drafts = min(gamma, length - done - 1)
        for (text, now), chance in reached[done].items():
            if drafts == 0:  # a text that ends with a plain token of the target
                for x, one in enumerate(pair.p((0, *text)).tolist()):
                    add((*text, x), now, chance * one)
                continue
            assert isinstance(now, type(rule)), f"{rule}: after() gives a rule of another class"
            for tokens, p, q in _drafted(pair, drafts, (0, *text)):
                drawn = math.prod(float(q[i, x]) for i, x in enumerate(tokens))
                chances = _outcomes(now, pair, (0, *text), tokens, p, q)
                call = TargetCall(Tree(tokens, [*q], [*q]), p, p, EnumeratedDraws(), done + 1, done + 1)
                for kept, row in enumerate(chances.tolist()):
                    for x, one in enumerate(row):
                        later = now.after(call, Verdict(range(kept), x, [None] * (kept + 1))) if one else now
                        add((*text, *tokens[:kept], x), later, chance * drawn * one)
    law: dict[tuple[int, ...], float] = {}
    for (text, _), chance in reached[length].items():
        law[text] = law.get(text, 0.0) + chance
    return law


def _check_positions(rule: AcceptRule, count: int, seed: int) -> None:
    pairs = list(law_pairs(count, seed=seed))
    p, q = torch.stack([p for p, _ in pairs]), torch.stack([q for _, q in pairs])
    assert not any(HEAD_KINDS[kind].sees_token for kind in rule.needs), (
        f"{rule}: b is a function of all tokens, and a head that it needs sees one: derive it from ChainRule"
    )
    scores = torch.rand(len(pairs), generator=torch.Generator().manual_seed(seed))
    control = Control(p, q, dict.fromkeys(rule.needs, scores)) if rule.needs else None
    b, r = rule.keep(p, q, control), rule.replacement(p, q, control)
    law = rule.law(p, q, control)
    assert b.shape == r.shape == law.shape == p.shape, (
        f"{rule}: keep, replacement and law must have the shape of p"
    )
    assert bool(((b >= 0) & (b <= 1)).all()), f"{rule}: a keep chance is outside [0, 1]"
    refused = 1 - (q * b).sum(-1, keepdim=True)
    used = refused.squeeze(-1) > IDENTITY  # r is unused where no token is rejected
    assert bool((r[used] >= 0).all()), f"{rule}: a replacement law has a negative entry"
    assert bool(((r[used].sum(-1) - 1).abs() <= IDENTITY).all()), (
        f"{rule}: a replacement law does not sum to 1"
    )
    identity = q * b + refused * torch.where(used.unsqueeze(-1), r, torch.zeros_like(r))
    gap = float((identity - law).abs().max())
    assert gap <= IDENTITY, f"{rule}: law differs from q·b + (1 − Σ q·b)·r by {gap}"
    drift = tv_distance(law, p)
    assert float((rule.drift(p, q, control) - drift).abs().max()) <= IDENTITY, (
        f"{rule}: drift is not TV(π, p)"
    )
    one_hot = (p.amax(-1) == 1) & (q.amax(-1) == 1)
    _check_claim(rule, "lossless", rule.lossless, drift)
    if rule.lossless_greedy:
        assert float(drift[one_hot].max()) <= IDENTITY, f"{rule}: claims lossless_greedy and is not"
    if rule.lossless:
        keep = (q * b).sum(-1)
        assert float((keep - overlap(p, q)).max()) <= IDENTITY, (
            f"{rule}: keeps more than any lossless rule can"
        )
        check_lossless(Method(accept=rule, stop=Fixed(2)), f"{rule}")
    else:
        pair = MarkovPair(seed=6)
        found = joint_law(Method(accept=rule, stop=Fixed(2)), pair, 3)
        check_same_law(found, _declared_law(rule, pair, 2, 3), f"{rule} against its own b and r")


def _check_claim(rule: AcceptRule, name: str, claimed: bool, drift: Tensor) -> None:
    worst = float(drift.max())
    if claimed:
        assert worst <= IDENTITY, f"{rule}: claims {name}, but TV(π, p) reaches {worst}"
    else:
        assert worst > IDENTITY, f"{rule}: does not claim {name}, but never differs from p"


def check_exact(method: Method, pair: MarkovPair, length: int, what: str, ahead: int = 1) -> None:
    """Assert that the joint law of texts on a pair is the target's to 1e-9."""
    check_same_law(joint_law(method, pair, length, ahead=ahead), target_joint_law(pair, length), what)


def check_lossless(method: Method, what: str, ahead: int = 1, longest: int = 4) -> None:
    """Assert that the joint law of texts is the target's to 1e-9, on small pairs with and without zeros."""
    # The number of paths grows fast: only the vocabulary of two tokens allows the longest texts.
    narrow, dense, holey = MarkovPair(2, 1), MarkovPair(3, 1), MarkovPair(3, 2, sharp=2.0, zeros=0.3)
    for pair, length in ((narrow, longest), (dense, 3), (holey, 3)):
        check_exact(method, pair, length, f"{what} on {pair}", ahead)


# --- trees -----------------------------------------------------------------------------------------------------------
TREES: tuple[Drafter, ...] = (
    Static("2x1x1"), Dynamic(2, 3, 4), Drawn("2x1"), Drawn("2x1", replacement=True), Widened("3x2x2x1"),
    Model(drafts=2),
)  # fmt: skip
"""Small drafters of trees, of each kind of siblings."""


def check_trees(rule: Judge, drafter: Drafter) -> None:
    """Check that texts keep the target's law where a rule judges the trees of a drafter, also under a stop rule.

    Raises:
        AssertionError: the joint law of texts is not the target's.
    """
    chance = drafter.siblings is not Siblings.CHOSEN  # multiplies the paths
    narrow, holey, wide = MarkovPair(2, 1), MarkovPair(3, 2, sharp=2.0, zeros=0.3), MarkovPair(4, 3)
    for pair, length in ((narrow, 4 - chance), (holey, 4 - chance), (wide, 2)):
        method = Method(accept=rule, stop=Fixed(3), drafter=drafter)
        check_exact(method, pair, length, f"{rule} with {drafter} on {pair}")
    stops = () if drafter.siblings is Siblings.INDEPENDENT else (Svip(0.6), Calibrated(0.6))
    for stop in stops:
        method = Method(accept=rule, stop=stop, drafter=drafter, cap=3)
        check_exact(method, holey, 3, f"{rule} with {drafter} under {stop}")


def check_longest(rule: AcceptRule) -> None:
    """Check a rule for positions on trees of chosen siblings: the longest path whose tokens all stay, then p or r.

    Raises:
        AssertionError: the joint law of texts is not the one that b and r imply.
    """
    for drafter, pair in itertools.product(
        (Static("2x2"), Dynamic(2, 3, 5)), (MarkovPair(seed=6), MarkovPair(3, 2, sharp=2.0, zeros=0.3))
    ):
        found = joint_law(Method(accept=rule, stop=Fixed(3), drafter=drafter), pair, 4)
        check_same_law(
            found, _declared_longest(rule, drafter, pair, 4), f"{rule} with {drafter} against its b and r"
        )
    if rule.lossless_greedy:
        greedy = MarkovPair(3, 1, sharp=1e6)  # one-hot laws
        method = Method(accept=rule, stop=Fixed(2), drafter=Static("3x3"))
        check_exact(method, greedy, 4, f"{rule} claims lossless_greedy, on trees")


def _declared_longest(
    rule: AcceptRule, drafter: Drafter, pair: MarkovPair, length: int
) -> dict[tuple[int, ...], float]:
    """The law of texts that b and r imply for trees of chosen siblings, by recursion over rounds, without the loop."""
    law: dict[tuple[int, ...], float] = {}

    def go(text: tuple[int, ...], chance: float) -> None:
        if chance == 0 or len(text) == length:
            law[text] = law.get(text, 0.0) + chance
            return
        paths = _chosen(drafter, pair, (0, *text), min(drafter.levels or 0, length - len(text) - 1))
        longest: tuple[int, ...] = ()
        for path in paths:
            stays = all(_decision(rule, pair, (0, *text, *path[:i]))[0][x] == 1 for i, x in enumerate(path))
            longest = path if stays and len(path) > len(longest) else longest
        end = (0, *text, *longest)
        inner = any(path[:-1] == longest for path in paths)
        last = _decision(rule, pair, end)[1] if inner else pair.p(end)
        for x, one in enumerate(last.tolist()):
            go((*text, *longest, x), chance * one)

    go((), 1.0)
    return law


def _decision(rule: AcceptRule, pair: MarkovPair, prefix: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """b and r of a rule after a text, each ``[V]``."""
    p = pair.p(prefix)[None]
    b, r = rule.both(p, p, control_of_pair(rule, pair, [prefix], p, p))
    return b[0], r[0]


def _chosen(drafter: Drafter, pair: MarkovPair, text: tuple[int, ...], depth: int) -> list[tuple[int, ...]]:
    """The paths to the nodes of a tree without chance, in its order."""
    if depth < 1:
        return []
    growth = drafter.growth(Root(EnumeratedDraws(), 1, len(text), depth))
    paths = grow_from(growth, lambda path: pair.q((*text, *path)))
    return [paths[node] for node in growth.kept()]


def control_of_pair(
    rule: Judge, pair: MarkovPair, prefixes: Sequence[tuple[int, ...]], p: Tensor, q: Tensor
) -> Control | None:
    """What the loop gives a rule beside the laws after ``prefixes``, on a pair whose laws are raw laws too."""
    if not (rule.needs_raw or rule.needs):
        return None
    scores = {kind: torch.tensor([pair.score(kind, one) for one in prefixes]) for kind in rule.needs}
    return Control(p, q, scores)
