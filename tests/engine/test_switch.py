"""Texts that outgrow the first of two rotary embeddings: what is written is what the uncached target would write."""

import torch
from tests.models.tiny import SWITCH, tiny, uncached, word_tokenizer

from sprinter.engine.pair import Pair, load_pair

NEW = 12


def pair() -> Pair:
    return load_pair(tiny("phi3"), draft=tiny("llama-longrope"), tokenizer=word_tokenizer())


def greedy(prompt: list[int]) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + NEW and (len(text) == len(prompt) or text[-1] != 0):
        text.append(int(uncached(tiny("phi3"), text)[0][-1].argmax()))
    return text[len(prompt) :]


def prompt_of(length: int) -> list[int]:
    return [3 + 7 * i % 50 for i in range(length)]


def test_a_greedy_text_across_the_switch_is_the_targets_own() -> None:
    for method in ("autoregressive", "speculative(gamma=3)"):
        for length in (SWITCH - 6, SWITCH - 1, SWITCH + 5):
            made = pair().generate(prompt_of(length), method=method, temperature=0, max_new_tokens=NEW)
            assert [token.id for token in made.tokens] == greedy(prompt_of(length)), (method, length)


def test_short_texts_beside_long_ones() -> None:
    prompts = [prompt_of(length) for length in (SWITCH + 8, 4, SWITCH - 5)]
    made = pair().generate_batch(prompts, method="speculative(gamma=3)", temperature=0, max_new_tokens=NEW)
    assert [[token.id for token in one.tokens] for one in made] == [greedy(prompt) for prompt in prompts]


def test_drift_of_a_complete_meter_is_against_the_uncached_target() -> None:
    """Trusted tokens on both sides of the switch are measured against the laws of their own prefixes."""
    prompt = prompt_of(SWITCH - 4)
    made = pair().generate(
        prompt, method="coin(rate=0.9, cap=6)", max_new_tokens=10, meter="complete", seed=1
    )
    text, drifts = list(prompt), []
    for token in made.tokens:
        p, q = (torch.softmax(uncached(tiny(kind), text)[0][-1], -1) for kind in ("phi3", "llama-longrope"))
        if token.origin == "trusted":
            assert token.drift is not None
            drifts.append(abs(float((p - q).abs().sum() / 2) - token.drift))
        text.append(token.id)
    assert len(drifts) > 4 and len(text) > SWITCH + 3
    assert max(drifts) < 1e-4
