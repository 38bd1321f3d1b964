"""The bench on the command line: what it prints and leaves, and mistakes in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.tiny import Places, Run

from sprinter.cli import progress

PROMPTS = '{"prompt": "The river"}\n{"prompt": "A <b>house</b>"}\n'


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text(PROMPTS)
    Path("other.jsonl").write_text(PROMPTS)
    Path("file").write_text("x")
    return "p.jsonl"


def options(places: Places, *more: str) -> list[str]:
    return ["bench", "-n", "3", "--no-analysis", "-o", "out", *places.pair, "-s", "p.jsonl", *more]


def test_a_run_its_report_and_a_comparison(run: Run, places: Places, prompts: str) -> None:
    arms = ["-a", "autoregressive", "-a", "svip as [/red] <i>x</i>", "-a", "svip as a/b", "-a", "svip as a:b"]
    first = run(*options(places, *arms))
    assert first.status == 0 and "[/red] <i>x</i>" in first.out and "wrote out" in first.out
    assert len(list(Path("out/spec-bench").iterdir())) == 4
    page = Path("out/report.html").read_text()
    assert "<i>x</i>" not in page and "[/red]" in page
    again = run(*options(places, *arms, "-a", "lookup", "--json"))
    assert again.status == 0 and again.out.count("\n") == 1
    told = json.loads(again.out)
    assert {arm["name"]: arm["status"] for arm in told["arms"]} == dict.fromkeys(
        ["autoregressive", "[/red] <i>x</i>", "a/b", "a:b", "lookup"], "ok"
    )
    assert told["suites"][0]["asked"] == 2
    assert run("bench", "report", "out", "-o", "page.html").status == 0
    same = run("bench", "compare", "out", "out", "--json")
    assert same.status == 0 and json.loads(same.out)["regression"] is False
    assert "0 worse" in run("bench", "compare", "out", "out", "--all").out


def test_times_of_another_machine_are_not_mixed_in(
    run: Run, places: Places, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*options(places, "-a", "autoregressive")).status == 0
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    status, _, err = run(*options(places, "-a", "autoregressive"))
    assert status == 2 and "another machine" in err


def test_options_from_a_file_give_way_to_those_of_the_command_line(
    run: Run, places: Places, prompts: str
) -> None:
    Path("config.toml").write_text(
        'suite = "p.jsonl:2"\narm = ["autoregressive", "lookup"]\nmax-new-tokens = 3\ntemperature = [0.0]\n'
        'analysis = false\nlikelihood = false\nout = "elsewhere"\n'
    )
    command = ["bench", "--config", "config.toml", *places.pair, "-a", "autoregressive", "-o", "out"]
    assert run(*command).status == 0 and not Path("elsewhere").exists()
    results = json.loads(Path("out/results.json").read_text())
    assert [arm["name"] for arm in results["arms"]] == ["autoregressive"]
    assert results["settings"]["temperatures"] == [0.0] and results["settings"]["new_tokens"] == 3
    assert len(results["rows"]) == 2 and "perplexity" not in results["rows"][0]["quality"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("suites = 1", "did you mean 'suite'?"),
        ("suite = [", "give a TOML file"),
        ('out = ["a"]', "out in --config 'config.toml' is ['a']: give one value"),
        ("[suite]\nname = 1", "suite in --config 'config.toml' is {'name': 1}: give one value"),
        (None, "cannot read --config"),
    ],
)
def test_a_file_of_options_that_cannot_be_read(
    run: Run, prompts: str, text: str | None, message: str
) -> None:
    if text is not None:
        Path("config.toml").write_text(text)
    status, _, err = run("bench", "--config", "config.toml")
    assert status == 2 and message in err and len(err.splitlines()) == 1


def test_a_run_names_its_sessions(run: Run, places: Places, prompts: str) -> None:
    for arms in (["-a", "autoregressive"], ["-a", "autoregressive", "-a", "lookup"]):
        assert run(*options(places, *arms)).status == 0
    results = json.loads(Path("out/results.json").read_text())
    first, second = results["sessions"]
    assert results["run"] == json.loads(Path("out/run.json").read_text())["id"]
    assert first["ended"] and first["environment"]["isa"] == second["environment"]["isa"]
    assert first["load_at_end"] is not None and all(row["load"] is not None for row in results["rows"])


MISTAKES = [
    ("limit of another script", ["-s", "p.jsonl:²"], ["p.jsonl:²"]),
    ("two signs", ["-s", "p.jsonl:--3"], ["p.jsonl:--3"]),
    ("no prompt", ["-s", "other.jsonl:0"], ["--suite other.jsonl:0", "1 or more"]),
    ("suite twice", ["-s", "p.jsonl:1"], ["two of the suites", "'p'", "give it once"]),
    ("arm twice", ["-a", "svip", "-a", "svip"], ["two arms are called 'svip'"]),
    ("temperature twice", ["-t", "1", "-t", "1"], ["--temperature 1, 1", "each once"]),
    ("unknown base", ["-a", "svip", "--base", "plain"], ["--base plain is not an arm", "svip"]),
    ("repeats", ["--repeats", "0"], ["--repeats 0", ">= 1"]),
    ("no price", ["--judge", "http://x", "--judge-model", "m", "--judge-price", "nan", "1"], ["--judge-price nan"]),
    ("price of nothing", ["--judge-price", "1", "1"], ["offline judge costs nothing"]),
    ("out is a file", ["-o", "file"], ["'file' is a file", "directory"]),
    ("out in a file", ["-o", "file/x"], ["cannot write 'file/x'"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "words"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_a_mistake_is_one_line(
    run: Run, places: Places, prompts: str, args: list[str], words: list[str]
) -> None:
    status, out, err = run(*options(places, *args))
    assert (status, out) == (2, "")
    assert err.startswith("sprinter: error: ") and err.count("\n") == 1
    assert [word for word in words if word not in err] == [], err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-s", "nosuch"], "unknown suite 'nosuch'"),
        (["-s", "gsm8k", "--data", "nowhere"], "--data nowhere is not a directory"),
        (["-s", "file.jsonl"], "file.jsonl"),
    ],
)
def test_suites_are_checked_before_models_are_loaded(
    run: Run, prompts: str, args: list[str], message: str
) -> None:
    status, _, err = run("bench", "--target", "/nowhere/target", *args)
    assert status == 2 and message in err and "/nowhere" not in err


def test_a_report_that_cannot_be_written(run: Run, places: Places, prompts: str) -> None:
    assert run(*options(places, "-a", "autoregressive")).status == 0
    status, _, err = run("bench", "report", "out", "-o", "file/page.html")
    assert status == 2 and "cannot write 'file/page.html'" in err


def test_one_prompt_is_told_without_an_interval(run: Run, places: Places, prompts: str) -> None:
    """On the terminal, in results.json, and on the page."""
    args = [
        arg.replace("p.jsonl", "p.jsonl:1")
        for arg in options(places, "-a", "autoregressive", "-a", "draft-only")
    ]
    ended = run(*args)
    assert ended.status == 0 and "(n=1)" in ended.out and not re.search(r"\d \[\d", ended.out)
    (lossy,) = (
        s for s in json.loads(Path("out/results.json").read_text())["summary"] if s["arm"] != "autoregressive"
    )
    assert lossy["speed_over"]["autoregressive"][1:] == [None, None] == lossy["mean_drift"][1:]
    assert run("bench", "report", "out", "-o", "page.html").status == 0
    told = run("bench", "compare", "out", "out", "--all", "--json")
    assert told.status == 0 and {change["verdict"] for change in json.loads(told.out)["changes"]} == {"told"}


def test_runs_of_two_pairs_are_not_compared(run: Run, places: Places, prompts: str) -> None:
    assert run(*options(places, "-a", "autoregressive")).status == 0
    results = json.loads(Path("out/results.json").read_text())
    results["pair"]["target"] |= {"name": "another", "sha256": "0" * 64}
    Path("other.json").write_text(json.dumps(results))
    status, out, err = run("bench", "compare", "out", "other.json", "--json")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "differ in the target (target, another)" in err and "--across" in err
    assert run("bench", "compare", "out", "other.json", "--across").status == 0


def test_the_time_left_is_that_of_the_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 0.0, 100.0, 200.0, 300.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    meter = progress.Progress()
    for done, wanted in ((1, 2), (2, 2), (1, 8), (2, 8)):
        meter("a", done, wanted)
    assert capsys.readouterr().err.splitlines()[-1] == "2/8, about 10.0 min left: a"
