"""Texts drafted by bigrams keep the target's law."""

import pytest
from sprinter_bigrams import Bigrams

from sprinter.decode import check_drafter, parse_method


@pytest.mark.parametrize("least", [1, 2])
def test_texts_keep_the_targets_law(least: int) -> None:
    check_drafter(Bigrams(least))


def test_the_entry_points_are_found() -> None:
    assert parse_method("bigrams(gamma=3)").drafter == Bigrams()
    assert parse_method("drafter=bigrams(least=2),stop=fixed(gamma=2)").drafter == Bigrams(2)
