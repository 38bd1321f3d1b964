"""asyncio: texts are those of ``generate``; who leaves, fails or waits concerns nobody else."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from tests.engine.conftest import double_pair, fail_pass
from tests.engine.test_batch import facts, requests
from tests.engine.test_failures import hooked, nan_at

import sprinter
import sprinter.engine.worker as worker_module
from sprinter.engine.fair_queue import FairQueue
from sprinter.errors import (
    ClosedEngineError,
    DeadEngineError,
    NoMemoryError,
    QueueFullError,
    SprinterError,
    UserError,
)

PROMPT = [3, 7, 1, 12, 5]


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return double_pair()


def asked(i: int, new: int = 14) -> dict[str, Any]:
    return {"prompt": [*PROMPT, i], "method": "speculative(gamma=3)", "max_new_tokens": new, "seed": i}


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


class Steps:
    """Steps of an engine: counted, and held until they are let go."""

    def __init__(self, engine: sprinter.AsyncEngine, *, held: bool = False) -> None:
        self.count, self.free = 0, threading.Event()
        if not held:
            self.free.set()
        self.fails: dict[int, Exception] = {}
        real = engine._engine.step

        def step() -> Any:
            assert self.free.wait(30)
            self.count += 1
            if self.count in self.fails:
                raise self.fails[self.count]
            return real()

        engine._engine.step = step  # type: ignore[method-assign]


def test_a_step_wakes_the_event_loop_once_for_all_readers(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[int] = []
    real = worker_module._go_on
    monkeypatch.setattr(
        worker_module, "_go_on", lambda waiting: (woken.append(len(waiting)), real(waiting))[1]
    )

    async def main() -> None:
        async with sprinter.AsyncEngine(pair, 4, max_len=40) as engine:
            steps, all_wait = Steps(engine), threading.Event()
            engine._worker._calls.put(lambda: all_wait.wait(30))  # so that the first step has them all
            streams = [engine.stream(**asked(i) | {"method": "autoregressive"}) for i in range(4)]
            reading = [asyncio.create_task(stream.finish()) for stream in streams]
            await until(lambda: all(stream._request._news is not None for stream in streams))
            all_wait.set()
            await asyncio.gather(*reading)
            assert woken[0] == 4 and len(woken) <= steps.count + len(streams)

    run(main())


# --- one text -------------------------------------------------------------------------------------------------------
def test_astream_gives_the_tokens_of_stream(pair: sprinter.Pair) -> None:
    async def main() -> None:
        for request in requests(6):
            expected = pair.generate(**request)
            stream = pair.astream(**request)
            assert stream.generation is None and [token.id async for token in stream] == [
                token.id for token in expected.tokens
            ]
            assert stream.generation is not None and facts(stream.generation) == facts(expected)
            assert facts(await pair.astream(**request).finish()) == facts(expected)

    run(main())


def test_astream_checks_at_once_and_raises_errors_once(pair: sprinter.Pair) -> None:
    async def main() -> None:
        with pytest.raises(UserError, match="max_new_tokens"):
            pair.astream(PROMPT, max_new_tokens=0)
        stream = pair.astream(**asked(1))
        with (
            hooked(pair.models.target.model.lm_head, nan_at(2, 0)),  # type: ignore[union-attr]
            pytest.raises(SprinterError, match="NaN"),
        ):
            await stream.finish()
        assert await stream.read() == []
        assert stream.generation is not None and stream.generation.finish_reason == "error"

    run(main())


def test_a_cancelled_reader_closes_its_astream(pair: sprinter.Pair) -> None:
    async def main() -> None:
        begun, go = threading.Event(), threading.Event()

        def slow(*_: object) -> None:
            begun.set()
            assert go.wait(30)

        stream = pair.astream(**asked(1, 60))
        first = await anext(stream)
        with hooked(pair.models.target.model.lm_head, slow):  # type: ignore[union-attr]
            task = asyncio.create_task(stream.finish())
            await asyncio.to_thread(begun.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go.set()
        inner = stream._stream  # type: ignore[attr-defined]
        await until(lambda: inner._closed)
        assert first.id == pair.generate(**asked(1, 60)).tokens[0].id
        assert await stream.read() == []

    run(main())


# --- many texts -----------------------------------------------------------------------------------------------------
def test_texts_are_those_of_generate(pair: sprinter.Pair) -> None:
    expected = [facts(pair.generate(**request)) for request in requests()]

    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=4) as engine:

            async def one(request: dict[str, Any]) -> tuple[Any, ...]:
                stream = engine.stream(**request)
                ids = [token.id async for token in stream]
                assert stream.generation is not None
                assert ids == [token.id for token in stream.generation.tokens]
                times = stream.times
                assert times.admitted_s is not None and times.first_token_s is not None
                assert 0 <= times.admitted_s <= times.first_token_s <= (times.ended_s or 0)
                return facts(stream.generation)

            assert await asyncio.gather(*(one(request) for request in requests())) == expected
            assert engine.unfinished == 0 and engine.error is None

    run(main())


def test_streams_are_read_in_other_event_loops(pair: sprinter.Pair) -> None:
    expected = [facts(pair.generate(**asked(i))) for i in range(3)]
    engine = sprinter.AsyncEngine(pair, rows=2)
    found: list[Any] = [None] * 3

    def thread(i: int) -> None:
        found[i] = facts(asyncio.run(engine.generate(**asked(i))))

    threads = [threading.Thread(target=thread, args=(i,)) for i in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    engine.close()
    assert found == expected


def test_nothing_runs_without_requests(pair: sprinter.Pair) -> None:
    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=2) as engine:
            rounds = [0]
            real = engine._worker._round

            def counted() -> None:
                rounds[0] += 1
                real()

            engine._worker._round = counted  # type: ignore[method-assign]
            await engine.generate(**asked(1))
            await asyncio.sleep(0.1)
            before = rounds[0]
            await asyncio.sleep(0.3)
            assert rounds[0] == before > 1

    run(main())


# --- leaving --------------------------------------------------------------------------------------------------------
async def cancel_task(engine: sprinter.AsyncEngine, request: dict[str, Any]) -> Callable[[], Awaitable[None]]:
    stream = engine.stream(**request)
    task = asyncio.create_task(stream.finish())
    await until(lambda: stream._request.first is not None)

    async def leave() -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    return leave


async def close_stream(
    engine: sprinter.AsyncEngine, request: dict[str, Any]
) -> Callable[[], Awaitable[None]]:
    stream = engine.stream(**request)
    await anext(stream)

    async def leave() -> None:
        await stream.aclose()
        assert stream.generation is not None and stream.generation.finish_reason == "cancelled"

    return leave


async def drop_stream(engine: sprinter.AsyncEngine, request: dict[str, Any]) -> Callable[[], Awaitable[None]]:
    streams = [engine.stream(**request)]
    await anext(streams[0])

    async def leave() -> None:
        streams.clear()
        gc.collect()

    return leave


@pytest.mark.parametrize("how", [cancel_task, close_stream, drop_stream])
def test_a_reader_that_leaves_frees_its_row_before_the_next_step(pair: sprinter.Pair, how: Any) -> None:
    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=2) as engine:
            steps = Steps(engine)
            others = asyncio.create_task(engine.generate(**asked(5, 60)))
            leave = await how(engine, asked(1, 70))
            freed: list[int] = []
            cancel = engine._engine.cancel

            def noted(id: int) -> sprinter.Generation:
                freed.append(steps.count)
                return cancel(id)

            engine._engine.cancel = noted  # type: ignore[method-assign]
            steps.free.clear()  # the step under way ends, the next one is held
            await asyncio.sleep(0.05)
            leaving = asyncio.create_task(leave())
            await asyncio.sleep(0.05)
            before = steps.count
            steps.free.set()
            await leaving
            await until(lambda: bool(freed))
            assert freed[0] <= before + 1
            assert facts(await others) == facts(pair.generate(**asked(5, 60)))

    run(main())


def test_a_request_may_leave_the_queue(pair: sprinter.Pair) -> None:
    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=1) as engine:
            steps = Steps(engine, held=True)
            first, second, third = (engine.stream(**asked(i)) for i in range(3))
            closing = asyncio.create_task(second.aclose())
            steps.free.set()
            await closing
            assert second.generation is not None and second.generation.tokens == []
            assert second.generation.finish_reason == "cancelled" and second.times.admitted_s is None
            for i, stream in ((0, first), (2, third)):
                assert facts(await stream.finish()) == facts(pair.generate(**asked(i)))

    run(main())


# --- limits ---------------------------------------------------------------------------------------------------------
def test_the_queue_is_bounded(pair: sprinter.Pair) -> None:
    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=1, max_waiting=2) as engine:
            steps = Steps(engine, held=True)
            streams = [engine.stream(**asked(i)) for i in range(3)]
            assert (engine.unfinished, engine.waiting) == (3, 2)
            with pytest.raises(QueueFullError, match="2 wait already"):
                engine.stream(**asked(3))
            steps.free.set()
            assert [facts(await stream.finish()) for stream in streams] == [
                facts(pair.generate(**asked(i))) for i in range(3)
            ]
            assert (await engine.generate(**asked(3))).finish_reason == "length"

    run(main())


def test_mistakes_are_raised_at_once(pair: sprinter.Pair) -> None:
    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=1, max_len=32) as engine:
            assert (engine.rows, engine.max_len) == (1, 32)
            with pytest.raises(UserError, match="a row of the engine holds 32"):
                engine.stream(**asked(1, 60))
            with pytest.raises(UserError, match="out of range"):
                engine.stream([99])
            assert engine.unfinished == 0

    run(main())
    with pytest.raises(UserError, match="max_waiting"):
        sprinter.AsyncEngine(pair, max_waiting=-1)


def test_owners_take_turns(pair: sprinter.Pair) -> None:
    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=1) as engine:
            steps = Steps(engine, held=True)
            streams = [engine.stream(**asked(i, 3), owner="many") for i in range(4)]
            streams.append(engine.stream(**asked(4, 3), owner="one"))
            steps.free.set()
            for stream in streams:
                await stream.finish()
            order = sorted(range(5), key=lambda i: streams[i].times.admitted_s or 0.0)
            assert order == [0, 1, 4, 2, 3] or order == [0, 4, 1, 2, 3]

    run(main())


def test_turns_of_a_queue() -> None:
    queue = FairQueue[int]()
    for owner, item in (("a", 1), ("a", 2), ("a", 3), ("b", 10), ("c", 20), ("b", 11)):
        queue.put(owner, item)
    assert queue.remove("a", 2) and not queue.remove("a", 2) and not queue.remove("z", 1)
    assert [queue.pop() for _ in range(len(queue))] == [1, 10, 20, 3, 11]
    queue.put("a", 1)
    with pytest.raises(IndexError):
        queue.pop(but=["a"])
    queue.put("b", 2)
    assert (queue.pop(but=["a"]), queue.of("a"), queue.pop()) == (2, 1, 1)
    with pytest.raises(IndexError):
        queue.pop()


@pytest.mark.parametrize("shared", [False, True])
def test_no_owner_has_all_rows_that_are_shared(pair: sprinter.Pair, shared: bool) -> None:
    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=3, shared_rows=shared) as engine:
            steps = Steps(engine, held=True)
            streams = [engine.stream(**asked(i, 8), owner="many") for i in range(5)]
            steps.free.set()
            for stream in streams:
                await stream.finish()
            asks = [stream._request for stream in streams]
            waited = asks[2].admitted >= min(one.ended or 0.0 for one in asks[:2])  # type: ignore[operator]
            assert waited == shared, "the third of three rows is for others"

    run(main())


def test_a_row_is_left_free_for_each_other_owner(pair: sprinter.Pair) -> None:
    """Also where two others ask for as many texts as they can."""

    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=4, shared_rows=2) as engine:
            steps = Steps(engine, held=True)
            streams = [engine.stream(**asked(i, 8), owner="many"[i % 2]) for i in range(8)]
            late = engine.stream(**asked(9, 8), owner="late")
            steps.free.set()
            for stream in (*streams, late):
                await stream.finish()
            asks = [stream._request for stream in streams]
            first = min(one.ended or 0.0 for one in asks)
            assert late._request.admitted is not None and late._request.admitted < first
            assert sum((one.admitted or 0.0) < first for one in asks) == 3

    run(main())


# --- failures -------------------------------------------------------------------------------------------------------
def test_a_request_that_fails_fails_alone(pair: sprinter.Pair) -> None:
    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=3) as engine:
            steps = Steps(engine, held=True)
            streams = [engine.stream(**asked(i)) for i in range(3)]
            with hooked(pair.models.target.model.lm_head, nan_at(3, 1)):  # type: ignore[union-attr]
                steps.free.set()
                ends = await asyncio.gather(*(one.finish() for one in streams), return_exceptions=True)
            failed = [i for i, end in enumerate(ends) if isinstance(end, SprinterError)]
            assert len(failed) == 1 and "logits are NaN" in str(ends[failed[0]])
            partial = streams[failed[0]].generation
            assert partial is not None and partial.finish_reason == "error"
            assert await streams[failed[0]].read() == []
            for i, end in enumerate(ends):
                if i not in failed:
                    assert isinstance(end, sprinter.Generation)
                    assert facts(end) == facts(pair.generate(**asked(i)))
            assert engine.error is None

    run(main())


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_without_memory_the_requests_of_a_pass_end(
    pair: sprinter.Pair, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with sprinter.AsyncEngine(pair, rows=2) as engine:
            streams = [engine.stream(**asked(i, 30)) for i in range(2)]
            for stream in streams:
                with pytest.raises(NoMemoryError, match="try again later"):
                    await stream.finish()
            assert (await engine.generate(**asked(1))).finish_reason == "length"

    fail_pass(monkeypatch, 5, error)
    run(main())


def test_an_error_of_the_engine_is_told_to_everybody(pair: sprinter.Pair) -> None:
    async def main() -> None:
        deaths: list[BaseException] = []
        engine = sprinter.AsyncEngine(pair, rows=1, on_death=deaths.append)
        steps = Steps(engine, held=True)
        steps.fails[2] = RuntimeError("the device is gone")
        streams = [engine.stream(**asked(i, 30)) for i in range(3)]
        scoring = asyncio.create_task(engine.score(PROMPT))
        await asyncio.sleep(0)
        steps.free.set()
        for stream in streams:
            with pytest.raises(DeadEngineError, match="the device is gone"):
                await stream.finish()
            await stream.aclose()
        with pytest.raises(DeadEngineError):
            await scoring
        await until(lambda: bool(deaths))
        assert engine.error is deaths[0] is steps.fails[2] and engine.closing
        with pytest.raises(DeadEngineError, match="start it again"):
            engine.stream(**asked(1))
        assert engine.unfinished == 0
        await engine.drain()
        await engine.aclose()

    run(main())


# --- the end --------------------------------------------------------------------------------------------------------
def test_drain_waits_for_what_is_open(pair: sprinter.Pair) -> None:
    async def main() -> None:
        engine = sprinter.AsyncEngine(pair, rows=1)
        tasks = [asyncio.create_task(engine.generate(**asked(i))) for i in range(3)]
        await until(lambda: engine.unfinished == 3)
        draining = asyncio.create_task(engine.drain())
        await until(lambda: engine.closing)
        with pytest.raises(ClosedEngineError, match="takes no more requests"):
            engine.stream(**asked(4))
        await draining
        assert engine.unfinished == 0
        for i, task in enumerate(tasks):
            assert facts(await task) == facts(pair.generate(**asked(i)))
        await engine.aclose()
        await engine.aclose()
        with pytest.raises(ClosedEngineError, match="make another"):
            await engine.score(PROMPT)

    run(main())


def test_close_ends_what_is_open(pair: sprinter.Pair) -> None:
    async def main() -> None:
        engine = sprinter.AsyncEngine(pair, rows=1)
        first, second = engine.stream(**asked(1, 70)), engine.stream(**asked(2, 70))
        await anext(first)
        await engine.aclose()
        for stream in (first, second):
            with pytest.raises(ClosedEngineError, match="before the text was finished"):
                await stream.finish()
        assert not engine._worker._thread.is_alive()

    run(main())


def test_an_engine_that_is_dropped_ends_its_thread(pair: sprinter.Pair) -> None:
    engine = sprinter.AsyncEngine(pair, rows=1)
    thread = engine._worker._thread
    asyncio.run(engine.generate(**asked(1)))
    del engine
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
