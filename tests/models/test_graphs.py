"""CUDA graphs: padding, buckets and fixed memory, tried without CUDA; with it, equality with the row runner."""

import logging

import pytest
import torch
from tests.models.fake_cuda import fake_cuda
from tests.models.test_runners import Told
from tests.models.tiny import fresh, tiny

from sprinter.errors import UserError
from sprinter.models import graphs
from sprinter.models.captured import PASS, CapturedRunner
from sprinter.models.choose import _choose
from sprinter.models.graphs import LADDER, GraphUnits, keys_bucket, rung
from sprinter.models.runner import make_runner


def runner_of(kind: str, batch: int, max_len: int, must: bool = True) -> CapturedRunner:
    model = tiny(kind)
    windows = _choose(model).windows
    return CapturedRunner(model, batch, max_len, windows, GraphUnits(model, windows, must))


def test_ladder_and_buckets() -> None:
    assert [rung(n) for n in (1, 2, 3, 5, 8, 9, 32)] == [1, 2, 4, 8, 8, 16, 32]
    assert rung(LADDER[-1] + 1) is None
    assert [keys_bucket(seen, 1025) for seen in (1, 128, 129, 700, 1024)] == [128, 128, 256, 1024, 1024]
    assert keys_bucket(40, 61) == 60


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "gpt_neox", "llama-eager", "gemma2", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
def test_graphs_equal_the_uncached_pass_in_random_programs(
    kind: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda(monkeypatch)
    monkeypatch.setattr(graphs, "_LEAST_KEYS", 8)  # several buckets
    told = Told(runner_of(kind, batch, 40), kind, seed=batch)
    for _ in range(40):
        told.anything()
    shapes = {key[2:] for key in told.runner._units._graphs}  # type: ignore[attr-defined]
    assert len({length for length, _ in shapes}) >= 3 and len({keys for _, keys in shapes}) >= 3


def test_results_stay_when_a_graph_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    runner = runner_of("llama", 1, 40)
    first = runner.extend(torch.tensor([[5]]))
    assert first.logits is not None
    before = first.logits.clone()
    runner.extend(torch.tensor([[9]]))
    assert torch.equal(first.logits, before)
    assert len(runner._units._graphs) == 1  # type: ignore[attr-defined]


def test_what_cannot_be_captured_runs_eagerly_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda(monkeypatch)

    def broken(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    runner = runner_of("llama", 1, 40, must=False)
    for _ in range(3):
        runner.extend(torch.tensor([[5]]))
    assert runner.lengths == [3]
    (line,) = caplog.records
    assert line.levelno == logging.WARNING and "it runs eagerly" in line.getMessage()
    with pytest.raises(UserError, match=r"stream is capturing.*use compile=False"):
        runner_of("llama", 1, 40).run(PASS, torch.tensor([[5]]), None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("batch", [1, 3])
def test_cuda_graphs_equal_the_row_runner(kind: str, batch: int) -> None:
    model = fresh(kind).to("cuda")  # type: ignore[arg-type]
    row = make_runner(model, batch=batch, max_len=90)
    captured = make_runner(model, batch=batch, max_len=90, compile=True)
    generator = torch.Generator().manual_seed(batch)
    for n in (5, 1, 1, 2, 3, 8, 16, 1, 33, 1):
        tokens = torch.randint(0, 61, (batch, n), generator=generator).cuda()
        counts = [max(0, n - number) for number in range(batch)]
        expected, given = row.extend(tokens, counts), captured.extend(tokens, counts)
        assert expected.logits is not None and given.logits is not None
        for i, count in enumerate(counts):
            torch.testing.assert_close(given.logits[i, :count], expected.logits[i, :count], rtol=0, atol=1e-3)
            torch.testing.assert_close(given.hidden[i, :count], expected.hidden[i, :count], rtol=0, atol=1e-3)
        lengths = [max(0, length - 2) for length in row.lengths]
        row.rewind(lengths)
        captured.rewind(lengths)
