"""``sprinter theory``: simulate, pareto, flops, predict, as JSON and as text; errors are one line and status 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import places, run
from tests.cli.tiny import Places, Run

__all__ = ["places", "run"]  # fixtures
SMALL = ("--texts", "3", "--max-new-tokens", "10")
SIMULATE = (
    "theory",
    "simulate",
    "--states",
    "3",
    "--horizon",
    "5",
    "--runs",
    "10",
    "--drafts",
    "2",
    "--long",
    "0",
)


def test_help_names_the_commands(run: Run) -> None:
    status, out, err = run("theory")
    assert (status, err) == (0, "")
    assert all(name in out for name in ("simulate", "pareto", "flops", "predict"))


def test_simulate(run: Run, tmp_path: Path) -> None:
    status, out, err = run(*SIMULATE, "--out", str(tmp_path / "new"), "--json")
    assert status == 0 and out.count("\n") == 1 and "T=5, M=2" in err
    value = json.loads(out)
    assert value["comparisons"] >= 20 and value["rejections"]["horizon"] == 5 and "longer" not in value
    held = json.loads((tmp_path / "new" / "simulate.json").read_text())
    assert held == {key: each for key, each in value.items() if key != "files"}
    assert {Path(file).name for file in value["files"]} >= {
        "simulate.json",
        "yin-figure-2.png",
        "sprinter-figures-5-6.png",
    }
    assert all(Path(file).is_file() for file in value["files"])
    status, out, _ = run(*SIMULATE)
    assert status == 0 and "closed forms lie within their 99 % interval" in out and "Theorem 3" in out


def test_flops(run: Run) -> None:
    status, out, err = run("theory", "flops", "--json")
    assert (status, err) == (0, "")
    found = {row["model"]: round(row["billions"], 2) for row in json.loads(out)["models"]}
    assert found == {"gpt2": 7.25, "gpt2-xl": 71.78, "gpt-neo-125m": 8.01, "gpt-neo-1.3b": 64.65}
    status, out, _ = run("theory", "flops")
    assert status == 0 and "71.78" in out and "64.66" in out
    status, out, _ = run(
        "theory", "flops", "--target", "gpt2-xl", "--draft", "gpt2", "--gamma", "4", "--json"
    )
    rounds = [row["billions"] for row in json.loads(out)["rounds"]]
    assert rounds[0] == pytest.approx(4 * (71.78 + 7.25) / 20, abs=0.01) and rounds[1] < rounds[0] < rounds[2]


def test_flops_of_methods(run: Run, places: Places) -> None:
    methods = ("-m", "autoregressive", "-m", "sprinter(tau=0.4)")
    status, out, _ = run("theory", "flops", *places.gated, *methods, "--texts", "2", "--json")
    plain, gated = json.loads(out)["methods"]
    assert status == 0 and plain["passes_over_plain"] == plain["tokens_over_plain"] == pytest.approx(1.0)
    assert gated["millions_by_passes"] <= gated["millions_by_tokens"]


def test_predict(run: Run, places: Places) -> None:
    args = (
        "theory",
        "predict",
        *places.gated,
        *SMALL,
        "-m",
        "speculative(gamma=3)",
        "-m",
        "sprinter(tau=0.5)",
    )
    status, out, err = run(*args, "--cost-ratio", "0.2", "--no-best", "--json")
    assert status == 0 and out.count("\n") == 1 and "recording 3 texts by the draft" in err
    value = json.loads(out)
    assert [row["method"].partition("(")[0] for row in value["predictions"]] == ["speculative", "sprinter"]
    assert value["best"] == {} and value["cost_ratio"]["draft"] == 0.2
    assert value["predictions"][0]["lossless"] and value["predictions"][0]["tokens_per_call"] >= 1
    again = run(*args, "--cost-ratio", "0.2", "--no-best", "--json")
    assert json.loads(again.out) == value


def test_predict_on_the_built_in_pair(run: Run) -> None:
    """At the defaults but for the size: the built-in gate reads more than the hidden state."""
    status, out, err = run("theory", "predict", "--texts", "2", "-n", "6", "--no-best", "--json")
    assert status == 0, err
    assert [row["method"].partition("(")[0] for row in json.loads(out)["predictions"]] == [
        "autoregressive", "speculative", "sprinter",
    ]  # fmt: skip
    stages = ("measuring costs", "recording 2 texts by the target", "predicting 3 methods")
    places = [err.index(stage) for stage in stages]
    assert places == sorted(places)


@pytest.mark.parametrize("command", ["predict", "flops"])
@pytest.mark.parametrize("method", ["sprinter", "svip(h=0.4)", "specdec++"])
def test_what_cannot_be_predicted_is_refused_before_the_work(
    run: Run, places: Places, command: str, method: str
) -> None:
    wanted = method.startswith("svip")
    args = (*places.pair, "--texts", "2", *(("-n", "4", "--no-best") if command == "predict" else ()))
    status, out, err = run("theory", command, *args, "-m", method, "--json")
    assert status == (0 if wanted else 2), err
    assert ("recording" in err) is wanted
    if not wanted:
        assert out == "" and err.count("\n") == 1 and f"method {method.partition('(')[0]}" in err


def test_one_draft_for_a_rule_of_several(run: Run, places: Places) -> None:
    args = (*places.pair, *SMALL, "-m", "accept=specinfer,stop=fixed(gamma=3)", "--no-best", "--json")
    status, out, err = run("theory", "predict", *args)
    assert status == 0, err
    assert json.loads(out)["predictions"][0]["lossless"]


def test_predict_names_the_best(run: Run, places: Places, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("ab cd\n\nxyz\n")
    status, out, _ = run(
        "theory", "predict", *places.pair, "--texts", "2", "-n", "5", "--prompts", str(lines)
    )
    assert status == 0 and "The best of each dial" in out and "gamma: speculative(gamma=" in out
    assert "tau:" not in out and "sprinter" not in out  # the pair has no gate


def test_predict_from_labels(run: Run, places: Places, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(
        "\n".join(f"the {word} of a small town by the sea and its old harbour" for word in "abcdefgh") + "\n"
    )
    labels = tmp_path / "labels"
    status, _, err = run(
        "gate", "label", *places.pair, "--data", str(texts), "--out", str(labels), "--max-new-tokens", "6"
    )
    assert status == 0, err
    args = (
        "theory",
        "predict",
        *places.gated,
        "--labels",
        str(labels),
        "--cost-ratio",
        "0.3",
        "--no-best",
        "--json",
    )
    status, out, err = run(*args)
    assert status == 0, err
    assert len(json.loads(out)["predictions"]) == 3
    alone = ("--target", str(places.target), "-m", "autoregressive", "--labels", str(labels))
    status, _, err = run("theory", "predict", *alone, "--cost-ratio", "0.3")
    assert status == 2 and "give --draft" in err and err.count("\n") == 1
    status, _, err = run(*args, "--temperature", "0.5")
    assert status == 2 and "--temperature 1" in err and err.count("\n") == 1


def test_pareto(run: Run, places: Places, tmp_path: Path) -> None:
    args = (
        "theory",
        "pareto",
        *places.gated,
        "--texts",
        "2",
        "--max-new-tokens",
        "4",
        "--out",
        str(tmp_path),
    )
    status, out, err = run(*args, "--json")
    assert status == 0 and "replaying" in err
    value = json.loads(out)
    assert {curve["name"] for curve in value["gates"]} == {"coin", "best prefix-only gate", "sprinter"}
    assert {curve["name"] for curve in value["loop"]} >= {"speculative", "opt", "fuzzy", "sprinter, tail 4"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pareto.json", "pareto.png"]


@pytest.mark.parametrize(("args", "word"), [
    (("flops", "gpt2-xxl"), "did you mean 'gpt2-xl'"),
    (("flops", "--target", "gpt2"), "--draft"),
    (("flops", "--tokens", "0"), "--tokens"),
    (("flops", "--tokens", "-5"), "--tokens"),
    (("flops", "--gamma", "3"), "--gamma 3 has no effect on single models: give --target and --draft"),
    (("flops", "--texts", "3"), "--texts 3 has no effect without a probe: give --method"),
    (("flops", "--target", "gpt2-xl", "--draft", "gpt2", "--texts", "3"), "--texts 3 has no effect on a round"),
    (("flops", "--target", "gpt2-xl", "--draft", "gpt2", "--tokens", "3"), "--tokens 3 has no effect on a round"),
    (("flops", "gpt2", "--target", "gpt2-xl", "--draft", "gpt2"), "MODEL gpt2 has no effect on a round"),
    (("flops", "gpt2", "-m", "speculative"), "MODEL gpt2 has no effect with --method"),
    (("flops", "--context", "9", "-m", "speculative"), "--context 9 has no effect with --method"),
    (("flops", "--tokens", "9", "-m", "speculative"), "--tokens 9 has no effect with --method"),
    (("flops", "--gamma", "9", "-m", "speculative"), "--gamma 9 has no effect with --method"),
    (("predict", "--labels", "x", "--prompts", "y"), "--prompts y has no effect with --labels"),
    (("predict", "--labels", "x", "-n", "5"), "--max-new-tokens 5 has no effect with --labels"),
    (("predict", "--labels", "x", "--texts", "5"), "--texts 5 has no effect with --labels"),
    (("predict", "--max-drift", "0", "--no-best"), "--max-drift 0.0 has no effect with --no-best"),
    (("simulate", "--runs", "2"), "--runs 2 is out of range"),
    (("simulate", "--drafts", "20"), "2 to 8"),
    (("predict", "--cost-ratio", "-1"), "cost ratio"),
    (("predict", "-m", "no-such"), "unknown method"),
    (("predict", "--prompts", "/no/such/file"), "one prompt a line"),
    (("predict", "--labels", "/no/such/folder"), "no labels"),
    (("predict", "--max-drift", "2", "--texts", "2", "-n", "2"), "max-drift|max_drift"),
    (("pareto", "--texts", "0"), "--texts"),
    (("pareto", "--out", "/proc/nowhere/x"), "--out"),
])  # fmt: skip
def test_mistakes_are_one_line(run: Run, places: Places, args: tuple[str, ...], word: str) -> None:
    import re

    pair = places.gated if args[0] in ("predict", "pareto") else []
    status, out, err = run("theory", args[0], *pair, *args[1:])
    assert status == 2 and out == ""
    assert re.search(word, err.splitlines()[-1]), err


def test_figures_without_matplotlib(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(*SIMULATE, "--out", str(tmp_path))
    assert status == 2 and "--no-figures" in err and err.count("\n") == 1
    status, _, _ = run(*SIMULATE, "--out", str(tmp_path), "--no-figures")
    assert status == 0 and [path.name for path in tmp_path.iterdir()] == ["simulate.json"]
    file = tmp_path / "file"
    file.write_text("")
    status, _, err = run(*SIMULATE, "--out", str(file))
    assert status == 2 and "is a file" in err
