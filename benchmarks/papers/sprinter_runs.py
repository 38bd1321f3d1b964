"""What SPRINTER's re-run tables measure: the paper's gates, all arms on a data set, win-tie rates, ROUGE."""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

import sprinter
from benchmarks.common import Arm
from benchmarks.papers.arms import Group, asks, fastest, measure, method_arm, per_token, win_shares
from benchmarks.smoke import sized
from sprinter.bench.quality.rouge import ROUGE, rouge
from sprinter.bench.statistics import BootstrapInterval, ratio_of_ratios
from sprinter.heads.head import Head
from sprinter.training.dataset import read_positions
from sprinter.training.label_run import LabelSettings, label
from sprinter.training.settings import TrainSettings
from sprinter.training.train import train

SUITES = {"Wiki-Summary": "wiki-summary", "LM1B": "lm1b"}
NEW_TOKENS, GAMMAS = sized(20, 6), sized((1, 2, 3, 4, 5), (1, 2))
RIVALS = {"SpecDec++": "specdec++", "AdaEDL": "adaedl", "MentoredDec": "mentored"}
OWN = "SPRINTER"  # with the gate trained on the same data set
OURS = "SPRINTER, built-in gate"


def trained_on(name: str) -> str:
    """The arm whose gate was trained on a data set."""
    return f"SPRINTER, gate of {name}"


@functools.cache
def gates(pair: sprinter.Pair, data: Path, texts: int, skip: int) -> dict[str, Head]:
    """The paper's gate, trained on each data set."""
    found = {}
    settings = TrainSettings(head="linear", label="ratio(lambda=1.2)")
    with tempfile.TemporaryDirectory() as folder:
        for name, suite in SUITES.items():
            others = asks(pair, data, suite, texts, NEW_TOKENS, skip=skip)
            whole = [f"{one.text} {one.reference}".replace("\n", " ") for one in others]
            texts_file, labels = Path(folder, f"{suite}.txt"), Path(folder, suite)
            texts_file.write_text("\n".join(whole) + "\n", encoding="utf-8")
            label(pair, [texts_file], labels, LabelSettings(new_tokens=NEW_TOKENS))
            with torch.inference_mode(False):
                found[name] = train(read_positions([labels], settings.inputs), settings).head
    return found


def arms_of(pair: sprinter.Pair, heads: Mapping[str, Head], gamma: int, temperature: float) -> list[Arm]:
    """SD, the rivals, SPRINTER with each gate."""
    arms = [method_arm(pair, f"speculative(gamma={gamma})", NEW_TOKENS, temperature, "SD")]
    arms += [method_arm(pair, spec, NEW_TOKENS, temperature, name) for name, spec in RIVALS.items()]
    for name, head in heads.items():
        gated = sprinter.Pair(pair.models, head)
        arms.append(method_arm(gated, "sprinter(tau=0.5)", NEW_TOKENS, temperature, trained_on(name)))
    return [*arms, method_arm(pair, "sprinter(tau=0.7)", NEW_TOKENS, temperature, OURS)]


@functools.cache
def measured(
    pair: sprinter.Pair,
    data: Path,
    suite: str,
    prompts: int,
    tuning: int,
    texts: int,
    temperature: float,
    repeats: int,
) -> dict[str, Group]:
    """All arms on one data set."""
    chosen = asks(pair, data, suite, prompts, NEW_TOKENS)
    others = asks(pair, data, suite, tuning, NEW_TOKENS, skip=prompts)
    tried = [method_arm(pair, f"speculative(gamma={g})", NEW_TOKENS, temperature) for g in GAMMAS]
    best, _ = fastest(tried, others, f"T={temperature} {suite}, γ")
    heads = gates(pair, data, texts, prompts + tuning)
    arms = arms_of(pair, heads, GAMMAS[[arm.name for arm in tried].index(best)], temperature)
    out = measure(arms, chosen, repeats, f"T={temperature} {suite}")
    return {name: Group(arm, chosen) for name, arm in out.items()}


def groups(pair: sprinter.Pair, args: argparse.Namespace, name: str, temperature: float) -> dict[str, Group]:
    """All arms on one data set, measured once."""
    counts = (args.prompts, args.tuning_prompts, args.gate_texts)
    return measured(pair, args.data, SUITES[name], *counts, temperature, args.repeats if temperature else 1)


def named(found: Mapping[str, Group], name: str) -> dict[str, Group]:
    """Without the gate of the other data set, the own one called SPRINTER."""
    other = [trained_on(suite) for suite in SUITES if suite != name]
    return {
        OWN if arm == trained_on(name) else arm: group for arm, group in found.items() if arm not in other
    }


def wins(pair: sprinter.Pair, ours: Group, theirs: Group) -> np.ndarray:
    """Win-tie rate a prompt, per cent."""
    return 100 * win_shares(per_token(pair, ours), per_token(pair, theirs))


def run_tokens(group: Group) -> tuple[np.ndarray, np.ndarray]:
    """Kept draft tokens, and runs, a prompt: the paper's "average tokens" is their ratio."""
    return group.drafted, group.sum("rounds")


def over(top: Group, bottom: Group) -> BootstrapInterval:
    """Average tokens of one arm over those of another."""
    return ratio_of_ratios(run_tokens(top), run_tokens(bottom))


def rouge_scores(group: Group) -> dict[str, np.ndarray]:
    """F1 of each ROUGE, mean over repeats, a prompt; references without words are not scored."""
    scored = [
        [rouge(out.text, one.reference) for one, out in zip(group.asks, row, strict=True)]
        for row in group.outs
    ]
    return {kind: np.array([[one[kind] for one in row if one] for row in scored]).mean(0) for kind in ROUGE}
