"""A draft of another vocabulary that writes any of its tokens: their text is encoded in the target's (string level).

What the target needs several tokens for, and what takes the draft several, is drafted too, which the tokens in common
do not allow (``models.translated``). Timor et al. 2025, arXiv 2502.05202.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from sprinter.decode.checks import at_least
from sprinter.decode.drafter import Context, Drafter, Proposal, Proposer
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.models.choose import make_runner
from sprinter.models.common_tokens import words_of

__all__ = ["StringDrafter"]

_TAIL = 12
"""Tokens before a draft whose text is encoded with it, as a tokenizer may join them."""


class StringDrafter(Drafter):
    """Drafts greedily, one text at a time; meant for greedy texts.

    A draft is chosen, not drawn, and its law is one-hot: exact methods keep the target's law at every temperature, and
    above 0 they accept less than what the draft's own law would gain. The draft reads the text as it would write it
    itself, and keeps what it has read as far as that stays.

    Args:
        target: the pair that is to decode; it needs no draft. draft: the draft, loaded as a target alone.
        steps: of the draft model for one draft, at least 1.

    Raises:
        UserError: a tokenizer that is missing or of a kind whose tokens' bytes are not known.
    """

    uses_model: ClassVar[bool] = False  # not the pair's
    needs_target: ClassVar[bool] = True  # a text may be longer than the draft's context

    def __init__(self, target: Pair, draft: Pair, steps: int = 4) -> None:
        at_least("steps", steps, 1)
        words = None if draft.tokenizer is None else words_of(draft.tokenizer)
        if target.tokenizer is None or draft.tokenizer is None or words is None:
            raise UserError(
                "a string drafter needs both models' tokenizers, byte-level or SentencePiece ones"
            )
        self.steps, self._words, self._ours, self._theirs = steps, words, target.tokenizer, draft.tokenizer
        model = draft.models.target
        self._ends, self._room = (target.models.target.eos_ids[:1], model.eos_ids), model.context
        self._runner, self._read = make_runner(model.model, max_len=model.context), list[int]()

    def __repr__(self) -> str:
        return f"StringDrafter(steps={self.steps})"

    @property
    def proposer(self) -> Callable[[], Proposer]:
        """A factory of proposers, which share the draft's row."""
        return lambda: _StringProposer(self)

    @torch.inference_mode()
    def draft(self, text: Sequence[int]) -> list[int]:
        """The target's tokens for what the draft writes after a text in the target's ids."""
        ids = list(self._theirs.encode(str(self._ours.decode(list(text))), add_special_tokens=False))
        written = b""
        ended = False
        for _ in range(self.steps if 0 < len(ids) <= self._room - self.steps else 0):
            ids.append(token := self._next(ids))
            special, word = self._words.get(token, (True, b""))
            if special:
                ended = token in self._ends[1]
                break
            written += word
        tail, said = list(text[-_TAIL:]), written.decode(errors="ignore")
        joined = self._ours.encode(f"{self._ours.decode(tail)}{said}", add_special_tokens=False)
        whole = joined[: len(tail)] == tail
        made = joined[len(tail) :] if whole else self._ours.encode(said, add_special_tokens=False)
        return [*made, *(self._ends[0] if ended else ())]

    def _next(self, ids: Sequence[int]) -> int:
        same = 0
        while same < min(len(ids) - 1, len(self._read)) and ids[same] == self._read[same]:
            same += 1
        self._read = self._read[:same]  # if the pass fails
        self._runner.rewind([same])
        step = self._runner.extend(torch.tensor([ids[same:]], device=self._runner.device))
        self._read = list(ids)
        assert step.logits is not None
        return int(step.logits[0, -1].argmax())


class _StringProposer(Proposer):
    """Drafts once a round, and hands that out in parts."""

    def __init__(self, drafter: StringDrafter) -> None:
        self._drafter, self._round, self._start, self._planned = drafter, 0, 0, list[int]()

    def propose(self, context: Context) -> Proposal:
        """The rest of the round's draft."""
        if context.round != self._round:
            self._round, self._start = context.round, len(context.text)
            self._planned = [one for one in self._drafter.draft(context.text) if one < context.vocab]
        drafted = list(context.text[self._start :])
        if drafted != self._planned[: len(drafted)]:  # another token stands there
            self._planned = []
        return context.certain(self._planned[len(drafted) :][: context.at_most])
