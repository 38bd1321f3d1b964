"""Heads that draft, with models: greedy equality, batches, the states that they read, log-probabilities, mutants."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.heads.test_eagle3 import eagle
from tests.heads.test_medusa import medusa
from tests.models.tiny import CONTEXT, tiny, word_tokenizer
from torch import Tensor

import sprinter
from sprinter.decode import parse_method, resting
from sprinter.decode.costs import PassCosts
from sprinter.decode.lookup import Lookup
from sprinter.decode.sequence import ReadState
from sprinter.engine import executor
from sprinter.engine.executor import RequestRun
from sprinter.errors import UserError
from sprinter.heads.drafting import TokenHeads
from sprinter.heads.medusa import MedusaHeads
from sprinter.models.gguf.load import GgufModel
from sprinter.models.pair import LoadedModel, LoadedPair
from sprinter.theory.replay import check_replayable

PROMPT = [3, 7, 1, 12, 5]
FAMILIES = ("llama", "qwen2")
CHAINS = ("heads", "drafter=heads,stop=svip(h=3.5),accept=block", "drafter=heads(grow=model(greedy=true))")
TREES = (
    "medusa(nodes=9)", "eagle(expand=3, depth=3, nodes=8)", "drafter=heads(grow=static(widths=3x2)),accept=traversal",
    "drafter=heads(grow=drawn(widths=3x2)),accept=without",
    "drafter=heads(grow=widened),accept=without,stop=fixed(gamma=3)",
    "drafter=heads(grow=model(drafts=3)),accept=specinfer,stop=fixed(gamma=3)",
)  # fmt: skip
GREEDY = (
    "drafter=heads(grow=static(widths=3x2)),accept=typical",
    "drafter=heads(grow=sparse(nodes=5)),accept=greedy",
)
ACCURACIES = ((0.5, 0.3, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.1))


def half_trained(family: str, count: int = 3) -> TokenHeads:
    """Heads whose laws are the target's next-token law, so that some drafts are accepted; random blocks."""
    target, heads = tiny(family), medusa(1, count=count, accuracies=ACCURACIES)
    with torch.no_grad():
        for own in heads.heads:
            own[0].linear.weight.mul_(0.1)  # type: ignore[index]
            own[1].weight.copy_(target.get_output_embeddings().weight)  # type: ignore[index, operator]
    return heads


@cache
def pair_of(family: str) -> sprinter.Pair:
    return sprinter.load_pair(
        tiny(family), tokenizer=word_tokenizer(), heads=[half_trained(family)], compile=False
    )


@cache
def eagle_pair(family: str) -> sprinter.Pair:
    """A random EAGLE-3 head, with the target's last norm and output layer."""
    heads, target = eagle(2, accuracies=ACCURACIES), tiny(family)
    with torch.no_grad():
        heads.lm_head.weight.copy_(target.get_output_embeddings().weight[heads.kept])  # type: ignore[operator, index]
    return sprinter.load_pair(target, tokenizer=word_tokenizer(), heads=[heads], compile=False)


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets_own(family: str) -> None:
    pair, accepted = pair_of(family), 0
    for prompt in (PROMPT, [9]):
        plain = ids(pair.generate(prompt, method="autoregressive", temperature=0, max_new_tokens=14))
        for method in (*CHAINS, *TREES, *GREEDY):
            out = pair.generate(prompt, method=method, temperature=0, max_new_tokens=14)
            assert ids(out) == plain, method
            assert out.stats.lossless and out.stats.mean_drift == 0 and out.stats.drafted > 0
            accepted += out.stats.accepted
    assert accepted >= 4


def test_greedy_text_with_eagle() -> None:
    pair, drafted = eagle_pair("qwen2"), 0
    for prompt in (PROMPT, [9]):
        plain = ids(pair.generate(prompt, method="autoregressive", temperature=0, max_new_tokens=12))
        for method in (*CHAINS, *TREES):
            out = pair.generate(prompt, method=method, temperature=0, max_new_tokens=12)
            assert ids(out) == plain, method
            drafted += out.stats.drafted
    assert drafted > 100


@pytest.mark.parametrize(
    ("method", "make"),
    [*((one, pair_of) for one in (CHAINS[1], *TREES[:4])), (CHAINS[1], eagle_pair), (TREES[1], eagle_pair)],
)
def test_a_text_is_the_same_alone_and_in_a_batch(method: str, make: Callable[[str], sprinter.Pair]) -> None:
    pair, options = make("qwen2"), {"method": method, "max_new_tokens": 14, "seed": 4}
    prompts = [PROMPT, [2], [9, 9, 4, 1, 30, 22, 8]]
    alone = [ids(pair.generate(prompt, **options)) for prompt in prompts]  # type: ignore[arg-type]
    assert [ids(out) for out in pair.generate_batch(prompts, **options)] == alone  # type: ignore[arg-type]
    with sprinter.Engine(pair, rows=2, max_len=CONTEXT, policy=sprinter.Policy(prompt_piece=2)) as engine:
        numbers = [engine.add(prompt, **options) for prompt in prompts]  # type: ignore[arg-type]
        engine.add(PROMPT, method="autoregressive", max_new_tokens=6)
        served = engine.finish()
    assert [ids(served[number]) for number in numbers] == alone


@pytest.mark.parametrize("method", [CHAINS[0], *TREES[:4]])
def test_the_heads_read_the_state_before_the_last_token(method: str) -> None:
    """The law of each kept draft token is that of head 1, 2, ... on the last state that the target had before the
    round: features of one token further or less, or another head, would give another number."""
    _check_laws(method)


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_one_step_off_are_noticed(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RequestRun._states

    def shifted(self: RequestRun) -> dict[int, Tensor]:
        return {layer: each.roll(shift, 0) for layer, each in real(self).items()}

    monkeypatch.setattr(RequestRun, "_states", shifted)
    with pytest.raises(AssertionError, match="another law"):
        _check_laws(CHAINS[0])


def test_states_of_refused_nodes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first nodes of the tree, in place of those of the path that stayed."""
    real = executor.leave_tree

    def first_nodes(view: ReadState, rows: Any) -> None:
        first, states, had = view.base + len(view.path), dict(view.states), view.nodes_read
        real(view, rows)
        if had:
            view.states = {layer: each[:first] for layer, each in states.items()}

    monkeypatch.setattr(executor, "leave_tree", first_nodes)
    with pytest.raises(AssertionError, match="another law"):
        _check_laws(TREES[3])


def _check_laws(method: str) -> None:
    pair, checked = pair_of("llama"), 0
    heads = pair.drafting
    assert isinstance(heads, MedusaHeads)
    for seed in range(4):
        out = pair.generate(PROMPT, method=method, max_new_tokens=24, seed=seed, logprobs=1)
        text = torch.tensor([[*PROMPT, *ids(out)]])
        with torch.inference_mode():
            model = pair.models.target.model
            states = model(text, output_hidden_states=True).hidden_states[-1][0]
        place = len(PROMPT)
        for added in out.accept_lengths:
            for i, token in enumerate(out.tokens[place - len(PROMPT) : place - len(PROMPT) + added]):
                if token.draft_logprob is not None:
                    law = heads.head_logits(i, states[place - 2]).log_softmax(-1)
                    assert abs(float(law[token.id]) - token.draft_logprob) < 1e-3, "another law"
                    checked += 1
            place += added
    assert checked >= 6


BEHIND = (
    "drafter=heads(otherwise=model),stop=fixed(gamma=6)",
    "drafter=heads(sure=0.3,otherwise=model),stop=svip(h=3.5),accept=block,cap=6",
    "drafter=lookup(n=2,least=1,length=2,otherwise=heads(otherwise=model(greedy=true))),stop=fixed(gamma=5),accept=match",
)


@cache
def pair_with_draft() -> sprinter.Pair:
    heads = half_trained("llama", 1)
    return sprinter.load_pair(
        tiny("llama"), draft=tiny("qwen2"), tokenizer=word_tokenizer(), heads=[heads], compile=False
    )


@pytest.mark.parametrize("method", BEHIND)
def test_a_draft_model_behind_heads(method: str) -> None:
    """Greedy texts are the target's, with penalties too, and those of a batch are those of rows alone."""
    pair, options = pair_with_draft(), {"temperature": 0.0, "max_new_tokens": 16, "bad_words": [[5], [7, 9]]}
    for more in ({}, {"frequency_penalty": 0.7, "repetition_penalty": 1.4}):
        plain = ids(pair.generate(PROMPT, method="autoregressive", **options, **more))  # type: ignore[arg-type]
        assert ids(pair.generate(PROMPT, method=method, **options, **more)) == plain  # type: ignore[arg-type]
    drawn: dict[str, Any] = {"method": method, "max_new_tokens": 14, "seed": 4}
    prompts = [PROMPT, [2], [9, 9, 4, 1, 30, 22, 8]]
    alone = [ids(pair.generate(prompt, **drawn)) for prompt in prompts]
    assert [ids(out) for out in pair.generate_batch(prompts, **drawn)] == alone
    with pytest.raises(UserError, match="needs a draft model, and this pair has none"):
        pair_of("llama").generate(PROMPT, method=method)


def test_each_token_has_the_law_of_the_drafter_that_wrote_it() -> None:
    """Of the one head for the first token, then of the draft model, which has read what they drafted."""
    pair, writers = pair_with_draft(), [0, 0]
    heads, draft = pair.drafting, pair.models.draft
    assert isinstance(heads, MedusaHeads) and draft is not None
    for seed in range(8):
        out = pair.generate(PROMPT, method=BEHIND[0], max_new_tokens=24, seed=seed, logprobs=1)
        text = torch.tensor([[*PROMPT, *ids(out)]])
        with torch.inference_mode():
            states = pair.models.target.model(text, output_hidden_states=True).hidden_states[-1][0]
            own = draft.model(text).logits[0].log_softmax(-1)
        place = len(PROMPT)
        for added in out.accept_lengths:
            for i, token in enumerate(out.tokens[place - len(PROMPT) : place - len(PROMPT) + added]):
                if token.draft_logprob is not None:
                    by_model = i >= heads.count
                    law = (
                        own[place + i - 1]
                        if by_model
                        else heads.head_logits(i, states[place - 2]).log_softmax(-1)
                    )
                    assert abs(float(law[token.id]) - token.draft_logprob) < 1e-3, "another law"
                    writers[by_model] += 1
            place += added
    assert writers[0] >= 6 and writers[1] >= 2


def test_penalties_and_forbidden_tokens() -> None:
    pair = pair_of("llama")
    options = {"temperature": 0.0, "max_new_tokens": 16, "frequency_penalty": 0.7, "repetition_penalty": 1.4,
               "bad_words": [[5], [7, 9]], "min_new_tokens": 12}  # fmt: skip
    plain = ids(pair.generate(PROMPT, method="autoregressive", **options))  # type: ignore[arg-type]
    for method in (*CHAINS, *TREES):
        assert ids(pair.generate(PROMPT, method=method, **options)) == plain, method  # type: ignore[arg-type]


def test_a_lossy_method_beside_the_heads() -> None:
    """Trusted tokens are the heads' own steps: at most as many as there are heads between two target calls."""
    pair = pair_of("llama")
    out = pair.generate(
        PROMPT,
        method="drafter=heads,trust=certain(signal=entropy,threshold=9.0),cap=9",
        max_new_tokens=24,
        seed=1,
    )
    assert out.stats.trusted > 0 and not out.stats.lossless
    assert max(out.accept_lengths) <= 4 and out.stats.target_calls >= 6


def test_a_pair_without_a_tokenizer_and_samplings() -> None:
    models = LoadedPair(pair_of("qwen2").models.target, None, None)
    pair = sprinter.Pair(models, None, [half_trained("qwen2")])
    assert pair.tokenizer is None
    for temperature, top_k, top_p in ((0.7, 8, 1.0), (1.3, 0, 0.8)):
        options = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "max_new_tokens": 10,
            "seed": 2,
        }
        for method in ("heads", "medusa(nodes=6)"):
            first = pair.generate(PROMPT, method=method, **options)  # type: ignore[arg-type]
            assert ids(first) == ids(pair.generate(PROMPT, first.request)), "replays"


def test_never_slower_counts_the_heads_own_steps() -> None:
    """Heads that cost more than the target are switched off; cheap ones are not, at the same acceptance."""
    for step, switches in ((5.0, True), (1e-6, False)):
        pair = sprinter.Pair(pair_of("llama").models, None, [half_trained("llama")])
        flat = tuple((n, 1.0) for n in (1, 8))
        pair._runtime.pass_costs = PassCosts(flat)  # in place of measuring
        assert pair._runtime.head_costs.draft_s(1) > 0
        pair._runtime.head_costs = PassCosts(flat, ((1, step), (8, step)))
        out = pair.generate(PROMPT, method="heads(gamma=2)", never_slower=True, max_new_tokens=40, seed=3)
        assert bool(out.stats.switches) == switches
    method = pair.method_for(method="drafter=heads,stop=optimal(step=measured,token=measured)")
    assert "step=1e-06" in method.name


def test_steps_of_a_draft_model_behind_heads_are_charged_as_its_own() -> None:
    pair, flat = (
        sprinter.Pair(pair_with_draft().models, None, [half_trained("llama")]),
        tuple((n, 1.0) for n in (1, 8)),
    )
    pair._runtime.pass_costs, pair._runtime.head_costs = (
        PassCosts(flat, ((1, step), (8, step))) for step in (5.0, 1e-6)
    )
    for method, switches in (("heads", False), ("drafter=heads(otherwise=model),stop=fixed(gamma=4)", True)):
        out = pair.generate(PROMPT, method=method, never_slower=True, max_new_tokens=40, seed=3)
        assert bool(out.stats.switches) == switches


@pytest.mark.parametrize("method", ["heads(gamma=4)", "medusa(nodes=6)"])
def test_a_text_is_copied_while_heads_rest(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resting, "COPIES", Lookup(1, 1, length=4)
    )  # a text of random weights seldom repeats three tokens
    pair = sprinter.Pair(pair_of("llama").models, None, [half_trained("llama")])
    flat = tuple((n, 1.0) for n in (1, 8))
    pair._runtime.pass_costs, pair._runtime.head_costs = (
        PassCosts(flat),
        PassCosts(flat, ((1, 5.0), (8, 5.0))),
    )
    options: dict[str, Any] = {"max_new_tokens": 80, "min_new_tokens": 80, "temperature": 0.0}
    out = pair.generate(PROMPT, method=method, never_slower=True, **options)
    assert out.stats.switches and out.stats.copy_switches and out.stats.accepted
    assert len(out.stats.switches) > 1  # heads try again, with the states of copied tokens
    assert ids(out) == ids(pair.generate(PROMPT, method="autoregressive", **options))


def test_what_reads_draft_states_is_refused() -> None:
    with pytest.raises(UserError, match="which no recording holds"):
        check_replayable(parse_method("heads"), ())
    with pytest.raises(UserError, match="drafts of heads have none"):
        pair_of("llama").generate(PROMPT, method="drafter=heads,trust=gate(tau=0.5)", max_new_tokens=4)


def test_forbidding_all_that_a_reduced_vocabulary_has() -> None:
    """No token can be drafted where all kept ones are forbidden: the text is the target's own."""
    for kept in ([0], [0, 7]):
        heads = eagle(2, kept=torch.tensor(kept), accuracies=ACCURACIES)
        pair = sprinter.load_pair(tiny("llama"), tokenizer=word_tokenizer(), heads=[heads], compile=False)
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "bad_words": [[5, 7], [3, 7]]}
        plain = ids(pair.generate(PROMPT, method="autoregressive", temperature=0, **options))  # type: ignore[arg-type]
        for method in (*CHAINS, *TREES):
            out = pair.generate(PROMPT, method=method, temperature=0, **options)  # type: ignore[arg-type]
            assert ids(out) == plain, method
            assert 0 not in ids(out) and (out.stats.drafted > 0) == (len(kept) > 1)


def test_weights_that_are_not_numbers_end_the_request() -> None:
    heads = half_trained("llama")
    pair = sprinter.load_pair(tiny("llama"), tokenizer=word_tokenizer(), heads=[heads], compile=False)
    next(heads.parameters()).fill_(torch.nan)
    for method in (CHAINS[0], TREES[2]):
        with pytest.raises(sprinter.SprinterError, match="the medusa heads' logits are NaN at position 5"):
            pair.generate(PROMPT, method=method, max_new_tokens=4)


def test_a_target_that_llama_cpp_runs_is_refused() -> None:
    file = object.__new__(GgufModel)
    models = LoadedPair(LoadedModel(file, "some.gguf", None, CONTEXT, 61, 32, ()), None, None)
    with pytest.raises(
        UserError,
        match=r"which its runner \(llamacpp\) does not give: load 'some\.gguf' here.*--runner torch",
    ):
        sprinter.Pair(models, None, [half_trained("llama")])
