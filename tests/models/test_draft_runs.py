"""Draft runs in one call of our kernels: passes, laws and draws are those of single steps, for rows of all lengths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from tests.models.test_kernel_passes import EVERY, KINDS, made, of_kind, quantise
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import sprinter
from sprinter.engine.backends import single_call
from sprinter.engine.backends.base import Drafted, DraftPlan, DraftRow
from sprinter.engine.backends.eager import EagerBackend
from sprinter.engine.backends.single_call import SingleCallBackend
from sprinter.engine.pair import Pair
from sprinter.laws import Sampling, process, truncation
from sprinter.models import kernels
from sprinter.models.choose import make_runner
from sprinter.models.reduced_vocab import cut_output
from sprinter.models.runners.rope import find_switch
from sprinter.random import AddressedDraws, Purpose, word_blocks

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
from sprinter_kernels import native

TEXT = torch.randint(1, 250, (3, 16), generator=torch.Generator().manual_seed(0))
LENGTHS, COUNTS, HEATS = (9, 16, 12), (6, 4, 1), (1.0, 0.0, 0.6)
CUTS: list[dict[str, Any]] = [
    {"top_k": 7}, {"top_k": 1}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_p": 1 - 1e-9}, {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05}, {"top_k": 10**6, "top_p": 0.999},
]  # fmt: skip
ROWS = (1, 2, 0)


@pytest.fixture(params=native.instruction_sets())
def each_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(native.ASKED, request.param)
    native.native.cache_clear()
    yield
    native.native.cache_clear()


def check_run(model: Any) -> None:
    """Rows of several lengths, counts and temperatures, against one pass over each row's tokens."""
    runner: Any = make_runner(model, batch=3, max_len=40, compile=True)
    runner.extend(TEXT, [LENGTHS[ROWS.index(row)] - 1 for row in range(3)])
    last = torch.stack([TEXT[row, length - 1] for row, length in zip(ROWS, LENGTHS, strict=True)])
    first = runner.extend(last[:, None], rows=ROWS)
    vocab = runner.vocab_size - 1  # of the pair: less than the model's
    draws = AddressedDraws(7)
    keys = [
        [draws.address(2, length + step, Purpose.DRAFT) for step in range(max(COUNTS))] for length in LENGTHS
    ]
    assert runner.drafts(22) and not runner.drafts(41)
    said, states, laws, tokens = runner.draft(
        first.logits[:, 0, :vocab], first.hidden[:, 0], ROWS, COUNTS, HEATS, [truncation(Sampling())] * 3, keys,
        word_blocks(vocab),
    )  # fmt: skip
    assert runner.lengths == [
        dict(zip(ROWS, zip(LENGTHS, COUNTS, strict=True), strict=True))[row][0]
        + dict(zip(ROWS, COUNTS, strict=True))[row]
        - 1
        for row in range(3)
    ]
    for at, (row, length, count, heat) in enumerate(zip(ROWS, LENGTHS, COUNTS, HEATS, strict=True)):
        own = tokens[:count, at]
        for step in range(count):
            law = laws[step, at]
            wanted = process(said[step, at, :vocab], Sampling(temperature=heat))
            assert float((law - wanted).abs().max()) < 2e-6 and abs(float(law.sum()) - 1) < 1e-5
            assert int(own[step]) == draws.token(law, 2, length + step, Purpose.DRAFT)
        alone = make_runner(model, batch=1, max_len=40, compile=True)
        whole = alone.extend(torch.cat([TEXT[row, :length], own[:-1]])[None])
        assert whole.logits is not None
        # the bits of a pass do not depend on the others
        assert torch.equal(said[:count, at, :vocab], whole.logits[0, length - 1 :, :vocab])
        assert torch.equal(states[:count, at], whole.hidden[0, length - 1 :])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_the_laws_and_draws_of_its_steps(kind: str, each_set: None) -> None:
    check_run(of_kind("llama", kind))


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_run_of_a_draft_that_knows_some_tokens(kind: str, each_set: None) -> None:
    """Its laws have the size of the pair's, and nothing elsewhere."""
    model, ids = made("llama"), torch.arange(1, 250, 3)
    cut_output(model, ids)
    if kind == "int8":
        quantise(model, kind)
    else:
        assert kernels.compile_layers(model) is None
    check_run(model)
    runner: Any = make_runner(model, batch=1, max_len=40, compile=True)
    first = runner.extend(TEXT[:1])
    draws = [[AddressedDraws(3).address(1, 16 + step, Purpose.DRAFT) for step in range(5)]]
    vocab = runner.vocab_size
    given = first.logits[:, -1], first.hidden[:, -1], (0,), (5,), (1.5,), [truncation(Sampling())], draws
    _, _, laws, tokens = runner.draft(*given, word_blocks(vocab))
    assert set(tokens.flatten().tolist()) <= set(ids.tolist())
    assert laws.shape[-1] == vocab and torch.equal(laws[0, 0].nonzero()[:, 0], ids[ids < vocab])


@pytest.mark.parametrize("name", EVERY)
def test_a_run_of_every_family(name: str) -> None:
    model = of_kind(name, "float32")
    runner: Any = make_runner(model, batch=3, max_len=40, compile=True)
    windows = [one for one in runner._windows.values() if one is not None]
    if windows and min(windows) < 22:
        assert not runner.drafts(22)  # a query does not see the whole text
    else:
        check_run(model)


def tiny_llama(vocab: int, **more: Any) -> Any:
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, **more,
    )  # fmt: skip
    torch.manual_seed(3)
    return LlamaForCausalLM(config).eval()


def test_a_large_vocabulary_that_is_no_whole_blocks(each_set: None) -> None:
    model = tiny_llama(5_003)
    assert kernels.compile_layers(model) is None
    check_run(model)


class Apart:
    """Draws of another kind, for which rows draft in single steps."""

    def __init__(self, draws: AddressedDraws) -> None:
        self.token, self.uniform, self.keep = draws.token, draws.uniform, draws.keep


def answers(kind: Any, model: Any, plans: Any = None, apart: int | None = None) -> Any:
    """What three rows draft, several times, each after its own tokens of the time before; the backend."""
    backend = kind(make_runner(model, batch=3, max_len=40, compile=True), model.config.vocab_size, "draft")
    plan, draws = DraftPlan(Sampling(), ("entropy",)), AddressedDraws(7)
    by: Any = [Apart(draws) if row == apart else draws for row in range(3)]
    texts, found = [[1, 2], [5], [4, 6, 9]], []
    for round in range(4):
        rows = [
            DraftRow(row, text[backend.runner.lengths[row] :], len(text), round, by[row], own, count=4 - row)
            for row, (text, own) in enumerate(zip(texts, plans or [plan] * 3, strict=True))
        ]
        found.append(backend.draft(rows))
        for row, one in enumerate(found[-1]):
            if isinstance(one, Drafted):
                texts[row] += one.tokens
            else:
                backend.end_text(row)
    return found, backend


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_fails_within_a_run_leaves_the_others_alone(bad: float, each_set: None) -> None:
    """Some draw a token whose weights are no numbers: its error, and what the others write, are those of steps."""
    model = tiny_llama(100)
    assert kernels.compile_layers(model) is None
    drawn = answers(EagerBackend, model)[0][1][0].tokens[1]  # by the second of four steps
    with torch.no_grad():
        model.model.embed_tokens.weight[drawn] = bad
    (runs, backend), (steps, other) = (answers(kind, model) for kind in (SingleCallBackend, EagerBackend))
    faults = 0
    for run, step in zip(chain(*runs), chain(*steps), strict=True):
        if isinstance(step, Drafted):
            assert run.tokens == step.tokens and float((run.laws - step.laws).abs().max()) < 2e-6
        else:
            assert str(run) == str(step) and (faults := faults + 1)
    assert 0 < faults < 12 and backend.runner.lengths == other.runner.lengths


def test_tokens_that_a_model_forbids_have_no_mass(each_set: None) -> None:
    """-inf is a logit, unlike NaN."""
    model = tiny_llama(260)
    model.lm_head = nn.Linear(64, 260)
    with torch.no_grad():
        model.lm_head.bias[5:250] = -torch.inf
    assert kernels.compile_layers(model) is None
    check_run(model)
    (made, *_), _ = answers(SingleCallBackend, model)
    assert all(one.laws[:, 5:250].sum() == 0 and one.laws.isfinite().all() for one in made)


@pytest.mark.parametrize("levels", [0, 3], ids=["apart", "tied"])
@pytest.mark.parametrize("heat", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_truncated_laws_keep_what_single_steps_keep(
    cut: dict[str, Any], heat: float, levels: int, each_set: None
) -> None:
    """Also where many logits are equal, of which the first ones are kept."""
    model = tiny_llama(611)
    if levels:
        model.lm_head = nn.Linear(64, 611)
        with torch.no_grad():
            model.lm_head.weight.zero_()
            model.lm_head.bias.copy_(torch.arange(611) % levels)
    assert kernels.compile_layers(model) is None
    plans = [DraftPlan(Sampling(heat, **own), ("entropy",)) for own in (cut, {}, cut)]
    runs, steps = (answers(kind, model, plans)[0] for kind in (SingleCallBackend, EagerBackend))
    for run, step in zip(chain(*runs), chain(*steps), strict=True):
        assert run.tokens == step.tokens and torch.equal(run.laws > 0, step.laws > 0)
        assert float((run.laws - step.laws).abs().max()) < 2e-6


def test_a_run_up_to_the_length_at_which_angles_change() -> None:
    model = tiny_llama(70, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert kernels.compile_layers(model) is None
    most = find_switch(model)
    assert most == 64
    runner = make_runner(model, batch=1, max_len=most, compile=True)
    row = DraftRow(0, [1] * (most - 3), most - 3, 1, AddressedDraws(5), DraftPlan(Sampling()), count=4)
    (made,) = SingleCallBackend(runner, 70, "draft").draft([row])
    assert isinstance(made, Drafted) and len(made.tokens) == 4 and runner.lengths == [most]


def test_a_row_of_single_steps_does_not_change_a_bit_of_the_others() -> None:
    model = of_kind("llama-tied", "float32")
    alone, beside = (answers(SingleCallBackend, model, apart=apart)[0] for apart in (None, 1))
    for one, other in zip(alone, beside, strict=True):
        for row in (0, 2):
            assert one[row].tokens == other[row].tokens and torch.equal(one[row].laws, other[row].laws)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_weights_of_8_bits_count_as_parameters(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_kind("llama-tied", kind)
    size = kernels.parameter_count(model)
    assert (model.num_parameters() < size) == (kind == "int8")
    for most, sync in ((size, 1.5), (size - 1, 0.0)):
        monkeypatch.setattr(single_call, "_SMALL", most)
        runner: Any = make_runner(model, batch=1, max_len=40, compile=True)
        assert SingleCallBackend(runner, 200, "draft").sync == sync


@pytest.fixture(scope="module")
def pair() -> Pair:
    return sprinter.load_pair(compile=True)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("method", ["speculative(gamma=4)", "sprinter", "svip", "certain", "block(gamma=3)"])
def test_texts_are_those_of_single_steps(
    pair: Pair, method: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and in a batch with a row that drafts nothing."""
    kept = {"max_new_tokens": 32, "temperature": temperature, "ignore_eos": True}
    prompts, seeds = ["Once upon a time, there was", "The dog", "Lily had a red", "One day"], [1, 2, 3, 4]
    methods = [method, method, "autoregressive", method]
    calls, follow = list[int](), single_call.SingleCallBackend._follow

    def counted(self: Any, rows: Any, *args: Any) -> Any:
        calls.append(len(rows))
        return follow(self, rows, *args)

    monkeypatch.setattr(single_call.SingleCallBackend, "_follow", counted)

    def texts(**more: Any) -> list[Any]:
        together = pair.generate_batch(prompts, method=methods, seed=seeds, rows=4, **kept, **more)
        alone = pair.generate(prompts[0], method=method, seed=1, **kept, **more)
        return [*together, alone]

    runs = texts()
    assert calls and max(calls) > 1
    monkeypatch.setattr(single_call, "_is_plain", lambda row: False)
    calls.clear()
    steps = texts(ahead=1)
    assert not calls
    for run, step in zip(runs, steps, strict=True):
        assert run.text == step.text and run.stats.target_calls == step.stats.target_calls
        assert [token.drift for token in run.tokens] == pytest.approx(
            [token.drift for token in step.tokens], abs=1e-5
        )
    assert runs[0].text == runs[-1].text


def test_small_models_draft_a_few_tokens_between_questions(pair: Pair) -> None:
    """Of which some are dropped; a number that the user gives is kept."""
    few, one = (
        pair.generate("Once upon a time", method="sprinter", max_new_tokens=48, seed=2, **more)
        for more in ({}, {"ahead": 1})
    )
    assert few.text == one.text and few.stats.draft_steps > one.stats.draft_steps


def test_rows_beside_one_with_a_truncated_law_write_what_they_write_alone(pair: Pair) -> None:
    kept: dict[str, Any] = {"method": "speculative(gamma=3)", "max_new_tokens": 24, "ignore_eos": True}
    prompts = ["Once upon a time, there was", "The dog", "Lily had a red"]
    tops = [1.0, 0.8, 1.0]
    together = pair.generate_batch(prompts, top_p=tops, seed=[1, 2, 3], rows=3, **kept)
    for at, out in enumerate(together):
        assert out.text == pair.generate(prompts[at], top_p=tops[at], seed=at + 1, **kept).text
