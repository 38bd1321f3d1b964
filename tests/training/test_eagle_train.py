"""``sprinter draft train --kind eagle``: steps as in drafting, regression and noise, the folder."""

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
from sprinter.heads.eagle import EagleHeads
from sprinter.heads.load import load_any_head
from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.eagle import AHEAD, EagleLearner, fresh_eagle
from sprinter.training.drafts.run import run_to_end
from sprinter.training.drafts.settings import HeadSettings

SHAPE = HeadSettings(kind="eagle")


def learner(steps: int = 1, regression: float = 10.0) -> EagleLearner:
    target = tiny_target()
    return EagleLearner(fresh_eagle(target, SHAPE, "t", "f"), target, 0.8, 1.0, steps, regression)


@torch.no_grad()
def test_each_step_of_training_is_the_one_of_drafting() -> None:
    own = learner(3)
    own.heads.train(False)  # no noise
    for value in own.heads.parameters():
        value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    batch = collate(texts(own.target, 3).texts)
    width, checked = batch.ids.shape[1], 0
    for step, (logits, *_) in enumerate(own.outputs(batch)):
        places = batch.places[batch.places % width >= step + 1]
        for number in range(0, len(places), 3):
            row, place = divmod(int(places[number]), width)
            ids, entry = batch.ids[row].tolist(), place - 1 - step
            states = own.target.model(batch.ids[row : row + 1]).last_hidden_state[0, : entry + 1]
            text = own.heads.begin()
            text.read(ids[: entry + 2], {-1: states})
            for end in range(step + 1):
                found = text.logits([tuple(ids[entry + 2 : entry + 2 + end])])
            assert found is not None
            torch.testing.assert_close(found[0], logits[number], atol=1e-4, rtol=1e-3)
            checked += 1
    assert checked > 20


@torch.no_grad()
def test_the_loss_of_states_is_that_of_the_state_which_makes_the_law() -> None:
    """A head whose output is the target's next state has no such loss, and the target's own law."""
    own = learner()
    own.heads.train(False)
    batch = collate(texts(own.target, 4).texts)
    width = batch.ids.shape[1]
    states = own.target.model(batch.ids).last_hidden_state
    own.heads.outputs = lambda *given: states[:, 1:]  # type: ignore[method-assign]
    (out,) = own.outputs(batch)
    assert out.penalty is not None and float(out.penalty.abs().max()) < 1e-9
    logits = own.target(batch.ids).logits.reshape(-1, 64)[batch.places]
    torch.testing.assert_close(out.logits, logits, atol=1e-4, rtol=1e-3)
    own.heads.outputs = lambda *given: states[:, :-1]  # type: ignore[method-assign]
    (late,) = own.outputs(batch)
    assert late.penalty is not None and float(late.penalty.mean()) > 1
    rows, columns = batch.places // width, batch.places % width
    scale = (
        torch.cat([row[: n - 1] for row, n in zip(states, batch.lengths, strict=True)]).pow(2).mean().sqrt()
    )
    near, true = states[rows, columns - 1] / scale, states[rows, columns] / scale
    wanted = 10 * torch.nn.functional.smooth_l1_loss(near, true, reduction="none").mean(-1)
    torch.testing.assert_close(late.penalty, wanted, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_noise_is_only_in_training_and_the_same_each_time() -> None:
    own, batch = learner(), collate(texts(tiny_target(), 4).texts)
    noisy = [next(own.outputs(batch)).logits for _ in range(2)]
    own.heads.train(False)
    clean = next(own.outputs(batch)).logits
    assert torch.equal(*noisy) and not torch.equal(noisy[0], clean)
    features = torch.ones(2, 3, 8)
    own.heads.train(True)
    read = own.read(features, (3, 2))
    assert 0 < float((read - features).abs().max()) <= 0.1 and abs(float((read - features).mean())) < 0.05


@torch.no_grad()
def test_the_loss_of_states_is_added() -> None:
    with_states, without = learner(), learner(regression=0.0)
    batch = collate(texts(tiny_target(), 4).texts)
    found = [one.losses(batch) for one in (with_states, without)]
    assert found[0].penalty is not None and float(found[0].penalty.min()) > 0
    assert found[1].penalty is not None and float(found[1].penalty.abs().max()) == 0
    assert with_states.digest() != without.digest(), "a checkpoint of the other is not continued"


def test_the_head_learns(tmp_path: Path) -> None:
    own, found = learner(steps=3), cyclic()
    before = own.held_out(found.part(True), 128)
    run = run_to_end(own, found, replace(TRAINING, steps=60, checkpoint=60, lr=1e-2), tmp_path)
    after = run.history[-1].held_out
    assert after["ce"] < 0.3 * before["ce"] and all(after[f"head{step}_top1"] > 0.9 for step in (1, 2, 3)), (
        after
    )


def test_the_loss_of_states_is_minimised(tmp_path: Path) -> None:
    found, error = texts(tiny_target()), {}
    for regression in (0.0, 10.0):
        own = learner(regression=regression)
        run_to_end(
            own, found, replace(TRAINING, steps=80, checkpoint=80, lr=1e-2), tmp_path / f"{regression}"
        )
        judge = EagleLearner(own.heads, own.target, 0.8, 1.0)  # type: ignore[arg-type]
        own.heads.train(False)
        penalty = judge.losses(collate(found.part(False))).penalty
        assert penalty is not None
        error[regression] = float(penalty.detach().mean())
    assert error[10.0] < 0.8 * error[0.0], error


def test_accuracies_reach_further_than_training() -> None:
    own = learner()
    assert len(own.accuracies(cyclic().part(True), 128)) == AHEAD and own.steps == 1


def test_the_folder_and_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, file, out = saved_target(tmp_path / "target"), tmp_path / "prompts.jsonl", tmp_path / "head"
    file.write_text("".join(json.dumps({"prompt": f"the thing {i}"}) + "\n" for i in range(16)))
    given = ["--target", str(target), "--data", str(file), "--out", str(out), *COMMON, "--kind", "eagle"]
    assert main(["draft", "train", *given, "--steps", "4", "--held-out", "0.05"]) == 0, capsys.readouterr()
    said = capsys.readouterr()
    assert "saved in" in said.out and "states of 16/16 texts" in said.err
    heads = load_any_head(out)
    assert isinstance(heads, EagleHeads) and len(heads.accuracies) == AHEAD
    card = (out / "README.md").read_text()
    assert "EAGLE's head" in card and "training on the target's states alone" in card
    assert len(list((out / "states").glob("states-*.safetensors"))) == 1
    both = sprinter.load_pair(target, heads=[out], device="cpu", dtype="float32")
    outs = [
        both.generate("the thing", method=method, max_new_tokens=12, temperature=0.0)
        for method in ("autoregressive", "heads(gamma=3)", "eagle(expand=3, depth=3, nodes=6)")
    ]
    assert {one.text for one in outs} == {outs[0].text} and outs[1].stats.drafted > 0


def test_what_is_refused() -> None:
    assert HeadSettings(kind="eagle").steps == 1 and HeadSettings().steps == 4
    for wrong, message in (
        ({"kind": "eagle", "vocabulary": 5}, "goes with kind=eagle3"),
        ({"kind": "glide", "regression": 1.0}, "regression goes with kind=eagle"),
        ({"kind": "eagle", "regression": -1.0}, "regression=-1"),
        ({"kind": "eagle", "heads": 0}, "heads=0"),
        ({"kind": "eagle2"}, "kind='eagle2' is unknown: give 'medusa', 'eagle'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            HeadSettings(**wrong)  # type: ignore[arg-type]
