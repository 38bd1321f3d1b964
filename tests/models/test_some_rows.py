"""A pass over some rows: they read as if alone, the others are left as they were."""

from __future__ import annotations

import pytest
import torch
from tests.models.tiny import CONTEXT, tiny, uncached

from sprinter.models.choose import make_runner

TEXTS = [[(7 * i + 5 * row) % 61 for i in range(4 + 6 * row)] for row in range(4)]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama-eager", "qwen2-sliding", "gemma2", "gemma3"])
@pytest.mark.parametrize("rows", [[2], [1, 3], [3, 0, 2]])
def test_some_rows_read_on(kind: str, rows: list[int]) -> None:
    runner = make_runner(tiny(kind), batch=4, max_len=CONTEXT)
    texts = [list(text) for text in TEXTS]

    def read(numbers: list[int] | None, new: dict[int, list[int]]) -> None:
        order = list(range(4)) if numbers is None else numbers
        n = max(len(new[row]) for row in order)
        tokens = torch.tensor([new[row] + [0] * (n - len(new[row])) for row in order])
        step = runner.extend(tokens, [len(new[row]) for row in order], rows=numbers)
        for i, row in enumerate(order):
            texts[row] += new[row] if new[row] is not TEXTS[row] else []
            logits, hidden = uncached(tiny(kind), texts[row])
            count = len(new[row])
            assert step.logits is not None
            torch.testing.assert_close(step.logits[i, :count], logits[-count:], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(step.hidden[i, :count], hidden[-count:], atol=1e-4, rtol=1e-4)

    read(None, dict(enumerate(TEXTS)))
    read(rows, {row: [3 + row] * (1 + row) for row in rows})
    assert runner.lengths == [len(text) for text in texts]
    read(None, {row: [9, 8] for row in range(4)})


@pytest.mark.parametrize(
    ("rows", "read"), [([0, 1, 2, 4, 5, 6, 7], 8), ([0, 1, 2, 5, 6, 7], 6), ([0, 1, 2, 4, 5, 6, 3], 7)]
)
def test_where_few_rows_are_missing_they_read_padding(rows: list[int], read: int) -> None:
    """It costs less than to gather the keys and values of all others, unless the missing row has the longest text."""
    model, shapes = tiny("llama"), []
    runner = make_runner(model, batch=8, max_len=CONTEXT)
    texts = [TEXTS[row % 4] for row in range(7)] + [[*TEXTS[3], 1, 2, 3, 4]]
    padded = torch.tensor([text + [0] * (26 - len(text)) for text in texts])
    runner.extend(padded, [len(text) for text in texts])
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape[:2]))
    try:
        step = runner.extend(torch.full((len(rows), 2), 9), [1 + row % 2 for row in rows], rows=rows)
    finally:
        hook.remove()
    assert shapes == [(read, 2)]
    assert runner.lengths == [len(text) + (row in rows) * (1 + row % 2) for row, text in enumerate(texts)]
    assert step.logits is not None
    for i, row in enumerate(rows):
        count = 1 + row % 2
        expected = uncached(model, texts[row] + [9] * count)[0][-count:]
        torch.testing.assert_close(step.logits[i, :count], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt_neo"])
def test_the_first_pass_may_be_of_some_rows(kind: str) -> None:
    batch = 3 if kind == "llama" else 1
    runner = make_runner(tiny(kind), batch=batch, max_len=CONTEXT)
    step = runner.extend(torch.tensor([TEXTS[1]]), rows=[batch - 1])
    assert step.logits is not None
    torch.testing.assert_close(step.logits[0], uncached(tiny(kind), TEXTS[1])[0], atol=1e-4, rtol=1e-4)
    assert runner.lengths == [0] * (batch - 1) + [len(TEXTS[1])]


@pytest.mark.parametrize(
    ("rows", "message"), [([], "at least one row"), ([1, 1], "none twice"), ([4], "does not exist")]
)
def test_rows_that_cannot_be_meant(rows: list[int], message: str) -> None:
    runner = make_runner(tiny("llama"), batch=2, max_len=CONTEXT)
    with pytest.raises(ValueError, match=message):
        runner.extend(torch.ones(len(rows), 1, dtype=torch.long), rows=rows)
