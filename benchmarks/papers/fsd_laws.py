"""Fuzzy Speculative Decoding's Figure 3 and Appendix C in kind (Holsman et al. 2025): what the two laws say alone.

    python benchmarks/papers/fsd_laws.py --data DIR

Both models' laws along texts that the target draws for GSM8K, CommonsenseQA, MMLU and HumanEval, temperature 1:
nothing is timed, and every number is an expectation over the draws at these positions. Figure 3: how the divergences
are spread. Appendix C: where the draft's tokens are kept at the positions of least divergence, how much of the
target's own log-likelihood is lost, for each divergence at the same share of kept tokens; the pair's proxy for
accuracy.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

import sprinter
from benchmarks.common import cells
from benchmarks.papers.arms import Ask, asks, difference
from benchmarks.papers.report import Check, Claim, Table, run_parts
from benchmarks.smoke import sized
from sprinter.bench.statistics import BootstrapInterval, bootstrap, ratio_of_sums
from sprinter.decode.accept.fuzzy import DIVERGENCES
from sprinter.laws import entropy, kl_divergence, overlap, tv_distance
from sprinter.theory.recording import probe

SUITES = {"GSM8K": "gsm8k", "CSQA": "commonsenseqa", "MMLU": "mmlu", "HumanEval": "humaneval"}
NEW_TOKENS = sized(48, 8)
PAPER_JS = "js_reference"  # what the published code computes under the name of JS
SHARES = (0.3, 0.5, 0.7, 0.9)
EDGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Counts:
    """The options, as something that results are cached under."""

    data: Path
    tuning_prompts: int
    prompts: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Counts:
        """From the command line."""
        return cls(args.data, args.tuning_prompts, args.prompts)


@functools.cache
def prompts_of(pair: sprinter.Pair, counts: Counts, name: str) -> tuple[list[Ask], list[Ask]]:
    """Prompts to tune on, prompts to measure on."""
    ask = functools.partial(asks, pair, counts.data, SUITES[name], new_tokens=NEW_TOKENS)
    return ask(count=counts.tuning_prompts), ask(count=counts.prompts, skip=counts.tuning_prompts)


@dataclass(frozen=True)
class Laws:
    """What both laws say at the positions of the target's own texts, ``[N]`` each; texts: which text, ``[N]``.

    loss: what a token drawn from the draft costs in expected log-likelihood, E_p ln p − E_q ln p.
    """

    texts: np.ndarray
    loss: np.ndarray
    tv: np.ndarray
    overlap: np.ndarray
    divergences: Mapping[str, np.ndarray]

    def lost(self, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Loss where the draft's tokens are kept, and the whole loss, a text: their ratio is the share of the gap."""
        return self.by_text(self.loss * kept), self.by_text(self.loss)

    def by_text(self, values: np.ndarray) -> np.ndarray:
        """Sums a text."""
        return np.bincount(self.texts, weights=values)


@functools.cache
def laws(pair: sprinter.Pair, counts: Counts, name: str, tuning: bool = False) -> Laws:
    """One text of the target a prompt, both laws along it."""
    prompts = prompts_of(pair, counts, name)[0 if tuning else 1]

    def show(done: int, wanted: int) -> None:
        print(f"\r{name}, laws {done}/{wanted}", end="\n" * (done == wanted), file=sys.stderr)

    found = probe(pair, [one.ids for one in prompts], new_tokens=NEW_TOKENS, progress=show)
    p, q = found.raw_p.double(), found.raw_q.double()
    loss = kl_divergence(q, p) + entropy(q) - entropy(p)  # −E_q ln p + E_p ln p
    texts = np.repeat(np.arange(len(found.lengths)), found.lengths)
    named = {name: of(p, q).numpy() for name, of in DIVERGENCES.items()}
    return Laws(texts, loss.numpy(), tv_distance(p, q).numpy(), overlap(p, q).numpy(), named)


def figure_3(pair: sprinter.Pair, args: argparse.Namespace) -> list[Table]:
    """How the Jensen-Shannon divergence is spread in each data set, beside what SD accepts."""
    found = {name: laws(pair, Counts.of(args), name) for name in SUITES}
    rows, means, accepted = [], [], []
    for name, one in found.items():
        js, ones = one.divergences["js"], np.ones(len(one.tv))
        means.append((one.by_text(js), one.by_text(ones)))
        accepted.append((one.by_text(one.overlap), one.by_text(ones)))
        shares = [
            f"{((js >= low) & (js < high)).mean():.2f}"
            for low, high in zip(EDGES, (*EDGES[1:], 9.0), strict=True)
        ]
        rows.append(
            [name, *shares, cells(ratio_of_sums(*means[-1]), 3), cells(ratio_of_sums(*accepted[-1]), 3)]
        )
    claim = Claim(
        "Divergences are skewed lower on the data sets on which SD accepts more (GSM8K, HumanEval); asked here: rank "
        "correlation of mean divergence and SD's acceptance over the four data sets is negative.",
        (Check("rank correlation", rank_correlation(means, accepted), 0.0, above=False),),
    )
    easier = Claim(
        "GSM8K and HumanEval have lower divergences than CSQA and MMLU.",
        tuple(
            Check(f"{a} less {b}", difference(means[names.index(a)], means[names.index(b)]), 0.0, above=False)
            for names in [list(SUITES)]
            for a in ("GSM8K", "HumanEval")
            for b in ("CSQA", "MMLU")
        ),
    )
    bins = [f"{low:g} to {high:g}" for low, high in zip(EDGES, (*EDGES[1:], np.log(2).round(2)), strict=True)]
    head = ("data set", *bins, "mean JS", "SD accepts (mean overlap)")
    return [
        Table(
            "FSD, Figure 3",
            f"{setting(args)} Shares of positions by Jensen-Shannon divergence.",
            head,
            rows,
            (claim, easier),
        )
    ]


def setting(args: argparse.Namespace) -> str:
    """Where the laws are from."""
    return f"{args.prompts} prompts a data set, {NEW_TOKENS} tokens drawn from the target, temperature 1."


def rank_correlation(
    xs: list[tuple[np.ndarray, np.ndarray]], ys: list[tuple[np.ndarray, np.ndarray]]
) -> BootstrapInterval:
    """Spearman's, over data sets, of two ratios of sums; prompts are drawn anew within each data set."""

    def ranks(pairs: list[tuple[np.ndarray, np.ndarray]], rows: np.ndarray) -> np.ndarray:
        values = np.stack([top[rows].sum(-1) / bottom[rows].sum(-1) for top, bottom in pairs], -1)
        return values.argsort(-1).argsort(-1) - (len(pairs) - 1) / 2

    def statistic(rows: np.ndarray) -> np.ndarray:
        a, b = ranks(xs, rows), ranks(ys, rows)
        return (a * b).sum(-1) / (a * a).sum(-1)

    return bootstrap(statistic, min(len(top) for top, _ in xs))


def appendix_c(pair: sprinter.Pair, args: argparse.Namespace) -> list[Table]:
    """Loss at equal share of kept tokens, by divergence."""
    found = {name: laws(pair, Counts.of(args), name) for name in SUITES}
    rows, better, chance = [], [], []
    for name, one in found.items():
        for divergence in (*DIVERGENCES, "chance"):
            losses = [ratio_of_sums(*one.lost(kept(one, divergence, share))) for share in SHARES]
            drifts = [(one.tv * kept(one, divergence, share)).mean() for share in SHARES]
            rows.append(
                [name, divergence, *(f"{cells(x)} · {d:.3f}" for x, d in zip(losses, drifts, strict=True))]
            )
        for rival in ("kl", "kl_reversed", "tv"):
            more = difference(*(one.lost(kept(one, d, 0.7)) for d in (PAPER_JS, rival)))
            better.append(Check(f"{name}, less {rival}'s", more, 0.0, above=False))
        more = difference(*(one.lost(kept(one, d, 0.7)) for d in (PAPER_JS, "chance")))
        chance.append(Check(f"{name}, less chance's", more, 0.0, above=False))
    claims = [
        Claim(
            "JS keeps accuracy best (a figure on GSM8K and CSQA); asked here: it loses least at 70 % kept.",
            tuple(better),
        ),
        Claim("Any tokens kept by chance lose more (Appendix E).", tuple(chance)),
    ]
    rerun = (
        f"{setting(args)} Cells: share of the gap in log-likelihood that is lost · mean drift, where the draft's "
        "tokens are kept at the positions of least divergence. js_reference is the published code's JS."
    )
    head = ("data set", "divergence", *(f"{share:.0%} kept" for share in SHARES))
    return [Table("FSD, Appendix C", rerun, head, rows, claims)]


def kept(one: Laws, divergence: str, share: float) -> np.ndarray:
    """Chance that a position keeps the draft's token: the share of least divergence, or that share of each position."""
    if divergence == "chance":
        return np.full(len(one.tv), share)
    values = one.divergences[divergence]
    return (values <= np.quantile(values, share)).astype(float)


if __name__ == "__main__":
    run_parts(
        "papers/fsd_laws", __doc__ or "", {"figure3": figure_3, "appendixC": appendix_c}, NEW_TOKENS,
        prompts=30, tuning_prompts=12,
    )  # fmt: skip
