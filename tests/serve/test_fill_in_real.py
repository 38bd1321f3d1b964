"""Code in the middle, by Qwen2.5-Coder: what stands behind it is read, and the text ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.real import needs_gguf, real_file
from tests.serve.server import Running, serving

import sprinter

pytestmark = [pytest.mark.real, needs_gguf]


@pytest.fixture(scope="module")
def coder() -> Iterator[Running]:
    pair = sprinter.load_pair(real_file("qwen-draft"), runner="torch", dtype="gguf")
    with serving(pair, rows=1, max_len=256) as found:
        yield found


def filled(coder: Running, before: str, behind: str, method: str = "lookup") -> str:
    body: dict[str, Any] = {"prompt": before, "suffix": behind, "max_tokens": 40, "temperature": 0}
    answer = coder.post("/v1/completions", body | {"sprinter": {"method": method}})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop" and "<|" not in choice["text"]
    return str(choice["text"])


@pytest.mark.parametrize("name", ["total", "largest"])
def test_a_variable_that_is_read_later_is_set(coder: Running, name: str) -> None:
    text = filled(coder, "numbers = [3, 1, 2]\n", f"\nprint({name})\n")
    assert f"{name} = " in text or f"{name} += " in text


def test_a_function_is_filled_in(coder: Running) -> None:
    before, behind = "def add(a, b):\n    ", "\n\nassert add(2, 3) == 5\n"
    text = filled(coder, before, behind)
    assert text.startswith("return a + b") and text == filled(coder, before, behind, "autoregressive")
