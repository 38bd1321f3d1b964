"""The captured runner: whatever is fed, forgotten and copied, it says what the uncached pass says."""

import random

import pytest
import torch
from tests.models.eager_units import captured
from tests.models.test_runners import Told
from tests.models.tiny import fresh, tiny

from sprinter.errors import UserError
from sprinter.models import memory
from sprinter.models.capture.runner import CapturedRunner
from sprinter.models.capture.trace import PASS
from sprinter.models.choose import capture_kind, compile_model, make_runner

KINDS = [
    "gpt2", "llama", "qwen2", "gpt_neox", "llama-eager", "qwen2-sliding", "gemma2", "gemma3", "mistral", "opt",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_captured_pass_equals_the_uncached_pass_in_random_programs(kind: str, batch: int) -> None:
    runner = captured(kind, batch, 40)
    told = Told(runner, kind, seed=batch)
    for _ in range(40):
        told.anything()
    assert runner._units.calls["pass"] > 10  # type: ignore[attr-defined]


def _some_rows(kind: str, runner: CapturedRunner) -> None:
    """Passes over some rows, in any order, against the row runner."""
    row, draw = make_runner(tiny(kind), batch=4, max_len=40), random.Random(7)
    for runner_ in (row, runner):
        runner_.extend(torch.arange(20).view(4, 5))
    for _ in range(12):
        rows = draw.sample(range(4), draw.randint(1, 4))
        counts = [draw.randint(0, 3) for _ in rows]
        tokens = torch.tensor([[draw.randrange(61) for _ in range(3)] for _ in rows])
        one, other = (each.extend(tokens, counts, rows=rows) for each in (row, runner))
        assert one.logits is not None and other.logits is not None
        for i, count in enumerate(counts):
            torch.testing.assert_close(other.logits[i, :count], one.logits[i, :count], rtol=1e-4, atol=1e-4)
        assert runner.lengths == row.lengths
        lengths = [max(3, length - draw.randint(0, 4)) for length in row.lengths]
        row.rewind(lengths)
        runner.rewind(lengths)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_passes_over_some_rows(kind: str) -> None:
    runner = captured(kind, 4, 40)
    _some_rows(kind, runner)
    assert runner._units.calls["pass"] > 5  # type: ignore[attr-defined]


def test_misuse_of_run_changes_nothing() -> None:
    runner = captured("llama", 2, 8)
    runner.extend(torch.ones(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="would hold 9 tokens"):
        runner.run(PASS, torch.ones(2, 4, dtype=torch.long), None)
    assert runner.lengths == [5, 5]


def test_what_cannot_be_made_fast_says_why() -> None:
    assert capture_kind(tiny("llama")) == ("none", "compile=True has our kernels run its layers")
    assert capture_kind(tiny("opt")) == ("none", "our kernels do not know opt")
    with pytest.raises(UserError, match="cannot be compiled: our kernels do not know opt; use compile=False"):
        compile_model(tiny("opt"))
    kind, reason = capture_kind(tiny("gpt_neo"))
    assert kind == "none" and "crop runner" in reason
    with pytest.raises(UserError, match="cannot be compiled: the crop runner serves it"):
        compile_model(tiny("gpt_neo"))
    assert make_runner(tiny("gpt_neo"), max_len=8, compile=None).name == "crop"
    for compile in (None, False, True):
        assert make_runner(tiny("llama"), max_len=8, compile=compile).name == "row"
    quantised = fresh("llama")
    quantised.lm_head.weight = torch.nn.Parameter(torch.ones(61, 32, dtype=torch.int8), requires_grad=False)
    assert capture_kind(quantised) == ("none", "its weights are quantised")
    with pytest.raises(
        UserError, match="its weights are in float64 on cpu, and our kernels read float32 and"
    ):
        compile_model(fresh("llama").double())


def test_caches_that_do_not_fit_are_refused_with_the_largest_batch() -> None:
    model = tiny("llama")
    runner = make_runner(model, batch=2, max_len=16)
    runner.extend(torch.ones(2, 3, dtype=torch.long))
    held = sum(x.numel() * x.element_size() for x in runner._cache.buffers())  # type: ignore[attr-defined]
    assert 2 * memory.cache_bytes(model, 16) == held
    budget = 7 * memory.cache_bytes(model, 100)
    memory.check_memory([model], 7, [100], budget)
    with pytest.raises(UserError, match="use a batch of 7 or less"):
        memory.check_memory([model], 8, [100], budget)
    with pytest.raises(UserError, match="use a batch of 3 or less"):
        memory.check_memory([model, model], 4, [100, 100], budget)
    with pytest.raises(UserError, match="use shorter rows"):
        memory.check_memory([model], 1, [1000], budget)
    memory.check_memory([model], 1, [16])
    with pytest.raises(UserError, match="rows of 16 tokens need"):
        memory.check_memory([model], 10**9, [16])
