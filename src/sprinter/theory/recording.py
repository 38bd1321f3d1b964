"""Laws of a pair along texts: what a replay decodes with in place of the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

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
from sprinter.models.choose import make_runner
from sprinter.models.interface import ModelOutput
from sprinter.models.pair import LoadedModel
from sprinter.theory.outcomes import FULL, group_laws

__all__ = [
    "DYNAMIC",
    "Author",
    "RecordedText",
    "Recording",
    "join_texts",
    "probe",
    "record_text",
    "static_signals",
]

Author = Literal["target", "draft", "given"]
"""Who wrote the texts of a recording; "given": neither model."""
Reduce = Callable[[Sequence[Tensor], Tensor], tuple[tuple[Tensor, ...], Tensor, Tensor]]
"""(laws ``[n, V]`` of which the first two are p and q, tokens) to laws on outcomes, as ``group_laws``."""
DYNAMIC = frozenset({"position", "log_q"})
"""Features of a head that depend on the run and the token, so that a replay makes them; all others are recorded."""


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
        columns = {name: getattr(self, name)[:end] for name in ("p", "q", "raw_p", "raw_q", "tokens", "ids")}
        return replace(
            self, **columns, lengths=self.lengths[:count], prompts=self.prompts[:count],
            outcomes=None if self.outcomes is None else self.outcomes[:end],
            signals={name: values[:end] for name, values in self.signals.items()},
            features={name: values[:end] for name, values in self.features.items()},
        )  # fmt: skip

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


def static_signals(heads: Mapping[str, Head], read: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scores of the heads that read nothing but recorded features, ``[N]`` float64 each."""
    return {
        kind: head({name: read[name] for name in head.features}).double().cpu()
        for kind, head in heads.items()
        if not head.sees_token and DYNAMIC.isdisjoint(head.features)
    }


def probe(
    pair: Pair,
    prompts: Sequence[str | Sequence[int]],
    *,
    writer: Literal["target", "draft"] = "target",
    new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    full: int = FULL,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Write one text a prompt with the target or the draft, and record both models' laws along it.

    Args:
        full: vocabularies up to this size are recorded whole.
        progress: called with (texts done, texts).

    Raises:
        UserError: no draft, no prompts, a prompt that does not fit.
    """
    if pair.models.draft is None:
        raise UserError(
            "a prediction needs the laws of both models, and this pair has no draft: give draft=..."
        )
    if not prompts:
        raise UserError("a probe needs at least one prompt")
    at_least("new_tokens", new_tokens, 1)
    method, texts = "autoregressive" if writer == "target" else "draft-only", []
    for i, prompt in enumerate(prompts):
        out = pair.generate(
            prompt, method=method, max_new_tokens=new_tokens, temperature=sampling.temperature, top_k=sampling.top_k,
            top_p=sampling.top_p, min_p=sampling.min_p, seed=seed + i,
        )  # fmt: skip
        texts.append(
            _read_text(pair, sampling, encode(prompt, pair.models), [token.id for token in out.tokens], full)
        )
        if progress is not None:
            progress(i + 1, len(prompts))
    return join_texts(texts, pair, new_tokens, writer)


@dataclass(frozen=True)
class RecordedText:
    """One text's share of a recording, or the share of a part of it."""

    laws: tuple[Tensor, ...]  # p, q, raw_p, raw_q
    tokens: Tensor
    ids: tuple[int, ...]
    prompt: tuple[int, ...]
    signals: dict[str, Tensor]
    features: dict[str, Tensor]
    outcomes: Tensor | None


@torch.inference_mode()
def _read_text(
    pair: Pair, sampling: Sampling, prompt: Sequence[int], ids: Sequence[int], full: int
) -> RecordedText:
    """Laws of both models at the positions of ``ids`` after ``prompt``, one pass each."""
    assert pair.models.draft is not None
    n = len(ids)
    read = [_read(model, [*prompt, *ids]) for model in (pair.models.target, pair.models.draft)]
    logits = [step.logits[0, -n - 1 : -1] for step in read if step.logits is not None]
    return record_text(pair, sampling, prompt, ids, (logits[0], logits[1]), read[1].hidden[0, -n - 1 :], full)


def record_text(
    pair: Pair,
    sampling: Sampling,
    prompt: Sequence[int],
    ids: Sequence[int],
    logits: tuple[Tensor, Tensor],
    hidden: Tensor,
    full: int = FULL,
    reduce: Reduce | None = None,
) -> RecordedText:
    """Record the positions of ``ids`` after ``prompt``.

    Args:
        logits: the target's and the draft's, each ``[n, V]``, of these tokens.
        hidden: the draft's states ``[n + 1, d]``: before each of the tokens, and at the last one.
        full: vocabularies up to this size are recorded whole; larger ones are reduced by ``reduce``,
            by default ``group_laws``.
    """
    vocab, n = pair.models.vocab_size, len(ids)
    raw_p, raw_q = (raw_law(each[:, :vocab].float().cpu()) for each in logits)
    p, q = raw_p, raw_q
    if sampling != Sampling():
        p, q = (process(each[:, :vocab].float().cpu(), sampling) for each in logits)
    hidden = hidden.cpu()
    before, temperature = hidden[:-1], torch.full((n,), sampling.temperature)
    signals = read_signals(prefix_signals(), q, raw_q, state=before)
    step = DraftStep(before, law=raw_q, hidden_x=hidden[1:], temperature=temperature)
    names = {name for head in pair.heads.values() for name in head.features} - DYNAMIC
    features = read_features(sorted(names), step)
    signals |= static_signals(pair.heads, features)
    laws: tuple[Tensor, ...] = (p, q, raw_p, raw_q)
    tokens, outcomes = torch.tensor(ids), None
    if vocab > full:
        laws, tokens, outcomes = (reduce or group_laws)(laws, tokens)
    doubled = {name: values.double() for name, values in signals.items()}
    return RecordedText(laws, tokens, tuple(ids), tuple(prompt), doubled, features, outcomes)


def _read(model: LoadedModel, ids: Sequence[int]) -> ModelOutput:
    runner = make_runner(model.model, batch=1, max_len=len(ids))
    return runner.extend(torch.tensor([list(ids)], device=runner.device))


def join_texts(texts: Sequence[RecordedText], pair: Pair, new_tokens: int, writer: Author) -> Recording:
    """Several recorded texts as one recording."""
    p, q, raw_p, raw_q = (torch.cat([text.laws[i] for text in texts]) for i in range(4))
    outcomes = [text.outcomes for text in texts if text.outcomes is not None]
    signals = {name: torch.cat([text.signals[name] for text in texts]) for name in texts[0].signals}
    heads = {kind: head for kind, head in pair.heads.items() if kind not in signals}
    names = {name for head in heads.values() for name in head.features} - DYNAMIC
    return Recording(
        p, q, raw_p, raw_q,
        tokens=torch.cat([text.tokens for text in texts]),
        ids=torch.cat([torch.tensor(text.ids) for text in texts]),
        signals=signals,
        lengths=tuple(len(text.ids) for text in texts),
        prompts=tuple(text.prompt for text in texts),
        new_tokens=new_tokens,
        writer=writer,
        outcomes=torch.cat(outcomes) if outcomes else None,
        heads=heads,
        features={name: torch.cat([text.features[name] for text in texts]) for name in names},
        taus={kind: head.config.tau for kind, head in pair.heads.items()},
    )  # fmt: skip
