"""The joint laws of texts that follow a grammar, through the engine's runs and runners: every draw enumerated."""

from __future__ import annotations

from typing import Any

import pytest
from tests.decode.grammars import ToyGrammar
from tests.engine.joint_laws import PROMPT, Text, distance
from tests.engine.test_runner_laws import CLOSE, OWN, Pair, law_through, with_heads
from torch import Tensor

from sprinter.decode.adjust import Adjustments
from sprinter.decode.enumerate import joint_law, target_joint_law
from sprinter.decode.spec import METHODS, parse_method


class FollowingPair(Pair):
    """The same models, whose laws follow a grammar."""

    def __init__(self, grammar: ToyGrammar) -> None:
        super().__init__(grammar.vocab)
        self._grammar = grammar

    def _read_once(self, which: int, text: Text) -> tuple[Tensor, Tensor]:
        law, hidden = super()._read_once(which, text)
        return self._grammar.law(text[len(PROMPT) :], law), hidden


LOSSLESS = [name for name in sorted(METHODS.names()) if parse_method(OWN.get(name, name)).lossless()]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(3)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("seed", [1, 7])
def test_lossless_methods_write_the_masked_targets_texts(
    pair: Pair, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, trees, copies, blocks and heads: the masked autoregressive law, to 1e-9."""
    method, options, grammar = parse_method(OWN.get(name, name)), dict[str, Any](), ToyGrammar(seed=seed)
    if method.drafter.by_heads:
        method, options = with_heads(pair, method)
    found = law_through(
        "row", pair, method, 3, 1, monkeypatch, adjustments=Adjustments(grammar=grammar), **options
    )
    assert distance(found, target_joint_law(FollowingPair(grammar), 3, prompt=PROMPT)) < CLOSE
    assert grammar.asked or not method.drafter.proposes


@pytest.mark.parametrize("name", ["speculative(gamma=2)", "svip(h=0.3)", "lookup(n=3, gamma=2)"])
@pytest.mark.parametrize(("kind", "ahead"), [("captured", 3), ("crop", 2)])
def test_other_runners_follow_it_too(
    pair: Pair, kind: str, ahead: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = ToyGrammar(seed=4)
    settings = Adjustments(1.3, logit_bias=((1, 0.7),), grammar=grammar)
    method, wanted = parse_method(name), FollowingPair(grammar)
    found = law_through(kind, pair, method, 3, ahead, monkeypatch, adjustments=Adjustments(grammar=grammar))
    assert distance(found, target_joint_law(wanted, 3, prompt=PROMPT)) < CLOSE
    other = law_through(kind, pair, method, 3, ahead, monkeypatch, adjustments=settings)
    assert distance(other, found) > 0.01, "penalties and biases count beside it"
    assert all(grammar.follows(text) for text, chance in other.items() if chance)


@pytest.mark.parametrize("name", ["sprinter(tau=0.5, cap=2)", "draft-only", "opt(epsilon=0.1, gamma=2)"])
def test_lossy_methods_follow_both_masked_laws(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, grammar = parse_method(name), ToyGrammar(seed=4)
    found = law_through("row", pair, method, 3, 1, monkeypatch, adjustments=Adjustments(grammar=grammar))
    wanted = joint_law(method, FollowingPair(grammar), 3, prompt=PROMPT, grammar=grammar)
    assert distance(found, wanted) < CLOSE
    assert all(grammar.follows(text) for text, chance in found.items() if chance)


def test_the_laws_would_tell_a_missing_mask(pair: Pair) -> None:
    wanted = target_joint_law(FollowingPair(ToyGrammar(seed=4)), 3, prompt=PROMPT)
    assert distance(target_joint_law(pair, 3, prompt=PROMPT), wanted) > 0.05
