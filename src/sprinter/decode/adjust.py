"""Adjustments of the logits to the text before them: penalties, biases, forbidden tokens.

They come before temperature and truncation, for target and draft alike, and so are part of the laws p and q that tokens
are drawn from and judged by. Raw laws, which signals read, are the models' own, without adjustments. Order, as in
transformers: bias, repetition penalty, frequency and presence penalty, bad words, EOS and stop tokens; then a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.decode.draft import Draft
from sprinter.decode.grammar import Grammar
from sprinter.decode.sequence import common_prefix
from sprinter.errors import SprinterError, UserError

__all__ = ["Adjust", "Adjuster", "Adjustments"]


class Adjust(NamedTuple):
    """Adjusts logits ``[n, V]``, each row to its own text, when it is called.

    Attributes:
        masks: of a grammar, which it waits for; None: none.
    """

    apply: Callable[[Tensor], Tensor]
    masks: Future[Tensor] | None

    def __call__(self, logits: Tensor) -> Tensor:
        return self.apply(logits)


@dataclass(frozen=True, slots=True)
class Adjustments:
    """How logits depend on the text before them, beyond the model.

    Attributes:
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in prompt and text (CTRL,
            Keskar et al. 2019, as in transformers); 1 changes nothing.
        presence_penalty: subtracted from the logits of tokens in the text, without the prompt (OpenAI, vLLM).
        frequency_penalty: subtracted once per occurrence in the text, without the prompt.
        logit_bias: (token id, number added to its logit).
        min_new_tokens: number of tokens before which ``ends`` are forbidden.
        ends: EOS and stop tokens.
        bad_words: sequences of token ids; the last of one is forbidden after the others, which may lie in the prompt.
        grammar: of the text; where the model, or what else is forbidden, leaves none of the tokens that it allows, all
            of them have the same chance.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    ends: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    @property
    def counts(self) -> bool:
        """Whether any logit depends on how often its token occurs."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def forbids(self) -> bool:
        """Whether any token may be forbidden."""
        return bool(self.bad_words or (self.min_new_tokens and self.ends) or self.grammar)

    def __bool__(self) -> bool:
        return self.counts or self.forbids or bool(self.logit_bias)


class Adjuster:
    """Adjusts one model's logits in one text. A token costs the same wherever it stands in the text.

    Args:
        settings: the adjustments.
        prompt: token ids.
        vocab: size of the vocabulary.
        device: the device of the model's logits.

    Attributes:
        error: why the grammar could not be followed in the last pass, whose logits are then as they were.
    """

    error: Exception | None = None

    def __init__(
        self, settings: Adjustments, prompt: Sequence[int], vocab: int, device: torch.device | None = None
    ) -> None:
        self._settings, self._vocab, self._device = settings, vocab, device
        self._text, self._prompt_len = list(prompt), len(prompt)
        if settings.counts:
            self._counts = torch.zeros(vocab, device=device)  # in the text without the prompt
            self._prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
            self._prompt[list(set(prompt))] = True
        self._biased = torch.tensor([id for id, _ in settings.logit_bias], dtype=torch.int64, device=device)
        self._always = frozenset(word[0] for word in settings.bad_words if len(word) == 1)
        self._longer = [word for word in settings.bad_words if len(word) > 1]
        self._longest = max((len(word) - 1 for word in self._longer), default=0)

    def follow(self, text: Sequence[int]) -> None:
        """Go to a text, which begins with the prompt."""
        same = max(common_prefix(self._text, text), self._prompt_len)
        self._count(self._text[same:], -1.0)
        del self._text[same:]
        self._count(text[same:], 1.0)
        self._text += text[same:]

    def along(
        self, text: Sequence[int], start: int, tokens: Sequence[int], parents: Sequence[int] | None = None
    ) -> Adjust:
        """The adjustment of the logits after each of ``tokens``, which follow ``text[:start]``.

        Args:
            parents: of the last tokens, nodes of a tree, as in ``Tree``; None: all follow each other.
        """
        self.follow(text[: max(start, self._prompt_len)])
        paths: list[tuple[int, ...]] = []
        chain = len(tokens) - len(parents or ())
        for i, x in enumerate(tokens):
            parent = i - 1 if i < chain or parents is None else max(chain + parents[i - chain], chain - 1)
            before = paths[parent] if parent >= 0 else ()
            paths.append((*before, x) if start + i >= self._prompt_len else ())
        return self.after(paths)

    def after(self, paths: Sequence[Sequence[int]]) -> Adjust:
        """The adjustment of logits ``[n, V]``, row i after the text and the tokens in ``paths[i]``.

        Raises:
            UserError: every token is forbidden after one of them.
        """
        grammar, masks = self._settings.grammar, None
        if grammar is not None:
            masks = grammar.masks([(*self._text[self._prompt_len :], *path) for path in paths])
        return Adjust(partial(self._adjust, paths, [self.forbidden(path) for path in paths], masks), masks)

    def forbidden(self, path: Sequence[int] = ()) -> frozenset[int]:
        """Ids of the tokens that must not follow the text and the tokens in ``path``, whatever a grammar says.

        Raises:
            UserError: all of them.
        """
        length, ids = len(self._text) + len(path) - self._prompt_len, self._always
        if length < self._settings.min_new_tokens:
            ids = ids.union(self._settings.ends)
        if self._longer:
            end = (*self._text[-self._longest :], *path)
            ids = ids.union(word[-1] for word in self._longer if end[1 - len(word) :] == word[:-1])
        if len(ids) >= self._vocab:
            raise UserError(
                f"every token is forbidden after {length} new tokens (bad_words, min_new_tokens): allow at least one"
            )
        return ids

    def kept(self, draft: Draft) -> Future[int] | None:
        """Begin to find how many of a proposal's first tokens the grammar allows; None: there is nothing to ask."""
        grammar = self._settings.grammar
        if grammar is None or not draft.tokens:
            return None
        return grammar.kept(self._text[self._prompt_len :], draft.tokens)

    def allow(self, draft: Draft, n: int | None = None) -> Draft:
        """A proposal up to the first token that is forbidden.

        Args:
            n: number of its first tokens that the grammar allows; None: all.

        Raises:
            SprinterError: this token was drawn: to drop it would bias the text.
        """
        n = len(draft.tokens) if n is None else n
        n = next((i for i, x in enumerate(draft.tokens[:n]) if x in self.forbidden(draft.tokens[:i])), n)
        if n == len(draft.tokens):
            return draft
        if float(draft.laws[n, draft.tokens[n]]) < 1.0:
            raise SprinterError(
                f"the drafter drew token {draft.tokens[n]}, which is forbidden here (bad_words, min_new_tokens, a "
                "grammar), from a law of its own: use a drafter whose laws are one-hot, or the draft model"
            )
        signals = {name: values[:n] for name, values in draft.signals.items()}
        raw = None if draft.raw is None else draft.raw[:n]
        return draft._replace(tokens=draft.tokens[:n], laws=draft.laws[:n], signals=signals, raw=raw)

    def _count(self, tokens: Sequence[int], number: float) -> None:
        if tokens and self._settings.counts:
            ids = torch.tensor(tokens, device=self._device)
            self._counts.index_put_((ids,), self._counts.new_full((), number), accumulate=True)

    def _adjust(
        self,
        paths: Sequence[Sequence[int]],
        forbidden: Sequence[frozenset[int]],
        masks: Future[Tensor] | None,
        logits: Tensor,
    ) -> Tensor:
        settings = self._settings
        full = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        if settings.logit_bias:
            bias = full.new_tensor([bias for _, bias in settings.logit_bias])
            full = full.index_add(1, self._biased, bias.expand(len(full), -1))
        if settings.counts:
            counts = self._counts_after(paths).to(full.dtype)
            if (penalty := settings.repetition_penalty) != 1.0:
                seen = self._prompt | (counts > 0)
                full = torch.where(seen, torch.where(full < 0, full * penalty, full / penalty), full)
            full = full - settings.frequency_penalty * counts - settings.presence_penalty * (counts > 0)
        rows, ids = _places(forbidden)
        if rows:
            at = torch.tensor(rows, device=full.device), torch.tensor(ids, device=full.device)
            full = full.index_put(at, full.new_tensor(-torch.inf))
        if masks is None:
            return full
        try:
            allowed = masks.result()
        except Exception as error:  # of this text alone: others share the pass
            self.error = error
            return full
        return _within(allowed[:, : full.shape[-1]].to(full.device), full)

    def _counts_after(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Number of occurrences in the text before each row, ``[n, V]``."""
        rows, ids = _places(paths)
        if not rows:
            return self._counts.expand(len(paths), -1)
        counts, one = self._counts.repeat(len(paths), 1), self._counts.new_ones(())
        at = torch.tensor(rows, device=self._device), torch.tensor(ids, device=self._device)
        return counts.index_put_(at, one, accumulate=True)


def _within(allowed: Tensor, logits: Tensor) -> Tensor:
    """Logits of the allowed tokens alone; where none of these is possible, the same logit for each of them."""
    kept = logits.masked_fill(~allowed, -torch.inf)
    stuck = kept.amax(-1, keepdim=True) == -torch.inf
    return kept.masked_fill_(stuck & allowed, 0.0)


def _places(ids: Sequence[Sequence[int] | frozenset[int]]) -> tuple[list[int], list[int]]:
    """(row, id) of all ids, as two lists."""
    return [row for row, own in enumerate(ids) for _ in own], [id for own in ids for id in own]
