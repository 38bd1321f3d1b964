"""A draft model that drafts several tokens in one pass (PARD): its laws, greedy equality, rows, the cache, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.models.tiny import VOCAB, tiny, uncached, word_tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

import sprinter
from sprinter.decode import parse_method
from sprinter.decode.draft_heads import BlockText
from sprinter.decode.enumerate import EnumeratedDraws, MarkovPair, run_chain
from sprinter.decode.loop import Limits
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.switch import Replayed, RoundCount
from sprinter.doors.rules import check_method
from sprinter.errors import UserError
from sprinter.theory.replay import check_replayable

MASK = VOCAB - 1
METHODS = (
    "drafter=parallel(tokens=4),stop=fixed(gamma=4)",
    "drafter=parallel(tokens=3),stop=fixed(gamma=5),accept=block",  # two passes a round
    "drafter=parallel(tokens=5),stop=svip(h=0.9),cap=12",
    "drafter=parallel(tokens=4,grow=dynamic(expand=3,depth=6,nodes=8)),accept=onehot,stop=never",
    "drafter=parallel(tokens=4,grow=drawn(widths=2x2)),accept=without,stop=never",
    "drafter=lookup(otherwise=parallel(tokens=4)),stop=fixed(gamma=4)",
)
PROMPTS = [[3, 7, 1, 12, 5], [9], [2, 2, 40, 8, 2, 2, 40, 8, 2, 2]]


def with_mask(model: PreTrainedModel, mask: Any = MASK) -> PreTrainedModel:
    """The same model with a mask token in its config."""
    twin = copy.deepcopy(model)
    twin.config.pard_token = mask
    return twin


def pair_of(draft: PreTrainedModel) -> sprinter.Pair:
    return sprinter.load_pair(tiny("llama"), draft, tokenizer=word_tokenizer(), compile=False)


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


@pytest.mark.parametrize("spec", METHODS)
def test_greedy_texts_are_those_of_plain_decoding(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one row and in several; each law is that of a pass without a cache over the text and masks."""
    noise = torch.Generator().manual_seed(1)
    draft = with_mask(tiny("llama"))
    with torch.no_grad():
        for value in draft.parameters():
            value.add_(0.02 * torch.randn(value.shape, generator=noise))
    pair, taken, real = pair_of(draft), list[int](), BlockText.take

    def take(self: BlockText, sequence: TokenSequence, logits: Tensor) -> None:
        wanted, _ = uncached(draft, [*sequence.tokens, *[MASK] * (len(logits) - 1)])
        torch.testing.assert_close(logits, wanted[-len(logits) :], atol=2e-4, rtol=1e-3)
        taken.append(len(logits))
        real(self, sequence, logits)

    monkeypatch.setattr(BlockText, "take", take)
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    plain = [ids(out) for out in pair.generate_batch(PROMPTS, method="autoregressive", **options)]
    outs = pair.generate_batch(PROMPTS, method=spec, **options)
    assert [ids(out) for out in outs] == plain
    one = pair.generate(PROMPTS[0], method=spec, **options)
    assert ids(one) == plain[0] and one.stats.draft_steps == outs[0].stats.draft_steps > 1
    drafter = parse_method(spec).drafter
    assert one.stats.target_calls < 16 and max(taken) == min(drafter.tokens_a_pass, drafter.levels or 64)
    again = pair.generate(
        [*PROMPTS[0], *plain[0][:4]], method=spec, **options
    )  # a prefix that a row still holds
    assert ids(again)[:12] == plain[0][4:]


@pytest.mark.slow
def test_the_builtin_target() -> None:
    """With a random draft of the same vocabulary, whose mask is an unused token."""
    target = sprinter.load_pair().models.target
    config = copy.deepcopy(target.module("test").config)
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = 64, 1, 64
    config.num_attention_heads = config.num_key_value_heads = 2
    config.head_dim, config.pard_token = 32, config.vocab_size - 1
    torch.manual_seed(0)
    pair = sprinter.load_pair(sprinter.models.pair.builtin_paths()["target"], LlamaForCausalLM(config).eval())
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}
    plain = pair.generate("Once upon a time", method="autoregressive", **options)
    for spec in METHODS[:3]:
        assert pair.generate("Once upon a time", method=spec, **options).text == plain.text


def test_sampled_texts_of_a_seed_do_not_depend_on_the_rows() -> None:
    pair = pair_of(with_mask(tiny("llama")))
    for spec in METHODS[:3]:
        options: dict[str, Any] = {
            "method": spec,
            "seed": 5,
            "max_new_tokens": 12,
            "logprobs": 1,
            "ignore_eos": True,
        }
        outs = pair.generate_batch(PROMPTS, **options)
        assert [ids(out) for out in outs] == [ids(pair.generate(one, **options)) for one in PROMPTS]
        assert any(token.draft_logprob is not None for out in outs for token in out.tokens)


def test_never_slower_counts_passes() -> None:
    """A round of 5 tokens, 3 a pass, is two passes of the draft over 3 tokens each."""
    counted: list[RoundCount] = []

    class Noting(Replayed):
        def count(self, done: RoundCount) -> None:
            counted.append(done)

    method, pair = parse_method("drafter=parallel(tokens=3),stop=fixed(gamma=5)"), MarkovPair(seed=2)
    run_chain(method, pair, (0,), Limits(40), EnumeratedDraws(), switch=lambda record: Noting((), ()))
    assert {(one.steps, one.width) for one in counted[:3]} == {(2, 3.0)}


def test_what_is_refused() -> None:
    spec = METHODS[0]
    for mask, told in ((None, "has no mask token"), (VOCAB, "a mask token 61"), ("x", "a mask token 'x'")):
        with pytest.raises(UserError, match=f"{told}.* pard_token in its config.json"):
            pair_of(with_mask(tiny("llama"), mask)).generate([3], method=spec)
    with pytest.raises(UserError, match="needs a draft model"):
        sprinter.load_pair(tiny("llama"), tokenizer=word_tokenizer(), compile=False).generate(
            [3], method=spec
        )
    for wrong, told in (
        ("drafter=parallel(tokens=1)", "tokens"), ("drafter=parallel(grow=heads)", "grow=Heads"),
        ("drafter=parallel,trust=gate(tau=0.5)", "tokens of one pass have none"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=told):
            parse_method(wrong)
    for check in (check_method, check_replayable):
        with pytest.raises(UserError, match="in one pass" if check is check_method else "laws over masks"):
            check(parse_method(spec), *([] if check is check_method else [{}]))
