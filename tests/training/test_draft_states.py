"""States of the target on disk: those of a pass, resumed, shared by heads, and a training on them like one without."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.training.drafting import texts, tiny_target
from tests.training.test_draft_train import TRAINING
from torch import Tensor

from sprinter.errors import UserError
from sprinter.training.drafts import states as module
from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.eagle3 import Eagle3Learner, fresh_eagle3
from sprinter.training.drafts.glide import GlideLearner, fresh_glide
from sprinter.training.drafts.learner import HeadLearner
from sprinter.training.drafts.medusa import MedusaLearner, fresh_medusa
from sprinter.training.drafts.run import run_to_end
from sprinter.training.drafts.settings import HeadSettings
from sprinter.training.drafts.states import keep_states, states_of


def learner(kind: str) -> HeadLearner:
    target = tiny_target()
    if kind == "medusa":
        return MedusaLearner(fresh_medusa(target, HeadSettings(heads=2), "t", "f"), target, 0.8, 1.0)
    if kind == "glide":
        return GlideLearner(fresh_glide(target, HeadSettings("glide"), "t", "f"), target, 0.8, 1.0, 3)
    return Eagle3Learner(fresh_eagle3(target, HeadSettings("eagle3"), "t", "f"), target, 0.8, 1.0, 3)


@torch.no_grad()
def test_states_are_those_of_a_pass(tmp_path: Path) -> None:
    """Of every layer, in the order that was asked for, at every token of texts of different lengths."""
    target, found = tiny_target(), texts(tiny_target(), 70).texts
    kept = keep_states(target, (1, -1, 0), found, tmp_path)
    batch = collate([found[3], found[68], found[1]])
    wanted = states_of(target, (1, -1, 0), batch.ids)
    whole = target.model(batch.ids, output_hidden_states=True).hidden_states
    for own, there, index in zip(kept.of(batch), wanted, (2, 3, 1), strict=True):
        assert torch.equal(there, whole[index])
        for row, length in enumerate(batch.lengths):
            torch.testing.assert_close(
                own[row, :length], there[row, :length].bfloat16().float(), atol=0.02, rtol=0.01
            )
            assert bool((own[row, length:] == 0).all())
    assert len(list(tmp_path.glob("*.safetensors"))) == 6, "three layers of two shards"


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "glide"])
def test_losses_are_those_without_a_disk(kind: str, tmp_path: Path) -> None:
    own, found = learner(kind), texts(tiny_target(), 12)
    batch = collate(found.texts[:5])
    with torch.no_grad():
        plain = own.losses(batch)
        own.kept = keep_states(own.target, own.heads.layers, found.texts, tmp_path)
        kept = own.losses(batch)
        other = replace(found.texts[0], ids=found.texts[0].ids.flip(0))
        with pytest.raises(KeyError):
            own.losses(collate([other]))
    for name, values in plain.parts.items():
        torch.testing.assert_close(kept.parts[name], values, atol=0.05, rtol=0.05)
        assert not torch.equal(kept.parts[name], values), "they were rounded to bfloat16"


def test_what_is_there_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupted run, for a head that shares a layer, with a damaged file, with other weights."""
    target, found = tiny_target(), texts(tiny_target(), 130).texts
    asked: list[tuple[int, ...]] = []

    def counted(target: object, layers: Sequence[int], ids: Tensor) -> list[Tensor]:
        asked.append(tuple(layers))
        return states_of(target, layers, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "states_of", counted)

    def stop(done: int, wanted: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_states(target, (0, 1), found, tmp_path, progress=stop)
    assert asked == [(0, 1)] * 64
    seen: list[tuple[int, int]] = []
    keep_states(target, (0, 1), found, tmp_path, progress=lambda *both: seen.append(both))
    assert len(asked) == 130 and seen == [(64, 130), (128, 130), (130, 130)]
    keep_states(target, (1, -1), found, tmp_path)
    assert asked[130:] == [(-1,)] * 130
    first = min(tmp_path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-7])
    keep_states(target, (0, 1, -1), found, tmp_path)
    assert len(asked) in (260 + 64, 260 + 2), "one shard of one layer"
    before = len(asked)
    keep_states(tiny_target(1), (0,), found[:10], tmp_path)
    keep_states(target, (0,), found[:10], tmp_path, "bfloat16")
    assert len(asked) == before + 20


def test_a_training_goes_on_from_them(tmp_path: Path) -> None:
    """The same weights with states from disk whether they were just written or are read again."""
    found, ends = texts(tiny_target(), 24), []
    for name in ("first", "again"):
        own = learner("eagle3")
        own.kept = keep_states(own.target, own.heads.layers, found.texts, tmp_path / "states")
        run_to_end(own, found, replace(TRAINING, steps=3, checkpoint=3), tmp_path / name)
        ends.append({key: value.clone() for key, value in own.named().items()})
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())


def test_a_small_disk_is_refused_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, found = tiny_target(), texts(tiny_target(), 4).texts
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 28))
    with pytest.raises(UserError, match=r"need 0\.0 GB in .* free some space, or give --no-keep-states"):
        keep_states(target, (0,), found, tmp_path / "deep" / "folder")
    assert not (tmp_path / "deep").exists()


def test_bfloat16_products_are_other_numbers_but_near(tmp_path: Path) -> None:
    found, ends = texts(tiny_target(), 24), {}
    for precision in ("float32", "bfloat16"):
        own = learner("medusa")
        run = run_to_end(
            own,
            found,
            replace(TRAINING, steps=4, precision=precision),
            tmp_path / precision,  # type: ignore[arg-type]
        )
        ends[precision] = run.history[-1].train["kl"]
    assert ends["bfloat16"] == pytest.approx(ends["float32"], rel=0.05) and len(set(ends.values())) == 2
    with pytest.raises(UserError, match="precision"):
        replace(TRAINING, precision="float16")  # type: ignore[arg-type]
