"""Texts that follow a grammar: their joint laws, with forced tokens drafted without a model, by enumeration."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from tests.decode.grammars import FollowingPair, ToyGrammar

from sprinter.decode.draft import Record
from sprinter.decode.enumerate import (
    JOINT,
    EnumeratedDraws,
    MarkovPair,
    joint_law,
    run_chain,
    target_joint_law,
)
from sprinter.decode.loop import Limits
from sprinter.decode.spec import METHODS, parse_method
from sprinter.decode.switch import Replayed
from sprinter.random import AddressedDraws

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


@pytest.mark.parametrize("spec", ["opt(epsilon=0.8, gamma=3)", "relaxed(top_k=2, delta=0.4, gamma=3)",
                                  "sprinter(tau=0.3, cap=3)", "certain(signal=margin, cap=6)"])  # fmt: skip
@pytest.mark.parametrize("budget", [0.05, 0.2])
def test_a_budget_is_kept_by_the_laws_that_follow_the_grammar(spec: str, budget: float) -> None:
    """At every token. A trusted one costs the distance of the masked laws, not that of the others."""
    method, used, trusted, far_apart = replace(parse_method(spec), budget=budget), 0.0, 0, 0
    for seed in range(4):
        grammar = ToyGrammar(4, seed)
        pair, plain = FollowingPair(grammar, 2, sharp=2.0), MarkovPair(4, 2, sharp=2.0)
        limits = Limits(80, grammar=grammar, like=torch.empty(0, 4, dtype=torch.float64))
        record = run_chain(method, pair, (0,), limits, AddressedDraws(seed), complete=True)
        drifts = [token.drift or 0.0 for token in record.tokens]
        for n, total in enumerate(accumulate(drifts), 1):
            assert total <= budget * n + 1e-6
        assert record.stats.spent_drift == pytest.approx(sum(drifts)) and record.stats.drift_coverage == 1
        used += sum(drifts) / len(drifts) / 4
        for i, token in enumerate(record.tokens):
            text = (0, *(one.id for one in record.tokens[:i]))
            masked, unmasked = (float((one.p(text) - one.q(text)).abs().sum() / 2) for one in (pair, plain))
            if token.origin == "trusted":
                assert token.drift == pytest.approx(masked, abs=1e-9)
                trusted, far_apart = trusted + 1, far_apart + (abs(masked - unmasked) > 0.01)
    assert used > 0.3 * budget, "it is spent"
    assert bool(trusted) == ("sprinter" in spec or "certain" in spec)
    assert not trusted or far_apart > trusted / 4
