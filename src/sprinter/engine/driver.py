"""Answers the loop's requests for one row with two runners."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sprinter.decode.draft import AskDraft, AskScore, Draft, Scores, Stats
from sprinter.decode.drafter import Lookup, Model, copied, look_up
from sprinter.decode.methods import Method
from sprinter.decode.run import Answer
from sprinter.errors import SprinterError
from sprinter.heads.features import DraftStep, read_features
from sprinter.heads.head import KINDS, Head
from sprinter.laws import Sampling, entropy, process, raw_law
from sprinter.models.checks import check_finite
from sprinter.models.runner import Runner
from sprinter.random import Draws, Purpose

__all__ = ["Costs", "RowDriver"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Forward FLOPs of one token through each model (Hoffmann et al. 2022, Appendix F)."""

    target: float = 0.0
    draft: float = 0.0


class _Side:
    """One model and the texts that its rows stand for (one row, or one a draft)."""

    def __init__(self, runner: Runner, prompt: Sequence[int], vocab: int, name: str) -> None:
        self.runner, self.vocab, self.name, self.prefill = runner, vocab, name, len(prompt) - 1
        self.texts = [list(prompt) for _ in range(runner.batch)]
        self._parted = False  # whether rows may hold different tokens
        self._last: tuple[Tensor, Tensor] | None = None
        runner.rewind([0] * runner.batch)

    @property
    def cached(self) -> int:
        """Tokens in the cache, the same for all rows."""
        return self.runner.lengths[0]

    def goto(self, start: int, tokens: Sequence[int], row: int) -> None:
        """Follow ``row``: forget what lies beyond ``start`` and put ``tokens`` there, in all rows."""
        others = [other for other in range(self.runner.batch) if other != row]
        if self._parted and others:
            self.runner.copy(row, others)
            self._last = None
        self._parted = False
        if self.cached > start:
            self.runner.rewind([start] * self.runner.batch)
            self._last = None
        self.texts[row][start:] = tokens
        for other in others:
            self.texts[other] = list(self.texts[row])

    def append(self, chains: Sequence[Sequence[int]]) -> None:
        """One chain a row."""
        self._parted = True
        for text, chain in zip(self.texts, chains, strict=True):
            text.extend(chain)

    def read_prompt(self) -> None:
        """The prompt's own pass, all but its last token, in all rows."""
        first = torch.tensor(self.texts[0][: self.prefill], device=self.runner.device)
        self.runner.extend(first.expand(self.runner.batch, -1), logits=False)

    def read(self) -> tuple[Tensor, Tensor]:
        """Run the model over what it has not read: logits ``[rows, n, V]`` and hidden states ``[rows, n, d]``."""
        cached = self.cached
        tokens = torch.tensor([text[cached:] for text in self.texts], device=self.runner.device)
        step = self.runner.extend(tokens)
        assert step.logits is not None
        logits = step.logits[..., : self.vocab]
        check_finite(logits, self.name, cached)
        return logits, step.hidden

    def after_text(self) -> tuple[Tensor, Tensor, int]:
        """Logits ``[rows, V]`` and state ``[rows, d]`` after the last token, and how many tokens were read for them."""
        fed = len(self.texts[0]) - self.cached
        if fed == 0 and self._last is None:  # its last token was read, and what came of it forgotten
            self.runner.rewind([self.cached - 1] * self.runner.batch)
            fed = 1
        if fed or self._last is None:
            logits, hidden = self.read()
            self._last = logits[:, -1], hidden[:, -1]
        return *self._last, fed


@dataclass(slots=True)
class _Proposal:
    """A draft as it grows."""

    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    raws: list[Tensor] = field(default_factory=list)

    def finish(self, signals: Mapping[str, Sequence[float]], needs_raw: bool) -> Draft:
        return Draft(
            tuple(self.tokens),
            torch.stack(self.laws),
            {name: torch.tensor(values, dtype=torch.float64) for name, values in signals.items()},
            torch.stack(self.raws) if needs_raw else None,
        )


class RowDriver:
    """One decoding, one driver: holds the two caches' text and answers ``AskDraft`` and ``AskScore``.

    Args:
        target, draft: runners free for this request (None where the method needs none), with one row, or with one a
            draft where the method drafts several.
        heads: by kind, those that the method's rules read at least.
        prompt: token ids.
        vocab: size of the common vocabulary; logits beyond it are cut off.
        ahead: draft up to so many tokens an answer (one host synchronisation); the text does not depend on it.
        stats: counts and times are added here.
    """

    def __init__(
        self,
        target: Runner | None,
        draft: Runner | None,
        heads: Mapping[str, Head],
        prompt: Sequence[int],
        method: Method,
        sampling: Sampling,
        draws: Draws,
        vocab: int,
        stats: Stats,
        costs: Costs = Costs(),
        ahead: int = 1,
    ) -> None:
        self._target = _Side(target, prompt, vocab, "target") if target else None
        self._draft = _Side(draft, prompt, vocab, "draft") if draft else None
        self._sampling, self._draws, self._vocab = sampling, draws, vocab
        self._drafter, self._needs_raw = method.drafter, method.accept.needs_raw
        self._signals = [name for name in method.needs if name in _SIGNALS]
        self._heads = {name: heads[name] for name in sorted(method.needs & heads.keys())}
        if missing := sorted(method.needs & set(KINDS) - heads.keys()):
            raise SprinterError(f"the method reads a head that the pair has not: {', '.join(missing)}")
        self._heads_read_law = any(not _STATES.issuperset(head.features) for head in self._heads.values())
        self._place = (0, 0)  # round, tokens drafted in it
        self._stats, self._costs, self._ahead = stats, costs, ahead
        self._text = list(prompt)  # for prompt lookup
        self._model_round = 0  # the last round in which the model drafted in its place
        self._device = target.device if target else torch.device("cpu")

    def answer(self, request: AskDraft | AskScore) -> Answer:
        """Answer one request of the loop."""
        with torch.inference_mode():
            if isinstance(request, AskScore):
                return self._score(request)
            if isinstance(self._drafter, Lookup):
                return self._look_up(self._drafter, request)
            drafts = self._propose(request)
            return drafts if request.width > 1 else drafts[0]

    def _look_up(self, drafter: Lookup, request: AskDraft) -> Draft:
        began = time.perf_counter()
        self._text[request.start :] = request.tokens
        # A run that the model began is the model's: what is drafted ahead must not change who drafts.
        began_by_model = request.round == self._model_round
        found = [] if began_by_model else look_up(self._text, drafter.n, drafter.least, request.at_most)
        self._stats.draft_s += time.perf_counter() - began
        if found or not drafter.uses_model:
            self._text += found
            return copied(found, self._vocab, device=self._device, raw=self._needs_raw)
        # The model may have missed what was looked up since it was last asked.
        assert self._draft is not None, "the method falls back on a draft model, and none was given"
        self._model_round = request.round
        # At least one token is left to read: its logits are what the next one is drawn from.
        same = min(_common(self._draft.texts[0], self._text), len(self._text) - 1)
        ask = AskDraft(same, tuple(self._text[same:]), request.round, request.at_most)
        (draft,) = self._propose(ask)
        self._text += draft.tokens
        return draft

    def _propose(self, request: AskDraft) -> tuple[Draft, ...]:
        side = self._draft
        assert side is not None, "the method drafts, and no draft model was given"
        side.goto(request.start, request.tokens, request.row)
        self._prefill(side)
        greedy = isinstance(self._drafter, Model) and self._drafter.greedy
        sampling = _GREEDY if greedy else self._sampling
        rows = [_Proposal() for _ in side.texts]
        signals: dict[str, list[float]] = {name: [] for name in (*self._signals, *self._heads)}
        needs_raw = self._needs_raw or not _RAW_SIGNALS.isdisjoint(signals) or self._heads_read_law
        for _ in range(request.at_most if request.width > 1 else min(self._ahead, request.at_most)):
            began, place = time.perf_counter(), len(side.texts[0])
            logits, hidden = self._step(side)
            laws = process(logits, sampling)
            raws = raw_law(logits) if needs_raw else laws
            for n, row in enumerate(rows):
                row.tokens.append(self._draws.token(laws[n], request.round, place, Purpose.DRAFT, n))
                row.laws.append(laws[n])
                row.raws.append(raws[n])
            side.append([row.tokens[-1:] for row in rows])
            for name in self._signals:
                law = raws[0] if name in _RAW_SIGNALS else laws[0]
                signals[name].append(float(_SIGNALS[name](law, rows[0].tokens[-1])))
            self._stats.draft_s += time.perf_counter() - began
            if self._heads:
                self._score_heads(side, request.round, hidden[0], raws[0], rows[0].tokens[-1], signals)
        return tuple(row.finish(signals, self._needs_raw) for row in rows)

    def _step(self, side: _Side) -> tuple[Tensor, Tensor]:
        """A draft step: logits ``[rows, V]`` and state ``[rows, d]`` after the text, counted if the model ran."""
        logits, hidden, fed = side.after_text()
        rows, stats = len(side.texts), self._stats
        stats.draft_steps += fed > 0
        stats.draft_tokens += fed * rows
        stats.flops_passes += (fed > 0) * rows * self._costs.draft
        stats.flops_tokens += fed * rows * self._costs.draft
        return logits, hidden

    def _score_heads(
        self, side: _Side, round: int, hidden: Tensor, law: Tensor, x: int, signals: dict[str, list[float]]
    ) -> None:
        """Scores for x, the last token of the text. A head that reads the state at x has x run through the draft now;
        the next draft token comes from that same pass."""
        self._place = (round, self._place[1] + 1 if self._place[0] == round else 1)
        numbers = (self._place[1], x, self._sampling.temperature)
        place, token, temperature = (torch.tensor(number, device=hidden.device) for number in numbers)
        step = DraftStep(hidden, law, place, token, temperature=temperature)
        if any("hidden_x" in head.features for head in self._heads.values()):
            began = time.perf_counter()
            step = replace(step, hidden_x=self._step(side)[1][0])
            self._stats.draft_s += time.perf_counter() - began
        began = time.perf_counter()
        for name, head in self._heads.items():
            bare = head.features == ("hidden",)
            signals[name].append(float(head(hidden if bare else read_features(head.features, step))))
            self._stats.flops_passes += head.flops
            self._stats.flops_tokens += head.flops
        self._stats.gate_s += time.perf_counter() - began

    def _score(self, request: AskScore) -> Scores:
        side, stats = self._target, self._stats
        assert side is not None, "the method calls the target, and no target was given"
        side.goto(request.start, request.tokens, request.row)
        # Without several chains all rows hold the same text: one answer serves.
        side.append(request.chains or [()] * side.runner.batch)
        self._prefill(side)
        began = time.perf_counter()
        read = len(side.texts[0]) - side.cached
        logits, _ = side.read()
        if not request.chains:
            logits = logits[0]
        laws = process(logits, self._sampling)
        raw = raw_law(logits) if self._needs_raw else None
        if laws.device.type != "cpu":
            torch.accelerator.synchronize()
        if request.closing:
            stats.closing_s += time.perf_counter() - began
            return Scores(laws, raw)
        stats.target_s += time.perf_counter() - began
        stats.target_tokens += read * side.runner.batch
        stats.flops_passes += self._costs.target
        stats.flops_tokens += read * side.runner.batch * self._costs.target
        return Scores(laws, raw)

    def _prefill(self, side: _Side) -> None:
        """The prompt's own pass, counted apart."""
        if side.cached == 0 and side.prefill > 0:
            began = time.perf_counter()
            side.read_prompt()
            self._stats.prefill_s += time.perf_counter() - began


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


_GREEDY = Sampling(temperature=0.0)
Signal = Callable[[Tensor, int], Tensor]
_READINGS: Mapping[str, Signal] = {
    "entropy": lambda law, x: entropy(law),
    "max_prob": lambda law, x: law.amax(),
    "token_prob": lambda law, x: law[x],
}
_SIGNALS = {name + law: read for name, read in _READINGS.items() for law in ("", "_processed")}
_RAW_SIGNALS = frozenset(_READINGS)
_STATES = frozenset({"hidden", "hidden_x", "position", "temperature"})  # features that need no law
