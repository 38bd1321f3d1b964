"""The whole workflow with the built-in pair: label, train, evaluate, generate."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

import sprinter
from sprinter.cli import main
from sprinter.heads.features import DraftStep, read_features, stack_features
from sprinter.laws import raw_law
from sprinter.training.dataset import record_features
from sprinter.training.records import KINDS, Records, read_records

NEW_TOKENS = 8


def texts() -> list[str]:
    """Sixty short stories of one grammar."""
    who = ("The old miller", "A small girl", "The captain of the ship", "My brother")
    where = ("in the village by the river", "near the harbour", "on a cold morning in the hills")
    what = ("found a red lamp under a tree", "lost the key of the church", "wrote a long letter to the king",
            "sold two horses and a cart", "could not find the way home")  # fmt: skip
    return [
        f"{a} {c} {b}. Nobody knew why, but the people of the town were glad, and they said that it was good. "
        f"Later {a.lower()} went away and was not seen again until the next winter came."
        for a, b, c in itertools.product(who, where, what)
    ]


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("end-to-end")
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    status = main(["gate", "label", "--data", str(file), "--out", str(folder / "labels"), "--max-new-tokens",
                   str(NEW_TOKENS), "--json"])  # fmt: skip
    assert status == 0
    return folder / "labels"


@pytest.fixture(scope="module")
def records(labels: Path) -> Records:
    return read_records(labels)


def test_features_of_labels_are_what_a_driver_computes(records: Records) -> None:
    """Fed to the draft again, a text gives the features that heads were trained on."""
    pair = sprinter.load_pair()
    assert pair.models.draft is not None
    model, all_texts = pair.models.draft.model, texts()
    originals = records.select(records.kind == KINDS.index("original"))
    assert len(originals) > 0
    for prompt in torch.unique(originals.prompt)[:3].tolist():
        own = originals.select(originals.prompt == prompt)
        ids = torch.tensor([pair.tokenizer(all_texts[prompt])["input_ids"]])
        with torch.inference_mode():
            states = model.base_model(ids).last_hidden_state[0]
            laws = raw_law(model.get_output_embeddings()(states))
        at = own.position.long()
        assert own.token.tolist() == ids[0, at].tolist()
        step = DraftStep(states[at - 1], laws[at - 1], own.step + 1, own.token.long(), states[at])
        names = ("hidden", "entropy", "max_q", "top_q(k=10)", "position", "hidden_x", "log_q")
        theirs = stack_features(names, read_features(names, step))
        torch.testing.assert_close(record_features(own, names), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("head", ["linear", "specdec++"])
def test_label_train_judge_and_decode(
    labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], head: str
) -> None:
    out = str(tmp_path / "head")
    quick = ["--epochs", "3", "--repeats", "30", "--json"]
    assert main(["gate", "train", "--labels", str(labels), "--out", out, "--preset", head, *quick]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert sum(part["prompts"] for part in trained["split"].values()) >= (60 if head == "linear" else 25)
    assert main(["gate", "roc", "--labels", str(labels), "--gate", out, "--repeats", "30", "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["truths"].keys() == trained["test"]["truths"].keys()
    assert judged["mean_score"] == pytest.approx(trained["test"]["mean_score"])
    if head == "linear":  # the artifact fits the pair that it was made for, and decodes
        pair = sprinter.load_pair(gate=out)
        generation = pair.generate(texts()[0][:60], method="sprinter(tau=0.6)", max_new_tokens=12)
        assert len(generation.tokens) == 12 and generation.stats.draft_steps > 0
        assert abs(judged["mean_score"] - judged["mean_label"]) < 0.2
