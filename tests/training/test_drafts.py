"""Distilling a draft: losses, batches, the student, a cut vocabulary, training that resumes, the fit of sizes."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.training.drafting import VOCAB, text, texts, tiny_target
from transformers import LlamaForCausalLM

from sprinter.decode.costs import PassCosts
from sprinter.errors import UserError
from sprinter.laws import overlap, residual
from sprinter.models.reduced_vocab import CutLlamaForCausalLM, check_map, frequent_tokens
from sprinter.training.drafts.batches import TextBatch, collate, orders, steps_of
from sprinter.training.drafts.data import Texts
from sprinter.training.drafts.losses import TopLaws, divergences, parse_loss, tempered
from sprinter.training.drafts.run import CHECKPOINT, LossPoint
from sprinter.training.drafts.settings import StudentSettings, TextSettings, TrainingSettings
from sprinter.training.drafts.sizes import Measured, fit_overlap, parse_shape, table_of
from sprinter.training.drafts.student import make_student, size_of
from sprinter.training.drafts.train import StudentLearner, train

SETTINGS = TrainingSettings(steps=24, tokens=128, checkpoint=4, lr=3e-3, threads=1)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target()


@pytest.fixture(scope="module")
def written(target: LlamaForCausalLM) -> Texts:
    return texts(target)


# --- losses -----------------------------------------------------------------------------------------------------------
def laws(n: int, v: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(v, 0.8), n)


def top_of(p: np.ndarray, k: int) -> TopLaws:
    ids = np.argsort(-p, 1)[:, :k]
    tokens = torch.arange(len(p)) % p.shape[1]
    return TopLaws(torch.tensor(ids), torch.tensor(np.take_along_axis(p, ids, 1)), tokens)


def test_losses_are_those_of_numpy() -> None:
    p, q = laws(50, 12, 0), laws(50, 12, 1)
    found = {name: value.numpy() for name, value in divergences(torch.tensor(q).log(), top_of(p, 12)).items()}
    np.testing.assert_allclose(found["tv"], 1 - np.minimum(p, q).sum(1), atol=1e-9)
    np.testing.assert_allclose(found["tv"], 0.5 * np.abs(p - q).sum(1), atol=1e-9)
    np.testing.assert_allclose(found["kl"], (p * np.log(p / q)).sum(1), atol=2e-6)
    np.testing.assert_allclose(found["reverse-kl"], (q * np.log(q / p)).sum(1), atol=1e-4)
    np.testing.assert_allclose(found["ce"], -np.log(q[np.arange(50), np.arange(50) % 12]), atol=1e-9)


def test_merged_outcomes_give_the_divergences_of_merged_laws() -> None:
    p, q = laws(50, 12, 0), laws(50, 12, 1)
    ids = np.argsort(-p, 1)[:, :4]
    small = [np.take_along_axis(law, ids, 1) for law in (p, q)]
    merged = [np.concatenate([law, 1 - law.sum(1, keepdims=True)], 1) for law in small]
    found = divergences(torch.tensor(q).log(), top_of(p, 4))
    np.testing.assert_allclose(found["tv"].numpy(), 1 - np.minimum(*merged).sum(1), atol=1e-9)
    np.testing.assert_allclose(
        found["kl"].numpy(), (merged[0] * np.log(merged[0] / merged[1])).sum(1), atol=1e-5
    )
    whole = divergences(torch.tensor(q).log(), top_of(p, 12))
    assert all(bool((found[name] <= whole[name] + 1e-9).all()) for name in ("tv", "kl"))


def test_the_gradient_of_total_variation_is_that_of_finite_differences() -> None:
    p = top_of(laws(3, 6, 2), 4)
    logits = torch.tensor(np.random.default_rng(3).normal(size=(3, 6)), requires_grad=True)
    loss = parse_loss("0.1*ce + 0.9*tv")
    assert torch.autograd.gradcheck(
        lambda x: loss.of(divergences(torch.log_softmax(x, -1), p)), (logits,), atol=1e-6
    )


def test_tempered_laws() -> None:
    p = laws(20, 10, 4)
    whole = tempered(top_of(p, 10), 0.5)
    expected = np.sort(p**2 / (p**2).sum(1, keepdims=True), 1)[:, ::-1]
    np.testing.assert_allclose(whole.probs.numpy(), expected, atol=1e-12)
    part = tempered(top_of(p, 4), 0.5)
    assert bool((part.probs <= whole.probs[:, :4] + 1e-12).all()), "the rest is taken at its upper bound"
    assert tempered(top_of(p, 4), 1.0).probs.equal(top_of(p, 4).probs)
    with pytest.raises(UserError, match=r"temperature=1\.5 of a loss is out of range"):
        tempered(top_of(p, 4), 1.5)


@pytest.mark.parametrize(("spec", "shown"), [
    ("tv", "tv"), ("0.9*tv + 0.1*ce", "0.1*ce+0.9*tv"), ("kl+reverse-kl", "kl+reverse-kl"),
])  # fmt: skip
def test_losses_by_name(spec: str, shown: str) -> None:
    assert str(parse_loss(spec)) == shown and TrainingSettings(loss=spec).loss == shown


@pytest.mark.parametrize(("spec", "message"), [
    ("tvd", "did you mean"), ("", "not a sum of losses"), ("tv+tv", "tv twice"), ("0*tv", "a weight of 0"),
    ("1.2.3*tv", "a weight of 1.2.3"),
])  # fmt: skip
def test_wrong_losses_are_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_loss(spec)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: TextSettings(held_out=0.9), "held_out=0.9 is out of range"),
    (lambda: TextSettings(system="x"), "system goes with chat"),
    (lambda: StudentSettings(width=65), "width=65 cannot be split"),
    (lambda: TrainingSettings(loss_temperature=2.0), "loss_temperature=2.0 is out of range"),
    (lambda: parse_shape("2y3"), "shape '2y3' is none"),
])  # fmt: skip
def test_wrong_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]


# --- batches ----------------------------------------------------------------------------------------------------------
def test_batches_hold_every_text_once_an_epoch() -> None:
    lengths = [5 + 7 * i % 40 for i in range(101)]
    for epoch in range(3):
        found = orders(lengths, 128, 1, epoch)
        assert sorted(i for batch in found for i in batch) == [*range(101)]
        assert all(len(batch) * max(lengths[i] for i in batch) <= 128 for batch in found)
        assert found == orders(lengths, 128, 1, epoch) != orders(lengths, 128, 2, epoch)
    assert steps_of(lengths, 128, 1, 2.0) == len(orders(lengths, 128, 1, 0)) + len(orders(lengths, 128, 1, 1))


def log_laws(student: LlamaForCausalLM, batch: TextBatch) -> tuple[torch.Tensor, TopLaws]:
    learner = StudentLearner(student, 1.0)
    (out,) = learner.outputs(batch)
    return learner.laws(out)


def test_padding_changes_no_law(target: LlamaForCausalLM) -> None:
    some = [text(target, seed) for seed in range(5)]
    together = log_laws(target, collate(some))
    alone = [log_laws(target, collate([one]))[0] for one in some]
    torch.testing.assert_close(together[0], torch.cat(alone), atol=1e-5, rtol=1e-5)
    own = together[0].exp().gather(-1, together[1].ids)
    torch.testing.assert_close(own, together[1].probs, atol=1e-5, rtol=1e-4)


# --- the student ------------------------------------------------------------------------------------------------------
def test_a_student_of_all_layers_is_the_target(target: LlamaForCausalLM, written: Texts) -> None:
    student = make_student(target, StudentSettings(layers=3)).eval()
    ids = torch.arange(20)[None]
    torch.testing.assert_close(student(ids).logits, target(ids).logits, atol=1e-5, rtol=1e-5)
    assert StudentLearner(student, 1.0).held_out(written.part(True), 128)["tv"] < 1e-4
    assert size_of(student) == sum(value.numel() for value in student.parameters())


def test_projected_embeddings_keep_the_products_as_well_as_any(target: LlamaForCausalLM) -> None:
    table = target.get_input_embeddings().weight.detach()
    student = make_student(target, StudentSettings(layers=1, width=32, heads=2))
    own = student.get_input_embeddings().weight.detach()
    singular = torch.linalg.svdvals(table)
    assert own.shape == (VOCAB, 32) and student.lm_head.weight is student.get_input_embeddings().weight
    # Eckart and Young: the best product of rank 32 misses what the other singular values make
    missed = (table @ table.T - own @ own.T).norm()
    torch.testing.assert_close(missed, singular[32:].pow(2).norm(), atol=1e-3, rtol=1e-3)


def test_wrong_students_are_refused(target: LlamaForCausalLM) -> None:
    with pytest.raises(UserError, match="width=128 exceeds 64"):
        make_student(target, StudentSettings(width=128))
    with pytest.raises(UserError, match="vocabulary=99 exceeds the target's 64"):
        frequent_tokens([], 99, VOCAB)


# --- a cut vocabulary -------------------------------------------------------------------------------------------------
@pytest.fixture
def cut(target: LlamaForCausalLM, written: Texts) -> CutLlamaForCausalLM:
    kept = frequent_tokens([one.ids for one in written.texts], 20, VOCAB, always=[0])
    student = make_student(target, StudentSettings(layers=3, vocabulary=20), kept)
    assert isinstance(student, CutLlamaForCausalLM) and 0 in kept
    return student


@torch.no_grad()
def test_outside_a_cut_vocabulary_q_is_0_and_decoding_exact(
    target: LlamaForCausalLM, cut: CutLlamaForCausalLM
) -> None:
    ids = torch.arange(20)[None]
    p, q = (model.eval()(ids).logits[0].double().softmax(-1) for model in (target, cut))
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[cut.lm_head.ids] = False
    assert bool((q[:, outside] == 0).all()) and int(outside.sum()) == 44
    inside = p[:, ~outside] / p[:, ~outside].sum(-1, keepdim=True)
    torch.testing.assert_close(q[:, ~outside], inside, atol=1e-6, rtol=1e-4)
    kept = torch.minimum(p, q)  # Σ over drafts x of q(x) min(1, p/q), and the replacement's share
    written = kept + (1 - overlap(p, q))[:, None] * residual(p, q)
    torch.testing.assert_close(written, p, atol=1e-12, rtol=1e-9)


@torch.no_grad()
def test_losses_of_a_cut_vocabulary_are_those_of_its_logits(cut: CutLlamaForCausalLM, written: Texts) -> None:
    batch = collate(written.part(True))
    short = divergences(*log_laws(cut.eval(), batch))
    logits = cut(batch.ids).logits.reshape(-1, VOCAB)[batch.places]
    whole = divergences(torch.log_softmax(logits, -1), batch.laws)
    for name in ("tv", "kl", "ce"):
        torch.testing.assert_close(short[name], whole[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ids", [[3, 2], [1, 1], [-1, 4], [0, VOCAB], []])
def test_a_map_of_another_vocabulary_is_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="not of the target's vocabulary"):
        check_map(ids, VOCAB)


# --- training ---------------------------------------------------------------------------------------------------------


def fresh(target: LlamaForCausalLM) -> LlamaForCausalLM:
    return make_student(target, StudentSettings(layers=1, width=32, heads=2))


def test_training_learns(target: LlamaForCausalLM, written: Texts, tmp_path: Path) -> None:
    student = fresh(target)
    before = StudentLearner(student, 1.0).held_out(written.part(True), 128)
    seen: list[int] = []
    done = train(student, written, SETTINGS, tmp_path, progress=lambda point, steps: seen.append(point.step))
    after = done.history[-1].held_out
    assert after["tv"] < before["tv"] - 0.02 and after["kl"] < before["kl"]
    assert seen == [4, 8, 12, 16, 20, 24] and done.tokens > 24 * 50


class Stopped(Exception):
    """The run ends here."""


@pytest.mark.parametrize("on_policy", [0.0, 0.5])
def test_an_interrupted_run_ends_with_the_same_weights(
    target: LlamaForCausalLM, written: Texts, tmp_path: Path, on_policy: float
) -> None:
    settings = TrainingSettings(steps=24, tokens=128, checkpoint=4, lr=3e-3, threads=1, on_policy=on_policy)

    def judge(student: LlamaForCausalLM, round: int) -> list[object]:
        # depends on the weights, as drafts do
        shift = int(1000 * float(student.lm_head.weight.detach().abs().sum())) % 7
        return [text(target, 100 + 10 * round + shift + i) for i in range(6)]

    def stop(at: int) -> object:
        def look(point: object, steps: int) -> None:
            if point.step == at:  # type: ignore[attr-defined]
                raise Stopped

        return look

    whole = train(fresh(target), written, settings, tmp_path / "whole", on_policy=judge)  # type: ignore[arg-type]
    for at in (4, 16):
        with pytest.raises(Stopped):
            train(fresh(target), written, settings, tmp_path / "parts", on_policy=judge, progress=stop(at))  # type: ignore[arg-type]
    student = fresh(target)
    again = train(student, written, settings, tmp_path / "parts", on_policy=judge)  # type: ignore[arg-type]
    assert again.resumed == 16 and again.tokens == whole.tokens
    for name, value in whole.learner.module.state_dict().items():
        assert torch.equal(value, student.state_dict()[name]), name
    assert [point.held_out for point in again.history] == [point.held_out for point in whole.history]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX")
def test_kill_9_leaves_a_run_that_continues(target: LlamaForCausalLM, written: Texts, tmp_path: Path) -> None:
    whole = train(fresh(target), written, SETTINGS, tmp_path / "whole")
    chance, file, before, kills = random.Random(0), tmp_path / "out" / CHECKPOINT, 0, 0
    for _ in range(3):
        child = os.fork()
        if child == 0:
            train(fresh(target), written, SETTINGS, tmp_path / "out", progress=lambda *_: time.sleep(0.03))
            os._exit(0)
        while not file.is_file() or file.stat().st_mtime_ns == before:
            time.sleep(0.002)
        before = file.stat().st_mtime_ns
        time.sleep(chance.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        kills += os.waitpid(child, 0)[1] == signal.SIGKILL
    again = train(fresh(target), written, SETTINGS, tmp_path / "out")
    assert kills and again.resumed > 0
    for name, value in whole.learner.module.state_dict().items():
        assert torch.equal(value, again.learner.module.state_dict()[name]), name


def test_checkpoints_of_something_else_are_refused(
    target: LlamaForCausalLM, written: Texts, tmp_path: Path
) -> None:
    settings = TrainingSettings(steps=2, tokens=64, threads=1)
    train(fresh(target), written, settings, tmp_path)
    with pytest.raises(UserError, match="other settings, texts or another model"):
        train(fresh(target), written, TrainingSettings(steps=2, tokens=64, lr=1e-4, threads=1), tmp_path)
    with pytest.raises(UserError, match="other settings, texts or another model"):
        train(fresh(tiny_target(1)), written, settings, tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"half a file")
    with pytest.raises(UserError, match="is damaged"):
        train(fresh(target), written, settings, tmp_path)


def test_a_full_disk_is_one_line(
    target: LlamaForCausalLM, written: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("sprinter.training.shards.write_atomic", full)
    with pytest.raises(UserError, match="the disk is full: free some space and run the same command again"):
        train(fresh(target), written, SETTINGS, tmp_path)


def test_frozen_embeddings_stay(target: LlamaForCausalLM, written: Texts, tmp_path: Path) -> None:
    student = fresh(target)
    before = student.get_input_embeddings().weight.detach().clone()
    train(
        student, written, TrainingSettings(steps=3, tokens=128, freeze_embeddings=True, threads=1), tmp_path
    )
    assert torch.equal(student.get_input_embeddings().weight, before)


# --- sizes ------------------------------------------------------------------------------------------------------------
def test_the_fit_finds_a_power_law() -> None:
    points = [
        (size, tokens, 1 - 3 * size**-0.1 * tokens**-0.12)
        for size in (1e5, 1e6, 1e7)
        for tokens in (1e4, 1e5, 1e6)
    ]
    fit = fit_overlap(points)
    assert (fit.level, fit.size, fit.tokens) == pytest.approx((math.log(3), -0.1, -0.12))
    assert fit.error < 1e-9 and fit.beta(1e8, 1e7) == pytest.approx(1 - 3 * 1e8**-0.1 * 1e7**-0.12)
    with pytest.raises(UserError, match="needs two shapes"):
        fit_overlap(points[:3])


POINT = LossPoint(2, 10, 1.0, {}, {"tv": 0.7})


def test_the_best_speed_is_the_largest_of_all_lengths() -> None:
    costs = PassCosts(((1, 1.0), (9, 1.4)), ((1, 0.1), (2, 0.1)))
    speeds = {
        gamma: sum(0.8**i for i in range(gamma + 1)) / (0.1 * gamma + 1 + 0.05 * gamma)
        for gamma in range(1, 13)
    }
    speed, gamma = costs.best_run(0.8)
    assert (gamma, speed) == (max(speeds, key=lambda g: speeds[g]), pytest.approx(max(speeds.values())))
    dear = Measured("1", 100, (POINT,), 1.0, replace(costs, draft=((1, 0.9), (2, 0.9))))
    other = replace(dear, shape="2", parameters=200, history=(POINT._replace(tokens=20),))
    found = table_of([dear, other], 20)
    assert found["best"] is None and {row["gamma"] for row in found["shapes"]} == {0}, "too dear to draft"
