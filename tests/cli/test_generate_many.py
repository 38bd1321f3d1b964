"""``sprinter generate --prompts``: lines in order, bad prompts told, runs that go on where they were killed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.tiny import CONTEXT, Places, Run

from sprinter.cli import generate_many as many
from sprinter.decode.costs import PassCosts
from sprinter.heads.artifact import load_head, save_head

COMMON = ("-m", "speculative(gamma=3)", "-n", "8")


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("ab cd\n\nxyz\nthe sea\nhills \n")
    return file


def test_one_object_a_line_in_the_order_of_the_file(run: Run, places: Places, prompts: Path) -> None:
    args = ("generate", "--prompts", str(prompts), *places.pair, *COMMON, "--seed", "5", "--rows", "3")
    status, out, err = run(*args)
    assert status == 0, err
    found = objects(out)
    assert [(row["index"], row["line"], row["seed"]) for row in found] == [
        (0, 1, 5),
        (1, 3, 6),
        (2, 4, 7),
        (3, 5, 8),
    ]
    assert [row["prompt"]["text"] for row in found] == ["ab cd", "xyz", "the sea", "hills "]
    # each is what the command gives for that prompt alone
    alone = run("generate", "the sea", *places.pair, *COMMON, "--seed", "7", "--json")
    assert json.loads(alone.out)["token_ids"] == found[2]["token_ids"]
    assert run(*args[:-1], "2").out.count("\n") == 4


def test_fields_of_records_and_prompts_that_are_bad(run: Run, places: Places, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"q": {"text": "ab"}},
        {"other": 1},
        {"q": {"text": "y" * CONTEXT}},
        {"q": {"text": ""}},
        {"q": {"text": "z"}},
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"q": \n')
    status, out, err = run("generate", "--prompts", str(file), "--field", "q.text", *places.pair, *COMMON)
    found = objects(out)
    assert status == 1 and "4 of 6 prompts have no text" in err
    assert [row["index"] for row in found if "error" in row] == [1, 2, 3, 5]
    words = ("field 'q.text'", "exceed the context", "empty prompt", "line 6 is not a JSON object")
    for row, word in zip((row for row in found if "error" in row), words, strict=True):
        assert word in row["error"] and "\n" not in row["error"]
    assert all("text" in found[i] and "error" not in found[i] for i in (0, 4))


def test_a_run_goes_on_where_it_was_killed(
    run: Run, places: Places, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "texts.jsonl"
    args = ("generate", "--prompts", str(prompts), *places.pair, *COMMON, "--rows", "1", "--out", str(out))
    whole = objects(run(*args[:-2]).out)
    generate, calls = many._generate, []

    def killed(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(*given)

    monkeypatch.setattr(many, "_generate", killed)
    assert run(*args).status == 130
    assert len(objects(out.read_text())) == 2, "what was done is written"
    with open(out, "a") as file:
        file.write('{"index": 2, "te')  # a kill while a line was written
    status, printed, err = run(*args, "--json")
    assert status == 0, err
    assert json.loads(printed) == {"out": str(out), "prompts": 4, "resumed": 2, "failed": 0}
    assert [row["token_ids"] for row in objects(out.read_text())] == [row["token_ids"] for row in whole]
    before = len(calls)
    assert run(*args).status == 0 and len(calls) == before, "nothing is left to do"


def test_results_are_not_mixed(run: Run, places: Places, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    args = ["generate", "--prompts", str(prompts), *places.pair, *COMMON, "--out", str(out)]
    assert run(*args).status == 0
    held = out.read_text()
    for other, word in ((("--seed", "1"), "another seed"), (("-t", "0.5"), "another temperature"),
                        (("--dtype", "float64"), "another models")):  # fmt: skip
        status, _, err = run(*args, *other)
        assert status == 2 and word in err and "--restart" in err and err.count("\n") == 1
    assert out.read_text() == held
    assert run(*args, "--seed", "1", "--restart").status == 0
    assert objects(out.read_text())[0]["seed"] == 1
    notes = tmp_path / "notes.txt"
    notes.write_text("mine\n")
    status, _, err = run(*args[:-1], str(notes))
    assert status == 2 and "not a file of results" in err and notes.read_text() == "mine\n"


@pytest.mark.parametrize("method", [(), ("-m", "auto")])
def test_a_run_goes_on_with_the_costs_of_its_record(
    run: Run,
    places: Places,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: tuple[str, ...],
) -> None:
    """Costs that are not kept in the cache directory are measured anew, and never the same."""
    out = tmp_path / "texts.jsonl"
    args = ("generate", "--prompts", str(prompts), *places.pair, *method, "-n", "4", "--out", str(out))
    for cost in (0.1, 0.2):
        costs = PassCosts(((1, 1.0), (9, 1.0)), ((1, cost), (9, cost)), shared=((4, 1.0, cost),))
        monkeypatch.setattr("sprinter.engine.runtime.pass_costs", lambda *_, costs=costs: costs)
        monkeypatch.setattr("sprinter.engine.runtime.shared_costs", lambda *_, costs=costs: costs)
        status, _, err = run(*args)
        assert status == 0, err
        rows = objects(out.read_text())
        assert len({row["method"] for row in rows}) == 1 and "step=0.1," in rows[0]["method"]
        out.write_text(json.dumps(rows[0]) + "\n")
    about = json.loads((tmp_path / "texts.jsonl.run.json").read_text())
    (tmp_path / "texts.jsonl.run.json").write_text(json.dumps({**about, "costs": {"pass_costs": 1}}))
    status, _, err = run(*args)
    assert status == 2 and "are damaged" in err and err.count("\n") == 1


@pytest.mark.parametrize("other", ["weights", "tau", "target", "version"])
def test_results_of_other_contents_under_the_same_name_are_not_mixed(
    run: Run, places: Places, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    gate, target, out = tmp_path / "gg", tmp_path / "target", tmp_path / "mix.jsonl"
    shutil.copytree(places.gate, gate)
    shutil.copytree(places.target, target)
    args = ["generate", "--prompts", str(prompts), "--target", str(target), "--draft", str(places.draft)]
    args += ["--gate", str(gate), "-m", "sprinter", "-n", "4", "--out", str(out)]
    assert run(*args).status == 0
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:2]))  # ended half way
    held, word = out.read_text(), "gate"
    if other == "version":
        monkeypatch.setattr("sprinter.engine.record.__version__", "0.0")
        word = "sprinter version"
    elif other == "target":
        weights, word = target / "model.safetensors", "target"
        os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    else:
        old = load_head(gate)
        if other == "weights":
            old.network.weight.data[0, -1] += 1
        else:
            old.config = replace(old.config, tau=0.75)
        save_head(old, gate, "# Another gate\n")
    for _ in range(2):
        status, _, err = run(*args)
        assert status == 2 and f"with another {word}:" in err and "--restart" in err and err.count("\n") == 1
        assert out.read_text() == held
    assert run(*args, "--restart").status == 0 and len(objects(out.read_text())) == 4
    assert run(*args).status == 0, "nothing differs now"


@pytest.mark.parametrize(("args", "word"), [
    (("x", "--out", "o"), "--out goes with --prompts"),
    (("x", "--rows", "2"), "--rows goes with --prompts"),
    (("x", "--prompts", "{file}"), "exclude each other"),
    ((), "missing argument 'PROMPT|-'"),
    (("--prompts", "{file}", "--json"), "go with --out"),
    (("--prompts", "{file}", "--field", "a"), "--field a is of .jsonl files"),
    (("--prompts", "/no/such.txt"), "cannot read --prompts"),
    (("--prompts", "/no/such.csv"), "of no known kind"),
    (("--prompts", "{empty}"), "is empty"),
    (("--prompts", "{file}", "-m", "sprinter"), "needs a gate"),
    (("--prompts", "{file}", "-n", "99999"), "exceed the context"),
    (("--prompts", "{file}", "--out", "/proc/nowhere/x"), "cannot write --out"),
    (("--prompts", "{file}", "--out", "{folder}"), "is a directory"),
    (("--prompts", "{file}", "--out", "{pipe}"), "is not a regular file"),
    (("--prompts", "{file}", "--out", "/dev/null"), "is not a regular file"),
    (("--prompts", "{file}", "--rows", "100000000"), "--rows 100000000 cannot be had: the caches"),
])  # fmt: skip
def test_mistakes_are_one_line(
    run: Run, places: Places, prompts: Path, tmp_path: Path, args: tuple[str, ...], word: str
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    os.mkfifo(pipe := tmp_path / "pipe")
    named = [arg.format(file=prompts, empty=empty, folder=tmp_path, pipe=pipe) for arg in args]
    status, out, err = run("generate", *named, *places.pair)
    assert status == 2 and out == "" and err.count("\n") == 1 and word in err, err
    assert not list(tmp_path.glob("*.run.json")) and not Path("/dev/null.run.json").exists()


def test_progress_ends_with_its_last_line(run: Run, places: Places, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    args = ("generate", "--prompts", str(prompts), *places.pair, *COMMON, "--rows", "1", "--out", str(out))
    lines = run(*args).err.splitlines()
    assert lines[0].startswith("1/4") and lines[-1].startswith("4/4")


def test_a_line_that_failed_shows_its_text_alone(run: Run, places: Places, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"text": "ab"}, {"text": "y" * CONTEXT}, {"other": 1}]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = objects(run("generate", "--prompts", str(file), *places.pair, *COMMON).out)
    assert set(found[0]["prompt"]) == {"text", "token_ids"}
    assert set(found[1]["prompt"]) == {"text"} and "prompt" not in found[2]
