"""CUDA graphs: padding, buckets and fixed memory, tried without CUDA; with it, equality with the row runner."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from tests.models.fake_cuda import FakeGraph, fake_cuda
from tests.models.tiny import fresh, tiny, uncached
from tests.models.told import Told

from sprinter.errors import UserError
from sprinter.models.capture import graphs
from sprinter.models.capture.graphs import LADDER, GraphUnits, keys_bucket, length_bucket, rows_bucket
from sprinter.models.capture.runner import CapturedRunner
from sprinter.models.capture.trace import PASS
from sprinter.models.choose import _choose, make_runner


def runner_of(kind: str, batch: int, max_len: int, must: bool = True) -> CapturedRunner:
    model = tiny(kind)
    windows = _choose(model).windows
    return CapturedRunner(model, batch, max_len, windows, GraphUnits(model, windows, must))


def test_ladder_and_buckets() -> None:
    assert [length_bucket(n) for n in (1, 2, 3, 5, 8, 9, 32)] == [1, 2, 4, 8, 8, 16, 32]
    assert length_bucket(LADDER[-1] + 1) is None
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

    def broken(*_: object, **__: object) -> None:
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


def test_graphs_of_a_runner_share_memory_and_disturb_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    runner = runner_of("llama", 1, 40)
    for n in (1, 2, 4):
        runner.extend(torch.ones(1, n, dtype=torch.long))
    assert len(FakeGraph.settings) == 3 and len(FakeGraph.pools) == 1
    for settings in FakeGraph.settings:
        assert settings["pool"] is FakeGraph.pools[0]
        assert settings["capture_error_mode"] == "thread_local"


def test_the_graph_that_lay_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    monkeypatch.setattr(graphs, "MOST", 3)
    told = Told(runner_of("llama", 1, 40), "llama")
    for n in (8, 2, 4, 8, 1):
        told.extend([n])
    held = told.runner._units._graphs  # type: ignore[attr-defined]
    assert [key[2] for key in held] == [4, 8, 1]
    captures = len(FakeGraph.settings)
    told.extend([8])
    told.extend([4])
    assert len(FakeGraph.settings) == captures
    told.extend([2])
    assert len(FakeGraph.settings) == captures + 1 and len(held) == 3


def test_graphs_over_less_memory_than_a_later_one_needs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would keep theirs beside it."""
    fake_cuda(monkeypatch)
    told = Told(runner_of("llama", 1, 40), "llama")
    held, kept = told.runner._units._graphs, []  # type: ignore[attr-defined]
    for n in (1, 4, 2, 1, 4):
        told.extend([n])
        kept.append([key[2] for key in held])
    assert kept == [[1], [4], [4, 2], [4, 2, 1], [2, 1, 4]]


def test_numbers_of_rows_share_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill up a graph's number write where nobody looks, whichever rows take part."""
    fake_cuda(monkeypatch)
    assert [rows_bucket(rows, 6) for rows in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]
    told = Told(runner_of("llama", 6, 40), "llama")
    told.extend([3, 9, 1, 4, 2, 7])
    for rows in ([4, 0, 2], [0, 5, 1, 3], [3, 2, 1, 4, 0], [5, 3, 1], [2]):
        counts = [1 + i % 3 for i in range(len(rows))]
        tokens = torch.randint(61, (len(rows), 3), generator=torch.Generator().manual_seed(len(rows)))
        step = told.runner.extend(tokens, counts, rows=rows)
        for row, count, own in zip(rows, counts, tokens.tolist(), strict=True):
            told.rows[row] += own[:count]
        assert step.logits is not None and step.logits.shape[0] == len(rows)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            expected, hidden = uncached(tiny("llama"), told.rows[row])
            torch.testing.assert_close(step.logits[i, :count], expected[-count:], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(step.hidden[i, :count], hidden[-count:], rtol=1e-4, atol=1e-4)
    told.extend([1] * 6)
    some = {-key[1][1] for key in told.runner._units._graphs if key[1][1] < 0}  # type: ignore[attr-defined]
    assert some == {1, 4, 6}


def test_the_only_graph_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pool is gone with it."""
    fake_cuda(monkeypatch)
    monkeypatch.setattr(graphs, "MOST", 1)
    told = Told(runner_of("llama", 1, 40), "llama")
    for n in (1, 2, 1):
        told.extend([n])
    assert len(FakeGraph.settings) == 3


def test_a_broken_capture_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    capture, broken = torch.cuda.graph, [True]

    @contextmanager
    def graph(*args: object, **settings: object) -> Iterator[None]:
        with capture(*args, **settings):  # type: ignore[arg-type]
            yield
            if broken.pop():
                raise RuntimeError("operation not permitted when stream is capturing")
            broken.append(False)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    broken.insert(0, False)
    runner = runner_of("llama", 1, 40, must=False)
    runner.extend(torch.tensor([[5]]), logits=False)
    runner.extend(torch.tensor([[5]]))
    assert runner._units._refused and len(runner._units._graphs) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("must", [False, True])
def test_without_memory_for_a_graph_passes_run_eagerly(
    must: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda(monkeypatch)
    told = Told(runner_of("llama", 1, 40, must), "llama")
    told.extend([1])

    @contextmanager
    def full(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        finally:  # as CUDA's own does when it closes a capture that was broken off
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", full)
    for n in (2, 3, 1, 2):
        told.extend([n])
    (line,) = caplog.records
    assert line.levelno == logging.WARNING and "no memory for another CUDA graph" in line.getMessage()
    assert len(told.runner._units._graphs) == 1  # type: ignore[attr-defined]


def test_weights_are_read_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """New values are seen; memory that the model has left is kept as long as a graph reads it."""
    fake_cuda(monkeypatch)
    model = fresh("llama")
    windows = _choose(model).windows
    runner = CapturedRunner(model, 1, 40, windows, GraphUnits(model, windows, True))
    runner.extend(torch.tensor([[5]]))
    held = dict(runner._units._graphs)  # type: ignore[attr-defined]
    model.load_state_dict(tiny("llama").state_dict())
    logits = runner.extend(torch.tensor([[5]])).logits
    runner.rewind([0])
    assert logits is not None and runner._units._graphs == held  # type: ignore[attr-defined]
    logits = runner.extend(torch.tensor([[5]])).logits
    assert logits is not None
    torch.testing.assert_close(logits[0], uncached(tiny("llama"), [5])[0], rtol=1e-4, atol=1e-4)
    place = model.lm_head.weight.data_ptr()
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    ((graph,),) = [held.values()]
    assert place in {x.data_ptr() for x in graph._weights}


@pytest.mark.gpu
def test_cuda_graphs_on_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    model = fresh("llama").to("cuda:1")  # type: ignore[arg-type]
    row, captured = (make_runner(model, max_len=40, compile=compile) for compile in (False, True))
    for n in (1, 3, 1):
        tokens = torch.ones(1, n, dtype=torch.long, device="cuda:1")
        expected, given = row.extend(tokens), captured.extend(tokens)
        torch.testing.assert_close(given.logits, expected.logits, rtol=0, atol=1e-3)


@pytest.mark.gpu
def test_cuda_graphs_of_several_threads() -> None:
    model = fresh("llama").to("cuda")  # type: ignore[arg-type]

    def texts(seed: int) -> list[torch.Tensor]:
        runner, found = make_runner(model, batch=5, max_len=60, compile=True), []
        for rows in ([0, 1, 2], [4, 3], [0, 1, 2, 3, 4], [2], [1, 3, 0, 2]):
            tokens = torch.full((len(rows), 1 + seed % 3), 3 + seed, device="cuda")
            step = runner.extend(tokens, [tokens.shape[1]] * len(rows), rows=rows)
            assert step.logits is not None
            found.append(step.logits.clone())
        return found

    alone = [texts(seed) for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(texts, range(6)))
    for one, other in zip(alone, together, strict=True):
        for expected, given in zip(one, other, strict=True):
            torch.testing.assert_close(given, expected, rtol=0, atol=1e-3)


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
