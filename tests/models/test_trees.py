"""Trees in the runners: each node reads as its own path would as plain text, and a kept path is plain text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.models.forest import (  # noqa: F401 (graphs_without_cuda is a fixture)
    KINDS,
    PATHS,
    TREE,
    WAYS,
    Forest,
    forest,
    graphs_without_cuda,
    runner_of,
)
from tests.models.tiny import fresh, tiny, uncached

from sprinter.models.capture.runner import CapturedRunner
from sprinter.models.capture.trace import PASS
from sprinter.models.choose import make_runner
from sprinter.models.runners import forward


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_node_reads_its_own_path_and_a_kept_path_is_plain_text(kind: str, way: str) -> None:
    """Ragged trees that grow over several calls, over all rows and some; sliding windows of 7 go by positions."""
    for seed in range(2):
        rows = forest(kind, way, 3, seed)
        rows.grow_and_keep()
        rows.go_on()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_in_float64_to_the_last_bits(kind: str) -> None:
    model = fresh(kind).double()
    rows = forest(model, "row", 2, tolerance=1e-10)
    rows.read([5, 1], tree=False)
    rows.read([6, 4])
    rows.read([3, 5])
    rows.commit_path(0, rows.random_path(0))
    rows.commit_path(1, [])
    rows.read([2, 3], tree=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "qwen2-sliding"])
def test_random_programs(kind: str, way: str) -> None:
    for seed in range(2):
        rows = forest(kind, way, 3, 10 + seed)
        rows.wander(25)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_a_linear_tree_has_the_bits_of_plain_text(kind: str, way: str) -> None:
    plain, tree = (runner_of(kind, way, 2) for _ in range(2))
    prompt, tokens = torch.arange(10).view(2, 5), torch.tensor([[3, 9, 11], [8, 1, 4]])
    for runner in (plain, tree):
        runner.extend(prompt, [5, 3])
    one = plain.extend(tokens, [3, 2])
    other = tree.extend(tokens, [3, 2], parents=[[4, 5, 6], [2, 3]])
    assert one.logits is not None and other.logits is not None
    assert torch.equal(one.logits, other.logits) and torch.equal(one.hidden, other.hidden)
    tree.commit_path(0, [5, 6])
    tree.commit_path(1, [])
    plain.rewind([7, 3])
    one, other = (runner.extend(tokens) for runner in (plain, tree))
    assert one.logits is not None and other.logits is not None
    assert torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_after_keep_a_row_goes_on_as_after_plain_text(kind: str, path: list[int], way: str) -> None:
    prompt, nodes, more = [7, 3, 60, 12, 5], [20, 21, 22, 23, 24, 25], [30, 31]
    runner, plain = runner_of(kind, way), runner_of(kind, way)
    runner.extend(torch.tensor([prompt]))
    runner.extend(torch.tensor([nodes]), parents=[TREE])
    runner.commit_path(0, path)
    text = [*prompt, *[nodes[slot - 5] for slot in path]]
    plain.extend(torch.tensor([text]))
    assert runner.lengths == plain.lengths == [len(text)]
    for given, wanted in zip(*(each._cache.buffers() for each in (runner, plain)), strict=True):  # type: ignore[attr-defined]
        held = slice(len(text))
        torch.testing.assert_close(given[0, :, held], wanted[0, :, held], rtol=1e-4, atol=1e-5)
    one, other = (each.extend(torch.tensor([more])).logits for each in (runner, plain))
    assert one is not None and other is not None
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one[0], uncached(tiny(kind), [*text, *more])[0][-2:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_rewinding_within_and_under_a_tree(way: str) -> None:
    rows = forest("llama", way, 1)
    rows.rewind_within()


@pytest.mark.parametrize("way", ["row", "captured"])
def test_an_interrupted_pass_leaves_the_tree_as_it_was(way: str) -> None:
    rows = forest("llama", way, 1)
    rows.read([5], tree=False)
    rows.read([4])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = rows.model.get_output_embeddings().register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        rows.runner.extend(torch.ones(1, 3, dtype=torch.long), parents=[[4, 4, 9]])
    handle.remove()
    assert rows.runner.lengths == [9]
    rows.read([3])
    rows.commit_path(0, rows.random_path(0))
    rows.read([3], tree=False)


def test_an_interrupted_keep_leaves_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(tiny("llama"), max_len=40)
    runner.extend(torch.tensor([[7, 3, 60, 12, 5]]))
    runner.extend(torch.tensor([[20, 21, 22]]), parents=[[4, 4, 5]])
    first = runner._cache.buffers()[:2]  # type: ignore[attr-defined]

    def interrupted() -> Iterator[torch.Tensor]:
        yield from first
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner._cache, "buffers", interrupted)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            runner.commit_path(0, [6])
    assert runner.lengths == [5]
    logits = runner.extend(torch.tensor([[30]])).logits
    assert logits is not None
    torch.testing.assert_close(
        logits[0], uncached(tiny("llama"), [7, 3, 60, 12, 5, 30])[0][-1:], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_wiped_row_forgets_what_was_not_finite(way: str) -> None:
    model = fresh("llama")
    runner = runner_of(model, way, 2)
    runner.extend(torch.tensor([[7, 3, 60], [1, 2, 3]]))
    with torch.no_grad():
        good = model.get_input_embeddings().weight[9].clone()
        model.get_input_embeddings().weight[9] = torch.nan
    step = runner.extend(torch.tensor([[4, 9, 9, 9]]), rows=[0], parents=[[2, 2, 3, 2]])
    assert step.logits is not None
    # The sibling that was read before NaN is masked for it, but 0 x NaN is NaN: all of the row is in doubt.
    assert step.logits[0, 1:].isnan().all()
    runner.rewind([3, 3])
    runner.wipe(0)
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = good
    step = runner.extend(torch.tensor([[4, 5, 6]]), rows=[0], parents=[[2, 2, 3]])
    assert step.logits is not None
    expected = uncached(model, [7, 3, 60, 5])[0][-1]
    torch.testing.assert_close(step.logits[0, 1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_pass_of_a_runner_may_read_a_tree_in_some_rows(way: str) -> None:
    rows = forest("llama", way, 3)
    rows.read([5], rows=[1])
    rows.read([3, 4], rows=[2, 1])
    rows.read([1, 2, 3])


def test_rows_of_one_call_may_have_a_tree_or_none() -> None:
    runner, model = make_runner(tiny("llama"), batch=2, max_len=30), tiny("llama")
    step = runner.extend(torch.tensor([[5, 6, 7], [8, 9, 10]]), parents=[[-1, -1, 0], None])
    assert step.logits is not None
    torch.testing.assert_close(step.logits[0, 2], uncached(model, [5, 7])[0][-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step.logits[1], uncached(model, [8, 9, 10])[0], rtol=1e-4, atol=1e-4)
    runner.commit_path(1, [])  # it has no tree: nothing to forget
    runner.commit_path(0, [0, 2])
    assert runner.lengths == [2, 3]
    step = runner.extend(torch.tensor([[11], [12]]))
    assert step.logits is not None
    torch.testing.assert_close(step.logits[0], uncached(model, [5, 7, 11])[0][-1:], rtol=1e-4, atol=1e-4)


def test_a_chain_that_is_read_on_as_plain_text_is_plain_text() -> None:
    runner = make_runner(tiny("llama"), max_len=30)
    runner.extend(torch.tensor([[5, 6]]), parents=[[-1, 0]])
    runner.extend(torch.tensor([[7]]))
    runner.commit_path(0, [])
    assert runner.lengths == [3]
    runner.extend(torch.tensor([[8, 9]]), parents=[[2, 2]])
    runner.commit_path(0, [4])
    assert runner.lengths == [4]


@pytest.mark.parametrize("way", WAYS)
def test_misuse_is_refused_and_changes_nothing(way: str) -> None:
    runner = runner_of("llama", way, 2, 20)
    tokens = torch.ones(2, 3, dtype=torch.long)
    runner.extend(tokens, parents=[[-1, 0, 0], [-1, -1, -1]])
    for parents, message in [
        ([[2, 2, 6], None], "slot 5 cannot follow slot 6"),
        ([[2, 2, 2], [-2, 2, 2]], "slot 3 cannot follow slot -2: use -1"),
        ([[2, 2], [2, 2, 2]], "parents has 2 slots for row 0; wanted one for each of its 3 tokens"),
        ([[2, 2, 2]], "parents has 1 lists"),
        ([[2, 2, 2], None], "row 1 holds a tree with branches"),
        (None, "row 0 holds a tree with branches: give parents, or keep a path"),
    ]:
        with pytest.raises(ValueError, match=message):
            runner.extend(tokens, parents=parents)  # type: ignore[arg-type]
    for row, path, message in [
        (0, [1], "slot 1 follows slot 0, not -1"),
        (0, [0, 2, 1], "slot 1 follows slot 0, not 2"),
        (0, [0, 3], "slot 3 is not one of the tree's, 0 to 2"),
        (2, [], "row 2 does not exist"),
    ]:
        with pytest.raises(ValueError, match=message):
            runner.commit_path(row, path)
    if isinstance(runner, CapturedRunner):
        with pytest.raises(ValueError, match="row 0 holds a tree"):
            runner.run(PASS, tokens, None)
    assert runner.lengths == [3, 3]
    runner.commit_path(0, [0, 2])
    runner.commit_path(1, [1])
    runner.extend(tokens)
    with pytest.raises(ValueError, match="slot 5 cannot follow slot 3: use 4"):
        runner.extend(tokens[:1, :2], rows=[0], parents=[[3, 5]])
    with pytest.raises(ValueError, match="the row has no tree"):
        runner.commit_path(0, [4])


def test_a_tree_is_read_in_one_prefill_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "CHUNK", 4)
    runner, tokens = make_runner(tiny("llama"), max_len=30), torch.ones(1, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="in one pass of at most 4 tokens, not 6"):
        runner.extend(tokens, parents=[[-1, -1, 0, 1, 2, 3]])
    assert runner.lengths == [0]
    step = runner.extend(tokens, parents=[range(-1, 5)], hidden_layers=[1])
    assert step.layers[0].shape[:2] == (1, 6)
    runner.commit_path(0, [0, 1, 2, 3, 4])
    assert runner.lengths == [5]


def test_runners_without_branches_take_chains() -> None:
    runner = make_runner(tiny("gpt_neo"), max_len=30)
    assert not runner.branches and make_runner(tiny("llama"), max_len=8).branches
    runner.extend(torch.tensor([[5, 6]]))
    with pytest.raises(ValueError, match="reads no branches"):
        runner.extend(torch.tensor([[7, 8]]), parents=[[1, 1]])
    runner.extend(torch.tensor([[7, 8]]), parents=[[1, 2]])
    runner.commit_path(0, [2])
    assert runner.lengths == [3]
    logits = runner.extend(torch.tensor([[9]])).logits
    assert logits is not None
    torch.testing.assert_close(
        logits[0], uncached(tiny("gpt_neo"), [5, 6, 7, 9])[0][-1:], rtol=1e-4, atol=1e-4
    )


def test_captured_runners_capture_trees() -> None:
    rows = forest("llama", "captured", 2)
    rows.read([3, 3], tree=False)
    rows.read([4, 2])
    units: Any = rows.runner._units  # type: ignore[attr-defined]
    assert units.calls == {"pass": 2}
    graphs = forest("llama", "graphs", 2)
    graphs.read([3, 3], tree=False)
    graphs.read([4, 2])
    keys = list(graphs.runner._units._graphs)  # type: ignore[attr-defined]
    assert len(keys) == 2 and keys[1][0].endswith(" tree")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_cuda_graphs_read_trees_as_the_row_runner(kind: str) -> None:
    model = fresh(kind).to("cuda")  # type: ignore[arg-type]
    eager, graphs = (make_runner(model, batch=3, max_len=90, compile=compile) for compile in (False, True))
    draw, generator = random.Random(1), torch.Generator().manual_seed(1)
    for n, rows in ((5, None), (7, [2, 0]), (3, [1]), (16, None), (2, [0, 1])):
        numbers = [0, 1, 2] if rows is None else rows
        tokens = torch.randint(0, 61, (len(numbers), n), generator=generator).cuda()
        counts = [draw.randint(1, n) for _ in numbers]
        parents = [
            [draw.randint(-1, slot - 1) for slot in range(eager.lengths[row], eager.lengths[row] + count)]
            for row, count in zip(numbers, counts, strict=True)
        ]
        one, other = (
            each.extend(tokens, counts, rows=rows, parents=parents, hidden_layers=[0])
            for each in (eager, graphs)
        )
        assert one.logits is not None and other.logits is not None
        for i, count in enumerate(counts):
            torch.testing.assert_close(other.logits[i, :count], one.logits[i, :count], rtol=0, atol=1e-3)
            torch.testing.assert_close(
                other.layers[0][i, :count], one.layers[0][i, :count], rtol=0, atol=1e-3
            )
    for row in range(3):
        for runner in (eager, graphs):
            runner.commit_path(row, [0])
    one, other = (
        runner.extend(torch.ones(3, 2, dtype=torch.long, device="cuda")) for runner in (eager, graphs)
    )
    assert one.logits is not None and other.logits is not None
    torch.testing.assert_close(other.logits, one.logits, rtol=0, atol=1e-3)
