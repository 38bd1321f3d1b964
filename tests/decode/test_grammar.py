"""Texts that follow a grammar: their joint laws, with forced tokens drafted without a model, by enumeration."""

from __future__ import annotations

import pytest
import torch
from tests.decode.grammars import FollowingPair, ToyGrammar

from sprinter.decode.draft import Record
from sprinter.decode.enumerate import JOINT, EnumeratedDraws, joint_law, run_chain, target_joint_law
from sprinter.decode.loop import Limits
from sprinter.decode.spec import METHODS, parse_method
from sprinter.decode.switch import Replayed

SMALL = {
    "tree": "tree(expand=2, depth=2, nodes=3)", "static-tree": "static-tree(widths=2x1)",
    "cape": "cape(counts=2x2x2x1, gamma=2)", "traversal": "traversal(widths=2x1)", "medusa": "medusa(nodes=4)",
    "eagle": "eagle(expand=2, depth=2, nodes=3)", "heads": "heads(gamma=2)",
    **{name: f"{name}(drafts=2, gamma=1)" for name in ("batch", "specinfer", "spectr")},
}  # fmt: skip
LOSSLESS = [name for name in METHODS.names() if parse_method(name).lossless()]


def limits(grammar: ToyGrammar) -> Limits:
    return Limits(12, grammar=grammar, like=torch.empty(0, 3, dtype=torch.float64))


def far(found: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float]) -> float:
    return max(abs(found.get(text, 0.0) - wanted.get(text, 0.0)) for text in found.keys() | wanted.keys())


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("seed", [1, 2])
def test_lossless_methods_write_the_targets_texts_that_follow_a_grammar(name: str, seed: int) -> None:
    method, grammar = parse_method(SMALL.get(name, name)), ToyGrammar(seed=seed)
    pair = FollowingPair(grammar, seed, sharp=2.0, zeros=0.3)
    found = joint_law(method, pair, 4, grammar=grammar)
    assert far(found, target_joint_law(pair, 4)) <= JOINT
    assert bool(grammar.asked) == method.drafter.proposes
    assert all(grammar.follows(text) for text, chance in found.items() if chance)


@pytest.mark.parametrize("spec", ["svip(h=0.4)", "speculative(gamma=2)", "tree(expand=2, depth=2, nodes=3)"])
@pytest.mark.parametrize("copying", [(), (2,)])
def test_rounds_that_rest_draft_what_is_forced(spec: str, copying: tuple[int, ...]) -> None:
    grammar = ToyGrammar(seed=3)
    pair = FollowingPair(grammar, 3)
    found = joint_law(
        parse_method(spec), pair, 5, grammar=grammar, switch=lambda _: Replayed((2, 4), copying)
    )
    assert far(found, target_joint_law(pair, 5)) <= JOINT


def test_the_laws_would_tell_a_missing_mask() -> None:
    grammar = ToyGrammar(seed=1)
    pair = FollowingPair(grammar, 1)
    assert far(target_joint_law(pair, 3), target_joint_law(FollowingPair(ToyGrammar(seed=2), 1), 3)) > 0.05


@pytest.mark.parametrize("name", ["speculative(gamma=1)", "heuristic(start=1)"])
def test_forced_tokens_cost_no_draft_steps(name: str) -> None:
    class Alone(ToyGrammar):
        def allowed(self, text: object) -> list[int]:
            return [len(list(text)) % 3]  # type: ignore[call-overload]

    method, records = parse_method(name), dict[bool, Record]()
    for free in (True, False):
        grammar = Alone(free=free)
        pair = FollowingPair(grammar, 1)
        records[free] = run_chain(method, pair, (0,), limits(grammar), EnumeratedDraws())
    assert [token.id for token in records[True].tokens] == [token.id for token in records[False].tokens]
    assert records[False].stats.rounds < records[True].stats.rounds
    assert records[False].stats.mean_drift == 0


def test_lossy_methods_keep_forced_tokens_and_meter_them() -> None:
    grammar = ToyGrammar(seed=2)
    pair = FollowingPair(grammar, 5)
    record = run_chain(
        parse_method("sprinter(tau=0.3, cap=3)"),
        pair,
        (0,),
        limits(grammar),
        EnumeratedDraws(),
        complete=True,
    )
    assert grammar.asked and record.stats.trusted > 0
    assert grammar.follows([token.id for token in record.tokens])
    for i, token in enumerate(record.tokens):
        before = [one.id for one in record.tokens[:i]]
        if token.origin == "trusted" and len(grammar.allowed(before)) == 1:
            assert token.drift == 0
