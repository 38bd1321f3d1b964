"""The first text of an owner without other requests goes before others' work, for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.serve.server import held, serving, until
from tests.serve.test_fair_share import PROMPT, TEXT, as_, keys_of

import sprinter
from sprinter.serve.service import Service
from sprinter.serve.turns import FirstTexts, Turns


def test_others_wait_for_all_first_texts_and_then_go_on_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        now, timers = [10.0], list[Any]()
        loop = Mock(time=lambda: now[0], call_later=lambda *given: timers.append(given) or Mock())
        monkeypatch.setattr("sprinter.serve.turns.asyncio.get_running_loop", lambda: loop)
        first = FirstTexts()
        one, other = first.begin("a"), first.begin("b")
        assert one and other and [seconds for seconds, _ in timers] == [0.1]
        waits = asyncio.create_task(first.over())
        one(), one()
        await asyncio.sleep(0)
        assert not waits.done()
        now[0] = 10.04
        other()
        await waits
        now[0] = 10.07
        assert first.begin("a") is None  # others have their turn
        now[0] = 10.09
        late = first.begin("c")
        assert late is not None
        waits = asyncio.create_task(first.over())
        await asyncio.sleep(0)
        assert not waits.done()
        now[0] = 10.19
        timers[1][1]()  # the first text takes too long
        await waits
        late()
        assert first.begin("a") is None

    asyncio.run(main())


def test_only_who_has_several_requests_waits() -> None:
    async def main() -> None:
        turns = Turns(several=lambda owner: owner == "alice")
        leave = turns.first.begin("bob")
        assert leave is not None and await turns.run("bob", lambda: 5) == 5
        done = asyncio.create_task(turns.run("alice", lambda: 7))
        await asyncio.sleep(0.01)
        assert not done.done()
        leave()
        assert await done == 7

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_work_of_a_busy_key_begins_after_anothers_first_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Alice writes a text and counts tokens; what she asks after Bob is read when his text has begun."""
    counted, real, answers = list[str](), Service.tokenized, list[int]()

    def tokenized(self: Service, *given: Any) -> list[int]:
        counted.append(given[1])
        return real(self, *given)

    monkeypatch.setattr(Service, "tokenized", tokenized)
    monkeypatch.setattr("sprinter.serve.turns._FIRST_S", 60.0)
    asked = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True, "stream": stream}

    def post(path: str, body: dict[str, Any], who: str) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: answers.append(server.post(path, body, **as_(who)).status_code)
        )
        thread.start()
        return thread

    with serving(sprinter.load_pair(), rows=3, max_len=96, api_keys=keys_of(tmp_path)) as server:
        opened, first = server.service.owners.open, server.service.turns.first
        with held(server.service):
            threads = [post(TEXT, asked, "alice")]
            until(lambda: opened.of("alice") == 1)
            threads += [post(TEXT, asked, "bob")]
            until(lambda: len(first._waiting) == 1)
            threads += [post("/tokenize", {"prompt": "a"}, "alice")]
            until(lambda: opened.of("alice") == 2)
            time.sleep(0.05)
            assert not counted
        for thread in threads:
            thread.join(30)
    assert counted == ["alice"] and answers == [200] * 3


def test_a_client_that_has_its_answer_asks_for_nothing(tmp_path: Path) -> None:
    """It may ask on at once, and its next request is its only one, though the first one is not closed yet."""
    with serving(sprinter.load_pair(), rows=1, max_len=96, api_keys=keys_of(tmp_path)) as server:
        owners, seen, real = server.service.owners, list[int](), server.service.turns.first.begin
        owners.open.take("alice")
        server.service.turns.first.begin = lambda owner: seen.append(owners.asking.of("bob")) or real(owner)
        with server.http() as http:
            for stream in (False, True, False):
                asked = {"prompt": PROMPT, "max_tokens": 2, "stream": stream}
                assert http.post(TEXT, json=asked, **as_("bob")).status_code == 200
                assert owners.asking.of("bob") == 0
        owners.open.take("alice", -1)
    assert seen == [1, 1, 1]


def test_an_owner_does_not_wait_for_its_own_first_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do others, once it asks for more than one."""
    monkeypatch.setattr("sprinter.serve.turns._FIRST_S", 60.0)
    asked = {"prompt": PROMPT, "max_tokens": 2}
    with serving(sprinter.load_pair(), rows=1, max_len=96, api_keys=keys_of(tmp_path)) as server:
        owners, first = server.service.owners, server.service.turns.first
        owners.open.take("alice")
        with held(server.service):
            thread = threading.Thread(target=lambda: server.post(TEXT, asked, **as_("bob")))
            thread.start()
            until(lambda: len(first._waiting) == 1)
            began = time.monotonic()
            assert server.post("/tokenize", {"prompt": "a"}, **as_("bob")).status_code == 200
            assert not first._waiting and time.monotonic() - began < 10
        thread.join(30)
        owners.open.take("alice", -1)


def test_a_refused_request_is_expected_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that asks for nothing but what is refused holds up nobody's text."""
    monkeypatch.setattr("sprinter.engine.worker._EXPECTED_S", 60.0)
    with serving(sprinter.load_pair(), rows=1, max_len=96, api_keys=keys_of(tmp_path)) as server:
        expected = server.service.engine._worker._expected
        server.service.owners.open.take("alice")
        refused = server.post(TEXT, {"prompt": [3] * 200, "max_tokens": 2}, **as_("bob"))
        assert refused.status_code == 400 and expected.owner == "bob"
        until(lambda: expected.left_s == 0)
        asked = {"prompt": PROMPT, "max_tokens": 2}
        assert server.post(TEXT, asked, **as_("alice")).status_code == 200
        server.service.owners.open.take("alice", -1)


def test_a_pass_of_others_does_not_begin_before_an_expected_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        steps = list[int]()
        async with sprinter.AsyncEngine(sprinter.load_pair(), rows=2, max_len=96) as engine:
            worker = engine._worker
            real = worker._step
            monkeypatch.setattr(worker, "_step", lambda: (steps.append(len(worker._live)), real())[1])
            long: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
            async with engine.stream(PROMPT, owner="alice", **long) as text:
                await text.read()
                monkeypatch.setattr("sprinter.engine.worker._EXPECTED_S", 60.0)
                engine.expect("bob")
                await asyncio.sleep(0.05)  # the step that is under way
                before = len(steps)
                await asyncio.sleep(0.05)
                assert len(steps) == before
                assert (await engine.generate(PROMPT, owner="bob", max_new_tokens=2)).tokens
                assert steps[before] == 2
                monkeypatch.setattr("sprinter.engine.worker._EXPECTED_S", 0.01)
                engine.expect("bob")  # who does not come
                before = len(steps)
                await asyncio.wait_for(text.finish(), 30)
                assert len(steps) > before

    asyncio.run(main())
