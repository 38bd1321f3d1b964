"""Rollouts: the target's own law and its log-probabilities, whatever drafts; weights that are swapped between steps."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.conftest import VOCAB, double_pair, tiny_llama
from tests.engine.table_backend import TableModel
from torch import Tensor

import sprinter
from sprinter.decode.enumerate import EnumeratedDraws
from sprinter.engine import request
from sprinter.errors import SprinterError, UserError
from sprinter.models.pair import LoadedModel, LoadedPair
from sprinter.models.weights import write_weights
from sprinter.random import sample_seed

PROMPTS = [[3, 1, 4, 1, 5, 3, 1], [2, 7, 1, 8, 2, 8]]
METHODS = ("suffix", "autoregressive", "speculative(gamma=3)", "recycle",
           "drafter=suffix(otherwise=model),stop=fixed(gamma=3),accept=match")  # fmt: skip


@pytest.fixture
def pair() -> sprinter.Pair:
    """A pair in float64 with caches of its own."""
    return sprinter.Pair(double_pair().models)


def ids(rollouts: list[sprinter.Rollout]) -> list[list[int]]:
    return [one.token_ids for one in rollouts]


def other_weights(pair: sprinter.Pair) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(5)
    state = pair.models.target.model.state_dict()  # type: ignore[union-attr]
    return {
        name: one + 0.1 * torch.randn(one.shape, generator=noise, dtype=one.dtype)
        for name, one in state.items()
    }


def check_logprobs(pair: sprinter.Pair, rollouts: list[sprinter.Rollout]) -> None:
    """Against one forward pass without a cache over each text."""
    model: Any = pair.models.target.model
    for one in rollouts:
        text = torch.tensor([one.prompt_ids + one.token_ids])
        with torch.inference_mode():
            laws = torch.log_softmax(model(input_ids=text, use_cache=False).logits[0].double(), -1)
        wanted = laws[len(one.prompt_ids) - 1 : -1].gather(-1, text[0, len(one.prompt_ids) :, None])[:, 0]
        assert torch.allclose(torch.tensor(one.logprobs, dtype=torch.float64), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_log_probabilities_are_those_of_a_plain_forward_pass(pair: sprinter.Pair, method: str) -> None:
    made = pair.rollout(PROMPTS, 4, max_new_tokens=20, method=method, seed=1)
    assert [one.prompt_ids for one in made] == [prompt for prompt in PROMPTS for _ in range(4)]
    check_logprobs(pair, made)
    assert all(one.generation.stats.lossless and one.generation.stats.mean_drift == 0 for one in made)


@pytest.mark.parametrize("rows", [1, 2])
def test_the_joint_law_of_two_samples_is_the_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw of both enumerated, the second drafting from the first one's text where that has ended."""
    model, draws = TableModel(3, 1), EnumeratedDraws()
    prompt = (0, 1, 0, 1, 0)
    loaded: Any = LoadedModel(model, "table", None, 4096, 3, 1, ())  # type: ignore[arg-type]
    pair = sprinter.Pair(LoadedPair(loaded, None, None))
    monkeypatch.setattr(request, "PositionDraws", lambda seed, prompt: draws)
    found, drafted = defaultdict[Any, float](float), 0
    while True:
        pair.clear_suffix_cache()
        first, second = pair.rollout([list(prompt)], 2, max_new_tokens=3, rows=rows)
        found[tuple(first.token_ids), tuple(second.token_ids)] += draws.weight
        drafted += second.generation.stats.drafted > first.generation.stats.drafted
        if not draws.next_path():
            break

    def law(text: tuple[int, ...]) -> float:
        chance = 1.0
        for i, x in enumerate(text):
            chance *= float(torch.softmax(model.logits((*prompt, *text[:i])), -1)[x])
        return chance

    one = {text: law(text) for text in product(range(3), repeat=3)}
    assert max(abs(found[a, b] - one[a] * one[b]) for a in one for b in one) < 1e-9
    assert abs(sum(found.values()) - 1) < 1e-9
    assert bool(drafted) == (rows == 1), "one that has ended is drafted from"


def test_a_seed_has_one_set_of_texts(pair: sprinter.Pair) -> None:
    """Those of plain decoding, in any number of rows, with a suffix cache or without; each is repeated alone."""
    options: dict[str, Any] = {"max_new_tokens": 16, "seed": 3}
    made = pair.rollout(PROMPTS, 3, **options)
    again = pair.rollout(PROMPTS, 3, **options)
    assert ids(again) == ids(made) == ids(pair.rollout(PROMPTS, 3, rows=2, **options))
    assert ids(made) == ids(pair.rollout(PROMPTS, 3, method="autoregressive", **options))
    calls, fewer = (sum(one.generation.stats.target_calls for one in each) for each in (made, again))
    assert fewer < 0.7 * calls, "the second time they stood in the suffix cache"
    for one in made:
        assert [
            token.id for token in pair.generate(one.prompt_ids, one.generation.request).tokens
        ] == one.token_ids
    assert ids(pair.rollout(PROMPTS, 3, max_new_tokens=16)) != ids(made)


def test_samples_share_no_random_numbers() -> None:
    seeds = [sample_seed(seed, number) for seed in (-2, 0, 1, 2, 1 << 70) for number in range(500)]
    assert len({*seeds}) == len(seeds) and 0 <= min(seeds) <= max(seeds) < 1 << 63
    drawn = {seed: sample_seed(seed, 0) for seed in (0, 1)}
    assert {*drawn.values()}.isdisjoint(drawn), "nor with a text of the seed itself"


def test_a_prompt_is_read_once(pair: sprinter.Pair) -> None:
    """By the samples that begin together, and by those that begin while another one is written."""
    long = [1 + i % (VOCAB - 1) for i in range(40)]
    for rows in (9, 3):
        pair.clear_prefix_cache()
        made = pair.rollout([long], 9, max_new_tokens=20, stop_token_ids=[3, 5, 7], rows=rows, seed=2)
        cached = [one.generation.stats.cached_tokens for one in made]
        assert sorted(cached) == [0] + 8 * [len(long) - 1]
        assert len({len(one.token_ids) for one in made}) > 2
        check_logprobs(pair, made)


@pytest.mark.parametrize("folder", [False, True])
def test_new_weights_are_decoded_with_and_drafts_stay(
    pair: sprinter.Pair, folder: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 16, "seed": 4}
    before, state = pair.rollout(PROMPTS, 3, **options), other_weights(pair)
    fresh = double_pair().models
    fresh.target.model.load_state_dict(state)  # type: ignore[union-attr]
    fresh.target.model.save_pretrained(tmp_path)  # type: ignore[union-attr]
    pair.reload(tmp_path if folder else state)
    for method in METHODS:
        made = pair.rollout(PROMPTS, 3, method=method, **options)
        check_logprobs(pair, made)
        plain = sprinter.Pair(fresh).rollout(PROMPTS, 3, method=method, **options)
        assert ids(made) == ids(plain) != ids(before)
        if method == "suffix":
            calls = [sum(one.generation.stats.target_calls for one in each) for each in (made, plain)]
            assert pair._runtime.suffixes.of("").tokens().size  # type: ignore[union-attr]
            assert calls[0] <= calls[1], "samples of the weights before are drafted from"


def test_new_weights_of_a_draft_change_no_law(pair: sprinter.Pair) -> None:
    state = {name: one.flip(0) for name, one in pair.models.draft.model.state_dict().items()}  # type: ignore[union-attr]
    options: dict[str, Any] = {"max_new_tokens": 16, "seed": 4, "method": METHODS[-1]}
    before = pair.rollout(PROMPTS, 3, **options)
    pair.clear_suffix_cache()
    pair.reload(draft=state)
    after = pair.rollout(PROMPTS, 3, **options)
    assert ids(after) == ids(before)
    accepted = [sum(one.generation.stats.accepted for one in each) for each in (before, after)]
    assert accepted[0] != accepted[1]


def test_measured_costs_stay_where_only_values_are_new(pair: sprinter.Pair) -> None:
    costs = pair.pass_costs
    pair.reload(other_weights(pair))
    assert vars(pair._runtime)["pass_costs"] == costs
    pair.reload()
    assert "pass_costs" not in vars(pair._runtime)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": 0.7}, "temperature=0.7 draws tokens from another law"),
     ({"top_k": 5}, "top_k=5 draws"), ({"min_p": 0.1}, "min_p=0.1 draws"),
     ({"presence_penalty": 0.5}, "presence_penalty=0.5 draws"), ({"logit_bias": {1: 2.0}}, "logit_bias=.* draws"),
     ({"min_new_tokens": 2}, "min_new_tokens=2 draws"), ({"method": "sprinter"}, "is lossy, and require_lossless"),
     ({"method": "lenient"}, "is lossy"), ({"n": 0}, "n=0 is out of range"), ({"n": True}, "n=True is out of range"),
     ({"prompts": "one text"}, "prompts is one text"), ({"prompts": 5}, "is not a list of prompts")],
)  # fmt: skip
def test_what_changes_the_law_is_refused(
    tiny_pair: sprinter.Pair, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        tiny_pair.rollout(**{"prompts": PROMPTS, "max_new_tokens": 4, **options})


def test_a_method_that_leaves_tokens_unscored_is_an_error(
    tiny_pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sprinter.engine.logprobs.LogProbs._read_scores", lambda *_: None)
    with pytest.raises(SprinterError, match="has left tokens unscored"):
        tiny_pair.rollout(PROMPTS, 1, max_new_tokens=4)


def test_weights_that_do_not_fit_are_refused_and_change_nothing(pair: sprinter.Pair, tmp_path: Path) -> None:
    own: Any = pair.models.target.model.state_dict()  # type: ignore[union-attr]
    kept = {name: one.clone() for name, one in own.items()}
    first, *rest = own
    wrong: list[tuple[Any, str]] = [
        ({**own, "more": own[first]}, "which has no more:"),
        ({name: own[name] + 1 for name in rest}, f"which needs {first} too"),
        (
            {**{name: own[name] + 1 for name in rest}, first: own[first][:3]},
            r"of shape \(24, 16\), not \(3, 16\)",
        ),
        (tmp_path, "has no safetensors files"),
    ]
    for weights, message in wrong:
        with pytest.raises(UserError, match=message):
            pair.reload(weights)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read"):
        pair.reload(tmp_path)
    assert all(torch.equal(one, kept[name]) for name, one in own.items())
    quantised = dataclasses.replace(pair.models.target, quantised="int8")
    with pytest.raises(UserError, match="has quantised weights"):
        write_weights(quantised, own)
    alone = sprinter.Pair(LoadedPair(pair.models.target, None, None))
    with pytest.raises(UserError, match="this pair has no draft"):
        alone.reload(draft=own)


def test_of_tied_weights_one_is_enough() -> None:
    loaded = tiny_llama(1)
    model: Any = loaded.model
    model.lm_head.weight = model.model.embed_tokens.weight
    state = {name: one + 1 for name, one in model.state_dict().items()}
    write_weights(loaded, {name: one for name, one in state.items() if name != "lm_head.weight"})
    assert torch.equal(model.lm_head.weight, state["model.embed_tokens.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(UserError, match="with another weight, and these differ"):
        write_weights(loaded, {**state, "lm_head.weight": state["lm_head.weight"] + 1})
