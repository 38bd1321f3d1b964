"""Log-likelihoods in batches and chunks against an uncached forward pass per text."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tests.engine.conftest import tiny_llama
from tests.models.tiny import tiny as tiny_model
from tests.models.tiny import uncached
from transformers import PreTrainedModel

import sprinter
from sprinter.bench.quality.likelihood import log_likelihoods, perplexity
from sprinter.engine import scoring
from sprinter.errors import SprinterError, UserError
from sprinter.models.pair import LoadedModel, LoadedPair


def plain(model: PreTrainedModel, prompt: list[int], new: list[int], vocab: int) -> list[float]:
    """One uncached forward pass over one text, laws in float64."""
    logs = torch.log_softmax(uncached(model, [*prompt, *new])[0][:, :vocab].double(), -1)
    return [float(logs[len(prompt) + i - 1, id]) for i, id in enumerate(new)]


def texts_of(vocab: int, count: int, longest: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    chance = random.Random(seed)

    def some(least: int) -> list[int]:
        return [chance.randrange(vocab) for _ in range(chance.randrange(least, longest))]

    return [(some(1), some(0)) for _ in range(count)]


def pair_of(model: PreTrainedModel, vocab: int, context: int = 96) -> sprinter.Pair:
    loaded = LoadedModel(model, "tiny", None, context, vocab, 32, ())
    return sprinter.Pair(LoadedPair(loaded, None, None))


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("positions", [1, 5, 10_000])
def test_batches_and_chunks_change_nothing(
    tiny: sprinter.Pair, batch: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = tiny.models.vocab_size
    monkeypatch.setattr(scoring, "_MEMORY_BYTES", positions * batch * vocab * 12)
    monkeypatch.setattr(scoring, "CHUNK", 7)
    texts = texts_of(vocab, 11, 30)
    found = log_likelihoods(tiny, texts, batch=batch)
    for (prompt, new), values in zip(texts, found, strict=True):
        assert values.dtype == torch.float64 and len(values) == len(new)
        expected = plain(tiny.models.target.model, prompt, new, vocab)
        assert values.tolist() == pytest.approx(expected, abs=2e-4)


@pytest.fixture(scope="module")
def tiny() -> sprinter.Pair:
    return sprinter.Pair(LoadedPair(tiny_llama(1, layers=2), None, None))


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gemma2", "gpt_neo"])
def test_all_runners(kind: str) -> None:
    model = tiny_model(kind)
    pair = pair_of(model, 61)
    texts = texts_of(61, 5, 20, seed=3)
    for (prompt, new), values in zip(texts, log_likelihoods(pair, texts, batch=4), strict=True):
        assert values.tolist() == pytest.approx(plain(model, prompt, new, 61), abs=1e-3)


def test_the_padding_of_a_vocabulary_is_cut_off(tiny: sprinter.Pair) -> None:
    target = tiny.models.target
    small = LoadedModel(tiny_llama(2).model, "draft", None, 96, 20, 16, ())
    pair = sprinter.Pair(LoadedPair(target, small, None))
    text = ([1, 2], [3, 4, 5])
    assert log_likelihoods(pair, [text])[0].tolist() == pytest.approx(
        plain(target.model, *text, 20), abs=2e-4
    )


def test_it_agrees_with_what_decoding_says(builtin_pair: sprinter.Pair) -> None:
    prompt = builtin_pair.tokenizer("The river runs through", verbose=False)["input_ids"]
    out = builtin_pair.generate(prompt, method="autoregressive", max_new_tokens=12, seed=4)
    ids = [token.id for token in out.tokens]
    (values,) = log_likelihoods(builtin_pair, [(prompt, ids)])
    expected = plain(builtin_pair.models.target.model, prompt, ids, builtin_pair.models.vocab_size)
    assert values.tolist() == pytest.approx(expected, abs=1e-3)
    assert perplexity(float(values.sum()), len(ids)) == pytest.approx(math.exp(-sum(expected) / 12), rel=1e-3)


@pytest.fixture(scope="module")
def builtin_pair() -> sprinter.Pair:
    return sprinter.load_pair(device="cpu")


def test_impossible_tokens_stay_finite(tiny: sprinter.Pair) -> None:
    class Never(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).index_fill(-1, torch.tensor([3]), -torch.inf)

    model = tiny_llama(5).model
    head = Never(16, 24, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    (values,) = log_likelihoods(pair_of(model, 24), [([1], [2, 3])])
    assert values[1] == -1e4 and values[0] > -100
    assert math.isfinite(perplexity(-1e6, 1))


def test_broken_logits_are_an_error(tiny: sprinter.Pair) -> None:
    model = tiny_llama(6).model
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(SprinterError, match="not finite"):
        log_likelihoods(pair_of(model, 24), [([1], [2, 3])])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (([], [1]), "needs a prompt"),
        (([1], [24]), "token id 24 is out of range"),
        (([1] * 50, [1] * 47), "context, 96"),
    ],
)
def test_bad_input(tiny: sprinter.Pair, text: tuple[list[int], list[int]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        log_likelihoods(tiny, [text])


def test_nothing_to_score(tiny: sprinter.Pair) -> None:
    assert log_likelihoods(tiny, []) == []
    assert [len(values) for values in log_likelihoods(tiny, [([1], []), ([1], [2])])] == [0, 1]
