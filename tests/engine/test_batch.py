"""Many rows at once: what a row writes does not depend on its neighbours, in float64 to the token."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.conftest import double_pair

import sprinter
from sprinter.engine.backends.base import PromptRow, RowInput
from sprinter.engine.backends.eager import EagerBackend
from sprinter.engine.engine import Engine
from sprinter.engine.policy import Policy
from sprinter.errors import BatchError, UserError
from sprinter.models.choose import make_runner

METHODS = (
    "autoregressive", "draft-only", "speculative(gamma=3)", "sprinter(tau=0.5)", "coin(rate=0.5)", "svip(h=0.4)",
    "lookup(n=2, gamma=4)", "drafter=lookup(least=1,otherwise=model),stop=fixed(gamma=2)", "specdec++", "disco",
    "batch(drafts=2, gamma=3)", "specinfer(drafts=3, gamma=2)", "spectr(drafts=2, gamma=3)", "typical(gamma=3)",
    "fuzzy(gamma=2)", "allocation(share=0.5)", "drafter=model(greedy=true),stop=fixed(gamma=3)", "adaedl",
    "certain(signal=margin, threshold=0.3)", "online(tau=0.3, after=3)",
)  # fmt: skip
POLICIES = (Policy(), Policy(share=0.0), Policy(share=1.0), Policy(share=1.0, age=2, prompt_piece=3))


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return double_pair()


def requests(count: int = len(METHODS)) -> list[dict[str, Any]]:
    """Settings that have little in common; prompts of 1 to 30 tokens."""
    return [
        {
            "prompt": [(7 * i + 5 * j) % 24 for j in range(1 + (13 * i) % 30)],
            "method": METHODS[i % len(METHODS)],
            "max_new_tokens": 1 + (11 * i + 17) % 40,
            "temperature": (1.0, 0.7, 0.0)[i % 3],
            "top_k": (0, 0, 5, 0, 0)[i % 5],
            "top_p": (1.0, 0.9)[i % 2],
            "seed": i,
            "meter": ("running", "complete")[i % 2],
            "ahead": 1 + i % 3,
        }
        for i in range(count)
    ]


def facts(out: sprinter.Generation) -> tuple[Any, ...]:
    """What must be the same alone and in company; drifts to the last bits."""
    stats = out.stats
    counts = (stats.rounds, stats.target_calls, stats.draft_steps, stats.target_tokens, stats.draft_tokens,
              stats.checked, stats.trusted, stats.accepted, stats.closing_passes, stats.lossless)  # fmt: skip
    tokens = [(token.id, token.origin, token.round) for token in out.tokens]
    drifts = [None if token.drift is None else round(token.drift, 9) for token in out.tokens]
    flops = (round(stats.flops_passes), round(stats.flops_tokens))
    return tokens, drifts, counts, flops, out.accept_lengths, out.finish_reason, out.prompt_tokens


def in_batch(pair: sprinter.Pair, asked: list[dict[str, Any]], **options: Any) -> list[sprinter.Generation]:
    columns = {name: [one[name] for one in asked] for name in asked[0]}
    return pair.generate_batch(columns.pop("prompt"), **columns, **options)


@pytest.fixture(scope="module")
def alone(pair: sprinter.Pair) -> list[tuple[Any, ...]]:
    return [facts(pair.generate(**one)) for one in requests()]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_does_not_see_its_neighbours(
    pair: sprinter.Pair, alone: list[tuple[Any, ...]], policy: Policy
) -> None:
    together = in_batch(pair, requests(), policy=policy)
    assert [facts(out) for out in together] == alone


@pytest.mark.parametrize("rows", [3, 5])
def test_nor_who_had_its_rows_before(pair: sprinter.Pair, alone: list[tuple[Any, ...]], rows: int) -> None:
    order = [(7 * i) % len(METHODS) for i in range(len(METHODS))]  # another order of joining, few rows
    assert sorted(order) == list(range(len(METHODS)))
    asked = requests()
    together = in_batch(pair, [asked[i] for i in order], rows=rows)
    assert [facts(out) for out in together] == [alone[i] for i in order]


def test_requests_may_join_and_leave_at_any_time(pair: sprinter.Pair, alone: list[tuple[Any, ...]]) -> None:
    results: dict[int, sprinter.Generation] = {}
    pieces: dict[int, list[int]] = {}
    with Engine(pair, rows=4) as engine:
        numbers, left = {}, list(enumerate(requests()))
        while left or engine.unfinished:
            for i, one in left[:1]:
                numbers[i] = engine.add(**one)
            left = left[1:]
            for event in engine.step():
                assert event.id not in results, "nothing comes after the end"
                pieces.setdefault(event.id, []).extend(token.id for token in event.tokens)
                if event.generation:
                    results[event.id] = event.generation
    assert [facts(results[numbers[i]]) for i in range(len(alone))] == alone
    for id, out in results.items():
        assert pieces[id] == [token.id for token in out.tokens]


def test_a_cancelled_request_frees_its_rows_and_harms_nobody(
    pair: sprinter.Pair, alone: list[tuple[Any, ...]]
) -> None:
    asked = requests()
    with Engine(pair, rows=3) as engine:
        numbers = [engine.add(**one) for one in asked[:8]]
        for _ in range(4):
            engine.step()
        waiting, under_way = numbers[7], next(iter(engine._live))
        for id in (waiting, under_way):
            out = engine.cancel(id)
            assert out.finish_reason == "cancelled" or len(out.tokens) == 0
            with pytest.raises(UserError, match="is not under way"):
                engine.cancel(id)
        done = engine.finish()
        assert set(done) <= set(numbers) - {waiting, under_way}
        for i, number in enumerate(numbers):
            if number in done:
                assert facts(done[number]) == alone[i]
        assert engine._free == [0, 1, 2]
        assert engine._models.target is not None
        assert engine._models.target.runner.lengths == [0, 0, 0]


def test_counts_of_time_add_up(pair: sprinter.Pair) -> None:
    for out in in_batch(pair, requests(), rows=4):
        times = out.to_dict()["stats"]["times"]
        assert min(times.values()) >= 0
        assert sum(times.values()) == pytest.approx(out.stats.wall_s, rel=1e-6)


def test_one_value_serves_all(pair: sprinter.Pair) -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    texts = pair.generate_batch(prompts, method="speculative", seed=3, max_new_tokens=9)
    for prompt, text in zip(prompts, texts, strict=True):
        own = pair.generate(prompt, method="speculative", seed=3, max_new_tokens=9)
        assert facts(text) == facts(own)
    assert pair.generate_batch([]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "text"}, "prompts is one text: give a list"),
        ({"seed": [1, 2, 3]}, "seed has 3 values for 2 prompts"),
        ({"method": ["speculative", "speculativ"]}, "did you mean 'speculative'"),
        ({"rows": 0}, "rows=0"),
        ({"memory_bytes": 80_000}, "use a batch of 1 or less"),
        ({"memory_bytes": 10}, "use shorter rows"),
        ({"max_new_tokens": 200}, "exceed the context"),
        ({"stop": ["a"]}, "stop strings need a tokenizer"),
    ],
)
def test_bad_batches(pair: sprinter.Pair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        pair.generate_batch(**{"prompts": [[1, 2], [3]], **options})
    assert "\n" not in str(caught.value)


def test_bad_engines(pair: sprinter.Pair) -> None:
    zeros = ("prompt_piece", "prompt_tokens", "target_tokens", "draft_steps")
    for bad in ({"share": 1.5}, {"age": -1}, *({name: 0} for name in zeros)):
        with pytest.raises(UserError):
            Policy(**bad)
    with pytest.raises(UserError, match="max_len=97"):
        Engine(pair, max_len=97)
    engine = Engine(pair, rows=1, max_len=20)
    with pytest.raises(UserError, match="a row of the engine holds 20: give max_len=21"):
        engine.add([1], max_new_tokens=20)
    engine.close()
    engine.close()
    with pytest.raises(UserError, match="the engine is closed"):
        engine.add([1], max_new_tokens=4)


def test_a_broken_pass_ends_the_requests_in_it(pair: sprinter.Pair, alone: list[tuple[Any, ...]]) -> None:
    asked = requests()[2:6]
    model, broken = pair.models.target.model, [False]

    def fail(*_: object) -> None:
        if broken[0]:
            raise torch.OutOfMemoryError("no room for the pass")

    handle = model.lm_head.register_forward_hook(fail)
    try:
        with Engine(pair, rows=4) as engine:
            numbers = [engine.add(**one) for one in asked[:3]]
            engine.step()
            engine.step()
            broken[0] = True
            with pytest.raises(BatchError, match="no room for the pass") as caught:
                engine.finish()
            broken[0] = False
            last = engine.add(**asked[3])
            done = engine.finish()
    finally:
        handle.remove()
    assert set(caught.value.errors) | set(caught.value.done) == set(numbers)
    for number, one in zip(caught.value.partial, alone[2:5], strict=False):
        partial = [token.id for token in caught.value.partial[number].tokens]
        assert partial == [token[0] for token in alone[2 + numbers.index(number)][0]][: len(partial)], one
    assert [token.id for token in done[last].tokens] == [token[0] for token in alone[5][0]]


def test_text_of_events_joins_to_the_whole(builtin_pair: sprinter.Pair) -> None:
    prompts = ["The river rises in", "Once upon a time", "A"]
    with Engine(builtin_pair, rows=2, policy=Policy(share=1.0)) as engine:
        numbers = [engine.add(p, max_new_tokens=12, seed=i, stop=["zzz"]) for i, p in enumerate(prompts)]
        pieces, results = dict.fromkeys(numbers, ""), {}
        while engine.unfinished:
            for event in engine.step():
                pieces[event.id] += "".join(token.text for token in event.tokens)
                results[event.id] = event.generation
    for number in numbers:
        assert pieces[number] == results[number].text != ""


def test_a_stop_string_for_all_or_one_each(builtin_pair: sprinter.Pair) -> None:
    prompts = ["The first king of", "The old town"]
    kept: dict[str, Any] = {"max_new_tokens": 16, "seed": 5, "method": "speculative"}
    whole = builtin_pair.generate_batch(prompts, **kept)
    words = [out.text[3:6] for out in whole]
    each = builtin_pair.generate_batch(prompts, stop=[[word] for word in words], **kept)
    assert [out.text for out in each] == [o.text[: o.text.find(w)] for o, w in zip(whole, words, strict=True)]
    for_all = builtin_pair.generate_batch(prompts, stop=words[:1], **kept)
    assert for_all[0].finish_reason == "stop"


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory as Linux reports it")
def test_memory_does_not_grow(pair: sprinter.Pair) -> None:
    """10,000 rounds and more through one engine: a kept law or token a round would be megabytes."""

    def some(engine: Engine, count: int) -> int:
        for i in range(count):
            engine.add([1 + i % 20, 3], method=METHODS[i % 6], max_new_tokens=40, seed=i, meter="complete")
        return sum(out.stats.rounds for out in engine.finish().values())

    with Engine(pair, rows=8, max_len=48) as engine:
        some(engine, 96)
        gc.collect()
        before, rounds = resident_bytes(), 0
        while rounds < 10_000:
            rounds += some(engine, 96)
        gc.collect()
        grown = resident_bytes() - before
    assert grown < 2_000_000, f"{grown} bytes in {rounds} rounds"


def test_prompts_of_unlike_length_are_read_apart(pair: sprinter.Pair) -> None:
    feeds = [RowInput(row, (2, 0, 0, 1, 0, 0)[row], [1] * n) for row, n in enumerate((80, 3, 79, 5, 30, 8))]
    rows = EagerBackend(make_runner(pair.models.target.model, batch=6, max_len=90), 24, "target")
    rows.read([PromptRow("target", RowInput(0, 0, [1, 2])), PromptRow("target", RowInput(3, 0, [3]))])
    widths = list[int]()

    def watch(module: object, args: object, kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    handle = pair.models.target.model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        rows.read([PromptRow("target", feed) for feed in feeds])
    finally:
        handle.remove()
    assert widths == [80, 30, 8]
    assert rows.runner.lengths == [82, 3, 79, 6, 30, 8]


def test_a_short_prompt_does_not_wait_until_long_ones_are_read(pair: sprinter.Pair) -> None:
    with Engine(pair, rows=4, policy=Policy(prompt_piece=3)) as engine:
        for i in range(3):
            engine.add([i, *range(1, 24)] * 2, method="autoregressive", max_new_tokens=2)
        short = engine.add([5, 7], method="autoregressive", max_new_tokens=2)
        steps = 1
        while not any(event.id == short and event.tokens for event in engine.step()):
            steps += 1
    assert steps == 1  # the long ones have 15 more pieces
