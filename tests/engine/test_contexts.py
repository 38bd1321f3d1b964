"""What bounds a request: the models that it asks, and the memory that can be had."""

import weakref

import pytest
from tests.models.tiny import CONTEXT, fresh, tiny, word_tokenizer

import sprinter
from sprinter.errors import UserError
from sprinter.models import memory

SHORT = 40
PROMPT = [3 + i % 50 for i in range(SHORT)]


@pytest.fixture
def uneven() -> sprinter.Pair:
    """A pair whose draft holds 40 tokens only."""
    draft = fresh("gpt2")
    draft.config.n_positions = SHORT
    return sprinter.load_pair(tiny("llama"), draft=draft, tokenizer=word_tokenizer())


@pytest.mark.parametrize("method", ["autoregressive", "lookup"])
def test_the_draft_does_not_bound_a_method_that_never_asks_it(uneven: sprinter.Pair, method: str) -> None:
    made = uneven.generate(PROMPT, method=method, max_new_tokens=8, seed=1)
    assert made.stats.draft_steps == 0 or method == "lookup"
    assert [
        len(one.tokens) for one in uneven.generate_batch([PROMPT], method=method, max_new_tokens=8, seed=1)
    ] == [len(made.tokens)]
    with sprinter.Engine(uneven, rows=2) as engine:
        number = engine.add(PROMPT, method=method, max_new_tokens=8, seed=1)
        short = engine.add(PROMPT[:9], method="speculative(gamma=2)", max_new_tokens=8)
        done = engine.finish()
    assert [token.id for token in done[number].tokens] == [token.id for token in made.tokens]
    assert done[short].tokens


def test_the_models_that_are_asked_bound_a_request(uneven: sprinter.Pair) -> None:
    with pytest.raises(
        UserError, match=r"context of the draft GPT2LMHeadModel, 40 tokens: use max_new_tokens=2"
    ):
        uneven.generate(PROMPT[:38], method="speculative", max_new_tokens=8)
    with pytest.raises(
        UserError, match=rf"context of the target .*, {CONTEXT} tokens: use max_new_tokens=56"
    ):
        uneven.generate(PROMPT, method="autoregressive", max_new_tokens=100)
    with pytest.raises(UserError, match=f"give 1 to {CONTEXT} tokens"):
        sprinter.Engine(uneven, max_len=CONTEXT + 1)


def test_a_pair_the_other_way_round() -> None:
    target = fresh("gpt2")
    target.config.n_positions = SHORT
    pair = sprinter.load_pair(target, draft=tiny("llama"), tokenizer=word_tokenizer())
    assert pair.generate(PROMPT, method="draft-only", max_new_tokens=8).tokens
    with pytest.raises(UserError, match="context of the target GPT2LMHeadModel, 40 tokens"):
        pair.generate(PROMPT, method="draft-only", max_new_tokens=8, meter="complete")


def test_idle_caches_are_used_or_dropped_before_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = sprinter.load_pair(tiny("llama"), draft=tiny("gpt2"), tokenizer=word_tokenizer())
    with sprinter.Engine(pair, rows=3):
        pass
    idle = [
        weakref.ref(runner)
        for one in (pair._runtime.targets, pair._runtime.drafts)
        if one
        for runner in one._free
    ]
    assert len(idle) == 2
    # Nothing is free but what the idle caches would give back.
    room = CONTEXT + 64  # for the tree of several drafts
    each = sum(
        memory.cache_bytes(model.model, room) for model in (pair.models.target, pair.models.draft) if model
    )

    def free(_: object) -> int:
        return 0 if any(one() is not None for one in idle) else 4 * each

    monkeypatch.setattr(memory, "free_bytes", free)
    with sprinter.Engine(pair, rows=3):  # the same rows: the caches are there
        assert all(one() is not None for one in idle)
    with sprinter.Engine(pair, rows=2):
        assert all(one() is None for one in idle)
    with pytest.raises(UserError, match="use a batch of 3 or less"):
        sprinter.Engine(pair, rows=5)
