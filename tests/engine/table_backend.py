"""A backend in one file: models that answer from a Markov table, with no network at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sprinter.models.interface import ModelOutput, Runner, ServedModel
from sprinter.models.runners.forward import BaseRunner, Pass
from sprinter.models.runners.tree import RowTree


class TableModel(ServedModel):
    """The logits of the next token are a row of ``table [V, V]``, by the last token and the one before it."""

    runner, reason, weights, exactness = "table", "a table of logits", "float64", "to the bit"
    dtype, hidden_size, context, token_bytes = torch.float64, 1, 4096, 8

    def __init__(self, vocab: int, seed: int, eos: int | None = None, apart: float = 1.0) -> None:
        common, own = (torch.Generator().manual_seed(number) for number in (0, seed))
        both = [torch.randn(vocab, vocab, generator=one, dtype=torch.float64) for one in (common, own)]
        self.table = 2 * both[0] + apart * both[1]
        self.name, self.fingerprint = f"table-{seed}", f"table-{vocab}-{seed}"
        self.vocab_size, self.size = vocab, vocab * vocab
        self.eos_ids = () if eos is None else (eos,)
        self.config = PreTrainedConfig(
            vocab_size=vocab, hidden_size=1, num_hidden_layers=1, num_attention_heads=1
        )

    def logits(self, text: Sequence[int]) -> Tensor:
        """After a text, ``[V]``."""
        before = self.table[text[-2]].roll(1) if len(text) > 1 else 0
        return self.table[text[-1]] + before

    def make_runner(self, batch: int, max_len: int, leaves: int) -> Runner:
        return TableRunner(self, batch, max_len)


class TableRunner(BaseRunner):
    """Its rows hold token ids; a tree's nodes are read along their paths."""

    name, branches = "table", True

    def __init__(self, model: TableModel, batch: int, max_len: int) -> None:
        super().__init__(batch, max_len)
        self.model, self.device = model, model.device
        self.vocab_size, self.hidden_size = model.vocab_size, 1
        self.texts: list[list[int]] = [[] for _ in range(batch)]

    @property
    def cache_bytes(self) -> int:
        return 8 * sum(map(len, self.texts))

    def _drop(self, lengths: Sequence[int]) -> None:
        for text, length in zip(self.texts, lengths, strict=True):
            del text[length:]

    def _copy(self, from_row: int, row: int, length: int) -> None:
        self.texts[row] = self.texts[from_row][:length]

    def _adopt(self, other: TableRunner, length: int) -> None:
        self.texts[0] = other.texts[0][:length]

    def wipe(self, row: int) -> None:
        del self.texts[row][self._lengths[row] :]

    def _compact(self, row: int, path: Sequence[int], root: int) -> None:
        self.texts[row][root:] = [self.texts[row][slot] for slot in path]

    def _step(self, asked: Pass) -> ModelOutput:
        found = torch.zeros(*asked.tokens.shape, self.vocab_size, dtype=torch.float64)
        for i, (row, count) in enumerate(zip(asked.rows, asked.counts, strict=True)):
            text, tree = self.texts[row], asked.trees[i] if asked.trees else None
            for at in range(count):
                text.append(int(asked.tokens[i, at]))
                slots = list(range(len(text))) if tree is None else _path(tree, len(text) - 1)
                found[i, at] = self.model.logits([text[slot] for slot in slots])
        return ModelOutput(found if asked.logits else None, found[..., :1])


def _path(tree: RowTree, slot: int) -> list[int]:
    """The slots from the beginning of the text to a slot, along the parents of a tree."""
    path = [slot]
    while path[-1] >= tree.root:
        path.append(tree.parents[path[-1] - tree.root])
    return [*range(path[-1] + 1), *path[-2::-1]]
