"""``sprinter gate train`` and ``sprinter gate roc``: output, JSON, errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.training.synthetic import make_records, write_labels

from sprinter.cli import main

QUICK = ["--epochs", "2", "--lr", "0.005", "--repeats", "30"]


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_labels(tmp_path_factory.mktemp("labels"), make_records(60, 8)))


@pytest.fixture(scope="module")
def gate(labels: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("gates") / "target-speculator.sprinter")
    assert main(["gate", "train", "--labels", labels, "--out", out, *QUICK]) == 0
    return out


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["gate", *args])
    return status, *capsys.readouterr()


def test_train_shows_losses_on_stderr_and_areas_on_stdout(
    capsys: pytest.CaptureFixture[str], labels: str, tmp_path: Path
) -> None:
    status, out, err = run(capsys, "train", "--labels", labels, "--out", str(tmp_path / "g"), *QUICK)
    assert status == 0
    assert [line.split(":")[0] for line in err.splitlines()] == ["epoch 1/2", "epoch 2/2"]
    for words in ("13 parameters", "overlap(temperature=1.0)", "AU-ROC", "max q", "agreement", "saved in"):
        assert words in out


def test_a_drift_that_other_prompts_exceed_is_said(
    capsys: pytest.CaptureFixture[str], labels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sprinter.training.train.choose", lambda _, scores, beta: float(scores.median()))
    for drift, said in (("0.01", True), ("0.99", False)):
        args = ("--labels", labels, "--out", str(tmp_path / drift), *QUICK, "--drift", drift)
        status, out, _ = run(capsys, "train", *args)
        assert status == 0 and (f"keeps drift {drift}" in " ".join(out.split())) == said


def test_train_json_is_one_line_with_everything(
    capsys: pytest.CaptureFixture[str], labels: str, tmp_path: Path
) -> None:
    options = ["--preset", "mlp", "--features", "hidden,entropy", "--label", "ratio(lambda=1.5)", "--seed", "2",
               "--calibration", "isotonic", "--weight", "balanced", "--tau", "0.6", "--json"]  # fmt: skip
    status, out, _ = run(capsys, "train", "--labels", labels, "--out", str(tmp_path / "g"), *QUICK, *options)
    assert status == 0 and out.count("\n") == 1
    read = json.loads(out)
    assert read["settings"]["label"] == "ratio(lambda=1.5, at=drawn)" and read["seed"] == 2
    assert sum(part["prompts"] for part in read["split"].values()) == 60
    assert set(read["test"]["truths"]["agreement"]["auc"]) == {"gate", "entropy", "max q"}
    config = json.loads((tmp_path / "g" / "config.json").read_text())
    assert (config["tau"], config["calibration"]["kind"]) == (0.6, "isotonic")
    assert config["features"] == ["hidden", "entropy"]
    assert config["training"]["test"] == read["test"]


def test_labels_may_be_repeated(capsys: pytest.CaptureFixture[str], labels: str, tmp_path: Path) -> None:
    other = write_labels(
        tmp_path / "b", make_records(30, 8), data=({"name": "o", "sha256": "b" * 64, "texts": 30},)
    )
    status, out, _ = run(
        capsys, "train", "--labels", labels, "--labels", str(other), "--out", str(tmp_path / "g"), *QUICK, "--json"
    )  # fmt: skip
    assert status == 0
    assert sum(part["prompts"] for part in json.loads(out)["split"].values()) == 90
    # as the shell writes labels/*: the first belongs to the option, the others follow
    args = ("--gate", str(tmp_path / "g"), "--repeats", "30", "--json", "--labels", labels, str(other))
    status, out, _ = run(capsys, "roc", *args)
    config = json.loads((tmp_path / "g" / "config.json").read_text())
    assert status == 0 and json.loads(out)["prompts"] == config["training"]["split"]["test"]["prompts"]


def test_roc_writes_pictures_and_numbers(
    capsys: pytest.CaptureFixture[str], labels: str, gate: str, tmp_path: Path
) -> None:
    args = ("roc", "--labels", labels, "--gate", gate, "--repeats", "30")
    status, out, _ = run(capsys, *args, "--out", str(tmp_path / "roc"))
    assert status == 0 and "AU-ROC" in out
    names = sorted(path.name for path in (tmp_path / "roc").iterdir())
    assert names == ["gate.png", "precision-recall.png", "report.json", "roc.png"]
    status, out, _ = run(capsys, *args, "--json")
    written = json.loads((tmp_path / "roc" / "report.json").read_text())
    read = json.loads(out)
    assert status == 0 and {key: read[key] for key in written} == written
    # it knows which prompts it was trained on
    config = json.loads((Path(gate) / "config.json").read_text())
    assert read["prompts"] == config["training"]["split"]["test"]["prompts"]


def test_training_again_takes_the_place_of_a_head(
    capsys: pytest.CaptureFixture[str], labels: str, gate: str, tmp_path: Path
) -> None:
    copy = shutil.copytree(gate, tmp_path / "copy")
    status, _, _ = run(
        capsys, "train", "--labels", labels, "--out", str(copy), *QUICK, "--tau", "0.7", "--force"
    )
    assert status == 0 and json.loads((copy / "config.json").read_text())["tau"] == 0.7


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "--labels", "/nowhere", "--out", "{tmp}/g"], ["'/nowhere' holds no labels", "gate label"]),
        (["train", "--labels", "{tmp}", "--out", "{tmp}/g"], ["holds no labels"]),
        (["train", "--out", "{tmp}/g"], ["missing option '--labels'"]),
        (["train", "--labels", "{labels}"], ["missing option '--out'"]),
        (["train", "--labels", "{labels}", "--out", "{tmp}/file"], ["is a file"]),
        (["train", "--labels", "{labels}", "--out", "{labels}"], ["holds labels (labels.json)", "another"]),
        (
            ["train", "--labels", "{labels}", "--out", "{tmp}/g", "--width", "8"],
            ["--width 8 is of no use to a linear head"],
        ),
        (
            ["train", "--labels", "{labels}", "--out", "{tmp}/g", "--layers", "2"],
            ["--layers 2 is of no use to a linear head"],
        ),
        (
            ["train", "--labels", "{labels}", "--out", "{tmp}/g", "--preset", "resnet", "--width", "8"],
            ["--width 8 is of no use to a resnet"],
        ),
        (
            ["train", "--labels", "{labels}", "--out", "{tmp}/g", "--mix", "0.3"],
            ["--mix 0.3 is of no use to a linear head which reads no"],
        ),
        (
            ["train", "--labels", "{labels}", "--out", "{tmp}/g", "--preset", "mlp", "--mix", "0.3"],
            ["--mix 0.3 is of no use to an mlp head"],
        ),
        (
            [
                "train",
                "--labels",
                "{labels}",
                "--out",
                "{tmp}/g",
                "--preset",
                "specdec++",
                "--mix",
                "0.3",
                "--classes",
                "draft",
            ],
            ["--mix 0.3 is of no use to a specdec++ head whose classes were chosen"],
        ),
        (["train", "--labels", "/nowhere", "--out", "{gate}"], ["holds a head already", "--force"]),
        (["train", "--labels", "{labels}", "--out", "{tmp}/model", "--force"], ["holds something else"]),
        (["train", "--labels", "{labels}", "--out", "{tmp}/model"], ["holds something else"]),
        (
            ["train", "--labels", "{labels}", "--out", "{tmp}/g", "--label", "ratoi"],
            ["did you mean 'ratio'?"],
        ),
        (
            ["train", "--labels", "{labels}", "--out", "{tmp}/g", "--preset", "lstm"],
            ["unknown preset 'lstm'"],
        ),
        (
            ["train", "--labels", "{labels}", "--out", "{tmp}/g", "--features", "hiden"],
            ["did you mean 'hidden'?"],
        ),
        (
            ["train", "--labels", "{labels}", "--out", "{tmp}/g", "--weight", "x"],
            ["--weight 'x'", "balanced"],
        ),
        (
            ["train", "--labels", "{labels}", "--out", "{tmp}/g", "--classes", "drft"],
            ["did you mean 'draft'?"],
        ),
        (
            [
                "train",
                "--labels",
                "{labels}",
                "--out",
                "{tmp}/g",
                "--label",
                "fuzzy(divergence=tv, threshold=2)",
            ],
            ["is 1 at every position", "choose another label"],
        ),
        (["roc", "--labels", "{labels}", "--gate", "/nowhere/g"], ["no gate directory '/nowhere/g'"]),
        (["roc", "--labels", "{labels}", "--gate", "{builtin}"], ["the labels are of draft 'org/draft'"]),
        (["roc", "--labels", "{labels}", "--gate", "{gate}", "--out", "{tmp}/file"], ["is a file"]),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
    labels: str,
    gate: str,
    tmp_path: Path,
    args: list[str],
    words: list[str],
) -> None:
    from sprinter.models.pair import builtin_paths

    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    places = {"tmp": tmp_path, "labels": labels, "gate": gate, "builtin": builtin_paths()["gate"]}
    status, out, err = run(capsys, *(arg.format(**places) for arg in args))
    assert (status, out) == (2, ""), err
    assert err.startswith("sprinter: error: ") and err.count("\n") == 1
    assert [word for word in words if word not in err] == [], err
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(("drift", "line"), [
    ("1", "chosen for a drift of 1, trusts every token of the held-out prompts (expected drift 0."),
    ("0", "chosen for a drift of 0, trusts no token of the held-out prompts; ask for more (--drift)"),
])  # fmt: skip
def test_a_threshold_that_decides_nothing_is_not_recorded(
    capsys: pytest.CaptureFixture[str], labels: str, tmp_path: Path, drift: str, line: str
) -> None:
    """What to ask for instead is in the table of thresholds; a tau that was given is recorded as it is."""
    args = ("train", "--labels", labels, "--out", str(tmp_path / "g"), *QUICK)
    status, out, err = run(capsys, *args, "--drift", drift)
    assert status == 2 and "What decoding at τ is expected to cost" in out
    assert "no gate was saved: the τ of " in err and line in err and "give the tau itself (--tau)" in err
    assert not (tmp_path / "g").exists()
    status, out, _ = run(capsys, *args, "--tau", {"1": "0", "0": "1"}[drift])
    assert status == 0 and "note: the gate trusts " in out and (tmp_path / "g" / "config.json").is_file()


def test_an_evaluation_on_few_prompts_says_so(
    capsys: pytest.CaptureFixture[str], labels: str, tmp_path: Path
) -> None:
    status, out, _ = run(capsys, "train", "--labels", labels, "--out", str(tmp_path / "g"), *QUICK)
    held_out = json.loads((tmp_path / "g" / "config.json").read_text())["training"]["split"]["test"][
        "prompts"
    ]
    assert 0 < held_out < 20
    caveat = f"AU-ROC and rates rest on {held_out} prompts only: label more, until 20 or more are held out"
    assert status == 0 and f"note: {caveat}" in out and caveat in (tmp_path / "g" / "README.md").read_text()
    many = str(write_labels(tmp_path / "many", make_records(60, 8), data=(
        {"name": "other", "sha256": "c" * 64, "texts": 60},
    )))  # fmt: skip
    status, out, _ = run(capsys, "roc", "--labels", many, "--gate", str(tmp_path / "g"))
    assert status == 0 and "rest on" not in out
    status, out, _ = run(capsys, "roc", "--labels", labels, "--gate", str(tmp_path / "g"), "--json")
    assert json.loads(out)["caveat"] == caveat
