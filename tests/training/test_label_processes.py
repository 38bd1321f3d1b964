"""Labelling in real processes: kill -9, the command line, its error messages, its progress bar."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.tiny import save_tiny
from tests.training.labelling import words

from sprinter.cli import main
from sprinter.training.records import INFO, read_info, read_records, shard_paths

SRC = Path(__file__).resolve().parents[2] / "src"
OPTIONS = ["--max-new-tokens", "6", "--prompt-tokens", "20", "--batch-size", "4"]

FORKER = """
import os, sys
from sprinter import load_pair
from sprinter.training.label_run import label
from sprinter.training.label_settings import LabelSettings
target, draft, data, out = sys.argv[1:]
pair = load_pair(target, draft=draft)
settings = LabelSettings(new_tokens=6, prompt_tokens=20, batch_size=4)
for _ in sys.stdin:
    child = os.fork()  # one thread so far; loading the libraries each time would take minutes
    if child == 0:
        label(pair, [data], out, settings)
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a tiny pair; its directories."""
    root = tmp_path_factory.mktemp("pair")
    save_tiny(root / "target", seed=1)
    save_tiny(root / "draft", seed=2, layers=1)
    return ["--target", str(root / "target"), "--draft", str(root / "draft")]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("".join(words(30, seed) + "\n" for seed in range(120)))
    return file


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(["gate", "label", *args])
    return status, *capsys.readouterr()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX")
@pytest.mark.parametrize("times", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_again_and_again_at_random_moments(
    pair: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], times: int
) -> None:
    assert run(capsys, "--data", str(data), "--out", str(tmp_path / "whole"), *pair, *OPTIONS)[0] == 0
    whole, out = read_info(tmp_path / "whole"), tmp_path / "out"
    assert whole.shards == 30
    chance = random.Random(0)
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", FORKER, pair[1], pair[3], str(data), str(out)]
    kept, killed = [0], 0
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as forker:
        assert forker.stdin is not None and forker.stdout is not None
        while killed < times:
            forker.stdin.write("go\n")
            forker.stdin.flush()
            child = int(forker.stdout.readline())
            # Two shards further at most, then at any moment of the next step: the kills do not reach the end.
            wanted = kept[-1] + chance.randrange(3)
            while len(shard_paths(out)) < wanted:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.03)
            os.kill(child, signal.SIGKILL)
            killed += int(forker.stdout.readline()) == signal.SIGKILL
            assert read_info(out).dataset_hash is None if (out / INFO).is_file() else True
            kept.append(len(shard_paths(out)))
        forker.stdin.close()
    assert kept == sorted(kept) and 0 < kept[-1] < 30, kept
    status, told, _ = run(capsys, "--data", str(data), "--out", str(out), *pair, *OPTIONS, "--json")
    assert status == 0 and json.loads(told)["resumed_shards"] == kept[-1]
    assert json.loads(told)["dataset_hash"] == whole.dataset_hash
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert len(list(out.iterdir())) == 31, "no part file is left"
    records = read_records(out)
    assert len({(int(p), int(s)) for p, s in zip(records.prompt, records.step, strict=True)}) == len(records)


def test_the_command(pair: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text(
        json.dumps({"body": {"text": words(40)}}) + "\n" + json.dumps({"body": {"text": "short"}}) + "\n"
    )
    place = str(tmp_path / "out")
    args = ["--data", str(more), str(more), "--field", "body.text", "--out", place, *pair, *OPTIONS]
    status, out, err = run(capsys, *args, "--json")
    assert (status, out.count("\n")) == (0, 1)
    assert re.match(r"100/100: 2 prompts, 12 positions, \d+ tokens/s\nnote: 2 prompts were labelled", err)
    told = json.loads(out)
    assert told["positions"] == 12 and told["prompts"] == 2 and told["shards"] == 1
    assert told["skipped"] == {"too_long": 0, "too_short": 2, "empty": 0} and told["tokens"] > 12
    assert told["tokens_per_s"] > 0 and told["seconds"] > 0 and told["out"] == place
    assert told["dataset_hash"] == read_info(place).dataset_hash
    status, out, err = run(capsys, *args)
    assert status == 0 and err.startswith("note: 2 prompts were labelled")
    assert out.startswith(f"12 positions of 2 prompts in {place}; skipped: 2 too short; ")
    assert "nothing was left to do" in out


def test_wrapped_text_says_how_it_was_split(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of six words: each too short by itself; two paragraphs are texts, and so is the file."""
    wrapped = tmp_path / "wrapped.txt"
    paragraphs = ["\n".join(words(6, 10 * i + j) for j in range(6)) for i in range(2)]
    wrapped.write_text("\n\n".join(paragraphs) + "\n")
    args = ["--data", str(wrapped), "--out", str(tmp_path / "o"), *pair, *OPTIONS, "--prompt-tokens", "8"]
    args += ["--max-new-tokens", "24"]
    status, _, err = run(capsys, *args)
    assert status == 2 and "none of 12 texts" in err and "must go on for 24 tokens after its prompt" in err
    assert (
        "each line of a .txt file was one text, for wrapped text give --split blank-lines or --split file"
        in err
    )
    status, out, err = run(capsys, *args, "--split", "blank-lines", "--json")
    told = json.loads(out)
    assert (status, told["prompts"], told["split"]) == (0, 2, "blank-lines")
    wrapped.write_text(wrapped.read_text() + words(60) + "\n")  # one line is long enough
    status, out, err = run(capsys, *args, "--restart")
    assert status == 0 and "1 prompts" in out and err.count("\nnote: ") == 2
    assert "12 of 13 texts were too short" in err and "--split blank-lines" in err and "30 at least" in err


MISTAKES = [
    (["--data", "{tmp}/a.jsonl", "--out", "{tmp}/o", "--split", "file"], ["--split file", "leave it out"]),
    ([], ["missing option", "--data", "gate label --help"]),
    (["--data", "{data}"], ["missing option", "--out"]),
    (["--data", "{tmp}/none.txt", "--out", "{tmp}/o"], ["there is no file", "check the path"]),
    (["--data", "{tmp}/empty.txt", "--out", "{tmp}/o"], ["holds no text"]),
    (["--data", "{tmp}/bytes.txt", "--out", "{tmp}/o"], ["not valid UTF-8", "0xff", "line 1"]),
    (["--data", "{tmp}/a.csv", "--out", "{tmp}/o"], ["is of no known kind", ".jsonl"]),
    (["--data", "{data}", "--out", "{data}"], ["is a file", "give a directory"]),
    (["--data", "{data}", "--out", "{tmp}/o", "--prompt-share", "2"], ["--prompt-share 2.0", "[0, 1]"]),
    (["--data", "{data}", "--out", "{tmp}/o", "--max-new-tokens", "99999"], ["--max-new-tokens 99999", "give 16383"]),
    (["--data", "{data}", "--out", "{tmp}/o", "--max-new-tokens", "500"], ["none of 120 texts", "fewer new_tokens"]),
    (["--data", "{data}", "--out", "{tmp}/o", "--engine", "spark"], ["--engine", "'local', 'ray'"]),
]  # fmt: skip


def test_mistakes_end_with_status_2_and_one_line(
    pair: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\n")
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    for args, said in MISTAKES:
        filled = [arg.format(data=data, tmp=tmp_path) for arg in args]
        status, out, err = run(capsys, *filled, *pair, "--json")
        assert (status, out) == (2, ""), args
        assert err.startswith("sprinter: error: ") and err.count("\n") == 1, err
        assert all(word in err for word in said), err
    assert not list((tmp_path / "o").glob("*"))


def test_gate_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("label", "train", "roc"))


def test_shards_are_small_where_none_are_asked_for(
    pair: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels of earlier runs are continued in steps of their own size."""
    args = [
        "--data",
        str(data),
        "--out",
        str(tmp_path / "out"),
        *pair,
        "--max-new-tokens",
        "6",
        "--limit",
        "20",
        "--json",
    ]
    status, out, _ = run(capsys, *args)
    assert (status, json.loads(out)["shards"]) == (0, 2)
    status, out, _ = run(capsys, *args, "--restart", "--batch-size", "5")
    assert (status, json.loads(out)["shards"]) == (0, 4)
    (tmp_path / "out" / "shard-000003.safetensors").unlink()
    status, out, _ = run(capsys, *args)
    assert (status, json.loads(out)["shards"], json.loads(out)["resumed_shards"]) == (0, 4, 3)
