"""``sprinter draft train --kind peagle``: one pass drafts several tokens; training reads what drafting reads."""

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
from sprinter.heads.eagle3 import ParallelHeads
from sprinter.heads.load import load_any_head
from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.eagle3 import ParallelLearner, fresh_eagle3, mask_token
from sprinter.training.drafts.run import run_to_end
from sprinter.training.drafts.settings import HeadSettings

SHAPE = HeadSettings(kind="peagle", heads=3)


def learner(layers: int = 1) -> ParallelLearner:
    target = tiny_target()
    heads = fresh_eagle3(target, replace(SHAPE, blocks=layers), "t", "f")
    assert isinstance(heads, ParallelHeads) and heads.count == 3 and heads.mask == mask_token(target)
    return ParallelLearner(heads, target, 0.8, 1.0, 3)


@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_each_step_of_training_is_the_one_of_drafting(layers: int) -> None:
    """Of texts that grow, from the keys that are kept; the drafted tokens change nothing."""
    own = learner(layers)
    assert len(own.heads.blocks) == layers
    for value in own.heads.parameters():
        value.add_(0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    batch = collate(texts(own.target, 3).texts)
    width, checked = batch.ids.shape[1], 0
    drafting = [own.heads.begin() for _ in batch.ids]
    for step, (logits, *_) in enumerate(own.outputs(batch)):
        places = batch.places[batch.places % width >= step + 1]
        for number in range(0, len(places), 3):
            row, place = divmod(int(places[number]), width)
            ids, entry = batch.ids[row].tolist(), place - 1 - step
            hidden = own.target(batch.ids[row : row + 1], output_hidden_states=True).hidden_states
            states = {aux - 1: hidden[aux][0, : entry + 1] for aux in own.heads.aux}  # type: ignore[union-attr]
            text = drafting[row]
            text.read(ids[: entry + 2], states)
            for drafted in ((1, 2, 3), (9, 8, 7)):
                found = text.logits([drafted[:step]])
                assert found is not None
                torch.testing.assert_close(found[0], logits[number], atol=1e-4, rtol=1e-3)
            assert text.logits([(1, 2, 3)]) is None, "beyond the tokens of a pass"
            checked += 1
    assert checked > 20


def states_of(heads: ParallelHeads, count: int) -> dict[int, torch.Tensor]:
    return {layer: torch.randn(count, heads.hidden_size) for layer in heads.layers}


@torch.no_grad()
def test_a_draft_is_one_pass() -> None:
    own = learner()
    text = own.heads.begin()
    text.read([3, 1, 4, 1, 5], states_of(own.heads, 4))
    for path in ((), (2,), (2, 7)):
        assert text.logits([path]) is not None
    assert text.steps == 1 and text.tokens == 4 + 2
    text.read([3, 1, 4, 1, 5, 9], states_of(own.heads, 5))
    assert text.steps == 2 and text.tokens == 6 + 1 + 2, "one entry more, and two masks"


def test_the_head_learns(tmp_path: Path) -> None:
    own, found = learner(), cyclic()
    before, mask = own.held_out(found.part(True), 128), own.heads.mask_hidden.detach().clone()
    run = run_to_end(own, found, replace(TRAINING, steps=60, checkpoint=60, lr=1e-2), tmp_path)
    after = run.history[-1].held_out
    assert after["ce"] < 0.3 * before["ce"] and all(after[f"head{step}_top1"] > 0.9 for step in (1, 2, 3)), (
        after
    )
    assert len(own.accuracies(found.part(True), 128)) == 3 and not torch.equal(mask, own.heads.mask_hidden)


def test_the_folder_and_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, file, out = saved_target(tmp_path / "target"), tmp_path / "prompts.jsonl", tmp_path / "head"
    file.write_text("".join(json.dumps({"prompt": f"the thing {i}"}) + "\n" for i in range(16)))
    given = [
        "--target",
        str(target),
        "--data",
        str(file),
        "--out",
        str(out),
        *COMMON,
        "--kind",
        "peagle",
        "--blocks",
        "2",
    ]
    assert main(["draft", "train", *given, "--steps", "4", "--held-out", "0.05"]) == 0, capsys.readouterr()
    heads = load_any_head(out)
    assert isinstance(heads, ParallelHeads) and len(heads.accuracies) == heads.count
    assert "2 layers over three" in (out / "README.md").read_text() and len(heads.blocks) == 2
    both = sprinter.load_pair(target, heads=[out], device="cpu", dtype="float32")
    outs = [
        both.generate("the thing", method=method, max_new_tokens=12, temperature=0.0)
        for method in (
            "autoregressive", "heads(kind=peagle)", "trust=nobody,stop=svip,drafter=heads",
            "eagle(expand=3, depth=3, nodes=6)", "drafter=heads(grow=drawn(widths=2x2)),accept=without", "medusa",
        )
    ]  # fmt: skip
    assert {one.text for one in outs} == {outs[0].text} and outs[1].stats.drafted > 0


def test_what_is_refused() -> None:
    assert HeadSettings(kind="peagle").steps == 4
    with pytest.raises(UserError, match="drafts two tokens a pass or more, kind=eagle3 one"):
        HeadSettings(kind="peagle", heads=1)
    with pytest.raises(UserError, match="regression goes with kind=eagle"):
        HeadSettings(kind="peagle", regression=1.0)
