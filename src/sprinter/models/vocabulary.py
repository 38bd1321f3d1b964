"""Do two models speak of the same tokens?"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from sprinter.errors import UserError

__all__ = ["check_rows", "check_same_vocabulary"]


def check_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse a pair whose tokenizers number their tokens differently.

    Raises:
        UserError: names both sizes and the first token id that differs, with both its strings.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    names, others = _by_id(ours), _by_id(theirs)
    at = next((i for i in sorted(names.keys() | others.keys()) if names.get(i) != others.get(i)), None)
    if at is None:
        return
    raise UserError(
        f"the two vocabularies differ: the target has {len(ours)} tokens and the draft {len(theirs)}; token {at} "
        f"is {_shown(names.get(at))} in the target and {_shown(others.get(at))} in the draft: "
        "choose a draft of the target's own family"
    )


def check_rows(tokenizer: PreTrainedTokenizerBase, vocab_size: int, which: str) -> None:
    """Refuse a model with fewer embedding rows than its tokenizer has tokens (more are padding, and allowed).

    Raises:
        UserError: names both sizes.
    """
    needed = max(tokenizer.get_vocab().values(), default=-1) + 1
    if needed > vocab_size:
        raise UserError(
            f"the tokenizer has token ids up to {needed - 1}, the {which} only {vocab_size} embedding rows: "
            "give the tokenizer that the model was trained with"
        )


def _by_id(vocabulary: dict[str, int]) -> dict[int, str]:
    return {number: token for token, number in vocabulary.items()}


def _shown(token: str | None) -> str:
    return "absent" if token is None else repr(token)
