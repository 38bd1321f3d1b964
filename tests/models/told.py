"""A runner beside what it should hold, for tests that compare it with the uncached pass."""

import random
from collections.abc import Sequence

import torch
from tests.models.tiny import tiny, uncached
from transformers import PreTrainedModel

from sprinter.models.interface import ModelOutput, Runner


class Told:
    """A runner and what its rows should hold; every answer is compared with the uncached pass.

    ``tolerance``: largest difference, in units of the largest number where that exceeds 1. ``compared`` counts the
    tokens whose states were compared.
    """

    def __init__(
        self, runner: Runner, model: str | PreTrainedModel, seed: int = 0, tolerance: float = 1e-5
    ) -> None:
        self.runner, self.model = runner, tiny(model) if isinstance(model, str) else model
        self.vocab, self.tolerance = self.model.config.vocab_size, tolerance
        self.rows: list[list[int]] = [[] for _ in range(runner.batch)]
        self.compared = 0
        self.random = random.Random(seed)

    def extend(self, counts: Sequence[int], n: int | None = None, *, logits: bool = True) -> None:
        n = n or max(1, *counts)
        tokens = [[self.random.randrange(self.vocab) for _ in range(n)] for _ in counts]
        given = None if all(count == n for count in counts) and self.random.random() < 0.7 else counts
        step = self.runner.extend(torch.tensor(tokens), given, logits=logits)
        for row, count in enumerate(counts):
            self.rows[row] += tokens[row][:count]
        self.check(step, counts, n, logits)

    def check(self, step: ModelOutput, counts: Sequence[int], n: int, logits: bool) -> None:
        assert self.runner.lengths == [len(row) for row in self.rows]
        assert logits == (step.logits is not None)
        if self.runner.name == "llamacpp" and not logits and n > 1:  # states would cost it the logits too
            assert step.hidden.shape[1] < n
            return
        assert step.hidden.shape == (len(counts), n, self.runner.hidden_size)
        assert step.hidden.isfinite().all()  # padding too: what it leaves in the cache must not be NaN
        for row, count in enumerate(counts):
            if count == 0:
                continue
            expected, hidden = uncached(self.model, self.rows[row])
            scale = hidden.abs().max().item()
            torch.testing.assert_close(
                step.hidden[row, :count], hidden[-count:], rtol=0, atol=self.tolerance * max(1.0, scale)
            )
            self.compared += count
            if step.logits is not None:
                assert step.logits.shape == (len(counts), n, self.vocab)
                scale = expected.abs().max().item()
                torch.testing.assert_close(
                    step.logits[row, :count], expected[-count:], rtol=0, atol=self.tolerance * max(1.0, scale)
                )

    def rewind(self, lengths: Sequence[int]) -> None:
        self.runner.rewind(lengths)
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]
        assert self.runner.lengths == list(lengths)

    def copy(self, from_row: int, to_rows: Sequence[int]) -> None:
        self.runner.copy(from_row, to_rows)
        for row in to_rows:
            self.rows[row] = list(self.rows[from_row])

    def anything(self, reads: bool = True) -> None:
        """One random operation; ``reads``: passes without logits too."""
        batch, rng, room = (
            self.runner.batch,
            self.random,
            [self.runner.max_len - len(row) for row in self.rows],
        )
        act = rng.choice(["extend", "extend", "extend", "rewind", "copy"])
        if act == "rewind":
            self.rewind([rng.randint(max(0, len(row) - 6), len(row)) for row in self.rows])
        elif act == "copy":
            self.copy(rng.randrange(batch), [row for row in range(batch) if rng.random() < 0.5])
        elif rng.random() < 0.3 and min(room) > 0:
            n = rng.randint(1, min(9, *room, 9))
            self.extend([n] * batch)
        else:
            counts = [min(rng.choice([0, 1, 3, 8]), free) for free in room]
            self.extend(counts, max(1, *counts) + rng.choice([0, 2]), logits=rng.random() < 0.8 or not reads)

    def ragged(self) -> None:
        """Three rows of 30 tokens with idle rows, copies and rewinds; the first is full at the end."""
        self.extend([9, 4, 0])
        self.extend([1, 0, 12])
        self.rewind([3, 4, 11])
        self.copy(2, [0, 2])
        self.extend([5, 2, 5])
        self.rewind([0, 6, 16])
        self.extend([0, 0, 0], 2)
        self.extend([16, 1, 1])
        self.extend([14, 0, 0])
