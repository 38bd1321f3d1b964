"""``sprinter draft``: texts of the target, the folder that comes out, its card, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.gguf_files import NO_GGUF, saved_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import sprinter
from sprinter.cli import main
from sprinter.errors import UserError
from sprinter.models.convert import convert_gguf
from sprinter.training.drafts.data import INFO, write_texts
from sprinter.training.drafts.distill import distill
from sprinter.training.drafts.folder import FACTS, Judging
from sprinter.training.drafts.judge import OwnDrafts, overlaps
from sprinter.training.drafts.settings import StudentSettings, TextSettings, TrainingSettings
from sprinter.training.drafts.sizes import check_plan
from sprinter.training.drafts.student import make_student

TEXTS = TextSettings(new_tokens=10, prompt_tokens=16, shard=10, held_out=0.2, top=24)
STUDENT = StudentSettings(layers=1)
JUDGING = Judging(gamma=3, prompts=2, new_tokens=12)
TRAINING = TrainingSettings(steps=6, tokens=128, checkpoint=3, lr=3e-3, threads=1)


@pytest.fixture(scope="module")
def made(pair: sprinter.Pair, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drafts") / "draft"
    distill(pair, pair.models.target.module("a test"), [data], out, TEXTS, STUDENT, TRAINING, JUDGING)
    return out


# --- texts ------------------------------------------------------------------------------------------------------------
def test_texts_have_the_targets_laws_and_resume(pair: sprinter.Pair, data: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    written = write_texts(pair, [data], tmp_path, TEXTS, lambda progress: seen.append(progress.tokens))
    assert [len(written.texts), len(seen)] == [30, 3] and seen[0] > 0
    assert {one.task for one in written.texts} == {"a", "b"} and 0 < len(written.part(True)) < 15
    model = pair.models.target.module("a test")
    for one in written.texts[:4]:
        with torch.no_grad():
            law = model(one.ids[None]).logits[0, one.prompt - 1 : -1, : pair.models.vocab_size].softmax(-1)
        torch.testing.assert_close(one.top_probs, law.topk(24).values, atol=1e-3, rtol=1e-3)
    (tmp_path / "texts-00001.safetensors").unlink()
    (tmp_path / "texts-00002.safetensors").write_bytes(b"half")
    again = write_texts(pair, [data], tmp_path, TEXTS)
    assert again.info["hash"] == written.info["hash"]
    fewer = write_texts(
        pair,
        [data],
        tmp_path,
        TextSettings(**{**_fields(TEXTS), "limit": 20}),
        lambda p: seen.append(p.tokens),
    )
    assert len(fewer.texts) == 20 and seen[-1] == 0, "shards are reused"


def _fields(settings: TextSettings) -> dict[str, object]:
    return asdict(settings)


def test_wrong_data_are_refused(pair: sprinter.Pair, data: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("one prompt\n\nanother\n")
    with pytest.raises(UserError, match="the data are too short: they have 2 usable prompts"):
        write_texts(pair, [few], tmp_path / "out", TEXTS)
    with pytest.raises(UserError, match="there is no file"):
        write_texts(pair, [tmp_path / "none.txt"], tmp_path / "out", TEXTS)
    with pytest.raises(UserError, match="exceed the target's context of 128 tokens"):
        write_texts(pair, [data], tmp_path / "out", TextSettings())
    write_texts(pair, [data], tmp_path / "out", TEXTS)
    with pytest.raises(UserError, match=r"holds texts made with temperature=1\.0 \(now 0\.5\)"):
        write_texts(pair, [data], tmp_path / "out", TextSettings(**{**_fields(TEXTS), "temperature": 0.5}))
    saved_llama(tmp_path / "other", 9, tie_word_embeddings=True)
    other = sprinter.load_pair(tmp_path / "other", device="cpu", dtype="float32")
    with pytest.raises(UserError, match="holds texts made with another target"):
        write_texts(other, [data], tmp_path / "out", TEXTS)


def test_a_full_disk_while_writing_texts(
    pair: sprinter.Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sprinter.training import shards as module

    real = module.write_atomic

    def full(path: Path, content: bytes) -> Path:
        if path.name == "texts-00001.safetensors":
            raise OSError(28, "No space left on device", str(path))
        return real(path, content)

    monkeypatch.setattr(module, "write_atomic", full)
    with pytest.raises(UserError, match="the disk is full"):
        write_texts(pair, [data], tmp_path, TEXTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts-00000.safetensors", INFO]


# --- the student's own drafts -----------------------------------------------------------------------------------------
def test_own_drafts_are_judged_by_the_target(pair: sprinter.Pair, data: Path, tmp_path: Path) -> None:
    written = write_texts(pair, [data], tmp_path, TEXTS)
    model = pair.models.target.module("a test")
    student = make_student(model, STUDENT).eval()
    judge = OwnDrafts(pair.models, written.part(False), gamma=4, temperature=1.0, seed=3, count=40, top=24)
    found = judge(student, 0)
    assert len(found) == 40 and {len(one.ids) - one.prompt for one in found} <= {1, 2, 3, 4}
    for one in found[::10]:
        with torch.no_grad():
            law = model(one.ids[None]).logits[0, one.prompt - 1 : -1, : pair.models.vocab_size].softmax(-1)
        torch.testing.assert_close(one.top_probs, law.topk(24).values, atol=2e-3, rtol=2e-3)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(found, judge(student, 0), strict=True))
    assert any(not torch.equal(a.ids, b.ids) for a, b in zip(found, judge(student, 1), strict=True))
    same = OwnDrafts(pair.models, written.part(False), gamma=4, temperature=1.0, seed=3, count=20, top=24)
    whole = same(make_student(model, StudentSettings(layers=2)).eval(), 0)
    assert all(len(one.ids) - one.prompt == 4 for one in whole), "the target itself is never refused"


# --- the folder -------------------------------------------------------------------------------------------------------
def test_the_folder_loads_anywhere(made: Path, target: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made)
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.num_hidden_layers == 1
    assert (
        AutoTokenizer.from_pretrained(made).get_vocab() == AutoTokenizer.from_pretrained(target).get_vocab()
    )
    both = sprinter.load_pair(target, draft=made, device="cpu", dtype="float32")
    plain, fast = (
        both.generate("the thing", method=method, max_new_tokens=12, temperature=0.0)
        for method in ("autoregressive", "speculative(gamma=3)")
    )
    assert [token.id for token in plain.tokens] == [token.id for token in fast.tokens]
    pytest.importorskip("gguf", reason=NO_GGUF)
    assert convert_gguf(made, tmp_path / "draft.gguf").stat().st_size > 0


def test_the_card_says_what_was_measured(made: Path, pair: sprinter.Pair, data: Path) -> None:
    facts = json.loads((made / FACTS).read_text())
    assert set(facts["tasks"]) == {"a", "b", "all"} and facts["training"]["steps"] == 6
    row = facts["tasks"]["all"]
    assert 0 < row["beta"] <= 1 and row["tokens_per_call"] >= 1 and 0 <= row["acceptance"] <= 1
    written = write_texts(pair, [data], made / "texts", TEXTS)
    student = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    again = overlaps(pair.models.target.module("a test"), student, written.part(True), 1.0)
    assert again["all"]["beta"] == pytest.approx(row["beta"], abs=1e-6)
    card = (made / "README.md").read_text()
    for word in (
        "| all |",
        facts["texts"]["hash"][:12],
        facts["texts"]["data"][0]["sha256"][:12],
        "0.1*ce+0.9*tv",
    ):
        assert word in card
    assert str(data.parent) not in card + (made / FACTS).read_text(), "no path of this machine"


def test_a_finished_run_is_not_trained_again(made: Path, pair: sprinter.Pair, data: Path) -> None:
    before = json.loads((made / FACTS).read_text())
    seen: list[int] = []
    again = distill(
        pair, pair.models.target.module("a test"), [data], made, TEXTS, STUDENT, TRAINING, JUDGING,
        on_training=lambda point, steps: seen.append(point.step),
    )  # fmt: skip
    assert seen == [] and again["tasks"] == before["tasks"]


def test_another_training_uses_the_texts_that_are_there(
    made: Path, pair: sprinter.Pair, data: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(made, tmp_path / "draft")
    written = list[int]()
    longer = replace(TRAINING, steps=8)
    facts = distill(
        pair, pair.models.target.module("a test"), [data], out, TEXTS, STUDENT, longer, JUDGING,
        on_texts=lambda progress: written.append(progress.tokens),
    )  # fmt: skip
    assert facts["training"]["steps"] == 8 and set(written) == {0}
    assert len(list(out.glob("training/*/*.safetensors"))) == 2


def test_a_restart_deletes_what_is_ours_alone(
    made: Path, pair: sprinter.Pair, data: Path, tmp_path: Path
) -> None:
    model, given = pair.models.target.module("a test"), (TEXTS, STUDENT, TRAINING, JUDGING)
    out = shutil.copytree(made, tmp_path / "draft")
    for place in ("texts", "training"):
        (out / place / "mine.txt").write_text("mine")
    distill(pair, model, [data], out, *given, restart=True)
    assert all((out / place / "mine.txt").read_text() == "mine" for place in ("texts", "training"))
    other = tmp_path / "other"
    (other / "texts").mkdir(parents=True)
    (other / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds another model"):
        distill(pair, model, [data], other, *given, restart=True)


def test_prompts_of_records_are_whole_and_one_is_held_out(pair: sprinter.Pair, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    asked = [f"tell me the number {i} please and why" for i in range(10)]
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in asked))
    settings = replace(TEXTS, prompt_tokens=60, held_out=1e-9)
    written = write_texts(pair, [file], tmp_path / "out", settings)
    assert pair.tokenizer is not None
    found = [pair.tokenizer.decode(one.ids[: one.prompt], skip_special_tokens=True) for one in written.texts]
    assert found == asked and len(written.part(True)) == 1


def test_drafts_of_its_own_end_within_the_context(pair: sprinter.Pair, data: Path, tmp_path: Path) -> None:
    written = write_texts(pair, [data], tmp_path, TEXTS)
    longest = max(len(one.ids) for one in written.texts)
    student = make_student(pair.models.target.module("a test"), StudentSettings(layers=1, context=longest))
    judge = OwnDrafts(pair.models, written.part(False), 8, 1.0, 0, count=24)
    assert all(len(one.ids) <= longest for one in judge(student, 0))
    with pytest.raises(UserError, match="leaves room for a draft of 200 tokens"):
        OwnDrafts(pair.models, written.part(False), 200, 1.0, 0)(student, 0)


@pytest.mark.parametrize(
    ("shapes", "steps", "positions", "message"),
    [
        (["1"], 4, 1e6, "here is one shape"),
        (["1", "1"], 4, 1e6, "here is one shape"),
        (["1", "2"], 1, 1e6, "one checkpoint"),
        (["1", "2"], 4, 0.0, "not a number of positions"),
        (["1", "2"], 4, float("nan"), "not a number of positions"),
    ],
)
def test_comparisons_of_sizes_that_end_in_nothing(
    shapes: list[str], steps: int, positions: float, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_plan(shapes, steps, positions)


def test_folders_of_something_else_are_refused(
    target: Path, pair: sprinter.Pair, data: Path, tmp_path: Path
) -> None:
    weights = pair.models.target.module("a test")
    with pytest.raises(UserError, match="holds another model"):
        distill(pair, weights, [data], target, TEXTS, STUDENT, TRAINING)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        distill(pair, weights, [data], tmp_path / "file", TEXTS, STUDENT, TRAINING)


def test_a_cut_vocabulary_is_read_with_its_map(
    target: Path, pair: sprinter.Pair, data: Path, made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cut"
    shutil.copytree(made / "texts", out / "texts")
    weights = pair.models.target.module("a test")
    distill(pair, weights, [data], out, TEXTS, StudentSettings(layers=2, vocabulary=200), TRAINING, JUDGING)
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["draft_vocabulary"]) == ("sprinter_cut_llama", 200)
    both = sprinter.load_pair(target, draft=out, device="cpu", dtype="float32")
    plain, fast = (
        both.generate("the thing", method=method, max_new_tokens=20, temperature=0.0)
        for method in ("autoregressive", "speculative(gamma=3)")
    )
    assert [token.id for token in plain.tokens] == [token.id for token in fast.tokens]
    assert fast.stats.accepted > 0
    with pytest.raises(UserError, match="its vocabulary is cut, which GGUF has no map for"):
        convert_gguf(out, tmp_path / "draft.gguf")
    weights_file = out / "model.safetensors"
    state = load_file(weights_file)
    state["lm_head.ids"] = state["lm_head.ids"] + 100
    save_file(state, weights_file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="vocabulary map is not of the target's vocabulary"):
        sprinter.load_pair(target, draft=out, device="cpu", dtype="float32")


def test_a_draft_for_another_vocabulary_drafts_the_tokens_in_common(made: Path, tmp_path: Path) -> None:
    saved_llama(tmp_path / "other", 9, word="ou", tie_word_embeddings=True)
    pair = sprinter.load_pair(tmp_path / "other", draft=made, device="cpu", dtype="float32")
    plain, fast = (
        pair.generate("the hat", method=method, temperature=0.0, max_new_tokens=12)
        for method in ("autoregressive", "speculative")
    )
    assert plain.text == fast.text and fast.stats.drafted > 0


# --- the command line -------------------------------------------------------------------------------------------------
def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(["draft", *args])
    return status, *capsys.readouterr()


COMMON = [
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
]


def test_distill(target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--target", str(target), "--data", str(data), "--out", str(tmp_path / "out"), *COMMON]
    status, out, err = run(capsys, "distill", *given, "--steps", "4", "--layers", "1", "--checkpoint", "2")
    assert status == 0 and "tokens per call" in out and "saved in" in out
    assert "texts 30/30" in err and "step 4/4: held out β" in err


@pytest.mark.slow  # trains two shapes and times passes
def test_sizes(target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--target", str(target), "--data", str(data), "--out", str(tmp_path / "out"), *COMMON]
    shapes = ["--shape", "1", "--shape", "2", "--steps", "8", "--positions", "1e5"]
    status, out, _ = run(capsys, "sizes", *given, *shapes, "--json")
    found = json.loads(out)
    assert status == 0 and [row["shape"] for row in found["shapes"]] == ["1", "2"]
    assert all(0 <= row["expected_beta"] <= 1 and row["draft_step_s"] > 0 for row in found["shapes"])
    status, out, _ = run(capsys, "sizes", *given, *shapes)
    assert status == 0 and "plain decoding" in out


@pytest.mark.parametrize(("words", "message"), [
    (["--loss", "tvd"], "did you mean"),
    (["--width", "4096"], "--width 4096 exceeds 64"),
    (["--vocabulary", "100000"], "--vocabulary 100000 exceeds"),
    (["--on-policy", "2"], "--on-policy 2.0 is out of range"),
])  # fmt: skip
def test_mistakes_are_one_line(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    words: list[str], message: str,
) -> None:  # fmt: skip
    given = ["--target", str(target), "--data", str(data), "--out", str(tmp_path / "out"), *COMMON]
    status, out, err = run(capsys, "distill", *given, *words)
    lines = [line for line in err.splitlines() if "texts " not in line]
    assert (status, out, len(lines)) == (2, "", 1) and message in lines[0]
