"""Texts of models whose rotary embedding changes at some length: the target's own up to there, where they end."""

from typing import Any

import pytest
from tests.models.tiny import SWITCH, tiny, uncached, word_tokenizer

from sprinter.engine.pair import Pair, load_pair
from sprinter.errors import ContextLengthError

NEW = 12
PROMPT = [3 + 7 * i % 50 for i in range(SWITCH - NEW)]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(tiny("phi3"), draft=tiny("llama-longrope"), tokenizer=word_tokenizer())


def greedy() -> list[int]:
    text = list(PROMPT)
    while len(text) < SWITCH and (len(text) == len(PROMPT) or text[-1] != 0):
        text.append(int(uncached(tiny("phi3"), text)[0][-1].argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("method", ["autoregressive", "speculative(gamma=3)", "tree(nodes=6, depth=4)"])
def test_a_greedy_text_that_fills_the_context_is_the_targets_own(pair: Pair, method: str) -> None:
    made = pair.generate(PROMPT, method=method, temperature=0, max_new_tokens=NEW)
    assert [token.id for token in made.tokens] == greedy()
    batch = pair.generate_batch([PROMPT, PROMPT[:3]], method=method, temperature=0, max_new_tokens=NEW)
    assert [token.id for token in batch[0].tokens] == greedy()
    assert len(made.tokens) == NEW


def test_a_longer_text_is_refused(pair: Pair) -> None:
    with pytest.raises(
        ContextLengthError, match=f"exceed the context of the target .*, {SWITCH} tokens: use max_new"
    ):
        pair.generate(PROMPT, max_new_tokens=NEW + 1)
    with pytest.raises(ContextLengthError, match="shorten the prompt"):
        pair.generate([*PROMPT, *PROMPT, *PROMPT], max_new_tokens=1)


def test_no_tree_is_read_beyond_the_switch(pair: Pair) -> None:
    """A tree's slots may lie beyond it, its positions may not: they would change the embedding of the whole text."""
    rope, last = tiny("phi3").get_decoder().rotary_emb, []

    def note(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        last.append(int(kwargs.get("position_ids", args[-1]).max()))

    hook = rope.register_forward_pre_hook(note, with_kwargs=True)
    fresh = load_pair(tiny("phi3"), draft=tiny("llama-longrope"), tokenizer=word_tokenizer(), compile=False)
    fresh.generate(PROMPT, method="tree(nodes=6, depth=4)", temperature=1, max_new_tokens=NEW, seed=3)
    hook.remove()
    assert SWITCH - 4 < max(last) < SWITCH
