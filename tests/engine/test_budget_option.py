"""``budget`` as an option: in Python, on the command line, in batches and over lossless methods."""

from __future__ import annotations

import json

import pytest

import sprinter
from sprinter.cli import main
from sprinter.decode.spec import parse_method
from sprinter.errors import UserError

PROMPT = "Once upon a time there was"


def test_it_is_a_part_of_the_method(builtin_pair: sprinter.Pair) -> None:
    given = {"max_new_tokens": 60, "seed": 2, "meter": "complete"}
    one = builtin_pair.generate(PROMPT, method="sprinter", budget=0.05, **given)
    two = builtin_pair.generate(PROMPT, method="sprinter(budget=0.05)", **given)
    assert [token.id for token in one.tokens] == [token.id for token in two.tokens]
    assert one.stats.mean_drift is not None and 0 < one.stats.mean_drift < 0.06 and one.stats.budget == 0.05
    assert "budget=0.05" in one.method and "of a budget of 0.05" in one.stats.summary
    facts = one.to_dict()
    again = builtin_pair.generate(facts["prompt"]["token_ids"], **facts["request"])
    assert [token.id for token in again.tokens] == [token.id for token in one.tokens]
    assert facts["stats"]["budget_left"] == pytest.approx(0.05 * 60 - facts["stats"]["spent_drift"])


def test_0_is_exact_and_lossless_methods_are_left_alone(builtin_pair: sprinter.Pair) -> None:
    given = {"max_new_tokens": 40, "seed": 5}
    exact = builtin_pair.generate(
        PROMPT, method="sprinter(tau=0.5)", budget=0, require_lossless=True, **given
    )
    assert exact.stats.lossless and exact.stats.mean_drift == 0
    plain = builtin_pair.generate(PROMPT, method="speculative", **given)
    within = builtin_pair.generate(PROMPT, method="speculative", budget=0.1, **given)
    assert [token.id for token in within.tokens] == [token.id for token in plain.tokens]
    greedy = {"max_new_tokens": 40, "temperature": 0.0}
    one = builtin_pair.generate(PROMPT, method="fuzzy(threshold=1)", budget=0, **greedy)
    two = builtin_pair.generate(PROMPT, method="autoregressive", **greedy)
    assert [token.id for token in one.tokens] == [token.id for token in two.tokens]


def test_a_batch_writes_the_same_texts(builtin_pair: sprinter.Pair) -> None:
    prompts = [PROMPT, "The king said", "In the garden"]
    methods = ["sprinter", "opt(epsilon=0.4)", "certain"]
    budgets = [0.05, 0.1, 0.2]
    batch = builtin_pair.generate_batch(prompts, method=methods, budget=budgets, max_new_tokens=40, rows=2)
    for prompt, method, budget, made in zip(prompts, methods, budgets, batch, strict=True):
        alone = builtin_pair.generate(prompt, method=method, budget=budget, max_new_tokens=40)
        assert [token.id for token in alone.tokens] == [token.id for token in made.tokens]
        assert made.stats.budget == budget


def test_a_tail_spares_target_calls_at_small_budgets(builtin_pair: sprinter.Pair) -> None:
    calls = [
        sum(
            builtin_pair.generate(
                prompt, method=method, budget=0.05, max_new_tokens=96, seed=3
            ).stats.target_calls
            for prompt in (PROMPT, "One day, Sam lost his ball.")
        )
        for method in ("sprinter(tail=3)", "sprinter")
    ]
    assert calls[0] < 0.9 * calls[1]


def test_captured_steps_too(builtin_pair: sprinter.Pair) -> None:
    """The signals that a budget predicts from are declared, so that steps compute them."""
    out = builtin_pair.generate(
        PROMPT, method="draft-only", budget=0.2, max_new_tokens=80, min_new_tokens=80, ahead=4
    )
    assert out.stats.target_calls > 0 and out.stats.trusted > 0


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "-m", "sprinter", "--budget", "0.1", "-n", "24", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["stats"]["budget"] == 0.1 and "budget=0.1" in facts["method"]
    assert main(["generate", PROMPT, "-m", "sprinter", "--budget", "1.5"]) == 2
    error = capsys.readouterr().err
    assert "give a number in [0, 1]" in error and error.count("\n") == 1


def test_a_budget_without_a_method_is_refused(tiny_pair: sprinter.Pair) -> None:
    for budget in (0.05, 1):
        with pytest.raises(
            UserError, match=rf"budget={budget} needs a lossy method: .* such as method 'auto' or 'certain'"
        ):  # which needs no gate
            tiny_pair.stream([1, 2], budget=budget)
    tiny_pair.stream([1, 2], budget=0).close()  # says exact, which it is


def test_bad_values_and_names() -> None:
    with pytest.raises(UserError, match=r"budget='much' is not a number: give one in \[0, 1\]"):
        sprinter.GenerationOptions(budget="much")  # type: ignore[arg-type]
    for spec in ("sprinter", "opt(budget=0.1)", "trust=gate(tau=0.5),cap=4,budget=0.2", "draft-only"):
        made = parse_method(spec).replace(budget=0.05)
        assert made.budget == 0.05 and parse_method(made.name) == made
