"""The built-in pair, and one server a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.serve.server import Running, builtin_pair, serving

import sprinter


@pytest.fixture(scope="session")
def pair() -> sprinter.Pair:
    return builtin_pair()


@pytest.fixture(scope="module")
def server(pair: sprinter.Pair) -> Iterator[Running]:
    with serving(pair, rows=4) as found:
        yield found
