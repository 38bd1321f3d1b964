"""All measures of an answer at once, and the check before a run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engine.conftest import tiny_llama

import sprinter
from sprinter.bench.quality import measure as measure_module
from sprinter.bench.quality import rouge as rouge_module
from sprinter.bench.quality import sandbox
from sprinter.bench.quality.likelihood import log_likelihoods, perplexity
from sprinter.bench.quality.measure import Answered, QualitySettings, measure, prepare
from sprinter.bench.quality.metrics import METRICS
from sprinter.bench.quality.rouge import rouge
from sprinter.bench.sample import Sample, SampleCheck
from sprinter.errors import UserError
from sprinter.models.pair import LoadedModel, LoadedPair

EOS = 9


def one(pair: sprinter.Pair, sample: Sample, *answered: Any) -> dict[str, float]:
    """Measures of one answer: prompt ids, answer ids and texts by turn, and the settings."""
    *parts, settings = answered
    return measure(pair, [Answered(sample, *parts)], settings)[0]


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    target = tiny_llama(1)
    ended = LoadedModel(
        target.model, target.id, None, target.context, target.vocab_size, target.hidden_size, (EOS,)
    )
    return sprinter.Pair(LoadedPair(ended, None, None))


def test_one_turn(pair: sprinter.Pair) -> None:
    sample = Sample("1", "qa", ("how many?",), ("it is 42",), SampleCheck("number", "42"))
    values = one(pair, sample, [[1, 2]], [[3, 4, 3, 4, 3, EOS]], ["perhaps 41, or 42."], QualitySettings())
    (logs,) = log_likelihoods(pair, [([1, 2], [3, 4, 3, 4, 3, EOS])])
    assert values["log_likelihood"] == pytest.approx(float(logs.sum()))
    assert values["scored_tokens"] == 6
    assert values["perplexity"] == pytest.approx(perplexity(float(logs.sum()), 6))
    assert values["log_likelihood_per_token"] == pytest.approx(float(logs.mean()))
    assert values["distinct1"] == 2 / 5 and values["longest_repeat"] == 3  # without the end of the text
    assert values["rouge1"] == rouge("perhaps 41, or 42.", "it is 42")["rouge1"] > 0
    assert values["exact_match"] == 1
    assert values.keys() <= METRICS.keys() and "pass_at_1" not in values
    json.dumps(values, allow_nan=False)


def test_turns_are_summed_or_averaged_and_the_last_is_checked(pair: sprinter.Pair) -> None:
    sample = Sample("1", "talk", ("a", "b"), ("one two", "three"), SampleCheck("choice", "B"))
    prompts, answers = [[1], [1, 3, 4, 2]], [[3, 4], [5, 5, 5, 5, 5]]
    values = one(pair, sample, prompts, answers, ["one A", "B three"], QualitySettings())
    first, second = log_likelihoods(pair, list(zip(prompts, answers, strict=True)))
    assert values["log_likelihood"] == pytest.approx(float(first.sum() + second.sum()))
    assert values["scored_tokens"] == 7
    assert values["distinct1"] == pytest.approx((1 + 1 / 5) / 2)
    assert values["repeated4"] == pytest.approx(1 / 2)  # the first turn has no run of four
    assert values["rouge1"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert values["exact_match"] == 1


def test_a_talk_that_was_cut_short_is_not_checked(pair: sprinter.Pair) -> None:
    sample = Sample("1", "talk", ("a", "b"), (), SampleCheck("choice", "B"))
    values = one(pair, sample, [[1]], [[3]], ["B"], QualitySettings())
    assert "exact_match" not in values and "rouge1" not in values and values["scored_tokens"] == 1


def test_batches_change_nothing(pair: sprinter.Pair) -> None:
    sample = Sample("1", "c", ("a",))
    answers = [
        Answered(sample, [[1] * (1 + i % 4)], [[2, 3, i % 20] * (1 + i % 3)], [str(i)]) for i in range(21)
    ]
    together = measure(pair, answers, QualitySettings())
    for answer, values in zip(answers, together, strict=True):
        alone = measure(pair, [answer], QualitySettings())[0]
        assert values == {name: pytest.approx(value, abs=1e-4) for name, value in alone.items()}
    assert measure(pair, [], QualitySettings()) == []


def test_an_empty_answer_has_no_measures(pair: sprinter.Pair) -> None:
    sample = Sample("1", "c", ("a",))
    assert one(pair, sample, [[1]], [[]], [""], QualitySettings()) == {}


def test_what_is_switched_off_is_absent(pair: sprinter.Pair) -> None:
    sample = Sample("1", "c", ("a",), ("b",))
    values = one(pair, sample, [[1]], [[2]], ["b"], QualitySettings(rouge=False, likelihood=False))
    assert values.keys() == {"distinct1", "longest_repeat"}


@pytest.mark.skipif(not sandbox.sys.platform.startswith("linux"), reason="the sandbox is Linux's")
@pytest.mark.parametrize(("answer", "passed"), [("    return x + 1\n", 1.0), ("    return x\n", 0.0)])
def test_code_is_run_where_asked(pair: sprinter.Pair, answer: str, passed: float) -> None:
    check = SampleCheck("code", "def check(f):\n    assert f(1) == 2\n", "more")
    sample = Sample("1", "code", ("def more(x):\n",), (), check)
    asked = QualitySettings(run_code=True, likelihood=False)
    assert one(pair, sample, [[1]], [[2]], [answer], asked)["pass_at_1"] == passed
    assert "pass_at_1" not in one(pair, sample, [[1]], [[2]], [answer], QualitySettings(likelihood=False))
    assert prepare(asked, [sample])["code_network"] in ("namespace", "guard")


def test_code_is_not_run_unless_asked(pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "passes", lambda *args: pytest.fail("it was run"))
    sample = Sample("1", "code", ("def f():\n",), (), SampleCheck("code", "def check(f): pass", "f"))
    assert "pass_at_1" not in one(pair, sample, [[1]], [[2]], ["    pass"], QualitySettings())
    assert prepare(QualitySettings(), [sample])["code_network"] is None


def test_prepare_says_what_is_missing_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rouge_module, "find_spec", lambda name: None)
    with_reference, without = Sample("1", "c", ("a",), ("b",)), Sample("1", "c", ("a",))
    with pytest.raises(UserError, match="rouge-score"):
        prepare(QualitySettings(), [with_reference])
    prepare(QualitySettings(rouge=False), [with_reference])
    prepare(QualitySettings(), [without])
    with pytest.raises(UserError, match="holds no number"):
        prepare(QualitySettings(), [Sample("1", "c", ("a",), (), SampleCheck("number", "many"))])
