"""Counts in a method are bounded by what a text can hold; nothing is allocated by what was asked."""

from __future__ import annotations

import dataclasses
import inspect
import tracemalloc
from typing import Any

import pytest

import sprinter
from sprinter.decode.spec import ACCEPT, DRAFTER, METHODS, STOP, TRUST, Method, parse_method
from sprinter.decode.stop import Fixed, Untrusted
from sprinter.errors import UserError
from sprinter.serve.speculation import vllm_metrics


def _counts(factory: Any) -> list[str]:
    found = inspect.signature(factory).parameters.values()
    return [one.name for one in found if type(one.default) is int]


PRESETS = [f"{name}({count}=%s)" for name in METHODS.names() for count in _counts(METHODS.get(name))]
RULES = [
    f"{part}={name}({count}=%s)"
    for part, registry in (("trust", TRUST), ("stop", STOP), ("accept", ACCEPT), ("drafter", DRAFTER))
    for name in registry.names()
    for count in _counts(registry.get(name))
]
GUARDS = ["speculative(cap=%s)", "sprinter(head=%s)", "trust=coin(rate=0.5),stop=untrusted(tail=1),cap=%s"]


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair()


@pytest.mark.parametrize("spec", [*PRESETS, *RULES, *GUARDS])
def test_no_count_is_larger_than_a_text(pair: sprinter.Pair, spec: str) -> None:
    for count in (10**9, 10**30, max(pair.models.longest, pair.models.vocab_size) + 1):
        with pytest.raises(UserError) as error:
            pair.stream([0], method=spec % count, max_new_tokens=6).close()
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("spec", [*PRESETS, *GUARDS])
def test_the_row_cuts_what_is_larger_than_it(pair: sprinter.Pair, spec: str) -> None:
    try:
        out = pair.generate([3, 1], method=spec % pair.models.longest, max_new_tokens=6)
    except UserError:
        return  # a tree, or a rule whose own limit is smaller; heads that the pair does not have
    assert len(out.tokens) == 6 and out.stats.drafted < 512 * out.stats.rounds


def test_counts_inside_of_rules_are_found() -> None:
    inner = Untrusted(1, Fixed(2**21))
    with pytest.raises(
        UserError, match=r"gamma=2097152 is more than any text has tokens: give at most 1048576"
    ):
        Method(stop=inner)
    method = parse_method("speculative")
    with pytest.raises(UserError, match="cap=1000000000"):
        dataclasses.replace(method, cap=10**9)


def test_the_report_is_as_long_as_what_happened(pair: sprinter.Pair) -> None:
    out = pair.generate([3, 1], method=f"speculative(gamma={pair.models.longest})", max_new_tokens=6)
    tracemalloc.start()
    found = vllm_metrics([out])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found["acceptance_histogram"]) <= 7 and peak < 20_000
