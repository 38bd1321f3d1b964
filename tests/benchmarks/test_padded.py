"""A padded target has the laws of the model, to the bit, and its passes cost several times as much."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch
from benchmarks.real.padded import PaddedModel, padded

import sprinter
from sprinter.models.choose import make_runner
from sprinter.models.pair import builtin_paths


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair(builtin_paths()["target"], device="cpu", dtype="float32")


def test_its_laws_are_the_models_to_the_bit(pair: sprinter.Pair) -> None:
    loaded = pair.models.target
    runners = [make_runner(model, max_len=64, leaves=4) for model in (loaded.model, PaddedModel(loaded, 4))]
    text = torch.arange(20, 44)[None]
    feeds = ((text[:, :16], None), (text[:, 16:20], [[15, 16, 16, 17]]), (text[:, 20:22], [[18, 18]]))
    for tokens, parents in feeds:
        plain, other = (runner.extend(tokens, parents=parents) for runner in runners)
        assert plain.logits is not None and other.logits is not None
        assert torch.equal(plain.logits, other.logits) and torch.equal(plain.hidden, other.hidden)
    for runner in runners:
        runner.commit_path(0, [16, 18, 20])
        runner.rewind([18])
    plain, other = (runner.extend(text[:, 22:]) for runner in runners)
    assert runners[1].lengths == [20] and plain.logits is not None and other.logits is not None
    assert torch.equal(plain.logits, other.logits)


def test_texts_are_the_same_and_a_pass_costs_about_the_factor(pair: sprinter.Pair) -> None:
    four = padded(pair, builtin_paths()["draft"], 4, device="cpu", dtype="float32")
    for method in ("autoregressive", "speculative(gamma=3)", "tree(nodes=6)"):
        out = four.generate("The river", method=method, temperature=0.0, max_new_tokens=12)
        plain = pair.generate("The river", method="autoregressive", temperature=0.0, max_new_tokens=12)
        assert out.text == plain.text
    runners = [make_runner(one.models.target.model, max_len=300) for one in (pair, four)]
    text = torch.arange(256)[None] + 20
    spent: tuple[list[float], list[float]] = ([], [])
    for runner in runners:
        runner.extend(text, logits=False)
    for _ in range(15):
        for seconds, runner in zip(spent, runners, strict=True):
            begun = time.process_time()
            runner.extend(text[:, :4])
            seconds.append(time.process_time() - begun)
            runner.rewind([256])
    assert 2.5 < median(spent[1]) / median(spent[0]) < 6, "seconds of the processor"
