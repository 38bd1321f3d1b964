"""The SPRINTER paper's gate, trained on texts of a suite that are measured nowhere, and its evaluation."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from sprinter.heads.head import Head
from sprinter.reproduce.study import Study
from sprinter.training.dataset import Positions, read_positions
from sprinter.training.label_run import LabelProgress, LabelSettings, label, usual_batch
from sprinter.training.records import TEMPERATURES
from sprinter.training.roc import Report, judge
from sprinter.training.settings import TrainSettings
from sprinter.training.train import train

__all__ = ["LABELS", "distance", "held_out", "judged", "labelled", "trained"]

LABELS = (1.0, 1.2, 1.5)
"""λ: a drawn token is acceptable where q(x)/p(x) is at most this."""
SEED = 0
"""Of the split by prompt: 80 % train, 10 % stop the training, 10 % judge."""


def labelled(study: Study, suite: str) -> tuple[Path, int]:
    """Labels of a suite's texts after those that are measured and tuned on, and their number; resumed if interrupted.

    A small suite has fewer than the settings ask for.
    """

    def told(now: LabelProgress) -> None:
        study.progress(now.prompts, study.settings.gate_texts, f"{suite}: labels")

    def make() -> tuple[Path, int]:
        whole = study.suite(suite, study.settings.gate_texts, study.prompts + study.tuning)
        texts = [" ".join((*one.turns, *one.references)) for one in whole.samples]
        folder = study.out / f"{suite} labels"
        file = folder.with_suffix(".txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(" ".join(text.split()) for text in texts) + "\n", encoding="utf-8")
        batch = usual_batch(study.pair.models, folder, study.restart)
        settings = LabelSettings(new_tokens=study.new_tokens, batch_size=batch)
        report = label(study.pair, [file], folder, settings, restart=study.restart, progress=told)
        return folder, report.info.prompts

    return study.once(("labels", suite), make)


def trained(study: Study, suite: str, lam: float = 1.2, head: str = "paper") -> Head:
    """A head of these texts: the paper's gate for a λ, or a preset with its own label."""

    def make() -> Head:
        settings = TrainSettings(
            preset=head, seed=SEED, label=f"ratio(lambda={lam:g})" if head == "paper" else None
        )
        with torch.inference_mode(False):
            return train(read_positions([labelled(study, suite)[0]], settings.inputs), settings).head

    return study.once(("head", suite, lam, head), make)


def held_out(study: Study, suite: str, lam: float) -> Positions:
    """Labels of the tenth of the prompts that no gate was trained on, and none stopped by."""
    positions = read_positions([labelled(study, suite)[0]], trained(study, suite, lam).features)
    return positions.select(positions.parts(SEED) == 2)


def judged(study: Study, suite: str, lam: float) -> Report:
    """Evaluation of the gate of a λ on prompts that it was not trained on."""
    made = partial(judge, trained(study, suite, lam), held_out(study, suite, lam))
    return study.once(("judged", suite, lam), made)


def distance(study: Study, suite: str, lam: float) -> float:
    """Mean TV(p, q) at the positions that the gate of a λ is judged on, temperature 1."""
    held = held_out(study, suite, lam)
    return 1 - float(held.columns["overlap"][:, TEMPERATURES.index(1.0)].double().mean())
