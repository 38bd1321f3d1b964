"""Rows that wait for their grammars: nobody else waits for them, and owners take turns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest

import sprinter
from sprinter.engine import grammar, scheduler
from sprinter.engine.engine import Engine
from sprinter.engine.mask_threads import MaskThreads
from sprinter.engine.policy import Policy

FORMAT = {"type": "json_object"}
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "seed": 3, "method": "speculative(gamma=2)"}


class Held:
    """Threads that find nothing before they are let go; then, all at once."""

    def __init__(self) -> None:
        self.free, self.left = False, list[tuple[Future[Any], Callable[[], Any]]]()

    def submit(self, owner: str, find: Callable[[], Any]) -> Future[Any]:
        found: Future[Any] = Future()
        self.left.append((found, find))
        if self.free:
            self.let_go()
        return found

    def let_go(self) -> None:
        self.free = True
        while self.left:
            found, find = self.left.pop()
            found.set_result(find())


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair(compile=False)


@pytest.mark.parametrize("others", [1, 2])
def test_a_slow_grammar_holds_up_its_own_row_alone(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    confined, plain = (
        pair.generate("A", response_format=FORMAT, **OPTIONS),
        pair.generate("The river", **OPTIONS),
    )
    held = Held()
    monkeypatch.setattr(grammar, "_threads", lambda: held)
    with Engine(pair, rows=3, max_len=64, policy=Policy(first=True)) as engine:
        slow = engine.add("A", response_format=FORMAT, **OPTIONS)
        free = [engine.add("The river", **OPTIONS) for _ in range(others)]
        done: dict[int, Any] = {}
        for _ in range(40):  # steps in which the slow one has no answer
            done |= {event.id: event.generation for event in engine.step() if event.generation is not None}
        assert sorted(done) == free and held.left, "the others have ended, and this one has not begun"
        held.let_go()
        while slow not in done:
            done |= {event.id: event.generation for event in engine.step() if event.generation is not None}
    assert done[slow].text == confined.text
    assert {done[id].text for id in free} == {plain.text}


def test_a_new_text_waits_for_no_grammar_of_others(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even as long as the rows of others wait for one another, in any step until it has its first token."""
    held, waits = Held(), list[float | None]()

    def wait(left: Any, timeout: float) -> None:
        waits.append(timeout)
        assert len(waits) < 1000, "the new text waits too"

    monkeypatch.setattr(grammar, "_threads", lambda: held)
    monkeypatch.setattr(scheduler, "wait", wait)
    monkeypatch.setattr(scheduler, "_POLL", 1e-6)
    monkeypatch.setattr(scheduler, "_PATIENCE", 0.0)
    policy = Policy(first=True, prompt_piece=4, prompt_tokens=4)
    with Engine(pair, rows=3, max_len=64, policy=policy) as engine:
        options = sprinter.GenerationOptions(**OPTIONS)
        confined = options.replace(response_format=FORMAT)
        for _ in range(2):
            engine.put(engine._task("A", confined, 0, "many"))
        for _ in range(4):
            engine.step()
        monkeypatch.setattr(scheduler, "_PATIENCE", 1e9)
        waits.clear()
        id = engine.put(
            engine._task("The river rises in the mountains, and then it flows to" * 2, options, 2, "one")
        )
        firsts = (any(event.id == id and event.tokens for event in engine.step()) for _ in range(40))
        steps = next(number for number, first in enumerate(firsts) if first)
        assert steps >= 3, "some of these steps were of all rows"
        monkeypatch.setattr(scheduler, "_PATIENCE", 0.0)


def test_owners_have_a_thread_each() -> None:
    """Their own questions wait for one another, in turn; others do not wait."""
    threads, order, began, go = MaskThreads(), list[str](), Event(), Event()

    def hold() -> None:
        began.set()
        assert go.wait(60)

    busy = threads.submit("busy", hold)
    assert began.wait(60)
    found = [threads.submit("busy", lambda i=i: order.append(f"busy {i}")) for i in range(3)]  # type: ignore[misc]
    threads.submit("one", lambda: order.append("one")).result(60)
    assert order == ["one"]
    go.set()
    for one in (busy, *found):
        one.result(60)
    assert order == ["one", "busy 0", "busy 1", "busy 2"]


def test_a_question_that_is_cancelled_holds_up_none() -> None:
    threads, began, go = MaskThreads(), Event(), Event()
    busy = threads.submit("a", lambda: (began.set(), go.wait(60)))
    assert began.wait(60)
    left, next_one = threads.submit("a", lambda: 1), threads.submit("a", lambda: 2)
    assert left.cancel()
    go.set()
    assert busy.result(60) and next_one.result(60) == 2


def test_what_cannot_be_found_is_the_error_of_its_own_answer() -> None:
    threads = MaskThreads()

    class Panic(BaseException):
        """As a failed assertion of llguidance is."""

    def fail() -> None:
        raise Panic("no")

    broken, whole = threads.submit("a", fail), threads.submit("a", lambda: 7)
    with pytest.raises(RuntimeError, match=r"Panic.*no"):
        broken.result(60)
    assert whole.result(60) == 7
    assert threads.submit("a", lambda: 8).result(60) == 8


def test_texts_of_a_request_read_their_schema_once(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, own = [], grammar._asked
    monkeypatch.setattr(grammar, "_asked", lambda options: read.append(1) or own(options))  # type: ignore[func-returns-value]
    options = sprinter.GenerationOptions(response_format={"type": "json_object"}, max_new_tokens=2)
    for seed in range(3):
        pair.generate("A", options=options.replace(seed=seed))
    assert len(read) == 1


@pytest.mark.parametrize("choices", [("a", "b"), ("a", "b", "ab")])
def test_ends_of_one_text_are_not_those_of_another(pair: sprinter.Pair, choices: tuple[str, ...]) -> None:
    """A token that stops one text may be written in another, by the same grammar, where it begins and where it ends."""
    assert pair.tokenizer is not None
    grammars = grammar.Grammars(pair.tokenizer, pair.models.vocab_size)
    options = sprinter.GenerationOptions(choices=choices)
    (a, b), eos = ([pair.tokenizer.convert_tokens_to_ids(one) for one in "ab"], pair.tokenizer.eos_token_id)

    def masks(ends: tuple[int, ...]) -> list[list[bool]]:
        found = grammars.of(options, ends)
        assert found is not None
        mask = found.masks([(), (b,)]).result(60)
        return mask[:, [a, b, eos]].tolist()

    plain = masks((eos,))
    assert plain == [[True, True, False], [False, False, True]]
    assert masks((eos, a)) == [[False, True, False], [True, False, True]]
    assert masks((eos,)) == plain
