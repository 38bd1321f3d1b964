"""Laws of a pair along texts: what a replay decodes with in place of the models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sprinter.decode.checks import at_least
from sprinter.decode.signals import prefix_signals, read_signals
from sprinter.engine.pair import Pair
from sprinter.engine.prompt import encode
from sprinter.errors import UserError
from sprinter.heads.features import DraftStep, read_features
from sprinter.heads.head import Head
from sprinter.laws import Sampling, process, raw_law
from sprinter.models.checks import check_finite
from sprinter.models.choose import make_runner
from sprinter.models.interface import ModelOutput, Runner
from sprinter.theory.outcomes import FULL, condense_laws, group_laws

__all__ = [
    "DYNAMIC", "Author", "Passage", "Recording", "first_choices", "probe", "read_passages", "static_signals",
]  # fmt: skip

Author = Literal["target", "draft", "given"]
"""Who wrote the texts of a recording; "given": neither model."""
Reduce = Callable[[Sequence[Tensor], Tensor], tuple[tuple[Tensor, ...], Tensor, Tensor]]
"""(laws ``[n, V]`` of which the first two are p and q, tokens) to laws on outcomes, as ``group_laws``."""
DYNAMIC = frozenset({"position", "log_q"})
"""Features of a head that depend on the run and the token, so that a replay makes them; all others are recorded."""
CHUNK = 64
"""Positions that are read at a time: bounds the memory, which is several laws a position."""
_COLUMNS = ("p", "q", "raw_p", "raw_q", "tokens", "ids")


@dataclass(frozen=True)
class Recording:
    """Laws at the N positions of several texts, one text after another.

    A position's laws live on K outcomes of its own: the likeliest tokens, then groups of the others (see
    ``sprinter.theory.outcomes``); where the vocabulary is small they are simply its tokens.

    Attributes:
        p, q: processed laws, ``[N, K]``. raw_p, raw_q: temperature-1 laws on the same outcomes.
        tokens: the outcome that the text took, ``[N]``. ids: its token id, ``[N]``.
        signals: what rules read of a prefix, each ``[N]``: ``prefix_signals()``, scores of heads that see no more.
        lengths: tokens of each text. prompts: token ids before each text.
        new_tokens: the limit that the texts were written under.
        writer: whose text it is; tokens were drawn from its processed law. A given text is replayed without coupling.
        outcomes: token id of each outcome, −1 for a group, ``[N, K]``; None: outcome i is token i.
        heads: those whose features depend on the run or the token; features: the rest of what they read, ``[N, ...]``.
            The draft's state at x (hidden_x) is the one at the text's own token.
        taus: by kind of head, the threshold that the pair's own records.
    """

    p: Tensor
    q: Tensor
    raw_p: Tensor
    raw_q: Tensor
    tokens: Tensor
    ids: Tensor
    signals: Mapping[str, Tensor]
    lengths: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    writer: Author
    outcomes: Tensor | None = field(default=None, repr=False)
    heads: Mapping[str, Head] = field(default_factory=dict, repr=False)
    features: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    taus: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def starts(self) -> list[int]:
        """First position of each text."""
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()[:-1]]

    @property
    def own(self) -> Tensor:
        """The law that each token was drawn from, ``[N, K]``."""
        assert self.writer != "given", "a given text was drawn from neither law"
        return self.p if self.writer == "target" else self.q

    @cached_property
    def vocab(self) -> int:
        """Tokens of the vocabulary, as far as the recording knows it."""
        if self.outcomes is None:
            return self.q.shape[-1]
        prompts = max((id for prompt in self.prompts for id in prompt), default=0)
        return 1 + max(prompts, int(self.ids.max()), int(self.outcomes.max()))

    def first_texts(self, count: int) -> Recording:
        """The first ``count`` of the texts."""
        end = sum(self.lengths[:count])
        part = _of_each([self], lambda columns: columns[0][:end])
        return replace(part, lengths=self.lengths[:count], prompts=self.prompts[:count])

    def grouped(self, n: int, law: Tensor) -> tuple[Tensor, dict[int, list[int]]]:
        """A law over the vocabulary as one over the outcomes of position n, ``[K]``; and the token ids of each outcome
        that have a chance."""
        of: dict[int, list[int]] = {}
        made = self.q.new_zeros(self.q.shape[-1])
        for id in law.nonzero()[:, 0].tolist():
            outcome = self.outcome(n, id)
            of.setdefault(outcome, []).append(id)
            made[outcome] += float(law[id])
        return made, of

    def outcome(self, n: int, id: int) -> int:
        """The outcome that a token id is at position n; of the groups, the one that the target likes least."""
        if self.outcomes is None:
            return id
        found = (self.outcomes[n] == id).nonzero()
        if len(found):
            return int(found[0])
        return int(torch.where(self.outcomes[n] < 0, self.p[n], torch.inf).argmin())


def _of_each(parts: Sequence[Recording], make: Callable[[list[Tensor]], Tensor]) -> Recording:
    """The first of the recordings with each column, ``[N, ...]``, made of this column of all of them."""
    first = parts[0]
    columns: dict[str, Any] = {name: make([getattr(one, name) for one in parts]) for name in _COLUMNS}
    return replace(
        first,
        **columns,
        outcomes=None
        if first.outcomes is None
        else make([one.outcomes for one in parts if one.outcomes is not None]),
        signals={name: make([one.signals[name] for one in parts]) for name in first.signals},
        features={name: make([one.features[name] for one in parts]) for name in first.features},
    )


def static_signals(heads: Mapping[str, Head], read: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scores of the heads that read nothing but recorded features, ``[N]`` float64 each."""
    return {
        kind: head({name: read[name] for name in head.features}).double().cpu()
        for kind, head in heads.items()
        if not head.sees_token and DYNAMIC.isdisjoint(head.features)
    }


def first_choices(recording: Recording) -> Tensor:
    """Whether the target's and the draft's most likely tokens are the same, bool ``[N]``."""
    laws = (recording.raw_p, recording.raw_q)
    if recording.outcomes is not None:  # a group of tokens is no choice
        laws = tuple(law.masked_fill(recording.outcomes < 0, -1.0) for law in laws)  # type: ignore[assignment]
    return laws[0].argmax(-1) == laws[1].argmax(-1)


class Passage(NamedTuple):
    """A text whose laws are wanted at the positions of ``ids`` after ``prompt``, at least one token each."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]


def probe(
    pair: Pair,
    prompts: Sequence[str | Sequence[int]],
    *,
    writer: Literal["target", "draft"] = "target",
    new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Write one text a prompt with the target or the draft, and record both models' laws along it.

    Args:
        progress: called with (texts done, texts).

    Raises:
        UserError: no draft, no prompts, a prompt that does not fit.
    """
    _check_draft(pair)
    if not prompts:
        raise UserError("a probe needs at least one prompt")
    at_least("new_tokens", new_tokens, 1)
    method = "autoregressive" if writer == "target" else "draft-only"

    def written() -> Iterator[Passage]:
        for i, prompt in enumerate(prompts):
            out = pair.generate(
                prompt, method=method, max_new_tokens=new_tokens, sampling=sampling, seed=seed + i
            )
            yield Passage(tuple(encode(prompt, pair.models)), tuple(token.id for token in out.tokens))
            if progress is not None:
                progress(i + 1, len(prompts))

    return _record(pair, list(written()), sampling, FULL, group_laws, writer, new_tokens)


def read_passages(
    pair: Pair,
    passages: Sequence[Passage],
    *,
    sampling: Sampling = Sampling(),
    full: int = FULL,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Record both models' laws at the positions of each passage, which neither model need have written.

    Args:
        sampling: of the processed laws.
        full: vocabularies up to this size are recorded whole.
        progress: called with (passages done, passages).

    Raises:
        UserError: no draft, no passages. SprinterError: a model's logits are not finite.
    """
    _check_draft(pair)
    if not passages:
        raise UserError("a probe needs at least one text")
    longest = max(len(passage.ids) for passage in passages)
    return _record(pair, passages, sampling, full, condense_laws, "given", longest, progress)


def _check_draft(pair: Pair) -> None:
    if pair.models.draft is None:
        raise UserError("a probe reads the laws of both models, and this pair has no draft: give draft=...")


@torch.inference_mode()
def _record(
    pair: Pair,
    passages: Sequence[Passage],
    sampling: Sampling,
    full: int,
    reduce: Reduce,
    writer: Author,
    new_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Read the passages with both models, ``CHUNK`` positions at a time."""
    assert pair.models.draft is not None
    longest = max(len(passage.prompt) + len(passage.ids) for passage in passages)
    models = (pair.models.target, pair.models.draft)
    runners = [make_runner(model.model, batch=1, max_len=longest) for model in models]
    parts = []
    for i, passage in enumerate(passages):
        text, first = [*passage.prompt, *passage.ids], len(passage.prompt)
        for runner in runners if first > 1 else ():
            _extend(runner, text[: first - 1], 0, logits=False)
        for at in range(first, len(text), CHUNK):
            end = min(at + CHUNK, len(text))
            # from the token before the first position to the last one, whose state heads read
            read = [_extend(runner, text[at - 1 : end], at - 1) for runner in runners]
            logits = [step.logits[0, :-1] for step in read if step.logits is not None]
            for which, rows in zip(("target", "draft"), logits, strict=True):
                check_finite(rows[None], which, at)
            part = _positions(pair, sampling, text[at:end], logits, read[1].hidden[0].cpu(), full, reduce)
            parts.append(replace(part, writer=writer, new_tokens=new_tokens))
        if progress is not None:
            progress(i + 1, len(passages))
    return replace(
        _of_each(parts, torch.cat),
        lengths=tuple(len(passage.ids) for passage in passages),
        prompts=tuple(passage.prompt for passage in passages),
    )


def _extend(runner: Runner, ids: Sequence[int], start: int, logits: bool = True) -> ModelOutput:
    runner.rewind([start])
    return runner.extend(torch.tensor([list(ids)], device=runner.device), logits=logits)


def _positions(
    pair: Pair,
    sampling: Sampling,
    ids: Sequence[int],
    logits: Sequence[Tensor],
    hidden: Tensor,
    full: int,
    reduce: Reduce,
) -> Recording:
    """Record the positions of ``ids``.

    Args:
        logits: the target's and the draft's, each ``[n, V]``, of these tokens.
        hidden: the draft's states ``[n + 1, d]``: before each of the tokens, and at the last one.
        full: vocabularies up to this size are recorded whole; larger ones are reduced by ``reduce``.
    """
    vocab, tokens = pair.models.vocab_size, torch.tensor(ids)
    p, q = raw_p, raw_q = tuple(raw_law(each[:, :vocab].float().cpu()) for each in logits)
    if sampling != Sampling():
        p, q = (process(each[:, :vocab].float().cpu(), sampling) for each in logits)
    temperature = torch.full((len(ids),), sampling.temperature)
    step = DraftStep(hidden[:-1], law=raw_q, hidden_x=hidden[1:], temperature=temperature)
    names = {name for head in pair.heads.values() for name in head.features} - DYNAMIC
    features = read_features(sorted(names), step)
    signals = read_signals(prefix_signals(), q, raw_q, state=hidden[:-1]) | static_signals(
        pair.heads, features
    )
    heads = {kind: head for kind, head in pair.heads.items() if kind not in signals}
    kept = {name for head in heads.values() for name in head.features} - DYNAMIC
    laws: tuple[Tensor, ...] = (p, q, raw_p, raw_q)
    taken, outcomes = tokens, None
    if vocab > full:
        laws, taken, outcomes = reduce(laws, tokens)
    p, q, raw_p, raw_q = laws
    return Recording(
        p, q, raw_p, raw_q, taken, tokens, {name: values.double() for name, values in signals.items()},
        lengths=(len(ids),), prompts=((),), new_tokens=len(ids), writer="given", outcomes=outcomes, heads=heads,
        features={name: features[name] for name in kept},
        taus={kind: head.config.tau for kind, head in pair.heads.items()},
    )  # fmt: skip
