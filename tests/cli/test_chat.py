"""``sprinter chat`` as a command: pipes, JSON, templates, and a terminal with editing and Ctrl-C."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from tests.cli.chats import TEMPLATE
from tests.cli.tiny import Places, Run

from sprinter.cli.chat import history_file, read_entry, typed_entries

CLI = [sys.executable, "-m", "sprinter"]
LOADING = "loading the models ...\n"
PROMPT = "\x1b[?2004h"  # from here on pasted text is marked as such
posix = pytest.mark.skipif(os.name != "posix", reason="terminals and signals of POSIX")


def test_a_pipe_is_read_line_by_line(run: Run, places: Places, template: str, tmp_path: Path) -> None:
    args = ("chat", *places.gated, "--template", template, "-n", "12", "--seed", "3", "--system", "Be brief")
    script = f'Hello\n/method sprinter(tau=0.5)\n"""two\nlines"""\r\n/save {tmp_path}/chat.json\n'
    status, out, err = run(*args, stdin=script.encode())
    assert status == 0 and "error" not in err
    saved = json.loads((tmp_path / "chat.json").read_text())
    said = [(message["role"], message["content"]) for message in saved["messages"]]
    assert [said[0], said[1], said[3]] == [("system", "Be brief"), ("user", "Hello"), ("user", "two\nlines")]
    assert out == f"{said[2][1]}\n{said[4][1]}\n"
    assert [answer["lossless"] for answer in saved["answers"]] == [True, False]
    status, out, err = run(*args, "--json", stdin=script.replace("/save", "/save!").encode())
    assert status == 0 and out.count("\n") == 1 and said[2][1] in err
    value = json.loads(out)
    assert value["messages"] == saved["messages"] and value["options"] == saved["options"]


def test_mistakes_in_a_pipe_give_status_2_and_the_chat_goes_on(
    run: Run, places: Places, template: str
) -> None:
    args = ("chat", *places.pair, "--template", template, "-n", "4")
    status, out, err = run(*args, stdin=b"/nonsense\n\xff\nHello")
    assert status == 2 and out.count("\n") >= 1
    assert "there is no command /nonsense" in err and "a message is not valid UTF-8 (byte 0xff" in err
    status, out, err = run(*args, stdin=b"x" * (17 << 20))
    assert (status, out) == (2, "") and "a line of standard input exceeds 16 MiB" in err
    status, out, err = run(*args, stdin=b'"""never\nended\n')
    assert (status, out) == (2, "") and "ended within a message of several lines" in err
    assert run(*args, stdin=b"") == (0, "", LOADING)


def test_a_template_of_the_model_is_used(run: Run, places: Places, tmp_path: Path) -> None:
    own = shutil.copytree(places.target, tmp_path / "own")
    (own / "chat_template.jinja").write_text(TEMPLATE)
    status, _, err = run("chat", "--target", str(own), "-n", "4", stdin=b"Hello\n")
    assert (
        status == 0 and "prompt 23 tokens (0 reused)" in err
    )  # "[user]Hello\n[assistant]", one token a byte


def test_earlier_turns_are_reused_and_whole_blocks_alone_on_request(
    run: Run, places: Places, template: str
) -> None:
    args = ("chat", *places.pair, "--template", template, "-n", "4", "--json")
    reused = {}
    for kind in ("all", "exact"):
        status, out, _ = run(*args, "--prefix-reuse", kind, stdin=b"Hello\nAnd again?\n")
        assert status == 0
        reused[kind] = [answer["stats"]["cached_tokens"] for answer in json.loads(out)["answers"]]
    assert reused["exact"] == [0, 0] and reused["all"][0] == 0 < reused["all"][1]
    assert "--prefix-reuse" in run(*args, "--prefix-reuse", "some", stdin=b"")[2]


@pytest.mark.parametrize(("args", "said"), [
    ((), "built-in models are no chat models: give --target (and --draft) with a chat template, or --template FILE"),
    (("--target", "{target}"), "has no chat template: give --template FILE"),
    (("--target", "{target}", "--template", "nowhere"), "cannot read --template nowhere (No such file or directory)"),
    (("--target", "{target}", "--template", "{latin}"), "is not valid UTF-8"),
    (("--target", "{target}", "--template", "{broken}"), "the chat template"),
    (("--target", "{target}", "--template", "{good}", "--system", "forbidden"), "this is forbidden"),
    (("--target", "{target}", "--template", "{good}", "-m", "svip"), "needs a draft model: give --draft too"),
    (("--target", "{target}", "--template", "{good}", "-t", "-1"), "--temperature -1.0 is out of range"),
])  # fmt: skip
def test_what_cannot_be_a_chat_is_refused_in_one_line(
    run: Run, places: Places, tmp_path: Path, template: str, args: tuple[str, ...], said: str
) -> None:
    latin, broken = tmp_path / "latin", tmp_path / "broken"
    latin.write_bytes(b"\xe4")
    broken.write_text("{% for message in %}")
    given = {"target": places.target, "latin": latin, "broken": broken, "good": template}
    status, out, err = run("chat", *(arg.format(**given) for arg in args), stdin=b"Hello\n")
    err = err.removeprefix(LOADING)
    assert (status, out) == (2, "") and err.count("\n") == 1 and said in err


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    monkeypatch.delenv("SPRINTER_HISTORY", raising=False)
    assert history_file() == Path("/state/sprinter/chat_history")
    monkeypatch.setenv("SPRINTER_HISTORY", "")
    assert history_file() is None


class Typist:
    """A process on a terminal of its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        import fcntl
        import pty
        import termios

        self._main, end = pty.openpty()
        self._unread = ""

        def begin() -> None:
            # Whoever runs the tests in the background may have them ignore Ctrl-C, and children inherit that.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C is a signal to this process

        self.process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end,
            env={**environment, "TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"},
            start_new_session=True, preexec_fn=begin,
        )  # fmt: skip
        os.close(end)

    def read_to(self, wanted: str, limit_s: float = 120) -> str:
        """What is written from here to ``wanted``."""
        until = time.monotonic() + limit_s
        while (at := self._unread.find(wanted)) < 0:
            assert self._read(until), self._unread
        found, self._unread = self._unread[: at + len(wanted)], self._unread[at + len(wanted) :]
        return found

    def _read(self, until: float) -> bool:
        if not select.select([self._main], [], [], max(0, until - time.monotonic()))[0]:
            return False
        self._unread += os.read(self._main, 4096).decode(errors="replace").replace("\r\n", "\n")
        return True

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


@contextmanager
def typist(command: list[str], environment: dict[str, str]) -> Iterator[Typist]:
    found = Typist(command, environment)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PipeInput]:
    """A keyboard, and a file for its history."""
    monkeypatch.setenv("SPRINTER_HISTORY", str(tmp_path / "new" / "history"))
    with create_pipe_input() as found, create_app_session(input=found, output=DummyOutput()):
        yield found


@pytest.mark.parametrize(("typed", "entry"), [
    ("helo\x1b[Dl\r", "hello"),  # left, l
    ("one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
    ('"""a\rb\r\r/c"""\r', "a\nb\n\n/c"),  # Enter within quotes
    ("\x1b[200~pasted\nlines\x1b[201~\r", "pasted\nlines"),
    ("/meth\tsvip\r", "/method svip"),
    ("/method calib\t\r", "/method calibrated"),
    ("/set top\tk 5\r", "/set top_k 5"),
    ("hold\r", "hold"),
    ("  \r", None),
])  # fmt: skip
def test_entries_are_edited_and_completed(keys: PipeInput, typed: str, entry: str | None) -> None:
    keys.send_text(typed)
    assert read_entry(typed_entries(print)) == entry


def test_entries_are_kept_for_the_next_chat(keys: PipeInput) -> None:
    for typed in ("hello\r", '"""two\rlines"""\r'):
        keys.send_text(typed)
        read_entry(typed_entries(print))
    assert (history := history_file()) is not None and history.stat().st_mode & 0o777 == 0o600
    assert [*FileHistory(history).load_history_strings()] == ['"""two\nlines"""', "hello"]


def test_ctrl_c_and_ctrl_d_at_the_prompt(keys: PipeInput) -> None:
    read = typed_entries(print)
    keys.send_text("half a line\x03")
    with pytest.raises(KeyboardInterrupt):
        read_entry(read)
    keys.send_text("\x04")
    with pytest.raises(EOFError):
        read_entry(read)


def test_a_history_that_cannot_be_kept_is_one_line(keys: PipeInput, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINTER_HISTORY", "/proc/none/x")
    said: list[str] = []
    keys.send_text("hello\r")
    assert read_entry(typed_entries(said.append)) == "hello"
    assert len(said) == 1 and said[0].startswith(
        "cannot write the input history '/proc/none/x' (No such file"
    )


@posix
@pytest.mark.slow
def test_a_chat_in_a_terminal(environment: dict[str, str], places: Places, template: str) -> None:
    command = [*CLI, "chat", *places.pair, "--template", template, "-n", "2000"]
    with typist(command, {**environment, "SPRINTER_HISTORY": ""}) as user:
        assert "trusted (unchecked)" in user.read_to(PROMPT)
        user.type("Hello\r")
        user.read_to("Hello")
        time.sleep(1)
        user.type("\x03")  # the terminal makes a signal of it
        user.read_to("stopped: the text so far is kept")
        user.read_to(PROMPT)
        user.type("/history\r")
        user.read_to("1> Hello")
        user.read_to(PROMPT)
        user.type("\x1b[A\x1b[A\x1b[A")  # up, to the first entry and no further
        user.read_to("Hello")
        user.type("\x15/method\r")
        user.read_to("method auto")
        user.read_to(PROMPT)
        user.interrupt()
        user.read_to("Ctrl-C again, Ctrl-D or /quit ends the chat")
        user.read_to(PROMPT)
        user.type("\x04")
        assert user.process.wait(60) == 0
