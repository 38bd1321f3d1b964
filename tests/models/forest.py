"""Random trees in the rows of a runner, held against plain text; for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from tests.models.eager_units import EagerUnits
from tests.models.fake_cuda import fake_cuda
from tests.models.tiny import tiny, uncached
from transformers import PreTrainedModel

from sprinter.models.capture.graphs import GraphUnits
from sprinter.models.capture.runner import CapturedRunner
from sprinter.models.choose import _choose, make_runner
from sprinter.models.interface import ModelOutput, Runner

KINDS = ["llama", "qwen2", "gpt2", "gpt_neox", "llama-eager", "qwen2-sliding", "gemma2", "gemma3", "mistral"]
WAYS = ["row", "captured", "graphs"]
#         5
#     6       7       slots of a tree after a prompt of 5 tokens
#   8   9    10
TREE = [4, 5, 5, 6, 6, 7]
PATHS = [[], [5], [5, 6], [5, 7], [5, 6, 9], [5, 7, 10], [5, 6, 8]]


def runner_of(model: str | PreTrainedModel, way: str, batch: int = 1, max_len: int = 60) -> Runner:
    """A runner; ``fake_cuda`` must have been called for "graphs"."""
    whole = tiny(model) if isinstance(model, str) else model
    if way == "row":
        return make_runner(whole, batch=batch, max_len=max_len)
    windows = _choose(whole).windows
    units = EagerUnits(whole) if way == "captured" else GraphUnits(whole, windows, must=True)
    return CapturedRunner(whole, batch, max_len, windows, units)


class Forest:
    """A runner beside what each of its slots should have read: the path that leads there.

    ``tolerance``: largest difference, in units of the largest number where that exceeds 1. ``layers``: whose states are
    asked for too.
    """

    def __init__(
        self,
        runner: Runner,
        model: PreTrainedModel,
        seed: int,
        tolerance: float = 1e-5,
        layers: Sequence[int] = (0,),
    ) -> None:
        self.layers = layers
        self.runner, self.model, self.tolerance = runner, model, tolerance
        self.random = random.Random(seed)
        self.paths: list[list[list[int]]] = [
            [] for _ in range(runner.batch)
        ]  # by row and slot: slots up to it
        self.tokens: list[list[int]] = [[] for _ in range(runner.batch)]
        self.roots: list[int | None] = [None] * runner.batch

    def text(self, row: int, slot: int) -> list[int]:
        return [self.tokens[row][at] for at in self.paths[row][slot]]

    def read(
        self, counts: Sequence[int], rows: Sequence[int] | None = None, *, tree: bool = True
    ) -> ModelOutput:
        """Read random tokens: with random parents, or as plain text."""
        numbers = range(self.runner.batch) if rows is None else rows
        n = max(1, *counts)
        feed = [[self.random.randrange(self.model.config.vocab_size) for _ in range(n)] for _ in counts]
        parents = [self._parents(row, count) for row, count in zip(numbers, counts, strict=True)]
        step = self.runner.extend(
            torch.tensor(feed),
            counts,
            rows=rows,
            parents=parents if tree else None,
            hidden_layers=self.layers,
        )
        assert step.hidden.isfinite().all()  # padding too
        for i, (row, count) in enumerate(zip(numbers, counts, strict=True)):
            for at in range(count):
                slot = len(self.tokens[row])
                parent = parents[i][at] if tree else slot - 1
                self.paths[row].append([*(self.paths[row][parent] if parent >= 0 else []), slot])
                self.tokens[row].append(feed[i][at])
                self.check(step, i, at, self.text(row, slot))
            if not tree:
                self.roots[row] = None
        assert self.runner.lengths == [len(tokens) for tokens in self.tokens]
        return step

    def _parents(self, row: int, count: int) -> list[int]:
        start = len(self.tokens[row])
        if self.roots[row] is None:
            self.roots[row] = start
        root = self.roots[row]
        assert root is not None
        return [self.random.randint(root - 1, slot - 1) for slot in range(start, start + count)]

    def check(self, step: ModelOutput, i: int, at: int, text: list[int]) -> None:
        logits, hidden = uncached(self.model, text)
        assert step.logits is not None
        for given, wanted in ((step.logits[i, at], logits[-1]), (step.hidden[i, at], hidden[-1])):
            scale = max(1.0, wanted.abs().max().item())
            torch.testing.assert_close(given, wanted, rtol=0, atol=self.tolerance * scale)

    def random_path(self, row: int) -> list[int]:
        """A path of the tree that ends anywhere, or nowhere."""
        root = self.roots[row]
        if root is None or self.random.random() < 0.2 or root == len(self.tokens[row]):
            return []
        return self.paths[row][self.random.randrange(root, len(self.tokens[row]))][root:]

    def commit_path(self, row: int, path: Sequence[int]) -> None:
        self.runner.commit_path(row, path)
        if self.roots[row] is not None:
            whole = [*range(self.roots[row] or 0), *path]
            self.tokens[row] = [self.tokens[row][slot] for slot in whole]
            self.paths[row] = [list(range(at + 1)) for at in range(len(whole))]
        self.roots[row] = None
        assert self.runner.lengths[row] == len(self.tokens[row])

    def rewind(self, lengths: Sequence[int]) -> None:
        self.runner.rewind(lengths)
        for row, length in enumerate(lengths):
            del self.tokens[row][length:], self.paths[row][length:]
            if length <= (self.roots[row] or 0):
                self.roots[row] = None
        assert self.runner.lengths == list(lengths)

    # --- programs ----------------------------------------------------------------------------------------------------
    def grow_and_keep(self) -> None:
        """Ragged trees in three rows that grow over several calls, over all rows and some, of which paths are kept."""
        self.read([9, 2, 0], tree=False)
        self.read([4, 6, 3])
        self.read([5, 1, 0])
        self.read([3, 2], rows=[2, 0])
        for row in range(3):
            self.commit_path(row, self.random_path(row))

    def go_on(self) -> None:
        """Plain text in three rows, and ragged trees behind it."""
        self.read([2, 1, 3], tree=False)
        self.read([6, 1, 5])
        self.read([1, 0, 2])

    def wander(self, steps: int) -> None:
        """So many acts by chance in three rows."""
        for _ in range(steps):
            room = min(self.runner.max_len - len(tokens) for tokens in self.tokens)
            act = self.random.choice(["tree", "tree", "plain", "keep", "rewind", "copy"])
            if act == "tree" and room > 5:
                self.read([self.random.randint(0, 5) for _ in range(3)])
            elif act == "plain" and room > 3:
                for row in range(3):
                    self.commit_path(row, self.random_path(row))
                self.read([self.random.randint(1, 3) for _ in range(3)], tree=False)
            elif act == "keep":
                row = self.random.randrange(3)
                self.commit_path(row, self.random_path(row))
            elif act == "copy":
                whole = len(self.tokens[0])
                length = self.random.choice([whole, self.random.randint(0, whole)])
                self.runner.copy(0, [2], None if length == whole else length)
                self.tokens[2], self.paths[2] = self.tokens[0][:length], self.paths[0][:length]
                self.roots[2] = self.roots[0] if length > (self.roots[0] or 0) else None
            else:
                self.rewind([max(0, len(tokens) - self.random.randint(0, 4)) for tokens in self.tokens])

    def rewind_within(self) -> None:
        """One row, rewound within a tree and under it, up to a tree from the first token on."""
        self.read([5], tree=False)
        self.read([6])
        self.rewind([8])
        self.read([3])  # grows what is left
        self.rewind([5])
        self.read([2], tree=False)  # linear again: no parents are needed
        self.read([4])
        self.rewind([3])
        self.read([4], tree=False)
        self.rewind([0])
        self.read([6])  # two roots may follow nothing
        self.commit_path(0, self.paths[0][5])


def forest(
    kind: str | PreTrainedModel, way: str, batch: int, seed: int = 0, tolerance: float = 1e-5
) -> Forest:
    model = tiny(kind) if isinstance(kind, str) else kind
    return Forest(runner_of(model, way, batch), model, seed, tolerance)


@pytest.fixture(autouse=True)
def graphs_without_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        fake_cuda(monkeypatch)
