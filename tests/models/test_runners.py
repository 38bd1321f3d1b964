"""Runners: whatever is fed, forgotten and copied, logits and hidden states are those of the uncached pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.tiny import CONTEXT, VOCAB, WINDOW, fresh, tiny
from tests.models.told import Told

from sprinter.models.choose import make_runner
from sprinter.models.interface import Runner
from sprinter.models.runners import forward
from sprinter.models.runners.crop import CropRunner
from sprinter.models.runners.forward import ModelRunner

ROW = [
    "gpt2",
    "llama",
    "llama-eager",
    "qwen2",
    "qwen2-sliding",
    "gpt_neox",
    "gemma2",
    "gemma3",
    "mistral",
    "opt",
]


@pytest.mark.parametrize("kind", ROW)
@pytest.mark.parametrize("batch", [1, 3])
def test_row_runner_equals_the_uncached_pass_in_random_programs(kind: str, batch: int) -> None:
    told = Told(make_runner(tiny(kind), batch=batch, max_len=40), kind, seed=batch)
    assert told.runner.name == "row"
    for _ in range(24):
        told.anything()


@pytest.mark.parametrize("kind", ["gpt_neo", "gemma2", "gemma3", "mistral", "llama"])
def test_crop_runner_equals_the_uncached_pass_in_random_programs(kind: str) -> None:
    told = Told(CropRunner(tiny(kind), 40), kind, seed=5)
    assert told.runner.name == "crop"
    for _ in range(24):
        told.anything()


@pytest.mark.parametrize("kind", ROW)
def test_ragged_rows_with_idle_rows_and_copies(kind: str) -> None:
    told = Told(make_runner(tiny(kind), batch=3, max_len=30), kind)
    told.ragged()
    assert told.runner.lengths[0] == 30
    told.extend([0, 3, 2], 5)  # the full row has no room even for padding


def test_aligned_rows_need_no_ragged_writes() -> None:
    runner = make_runner(tiny("llama"), batch=2, max_len=30)
    told = Told(runner, "llama")
    for counts, before in (([5, 5], [0, 0]), ([1, 1], [5, 5]), ([3, 3], [2, 2])):
        told.rewind(before)
        told.extend(counts)
        assert runner._cache.span.index is None  # type: ignore[attr-defined]
    told.extend([1, 0])
    assert runner._cache.span.index is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neo"])
def test_long_inputs_go_in_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "CHUNK", 5)
    told = Told(make_runner(tiny(kind), max_len=CONTEXT), kind)
    told.extend([23])
    told.extend([11], logits=False)
    told.extend([7], 16)
    told.extend([1])
    assert told.compared == 23 + 11 + 7 + 1


def test_long_ragged_inputs_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "CHUNK", 5)
    told = Told(make_runner(tiny("gpt2"), batch=3, max_len=CONTEXT), "gpt2")
    told.extend([23, 4, 0])
    told.extend([3, 12, 17])
    assert told.compared == 27 + 32


@pytest.mark.parametrize("kind", ["llama", "gpt_neo"])
def test_prefill_pays_for_one_position_of_the_output_embedding(kind: str) -> None:
    model = tiny(kind)
    runner = make_runner(model, max_len=20)
    seen: list[int] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda *args: seen.append(args[2].shape[1]))
    step = runner.extend(torch.ones(1, 9, dtype=torch.long), logits=False)
    handle.remove()
    assert seen == [1]
    assert step.logits is None
    assert step.hidden.shape == (1, 9, runner.hidden_size)


def test_hidden_is_the_input_of_the_output_embedding_and_softcapping_stays() -> None:
    model = tiny("gemma2")
    step = make_runner(model, max_len=20).extend(torch.arange(8)[None])
    assert step.logits is not None
    raw = model.get_output_embeddings()(step.hidden.clone())
    torch.testing.assert_close(step.logits, 2.0 * torch.tanh(raw / 2.0))
    assert raw.abs().max() > 2.0 >= step.logits.abs().max()


@pytest.mark.parametrize("kind", ["llama", "gpt_neo"])
def test_an_interrupted_pass_leaves_the_rows_as_they_were(kind: str) -> None:
    told = Told(make_runner(tiny(kind), max_len=30), kind)
    told.extend([6])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = told.model.get_output_embeddings().register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        told.runner.extend(torch.ones(1, 4, dtype=torch.long))
    handle.remove()
    assert told.runner.lengths == [6]
    told.extend([5])


def test_an_interrupt_beside_a_pass_does_not_touch_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, tokens = make_runner(fresh("llama"), max_len=8), torch.tensor([[3, 1, 4]])
    assert isinstance(runner, ModelRunner)
    head: Any = runner.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    register = head.register_forward_pre_hook

    def interrupted(hook: Callable[..., Any]) -> None:
        register(hook)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(head, "register_forward_pre_hook", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.extend(tokens, logits=False)
    assert head._forward_pre_hooks  # the hook is still there
    logits = runner.extend(tokens).logits
    expected = make_runner(fresh("llama"), max_len=8).extend(tokens).logits
    assert logits is not None and expected is not None
    assert torch.equal(logits, expected)


def test_runners_share_a_model_and_leave_it_as_it_was() -> None:
    model = tiny("qwen2")
    told, other = (Told(make_runner(model, max_len=20), "qwen2", seed) for seed in (1, 2))
    for count in (4, 1, 6):
        told.extend([count])
        other.extend([count + 1])
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_a_model_in_training_mode_is_put_into_evaluation_mode() -> None:
    model = fresh("gpt2").train()
    make_runner(model, max_len=8)
    assert not model.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_other_dtypes_keep_their_dtype(kind: str, dtype: torch.dtype) -> None:
    runner = make_runner(fresh(kind).to(dtype), batch=2, max_len=20)
    for counts in (None, [1, 3]):
        step = runner.extend(torch.ones(2, 3, dtype=torch.long), counts)
        assert step.logits is not None
        assert step.logits.dtype == step.hidden.dtype == dtype
        assert step.logits.isfinite().all()


@pytest.mark.parametrize(("kind", "batch"), [("llama", 2), ("gpt_neo", 1)])
def test_misuse_is_refused_and_changes_nothing(kind: str, batch: int) -> None:
    runner = make_runner(tiny(kind), batch=batch, max_len=8)
    tokens = torch.ones(batch, 5, dtype=torch.long)
    runner.extend(tokens)
    with pytest.raises(ValueError, match="would hold 10 tokens"):
        runner.extend(tokens)
    with pytest.raises(ValueError, match="from 0 to 5"):
        runner.extend(tokens, [6] * batch)
    with pytest.raises(ValueError, match="from 0 to 5"):
        runner.extend(tokens, [1] * (batch + 1))
    with pytest.raises(ValueError, match="wanted"):
        runner.extend(tokens[0])
    with pytest.raises(ValueError, match="wanted"):
        runner.extend(tokens[:, :0])
    with pytest.raises(ValueError, match="row 0 holds 5 tokens and cannot be rewound to 6"):
        runner.rewind([6] * batch)
    with pytest.raises(ValueError, match="cannot be rewound to -1"):
        runner.rewind([-1] * batch)
    with pytest.raises(ValueError, match="must be"):
        runner.rewind([1] * (batch + 1))
    with pytest.raises(ValueError, match="does not exist"):
        runner.copy(0, [batch])
    assert runner.lengths == [5] * batch
    with pytest.raises(ValueError, match="at least 1"):
        make_runner(tiny(kind), max_len=0)


def test_runners_fit_the_interface() -> None:
    for kind in ("llama", "gpt_neo"):
        runner = make_runner(tiny(kind), max_len=8)
        assert isinstance(runner, Runner)
        assert (runner.batch, runner.max_len, runner.vocab_size, runner.hidden_size) == (1, 8, VOCAB, 32)
        runner.copy(0, [0])


@pytest.mark.parametrize("way", ["row", "crop"])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "mistral", "qwen2-sliding"])
def test_one_token_at_a_time_through_the_window(kind: str, way: str) -> None:
    told = Told(CropRunner(tiny(kind), 30) if way == "crop" else make_runner(tiny(kind), max_len=30), kind)
    for length in range(1, 2 * WINDOW + 2):
        told.extend([1])
        told.extend([2])
        told.rewind([length + 1])  # by one: the commonest rewind
        told.extend([1])
        told.rewind([length])
    assert told.compared == (2 * WINDOW + 1) * 4
