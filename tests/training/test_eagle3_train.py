"""``sprinter draft train --kind eagle3``: training-time test as in drafting, learning, reduced vocabulary, folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.training.drafting import VOCAB, saved_target, texts, tiny_target
from tests.training.test_draft_train import COMMON, TRAINING, cyclic

import sprinter
from sprinter.cli import main
from sprinter.errors import UserError
from sprinter.heads.eagle3 import Eagle3Heads
from sprinter.heads.load import load_any_head
from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.eagle3 import Eagle3Learner, fresh_eagle3
from sprinter.training.drafts.glide import fresh_glide
from sprinter.training.drafts.run import run_to_end
from sprinter.training.drafts.settings import HeadSettings

SHAPE = HeadSettings(kind="eagle3", heads=3)


def learner(kept: torch.Tensor | None = None, steps: int = 3) -> Eagle3Learner:
    target = tiny_target()
    return Eagle3Learner(fresh_eagle3(target, SHAPE, "t", "f", kept), target, 0.8, 1.0, steps)


@torch.no_grad()
def test_each_step_of_training_is_the_one_of_drafting() -> None:
    """Step s at entry i gives the law that the head drafts after i + 2 tokens of the text and s of its own: features
    one step off, positions, masks or embeddings that differ between the two would show."""
    own = learner(torch.arange(0, VOCAB, 2))
    for value in own.heads.parameters():
        value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    every = texts(own.target, 3).texts
    batch = collate(every)
    width = batch.ids.shape[1]
    made = [one.logits for one in own.outputs(batch)]
    checked = 0
    for step, logits in enumerate(made):
        places = batch.places[batch.places % width >= step + 1]
        for number in range(0, len(places), 3):
            row, place = divmod(int(places[number]), width)
            ids, entry = batch.ids[row].tolist(), place - 1 - step
            hidden = own.target(batch.ids[row : row + 1], output_hidden_states=True).hidden_states
            states = {aux - 1: hidden[aux][0, : entry + 1] for aux in own.heads.aux}  # type: ignore[union-attr]
            text = own.heads.begin()
            text.read(ids[: entry + 2], states)
            path: tuple[int, ...] = ()
            for x in (*ids[entry + 2 : entry + 2 + step], None):
                found = text.logits([path])
                path = (*path, x) if x is not None else path
            assert found is not None
            torch.testing.assert_close(found[0, ::2][: VOCAB // 2], logits[number], atol=1e-4, rtol=1e-3)
            checked += 1
    assert checked > 20


def test_the_head_learns_and_follows_its_own_steps(tmp_path: Path) -> None:
    own, found = learner(torch.arange(10), steps=4), cyclic()
    before = own.held_out(found.part(True), 128)
    run = run_to_end(own, found, replace(TRAINING, steps=60, checkpoint=60, lr=1e-2), tmp_path)
    after = run.history[-1].held_out
    assert after["ce"] < 0.3 * before["ce"]
    assert all(after[f"head{step}_top1"] > 0.9 for step in (1, 2, 3, 4)), after
    assert len(own.accuracies(found.part(True), 128)) == 4


def test_fresh_matrices_differ() -> None:
    """Each is drawn by itself, and all are the same for a seed."""
    for make in (
        lambda: fresh_eagle3(tiny_target(), SHAPE, "t", "f"),
        lambda: fresh_glide(tiny_target(), SHAPE, "t", "f"),
    ):
        first, again = dict(make().named_parameters()), dict(make().named_parameters())
        names = [name for name, value in first.items() if value.ndim == 2]
        assert len(names) >= 8 and all(torch.equal(first[name], again[name]) for name in names)
        for i, one in enumerate(names):
            for other in names[:i]:
                size = min(first[one].numel(), first[other].numel(), 64)
                assert not torch.equal(first[one].flatten()[:size], first[other].flatten()[:size]), (
                    one,
                    other,
                )


@torch.no_grad()
def test_tokens_outside_the_map_are_never_right() -> None:
    own, found = learner(torch.tensor([0, 1, 2, 50])), cyclic()
    losses = own.losses(collate(found.texts[:3])).parts
    assert float(losses["tv"].max()) <= 1 + 1e-6 and float(losses["tv"].max()) > 0.99
    assert bool(torch.isfinite(losses["kl"]).all() & torch.isfinite(losses["ce"]).all())
    accuracies = own.accuracies(found.texts, 128)
    assert all(sum(row) < 0.6 for row in accuracies), "three of seven tokens can be drafted"


def test_the_folder_and_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, file, out = saved_target(tmp_path / "target"), tmp_path / "prompts.jsonl", tmp_path / "head"
    file.write_text("".join(json.dumps({"prompt": f"the thing {i}"}) + "\n" for i in range(16)))
    given = ["--target", str(target), "--data", str(file), "--out", str(out), *COMMON, "--kind", "eagle3"]
    asked = [
        "draft",
        "train",
        *given,
        "--heads",
        "3",
        "--vocabulary",
        "120",
        "--steps",
        "4",
        "--held-out",
        "0.05",
    ]
    assert main(asked) == 0, capsys.readouterr()
    assert "saved in" in capsys.readouterr().out
    heads = load_any_head(out)
    assert isinstance(heads, Eagle3Heads) and len(heads.d2t) == 120 and len(heads.accuracies) == 3
    assert "EAGLE-3's head" in (out / "README.md").read_text()
    both = sprinter.load_pair(target, heads=[out], device="cpu", dtype="float32")
    outs = [
        both.generate("the thing", method=method, max_new_tokens=12, temperature=0.0)
        for method in (
            "autoregressive",
            "heads(gamma=3)",
            "eagle(expand=3, depth=3, nodes=6)",
            "medusa(nodes=5)",
        )
    ]
    assert {one.text for one in outs} == {outs[0].text} and outs[1].stats.drafted > 0


def test_what_is_refused() -> None:
    for wrong, message in (
        ({"heads": 2}, "three of its own steps or more"), ({"share_output": True}, "is of Medusa's heads"),
        ({"kind": "glide", "blocks": 2}, "kind=glide, which has one layer"),
        ({"kind": "medusa", "vocabulary": 5}, "goes with kind=eagle3"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            HeadSettings(**{"kind": "eagle3", **wrong})  # type: ignore[arg-type]
