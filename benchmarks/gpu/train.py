"""The pair and its gate: trained on carried text, in the time that there is.

The pair is made of the parts of scripts/train_builtin.py: byte-level BPE, Llama, Muon and AdamW, a draft distilled
from its target. New here: training windows of one length, layers of the target that are compiled one by one (a single
compilation serves all), and step sizes that follow the clock, so that a slow device trains for fewer steps.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

import sprinter
import train_builtin as recipe
from benchmarks.common import ROOT  # noqa: F401 (puts scripts/ on the path)
from benchmarks.gpu.stage import Run, first_line, free, matmul_precision
from sprinter.errors import UserError
from sprinter.files import write_atomic
from sprinter.training.card import save_trained
from sprinter.training.dataset import read_positions
from sprinter.training.label_run import LabelSettings, label
from sprinter.training.roc import judge
from sprinter.training.settings import TrainSettings
from sprinter.training.sources import read_records, text_of
from sprinter.training.train import train

HELD_OUT_LEAST = 24
TARGET_SHARE = 0.66  # of the time for training both
LEAST_SHARE = 0.3  # of a model's time that is left for training, however long compilation took
TRUSTED_SHARES = (0.3, 0.5, 0.7)  # of the positions; the gate's τ are set to them
PAIR = "pair.json"


def read_documents(files: Sequence[Path], least: int) -> list[recipe.Document]:
    """The texts of all files (those of fewer characters joined) as documents, exact duplicates dropped, in the order of
    their hashes."""
    found: dict[str, recipe.Document] = {}
    for file in files:
        parts: list[str] = []
        texts = [text_of(record, None, where) for where, record in read_records(str(file))]
        for text in [*texts, None]:
            parts += [text] if text else []
            if parts and (text is None or sum(map(len, parts)) >= least):
                whole, parts = "\n".join(parts), []
                digest = hashlib.sha256(whole.encode()).hexdigest()
                found[digest] = recipe.Document(file.name, str(len(found)), whole)
    return [found[digest] for digest in sorted(found)]


def prepare(run: Run, files: Sequence[Path]) -> tuple[recipe.PreparedData, list[recipe.Document]]:
    """Tokenizer, stream of training tokens and held-out documents; and the training documents."""
    least, preset = run.sizes.document_chars, run.sizes.preset
    documents = read_documents(files, least)
    held = max(HELD_OUT_LEAST, len(documents) // 100)
    if len(documents) < 4 * held:
        raise UserError(f"--text holds {len(documents)} documents of {least} characters, too few: give more")
    heldout, training = documents[:held], documents[held:]
    used = max(1, round(sum(len(d.text) for d in training) / run.sizes.tokenizer_chars))
    tokenizer = recipe.train_tokenizer((d.text for d in training[::used]), preset.vocab_size)
    run.say(f"{len(documents):,} documents, tokenizer of {tokenizer.get_vocab_size():,} tokens")
    stream = encode(tokenizer, training)
    recipe.write_documents(run.out / "heldout.jsonl", heldout)
    manifest = {
        "files": [file.name for file in files],
        "training_documents": len(training),
        "heldout_documents": held,
        "training_tokens": len(stream),
        "vocabulary": tokenizer.get_vocab_size(),
    }
    return recipe.PreparedData(stream, tuple(heldout), tokenizer, manifest), training


def encode(tokenizer: Tokenizer, documents: Sequence[recipe.Document]) -> np.ndarray:
    """All documents in one stream, each ended by the end-of-text token (id 0, the only special one)."""
    parts = []
    for at in range(0, len(documents), 500):
        found = tokenizer.encode_batch_fast([d.text for d in documents[at : at + 500]])
        parts += [np.array([*one.ids, 0], np.uint16) for one in found]
    return np.concatenate(parts)


def compile_layers(model: nn.Module) -> None:
    """torch.compile of each layer: equal layers share one compilation, which a whole model would repeat."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(dynamic=False)


def train_model(run: Run, role: str, data: recipe.PreparedData, seconds: float) -> dict[str, Any]:
    """Train for so many seconds, the first step (with compilation) included; write the model's folder.

    A draft starts with its target's embedding and has it for a teacher.
    """
    preset, length, windows = run.sizes.preset, run.sizes.window, recipe.Windows(data.tokens, seed=0)
    model = recipe.build_model(preset.shape(role), data.tokenizer.get_vocab_size(), data.eos_id, seed=0).to(
        run.device
    )
    teacher = recipe.load_exported(run.out / "target", run.device) if role == "draft" else None
    # A draft is trained for so short a time that compiling its layers and the teacher's would cost more than it gains.
    if teacher is not None:
        recipe.inherit_embedding(model, teacher)
    elif run.compile:
        compile_layers(model)
    losses = recipe.loss_function(model, None), recipe.loss_function(model, teacher)
    optimizers, rows = recipe.make_optimizers(model, preset), preset.rows(role, length)

    def step(tokens: int, progress: float, distils: bool) -> float:
        batch = torch.from_numpy(windows.batch(tokens, rows, length)).to(run.device)
        return recipe.train_step(model, losses[distils], optimizers, preset, batch, progress)

    with matmul_precision("high"):
        began = time.monotonic()
        step(0, 0.0, teacher is not None)  # the dearer of a draft's two losses
        first_s = time.monotonic() - began
        left = max(seconds - first_s, LEAST_SHARE * seconds)
        tokens, steps, smooth, said, curve = 0, 0, float("nan"), began, []
        while (progress := (time.monotonic() - began - first_s) / left) < 1:
            loss = step(tokens, progress, teacher is not None and progress >= recipe.DISTIL_FROM)
            tokens, steps = tokens + rows * length, steps + 1
            smooth = loss if steps == 1 else 0.95 * smooth + 0.05 * loss
            if time.monotonic() - said > 10:
                said = time.monotonic()
                curve.append({"tokens": tokens, "loss": round(smooth, 4)})
                run.say(f"{role}: {100 * progress:.0f} %, step {steps}, loss {smooth:.3f}")
        spent = time.monotonic() - began - first_s
    if not np.isfinite(smooth):
        raise RuntimeError(f"training of the {role} diverged (loss {smooth} after {steps} steps)")
    recipe.export(model, data, run.out / role)
    return {
        "parameters": recipe.parameters(model), "steps": steps, "tokens": tokens, "epochs": tokens / len(data.tokens),
        "seconds": round(spent, 1), "first_step_s": round(first_s, 1), "compiled": run.compile and role == "target",
        "tokens_per_s": tokens / spent, "windows_a_step": rows, "curve": curve,
    }  # fmt: skip


def evaluate(run: Run, data: recipe.PreparedData) -> dict[str, Any]:
    """Loss and overlap β of the pair on held-out documents, in float32."""
    target, draft = (recipe.load_exported(run.out / role, run.device) for role in ("target", "draft"))
    few = replace(data, heldout=data.heldout[: run.sizes.judged_documents])
    return recipe.summarise(list(recipe.measure(target, draft, few, run.device)))


def make_gate(run: Run, documents: Sequence[recipe.Document]) -> dict[str, Any]:
    """Label training documents with the pair, train a linear gate on them, save it; thresholds for three shares."""
    work = run.out / "labels"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    pair = sprinter.load_pair(run.out / "target", draft=run.out / "draft", device=str(run.device))
    how = LabelSettings(new_tokens=run.sizes.gate_tokens)
    recipe.write_documents(work / "texts.jsonl", documents[: run.sizes.gate_texts])
    labels = work / "training-documents"
    label(pair, [work / "texts.jsonl"], labels, how)
    settings = TrainSettings(tau=0.5)  # the arms have thresholds of their own
    positions = read_positions([labels], settings.inputs)
    trained = train(positions, settings)
    unseen = positions.select(positions.parts(settings.seed) == 2)
    report = judge(trained.head, unseen, repeats=200)
    save_trained(trained, report, positions, run.out / "gate")
    with torch.no_grad():
        scores: Tensor = trained.head(unseen.inputs)
    taus = [round(float(scores.double().quantile(1 - share)), 4) for share in TRUSTED_SHARES]
    judged = {"positions": report.positions, "r2": report.r2, "calibration_error": report.calibration_error}
    return {"taus": taus, "trusted_shares": list(TRUSTED_SHARES), "test": judged}


def run_stage(run: Run, files: Sequence[Path], deadline: float) -> None:
    """Train target, draft and gate; what other stages must know is in the folder's pair.json."""
    (run.out / PAIR).unlink(missing_ok=True)
    data, documents = prepare(run, files)
    run.keep("train", data=data.manifest)
    for role, share in (("target", TARGET_SHARE), ("draft", 1.0)):
        left = max(2.0, deadline - time.monotonic() - run.sizes.gate_reserve_s)
        seconds = min(run.sizes.train_cap_s, share * left)
        run.keep("train", **{role: train_model(run, role, data, seconds)})
        free(run.device)
    held = evaluate(run, data)
    run.keep("train", heldout=held)
    run.say(f"held-out overlap {held['overlap']['mean']:.3f}")
    free(run.device)
    try:
        gate = make_gate(run, documents)
    except Exception as error:  # the pair is good without one
        if run.smoke:
            raise
        gate = {"error": first_line(error), "taus": [], "trusted_shares": []}
    run.keep("train", gate=gate)
    write_atomic(run.out / PAIR, json.dumps(run.told["stages"]["train"], indent=1) + "\n")


def trained_pair(run: Run) -> tuple[dict[str, Any], tuple[recipe.Document, ...]]:
    """What a training stage left in the folder: pair.json, written last, and the held-out documents."""
    if not (run.out / PAIR).is_file():
        raise UserError("there is no trained pair in --out: run the stage train first, with the same --out")
    return json.loads((run.out / PAIR).read_text(encoding="utf-8")), recipe.read_heldout(
        run.out / "heldout.jsonl"
    )


def load_trained(run: Run, **options: Any) -> sprinter.Pair:
    """The pair and, if there is one, the gate of the training stage."""
    facts, _ = trained_pair(run)
    gate = run.out / "gate" if facts["gate"]["taus"] else None
    device = str(run.device)
    return sprinter.load_pair(
        run.out / "target", draft=run.out / "draft", gate=gate, device=device, **options
    )
