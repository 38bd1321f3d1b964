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
from tests.cli.chats import TEMPLATE
from tests.cli.tiny import Places, Run

from sprinter.cli.chat_input import complete_entry, history_file

CLI = [sys.executable, "-m", "sprinter.cli"]
posix = pytest.mark.skipif(os.name != "posix", reason="terminals and signals of POSIX")


@pytest.fixture
def template(tmp_path: Path) -> str:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    return str(file)


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
    assert (
        "there is no command /nonsense" in err
        and "line 2 of standard input is not valid UTF-8 (byte 0xff)" in err
    )
    status, out, err = run(*args, stdin=b'"""never\nended\n')
    assert (status, out) == (2, "") and "ended within a message of several lines" in err
    assert run(*args, stdin=b"") == (0, "", "")


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
    assert (status, out) == (2, "") and err.count("\n") == 1 and said in err


def test_completion_of_entries() -> None:
    assert complete_entry("/me", "/me") == ["/method "]
    assert complete_entry("/s", "/s") == ["/set ", "/system ", "/save "]
    assert complete_entry("/set top", "top") == ["top_k ", "top_p "]
    assert complete_entry("/method spr", "spr") == ["sprinter"]
    assert complete_entry("Hello /me", "/me") == complete_entry("", "") == []


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    monkeypatch.delenv("SPRINTER_HISTORY", raising=False)
    assert history_file() == Path("/state/sprinter/chat_history")
    monkeypatch.setenv("SPRINTER_HISTORY", "")
    assert history_file() is None


class Typist:
    """A process on a terminal of its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        import pty

        self._main, end = pty.openpty()
        self._unread = ""
        # Whoever runs the tests in the background may have them ignore Ctrl-C, and children inherit that.
        self.process = subprocess.Popen(
            command, env={**environment, "TERM": "xterm", "NO_COLOR": "1"}, stdin=end, stdout=end, stderr=end,
            start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        os.close(end)

    def read_to(self, wanted: str, limit_s: float = 120) -> str:
        """What is written from here to ``wanted``."""
        until = time.monotonic() + limit_s
        while (at := self._unread.find(wanted)) < 0:
            assert self._read(until), self._unread
        found, self._unread = self._unread[: at + len(wanted)], self._unread[at + len(wanted) :]
        return found

    def reads(self, wanted: str, limit_s: float) -> bool:
        """Whether ``wanted`` is written in time; ``read_to`` finds it afterwards."""
        until = time.monotonic() + limit_s
        while wanted not in self._unread:
            if not self._read(until):
                return False
        return True

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


KEYBOARD = """
from sprinter.cli.chat_input import Keyboard
with Keyboard(print) as lines:
    try:
        while True:
            try:
                print(f"<{lines.read('> ')!r}>")
            except KeyboardInterrupt:
                print("<interrupted>")
    except EOFError:
        print("<end>")
"""


@posix
def test_typed_lines_are_edited_completed_and_kept(environment: dict[str, str], tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("needs GNU readline")
    history = tmp_path / "new" / "history"
    kept = {**environment, "SPRINTER_HISTORY": str(history), "INPUTRC": os.devnull}
    with typist([sys.executable, "-c", KEYBOARD], kept) as user:
        for keys, line in (
            ("helo\x1b[Dl\r", "hello"),  # left, l
            ("one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
            ("/meth\tsvip\r", "/method svip"),
            ("\x1b[A\x1b[A\x1b[A\r", "hello"),  # up
        ):
            user.read_to("> ")
            user.type(keys)
            user.read_to(f"<{line!r}>")
        user.read_to("> ")
        # Between the prompt and the wait for a key Python misses a signal until the next one.
        user.interrupt()
        if not user.reads("<interrupted>", limit_s=5):
            user.interrupt()
        user.read_to("<interrupted>")
        user.read_to("> ")
        user.type("\x04")
        user.read_to("<end>")
        assert user.process.wait(60) == 0
    assert history.read_text().startswith("hello\n") and history.stat().st_mode & 0o777 == 0o600
    with typist([sys.executable, "-c", KEYBOARD], kept) as user:
        user.read_to("> ")
        user.type("\x1b[A\r")
        user.read_to("<'hello'>")
    with typist([sys.executable, "-c", KEYBOARD], {**kept, "SPRINTER_HISTORY": "/proc/none/x"}) as user:
        user.read_to("> ")
        user.type("\x04")
        user.read_to("cannot write the input history '/proc/none/x'")


def test_a_python_without_readline_says_so(environment: dict[str, str]) -> None:
    code = "import sys; sys.modules['readline'] = None\n" + KEYBOARD
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        input="Hi\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (
        "this Python has no readline module: lines have no history and no editing but the terminal's own\n"
        "<'Hi'>\n<end>\n"
    )
    assert done.stderr == "> > "  # standard output is no terminal, and for the answers alone


@posix
@pytest.mark.slow
def test_ctrl_c_stops_an_answer_in_a_terminal(
    environment: dict[str, str], places: Places, template: str
) -> None:
    command = [*CLI, "chat", *places.pair, "--template", template, "-n", "2000"]
    with typist(command, {**environment, "SPRINTER_HISTORY": ""}) as user:
        assert "trusted (unchecked)" in user.read_to("> ")
        user.type("Hello\r")
        user.read_to("Hello\n")
        time.sleep(1)
        user.interrupt()
        user.read_to("stopped: the text so far is kept")
        user.read_to("> ")
        user.type("/history\r")
        user.read_to("1> Hello")
        user.read_to("> ")
        user.type("\x04")
        assert user.process.wait(60) == 0


@posix
def test_ctrl_c_in_a_pipe_ends_the_chat(environment: dict[str, str], places: Places, template: str) -> None:
    command = [*CLI, "chat", *places.pair, "--template", template, "-n", "2000"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"Hello\nNever read\n")
        process.stdin.close()
        begin = process.stdout.read(3)
        assert len(begin) == 3, process.stderr.read()
        process.send_signal(signal.SIGINT)
        said = process.stderr.read().decode()
        assert process.wait(60) == 130
    assert "stopped: the text so far is kept" in said and said.count("prefill") == 1
