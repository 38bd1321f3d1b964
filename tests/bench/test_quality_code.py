"""Generated code: what is run, what passes, and what the sandbox stops."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from sprinter.bench.quality import sandbox
from sprinter.bench.quality.checks import code_of, cut_code, passes, program_of
from sprinter.bench.quality.sandbox import Outcome, SandboxLimits, network, run_code
from sprinter.bench.sample import SampleCheck
from sprinter.errors import UserError

ON_LINUX = sys.platform == "linux"
pytestmark = pytest.mark.skipif(not ON_LINUX, reason="the sandbox is Linux's")

PROMPT = 'def double(x: int) -> int:\n    """Twice x.\n    >>> double(2)\n    4\n    """\n'
TEST = SampleCheck(
    "code", "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n", "double"
)
SHORT = SandboxLimits(seconds=20, memory_bytes=1 << 28)


def run(program: str, limits: SandboxLimits = SHORT) -> Outcome:
    return run_code(textwrap.dedent(program), limits)


def test_cut_at_the_first_line_that_leaves_the_function() -> None:
    body = "    y = x + x  # twice\n\n    if y:\n        return y\n    return 0\n"
    for rest in (
        "def other(): pass",
        "class A: ...",
        "print(double(3))",
        "if True: ...",
        "# so",
        "@cache",
        "```\nDone.",
    ):
        assert cut_code(body + "\n" + rest) == body
    assert cut_code(body) == body
    assert cut_code("") == ""


def test_program_is_prompt_answer_test_and_call() -> None:
    program = program_of(PROMPT, "    return 2 * x\ndef more(): pass", TEST)
    assert program == f"{PROMPT}    return 2 * x\n{TEST.answer}\ncheck(double)\n"


@pytest.mark.parametrize(
    ("answer", "passed", "why"),
    [
        ("    return 2 * x\n", True, "passed"),
        ("    return 2 * x\n\ndef main():\n    syntax error here", True, "passed"),
        ("    return 4\n", False, "AssertionError"),
        ("    return 2 *\n", False, "SyntaxError"),
        ("    return undefined\n", False, "NameError"),
        ("    raise SystemExit(0)\n", False, "SystemExit"),
        ("    import os\n    os._exit(0)\n", False, "ended with status 0"),
        ("    return double(x)\n", False, "RecursionError"),
    ],
)
def test_right_and_wrong_answers(answer: str, passed: bool, why: str) -> None:
    outcome = passes(PROMPT, answer, TEST, SHORT)
    assert outcome.passed is passed and outcome.why.startswith(why)


def test_the_standard_library_is_in_reach_and_nothing_else() -> None:
    outcome = run("""
        import collections, decimal, hashlib, heapq, itertools, json, math, random, re, statistics, string, typing
        import encodings.idna, json.tool, xml.dom.minidom
        assert hashlib.md5(b"x").hexdigest().startswith("9dd4e4")
        assert "é".encode("cp1252") == b"\\xe9"
        import os
        assert not {"PATH", "HOME", "OPENAI_API_KEY"} & os.environ.keys()
        try:
            import torch
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError("site packages are in reach")
    """)
    assert outcome.why == "passed"


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)"])
def test_endless_programs_are_cut(program: str) -> None:
    began = time.perf_counter()
    outcome = run(program, SandboxLimits(seconds=0.7))
    assert outcome == Outcome(False, "out of time", outcome.network)
    assert time.perf_counter() - began < 10


def test_cpu_time_is_limited_by_the_kernel() -> None:
    outcome = run("""
        import resource
        assert resource.getrlimit(resource.RLIMIT_CPU) == (20, 20)
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
    """, SandboxLimits(seconds=19.5))  # fmt: skip
    assert outcome.why == "passed"


def test_a_memory_bomb_is_cut() -> None:
    assert run("bomb = [bytearray(1 << 20) for _ in range(1 << 20)]").why.startswith("MemoryError")
    assert run("bomb = bytearray(1 << 26)").why == "passed"


def test_no_process_and_no_thread_may_start() -> None:
    assert run("import os\nwhile True: os.fork()").why.startswith("PermissionError: os.fork")
    assert run("import subprocess\nsubprocess.run(['true'])").why.startswith("PermissionError: subprocess")
    assert run("import os\nos.system('true')").why.startswith("PermissionError: os.system")
    # The guard looks at processes; that no thread starts is the kernel's doing, which counts both alike.
    assert run("""
        import threading
        threading.stack_size(1 << 16)
        started = 0
        try:
            for _ in range(1000):
                threading.Thread(target=__import__("time").sleep, args=(1,)).start()
                started += 1
        except RuntimeError:
            pass
        assert started == 0, started
    """).why == "passed"  # fmt: skip


def test_the_network_is_refused() -> None:
    outcome = run("import socket\nsocket.create_connection(('127.0.0.1', 9))")
    assert outcome.why.startswith("PermissionError: socket.")
    assert outcome.network == network()
    if outcome.network == "namespace":
        devices = run("""
            lines = open("/proc/self/net/dev").read().splitlines()[2:]
            names = {line.split(":")[0].strip() for line in lines}
            assert "lo" in names and not any(name.startswith(("eth", "en", "wl", "docker")) for name in names), names
        """)
        assert devices.why == "passed"


def test_without_a_namespace_the_guard_stands_alone() -> None:
    """The child's own code with a kernel that refuses namespaces (a flag that there is none of)."""
    driver = """
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("child", sys.argv.pop(1))
        child = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(child)
        child._NEW_NET = 1
        child.main()
    """
    command = [
        sys.executable,
        "-I",
        "-S",
        "-B",
        "-c",
        textwrap.dedent(driver),
        str(sandbox._CHILD),
        "5",
        str(1 << 28),
        "4096",
    ]
    program = "import _socket\n_socket.socket()"
    said = subprocess.run(
        command, input=program.encode(), capture_output=True, check=False, env={}
    ).stdout.decode()
    assert '{"network": "guard"}' in said
    assert "PermissionError: socket.__new__" in said


def test_file_writes_are_limited() -> None:
    assert run("open('x', 'w')").why.startswith("PermissionError: writing files")
    assert run("import os\nos.open('x', os.O_CREAT | os.O_RDWR)").why.startswith(
        "PermissionError: writing files"
    )
    assert run("import os\nos.remove('/tmp/none')").why.startswith("PermissionError: os.remove")
    assert run("assert open('/proc/self/stat').read()").why == "passed"
    # A file that is open for writing already: the channel to the parent. The kernel ends it at the limit.
    program = """
        import os
        for channel in range(3, 64):
            try:
                for _ in range(100):
                    os.write(channel, b"x" * 4096)
            except OSError as error:
                if error.errno == 27:  # file too large
                    os._exit(7)
    """
    assert run(program, SandboxLimits(seconds=20, file_bytes=8192)).why == "ended with status 7"
    outcome = run(program, SandboxLimits(seconds=20, file_bytes=1 << 20))
    assert not outcome.passed and outcome.network is None  # what it wrote there is no verdict


def test_it_runs_as_nobody_in_particular() -> None:
    assert run("import os\nassert os.getuid() != 0 and os.geteuid() != 0, os.getuid()").why == "passed"
    assert run("import os\nos.setuid(0)").why.startswith(("PermissionError", "OSError"))


def test_foreign_functions_and_loosening_limits_are_refused() -> None:
    assert run("import ctypes\nctypes.CDLL(None)").why.startswith("PermissionError: ctypes")
    assert run(
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (100, 100))"
    ).why.startswith("PermissionError: resource")  # fmt: skip


def test_an_odd_program_is_only_wrong() -> None:
    assert not run("\x00").passed
    assert not run("\ud800").passed
    assert run("print('x' * 10_000_000)").why == "passed"
    assert (
        run("class E(Exception):\n    def __str__(self): return 'a\\n' * 10_000\nraise E").why.count("\n")
        == 0
    )


def test_other_systems_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(UserError, match="on Linux alone"):
        run("pass")


def test_limits_that_cannot_be_set_are_an_error() -> None:
    with pytest.raises(UserError, match=r"^generated code cannot be run here \(root may not"):
        sandbox._outcome({"refused": "root may not become the user nobody here"}, 1, False)


# --- answers in chat form ---------------------------------------------------------------------------------------------

IMPORTING = f"from math import floor\n\n\n{PROMPT}"
ASKED = SampleCheck(TEST.kind, TEST.answer, TEST.entry_point, code=IMPORTING)


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("Sure!\n\n```python\ndef double(x: int) -> int:\n    return floor(2 * x)\n```\nIt doubles x.", True),
        ("```\ndef double(x):\n    return 2 * x\n```", True),
        (
            "Use a helper:\n```python\nprint('hi')\n```\nThen\n```py\ndef double(x):\n    return x + x\n```",
            True,
        ),
        ("```python\n    y = 2 * x\n    return y\n```", True),
        ("```python\ny = 2 * x\nreturn y\n```", True),
        ("def double(x):\n    return 2 * x\n", True),
        ("Here it is:\nfrom math import ceil\ndef double(x):\n    return ceil(2 * x)\n", True),
        ("    return 2 * x\n", True),
        ("```python\ndef double(x):\n    return 2 * x\n", True),  # the end of the text cut the block short
        ("  ```python\n  def double(x):\n      return 2 * x\n  ```", True),
        ("```python\ndef double(x):\n    return 4\n```", False),
        ("I cannot help with that.", False),
    ],
)
def test_the_code_of_a_chat_answer(answer: str, passed: bool) -> None:
    assert passes("a message", answer, ASKED, SHORT).passed is passed


def test_the_first_block_that_defines_the_function_is_the_answer() -> None:
    text = "```python\ndef other(): ...\n```\n```python\ndef double(x): ...\n```\n```\ndef double(x): 1\n```"
    assert code_of(text, "double") == "def double(x): ...\n"
    assert code_of(text, "none") == "def other(): ...\n"
    assert code_of("no block", "double") == "no block"
