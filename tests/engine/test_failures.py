"""What fails, fails alone; what was broken off is done again; nothing that a broken pass left behind is ever read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.engine.conftest import double_pair
from tests.engine.disturbed import KINDS, facts, runner_maker
from tests.engine.disturbed import text as words
from tests.models.told import Told

import sprinter
from sprinter.decode import row as row_module
from sprinter.engine import pool
from sprinter.engine import scheduler as batches
from sprinter.engine import stream as streams
from sprinter.engine.engine import Engine
from sprinter.engine.jobs import Models, TargetJob
from sprinter.engine.policy import Policy
from sprinter.engine.rows import CacheRows, Feed, RequestRow
from sprinter.engine.stream import TokenReader
from sprinter.engine.task import Task
from sprinter.engine.work import Work
from sprinter.errors import BatchError, SprinterError

PROMPT = [3, 7, 1, 12, 5]


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return double_pair()


def asked(i: int, method: str = "speculative(gamma=3)", new: int = 14) -> dict[str, Any]:
    return {"prompt": [*PROMPT, i], "method": method, "max_new_tokens": new, "seed": i}


@contextmanager
def hooked(module: torch.nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def nan_at(call: int, row: int) -> Callable[..., Any]:
    """NaN in one row of the n-th call from now on."""
    calls = [0]

    def hook(module: object, args: object, output: torch.Tensor) -> torch.Tensor | None:
        calls[0] += 1
        if calls[0] != call:
            return None
        spoilt = output.clone()
        spoilt[row % output.shape[0]] = torch.nan
        return spoilt

    return hook


@pytest.mark.parametrize("part", ["logits", "keys"])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_an_error_of_one_request_ends_that_one_alone(pair: sprinter.Pair, which: str, part: str) -> None:
    alone = [pair.generate(**asked(i)) for i in range(4)]
    model: Any = getattr(pair.models, which).model
    module = model.lm_head if part == "logits" else model.model.layers[0].self_attn.k_proj
    failed = 0
    for call in range(2, 14):
        with Engine(pair, rows=4) as engine:
            numbers = [engine.add(**asked(i)) for i in range(4)]
            with hooked(module, nan_at(call, call)):
                try:
                    done, errors, partial = engine.finish(), {}, {}
                except BatchError as error:
                    done, errors, partial = error.done, error.errors, error.partial
        assert set(done) | set(errors) == set(numbers) and not set(done) & set(errors)
        assert len(errors) <= 1 and set(partial) == set(errors)
        for i in numbers:
            assert words((done | partial)[i]) == words(alone[i])[: len((done | partial)[i].tokens)]
        for i in errors:
            assert f"the {which} model's logits are NaN" in str(errors[i])
            assert partial[i].finish_reason == "error"
        assert all(done[i].finish_reason == "length" for i in done)
        failed += len(errors)
    assert failed >= 8


def test_a_failed_request_is_named_and_told_once(pair: sprinter.Pair) -> None:
    with Engine(pair, rows=2) as engine:
        first, second = (engine.add(**asked(i)) for i in range(2))
        events = []
        with hooked(pair.models.target.model.lm_head, nan_at(2, 1)):  # type: ignore[union-attr]
            while engine.unfinished:
                events += engine.step()
        last = {event.id: event for event in events if event.generation is not None}
        assert len([event for event in events if event.generation is not None]) == 2
        assert last[first].error is None and isinstance(last[second].error, SprinterError)
        third = engine.add(**asked(2))
        assert set(engine.finish()) == {third}  # the error does not come again


def test_the_error_of_a_batch_names_the_prompt(pair: sprinter.Pair) -> None:
    prompts = [[*PROMPT, i] for i in range(4)]
    target: Any = pair.models.target.model
    message = r"prompt 2 failed: the target model's logits are NaN"
    options: Any = {"method": "speculative(gamma=3)", "max_new_tokens": 14, "seed": list(range(4))}
    pair.generate_batch(prompts, **options)  # new rows have a pass more, which allocates their buffers
    # The first call is the prompt's own pass, whose logits nobody reads.
    with hooked(target.lm_head, nan_at(2, 2)), pytest.raises(BatchError, match=message) as caught:
        pair.generate_batch(prompts, **options)
    assert caught.value.__cause__ is caught.value.errors[2]
    for i in (0, 1, 3):
        assert words(caught.value.done[i]) == words(pair.generate(**asked(i)))


def test_a_rules_own_error_ends_its_request_alone(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another request finishes in the same step: its result is not lost."""
    alone, ask, calls = pair.generate(**asked(0)), row_module._ask_rules, [0]

    def broken(row: Any, *args: Any) -> Any:
        if row.method.name.startswith("sprinter"):
            calls[0] += 1
            if calls[0] == 3:
                raise ZeroDivisionError("a rule of mine")
        return ask(row, *args)

    monkeypatch.setattr(row_module, "_ask_rules", broken)
    with Engine(pair, rows=2) as engine:
        good, bad = engine.add(**asked(0)), engine.add(**asked(1, "sprinter(tau=0.5)"))
        with pytest.raises(BatchError, match=f"request {bad} failed: a rule of mine") as caught:
            engine.finish()
    assert words(caught.value.done[good]) == words(alone)
    assert isinstance(caught.value.errors[bad], ZeroDivisionError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["speculative(gamma=3)", "specdec++", "draft-only"])
def test_an_answer_that_never_came_is_asked_for_again(
    pair: sprinter.Pair, kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every single pass there is an interrupt, once; engine and stream go on, and the text is the same."""
    monkeypatch.setattr(pool, "make_runner", runner_maker(kind))
    own = double_pair()
    alone, passes, dropped = own.generate(**asked(1, method)), Models.run, [False]

    def every_other(models: Models, jobs: Any) -> Any:
        done = passes(models, jobs)
        dropped[0] = not dropped[0]
        if dropped[0]:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Models, "run", every_other)
    with Engine(own, rows=1) as engine, own.stream(**asked(1, method)) as stream:
        number = engine.add(**asked(1, method))
        results = []
        for go_on in (lambda: engine.finish()[number], stream.finish):
            for _ in range(200):
                try:
                    results.append(go_on())
                    break
                except KeyboardInterrupt:
                    continue
    for out in results:
        assert words(out) == words(alone)
        assert out.stats.target_calls == alone.stats.target_calls
        assert out.stats.mean_drift == pytest.approx(alone.stats.mean_drift, abs=1e-9)
    assert len(results) == 2


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Work, "go_on"), (RequestRow, "goto"), (RequestRow, "was_read"), (TokenReader, "read"),
     (CacheRows, "begin"), (CacheRows, "end"),
     (batches, "Work"), (batches, "_Live"), (batches.Scheduler, "_leave")],
)  # fmt: skip
@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_anywhere_loses_no_request(
    pair: sprinter.Pair, owner: Any, name: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside ``_admit``, between an answer and the next job, while the request's own code runs."""
    alone = [pair.generate(**asked(i)) for i in range(3)]
    original, calls = getattr(owner, name), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if before and calls[0] in (1, 4):
            raise KeyboardInterrupt
        made = original(*args, **kwargs)
        if not before and calls[0] in (1, 4):
            raise KeyboardInterrupt
        return made

    with Engine(pair, rows=2) as engine:
        numbers = [engine.add(**asked(i)) for i in range(3)]
        monkeypatch.setattr(owner, name, interrupted)
        interrupts = 0
        while interrupts < 5:
            try:
                done = engine.finish()
                break
            except KeyboardInterrupt:
                interrupts += 1
    assert 1 <= interrupts < 5
    assert [words(done[number]) for number in numbers] == [words(out) for out in alone]


def broken_once(patch: pytest.MonkeyPatch, owner: Any, name: str, at: Callable[..., bool]) -> list[bool]:
    """An interrupt before the first call for which ``at`` holds; whether it came."""
    original, came = getattr(owner, name), [False]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not came[0] and at(*args):
            came[0] = True
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    patch.setattr(owner, name, interrupted)
    return came


def test_an_interrupt_in_the_closing_pass_loses_no_token(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**asked(1, "draft-only"), "meter": "complete"}
    alone = pair.generate(**settings)
    came = broken_once(monkeypatch, Models, "run", lambda models, jobs: isinstance(jobs[0], TargetJob))
    seen: list[int] = []
    with pair.stream(**settings) as stream:
        while len(seen) < len(alone.tokens):
            try:
                token = next(stream)
            except KeyboardInterrupt:
                continue
            seen.append(token.id)
        assert next(stream, None) is None
    assert came[0] and seen == [token.id for token in alone.tokens]
    assert facts(stream.generation) == facts(alone)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Task, "generation"),
        (CacheRows, "rewind"),
        (batches, "Event"),
        (TokenReader, "read"),
        (streams, "render"),
    ],
)
def test_an_interrupt_loses_no_token_of_an_event(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call in turn is broken off, until there are no more of them."""
    pair = sprinter.load_pair()
    alone = pair.generate("Once", max_new_tokens=6, seed=1)
    for call in range(1, 99):
        events: list[Any] = []
        calls = iter(range(1, 1000))
        with Engine(pair, rows=2, max_len=64) as engine, monkeypatch.context() as patch:
            came = broken_once(patch, owner, name, lambda *_, calls=calls, call=call: next(calls) == call)
            number = engine.add("Once", max_new_tokens=6, seed=1)
            while engine.unfinished:
                try:
                    events += engine.step()
                except KeyboardInterrupt:
                    continue
            events += engine.step()
        assert {event.id for event in events} == {number}
        (generation,) = [event.generation for event in events if event.generation is not None]
        seen = [token for event in events for token in event.tokens]
        assert [token.id for token in seen] == [token.id for token in alone.tokens]
        assert "".join(token.text for token in seen) == alone.text == generation.text
        if not came[0]:
            return
    raise AssertionError("it goes on for ever")


def test_what_a_broken_pass_left_in_a_living_row_is_not_read(pair: sprinter.Pair) -> None:
    """A pass writes NaN into keys and is broken off before anybody saw it; its row then reads fewer tokens."""
    runner = runner_maker("row")(pair.models.target.model, batch=2, max_len=40)
    rows = CacheRows(runner, 24, "target")
    text = [5, 3, 8, 1, 9, 4]
    model: Any = pair.models.target.model
    long = [Feed(0, 0, text), Feed(1, 0, text * 3)]
    rows.read(long)

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    keys = model.model.layers[0].self_attn.k_proj
    with hooked(keys, nan_at(1, 0)), hooked(model.lm_head, broken), pytest.raises(KeyboardInterrupt):
        rows.read([Feed(0, 6, [1, 2, 3]), Feed(1, 18, [1])])
    read = rows.read([Feed(0, 6, [1]), Feed(1, 18, [1])])
    assert not read.faults


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_pair_recovers_from_a_failing_batch(which: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the values of one prompt; whoever has its rows, or its caches, next is none the worse."""
    monkeypatch.setattr(pool, "make_runner", runner_maker(kind))
    pair, rows = double_pair(), 1 if kind == "crop" else 2
    model: Any = getattr(pair.models, which).model
    settings: dict[str, Any] = {"method": "speculative(gamma=3)", "max_new_tokens": 9}
    for one in (pair.models.target.model, pair.models.draft.model):  # type: ignore[union-attr]
        one.lm_head.register_forward_hook(
            lambda _, args, logits: logits.index_fill(-1, torch.tensor([13]), -99)
        )
    good = [[*PROMPT, 9], [4, 4], [1, 2, 3, 9]]
    alone = [words(pair.generate(prompt, **settings)) for prompt in good]

    def spoil(module: object, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        bad = (args[0] == model.model.layers[0].input_layernorm(model.model.embed_tokens.weight[13])).all(-1)
        return output.masked_fill(bad[..., None], torch.nan)

    with hooked(model.model.layers[0].self_attn.v_proj, spoil):
        for _ in range(2):
            with pytest.raises(BatchError, match="prompt 1 failed") as caught:
                pair.generate_batch([good[0], [13] * 20 + [5, 6], good[2]], rows=rows, **settings)
            assert {i: words(out) for i, out in caught.value.done.items()} == {0: alone[0], 2: alone[2]}
            texts = pair.generate_batch(good, rows=rows, **settings)
            assert [words(out) for out in texts] == alone
            with pytest.raises(SprinterError):
                pair.generate([13, 13, 13, 13], **settings)
            assert words(pair.generate(good[0], **settings)) == alone[0]


@pytest.mark.parametrize("kind", ["row", "captured"])
def test_padding_that_is_nan_reaches_nobody(pair: sprinter.Pair, kind: str) -> None:
    """Token 0, which pads, has an embedding that is not finite."""
    model: Any = double_pair().models.target.model
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = torch.nan
    recorder = Told(runner_maker(kind)(model, batch=3, max_len=40), model)
    rows = CacheRows(recorder.runner, 24, "target")
    for feeds in (
        [Feed(0, 0, [1] * 9), Feed(1, 0, [2]), Feed(2, 0, [3] * 4)],
        [Feed(0, 9, [4]), Feed(2, 4, [5, 6, 7])],
        [Feed(0, 10, [8]), Feed(1, 1, [9]), Feed(2, 7, [9])],
    ):
        assert not rows.read(feeds).faults


def test_a_stream_that_failed_says_so(pair: sprinter.Pair) -> None:
    with pair.stream(**asked(0)) as stream, hooked(pair.models.target.model.lm_head, nan_at(2, 0)):  # type: ignore[union-attr]
        with pytest.raises(SprinterError, match="logits are NaN"):
            stream.finish()
        assert stream.finish().finish_reason == "error"
        assert next(stream, None) is None or len(stream.generation.tokens) > 0


def test_an_interrupted_generate_gives_its_caches_back(pair: sprinter.Pair) -> None:
    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    pair.generate(**asked(0))
    kept = list(pair._parts.targets._free)
    with hooked(pair.models.target.model.lm_head, broken), pytest.raises(KeyboardInterrupt):  # type: ignore[union-attr]
        pair.generate(**asked(0))
    assert sorted(map(id, pair._parts.targets._free)) == sorted(map(id, kept))


def test_the_default_policy_starves_nobody(pair: sprinter.Pair) -> None:
    """Three rows are always busy with drafting; a fourth request wants three tokens of the target."""
    finished = False
    with Engine(pair, rows=4, max_len=64) as engine:
        for i in range(3):
            engine.add([1 + i], method="draft-only", max_new_tokens=10 + 5 * i, seed=i)
        plain = engine.add(PROMPT, method="autoregressive", max_new_tokens=3)
        for step in range(100):
            for event in engine.step():
                if event.generation is not None and event.id != plain:
                    engine.add([1], method="draft-only", max_new_tokens=20, seed=step)
                finished |= event.generation is not None and event.id == plain
            if finished:
                break
    assert finished, "three tokens were not written in a hundred steps"


@pytest.mark.parametrize("age", [0, 1, 3, None])
@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
def test_age_is_counted_in_steps_of_the_engine(
    pair: sprinter.Pair, age: int | None, prompt: list[int]
) -> None:
    """A plain request beside one that drafts for ever: one token each age + 1 steps, no sooner and no later."""
    policy = Policy(share=1.0, age=age)
    steps: list[int] = []
    with Engine(pair, rows=2, max_len=96, policy=policy) as engine:
        engine.add([1], method="draft-only", max_new_tokens=90)
        plain = engine.add(prompt, method="autoregressive", max_new_tokens=4)
        for step in range(1, 60):
            steps += [step for event in engine.step() if event.id == plain for _ in event.tokens]
    if age is None:
        assert steps == []
    else:
        assert steps == [1 + age + i * (age + 1) for i in range(4)]
