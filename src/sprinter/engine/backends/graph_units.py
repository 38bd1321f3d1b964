"""What is captured of a draft run and of a target pass: units, and the numbers that they are told of each row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sprinter.decode.accept.rows import judge_exact, judge_match, meter
from sprinter.decode.run_rules import DeviceRules
from sprinter.decode.signals import SIGNALS
from sprinter.engine.backends.base import ChainRow, DraftPlan, DraftRow, StepResult
from sprinter.engine.backends.eager import follow
from sprinter.engine.backends.single_call import draw_keys
from sprinter.heads.head import Head
from sprinter.laws import Sampling, process_rows, raw_law
from sprinter.models.capture.graphs import LADDER
from sprinter.models.capture.trace import ForwardPass, Unit
from sprinter.random import Purpose, race, race_words

__all__ = [
    "LAWS",
    "LONGEST",
    "RUN",
    "ChainUnit",
    "DraftUnit",
    "Settings",
    "TargetUnit",
    "chain_lines",
    "draft_lines",
]

LONGEST = 8
"""Number of draft steps in a launch, at most: longer runs are several."""
LAWS = {"draft": 2 * LONGEST, "target": LONGEST + 2 * LADDER[-2]}
"""Laws of a row that the graphs of a model write for drafts of up to ``LONGEST`` tokens, a copy of them, and those of
the draft that a target reads. Longer drafts take up to three times as many; raw laws, for log-probabilities, are left
out."""
RUN = 3
"""Numbers of a step of a draft run before those of its plan."""


class Settings(NamedTuple):
    """How each row samples, ``[rows]``: as in ``Sampling``. All that a unit is told of a row is one line of float64,
    which holds its whole numbers too; these come first."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @staticmethod
    def line(sampling: Sampling) -> tuple[float, ...]:
        """What a row is told."""
        return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p

    def process(self, logits: Tensor, truncates: bool, n: int = 1) -> Tensor:
        """``process`` of logits ``[rows * n, V]``, n in a row that are of one row."""
        temperature, top_k, top_p, min_p = (one if n == 1 else one.repeat_interleave(n) for one in self)
        return process_rows(logits, temperature, (top_k.long(), top_p, min_p) if truncates else None)


class DraftUnit(Unit):
    """A draft run. Of each step numbers ``[rows, steps, RUN + columns]``, float64: the token, whether the row took
    part, whether all tokens up to it are trusted, and those of ``StepResult``; then laws ``[rows, steps, V]``, and raw
    laws if wanted.

    Its plan has the signals whose ``capture`` is "always", so that methods share units, and those in ``asked``.

    Args:
        vocab: size of the common vocabulary.
        truncates: whether rows may use top-k, top-p or min-p.
        heads: by kind; none may read the state at x.
        device: the device that it runs on.
        asked: names of further signals, whose ``capture`` is "asked".
        steps: number of draft steps.
        raw: whether raw laws are wanted.
        rules: end the runs of rows; None: only their counts do.
    """

    per_token = False

    def __init__(
        self,
        vocab: int,
        truncates: bool,
        heads: Mapping[str, Head],
        device: torch.device,
        asked: Collection[str] = (),
        steps: int = 1,
        raw: bool = True,
        rules: DeviceRules | None = None,
    ) -> None:
        super().__init__("draft")
        own = sorted(heads.items())
        names = [name for name, one in SIGNALS.items() if one.capture == "always" or name in asked]
        self._vocab, self._truncates, self._rules = vocab, truncates, rules
        self.heads, self.passes = nn.ModuleDict(dict(own)), steps
        self.plan = DraftPlan(Sampling(), tuple(names), dict(own), raw=raw)
        for name, half in zip(("high", "low"), race_words(vocab, device), strict=True):
            self.register_buffer(name, half, persistent=False)

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``extras``: the lines of ``draft_lines``."""
        (lines,), steps = extras, self.passes
        settings, rest = Settings(*lines[:, :4].unbind(1)), lines[:, 4:]
        last, position, count, place, drafted = rest[:, :5].unbind(1)
        state, keys = tuple(rest[:, 5 : -2 * steps].unbind(1)), rest[:, -2 * steps :].long()
        rows, ends, live = torch.arange(len(lines), device=lines.device), last.long(), count > 0
        token, made, trusting = ends, list[tuple[Tensor, ...]](), live & (self._rules is not None)
        for step in range(steps):
            if step == 0:
                logits, states = run(lambda hidden: hidden[rows, ends][:, None])
                states = states[rows, ends]
            else:
                at = torch.where(live, position.long() + (step - 1), -1)
                logits, states = run(None, token[:, None], at)
                states = states[:, 0]
            halves = keys[:, step], keys[:, steps + step]
            result = self._after(logits[:, 0, : self._vocab], states, settings, place + step, halves)
            token, numbers = result.token, result.numbers.double()
            took, goes_on = live, live & (count > step + 1)
            if self._rules is not None:
                signals = dict(zip(self.plan.columns[1:], numbers[:, 1:].unbind(1), strict=True))
                trusted, ended, state = self._rules.ends(signals, drafted.long() + (step + 1), state)
                trusting, goes_on = trusting & trusted, goes_on & ~ended
            of_run = torch.stack([one.double() for one in (token, took, trusting)], 1)
            laws = (result.law, result.raw) if self.plan.raw else (result.law,)
            made.append((torch.cat([of_run, numbers], 1), *laws))
            live = goes_on
        return tuple(torch.stack(each, 1) for each in zip(*made, strict=True))

    def _after(
        self, said: Tensor, states: Tensor, settings: Settings, place: Tensor, key: tuple[Tensor, Tensor]
    ) -> StepResult:
        """What follows a pass, of which logits and states are left; ``key``: halves of the draws' addresses."""
        assert isinstance(self.high, Tensor) and isinstance(self.low, Tensor)
        law, told = settings.process(said, self._truncates), (place.float(), settings.temperature.float())
        token = race(law, *key, (self.high, self.low))
        return follow(self.plan, said, states, law, token, lambda: told)[0]


class TargetUnit(Unit):
    """A target forward pass: laws and largest logits after each token ``[rows, n, ...]``, and raw laws if wanted.

    Args:
        vocab: size of the common vocabulary.
        truncates: whether rows may use top-k, top-p or min-p.
        raw: whether raw laws are wanted.
    """

    def __init__(self, vocab: int, truncates: bool, raw: bool) -> None:
        super().__init__("target")
        self._vocab, self._truncates, self._raw = vocab, truncates, raw

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``extras``: ``Settings``, in lines."""
        return self._laws(run(None)[0], Settings(*extras[0].unbind(1)))

    def _laws(self, logits: Tensor, settings: Settings) -> tuple[Tensor, ...]:
        logits = logits[..., : self._vocab]
        rows, n = logits.shape[:2]
        flat = logits.reshape(rows * n, self._vocab)
        made = [settings.process(flat, self._truncates, n), flat.amax(-1)]
        if self._raw:
            made.append(raw_law(flat))
        return tuple(one.view(rows, n, *one.shape[1:]) for one in made)


class ChainUnit(TargetUnit):
    """A target pass over what is left of texts and drafts behind them, and its verdicts: numbers, float64, then laws
    and raw laws ``[rows, n, V]``. Of a row the numbers are: how many tokens of the draft stay, the trusted ones
    included; the token that follows them; how many are trusted; drifts and ratios of the drafted tokens if they were
    trusted (``metered``); largest logits.

    Args:
        vocab, truncates, raw: as of ``TargetUnit``.
        rule: "exact" or "match". steps: largest number of drafted tokens; 0: none is, and a token follows each text.
        metered: whether tokens may be trusted.
        device: the device that it runs on.
    """

    per_token = False

    def __init__(
        self,
        vocab: int,
        truncates: bool,
        raw: bool,
        rule: str,
        steps: int,
        metered: bool,
        device: torch.device,
    ) -> None:
        super().__init__(vocab, truncates, raw)
        self._rule, self._steps, self._metered = rule, steps, metered
        for name, half in zip(("high", "low"), race_words(vocab, device), strict=True):
            self.register_buffer(name, half, persistent=False)

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``extras``: the lines of ``chain_lines``; with steps, the first ``RUN`` numbers and the laws of a run."""
        (lines, *drafted), steps = extras, self._steps
        lead, uniforms, keys = lines[:, 4].long(), lines[:, 5 : 5 + steps], lines[:, 5 + steps :].long()
        low, high = (half.flatten() for half in keys.view(len(keys), 2, -1).unbind(1))
        assert isinstance(self.high, Tensor) and isinstance(self.low, Tensor)
        words, own = (self.high, self.low), run.tokens

        def draw(law: Tensor, places: Tensor) -> Tensor:
            return race(law, low[places], high[places], words)

        if steps:
            numbers, q = drafted
            tokens, counts = numbers[..., 0].long(), numbers[..., 1].sum(1).long()
            # The token that ends a run is checked even if it is trusted.
            trusted = numbers[..., 2].sum(1).long().minimum((counts - 1).clamp(min=0))
            each = torch.arange(own.shape[1], device=lines.device) - lead[:, None]
            own = torch.where(each < 0, own, tokens.gather(1, each.clamp(0, steps - 1)))
        laws, peaks, *raw = self._laws(run(None, own)[0], Settings(*lines[:, :4].unbind(1)))
        at = (torch.arange(-1, steps, device=lines.device) + lead[:, None]).clamp(0, laws.shape[1] - 1)
        p = laws.gather(1, at[..., None].expand(-1, -1, self._vocab))
        if not steps:
            token = draw(p[:, 0], torch.arange(len(lines), device=lines.device))
            accepted = trusted = torch.zeros_like(token)
        elif self._rule == "exact":
            accepted, token = judge_exact(p, q, tokens, counts, uniforms, draw, trusted)
        else:
            accepted, token = judge_match(p, tokens, counts, draw, trusted)
        verdict = [
            torch.stack([accepted, token, trusted], 1),
            *(meter(p, q, tokens) if self._metered else ()),
        ]
        return torch.cat([one.double() for one in (*verdict, peaks)], 1), laws, *raw


def draft_lines(
    rows: Sequence[DraftRow], counts: Sequence[int], steps: int, rules: DeviceRules | None
) -> list[list[float]]:
    """What a ``DraftUnit`` is told of each row: settings, index of the last token of its input, position and number of
    tokens to draft, places in the run, state of the stop rule, low and high halves of the draws' addresses."""
    lines, none = [], (0, (0.0,) * (0 if rules is None else len(rules.stop.start())))
    for row, count, keys in zip(rows, counts, draw_keys(rows, steps), strict=True):
        own = row.rules
        drafted, state = none if own is None or own.rules != rules else (own.drafted, own.state)
        told = (
            *Settings.line(row.plan.sampling),
            len(row.tokens) - 1,
            row.position,
            count,
            row.place,
            drafted,
            *state,
        )
        lines.append([*told, *(keys & np.uint64(0xFFFFFFFF)).tolist(), *(keys >> np.uint64(32)).tolist()])
    return lines


def chain_lines(rows: Sequence[DraftRow], chains: Sequence[ChainRow], steps: int) -> list[list[float]]:
    """What a ``ChainUnit`` is told of each row: settings, number of tokens before the draft, numbers that decide which
    tokens stay, low and high halves of the addresses of what follows them."""
    uniforms = (draw_keys(rows, steps, Purpose.ACCEPT) >> np.uint64(11)) * 2.0**-53
    keys = draw_keys(rows, steps + 1, Purpose.TARGET)
    halves = np.concatenate([uniforms, keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)], 1).tolist()
    told = [(*Settings.line(chain.sampling), len(chain.feed.tokens)) for chain in chains]
    return [[*one, *rest] for one, rest in zip(told, halves, strict=True)]
