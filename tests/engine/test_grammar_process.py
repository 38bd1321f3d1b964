"""Grammars in processes of their own say what they would say here, and what ends them ends no other."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sprinter
from sprinter.engine import grammar_process
from sprinter.engine.grammar import Grammars
from sprinter.engine.grammar_process import GrammarProcess, GrammarProcesses
from sprinter.engine.grammar_text import GrammarError, GrammarText, compiled
from sprinter.errors import UserError

HARD = ("[a-c]{2,40}(river|rise)?", "(the |a )*(river|mountain) rises", r"[0-9]{1,3}(\.[0-9]+)?")


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair(compile=False)


@pytest.fixture
def grammars(pair: sprinter.Pair) -> Grammars:
    return Grammars(pair.tokenizer, pair.models.vocab_size)


def options(regex: str) -> sprinter.GenerationOptions:
    return sprinter.GenerationOptions(regex=regex)


@pytest.mark.parametrize("regex", HARD)
def test_a_process_says_what_this_one_would(pair: sprinter.Pair, grammars: Grammars, regex: str) -> None:
    asked = grammars._asked(options(regex))
    assert asked and pair.tokenizer is not None
    vocab, ends = pair.models.vocab_size, [int(pair.tokenizer.eos_token_id), 5]  # type: ignore[arg-type]
    own = grammars._tokens("regex")
    here, there = compiled(asked[1], own.tokens, vocab).copy(ends), own.processes.follow(asked[1]).copy(ends)
    pick, text = random.Random(3), tuple[int, ...]()
    for _ in range(12):
        wrong = (*text, pick.randrange(vocab))
        masks = here.masks([text, wrong])
        assert np.array_equal(masks, there.masks([text, wrong]))
        assert here.forced(text) == there.forced(text)
        allowed = np.flatnonzero(np.unpackbits(masks[0], bitorder="little")[:vocab])
        proposal = (*map(int, pick.choices(allowed.tolist(), k=2)), pick.randrange(vocab))
        assert here.kept(text, proposal) == there.kept(text, proposal)
        text = (*text, int(pick.choice(allowed)))


def test_where_processes_cannot_fork_each_is_started(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = follow(grammars, HARD[0])[1].copy([0]).masks([(), (3,)])
    monkeypatch.setattr(grammar_process, "_FORKS", False)
    process = follow(grammars, HARD[0])[1]
    assert np.array_equal(process.copy([0]).masks([(), (3,)]), wanted)
    assert process.rest() and np.array_equal(process.copy([0]).masks([(), (3,)]), wanted)
    with pytest.raises(GrammarError, match="cannot be followed"):
        process._processes.follow("start: missing")
    assert process.rest() and not process.size


def test_hard_grammars_have_a_process_and_plain_ones_none(grammars: Grammars) -> None:
    hard = grammars.prepare(options(HARD[0]))
    plain = grammars.prepare(sprinter.GenerationOptions(response_format={"type": "json_object"}))
    assert hard and isinstance(hard._text, GrammarProcess) and hard._text.size >= 4 << 20
    assert plain and isinstance(plain._text, GrammarText)


def children(pid: int) -> dict[int, str]:
    """The processes below one, and their states."""
    below: dict[int, list[int]] = {}
    states = dict[int, str]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, *_ = file.read_text().rpartition(")")[2].split()
            below.setdefault(int(parent), []).append(int(file.parent.name))
            states[int(file.parent.name)] = state
    found, left = dict[int, str](), [pid]
    while left:
        for one in below.get(left.pop(), ()):
            found[one] = states[one]
            left.append(one)
    return found


def until(true: Callable[[], bool], for_s: float = 20) -> bool:
    end = time.monotonic() + for_s
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def follow(grammars: Grammars, regex: str) -> tuple[GrammarProcesses, GrammarProcess]:
    asked = grammars._asked(options(regex))
    assert asked is not None
    processes = grammars._tokens("regex").processes
    return processes, processes.follow(asked[1])


@pytest.mark.parametrize("what", ["group", "follower"])
def test_a_process_that_is_ended_is_replaced(grammars: Grammars, what: str) -> None:
    """For the same grammar, text and position, and with a new process that forks if there is none."""
    processes, process = follow(grammars, HARD[0])
    text = process.copy([0])
    before = text.masks([(), (3,)])
    assert processes._first is not None
    first = processes._first[0].pid
    if what == "group":
        os.killpg(first, signal.SIGKILL)
    else:
        (own,) = children(first)
        os.kill(own, signal.SIGKILL)
    assert np.array_equal(text.masks([(), (3,)]), before)
    assert not Path(f"/proc/{first}").exists() or what == "follower", "it has been waited for"
    assert processes.follow(process._grammar).copy([0]).masks([()]).any()


def test_a_long_text_is_read_as_it_was_followed(pair: sprinter.Pair, grammars: Grammars) -> None:
    """Token by token, with a mask before each: without them llguidance's lexer gives up, and says so nowhere."""
    part = {"type": "string", "maxLength": 500, "minLength": 1, "pattern": r"^(?:\S+\s+){0,49}\S+$"}
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": part}}}}
    asked = grammars._asked(sprinter.GenerationOptions(response_format=form))
    assert asked is not None and pair.tokenizer is not None
    own, vocab = grammars._tokens("response_format"), pair.models.vocab_size
    ids = tuple(
        own.tokens.tokenize_str('{"a": "Well,              : 4    1,         4,            ],        4, ')
    )
    followed, process = compiled(asked[1], own.tokens, vocab).copy([0]), own.processes.follow(asked[1])
    for n in range(len(ids) + 1):
        (mask,) = followed.masks([ids[:n]])
        assert n == len(ids) or mask[ids[n] >> 3] >> (ids[n] & 7) & 1
    assert not mask[0] & 1, "it may not end within a string"
    assert np.array_equal(compiled(asked[1], own.tokens, vocab).copy([0]).masks([ids])[0], mask)
    assert np.array_equal(process.copy([0]).masks([ids])[0], mask)
    assert process.copy([0]).kept((), ids) == len(ids)


def test_a_process_that_ends_over_one_text_is_asked_again_about_others_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = follow(grammars, HARD[0])[1]
    calls, real = list[Any](), GrammarProcess._call

    def call(self: GrammarProcess, given: Any, **more: Any) -> Any:
        calls.append(given)
        if isinstance(given, list | tuple) and given[1] == 0:
            raise EOFError
        return real(self, given, **more)

    hard, easy = process.copy([0]), process.copy([0])
    assert easy.masks([()]).any()
    monkeypatch.setattr(GrammarProcess, "_call", call)
    with pytest.raises(GrammarError, match="cannot be followed on: it takes too long"):
        hard.masks([()])
    assert [isinstance(one, str) for one in calls] == [False, True, False], "asked, begun again, asked"
    assert easy.masks([()]).any()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the system does not list processes")
def test_processes_are_few_small_and_leave_nothing(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "_MOST", 4)
    processes, kept = follow(grammars, HARD[0])
    text = kept.copy([0])
    mask = text.masks([()])
    files = len(os.listdir("/proc/self/fd"))
    held = [follow(grammars, f"[a-c]{{2,40}}{i}")[1] for i in range(12)]
    assert processes._first is not None
    first = processes._first[0].pid
    assert until(lambda: len(children(first)) <= 4) and "Z" not in children(first).values()
    assert len(os.listdir("/proc/self/fd")) <= files + 4
    assert np.array_equal(text.masks([()]), mask), "the one that was used longest ago is begun again"
    assert all(one.copy([0]).masks([()]).any() for one in held) and until(lambda: len(children(first)) <= 4)
    monkeypatch.setattr(grammar_process, "_MOST_BYTES", 2 * held[-1].size)
    processes.make_room()
    assert until(lambda: len(children(first)) == 2)
    del held, kept, text
    gc.collect()
    assert until(lambda: not children(first))


def test_no_process_can_be_made(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    grammars.warm()
    monkeypatch.setattr("socket.socketpair", none)
    with pytest.raises(UserError, match=r"regex cannot be followed now: no process can be made .*open files"):
        grammars.prepare(options(HARD[0]))


SERVING = """
import signal, sprinter
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores interrupts
pair = sprinter.load_pair(compile=False)
pair._runtime.grammars.prepare(sprinter.GenerationOptions(regex="[a-c]{2,40}x"))
print("ready", flush=True)
while True:
    schema = {"type": "integer", "multipleOf": 123456789}
    try:
        pair.generate("A", response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    except sprinter.UserError:
        pass
"""


def ends(server: subprocess.Popen[bytes], how: signal.Signals) -> bool:
    """Whether a process ends within 15 s of a signal."""
    server.send_signal(how)
    try:
        return server.wait(15) is not None
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parents on Linux")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_nothing_is_left_of_a_process_that_ends_while_a_grammar_is_computed(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ
    ) as server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        assert until(lambda: len(children(server.pid)) == 3), "one that forks, and two grammars"
        found = children(server.pid)
        try:  # Python ignores an interrupt that comes while it finalises an object: then there is a second one
            assert any(ends(server, how) for _ in range(3))
        finally:
            server.kill()
    assert until(lambda: not any(Path(f"/proc/{one}").exists() for one in found), 30)


FORKING = """
import os, sys, sprinter
pair = sprinter.load_pair(compile=False)
hard = {"regex": "[a-c]{2,40}x", "max_new_tokens": 12, "seed": 1}

def text():
    return pair.generate("A", **hard).text

def processes():
    return {one._first[0].pid for one in {pair._runtime.grammars._own.processes}}

expected, first = text(), processes()
child = os.fork()
if child == 0:
    right = text() == expected and processes().isdisjoint(first)
    sys.exit(0 if right else 1)  # not os._exit: what Python does at its end is done
held = pair._runtime.grammars.prepare(sprinter.GenerationOptions(regex=hard["regex"]))._text
began = held._wire
assert all(text() == expected for _ in range(3))
assert os.waitpid(child, 0)[1] == 0, "the child's texts"
assert text() == expected and processes() == first and held._wire is began, "the parent's"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_of_this_process_has_processes_of_its_own() -> None:
    """Two would ask by one socket, and the one that ends first would end it for both."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKING], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def test_processes_run_behind_the_models(grammars: Grammars) -> None:
    """Their own session would else have as much of the CPU as this one's."""
    processes, _ = follow(grammars, HARD[0])
    assert processes._first is not None
    pid = processes._first[0].pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    shared = Path(f"/proc/{pid}/autogroup")
    assert not os.access(shared, os.W_OK) or shared.read_text().split()[-1] == "10"
