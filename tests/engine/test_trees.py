"""Trees grown by the draft model: greedy equality on four architectures, batches, mutants of mask and positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.models.tiny import CONTEXT, tiny, word_tokenizer

import sprinter
from sprinter.errors import UserError
from sprinter.models.runners.tree import NOWHERE, RowTree

PROMPT = [3, 7, 1, 12, 5]
FAMILIES = ("llama", "qwen2", "gemma3", "gpt2")
PRESETS = (
    "tree(expand=3, depth=4, nodes=9)", "static-tree(widths=3x2x1)", "cape(counts=4x3x2x1, gamma=3)",
    "traversal(widths=3x2x1)",
)  # fmt: skip
COMPOSED = (
    "drafter=drawn(widths=3x2,replacement=true),accept=without",
    "drafter=widened,accept=traversal,stop=svip(h=0.9),cap=4",
    "drafter=dynamic(expand=3),accept=onehot,stop=svip(h=0.9)",
    "drafter=model(drafts=3),accept=traversal,stop=fixed(gamma=3)", "accept=traversal", "accept=without",
)  # fmt: skip
EXACT = PRESETS + COMPOSED
GREEDY = ("typical", "greedy")
"""Rules that are exact at temperature 0."""


@cache
def pair_of(target: str, draft: str = "llama") -> sprinter.Pair:
    return sprinter.load_pair(tiny(target), draft=tiny(draft), tokenizer=word_tokenizer(), compile=False)


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets_own(family: str) -> None:
    """Both models of the family, so that drafts are accepted, refused, and accepted beside refused ones."""
    alike, other = pair_of(family, family), pair_of(family, "qwen2" if family == "llama" else "llama")
    accepted, greedy = 0, [f"drafter=static(widths=3x2),accept={rule}" for rule in GREEDY]
    for pair, methods in ((alike, [*EXACT, *greedy]), (other, PRESETS)):
        plain = ids(pair.generate(PROMPT, method="autoregressive", temperature=0, max_new_tokens=12))
        for method in methods:
            out = pair.generate(PROMPT, method=method, temperature=0, max_new_tokens=12)
            assert ids(out) == plain, method
            assert out.stats.lossless and out.stats.mean_drift == 0
            accepted += out.stats.accepted
    assert accepted >= 20


@pytest.mark.parametrize("method", EXACT[2:6])
def test_a_text_is_the_same_alone_and_in_a_batch(method: str) -> None:
    pair, options = pair_of("qwen2"), {"method": method, "max_new_tokens": 14, "seed": 4}
    prompts = [PROMPT, [2], [9, 9, 4, 1, 30, 22, 8]]
    alone = [ids(pair.generate(prompt, **options)) for prompt in prompts]  # type: ignore[arg-type]
    assert [ids(out) for out in pair.generate_batch(prompts, **options)] == alone  # type: ignore[arg-type]


def test_in_an_engine_beside_other_methods() -> None:
    pair = pair_of("llama", "llama")
    methods = [*PRESETS, "speculative", "specinfer"]
    with sprinter.Engine(pair, rows=3, max_len=CONTEXT) as engine:
        numbers = [engine.add(PROMPT, method=method, max_new_tokens=12, seed=2) for method in methods]
        served = engine.finish()
        with pytest.raises(
            UserError, match=r"drafts a tree with 8\d tokens beside the text.*smaller gamma or tree"
        ):
            engine.add(PROMPT, method="tree(nodes=90, expand=10)", max_new_tokens=8)
    for number, method in zip(numbers, methods, strict=True):
        assert ids(served[number]) == ids(pair.generate(PROMPT, method=method, max_new_tokens=12, seed=2))


@pytest.mark.parametrize("method", COMPOSED[:2])
def test_log_probabilities_of_both_models(method: str) -> None:
    """Those of plain decoding of the same text by either model."""
    pair = pair_of("qwen2", "qwen2")
    out = pair.generate(PROMPT, method=method, max_new_tokens=12, seed=1, logprobs=2)
    text = torch.tensor([[*PROMPT, *ids(out)]])
    assert pair.models.draft is not None
    for model, name in ((pair.models.target.model, "logprob"), (pair.models.draft.model, "draft_logprob")):
        with torch.inference_mode():
            logits = model(text).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        found = [
            (getattr(token, name), float(own[token.id]))
            for token, own in zip(out.tokens, logits, strict=True)
        ]
        assert all(one is None or abs(one - wanted) < 1e-4 for one, wanted in found)
        assert sum(one is not None for one, _ in found) >= (12 if name == "logprob" else 4)


def test_penalties_and_forbidden_tokens_follow_the_paths_of_a_tree() -> None:
    pair = pair_of("llama", "llama")
    options = {"temperature": 0.0, "max_new_tokens": 16, "frequency_penalty": 0.7, "repetition_penalty": 1.4,
               "bad_words": [[5], [7, 9]], "min_new_tokens": 12}  # fmt: skip
    plain = ids(pair.generate(PROMPT, method="autoregressive", **options))  # type: ignore[arg-type]
    for method in EXACT:
        assert ids(pair.generate(PROMPT, method=method, **options)) == plain, method  # type: ignore[arg-type]


def test_a_tree_is_read_once_and_its_size_is_counted() -> None:
    pair = pair_of("llama", "llama")
    stats = pair.generate(PROMPT, method="static-tree(widths=3x2)", max_new_tokens=20, temperature=0).stats
    full = stats.target_calls - 1  # the last round may be shorter
    assert 9 * full <= stats.drafted <= 9 * stats.target_calls
    assert stats.draft_steps <= 2 * stats.target_calls
    assert stats.target_tokens >= 10 * full


# --- mutants ---------------------------------------------------------------------------------------------------------
def leaks(tree: RowTree) -> NDArray[np.int64]:
    """Every token of the tree sees all tokens of the tree before it, siblings too."""
    seen = sound(tree)
    positions = seen.diagonal()
    earlier = np.tril(np.ones(seen.shape, bool)) & (positions[None, :] <= positions[:, None])
    return np.where(earlier, positions[None, :], seen)


def by_slot(tree: RowTree) -> NDArray[np.int64]:
    """Positions are slots, not depths."""
    seen = sound(tree)
    return np.where(seen == NOWHERE, NOWHERE, np.arange(tree.root, tree.end)[None, :])


sound = RowTree.seen


@pytest.mark.parametrize("mutant", [leaks, by_slot])
@pytest.mark.parametrize("method", PRESETS[:3])
def test_mutants_of_the_tree_pass_change_greedy_texts(
    mutant: object, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, prompts = pair_of("llama", "llama"), ([3, 7, 1, 12, 5], [9, 9, 4])

    def same() -> Sequence[bool]:
        plain = [
            pair.generate(one, method="autoregressive", temperature=0, max_new_tokens=20) for one in prompts
        ]
        outs = [pair.generate(one, method=method, temperature=0, max_new_tokens=20) for one in prompts]
        return [ids(one) == ids(other) for one, other in zip(plain, outs, strict=True)]

    assert all(same())
    monkeypatch.setattr(RowTree, "seen", mutant)
    assert not all(same())
