"""``generate --chat``, ``--system`` and ``--messages``, alone and for many prompts; chat options of other commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.tiny import Places, Run

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '; ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ name | default('assistant') }}{{ ': ' }}{% endif %}"
)
COMMON = ("-m", "speculative(gamma=3)", "-n", "6")
TALK = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "ef"},
]


@pytest.fixture(scope="module")
def talking(places: Places, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The tiny pair with a chat template."""
    target = shutil.copytree(places.target, tmp_path_factory.mktemp("chat") / "target")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return ("--target", str(target), "--draft", str(places.draft))


def record(run: Run, *args: str) -> dict[str, Any]:
    status, out, err = run("generate", *args, *COMMON, "--json")
    assert status == 0, err
    return dict(json.loads(out))


def test_a_prompt_in_chat_form(run: Run, talking: tuple[str, ...], tmp_path: Path) -> None:
    found = record(run, "ab", "--chat", "--system", "be", *talking)
    assert found["prompt"]["text"] == "system: be; user: ab; assistant: "
    assert found["messages"] == [{"role": "system", "content": "be"}, {"role": "user", "content": "ab"}]
    plain = record(run, "system: be; user: ab; assistant: ", *talking)
    assert plain["token_ids"] == found["token_ids"] and plain["messages"] is None
    for value in (TALK, {"messages": TALK}):
        file = tmp_path / "talk.json"
        file.write_text(json.dumps(value))
        found = record(run, "--messages", str(file), *talking)
        assert found["prompt"]["text"] == "user: ab; assistant: cd; user: ef; assistant: "
    status, out, _ = run("generate", "ab", "--chat", *COMMON, *talking)
    assert status == 0 and "user:" not in out


def test_arguments_of_the_template(run: Run, talking: tuple[str, ...], tmp_path: Path) -> None:
    found = record(run, "ab", "--chat", "--chat-template-kwargs", '{"name": "bot"}', *talking)
    assert found["prompt"]["text"] == "user: ab; bot: "
    assert found["chat_template_kwargs"] == {"name": "bot"}


def test_a_file_of_prompts_in_chat_form(run: Run, talking: tuple[str, ...], tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "ab"},
        {"messages": TALK},
        {"messages": [{"role": "cook", "content": "x"}]},
        {"messages": "x"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = (
        "generate",
        "--prompts",
        str(file),
        "--chat",
        "--system",
        "be",
        *talking,
        *COMMON,
        "--out",
        str(out),
    )
    status, _, err = run(*args)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert status == 1 and "2 of 4 prompts have no text" in err
    assert rows[0]["prompt"]["text"] == "system: be; user: ab; assistant: "
    assert rows[1]["messages"] == [{"role": "system", "content": "be"}, *TALK]
    assert "'cook'" in rows[2]["error"] and rows[2]["messages"][1]["role"] == "cook"
    assert "is not a list of messages" in rows[3]["error"]
    status, _, err = run(*[arg for arg in args if arg not in ("--system", "be")])
    assert status == 2 and "holds results with another system" in err
    # without --chat a text is text, and messages are messages
    found = [
        json.loads(line)
        for line in run("generate", "--prompts", str(file), *talking, *COMMON).out.splitlines()
    ]
    assert found[0]["prompt"]["text"] == "ab" and found[1]["messages"] == TALK


def test_bad_chat_options_are_one_line(
    run: Run, places: Places, talking: tuple[str, ...], tmp_path: Path
) -> None:
    talk, other, broken = (tmp_path / name for name in ("talk.json", "other.json", "broken.json"))
    talk.write_text(json.dumps(TALK))
    other.write_text('{"text": "ab"}')
    broken.write_text('[{"role": ')
    for args, message in [
        (("ab", "--messages", str(talk)), "--messages and a prompt exclude each other"),
        (("--messages", str(talk), "--prompts", str(talk)), "--messages and --prompts exclude each other"),
        (("ab", "--system", "be"), "--system goes with --chat or --messages"),
        (("--messages", str(other)), "holds no messages"),
        (("--messages", str(broken)), "is not JSON"),
        (("--messages", str(tmp_path / "none.json")), "cannot read --messages"),
        (("ab", "--chat", *places.pair), "has no chat template"),
        (("--prompts", str(places.root / "texts.txt"), "--chat", *places.pair), "has no chat template"),
    ]:
        status, out, err = run("generate", *args, *(() if "--target" in args else talking))
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1, (args, err)


def test_labels_in_chat_form(run: Run, talking: tuple[str, ...], tmp_path: Path) -> None:
    file, out = tmp_path / "questions.jsonl", tmp_path / "labels"
    file.write_text('{"question": "ab", "answer": "cd"}\n{"messages": [{"role": "user", "content": "ef"}]}\n')
    args = (
        "gate",
        "label",
        "--data",
        str(file),
        "--out",
        str(out),
        *talking,
        "--max-new-tokens",
        "4",
        "--chat",
    )
    status, printed, err = run(*args, "--classes", "target, draft", "--json")
    assert status == 0, err
    assert json.loads(printed)["prompts"] == 2
    settings = json.loads((out / "labels.json").read_text())["settings"]
    assert settings["chat"] is True and settings["classes"] == ["target", "draft"]
    status, _, err = run(*args, "--classes", "targets", "--restart")
    assert status == 2 and "targets" in err
