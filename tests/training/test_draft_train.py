"""``sprinter draft train``: Medusa's heads learn, resume to the same bits, their card, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.training.drafting import saved_target, texts, tiny_target

import sprinter
from sprinter.cli import main
from sprinter.errors import UserError
from sprinter.heads.load import load_any_head
from sprinter.heads.medusa import WEIGHTS, MedusaHeads
from sprinter.training.drafts.batches import collate
from sprinter.training.drafts.data import TargetText, Texts
from sprinter.training.drafts.distill import distill
from sprinter.training.drafts.folder import FACTS, Judging
from sprinter.training.drafts.heads import HEAD_TRAINING, train_heads
from sprinter.training.drafts.losses import LOSSES
from sprinter.training.drafts.medusa import MedusaLearner, fresh_medusa
from sprinter.training.drafts.run import CHECKPOINT, run_to_end
from sprinter.training.drafts.settings import HeadSettings, TextSettings

TEXTS = TextSettings(new_tokens=10, prompt_tokens=16, shard=10, held_out=0.2, top=24)
SHAPE = HeadSettings(heads=2)
TRAINING = replace(HEAD_TRAINING, steps=6, tokens=128, checkpoint=3, lr=3e-3, threads=1)
JUDGING = Judging(gamma=2, prompts=2, new_tokens=12)


def learner(settings: HeadSettings = SHAPE, temperature: float = 1.0) -> MedusaLearner:
    target = tiny_target()
    return MedusaLearner(fresh_medusa(target, settings, "t", "f"), target, settings.discount, temperature)


def cyclic(count: int = 24, period: int = 7) -> Texts:
    """Texts that count upwards: every token to come is certain, from any state that knows the last token."""
    every = []
    for seed in range(count):
        ids = (torch.arange(14) + seed) % period
        laws = torch.nn.functional.one_hot(ids[5:], 64).float().topk(4)
        every.append(TargetText(ids, 5, laws.indices, laws.values, "all", seed % 6 == 0))
    return Texts(tuple(every), {"hash": "cyclic", "settings": {"temperature": 1.0}})


# --- time ------------------------------------------------------------------------------------------------------------
def test_a_training_ends_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on a second with every look: the run ends at its minute, cooled down and saved; another run of
    the same settings finds it done."""
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    settings = replace(TRAINING, steps=10_000, minutes=1.0, checkpoint=10_000, lr=2e-2)
    rates: list[float] = []
    before = torch.optim.AdamW.step

    def noted(optimizer: torch.optim.AdamW) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        before(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    run = run_to_end(learner(), cyclic(), settings, tmp_path)
    assert 10 < run.done == run.steps == len(rates) < 60 and 60 <= run.seconds < 70
    assert max(rates) > 0.9 * settings.lr and rates[-1] < 0.15 * settings.lr, (
        "warmed up and cooled down by the clock"
    )
    assert rates.index(max(rates)) < 4
    assert len(run.history) == 1 and (tmp_path / CHECKPOINT).is_file()
    again = run_to_end(learner(), cyclic(), settings, tmp_path)
    assert again.done == run.done == len(rates) and again.resumed == run.done
    with pytest.raises(UserError, match="minutes does not go with on_policy"):
        replace(settings, on_policy=0.5)
    with pytest.raises(UserError, match="minutes=0"):
        replace(settings, minutes=0.0)


# --- learning --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shared", [False, True])
def test_heads_learn_tokens_ahead(shared: bool, tmp_path: Path) -> None:
    """Each head learns the token at its own distance: at another the count would be off by one, and never the first."""
    own = learner(HeadSettings(heads=3, share_output=shared))
    found = cyclic()
    before = own.held_out(found.part(True), 128)
    run = run_to_end(own, found, replace(TRAINING, steps=80, checkpoint=80, lr=2e-2), tmp_path)
    after = run.history[-1].held_out
    assert after["ce"] < 0.3 * before["ce"] and after["tv"] < 0.3
    assert all(after[f"head{head}_top1"] > 0.9 for head in (1, 2, 3)), after
    accuracies = own.accuracies(found.part(True), 128)
    assert [row[0] for row in accuracies] == pytest.approx(
        [after[f"head{head}_top1"] for head in (1, 2, 3)], abs=1e-6
    )
    assert all(sum(row) <= 1 + 1e-6 for row in accuracies)


def test_a_fresh_head_is_the_targets_own_law_on_an_earlier_state() -> None:
    own, batch = learner(HeadSettings(heads=3)), collate(texts(tiny_target(), 3).texts)
    with torch.no_grad():
        logits = own.target(batch.ids).logits
        width = batch.ids.shape[1]
        for head, (found, laws, _) in enumerate(own.outputs(batch)):
            assert len(found) == len(batch.places), "all prompts are longer than the heads reach"
            rows, columns = batch.places // width, batch.places % width - head - 1
            torch.testing.assert_close(found, logits[rows, columns])
            assert torch.equal(laws.tokens, batch.laws.tokens)


def test_short_prompts_have_no_state_before_them() -> None:
    one = texts(tiny_target(), 1).texts[0]
    short = TargetText(one.ids[3:], 2, one.top_ids, one.top_probs, "t", False)
    found = list(learner(HeadSettings(heads=4)).outputs(collate([short, short])))
    answer = len(short.ids) - 2
    assert [len(one.logits) for one in found] == [2 * (answer - lost) for lost in (0, 1, 2, 3)]


def test_weights_of_the_heads_and_losses(tmp_path: Path) -> None:
    own = learner()
    losses = own.losses(collate(texts(tiny_target(), 4).texts))
    assert set(losses.parts) == set(LOSSES) and losses.weights is not None
    first = losses.weights == 1
    assert int(first.sum()) * 2 == len(losses.weights) and bool((losses.weights[~first] == 0.8).all())


# --- resuming --------------------------------------------------------------------------------------------------------
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    found, settings = texts(tiny_target()), replace(TRAINING, steps=8, checkpoint=2)
    whole = learner()
    run_to_end(whole, found, settings, tmp_path / "whole")

    def stop(point: object, steps: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_to_end(learner(), found, settings, tmp_path / "part", progress=stop)
    again = learner()
    run = run_to_end(again, found, settings, tmp_path / "part")
    assert run.resumed == 2 and run.done == 8
    assert again.heads.fingerprint == whole.heads.fingerprint != learner().heads.fingerprint
    with pytest.raises(UserError, match="is of other settings, texts or another model"):
        run_to_end(learner(HeadSettings(heads=3)), found, settings, tmp_path / "part")


# --- the folder ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def made(pair: sprinter.Pair, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("heads") / "medusa"
    train_heads(pair, pair.models.target.module("a test"), [data], out, TEXTS, SHAPE, TRAINING, JUDGING)
    return out


def test_the_folder_loads_beside_its_target(made: Path, target: Path, tmp_path: Path) -> None:
    both = sprinter.load_pair(target, heads=[made], device="cpu", dtype="float32")
    outs = [
        both.generate("the thing", method=method, max_new_tokens=12, temperature=0.0)
        for method in ("autoregressive", "heads(gamma=2)", "medusa(nodes=4)")
    ]
    assert outs[1].text == outs[0].text == outs[2].text and outs[2].stats.drafted > outs[1].stats.drafted > 0
    heads = load_any_head(made)
    assert isinstance(heads, MedusaHeads) and heads.count == 2 and len(heads.accuracies[0]) == 10
    saved_target(tmp_path / "same")
    torch.manual_seed(1)
    other = sprinter.load_pair(tmp_path / "same", device="cpu", dtype="float32")
    with torch.no_grad():
        next(iter(other.models.target.module("a test").parameters())).add_(0.1)
    with pytest.raises(UserError, match="trained on another target"):
        sprinter.Pair(other.models, None, [heads])


def test_the_card_says_what_was_measured(made: Path, data: Path) -> None:
    facts = json.loads((made / FACTS).read_text())
    assert facts["training"]["steps"] == 6 and set(facts["tasks"]) == {"a", "b", "all"}
    row = facts["tasks"]["all"]
    assert row["chain_tokens_per_call"] >= 1 and row["tree_tokens_per_call"] >= 1
    assert "head2_top5" in facts["training"]["history"][-1]["held_out"]
    card = (made / "README.md").read_text()
    for word in (
        facts["texts"]["hash"][:12],
        facts["texts"]["data"][0]["sha256"][:12],
        "| 2 | 0.",
        "ce+kl",
        "on held-out texts:",
    ):
        assert word in card
    config = (made / "config.json").read_text()
    assert str(data.parent) not in card + config + (made / FACTS).read_text(), "no path of this machine"
    assert json.loads(config)["base_model_name_or_path"] == "target"


def test_a_finished_run_is_not_trained_again(made: Path, pair: sprinter.Pair, data: Path) -> None:
    seen: list[int] = []
    before, weights = json.loads((made / FACTS).read_text()), (made / WEIGHTS).read_bytes()
    again = train_heads(
        pair, pair.models.target.module("a test"), [data], made, TEXTS, SHAPE, TRAINING, JUDGING,
        on_training=lambda point, steps: seen.append(point.step),
    )  # fmt: skip
    assert seen == [] and again["tasks"] == before["tasks"] and (made / WEIGHTS).read_bytes() == weights


def test_what_is_refused(pair: sprinter.Pair, data: Path, target: Path, tmp_path: Path) -> None:
    weights = pair.models.target.module("a test")
    few = tmp_path / "few.txt"
    few.write_text("one prompt\n\nanother\n")
    with pytest.raises(UserError, match="the data are too short: they have 2 usable prompts"):
        train_heads(pair, weights, [few], tmp_path / "out", TEXTS, SHAPE, TRAINING)
    with pytest.raises(UserError, match="holds another model"):
        train_heads(pair, weights, [data], target, TEXTS, SHAPE, TRAINING)
    with pytest.raises(UserError, match="on_policy is for draft models"):
        train_heads(pair, weights, [data], tmp_path / "out", TEXTS, SHAPE, replace(TRAINING, on_policy=0.1))
    for wrong, message in (
        ({"kind": "medusas"}, "give 'medusa', 'eagle'"),
        ({"heads": 0}, "heads=0"),
        ({"heads": 17}, "heads=17"),
    ):
        with pytest.raises(UserError, match=message):
            HeadSettings(**wrong)  # type: ignore[arg-type]


def test_a_folder_of_the_other_sort_is_refused(
    made: Path, pair: sprinter.Pair, data: Path, tmp_path: Path
) -> None:
    weights = pair.models.target.module("a test")
    with pytest.raises(UserError, match=r"holds heads of 'sprinter draft train', which would be overwritten"):
        distill(pair, weights, [data], made, TEXTS, restart=True)
    (tmp_path / FACTS).write_text('{"student": {}}')
    with pytest.raises(UserError, match=r"holds a draft model of 'sprinter draft distill', which would"):
        train_heads(pair, weights, [data], tmp_path, TEXTS, SHAPE, TRAINING)
    assert (made / FACTS).is_file() and (tmp_path / FACTS).read_text() == '{"student": {}}'


def test_texts_without_a_position_to_learn(pair: sprinter.Pair, data: Path, tmp_path: Path) -> None:
    weights = pair.models.target.module("a test")
    short = tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps({"prompt": chr(97 + i)}) + "\n" for i in range(26)))
    texts = replace(TEXTS, new_tokens=1, prompt_tokens=1)
    with pytest.raises(UserError, match="the texts are too short: heads learn from the third token"):
        train_heads(pair, weights, [short], tmp_path / "out", texts, SHAPE, TRAINING)


def test_without_held_out_texts_the_card_says_so(pair: sprinter.Pair, data: Path, tmp_path: Path) -> None:
    weights, texts = pair.models.target.module("a test"), replace(TEXTS, held_out=0.0, new_tokens=4)
    facts = train_heads(
        pair, weights, [data], tmp_path / "out", texts, SHAPE, replace(TRAINING, steps=1), JUDGING
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert facts["heads"]["accuracies_on"] == "training" and "on training texts:" in card
    assert "eld-out" not in card and "No prompts were held out." in card
    assert json.loads((tmp_path / "out" / "config.json").read_text())["accuracies_on"] == "training"


def test_a_full_disk_while_training(
    pair: sprinter.Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sprinter.training import shards as module

    real = module.write_atomic

    def full(path: Path, content: bytes) -> Path:
        if path.name == CHECKPOINT:
            raise OSError(28, "No space left on device", str(path))
        return real(path, content)

    monkeypatch.setattr(module, "write_atomic", full)
    with pytest.raises(UserError, match="the disk is full"):
        train_heads(
            pair, pair.models.target.module("a test"), [data], tmp_path / "out", TEXTS, SHAPE, TRAINING
        )
    assert not (tmp_path / "out" / "config.json").exists()


# --- the command line ------------------------------------------------------------------------------------------------
COMMON = (
    "--max-new-tokens",
    "10",
    "--prompt-tokens",
    "16",
    "--held-out",
    "0.2",
    "--threads",
    "1",
    "--tokens",
    "128",
)


def test_train(target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    given = [
        "--target",
        str(target),
        "--data",
        str(data),
        "--out",
        out,
        *COMMON,
        "--heads",
        "2",
        "--share-output",
    ]
    assert main(["draft", "train", *given, "--steps", "4", "--checkpoint", "2", "--held-out", "0.05"]) == 0
    shown, err = capsys.readouterr()
    assert (
        "tokens a target call as a chain" in shown and "saved in" in shown and "step 4/4: held out β" in err
    )
    assert not [name for name in load_file(Path(out) / WEIGHTS) if name.endswith("1.weight")], "shared"
    asked = [
        "generate",
        "the thing",
        "--target",
        str(target),
        "--head",
        out,
        "-m",
        "medusa(nodes=5)",
        "-n",
        "6",
    ]
    assert main(asked) == 0


@pytest.mark.slow  # a process of its own, which is killed and started again
def test_a_killed_run_continues(target: Path, data: Path, tmp_path: Path) -> None:
    def start(out: Path) -> subprocess.Popen[bytes]:
        given = ["--target", target, "--data", data, "--out", out, *COMMON, "--heads", "2", "--steps", "40"]
        command = [sys.executable, "-m", "sprinter", "draft", "train", *map(str, given), "--checkpoint", "2"]
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
        )

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(killed)
    deadline = time.monotonic() + 120
    while not list(killed.glob(f"training/*/{CHECKPOINT}")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / FACTS).exists(), "killed before its end"
    assert start(killed).wait() == start(whole).wait() == 0
    assert (killed / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
