"""``sprinter draft distill --parallel``: several tokens in one pass; training reads what drafting reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.training.drafting import saved_target, texts, tiny_target
from tests.training.test_draft_train import COMMON, TRAINING, cyclic
from torch import Tensor
from transformers import LlamaForCausalLM

import sprinter
from sprinter.cli import main
from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.eagle3 import mask_token
from sprinter.training.drafts.settings import StudentSettings
from sprinter.training.drafts.student import make_student
from sprinter.training.drafts.train import StudentLearner, train

PARALLEL = 3


def student(target: LlamaForCausalLM) -> LlamaForCausalLM:
    made = make_student(target, StudentSettings(layers=2, parallel=PARALLEL))
    made.config.pard_token = mask_token(target)
    return made


def drafted(model: LlamaForCausalLM, ids: list[int], masks: int) -> Tensor:
    """Logits after a text and masks."""
    asked = torch.tensor([[*ids, *[model.config.pard_token] * masks]])
    return model(asked, use_cache=False).logits[0, -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_each_step_of_training_is_the_one_of_drafting(training: bool) -> None:
    """In training some of the masks are left out, the more the deeper, which changes no law of the others."""
    target = tiny_target()
    model = student(target).train(training)
    batch = collate(texts(target, 3).texts)
    width, counts = batch.ids.shape[1], []
    learner = StudentLearner(model, 1.0, PARALLEL)
    for depth, out in enumerate(learner.outputs(batch)):
        kept = learner._entries(batch.ids)[depth]
        places = [place for place in batch.places.tolist() if kept[place % width]]
        assert len(places) == len(out.logits) == len(out.laws.tokens)
        counts.append(len(places))
        for number in range(0, len(places), 4):
            row, place = divmod(places[number], width)
            ids = batch.ids[row].tolist()
            wanted = drafted(model, ids[: place + 1 - depth], depth)
            torch.testing.assert_close(out.logits[number], wanted, atol=1e-4, rtol=1e-3)
            assert int(out.laws.tokens[number]) == ids[place + 1]
    whole = len(batch.places)
    assert counts[0] == whole and (whole > counts[1] >= counts[2] > 0 if training else counts == [whole] * 3)


def test_the_student_learns(tmp_path: Path) -> None:
    target, found = tiny_target(), cyclic()
    model = student(target)
    train(model, found, replace(TRAINING, steps=80, checkpoint=80, lr=1e-2), tmp_path, parallel=PARALLEL)
    text = found.texts[0].ids.tolist()
    for masks in range(PARALLEL):
        assert int(drafted(model, text[:8], masks).argmax()) == text[8 + masks]


def test_the_folder_and_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, file, out = saved_target(tmp_path / "target"), tmp_path / "prompts.jsonl", tmp_path / "draft"
    file.write_text("".join(json.dumps({"prompt": f"the thing {i}"}) + "\n" for i in range(16)))
    given = ["--target", str(target), "--data", str(file), "--out", str(out), *COMMON, "--parallel", "3"]
    assert main(["draft", "distill", *given, "--steps", "4", "--layers", "1"]) == 0, capsys.readouterr()
    assert "drafter=parallel(tokens=3)" in (out / "README.md").read_text()
    pair = sprinter.load_pair(target, out, device="cpu", dtype="float32")
    outs = [
        pair.generate("the thing", method=method, max_new_tokens=12, temperature=0.0)
        for method in ("autoregressive", "drafter=parallel(tokens=3),stop=fixed(gamma=3)", "speculative")
    ]
    assert {one.text for one in outs} == {outs[0].text} and outs[1].stats.drafted > 0
