"""A gate that was trained on a GGUF file through PyTorch serves the same file under llama.cpp, and vice versa."""

import json
from pathlib import Path

import pytest
import torch
from tests.models.gguf_files import NO_GGUF, NO_LLAMA

import sprinter
from sprinter.cli import main
from sprinter.errors import UserError
from sprinter.heads.load import load_gate
from sprinter.models.choose import make_runner
from sprinter.models.convert import convert_gguf
from sprinter.models.gguf import write as gguf_write
from sprinter.models.pair import builtin_paths

pytest.importorskip("gguf", reason=NO_GGUF)

PROMPT = "The city was founded in the year"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in pair as another converter would store it: their fingerprints are those of the files."""
    root = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_write, "FINGERPRINT_KEY", "other.fingerprint")
        for which in ("target", "draft"):
            convert_gguf(builtin_paths()[which], root / f"{which}.gguf", "f32")
    return root


def trained(files: Path, runner: str) -> Path:
    """A gate from labels that this runner wrote."""
    if (files / f"gate-{runner}").is_dir():
        return files / f"gate-{runner}"
    texts = files / "texts.jsonl"
    places = (
        "by the river",
        "on a hill near the sea",
        "in the old harbour",
        "under the tower",
        "on an island",
    )
    stories = [
        f"In {year} a small town was built {place}, and many people came to live there. Later it was burned down."
        for year in range(1840, 1850)
        for place in places
    ]
    texts.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    labels, gate = files / f"labels-{runner}", files / f"gate-{runner}"
    models = [
        "--target",
        str(files / "target.gguf"),
        "--draft",
        str(files / "draft.gguf"),
        "--runner",
        runner,
    ]
    label = ["gate", "label", "--data", str(texts), "--out", str(labels), "--max-new-tokens", "8", "--json"]
    assert main([*label, *models]) == 0
    assert (
        main(["gate", "train", "--labels", str(labels), "--out", str(gate), "--epochs", "3", "--json"]) == 0
    )
    return gate


def load(files: Path, runner: str, gate: Path) -> sprinter.Pair:
    return sprinter.load_pair(
        files / "target.gguf",
        draft=files / "draft.gguf",
        gate=gate,
        runner=runner,
        dtype="float32",
        compile=False,
    )


def test_a_gate_fits_the_file_that_pytorch_read_and_no_other(files: Path) -> None:
    gate = trained(files, "torch")
    assert load(files, "torch", gate).gate is not None
    with pytest.raises(UserError, match="was made for other weights"):
        sprinter.load_pair(builtin_paths()["target"], draft=builtin_paths()["draft"], gate=gate)


@pytest.mark.parametrize("runner", ["torch", "auto"])
def test_both_runners_take_it_and_score_alike(files: Path, runner: str) -> None:
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    gate = trained(files, runner)
    pairs = [load(files, each, gate) for each in ("torch", "auto")]
    texts = [pair.generate(PROMPT, method="sprinter(tau=0.5)", seed=2, max_new_tokens=24) for pair in pairs]
    assert [token.id for token in texts[0].tokens] == [token.id for token in texts[1].tokens]
    assert [token.origin for token in texts[0].tokens] == [token.origin for token in texts[1].tokens]
    head, scores = load_gate(gate), []
    for pair in pairs:
        assert pair.models.draft is not None and pair.tokenizer is not None
        runner_ = make_runner(pair.models.draft.model, max_len=64)
        scores.append(head(runner_.extend(torch.tensor([pair.tokenizer(PROMPT)["input_ids"]])).hidden))
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-4)
