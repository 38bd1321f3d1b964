"""Checks that the models of a pair share a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

from sprinter.errors import UserError

__all__ = ["Vocabulary", "check_rows", "check_same_vocabulary", "common_tokens", "is_foreign"]

Vocabulary = Mapping[str, int]
"""Token → id."""


def check_same_vocabulary(target: Vocabulary, draft: Vocabulary, target_name: str, draft_name: str) -> None:
    """Refuse a pair whose tokenizers assign different ids.

    Raises:
        UserError: names both sizes and the first token id that differs, with both its strings; and the tokenizer to
            give if one model only lacks the other's last tokens.
    """
    at = _first_difference(target, draft)
    if at is None:
        return
    fix = (
        "choose a draft of the target's own family, make one (`sprinter draft distill`), or give no draft "
        "(method=lookup drafts without one)"
    )
    if shorter := [name for name, own in ((target_name, target), (draft_name, draft)) if _ends(own, at)]:
        fix = (
            f"give tokenizer={shorter[0]} (--tokenizer), then tokens that one of them lacks are never written"
        )
    raise UserError(
        f"the two vocabularies differ: the target has {len(target)} tokens and the draft {len(draft)}; token {at} "
        f"is {_shown(target, at)} in the target and {_shown(draft, at)} in the draft: {fix}"
    )


def common_tokens(given: Vocabulary, own: Mapping[str, Vocabulary | None]) -> int | None:
    """Number of leading token ids that a tokenizer shares with the models' own; None if all vocabularies are the same.

    Args:
        given: vocabulary of the tokenizer that was given for the pair.
        own: for "target" and "draft", the vocabulary of the model's own tokenizer, if it has one.

    Raises:
        UserError: an id stands for different tokens in the given tokenizer and in a model's own.
    """
    sizes = []
    for which, vocabulary in own.items():
        at = None if vocabulary is None else _first_difference(given, vocabulary)
        if vocabulary is None or at is None:
            continue
        if not (_ends(given, at) or _ends(vocabulary, at)):
            raise UserError(
                f"token {at} is {_shown(given, at)} in the tokenizer that was given and {_shown(vocabulary, at)} in "
                f"the {which}'s own: give one that both models were trained with, or choose a draft of the target's "
                "own family"
            )
        sizes.append(at)
    return min(sizes, default=None)


def check_rows(vocabulary: Vocabulary, vocab_size: int, which: str) -> None:
    """Refuse a model with fewer embedding rows than the tokenizer has tokens. More rows are padding, and allowed.

    Raises:
        UserError: names both sizes.
    """
    needed = max(vocabulary.values(), default=-1) + 1
    if needed > vocab_size:
        raise UserError(
            f"the tokenizer has token ids up to {needed - 1}, the {which} only {vocab_size} embedding rows: "
            "give the tokenizer that the model was trained with"
        )


def is_foreign(target: Vocabulary, draft: Vocabulary) -> bool:
    """Whether the vocabularies differ by more than last tokens that one of them lacks."""
    at = _first_difference(target, draft)
    return at is not None and not (_ends(target, at) or _ends(draft, at))


def _first_difference(some: Vocabulary, others: Vocabulary) -> int | None:
    """The first id that stands for different tokens or is missing from one vocabulary; None if they are equal."""
    if some == others:
        return None
    names, theirs = _by_id(some), _by_id(others)
    return next((i for i in sorted(names.keys() | theirs.keys()) if names.get(i) != theirs.get(i)), None)


def _ends(vocabulary: Vocabulary, at: int) -> bool:
    """Whether the vocabulary has tokens and all their ids are below ``at``."""
    return 0 <= max(vocabulary.values(), default=-1) < at


def _by_id(vocabulary: Vocabulary) -> dict[int, str]:
    return {number: token for token, number in vocabulary.items()}


def _shown(vocabulary: Vocabulary, at: int) -> str:
    token = _by_id(vocabulary).get(at)
    return "absent" if token is None else repr(token)
