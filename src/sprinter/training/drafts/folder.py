"""The folder of a draft model or of heads in the making: whose it is, the training in it, and its draft.json.

It holds what is made, and what the run needs to continue: ``texts/``, ``states/`` and ``training/``. ``draft.json`` is
written last: a folder that has it is complete.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sprinter.errors import UserError
from sprinter.training.drafts.card import draft_card, save_losses
from sprinter.training.drafts.data import INFO, Texts
from sprinter.training.drafts.run import Run, loss_temperature
from sprinter.training.drafts.settings import HeadSettings, StudentSettings, TrainingSettings
from sprinter.training.shards import save_bytes

__all__ = ["FACTS", "STATES", "TRAINING", "Judging", "check_folder", "finish", "run_facts", "training_key"]

FACTS, STATES, TRAINING = "draft.json", "states", "training"


@dataclass(frozen=True, slots=True)
class Judging:
    """How the finished draft is measured.

    Args:
        gamma: length of its drafts. prompts: maximum number of held-out prompts of a task that are answered.
        new_tokens: maximum length of these answers.
    """

    gamma: int = 4
    prompts: int = 6
    new_tokens: int = 96


def check_folder(folder: Path, restart: bool, sort: str) -> None:
    """Refuse a folder that holds another model; ``restart``: delete an earlier run in it.

    Args:
        sort: what is to be made in it, "draft" or "heads"; a folder of the other is refused.

    Raises:
        UserError: it is a file, or holds another model.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"'{folder}' is a file: give a directory for the draft")
    ours = (folder / FACTS).is_file() or (folder / "texts" / INFO).is_file()
    if (folder / "config.json").is_file() and not ours:
        raise UserError(f"'{folder}' holds another model: give another directory for the draft")
    if (folder / FACTS).is_file():
        try:
            heads = "heads" in json.loads((folder / FACTS).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"'{folder / FACTS}' is damaged ({error}): give another --out, or delete that file"
            ) from None
        if heads != (sort == "heads"):
            there = (
                "heads of 'sprinter draft train'" if heads else "a draft model of 'sprinter draft distill'"
            )
            raise UserError(f"'{folder}' holds {there}, which would be overwritten: give another --out")
    if restart and ours:
        (folder / FACTS).unlink(missing_ok=True)
        for part in (f"{TRAINING}/*/*", "texts/texts-*", f"{STATES}/states-*"):
            for file in folder.glob(f"{part}.safetensors"):
                file.unlink()
        (folder / "texts" / INFO).unlink(missing_ok=True)


def training_key(texts: Texts, student: StudentSettings | HeadSettings, training: TrainingSettings) -> str:
    """The name of a training's folder: others on the same texts do not touch it."""
    usual = (
        ("keep_states", True),
        ("keep_states", False),
        ("parallel", 1),
        ("start", None),
    )  # not in older names
    shape = {name: value for name, value in asdict(student).items() if (name, value) not in usual}
    facts = [texts.info["hash"], shape, training.shaping()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def run_facts(folder: Path, texts: Texts, training: TrainingSettings, run: Run) -> dict[str, Any]:
    """What draft.json says of an ended training: "texts", "training", and whether there is a "picture" of its losses.

    An older draft.json is deleted: it is of the weights beside it.
    """
    (folder / FACTS).unlink(missing_ok=True)
    train, held = texts.part(False), texts.part(True)
    return {
        "texts": {
            **texts.info, "train_texts": len(train), "held_out_texts": len(held),
            "train_tokens": sum(len(text.ids) - text.prompt for text in train),
        },
        "training": {
            **asdict(training), "temperature": loss_temperature(training, texts), "steps": run.steps,
            "tokens": run.tokens, "seconds": round(run.seconds, 1),
            "history": [point._asdict() for point in run.history],
        },
        "picture": save_losses(run.history, folder / "losses.png"),
    }  # fmt: skip


def finish(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Write card and draft.json; returns the facts."""
    save_bytes(folder / "README.md", draft_card(facts))
    save_bytes(folder / FACTS, json.dumps(facts, indent=1) + "\n")
    return facts
