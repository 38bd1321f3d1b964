"""``sprinter draft train --kind dflash``: training reads what drafting reads, the model learns, its folder drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.training.drafting import saved_target, texts, tiny_target
from tests.training.test_draft_train import COMMON, TRAINING, cyclic

import sprinter
from sprinter.cli import main
from sprinter.errors import UserError
from sprinter.heads.dflash import DFlashHeads
from sprinter.heads.load import load_any_head
from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.dflash import DFlashLearner, fresh_dflash
from sprinter.training.drafts.run import run_to_end
from sprinter.training.drafts.settings import HeadSettings
from sprinter.training.drafts.states import states_of

SHAPE = HeadSettings(kind="dflash", heads=3)


def learner() -> DFlashLearner:
    target = tiny_target()
    return DFlashLearner(fresh_dflash(target, SHAPE, "t", "f"), target, 0.8, 1.0, 3)


@torch.no_grad()
def test_each_step_of_training_is_the_one_of_drafting() -> None:
    """Of texts that grow, from the keys that are kept; the drafted tokens change nothing."""
    own = learner()
    for value in own.heads.parameters():
        value.add_(0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    batch = collate(texts(own.target, 3).texts)
    width, checked = batch.ids.shape[1], 0
    drafting = [own.heads.begin() for _ in batch.ids]
    for step, (logits, *_) in enumerate(own.outputs(batch)):
        places = batch.places[batch.places % width >= step + 1]
        assert len(places) == len(logits)
        for number in range(0, len(places), 3):
            row, place = divmod(int(places[number]), width)
            first = place - step  # of the block
            states = states_of(own.target, own.heads.layers, batch.ids[row : row + 1, :first])
            text = drafting[row]
            text.read(
                batch.ids[row, : first + 1].tolist(),
                dict(zip(own.heads.layers, [one[0] for one in states], strict=True)),
            )
            for drafted in ((1, 2, 3), (9, 8, 7)):
                found = text.logits([drafted[:step]])
                assert found is not None
                torch.testing.assert_close(found[0], logits[number], atol=1e-4, rtol=1e-3)
            assert text.logits([(1, 2, 3)]) is None, "beyond the tokens of a pass"
            checked += 1
    assert checked > 20


def test_the_model_learns(tmp_path: Path) -> None:
    own, found = learner(), cyclic()
    before = own.held_out(found.part(True), 128)
    run = run_to_end(own, found, replace(TRAINING, steps=60, checkpoint=60, lr=1e-2), tmp_path)
    after = run.history[-1].held_out
    assert after["ce"] < 0.3 * before["ce"], (before, after)
    assert all(after[f"head{step}_top1"] > 0.9 for step in (1, 2, 3)), after
    assert 1 - before["tv"] < 0.2 and 1 - after["tv"] > 0.6, "exact acceptance: by chance one of seven"
    assert len(own.accuracies(found.part(True), 128)) == 3


def test_the_folder_and_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, file, out = saved_target(tmp_path / "target"), tmp_path / "prompts.jsonl", tmp_path / "head"
    file.write_text("".join(json.dumps({"prompt": f"the thing {i}"}) + "\n" for i in range(16)))
    given = ["--target", str(target), "--data", str(file), "--out", str(out), *COMMON, "--kind", "dflash"]
    assert main(["draft", "train", *given, "--steps", "4", "--held-out", "0.05"]) == 0, capsys.readouterr()
    heads = load_any_head(out)
    assert isinstance(heads, DFlashHeads) and len(heads.accuracies) == heads.count and len(heads.blocks) == 2
    assert "2 layers over a block" in (out / "README.md").read_text()
    both = sprinter.load_pair(target, heads=[out], device="cpu", dtype="float32")
    outs = [
        both.generate("the thing", method=method, max_new_tokens=12, temperature=0.0)
        for method in (
            "autoregressive", "heads(kind=dflash)", "trust=nobody,stop=svip,drafter=heads",
            "eagle(expand=3, depth=3, nodes=6)", "drafter=heads(grow=drawn(widths=2x2)),accept=without", "medusa",
        )
    ]  # fmt: skip
    assert {one.text for one in outs} == {outs[0].text} and outs[1].stats.drafted > 0


def test_what_is_refused() -> None:
    own = HeadSettings(kind="dflash")
    assert (own.steps, own.depth, HeadSettings(kind="peagle").depth) == (4, 2, 1)
    assert HeadSettings(kind="dflash", blocks=5).depth == 5
    with pytest.raises(UserError, match="kind=dflash drafts two tokens a pass or more"):
        HeadSettings(kind="dflash", heads=1)
    with pytest.raises(UserError, match="is of Medusa's heads"):
        HeadSettings(kind="dflash", share_output=True)
