"""ROUGE-1, 2 and L against a reference (Lin 2004), computed by the rouge-score package."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sprinter.errors import UserError, install_line

__all__ = ["CELLS", "ROUGE", "check_rouge", "rouge"]

ROUGE = ("rouge1", "rouge2", "rougeL")
CELLS = 4_000_000
"""Maximum table size (words of the answer × words of the reference) for ROUGE-L; longer texts have no ROUGE-L."""


def check_rouge() -> None:
    """Raise a UserError if rouge-score is not installed."""
    if find_spec("rouge_score") is None:
        raise UserError(
            f"ROUGE needs rouge-score: {install_line('bench')}, or leave the measures out (--no-quality)"
        )


def rouge(text: str, reference: str) -> dict[str, float]:
    """F-measure, precision and recall of each of ``ROUGE``, in [0, 1].

    Words are runs of a-z and 0-9, as in the original program. With a reference that has none the result is empty.

    Raises:
        UserError: rouge-score is not installed.
    """
    check_rouge()
    split = import_module("rouge_score.tokenize").tokenize
    words = [len(split(part, None)) for part in (text, reference)]
    if not words[1]:
        return {}
    kinds = ROUGE if words[0] * words[1] <= CELLS else ROUGE[:2]
    values: dict[str, float] = {}
    for kind, score in _scorer(kinds).score(reference, text).items():
        values |= {kind: score.fmeasure, f"{kind}_precision": score.precision, f"{kind}_recall": score.recall}
    return {name: float(value) for name, value in values.items()}


@cache
def _scorer(kinds: tuple[str, ...]) -> Any:
    return import_module("rouge_score.rouge_scorer").RougeScorer(list(kinds))
