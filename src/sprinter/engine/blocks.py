"""Draft models that draft several tokens in one pass: their masks, and the pass of a row."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sprinter.decode.draft import AskDraft, AskTips
from sprinter.decode.draft_heads import Blocks, BlockText, HeadText
from sprinter.decode.method import Method
from sprinter.decode.sequence import TokenSequence
from sprinter.engine.backends.base import DraftPlan, RowInput, TipLaws, TreeRow
from sprinter.errors import UserError
from sprinter.models.interface import ServedModel
from sprinter.models.pair import LoadedModel

__all__ = ["block_row", "blocks_of", "take_block"]


_MASKS = "pard_token", "ptd_token_id"
"""Names that published configs have for the mask (PARD's first)."""


def blocks_of(method: Method, draft: LoadedModel) -> Blocks:
    """A draft model that drafts several tokens in one pass.

    Raises:
        UserError: it has no mask token.
    """
    config = None if isinstance(draft.model, ServedModel) else draft.model.config
    mask = next((one for one in (getattr(config, name, None) for name in _MASKS) if one is not None), None)
    if config is None or type(mask) is not int or not 0 <= mask < config.vocab_size:
        which = (
            "no mask token"
            if config is None or mask is None
            else f"a mask token {mask!r} that it does not know"
        )
        raise UserError(
            f"method {method.name} drafts several tokens in one pass of the draft, and '{draft.id}' has {which}: give "
            "one of PARD, with pard_token in its config.json and the target's tokenizer, to be run by PyTorch"
        )
    return Blocks(mask, method.drafter.tokens_a_pass)


def block_row(block: BlockText, ask: AskDraft | AskTips, plan: DraftPlan) -> TreeRow:
    """The unread text and masks behind it, as many as the request can need, for one pass of the draft model."""
    view, text = ask.sequence.draft, ask.sequence.tokens
    count = min(block.most, ask.at_most if isinstance(ask, AskDraft) else ask.depth)
    tokens = [*view.unread(text, len(text)), *[block.mask] * (count - 1)]
    return TreeRow(RowInput(view.row, view.read, tokens), count, plan, bare=True)


def take_block(
    block: HeadText, sequence: TokenSequence, done: TipLaws, gather: Callable[[Tensor], Tensor]
) -> None:
    """Keep what the pass of ``block_row`` has made. The next pass in the row discards the masks."""
    assert isinstance(block, BlockText) and done.logits is not None
    sequence.draft.read, sequence.draft.after = len(sequence), None
    block.take(sequence, gather(done.logits))
