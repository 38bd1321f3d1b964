"""Answers the loop's requests for one row with two runners."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.decode.draft import AskDraft, AskScore, Draft, Scores, Stats
from sprinter.decode.methods import Method
from sprinter.errors import SprinterError
from sprinter.heads.gate import Gate
from sprinter.laws import Sampling, entropy, process, raw_law
from sprinter.models.checks import check_finite
from sprinter.models.runner import Runner
from sprinter.random import Draws, Purpose

__all__ = ["Costs", "RowDriver"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Forward FLOPs of one token through each model (Hoffmann et al. 2022, Appendix F) and of one gate score."""

    target: float = 0.0
    draft: float = 0.0
    gate: float = 0.0


class _Side:
    """One model and the text that its cache stands for."""

    def __init__(self, runner: Runner, prompt: Sequence[int], vocab: int, name: str) -> None:
        self.runner, self.text, self.vocab, self.name = runner, list(prompt), vocab, name
        runner.rewind([0])

    def goto(self, start: int, tokens: Sequence[int]) -> None:
        """Forget what lies beyond ``start`` and put ``tokens`` there."""
        self.text[start:] = tokens
        if self.runner.lengths[0] > start:
            self.runner.rewind([start])

    def read(self, until: int, *, logits: bool = True) -> tuple[Tensor, Tensor]:
        """Run the model over text[cached:until]: logits ``[n, V]`` and hidden states ``[n, d]``."""
        cached = self.runner.lengths[0]
        tokens = torch.tensor([self.text[cached:until]], device=self.runner.device)
        step = self.runner.extend(tokens, logits=logits)
        if not logits or step.logits is None:
            return step.hidden[0, :0], step.hidden[0]
        rows = step.logits[0, :, : self.vocab]
        check_finite(rows, self.name, cached)
        return rows, step.hidden[0]


class RowDriver:
    """One row, one driver: holds the two caches' text and answers ``AskDraft`` and ``AskScore``.

    Args:
        target, draft: runners of one row each, free for this request (None where the method needs none).
        prompt: token ids.
        vocab: size of the common vocabulary; logits beyond it are cut off.
        ahead: draft up to so many tokens an answer (one host synchronisation); the text does not depend on it.
        stats: counts and times are added here.
    """

    def __init__(
        self,
        target: Runner | None,
        draft: Runner | None,
        gate: Gate | None,
        prompt: Sequence[int],
        method: Method,
        sampling: Sampling,
        draws: Draws,
        vocab: int,
        stats: Stats,
        costs: Costs = Costs(),  # noqa: B008 (frozen)
        ahead: int = 1,
    ) -> None:
        self._target = _Side(target, prompt, vocab, "target") if target else None
        self._draft = _Side(draft, prompt, vocab, "draft") if draft else None
        self._gate, self._sampling, self._draws = gate, sampling, draws
        self._needs, self._needs_raw = method.needs, method.accept.needs_raw
        self._prompt_len, self._stats, self._costs, self._ahead = len(prompt), stats, costs, ahead
        if "gate" in method.needs and gate is None:
            raise SprinterError("the method asks for a gate and the pair has none")

    def answer(self, request: AskDraft | AskScore) -> Draft | Scores:
        """Answer one request of the loop."""
        with torch.inference_mode():
            if isinstance(request, AskScore):
                return self._score(request)
            return self._propose(request)

    def _propose(self, request: AskDraft) -> Draft:
        side, stats = self._draft, self._stats
        assert side is not None, "the method drafts, and no draft model was given"
        side.goto(request.start, request.tokens)
        self._prefill(side)
        tokens: list[int] = []
        laws: list[Tensor] = []
        raws: list[Tensor] = []
        signals: dict[str, list[float]] = {
            name: [] for name in self._needs if name in _SIGNALS or name == "gate"
        }
        for _ in range(min(self._ahead, request.at_most)):
            began = time.perf_counter()
            fed = len(side.text) - side.runner.lengths[0]
            logits, hidden = side.read(len(side.text))
            law = process(logits[-1], self._sampling)
            raw = raw_law(logits[-1]) if self._needs_raw or signals.keys() & _RAW_SIGNALS else law
            x = self._draws.token(law, request.round, len(side.text), Purpose.DRAFT)
            for name in signals.keys() - {"gate"}:
                signals[name].append(float(_SIGNALS[name](raw if name in _RAW_SIGNALS else law, x)))
            stats.draft_s += time.perf_counter() - began
            if "gate" in signals:
                signals["gate"].append(self._gate_score(hidden[-1]))
            side.text.append(x)
            tokens.append(x)
            laws.append(law)
            raws.append(raw)
            stats.draft_steps += 1
            stats.draft_tokens += fed
            stats.flops_passes += self._costs.draft
            stats.flops_tokens += fed * self._costs.draft
        return Draft(
            tuple(tokens),
            torch.stack(laws),
            {name: torch.tensor(values, dtype=torch.float64) for name, values in signals.items()},
            torch.stack(raws) if self._needs_raw else None,
        )

    def _gate_score(self, hidden: Tensor) -> float:
        assert self._gate is not None
        began = time.perf_counter()
        score = float(self._gate(hidden))
        self._stats.gate_s += time.perf_counter() - began
        self._stats.flops_passes += self._costs.gate
        self._stats.flops_tokens += self._costs.gate
        return score

    def _score(self, request: AskScore) -> Scores:
        side, stats = self._target, self._stats
        assert side is not None, "the method calls the target, and no target was given"
        side.goto(request.start, request.tokens)
        self._prefill(side)
        began = time.perf_counter()
        logits, _ = side.read(len(side.text))
        laws = process(logits, self._sampling)
        raw = raw_law(logits) if self._needs_raw else None
        if laws.device.type != "cpu":
            torch.accelerator.synchronize()
        if request.closing:
            stats.closing_s += time.perf_counter() - began
            return Scores(laws, raw)
        stats.target_s += time.perf_counter() - began
        stats.target_tokens += len(request.tokens)
        stats.flops_passes += self._costs.target
        stats.flops_tokens += len(request.tokens) * self._costs.target
        return Scores(laws, raw)

    def _prefill(self, side: _Side) -> None:
        """The prompt's own pass, all but its last token; counted apart."""
        if side.runner.lengths[0] == 0 and self._prompt_len > 1:
            began = time.perf_counter()
            side.read(self._prompt_len - 1, logits=False)
            self._stats.prefill_s += time.perf_counter() - began


Signal = Callable[[Tensor, int], Tensor]
_READINGS: Mapping[str, Signal] = {
    "entropy": lambda law, x: entropy(law),
    "max_prob": lambda law, x: law.amax(),
    "token_prob": lambda law, x: law[x],
}
_SIGNALS = {name + law: read for name, read in _READINGS.items() for law in ("", "_processed")}
_RAW_SIGNALS = frozenset(_READINGS)
