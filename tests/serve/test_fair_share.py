"""What a server's owners share: places of the queue, and the time of work in Python."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest
from tests.engine.conftest import double_pair
from tests.serve.server import held, serving, until

import sprinter
from sprinter.engine.engine import Engine
from sprinter.engine.fair_queue import Shares
from sprinter.serve.responses import send_parts
from sprinter.serve.turns import Turns

TEXT, PROMPT = "/v1/completions", [3, 7, 1, 12, 5]
KEYS = {"alice": "alice-secret-key-1", "bob": "bob-secret-key-22222"}


def keys_of(folder: Path) -> Path:
    """A file of the keys."""
    keys = folder / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    return keys


def as_(name: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {KEYS[name]}"}}


def test_texts_that_find_no_place_are_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All texts of a request or none: what is asked for again and again and refused costs next to nothing."""
    keys, made = keys_of(tmp_path), list[int]()
    real = Engine._task
    monkeypatch.setattr(Engine, "_task", lambda *given: made.append(1) or real(*given))
    asked = {"prompt": PROMPT, "max_tokens": 2}
    settings: dict[str, Any] = {"rows": 2, "max_len": 96, "max_waiting": 8, "api_keys": keys}
    with serving(double_pair(), **settings) as server, held(server.service) as go:
        threads = [
            threading.Thread(target=server.post, args=(TEXT, {**asked, "n": n}), kwargs=as_(who))
            for who, n in (("alice", 5), ("bob", 3))
        ]  # fmt: skip
        for n, thread in zip((5, 8), threads, strict=True):
            thread.start()
            until(lambda n=n: server.service.engine.unfinished == n)  # type: ignore[misc]
        for _ in range(3):
            assert server.post(TEXT, {"prompt": PROMPT, "n": 3}, **as_("bob")).status_code == 429
        assert len(made) == 8
        go.set()
        for thread in threads:
            thread.join(30)


@pytest.mark.parametrize("method", ["suffix", "recycle"])
def test_no_key_drafts_from_the_texts_of_another(tmp_path: Path, method: str) -> None:
    """Bob's first text costs what it costs on a fresh server, whatever Alice has written; his own next one less."""
    keys = keys_of(tmp_path)
    asked = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "sprinter": {"method": method}}
    counts = list[list[Any]]()
    for turn in (["bob", "bob"], ["alice", "alice", "bob", "bob"]):
        with serving(double_pair(), rows=1, max_len=96, api_keys=keys) as server:
            answers = [server.post(TEXT, asked, **as_(name)).json() for name in turn][-2:]
        choices = [one["choices"][0] for one in answers]
        counts.append([(one["sprinter"]["target_calls"], one["text"]) for one in choices])
    assert counts[0] == counts[1]
    (first, text), (again, same) = counts[0]
    assert text == same and again < first


def test_several_places_fit_where_each_would() -> None:
    for shared, size, others, taken in itertools.product((True, False), (6, 9), (0, 2), (0, 1)):
        for count in range(1, 10):
            one, each = Shares(size, shared=shared, own=2), Shares(size, shared=shared, own=2)
            for places in (one, each):
                places.take("other", others)
                places.take("own", taken)
            fits = True
            for _ in range(count):
                fits = fits and each.room("own") > 0
                each.take("own")
            assert one.fits("own", count) is fits
            assert one.others("own") is bool(others)


def test_work_of_an_owner_rests_where_others_ask_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as long as it took, and other owners' work is done meanwhile."""

    async def main() -> None:
        loop, rests, crowd = asyncio.get_running_loop(), list[tuple[float, Any]](), set[str]()
        clock = iter(range(100))
        monkeypatch.setattr("sprinter.serve.turns.time.thread_time", lambda: float(next(clock)))
        monkeypatch.setattr(loop, "call_later", lambda seconds, call: rests.append((seconds, call)))
        turns, done = Turns(lambda owner: bool(crowd - {owner})), list[str]()
        assert await turns.run("alice", lambda: 5) == 5
        (seconds, leave), crowd = rests.pop(), {"alice", "bob"}
        assert seconds == 0
        leave()
        await turns.run("alice", lambda: done.append("alice"))
        (seconds, leave) = rests.pop()
        assert seconds == 4.0
        waiting = asyncio.create_task(turns.run("alice", lambda: done.append("alice again")))
        await turns.run("bob", lambda: done.append("bob"))
        assert done == ["alice", "bob"]
        leave()
        await waiting
        assert done == ["alice", "bob", "alice again"]

    asyncio.run(main())


def test_a_text_with_a_grammar_has_one_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner would rest between two, before the text begins."""
    pytest.importorskip("llguidance", reason="it is not a dependency of the tests")
    turns, real = list[tuple[str, bool]](), Turns.run

    async def run(self: Turns, owner: str, work: Any, *, slow: bool = False) -> Any:
        turns.append((owner, slow))
        return await real(self, owner, work, slow=slow)

    monkeypatch.setattr(Turns, "run", run)
    asked = {"prompt": "A", "max_tokens": 3, "stream": True, "structured_outputs": {"regex": "[xy]{2}"}}
    with serving(sprinter.load_pair(), rows=1, api_keys=keys_of(tmp_path)) as server:
        assert server.post(TEXT, asked, **as_("bob")).status_code == 200
    assert turns == [("bob", True)]


def test_a_client_that_leaves_while_its_grammar_is_compiled_is_charged_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go, charged = threading.Event(), threading.Event(), list[int]()

    def prepare(*_: Any) -> None:
        began.set()
        assert go.wait(30)

    asked = {"prompt": PROMPT, "max_tokens": 3, "structured_outputs": {"regex": "[xy]{2}"}}
    with serving(double_pair(), rows=1, max_len=96, api_keys=keys_of(tmp_path)) as server:
        service = server.service
        monkeypatch.setattr(service.pair._runtime.grammars, "prepare", prepare)
        monkeypatch.setattr(service.owners, "charge_tokens", lambda owner, count: charged.append(count))
        with server.http() as http, pytest.raises(httpx2.ReadTimeout):
            http.post(TEXT, json=asked, timeout=0.5, **as_("bob"))
        assert began.is_set()
        until(lambda: not service.owners.open.of("bob"))
        go.set()
        assert server.post(TEXT, {"prompt": PROMPT, "max_tokens": 2}, **as_("bob")).status_code == 200
    assert charged == [len(PROMPT) + 2]


def test_what_fails_when_nobody_waits_for_it_is_not_logged() -> None:
    async def main() -> None:
        turns, go, told = Turns(), threading.Event(), list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))

        def fail() -> None:
            assert go.wait(30)
            raise ValueError

        work = asyncio.create_task(turns.run("alice", fail, slow=True))
        await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        go.set()
        assert await turns.run("alice", lambda: 5) == 5
        del work
        gc.collect()
        assert not told

    asyncio.run(main())


def test_refusals_of_an_owner_are_sent_one_by_one_where_others_ask_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        crowd, pauses, told = {"alice"}, list[float](), list[str]()
        turns = Turns(lambda owner: bool(crowd - {owner}))
        go = asyncio.Event()

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            await go.wait()

        async def refuse(owner: str) -> None:
            await turns.pause(f"{owner} refusals", owner)
            told.append(owner)

        with monkeypatch.context() as patch:
            real = asyncio.sleep
            patch.setattr("sprinter.serve.turns.asyncio.sleep", sleep)
            await refuse("alice")
            assert told == ["alice"] and not pauses  # nobody else is there
            crowd.add("bob")
            tasks = [asyncio.create_task(refuse(owner)) for owner in ("alice", "alice", "bob")]
            await real(0)
            assert told == ["alice"] and len(pauses) == 2  # one of each at a time
            go.set()
            await asyncio.gather(*tasks)
        assert sorted(told) == ["alice"] * 3 + ["bob"] and len(pauses) == 3

    asyncio.run(main())


def test_what_costs_little_is_asked_for_in_a_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key might ask for the list of models, or the metrics, a thousand times a second; texts wait for no line."""
    lines = list[tuple[str, str]]()

    async def pause(self: Turns, line: str, owner: str) -> None:
        lines.append((line, owner))

    monkeypatch.setattr(Turns, "pause", pause)
    with (
        serving(double_pair(), rows=1, max_len=96, api_keys=keys_of(tmp_path)) as server,
        server.http() as http,
    ):
        assert server.post(TEXT, {"prompt": PROMPT, "max_tokens": 2}, **as_("alice")).status_code == 200
        assert not lines
        for path in ("/v1/models", "/metrics", "/nowhere"):
            http.get(path, **as_("bob"))
        http.head("/v1/models", **as_("bob"))
    assert lines == [("bob pauses", "bob")] * 4


def test_refusals_and_leavings_wait_in_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a key; a request that leaves makes its owner's next ones wait."""
    keys, lines = keys_of(tmp_path), list[tuple[str, str]]()

    async def pause(self: Turns, line: str, owner: str) -> None:
        lines.append((line, owner))

    monkeypatch.setattr(Turns, "pause", pause)
    asked = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True, "stream": True}
    with serving(double_pair(), rows=2, max_len=96, api_keys=keys) as server:
        assert server.post(TEXT, {"prompt": PROMPT, "max_tokens": 2}, **as_("alice")).status_code == 200
        assert server.post(TEXT, {"prompt": PROMPT}).status_code == 401
        assert not lines
        assert server.post(TEXT, {"prompt": PROMPT, "n": -1}, **as_("alice")).status_code == 400
        assert lines == [("alice pauses", "alice")]
        with held(server.service), server.http() as http, http.stream("POST", TEXT, json=asked, **as_("bob")):
            pass  # the connection is closed
        until(lambda: len(lines) == 2)
    assert lines[1] == ("bob", "bob")


def test_slow_work_has_a_thread_of_its_own() -> None:
    """Of many owners: another one's piece, short or slow, waits for none of theirs."""

    async def main() -> None:
        turns, go = Turns(lambda owner: True), threading.Event()
        slow = [asyncio.create_task(turns.run(owner, go.wait, slow=True)) for owner in "abcdefghijkl"]
        try:
            for own in (False, True):
                assert await asyncio.wait_for(turns.run("carol", lambda: 5, slow=own), 30) == 5
        finally:
            go.set()
        assert all(await asyncio.gather(*slow))

    asyncio.run(main())


def test_a_large_answer_is_made_in_small_pieces_where_others_ask_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def sizes(crowded: bool) -> list[int]:
        service, sent = Mock(turns=Turns(lambda owner: crowded)), list[int]()
        monkeypatch.setattr("sprinter.serve.turns._REST", 0)

        async def send(piece: bytes, more: bool) -> None:
            sent.append(len(piece))

        await send_parts(service, "alice", ("x" * 100 for _ in range(2000)), send)
        return sent

    whole, small = asyncio.run(sizes(False)), asyncio.run(sizes(True))
    assert sum(whole) == sum(small) == 200_000
    assert len(whole) == 4 and max(small) < 2**13 + 100
