"""Trains heads on a target that draft: texts, training, evaluation, card. Every stage resumes (``folder``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from sprinter.decode.sparse import choose_nodes
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.heads.drafting import save_heads
from sprinter.heads.load import load_any_head
from sprinter.models.reduced_vocab import frequent_tokens
from sprinter.training.drafts.data import Texts, TextsProgress, write_texts
from sprinter.training.drafts.dflash import DFlashLearner, fresh_dflash
from sprinter.training.drafts.eagle import AHEAD, EagleLearner, fresh_eagle
from sprinter.training.drafts.eagle3 import Eagle3Learner, ParallelLearner, fresh_eagle3
from sprinter.training.drafts.folder import (
    STATES,
    TRAINING,
    Judging,
    check_folder,
    finish,
    run_facts,
    training_key,
)  # fmt: skip
from sprinter.training.drafts.glide import GlideLearner, fresh_glide
from sprinter.training.drafts.judge import accepted, by_task
from sprinter.training.drafts.learner import HeadLearner
from sprinter.training.drafts.medusa import MedusaLearner, fresh_medusa
from sprinter.training.drafts.run import LossPoint, loss_temperature, run_to_end
from sprinter.training.drafts.settings import HeadSettings, TextSettings, TrainingSettings
from sprinter.training.drafts.states import keep_states, states_elsewhere
from sprinter.training.ray_pool import ModelSource, RayPool, ray_workers

__all__ = ["HEAD_TRAINING", "train_heads"]

HEAD_TRAINING = TrainingSettings(loss="ce+kl", warm_up=0.0)
"""Heads see little of what their token depends on: total variation alone has no gradient for most of it."""


def train_heads(
    pair: Pair,
    weights: PreTrainedModel,
    data: Sequence[str | Path],
    out: str | Path,
    texts: TextSettings = TextSettings(),
    shape: HeadSettings = HeadSettings(),
    training: TrainingSettings = HEAD_TRAINING,
    judging: Judging = Judging(),
    *,
    restart: bool = False,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    on_texts: Callable[[TextsProgress], None] | None = None,
    on_states: Callable[[int, int], None] | None = None,
    on_training: Callable[[LossPoint, int], None] | None = None,
) -> dict[str, Any]:
    """Train heads that draft for a target.

    Args:
        pair: the target, which writes the texts and judges the heads; any weights that Sprinter runs.
        weights: the target in a floating-point dtype, where the heads are trained.
        data: prompts, see ``training.sources``.
        out: the folder of the heads; an interrupted run in it is continued.
        texts, shape, training, judging: settings of the stages.
        restart: delete an earlier run first.
        engine: where states that are kept are computed: "local", or "ray" for a cluster (extra ``[ray]``).
        workers: number of Ray actors, each of which loads the target; None: 2.
        ray_address: address of a running cluster; None starts one on this machine.
        on_texts, on_states, on_training: progress callbacks; of states with the texts done and all.

    Returns:
        The facts of draft.json.

    Raises:
        UserError: what is wrong with data, settings or folder, and how to fix it.
    """
    if training.on_policy:
        raise UserError(
            "on_policy is for draft models: heads read states of the target's own text, leave it out"
        )
    target = pair.models.target
    target.module("training of heads that draft")  # which llama.cpp cannot run
    count = ray_workers(engine, workers, ray_address)
    if count is not None and not shape.keep_states:
        raise UserError("engine=ray computes states that are kept: give keep_states, or engine=local")
    elsewhere = None
    if count is not None:
        device, dtype = weights.device.type, str(weights.dtype).removeprefix("torch.")
        source = ModelSource.of(
            pair, {"target": weights_fingerprint(weights)}, device=device, dtype=dtype, dequantise=True
        )
        make = partial(states_elsewhere, source, training.precision)
        elsewhere = RayPool(make, count, ray_address, device == "cuda")
        elsewhere.check()
    folder = Path(out)
    check_folder(folder, restart, "heads")
    written = _long_enough(write_texts(pair, data, folder / "texts", texts, on_texts))
    held = written.part(True)
    name = Path(target.id).name if Path(target.id).expanduser().exists() else target.id  # a hub id in full
    learner = _fresh(pair, weights, written, shape, loss_temperature(training, written), name)
    if shape.keep_states:
        learner.kept = keep_states(
            weights, learner.heads.layers, written.texts, folder / STATES, training.precision, on_states, elsewhere
        )  # fmt: skip
    place = folder / TRAINING / training_key(written, shape, training)
    run = run_to_end(learner, written, training, place, progress=on_training)
    learner.heads.accuracies = learner.accuracies(held or written.part(False), training.tokens)
    measured = "held-out" if held else "training"
    made = {
        **asdict(shape), "parameters": sum(value.numel() for value in learner.named().values()),
        "accuracies": [list(row) for row in learner.heads.accuracies],
        "tree": choose_nodes(learner.heads.accuracies, 24) if shape.kind == "medusa" else "eagle",
        "accuracies_on": measured,
    }  # fmt: skip
    facts = {"heads": made, **run_facts(folder, written, training, run)}
    recorded = {key: value for key, value in facts["training"].items() if key != "history"}
    about = {"training": recorded, "texts": facts["texts"], "accuracies_on": measured}
    save_heads(learner.heads, folder, "", about)  # the card comes later
    facts["tasks"] = _judged(pair, folder, written, judging, shape)
    return finish(folder, facts)


def _long_enough(texts: Texts) -> Texts:
    """The texts that have a position to learn: the first token that heads draft follows one that the target has read.

    Raises:
        UserError: there are none to train on.
    """
    found = replace(texts, texts=tuple(text for text in texts.texts if len(text.ids) > 2))
    if not found.part(False):
        raise UserError(
            "the texts are too short: heads learn from the third token of a text on, so give longer prompts, or more "
            "than one token of answer (--max-new-tokens)"
        )
    return found


def _fresh(
    pair: Pair, weights: PreTrainedModel, texts: Texts, shape: HeadSettings, temperature: float, name: str
) -> HeadLearner[Any]:
    """Heads of the asked kind, before training."""
    about = weights, shape, name, texts.info["target_fingerprint"]
    how = weights, shape.discount, temperature, shape.steps
    if shape.kind == "medusa":
        return MedusaLearner(fresh_medusa(*about), *how)
    if shape.kind == "glide":
        return GlideLearner(fresh_glide(*about), *how)
    if shape.kind == "dflash":
        return DFlashLearner(fresh_dflash(*about), *how)
    if shape.kind == "eagle":
        return EagleLearner(fresh_eagle(*about), *how, shape.regression)
    kept = None
    if shape.vocabulary is not None:
        answers = (text.ids[text.prompt :] for text in texts.part(False))
        kept = frequent_tokens(answers, shape.vocabulary, pair.models.vocab_size, pair.models.target.eos_ids)
    learner = ParallelLearner if shape.kind == "peagle" else Eagle3Learner
    return learner(fresh_eagle3(*about, kept), *how)


def _judged(
    pair: Pair, folder: Path, texts: Texts, judging: Judging, shape: HeadSettings
) -> dict[str, dict[str, float]]:
    """Tokens a target call by task, of a chain and of a tree: of the saved weights."""
    heads = load_any_head(folder)
    both = Pair(pair.models, None, [heads])
    temperature = float(texts.info["settings"]["temperature"])
    found: list[Mapping[str, Mapping[str, float]]] = []
    tree = "medusa" if shape.kind == "medusa" else "eagle"
    chain = max(shape.steps, AHEAD) if shape.kind == "eagle" else shape.steps
    for name, method in (("chain", f"heads(gamma={chain})"), ("tree", tree)):
        table = accepted(both, texts.part(True), method, temperature, judging)
        found.append(
            {task: {f"{name}_{key}": value for key, value in row.items()} for task, row in table.items()}
        )
    return by_task(*found)
