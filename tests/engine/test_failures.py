"""What fails, fails alone; what is broken off ends; nothing that a broken pass left behind is ever read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from tests.engine.conftest import double_pair
from tests.engine.disturbed import KINDS, runner_maker
from tests.engine.disturbed import text as words
from tests.models.told import Told

import sprinter
from sprinter.decode import decoding as decoding_module
from sprinter.engine import pool
from sprinter.engine.backends.base import RowInput, Scored, TargetRow
from sprinter.engine.backends.eager import EagerBackend
from sprinter.engine.engine import Engine
from sprinter.engine.executor import Executor, RequestRun
from sprinter.engine.policy import Policy
from sprinter.errors import BatchError, SprinterError
from sprinter.laws import Sampling

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
    alone, ask, calls = pair.generate(**asked(0)), decoding_module._ask_rules, [0]

    def broken(row: Any, *args: Any) -> Any:
        if row.method.name.startswith("sprinter"):
            calls[0] += 1
            if calls[0] == 3:
                raise ZeroDivisionError("a rule of mine")
        return ask(row, *args)

    monkeypatch.setattr(decoding_module, "_ask_rules", broken)
    with Engine(pair, rows=2) as engine:
        good, bad = engine.add(**asked(0)), engine.add(**asked(1, "sprinter(tau=0.5)"))
        with pytest.raises(BatchError, match=f"request {bad} failed: a rule of mine") as caught:
            engine.finish()
    assert words(caught.value.done[good]) == words(alone)
    assert isinstance(caught.value.errors[bad], ZeroDivisionError)


BREAKS = {
    "a pass": (Executor, "run", torch.OutOfMemoryError),
    "before its answer": (EagerBackend, "check", KeyboardInterrupt),
    "an answer": (RequestRun, "take", KeyboardInterrupt),
    "a row": (EagerBackend, "begin_text", KeyboardInterrupt),
}


@pytest.mark.parametrize("method", ["speculative(gamma=3)", "sprinter(tau=0.5)"])
@pytest.mark.parametrize("where", BREAKS)
def test_a_broken_step_ends_the_requests_in_it_alone(
    pair: sprinter.Pair, where: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their final tokens stay and are reported once; the others go on, and their rows are clean for whoever is next."""
    owner, name, error = BREAKS[where]
    alone, original = [pair.generate(**asked(i, method)) for i in range(5)], getattr(owner, name)
    reasons = set()
    for call in range(1, 24, 2):
        calls, tokens = iter(range(1, 1000)), defaultdict[int, list[int]](list)
        whole: dict[int, Any] = {}

        def broken(*args: Any, calls: Any = calls, call: int = call, **named: Any) -> Any:
            if next(calls) == call:
                raise error
            return original(*args, **named)

        with Engine(pair, rows=2, policy=Policy(share=0.0)) as engine, monkeypatch.context() as patch:
            numbers = [engine.add(**asked(i, method)) for i in range(5)]
            patch.setattr(owner, name, broken)
            while engine.unfinished:
                events: list[Any] = []
                with suppress(KeyboardInterrupt):
                    events = engine.step()
                for event in events:
                    tokens[event.id] += [token.id for token in event.tokens]
                    whole |= {} if event.generation is None else {event.id: event.generation}
            for rows in engine._models.models:
                assert rows.runner.lengths == [0, 0] and not rows._unverified
        ended = [out for out in whole.values() if out.finish_reason != "length"]
        reasons |= {out.finish_reason for out in ended}
        assert set(whole) == set(numbers) and len(ended) <= 2
        for i, number in enumerate(numbers):
            out = whole[number]
            assert tokens[number] == [token.id for token in out.tokens]
            assert words(out) == words(alone[i])[: len(out.tokens)]
            assert out in ended or words(out) == words(alone[i])
    assert reasons == {"interrupted" if error is KeyboardInterrupt else "error"}


def test_an_interrupted_stream_keeps_what_was_final(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, original, calls = pair.generate(**asked(1)), Executor.run, [0]

    def broken(models: Executor, inputs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 9:
            raise KeyboardInterrupt
        return original(models, inputs)

    monkeypatch.setattr(Executor, "run", broken)
    with pair.stream(**asked(1)) as stream:
        with pytest.raises(KeyboardInterrupt):
            stream.finish()
        out = stream.finish()
    assert out.finish_reason == "interrupted" and 0 < len(out.tokens) < len(alone.tokens)
    assert words(out) == words(alone)[: len(out.tokens)]
    assert words(pair.generate(**asked(1))) == words(alone)


def all_scored(rows: EagerBackend, *feeds: RowInput) -> bool:
    """Whether a target pass over feeds found no fault."""
    return all(isinstance(one, Scored) for one in rows.score([TargetRow(feed, Sampling()) for feed in feeds]))


def test_what_a_broken_pass_left_in_a_row_is_not_read(pair: sprinter.Pair) -> None:
    """A pass writes NaN into keys and is broken off before anybody saw it; another text then has the row."""
    rows = EagerBackend(runner_maker("row")(pair.models.target.model, batch=2, max_len=40), 24, "target")
    text = [5, 3, 8, 1, 9, 4]
    model: Any = pair.models.target.model
    assert all_scored(rows, RowInput(0, 0, text), RowInput(1, 0, text * 3))

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    keys = model.model.layers[0].self_attn.k_proj
    with hooked(keys, nan_at(1, 0)), hooked(model.lm_head, broken), pytest.raises(KeyboardInterrupt):
        all_scored(rows, RowInput(0, 6, [1, 2, 3]), RowInput(1, 18, [1]))
    for row in range(2):
        rows.end_text(row)
    assert rows.runner.lengths == [0, 0]
    assert all_scored(rows, RowInput(0, 0, text), RowInput(1, 0, [1]))


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
    rows = EagerBackend(recorder.runner, 24, "target")
    for feeds in (
        [RowInput(0, 0, [1] * 9), RowInput(1, 0, [2]), RowInput(2, 0, [3] * 4)],
        [RowInput(0, 9, [4]), RowInput(2, 4, [5, 6, 7])],
        [RowInput(0, 10, [8]), RowInput(1, 1, [9]), RowInput(2, 7, [9])],
    ):
        assert all_scored(rows, *feeds)


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
    kept = list(pair._runtime.targets._free)
    with hooked(pair.models.target.model.lm_head, broken), pytest.raises(KeyboardInterrupt):  # type: ignore[union-attr]
        pair.generate(**asked(0))
    assert sorted(map(id, pair._runtime.targets._free)) == sorted(map(id, kept))


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
