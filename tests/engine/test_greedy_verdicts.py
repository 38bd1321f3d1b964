"""Greedy verdicts from the most probable tokens alone are those of the loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sprinter
from sprinter.engine import executor
from sprinter.engine.backends import eager, greedy
from sprinter.engine.backends.base import RowInput, TargetRow
from sprinter.laws import Sampling

PROMPTS = "Once upon a time", "The river is long. The river is", "What is a bird?", "One, two, one, two, one,"


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "kernels"])
def pair(request: pytest.FixtureRequest) -> sprinter.Pair:
    if request.param:
        pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
    return sprinter.load_pair(compile=request.param)


def written(pair: sprinter.Pair, method: str, **options: Any) -> list[Any]:
    pair._runtime.forget_texts()
    asked = {"temperature": 0.0, "max_new_tokens": 40, "never_slower": False, **options}
    made = pair.generate_batch(PROMPTS, method=method, seed=3, rows=4, **asked)
    counts = "new_tokens", "target_calls", "rounds", "drafted", "accepted", "checked", "accept_lengths"
    return [(one.text, one.tokens, [getattr(one.stats, name, None) for name in counts]) for one in made]


@pytest.mark.parametrize(
    ("method", "judged"),
    [
        ("speculative(gamma=3)", True),
        ("lookup", True),
        ("drafter=suffix(otherwise=lookup),stop=never,cap=6", True),
        ("drafter=lookup(n=2),stop=fixed(gamma=4),accept=match", True),
        ("sprinter(tau=0.6)", False),
        ("tree(depth=2, nodes=5)", False),
    ],
)
def test_texts_are_those_of_the_loop(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch, method: str, judged: bool
) -> None:
    """Tokens, origins, drifts and counts, in rows that draft different numbers of tokens."""
    seen = list[TargetRow]()
    scores = eager.greedy_scores
    monkeypatch.setattr(eager, "greedy_scores", lambda row, *more: seen.append(row) or scores(row, *more))
    found = written(pair, method)
    assert any(row.drafted for row in seen) == judged
    monkeypatch.setattr(executor, "judges_greedily", lambda *_: False)
    assert written(pair, method) == found


@pytest.mark.parametrize("options", [{"logprobs": 2}, {"logit_bias": {5: 1.5}}, {"temperature": 0.7}])
def test_what_needs_laws_has_them(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    found = written(pair, "speculative(gamma=3)", **options)
    monkeypatch.setattr(executor, "judges_greedily", lambda *_: False)
    assert written(pair, "speculative(gamma=3)", **options) == found


def test_rounds_make_no_law(pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the first of a text, whose form laws of copies take."""
    made = list[int]()
    process = greedy.process
    monkeypatch.setattr(greedy, "process", lambda *given: made.append(1) or process(*given))
    calls = [one[2][1] for one in written(pair, "speculative(gamma=3)")]
    assert len(made) <= len(PROMPTS) < sum(calls)


def test_a_verdict() -> None:
    """The first of equal logits, rows of different lengths, and logits that are not finite."""
    logits = torch.zeros(7, 6)
    for i, token in enumerate((2, 3, 4, 1)):
        logits[i, token] = 1.0
    logits[4, 5], logits[6, 3] = 2.0, math.nan
    (one, first), (two, _), (_, broken) = greedy.likeliest_tokens(logits, [4, 1, 2])
    assert one == [2, 3, 4, 1] and two == [5] and first == [1.0] * 4 and math.isnan(broken[1])

    def verdict(draft: list[int]) -> tuple[int | None, int | None]:
        row = TargetRow(RowInput(0, 7, [9, *draft]), Sampling(temperature=0.0), drafted=len(draft))
        own = logits[: len(draft) + 1]
        scored = greedy.greedy_scores(row, own, one[: len(draft) + 1], 0.0)
        assert callable(scored.laws) and torch.equal(scored.laws(), torch.eye(6)[one[: len(draft) + 1]])
        return scored.accepted, scored.token

    assert verdict([2, 3, 4]) == (3, 1)
    assert verdict([2, 0, 4]) == (1, 3)
    assert verdict([0]) == (0, 2)
    assert verdict([]) == (None, 2)
