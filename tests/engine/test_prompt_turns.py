"""Prompts that are read in turns of their owners, a number of tokens a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.engine.conftest import double_pair

import sprinter
from sprinter.engine.backends.base import DraftRow, PromptRow, TargetRow
from sprinter.engine.backends.eager import EagerBackend
from sprinter.engine.backends.texts import TextRows
from sprinter.engine.engine import Engine
from sprinter.engine.options import GenerationOptions
from sprinter.engine.policy import Policy
from sprinter.engine.prompts import NEW, ChunkTurn, choose_prompts

FAIR = Policy(prompt_piece=3, prompt_tokens=6, first=True)
PLAIN: dict[str, Any] = {"method": "autoregressive", "max_new_tokens": 2}


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return double_pair()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each pass over prompts the numbers of tokens by row."""
    real, seen = TextRows.read, list[list[int]]()

    def read(rows: TextRows, prompts: Sequence[PromptRow]) -> Any:
        seen.append([len(one.feed.tokens) for one in prompts])
        return real(rows, prompts)

    monkeypatch.setattr(TextRows, "read", read)
    return seen


def reading(row: str, turn: int, size: int = 3, chunk: object = None) -> ChunkTurn[str]:
    return ChunkTurn(row, row[0], turn, size, chunk or row)


def put(engine: Engine, prompt: list[int], owner: str, **options: Any) -> int:
    asked = GenerationOptions.of(None, {**PLAIN, **options})
    return engine.put(engine._task(prompt, asked, engine.unfinished, owner))


def first_step(engine: Engine, id: int) -> int:
    """The step from now in which a request has its first token."""
    steps = 1
    while not any(event.id == id and event.tokens for event in engine.step()):
        steps += 1
    return steps


def test_owners_take_turns_and_of_one_owner_the_rows() -> None:
    rows = [reading("a1", 5), reading("a2", 3), reading("b1", 6), reading("c1", 2)]
    turns = {"a": 5, "b": 6, "c": 2}
    assert choose_prompts(rows, turns, 6) == ["c1", "a2"]
    assert choose_prompts(rows, turns, 100) == ["c1", "a2", "b1", "a1"]


def test_what_does_not_fit_makes_room_for_what_does_but_the_first_is_read() -> None:
    rows = [reading("a1", 1, size=5), reading("b1", 2, size=4), reading("c1", 3, size=1)]
    turns = {"a": 1, "b": 2, "c": 3}
    assert choose_prompts(rows, turns, 6) == ["a1", "c1"]
    assert choose_prompts(rows, turns, 2) == ["a1"]


def test_a_chunk_that_several_rows_read_counts_once() -> None:
    rows = [reading(f"a{i}", 1, chunk="same") for i in range(4)] + [reading("a9", 1)]
    assert choose_prompts(rows, {"a": 1}, 3) == ["a0", "a1", "a2", "a3"]


def test_new_rows_go_first_and_starve_nobody(pair: sprinter.Pair, reads: list[list[int]]) -> None:
    """A prompt a step comes, each as long as what a step reads."""
    with Engine(pair, rows=4, policy=Policy(prompt_piece=3, prompt_tokens=3)) as engine:
        long = put(engine, [*range(1, 14)], "a")
        engine.step()
        news = [put(engine, [20, 1, 2, 3], "a", max_new_tokens=1)]
        assert first_step(engine, news[0]) == 1
        steps = 1
        while not any(event.id == long and event.tokens for event in engine.step()):
            put(engine, [20 + steps % 3, steps % 20, 2, 3], "a", max_new_tokens=1)
            steps += 1
    assert NEW < steps <= 4 * (NEW + 2)
    assert all(sum(one) <= 3 for one in reads)


def test_a_step_reads_no_more_than_its_tokens(pair: sprinter.Pair, reads: list[list[int]]) -> None:
    with Engine(pair, rows=4, policy=FAIR) as engine:
        for i in range(4):
            engine.add([i, *range(1, 20)], **PLAIN)
        engine.finish()
    assert max(map(sum, reads)) == 6
    assert sum(map(sum, reads)) == 4 * 19
    assert min(map(sum, reads[:-1])) > 3  # no step reads less than it may


def test_a_short_prompt_of_another_owner_does_not_wait(pair: sprinter.Pair, reads: list[list[int]]) -> None:
    """Three rows read long prompts of two owners."""
    with Engine(pair, rows=4, policy=FAIR) as engine:
        for i in range(3):
            put(engine, [i, *range(1, 24)] * 2, "ab"[i % 2])
        engine.step()
        reads.clear()
        assert first_step(engine, put(engine, [5, 7, 9], "c")) == 1
    assert reads == [[2]]


def test_one_owner_has_no_more_turns_for_more_rows(pair: sprinter.Pair) -> None:
    """Two long prompts of the same length, one beside two more of another owner: both are read in about the same
    time."""
    with Engine(pair, rows=4, policy=FAIR) as engine:
        ids = [put(engine, [i, *range(1, 24)] * 2, owner) for i, owner in enumerate("aaab")]
        ended: list[int] = []
        while engine.unfinished:
            ended += [event.id for event in engine.step() if event.generation is not None]
    assert ended[0] == ids[3]


def test_prompts_of_one_text_are_read_once(pair: sprinter.Pair, reads: list[list[int]]) -> None:
    with Engine(pair, rows=4, policy=FAIR) as engine:
        for seed in range(4):
            put(engine, [*range(1, 14)], "a", seed=seed)
        outs = engine.finish().values()
    assert len(reads) == 4  # of 12 tokens
    assert sum(out.stats.cached_tokens for out in outs) == 3 * 12


def test_a_text_begins_in_its_first_step(pair: sprinter.Pair) -> None:
    """Draft and target read a short prompt in one step, and it waits for no row that drafts."""
    with Engine(pair, rows=3, policy=Policy(share=1.0, age=None, first=True)) as engine:
        for i in range(2):
            put(engine, [i, 2], "a", method="draft-only", max_new_tokens=40)
        engine.step()
        speculative = put(engine, [5, 7, 9], "b", method="speculative(gamma=2)", max_new_tokens=9)
        assert first_step(engine, speculative) == 1


def test_first_tokens_of_new_owners_wait_for_no_other_row(pair: sprinter.Pair) -> None:
    """Two new owners in two steps have the models for themselves; then all have a step, whoever comes."""
    with Engine(pair, rows=6, policy=FAIR) as engine:
        old = {put(engine, [i, 2], "a", max_new_tokens=40) for i in range(2)}
        engine.step()
        wrote = list[set[int]]()
        for owner in "bcd":
            new = put(engine, [5, 7, 9], owner, max_new_tokens=1)
            events = {event.id for event in engine.step() if event.tokens}
            assert new in events
            wrote.append(events - {new})
        assert wrote == [set(), set(), old]


def test_a_long_new_prompt_and_the_others_take_turns(pair: sprinter.Pair, reads: list[list[int]]) -> None:
    with Engine(pair, rows=4, policy=FAIR) as engine:
        old = {put(engine, [i, 2], "a", max_new_tokens=40) for i in range(2)}
        engine.step()
        reads.clear()
        put(engine, [*range(1, 20)], "b")
        wrote = [{event.id for event in engine.step() if event.tokens} for _ in range(4)]
    assert wrote == [set(), old, set(), old]
    assert reads == [[3]] * 4  # in each of the steps


def test_a_row_of_an_owner_with_several_is_not_preferred(pair: sprinter.Pair) -> None:
    with Engine(pair, rows=4, policy=FAIR) as engine:
        old = put(engine, [1, 2], "a", max_new_tokens=40)
        engine.step()
        put(engine, [5, 7, 9], "a")
        assert old in {event.id for event in engine.step() if event.tokens}


def test_a_step_ends_for_a_request_that_arrives_but_not_the_next_one(pair: sprinter.Pair) -> None:
    """The target's pass is left out once, and the same tokens follow."""
    texts = list[list[int]]()
    for arrives in (False, True):
        with Engine(pair, rows=2, policy=FAIR) as engine:
            id = put(engine, [1, 2], "a", max_new_tokens=8, method="speculative(gamma=2)")
            engine.arrived = lambda arrives=arrives: arrives  # type: ignore[misc]
            steps, out = 0, None
            while out is None:
                steps += 1
                out = next((event.generation for event in engine.step() if event.id == id), None)
            texts.append([steps, *(token.id for token in out.tokens)])
    assert texts[0][1:] == texts[1][1:]
    assert texts[0][0] < texts[1][0] <= 2 * texts[0][0] + 1


def test_a_target_pass_reads_no_more_than_its_tokens(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows have four tokens each: two of them read in a pass, each after at most one pass of others."""
    real, seen, texts = EagerBackend.score, list[list[tuple[int, int]]](), list[list[list[int]]]()

    def score(rows: EagerBackend, asked: Sequence[TargetRow]) -> Any:
        seen.append([(one.feed.row, len(one.feed.tokens)) for one in asked])
        return real(rows, asked)

    monkeypatch.setattr(EagerBackend, "score", score)
    for most in (None, 8, 1):
        seen.clear()
        with Engine(pair, rows=4, policy=Policy(share=1.0, target_tokens=most)) as engine:
            for i in range(4):
                engine.add([i, 3], method="speculative(gamma=3)", max_new_tokens=16, seed=i, ignore_eos=True)
            texts.append([[token.id for token in out.tokens] for out in engine.finish().values()])
        assert max(sum(size for _, size in one) for one in seen) == {None: 16, 8: 8, 1: 4}[most]
    assert texts[0] == texts[1] == texts[2]


def test_a_pass_of_drafts_takes_no_more_than_its_steps(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who arrives waits for a pass. Without the limit a draft of known length has eight steps in one."""
    real, seen, texts = EagerBackend.draft, list[int](), list[list[list[int]]]()

    def draft(rows: EagerBackend, asked: Sequence[DraftRow]) -> Any:
        seen.append(max(one.count for one in asked))
        return real(rows, asked)

    monkeypatch.setattr(EagerBackend, "draft", draft)
    for most in (None, 3, 1):
        seen.clear()
        with Engine(pair, rows=3, policy=Policy(draft_steps=most)) as engine:
            for i, gamma in enumerate((10, 4, 1)):
                engine.add(
                    [i, 3], method=f"speculative(gamma={gamma})", max_new_tokens=24, seed=i, ignore_eos=True
                )
            texts.append([[token.id for token in out.tokens] for out in engine.finish().values()])
        assert max(seen) == (most or 8)
    assert texts[0] == texts[1] == texts[2]


def test_texts_do_not_depend_on_it(pair: sprinter.Pair) -> None:
    asked = [
        {"prompt": [(7 * i + j) % 24 for j in range(1 + 9 * i % 40)], "method": method, "seed": i, "max_new_tokens": 20}
        for i, method in enumerate(("autoregressive", "speculative(gamma=3)", "svip(h=0.4)", "sprinter(tau=0.5)") * 2)
    ]  # fmt: skip
    alone = [[token.id for token in pair.generate(**one).tokens] for one in asked]
    with Engine(pair, rows=5, policy=FAIR) as engine:
        ids = [engine.add(**one) for one in asked]
        done = engine.finish()
    assert [[token.id for token in done[id].tokens] for id in ids] == alone
