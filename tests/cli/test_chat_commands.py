"""The commands of a chat, the loop around them, saved files, and what is shown where."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from tests.cli.chats import Script, chat_pair, new_chat, nothing, played
from tests.cli.tiny import Places

from sprinter.cli.chat import converse, read_entry
from sprinter.cli.chat_commands import COMMANDS, Commands, option_value
from sprinter.cli.pages import harmless
from sprinter.engine.options import GenerationOptions
from sprinter.engine.pair import Pair
from sprinter.engine.stream import Stream
from sprinter.errors import UserError

SGR = re.compile(r"\x1b\[([0-9;]*)m")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pair(places: Places) -> Pair:
    return chat_pair(places)


@pytest.fixture(scope="module")
def ungated(places: Places) -> Pair:
    return chat_pair(places, gate=False)


def test_help_lists_every_command_and_the_keys(pair: Pair, capsys: Capture) -> None:
    assert played(new_chat(pair), "/help") == 0
    said = capsys.readouterr().err
    assert all(usage in said and about in said for usage, about in COMMANDS.values())
    assert '"""' in said and "Ctrl-C" in said


def test_answers_are_alone_on_standard_output(pair: Pair, capsys: Capture) -> None:
    chat = new_chat(pair)
    assert played(chat, "Hello", "/set", "", "  ", "Again", typed=False) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{turn.answer}\n" for turn in chat.turns) and len(chat.turns) == 2
    assert all(turn.meter in err.splitlines() for turn in chat.turns)
    assert "the answer was cut off: max_new_tokens is 8 (/set max_new_tokens 16)" in err
    assert "\x1b" not in out + err


def test_method_is_checked_and_the_old_one_kept(ungated: Pair, capsys: Capture) -> None:
    chat = new_chat(ungated)
    status = played(chat, "/method svip", "/method sprinter", "/method nothing(", "/method", typed=False)
    said = capsys.readouterr().err.splitlines()
    assert status == 2 and said[0] == said[3] == "method svip(h=0.3, c=0.15)"
    assert said[1].startswith("error: ") and "needs a gate" in said[1] and said[2].startswith("error: ")


def test_set_changes_and_lists_options(pair: Pair, capsys: Capture) -> None:
    chat = new_chat(pair)
    lines = (
        "/set temperature 0.7", "/set top_k=5", "/set stop User:", '/set stop_token_ids [3, 4]', "/set meter complete",
        "/set max_new_tokens none", "/set method speculative(gamma=2)", "/set seed",
    )  # fmt: skip
    assert played(chat, *lines, typed=False) == 0
    assert chat.options == GenerationOptions(
        temperature=0.7, top_k=5, stop="User:", stop_token_ids=[3, 4], meter="complete", max_new_tokens=None,
        method="speculative(gamma=2)",
    )  # fmt: skip
    assert capsys.readouterr().err.splitlines()[-1] == "seed  0"
    assert played(chat, "/set") == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().err.split("\n") if line)
    assert listed.keys() == chat.options.to_dict().keys()
    assert {name: option_value(value) for name, value in listed.items()} == chat.options.to_dict()


@pytest.mark.parametrize(("line", "said"), [
    ("/set temperature hot", "temperature='hot' is not a number"),
    ("/set temperature NaN", "temperature='NaN' is not a number"),
    ("/set temprature 1", "did you mean 'temperature'?"),
    ("/set sampling 1", "/set takes one of method, "),
    ("/set max_new_tokens 1.5", "max_new_tokens=1.5 is not a whole number"),
    ("/set seed true", "seed=True is not a whole number"),
    ("/set rules 3", "is not a state of rules"),
    ("/", "there is no command /: see /help; // begins a message that starts with /"),
    ("/usr/bin", "there is no command /usr/bin: see /help"),
    ("/reset now", "/reset takes nothing after it"),
    ("/save", "/save needs a file: give /save FILE"),
    ("/save!", "/save! needs a file: give /save! FILE"),
    ("/load", "/load needs a file: give /load FILE"),
    ("/drop two", "/drop two is not a number of turns: give /drop 2"),
    ("/drop", "no turns yet"),
    ("/undo", "no turns yet"),
    ("/retry", "no turns yet"),
    ("/system forbidden", "this is forbidden"),
])  # fmt: skip
def test_mistakes_are_one_line_and_change_nothing(pair: Pair, capsys: Capture, line: str, said: str) -> None:
    chat = new_chat(pair, "Be brief")
    before = chat.options
    assert played(chat, line, typed=False) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and said in err
    assert chat.options is before and chat.system == "Be brief"
    assert played(chat, line) == 0  # a person has read it


def test_turns_are_shown_and_removed(pair: Pair, capsys: Capture) -> None:
    chat = new_chat(pair)
    assert played(chat, "/system Be brief", "One", "Two", "Three", "/drop", "/undo", "/retry") == 0
    assert [turn.user for turn in chat.turns] == ["Two"]
    assert "the conversation has 2 turns\nthe conversation has 1 turn\n" in capsys.readouterr().err
    shown = f"system prompt: Be brief\n1> Two\n{harmless(chat.turns[0].answer)}\n{chat.turns[0].meter}\n"
    assert played(chat, "/history", '/system ""', "/system", "/reset", "/history", "/quit", "not read") == 0
    err = capsys.readouterr().err
    assert err.startswith(shown) and "no system prompt\nno system prompt\n" in err
    assert err.endswith("the conversation has no turns\nno turns yet\n") and chat.turns == ()


def test_a_saved_chat_goes_on_as_if_it_had_not_been_left(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    chat, file = new_chat(pair, "Be brief", method="svip", temperature=0.9), tmp_path / "chat.json"
    assert played(chat, "One", "Two", f"/save {file}", typed=False) == 0
    value = json.loads(file.read_text())
    assert value["messages"] == chat.to_dict()["messages"] and value["options"] == chat.options.to_dict()
    assert [answer["stats"]["new_tokens"] for answer in value["answers"]] == [8, 8]
    assert value.keys() == {"messages", "options", "answers", "models", "version"}
    other = new_chat(pair)
    assert played(other, f"/load {file}", f"/save {file}", typed=False) == 0
    assert json.loads(file.read_text()) == value
    assert other.ask("Three", nothing).text == chat.ask("Three", nothing).text
    assert [turn.meter for turn in other.turns[:2]] == [turn.meter for turn in chat.turns[:2]]


def test_a_file_is_replaced_only_if_that_was_meant(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    chat, file = new_chat(pair), tmp_path / "notes.md"
    file.write_text("my notes")
    assert played(chat, "Hi", f"/save {file}", typed=False) == 2
    assert "exists already: /save! replaces it" in capsys.readouterr().err and file.read_text() == "my notes"
    assert played(chat, f"/save! {file}", f"/save {file}", typed=False) == 0
    text = file.read_text()
    assert text.startswith(f"# Chat with {pair.models.target.id} with ") and "**User**\n\nHi\n" in text
    assert chat.turns[0].answer in text and f"*{chat.turns[0].meter}*" in text
    assert text.endswith("Options: `max_new_tokens=8`\n")


def test_saving_is_atomic(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    chat, file = new_chat(pair), tmp_path / "chat.json"
    file.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert played(chat, f"/save! {file}", typed=False) == 2
    assert "cannot write" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    assert played(chat, f"/save {tmp_path}/none/chat.json", typed=False) == 2
    assert "No such file or directory" in capsys.readouterr().err


TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(("content", "said"), [
    ("{", "is not JSON ("),
    ("# Chat", "): give a file that /save wrote, not .md"),
    ("7", 'holds no list "messages"'),
    ('{"messages": [{"role": "user"}]}', 'holds no list "messages"'),
    (json.dumps(TURN[:1]), "the last message has no answer"),
    (json.dumps(TURN[1:]), "message 1 is of role 'assistant' where 'user' is due"),
    (json.dumps([{"role": "system", "content": "s"}, *TURN, TURN[1]]), "message 4 is of role 'assistant'"),
    (json.dumps({"messages": TURN, "answers": []}), '"answers" does not fit the messages'),
    (json.dumps({"messages": TURN, "options": 3}), '"options" is not an object'),
    (json.dumps({"messages": TURN, "options": {"tempo": 1}}), "unknown option 'tempo'"),
    (json.dumps({"messages": TURN, "options": {"method": "sprinter"}}), "needs a gate"),
    (json.dumps([{"role": "user", "content": "forbidden"}, TURN[1]]), "this is forbidden"),
    (json.dumps([{"role": "user", "content": "\ud800"}, TURN[1]]), "not valid UTF-8"),
])  # fmt: skip
def test_files_that_are_no_chats_change_nothing(
    ungated: Pair, tmp_path: Path, capsys: Capture, content: str, said: str
) -> None:
    chat, file = new_chat(ungated, "Be brief"), tmp_path / "chat.json"
    chat.ask("Hi", nothing)
    before = chat.turns, chat.options, chat.system
    file.write_text(content)
    assert played(chat, f"/load {file}", typed=False) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and (chat.turns, chat.options, chat.system) == before


def test_a_list_of_messages_alone_can_be_loaded(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    chat, file = new_chat(pair, "Be brief", seed=3), tmp_path / "chat.json"
    file.write_text(json.dumps(TURN))
    assert played(chat, f"/load {file}", "/retry", "/load nowhere.json", typed=False) == 2
    assert "cannot read 'nowhere.json' (No such file or directory)" in capsys.readouterr().err
    assert chat.system is None and chat.options.seed == 3 and [turn.user for turn in chat.turns] == ["a"]
    assert chat.turns[0].answer != "b"


def test_entries_of_several_lines_and_slashes() -> None:
    lines = Script([
        '"""one', "/two", "", '  three"""', '"""all at once"""', '"""', "/alone", '"""', '""""""', "//etc",
        "/reset", '"""x',
    ])  # fmt: skip
    found = [read_entry(lines) for _ in range(6)]
    assert found == ["one\n/two\n\n  three", "all at once", "//alone", None, "//etc", "/reset"]
    assert lines.prompts[:5] == ["> ", "... ", "... ", "... ", "> "]
    with pytest.raises(UserError, match="ended within a message of several lines"):
        read_entry(lines)


def test_a_message_may_begin_with_a_slash(pair: Pair, capsys: Capture) -> None:
    chat = new_chat(pair)
    assert played(chat, "//etc", '"""/etc"""', '"""//etc"""') == 0
    assert [turn.user for turn in chat.turns] == ["/etc", "/etc", "//etc"]


def test_ctrl_c_at_the_prompt(pair: Pair, capsys: Capture) -> None:
    chat = new_chat(pair)
    assert played(chat, KeyboardInterrupt, "Hi", KeyboardInterrupt, KeyboardInterrupt, "not read") == 130
    assert capsys.readouterr().err.count("Ctrl-C again, Ctrl-D or /quit ends the chat") == 2
    assert [turn.user for turn in chat.turns] == ["Hi"]
    assert played(chat, KeyboardInterrupt, "not read", typed=False) == 130


@pytest.mark.parametrize("entry", ["Long", "/retry"])
def test_ctrl_c_during_an_answer(
    pair: Pair, capsys: Capture, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    chat = new_chat(pair, max_new_tokens=100)
    chat.ask("First", nothing)
    proceed = Stream.__next__

    def interrupted(stream: Stream) -> object:
        if len(stream.generation.tokens) > 5:
            raise KeyboardInterrupt
        return proceed(stream)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    assert played(chat, entry, "/history") == 0
    out, err = capsys.readouterr()
    assert out == chat.turns[-1].answer + "\n" and "stopped: the text so far is kept" in err
    assert played(chat, entry, "not read", typed=False) == 130
    assert "not read" not in [turn.user for turn in chat.turns]


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(pair: Pair, monkeypatch: pytest.MonkeyPatch, *lines: str, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    given = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80", **environment}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    commands = Commands(new_chat(pair, max_new_tokens=40, method="sprinter(tau=0.5)"))
    commands.welcome()
    assert converse(commands, Script(lines), typed=True) == 0
    return terminal.getvalue()


def test_a_terminal_shows_origins_with_and_without_colours(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    coloured = on_terminal(pair, monkeypatch, "Hello")
    plain = on_terminal(pair, monkeypatch, "Hello", NO_COLOR="1")
    dumb = on_terminal(pair, monkeypatch, "Hello", TERM="dumb")
    assert "tokens: trusted (unchecked), accepted, replacement, bonus, target" in SGR.sub("", coloured)
    styles = {style for text in (coloured, plain) for style in SGR.findall(text)}
    assert any("38;2" in style for style in SGR.findall(coloured))
    assert (
        not any("38;2" in style for style in SGR.findall(plain)) and {"4", "1"} <= styles
    )  # underline, bold
    assert "\x1b" not in dumb
    answers = [re.sub(r"\d+\.\d+", "", SGR.sub("", text)) for text in (coloured, plain, dumb)]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "line", ["/load ~nosuchuser/x", f"/save {'a' * 300}", "/save x\0y", "/load {deep}", f"/drop {'9' * 5000}"]
)
def test_a_bad_command_keeps_the_conversation(line: str, pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000)
    chat = new_chat(pair)
    kept = tmp_path / "kept.json"
    assert played(chat, "Hello", line.format(deep=tmp_path / "deep.json"), f"/save {kept}", typed=False) == 2
    assert len(json.loads(kept.read_text())["messages"]) == 2
    assert "Error:" not in capsys.readouterr().err


def test_a_fault_of_ours_keeps_the_conversation(
    pair: Pair, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("sprinter.cli.chat_session.Session.drop", broken)
    chat, kept = new_chat(pair), tmp_path / "kept.json"
    assert played(chat, "Hello", "/undo", f"/save {kept}", typed=False) == 1
    assert len(json.loads(kept.read_text())["messages"]) == 2
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_only_files_that_the_chat_wrote_are_replaced(pair: Pair, tmp_path: Path, capsys: Capture) -> None:
    chat, mine, link = new_chat(pair), tmp_path / "mine.json", tmp_path / "link.json"
    mine.write_text('[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]')
    before = mine.read_text()
    assert played(chat, f"/load {mine}", "/reset", f"/save {mine}", typed=False) == 2
    assert mine.read_text() == before and "exists already" in capsys.readouterr().err
    link.symlink_to(mine)
    assert played(chat, f"/save! {link}", typed=False) == 0
    assert link.is_symlink() and json.loads(mine.read_text())["messages"] == []
    assert played(chat, f"/save! {tmp_path}", typed=False) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "mine.json"]


def test_a_bad_line_in_a_long_message_drops_the_message(pair: Pair) -> None:
    chat = new_chat(pair)
    assert played(chat, '"""first', "b\udce4d", 'third"""', "Hello", typed=False) == 2
    assert [turn.user for turn in chat.turns] == ["Hello"]


def test_a_chat_may_ask_for_a_least_length(pair: Pair) -> None:
    chat = new_chat(pair, max_new_tokens=5, min_new_tokens=3)
    assert played(chat, "Hello", "/set min_new_tokens 2", "/set seed 3", typed=False) == 0
    assert chat.options.min_new_tokens == 2
