"""A seed's text does not depend on who else is served, over HTTP: one request alone and among other streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from benchmarks.serve import crowd
from tests.serve.server import serving

import sprinter

PROMPTS = [
    "The river rises in the mountains and",
    "In 1912 the company was sold to",
    "She wrote three novels, of which",
    "The village lies on the road from",
]


@pytest.mark.parametrize(
    ("dtype", "others"),
    [
        ("float64", 8),
        pytest.param("float64", 32, marks=pytest.mark.slow),
        pytest.param("int8", 32, marks=pytest.mark.slow),
    ],
)
def test_alone_and_in_a_crowd(dtype: str, others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64, and kernels in which a token has the same law in every forward pass."""
    monkeypatch.setattr(crowd, "NEW_TOKENS", 16)
    monkeypatch.setattr(crowd, "OTHERS", others)
    methods = crowd.PAIRS["builtin"][0]
    asked = crowd.requests(methods, PROMPTS, 2)
    pair = sprinter.load_pair(dtype=dtype, compile=False)
    with serving(pair, rows=crowd.OTHERS + 1, model_name="model") as server:
        first = asyncio.run(crowd.alone(server, asked))
        together = asyncio.run(crowd.in_crowd(server, asked, methods, PROMPTS))
    assert [one.ids for one in together] == [one.ids for one in first]
    assert [one.text for one in together] == [one.text for one in first]
    assert len({one.text for one in first}) > len(methods)


def test_where_texts_part() -> None:
    assert crowd.parting([1, 2, 3], [1, 2, 3]) is None
    assert crowd.parting([1, 2, 3], [1, 5, 3]) == 1
    assert crowd.parting([1, 2, 3], [1, 2]) == 2


def test_rows_of_the_table() -> None:
    def read(*ids: int) -> Any:
        return crowd.StreamTimes(ids=list(ids), text="".join(map(str, ids)))

    asked = crowd.requests(["autoregressive"], PROMPTS, 3)
    a = [read(1, 2), read(3, 4), read(5, 6)]
    (row,) = crowd.compare(asked, a, [read(1, 2), read(3, 9), read(7, 6)])
    assert (row["texts"], row["tokens"], row["same_in_crowd"]) == (3, 6, 1)
    assert (row["first_parting"], row["median_parting"]) == (0, 0.5)
