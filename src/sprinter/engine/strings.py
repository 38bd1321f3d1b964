"""A draft of another vocabulary that writes any of its tokens: their text is encoded in the target's (string level).

What the target needs several tokens for, and what takes the draft several, is drafted too, which the tokens in common
do not allow (``models.translated``). Timor et al. 2025, arXiv 2502.05202.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import Tensor

from sprinter.decode.checks import at_least
from sprinter.decode.drafter import Context, Drafter, Proposal, Proposer
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.models.choose import make_runner
from sprinter.models.common_tokens import added_first, words_of

__all__ = ["StringDrafter"]

_TAIL = 12
"""Tokens before a draft whose text is encoded with it, as a tokenizer may join them."""
_SHORT = 1024
"""Slots of the draft's first row; a longer text is read anew in one of twice its length."""
_AS_IT_IS: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StringDrafter(Drafter):
    """Drafts greedily, one text at a time; meant for greedy texts.

    A draft is chosen, not drawn, and its law is one-hot: exact methods keep the target's law at every temperature, and
    above 0 they accept less than what the draft's own law would gain. The draft reads the text as it would write it
    itself, with the token that its tokenizer begins a text with, and keeps what it has read as far as that stays.

    Args:
        target: the pair that is to decode; it needs no draft. draft: the draft, loaded as a target alone.
        steps: of the draft model for one draft, at least 1.

    Raises:
        UserError: a tokenizer that is missing or of a kind whose tokens' bytes are not known.
    """

    uses_model: ClassVar[bool] = False  # not the pair's
    needs_target: ClassVar[bool] = (
        True  # a text may be longer than the draft's context, or end within a character
    )

    def __init__(self, target: Pair, draft: Pair, steps: int = 4) -> None:
        at_least("steps", steps, 1)
        words = None if draft.tokenizer is None else words_of(draft.tokenizer)
        if target.tokenizer is None or draft.tokenizer is None or words is None:
            raise UserError(
                "a string drafter needs both models' tokenizers, byte-level or SentencePiece ones"
            )
        self.steps, self._words, self._ours, self._theirs = steps, words, target.tokenizer, draft.tokenizer
        self._first, self._their_first = added_first(target.tokenizer), added_first(draft.tokenizer)
        model = draft.models.target
        self._ends, self._model, self._room = (
            (target.models.target.eos_ids[:1], model.eos_ids),
            model,
            model.context,
        )
        self._runner, self._read = make_runner(model.model, max_len=min(_SHORT, model.context)), list[int]()

    def __repr__(self) -> str:
        return f"StringDrafter(steps={self.steps})"

    @property
    def proposer(self) -> Callable[[], Proposer]:
        """A factory of proposers, which share the draft's row."""
        return lambda: _StringProposer(self)

    @torch.inference_mode()
    def draft(self, text: Sequence[int]) -> list[int]:
        """The target's tokens for what the draft writes after a text in the target's ids; [] if it cannot read it."""
        ids, written = self.spelled(text), list[int]()
        if not 0 < len(ids) <= self._room - self.steps:
            return []
        while len(written) < self.steps and not (written and self.is_special(written[-1])):
            written.append(int(self.logits([*ids, *written]).argmax()))
        return self.encoded(text, written)

    def spelled(self, text: Sequence[int]) -> list[int]:
        """A text in the target's ids as the draft would write it; [] where it ends within a character."""
        whole = list(text[len(self._first) if list(text[:1]) == self._first else 0 :])
        said = str(self._ours.decode(whole, **_AS_IT_IS))
        if said.endswith(_INCOMPLETE):
            return []
        ids = list(self._theirs.encode(said, add_special_tokens=False))
        return ids if ids[:1] == self._their_first else [*self._their_first, *ids]

    def is_special(self, token: int) -> bool:
        """Whether a token of the draft's stands for no text."""
        return self._words.get(token, (True, b""))[0]

    def encoded(self, text: Sequence[int], written: Sequence[int]) -> list[int]:
        """The draft's tokens in the target's, after a text; an EOS is the target's, another special token nothing."""
        words = (self._words[one][1] for one in written if not self.is_special(one))
        said = b"".join(words).decode(errors="ignore")
        end = self._ends[0] if written and written[-1] in self._ends[1] else ()
        return [*self._after(str(self._ours.decode(list(text[-_TAIL:]), **_AS_IT_IS)), said), *end]

    def _after(self, tail: str, said: str) -> list[int]:
        """The target's tokens for ``said``. After the tail, as a tokenizer may put a space before a text; after a line
        break where it would join both."""
        for before in (tail, "\n"):
            alone, joined = (
                self._ours.encode(one, add_special_tokens=False) for one in (before, before + said)
            )
            if joined[: len(alone)] == alone:
                return list(joined[len(alone) :])
        return list(self._ours.encode(said, add_special_tokens=False))

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The draft's after a text in its own ids, ``[vocab]``."""
        if len(ids) > self._runner.max_len:
            self._read.clear()
            self._runner = make_runner(self._model.model, max_len=min(2 * len(ids), self._room))
        same = 0
        while same < min(len(ids) - 1, len(self._read)) and ids[same] == self._read[same]:
            same += 1
        self._read = self._read[:same]  # if the pass fails
        self._runner.rewind([same])
        step = self._runner.extend(torch.tensor([ids[same:]], device=self._runner.device))
        self._read = list(ids)
        assert step.logits is not None
        return step.logits[0, -1]


class _StringProposer(Proposer):
    """Drafts once a round, and hands that out in parts."""

    def __init__(self, drafter: StringDrafter) -> None:
        self._drafter, self._round, self._start, self._planned = drafter, 0, 0, list[int]()

    def propose(self, context: Context) -> Proposal:
        """The rest of the round's draft."""
        if context.round != self._round:
            self._round, self._start = context.round, len(context.text)
            drafted = self._drafter.draft(context.text)
            self._planned = list(takewhile(lambda one: one < context.vocab, drafted))
        drafted = list(context.text[self._start :])
        if drafted != self._planned[: len(drafted)]:  # another token stands there
            self._planned = []
        return context.certain(self._planned[len(drafted) :][: context.at_most])
