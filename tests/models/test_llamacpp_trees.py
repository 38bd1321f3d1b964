"""Trees in the llama.cpp runner: each token reads its own path, and a kept path is plain text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.forest import PATHS, TREE, Forest
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama
from tests.models.tiny import uncached
from transformers import PreTrainedModel

from sprinter.errors import RowsError
from sprinter.models.choose import make_runner
from sprinter.models.gguf.load import GgufModel

pytest.importorskip("gguf", reason=NO_GGUF)
pytest.importorskip("llama_cpp", reason=NO_LLAMA)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, GgufModel]:
    """A small model in full precision."""
    directory = tmp_path_factory.mktemp("tiny") / "model"
    return saved_llama(directory), GgufModel(converted(directory))


def forest(tiny: tuple[PreTrainedModel, GgufModel], batch: int, seed: int = 0, max_len: int = 60) -> Forest:
    runner = make_runner(tiny[1], batch=batch, max_len=max_len, leaves=24)
    assert runner.branches
    return Forest(runner, tiny[0], seed, tolerance=1e-4, layers=())


def held(rows: Forest) -> int:
    """Sequences that trees hold beside those of the rows."""
    sequences: Any = rows.runner._sequences  # type: ignore[attr-defined]
    return int(sequences._count - sequences._rows - len(sequences._free()))


def test_each_node_reads_its_own_path_and_a_kept_path_is_plain_text(
    tiny: tuple[PreTrainedModel, GgufModel],
) -> None:
    """Ragged trees that grow over several calls, over all rows and some."""
    for seed in range(3):
        rows = forest(tiny, 3, seed)
        rows.grow_and_keep()
        assert held(rows) == 0
        rows.go_on()


def test_random_programs(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    for seed in range(6):
        rows = forest(tiny, 3, 10 + seed)
        rows.wander(25)
        rows.rewind([0, 0, 0])
        assert held(rows) == 0


@pytest.mark.parametrize("path", PATHS)
def test_after_keep_a_row_goes_on_as_after_plain_text(
    path: list[int], tiny: tuple[PreTrainedModel, GgufModel]
) -> None:
    prompt, nodes, more = [7, 3, 60, 12, 5], [20, 21, 22, 23, 24, 25], [30, 31]
    runner = make_runner(tiny[1], max_len=40, leaves=8)
    runner.extend(torch.tensor([prompt]))
    runner.extend(torch.tensor([nodes]), parents=[TREE])
    runner.commit_path(0, path)
    text = [*prompt, *[nodes[slot - 5] for slot in path]]
    assert runner.lengths == [len(text)]
    made = runner.extend(torch.tensor([more])).logits
    assert made is not None
    torch.testing.assert_close(made[0], uncached(tiny[0], [*text, *more])[0][-2:], rtol=1e-4, atol=1e-4)


def test_rewinding_within_and_under_a_tree(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    rows = forest(tiny, 1)
    rows.rewind_within()
    assert held(rows) == 0


def test_an_interrupted_pass_leaves_the_tree_as_it_was(
    tiny: tuple[PreTrainedModel, GgufModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = forest(tiny, 2)
    rows.read([5, 3], tree=False)
    rows.read([4, 5])
    before = held(rows)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rows.runner._llama, "llama_get_embeddings", interrupt)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            rows.runner.extend(torch.ones(2, 3, dtype=torch.long), parents=[[4, 4, 9], [2, 8, 2]])
    rows.runner.rewind(rows.runner.lengths)
    assert rows.runner.lengths == [9, 8] and held(rows) == before
    rows.read([3, 2])
    for row in range(2):
        rows.commit_path(row, rows.random_path(row))
    rows.read([3, 2], tree=False)


@pytest.mark.parametrize("where", ["_advance", "_copy", "_remove", "drop"])
def test_an_interrupt_anywhere_loses_no_sequence_and_no_prefix(
    where: str, tiny: tuple[PreTrainedModel, GgufModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a pass and its record, and in the middle of marking and of keeping a path."""
    for calls in range(1, 12):
        rows = forest(tiny, 2, calls)
        rows.read([5, 3], tree=False)
        runner: Any = rows.runner
        owner: Any = runner if where == "_advance" else runner._sequences
        usual, left = getattr(owner, where), [calls]

        def interrupt(*given: Any, usual: Any = usual, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return usual(*given)

        with monkeypatch.context() as patch:
            patch.setattr(owner, where, interrupt)
            try:
                rows.read([6, 5])
                rows.read([4, 4])
                for row in range(2):
                    rows.commit_path(row, rows.random_path(row))
            except KeyboardInterrupt:
                pass
        lengths = [min(length, prefix) for length, prefix in zip(runner.lengths, (5, 3), strict=True)]
        runner.rewind(lengths)
        rows.tokens = [tokens[:length] for tokens, length in zip(rows.tokens, lengths, strict=True)]
        rows.paths = [[list(range(at + 1)) for at in range(length)] for length in lengths]
        rows.roots = [None, None]
        assert held(rows) == 0
        rows.read([4, 6])
        for row in range(2):
            rows.commit_path(row, rows.random_path(row))
        rows.read([2, 3], tree=False)


def test_too_many_leaves_are_refused_and_change_nothing(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    runner = make_runner(tiny[1], batch=2, max_len=40, leaves=2)
    rows = Forest(runner, tiny[0], 0, tolerance=1e-4, layers=())
    rows.read([3, 3], tree=False)
    with pytest.raises(RowsError, match=r"holds 4 sequences here, .* use smaller trees, or fewer rows"):
        runner.extend(torch.ones(2, 3, dtype=torch.long), parents=[[2, 2, 2], [2, 2, 2]])
    runner.rewind(runner.lengths)
    assert held(rows) == 0 and runner.lengths == [3, 3]
    rows.read([2, 2], tree=False)
    runner.extend(torch.ones(2, 2, dtype=torch.long), [2, 0], parents=[[4, 4], []])
    before = runner.lengths
    runner.extend(torch.ones(2, 1, dtype=torch.long), [1, 0], parents=[[4], []])
    with pytest.raises(RowsError, match="too few for another tree"):
        runner.copy(0, [1])
    runner.copy(0, [1], 5)
    assert runner.lengths == [before[0] + 1, 5]
    rows.tokens[1], rows.paths[1], rows.roots = [*rows.tokens[0]], [*rows.paths[0]], [None, None]
    runner.commit_path(0, [])
    rows.read([2, 2], tree=False)
    for batch, leaves, why in (
        (8, 40, "use rows=6, or smaller trees"),
        (1, 300, "leaves: use smaller trees"),
    ):
        with pytest.raises(RowsError, match=why):
            make_runner(tiny[1], batch=batch, max_len=400, leaves=leaves)


def test_chains_alone_have_no_sequences_for_trees(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    runner = make_runner(tiny[1], max_len=20)
    runner.extend(torch.tensor([[5, 6]]))
    assert not runner.branches
    with pytest.raises(ValueError, match="the llamacpp runner reads no branches"):
        runner.extend(torch.ones(1, 3, dtype=torch.long), parents=[[1, 1, 2]])
    with_trees = make_runner(tiny[1], max_len=20, leaves=4)
    assert with_trees.cache_bytes - runner.cache_bytes == 3 * 4 * runner.vocab_size


def test_a_row_with_a_tree_is_not_adopted(tiny: tuple[PreTrainedModel, GgufModel]) -> None:
    runner, other = (make_runner(tiny[1], max_len=40, leaves=4) for _ in range(2))
    runner.extend(torch.tensor([[5, 6, 7]]))
    runner.extend(torch.tensor([[8, 9]]), parents=[[2, 2]])
    assert not other.adopt(runner, 4)
    runner.commit_path(0, [3])
    assert other.adopt(runner, 4) and other.lengths == [4]
