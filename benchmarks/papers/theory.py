"""Tables 1 and 2 of "A Theoretical Perspective for Speculative Decoding Algorithm" (Yin et al. 2024) in kind.

    python benchmarks/papers/theory.py --data DIR

Decoding-OPT against Decoding-UNO at ε = 0.1, 0.2, 0.4, 0.8 (Table 1), the target alone against the draft alone
(Table 2), on the built-in pair. As in the paper: both answer each prompt several times, a prompt is won by the
method whose answers win more than half of the comparisons, the win rate is the share of prompts won (a half for a
draw). Prompts: Vicuna-bench questions in place of Alpaca-Farm's, temperature 1, γ = 5. Every answer of one method is
compared with every answer of the other. UNO draws its replacement from the target, as the text says (the listing in
the paper's appendix draws it from the draft). This pair's laws are flat: at the paper's ε hardly a token is refused,
so smaller ones stand beside.

Judge: the target's log-likelihood a token in place of a reward model and GPT-4. It favours sharp texts, and UNO is
sharp: what it draws twice from the target is what both models like. So the mean drift, the distance to the target's
law that the theorem speaks of, is shown beside and checked apart.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

import sprinter
from benchmarks.common import Arm, cells
from benchmarks.papers.arms import Group, asks, difference, mean, measure, method_arm, per_token, win_shares
from benchmarks.papers.report import Check, Claim, Table, run_parts
from benchmarks.smoke import sized
from sprinter.bench.statistics import BootstrapInterval, ratio_of_ratios

NEW_TOKENS = sized(32, 6)
EPSILONS = (0.1, 0.2, 0.4, 0.8)  # the paper's
OWN_EPSILONS = (0.001, 0.01)
RULES = ("OPT", "UNO")
SUITE = "vicuna"


def answers(pair: sprinter.Pair, args: argparse.Namespace, specs: dict[str, str]) -> dict[str, Group]:
    """Several answers of each method to each prompt."""
    prompts = asks(pair, args.data, SUITE, args.prompts, NEW_TOKENS)
    arms: list[Arm] = [method_arm(pair, spec, NEW_TOKENS, name=name) for name, spec in specs.items()]
    return {name: Group(arm, prompts) for name, arm in measure(arms, prompts, args.answers, SUITE).items()}


def duel(ours: np.ndarray, theirs: np.ndarray) -> tuple[BootstrapInterval, BootstrapInterval]:
    """Per cent of prompts won (half for a draw), per cent of comparisons won (half for a tie)."""
    shares = win_shares(ours, theirs, ties=0.5)
    prompts = (shares > 0.5) + 0.5 * (shares == 0.5)
    return mean(100 * prompts), mean(100 * shares)


def row(name: str, group: Group, scores: np.ndarray, won: str, compared: str) -> list[str]:
    """One row of the table: an arm with its scores."""
    calls = group.sum("target_calls").sum() / group.tokens.sum()
    return [
        name, won, compared, cells(mean(scores.mean(0))), cells(group.drift, 3), cells(group.draft_share),
        f"{calls:.3f}", f"{group.tokens.sum() / group.busy_s.sum():.0f}",
    ]  # fmt: skip


HEAD = (
    "method", "prompts won, %", "comparisons won, %", "log-likelihood a token", "drift", "share of the draft",
    "target calls a token", "tokens/s",
)  # fmt: skip


def table_1(pair: sprinter.Pair, args: argparse.Namespace) -> list[Table]:
    """OPT against UNO."""
    epsilons = (*OWN_EPSILONS, *EPSILONS)
    specs = {f"{rule} ε={e}": f"{rule.lower()}(epsilon={e}, gamma=5)" for e in epsilons for rule in RULES}
    found = answers(pair, args, specs)
    scores = {name: per_token(pair, group) for name, group in found.items()}
    rows, wins, closer, calls = [], {}, {}, {}
    for e in epsilons:
        opt, uno = (f"{rule} ε={e}" for rule in RULES)
        for ours, theirs in ((opt, uno), (uno, opt)):
            won, compared = duel(scores[ours], scores[theirs])
            rows.append(row(ours, found[ours], scores[ours], cells(won, 1), cells(compared, 1)))
            wins.setdefault(e, Check(f"ε={e}, prompts won, %", won, 50.0))
        closer[e] = Check(f"ε={e}, drift less UNO's", apart(found[opt], found[uno]), 0.0, above=False)
        calls[e] = Check(f"ε={e}, calls over UNO's", calls_over(found[opt], found[uno]), 1.05, above=False)
    printed = "53, 53.5, 57.5, 52.5 % (reward model), 54.5, 53, 53.5, 55 % (GPT-4)"
    claims = [
        Claim(f"OPT wins at every ε: {printed}.", tuple(wins[e] for e in EPSILONS)),
        Claim(
            "Beyond the paper, where this pair still refuses tokens.", tuple(wins[e] for e in OWN_EPSILONS)
        ),
        Claim(
            "What stands behind it (Theorem 4): OPT is nearer to the target's law.", tuple(closer.values())
        ),
        Claim("At no more target calls; asked here: within 5 %.", tuple(calls.values())),
    ]
    return [Table("Yin et al., Table 1", rerun(args), HEAD, rows, claims)]


def apart(a: Group, b: Group) -> BootstrapInterval:
    """Mean drift of one less that of the other."""

    def parts(group: Group) -> tuple[Any, Any]:
        return group.sum(lambda out: (out.stats.mean_drift or 0.0) * out.stats.new_tokens), group.tokens

    return difference(parts(a), parts(b))


def calls_over(a: Group, b: Group) -> BootstrapInterval:
    """Target calls a token over those of the other."""
    return ratio_of_ratios((a.sum("target_calls"), a.tokens), (b.sum("target_calls"), b.tokens))


def rerun(args: argparse.Namespace) -> str:
    """What was done."""
    return (
        f"{args.prompts} questions of Vicuna-bench, {args.answers} answers each ({args.answers**2} comparisons a "
        f"prompt), {NEW_TOKENS} new tokens, temperature 1; the judge is the target's log-likelihood a token."
    )


def table_2(pair: sprinter.Pair, args: argparse.Namespace) -> list[Table]:
    """Target against draft: whether the judge can tell them apart."""
    found = answers(pair, args, {"target": "autoregressive", "draft": "draft-only"})
    scores = {name: per_token(pair, group) for name, group in found.items()}
    won, compared = duel(scores["target"], scores["draft"])
    lost, against = duel(scores["draft"], scores["target"])
    rows = [
        row("target alone", found["target"], scores["target"], cells(won, 1), cells(compared, 1)),
        row("draft alone", found["draft"], scores["draft"], cells(lost, 1), cells(against, 1)),
    ]
    claim = Claim(
        "The target alone beats the draft alone with 64.5 % (reward model) and 69 % (GPT-4): the judge sees the gap.",
        (Check("prompts won, %", won, 50.0), Check("as many as in the paper, %", won, 64.5)),
    )
    return [Table("Yin et al., Table 2", rerun(args), HEAD, rows, [claim])]


if __name__ == "__main__":
    run_parts(
        "papers/theory",
        __doc__ or "",
        {"table2": table_2, "table1": table_1},
        NEW_TOKENS,
        prompts=40,
        answers=4,
    )
