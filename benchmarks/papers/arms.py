"""What the scripts that re-run the papers' tables share: prompts, answers, the target as judge.

A 3 M pair sits at chance where the papers measure accuracy or ask a judge. The proxies, the same in all scripts:

* accuracy: log-likelihood a token of the new text under the target (raw law, temperature 1), and the share of tokens
  that come from the draft;
* a human's or a model's preference: of two texts for one prompt the one wins that the target finds likelier a token.

Both favour sharp texts: one that keeps to the target's likeliest tokens beats the target's own draws. So the mean
drift, which does not, stands beside them. Intervals are 95 %, bootstrap over prompts, paired where arms are
compared.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import sprinter
from benchmarks.common import Arm, interleave
from benchmarks.common import method_arm as prompt_arm
from sprinter.bench.quality.judges import LikelihoodJudge
from sprinter.bench.quality.likelihood import log_likelihoods
from sprinter.bench.sample import Sample
from sprinter.bench.statistics import BootstrapInterval, bootstrap, ratio_of_ratios, ratio_of_sums
from sprinter.bench.suites import group_of_spec_bench, load_suite, turn_ids
from sprinter.engine.generation import Generation


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt that fits: its token ids, its group, the text that really follows ("" if none is known)."""

    ids: tuple[int, ...]
    category: str = ""
    reference: str = ""
    text: str = ""


def asks(
    pair: sprinter.Pair,
    data: Path,
    suite: str,
    count: int,
    new_tokens: int,
    skip: int = 0,
    a_group: bool = False,
    avoid: Collection[Ask] = (),
) -> list[Ask]:
    """First turns of samples that fit the context.

    Args:
        count: so many, the suite's groups in turn; with ``a_group`` so many of each group.
        skip: after so many (of each group).
        avoid: not these.
    """
    groups: dict[str, list[Ask]] = {}
    for sample in _samples(suite, data):
        category = group_of_spec_bench(sample.category) if suite == "spec-bench" else sample.category
        ids, reference = tuple(turn_ids(pair, sample, 0, [])), "".join(sample.references[:1])
        one = Ask(ids, category, reference, sample.turns[0])
        if 1 <= len(one.ids) <= pair.models.context - new_tokens and one not in avoid:
            groups.setdefault(one.category if a_group else "", []).append(one)
        if not a_group and len(groups.get("", ())) == skip + count:
            break
    chosen = [one for group in groups.values() for one in group[skip : skip + count]]
    if not chosen:
        sys.exit(f"error: {suite} has no prompt left after the first {skip}")
    return chosen


@functools.cache
def _samples(suite: str, data: Path) -> Sequence[Sample]:
    return load_suite(suite, data).samples


def method_arm(
    pair: sprinter.Pair, method: str, new_tokens: int, temperature: float = 1.0, name: str = ""
) -> Arm:
    """``benchmarks.common.method_arm`` with a limit of its own."""
    return prompt_arm(pair, method, temperature, name, new_tokens)


def measure(arms: Sequence[Arm], prompts: Sequence[Ask], repeats: int = 1, note: str = "") -> dict[str, Arm]:
    """Interleave; arms by name."""
    interleave(arms, [one.ids for one in prompts], repeats, note=note)  # type: ignore[misc]
    return {arm.name: arm for arm in arms}


def fastest(arms: Sequence[Arm], prompts: Sequence[Ask], note: str) -> tuple[str, dict[str, float]]:
    """The fastest arm's name, and tokens/s of each."""
    measured = measure(arms, prompts, note=note)
    speeds = {name: float(arm.tokens.sum() / arm.busy_s.sum()) for name, arm in measured.items()}
    return max(speeds, key=lambda name: speeds[name]), speeds


class Group:
    """The answers of one arm to the prompts of one group, repeats folded into their prompt."""

    def __init__(self, arm: Arm, prompts: Sequence[Ask], category: str | None = None) -> None:
        self.arm, count = arm, len(prompts)
        rows = [i for i, one in enumerate(prompts) if category in (None, one.category)]
        starts = range(0, len(arm.outs), count)
        self.outs = [[arm.outs[start + i] for i in rows] for start in starts]  # [repeats][prompts]
        self.asks = [prompts[i] for i in rows]

    def sum(self, value: str | Callable[[Generation], float]) -> np.ndarray:
        """Of a field of the stats, or of a function of the answer, a prompt."""
        of = (lambda out: getattr(out.stats, value)) if isinstance(value, str) else value
        return np.array([[of(out) for out in row] for row in self.outs], dtype=float).sum(0)

    @property
    def tokens(self) -> np.ndarray:
        """New tokens a prompt."""
        return self.sum("new_tokens")

    @property
    def busy_s(self) -> np.ndarray:
        """Seconds a prompt, closing passes of the meter apart."""
        return self.sum(lambda out: out.stats.wall_s - out.stats.closing_s)

    @property
    def drafted(self) -> np.ndarray:
        """Tokens of the text that the draft wrote, a prompt."""
        return self.sum(lambda out: out.stats.trusted + out.stats.accepted)

    @property
    def drift(self) -> BootstrapInterval:
        """Mean drift a token."""
        return ratio_of_sums(
            self.sum(lambda out: (out.stats.mean_drift or 0.0) * out.stats.new_tokens), self.tokens
        )

    @property
    def draft_share(self) -> BootstrapInterval:
        """Share of the new tokens that the draft wrote."""
        return ratio_of_sums(self.drafted, self.tokens)

    @property
    def tokens_per_s(self) -> BootstrapInterval:
        """Speed, the prompt's own pass included."""
        return ratio_of_sums(self.tokens, self.busy_s)

    def speed_over(self, base: Group) -> BootstrapInterval:
        """Tokens/s over another arm's, paired by prompt."""
        return ratio_of_ratios((self.tokens, self.busy_s), (base.tokens, base.busy_s))


def likelihoods(pair: sprinter.Pair, group: Group) -> np.ndarray:
    """Log-likelihood under the target of each answer, nats, summed over its tokens: ``[repeats, prompts]``."""
    rows = [zip(group.asks, row, strict=True) for row in group.outs]
    texts = [(ask.ids, [token.id for token in out.tokens]) for row in rows for ask, out in row]
    sums = [float(values.sum()) for values in log_likelihoods(pair, texts)]
    return np.array(sums).reshape(len(group.outs), -1)


def per_token(pair: sprinter.Pair, group: Group) -> np.ndarray:
    """The judge's score of each answer: log-likelihood a token, ``[repeats, prompts]``."""
    return likelihoods(pair, group) / np.array([[len(out.tokens) for out in row] for row in group.outs])


def win_shares(ours: np.ndarray, theirs: np.ndarray, ties: float = 1.0) -> np.ndarray:
    """Share of comparisons that ``ours`` wins, a tie counting ``ties``, over all pairs of repeats: ``[prompts]``.

    Args:
        ours, theirs: scores ``[repeats, prompts]``; the bench's offline judge says how near is a tie.
    """
    gaps, band = ours[:, None, :] - theirs[None, :, :], LikelihoodJudge().band
    shares: np.ndarray = ((gaps > band) + ties * (np.abs(gaps) <= band)).mean((0, 1))
    return shares


def mean(values: np.ndarray) -> BootstrapInterval:
    """Mean over prompts."""
    return ratio_of_sums(values, np.ones(len(values)))


def difference(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> BootstrapInterval:
    """Σa/Σb of the first less that of the second, paired by prompt."""

    def statistic(rows: np.ndarray) -> np.ndarray:
        return a[0][rows].sum(-1) / a[1][rows].sum(-1) - b[0][rows].sum(-1) / b[1][rows].sum(-1)

    return bootstrap(statistic, len(a[0]))
