"""Drafts from suffixes: earlier texts change no token, stay with their owner, and outlive the program on request."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.conftest import VOCAB, double_pair

import sprinter
from sprinter.decode.method import Method
from sprinter.decode.spec import parse_method
from sprinter.engine import suffixes
from sprinter.engine.suffixes import SuffixCache
from sprinter.errors import UserError

AUTO = "auto(step=0.3, token=0.03, reads=1x1.1x1.2x1.5)"
CYCLE = [5, 3, 8, 1, 9, 4, 2, 7] * 3
SPECS = (
    "suffix", "suffix(depth=4, factor=3.0, min_prob=0.5, length=3)", "suffix(drawn=true)", "recycle",
    "drafter=suffix(otherwise=recycle(otherwise=lookup(otherwise=model))),stop=svip,accept=exact,cap=20",
    "drafter=suffix(otherwise=model),stop=fixed(gamma=3),accept=match",
    "drafter=suffix(least=3,otherwise=model,reads=1x1.1x1.2x1.5),stop=svip,accept=exact,cap=20",
)  # fmt: skip


@pytest.fixture
def pair() -> sprinter.Pair:
    """A pair in float64 with a cache of its own."""
    return sprinter.Pair(double_pair().models)


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


@pytest.mark.parametrize("spec", SPECS)
def test_greedy_texts_are_those_of_plain_decoding(pair: sprinter.Pair, spec: str) -> None:
    for prompt in (
        CYCLE,
        [1, 2, 3],
        CYCLE[:5],
        CYCLE,
    ):  # the last time with an earlier text of the same prompt
        options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40}
        plain = pair.generate(prompt, method="autoregressive", **options)
        out = pair.generate(prompt, method=spec, **options)
        assert ids(out) == ids(plain) and out.stats.lossless


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_seed_has_one_text_whatever_was_written_before(pair: sprinter.Pair, temperature: float) -> None:
    """``match`` draws the target's own tokens: those of plain decoding, with an empty cache and with any other."""
    calls = list[int]()
    for _ in range(2):
        for seed in range(6):
            options: dict[str, Any] = {
                "temperature": temperature,
                "max_new_tokens": 30,
                "seed": seed,
                "top_k": 6,
            }
            plain = pair.generate(CYCLE, method="autoregressive", **options)
            out = pair.generate(CYCLE, method="suffix(factor=4.0)", **options)
            assert ids(out) == ids(plain)
            calls.append(out.stats.target_calls)
            again = pair.generate(out.prompt_ids, out.request)
            assert ids(again) == ids(out) and again.stats.target_calls <= out.stats.target_calls
    assert sum(calls[6:]) < 0.7 * sum(calls[:6]), "the second time the text stood in the cache"


@pytest.mark.parametrize(
    ("spec", "temperature", "reads"),
    [("suffix", 0.0, True), ("suffix", 1.0, True), ("suffix(drawn=true)", 1.0, False),
     ("suffix(drawn=true)", 0.0, True), ("drafter=suffix,stop=never,accept=exact,cap=9", 1.0, False),
     ("drafter=suffix,stop=never,accept=random,cap=9", 0.0, False), ("lookup", 0.0, False), ("recycle", 1.0, True),
     ("drafter=suffix(otherwise=model),trust=coin,accept=match", 0.0, False), (AUTO, 0.0, True), (AUTO, 1.0, False),
     ("drafter=lookup(otherwise=recycle),accept=exact", 1.0, False)],
)  # fmt: skip
def test_earlier_texts_are_read_where_they_can_change_none(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch, spec: str, temperature: float, reads: bool
) -> None:
    asked = list[str]()
    of = pair._runtime.suffixes.of
    monkeypatch.setattr(pair._runtime.suffixes, "of", lambda owner: asked.append(owner) or of(owner))
    pair.generate(CYCLE, method=spec, temperature=temperature, max_new_tokens=4, seed=1)
    assert bool(asked) == reads


@pytest.mark.parametrize("method", ["suffix", "recycle"])
def test_owners_who_share_prefixes_share_what_drafts_are_read_from(
    pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    asked, suffixes = list[str](), pair._runtime.suffixes
    for name in ("of", "successors"):
        own = getattr(suffixes, name)
        monkeypatch.setattr(suffixes, name, lambda salt, own=own: asked.append(salt) or own(salt))
    given = sprinter.GenerationOptions.of(None, {"max_new_tokens": 4, "seed": 1, "method": method})
    with sprinter.Engine(pair, rows=1, max_len=80) as engine:
        task = engine._task(CYCLE, given, 0, "b", "shared")
        engine.put(task)
        engine.finish()
    assert (task.sequence.successors is not None) == (method == "recycle"), (
        "laws are read where they are needed"
    )
    assert {*asked} == {"shared"}


def served(engine: sprinter.Engine, owner: str, seed: int, **options: Any) -> sprinter.Generation:
    """A text of an owner, alone in the engine."""
    given = sprinter.GenerationOptions.of(None, {"max_new_tokens": 30, "seed": seed, "top_k": 6} | options)
    engine.put(engine._task(CYCLE, given, 0, owner))
    (out,) = engine.finish().values()
    return out


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("method", ["suffix", "recycle"])
def test_no_owner_reads_what_another_has_written(pair: sprinter.Pair, method: str, paced: bool) -> None:
    """Texts, and the work for them, are the same to the last count with and without another owner's texts."""

    def facts(out: sprinter.Generation) -> list[Any]:
        stats = out.stats
        counts = [stats.target_calls, stats.drafted, stats.accepted, stats.target_tokens, stats.switches]
        return [ids(out), [token.origin for token in out.tokens], *counts]

    def turn(before: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
        pair.clear_suffix_cache()
        with sprinter.Engine(pair, rows=2, max_len=80) as engine:
            for owner in before:
                for seed in range(3):
                    served(engine, owner, seed, method=method, never_slower=paced)
            first, again = (served(engine, "b", 1, method=method, never_slower=paced) for _ in range(2))
        return facts(first), facts(again)

    alone, beside = turn(()), turn(("a", ""))
    assert alone == beside
    assert alone[0][0] == alone[1][0]
    drafted, again = (one[3] for one in alone)
    assert paced or alone[1][2] < alone[0][2] or (method == "recycle" and again > drafted), "its own are read"


def test_each_owner_has_its_own_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffixes, "_OWNERS", 2)
    cache = SuffixCache(100)
    cache.add("a", [1] * 80, [2, 3, 4])
    before = cache.of("a").tokens().tolist()  # type: ignore[union-attr]
    assert before == [1] * 64 + [2, 3, 4, -1], "the end of the prompt stands before the text"
    for _ in range(9):
        cache.add("b", [], list(range(60)))
    assert cache.of("a").tokens().tolist() == before  # type: ignore[union-attr]
    assert len(cache.of("b")) == 100  # type: ignore[arg-type]
    cache.of("c")  # of too many owners the first to go is the one that came last longest ago
    assert len(cache.of("b")) == 100 and len(cache.of("a")) == 0  # type: ignore[arg-type]
    cache.add("b", [1], [])
    assert len(cache.of("b")) == 100  # type: ignore[arg-type]
    cache.clear()
    assert len(cache.of("b")) == 0  # type: ignore[arg-type]


def test_auto_weighs_suffixes_beside_the_model(builtin_pair: sprinter.Pair) -> None:
    """By counts, at the costs that it is told: no slower than lookup in its place, and less where a text returns."""
    pair = sprinter.Pair(builtin_pair.models)
    before = AUTO.replace("auto(", "drafter=lookup(n=8,least=2,length=15,otherwise=model,").replace(
        "token=0.03, ", ""
    )
    before += ",stop=optimal(step=0.3,token=0.03),cap=40"

    def cost(method: str) -> float:
        options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 60, "never_slower": False}
        made = [pair.generate(prompt, method=method, **options).stats for prompt in prompts]
        calls, read, steps = (
            sum(getattr(one, name) for one in made)
            for name in ("target_calls", "target_tokens", "draft_steps")
        )
        return calls * float(np.interp(read / calls, (1, 2, 4, 8, 16), (1, 1, 1.1, 1.2, 1.5))) + 0.3 * steps

    prompts = [
        "one two three four five six seven " * 3,
        "The river rises in",
        "red, blue, red, green, red, blue, red,",
        "Once upon a time",
    ]
    first, again = cost(AUTO), cost(AUTO)
    assert first <= 1.05 * cost(before)
    assert again < 0.6 * first, "the earlier texts are its own"


def test_no_room_keeps_nothing(pair: sprinter.Pair) -> None:
    off = sprinter.Pair(pair.models, suffix_cache=SuffixCache(0))
    first, again = (off.generate(CYCLE, method="suffix", max_new_tokens=30, seed=1) for _ in range(2))
    assert ids(first) == ids(again) and first.stats.target_calls == again.stats.target_calls
    assert off._runtime.suffixes.of("") is None


def test_texts_outlive_the_program_in_a_file(pair: sprinter.Pair, tmp_path: Path) -> None:
    def of(file: Path) -> sprinter.Pair:
        return sprinter.Pair(pair.models, suffix_cache=SuffixCache(1000, file, "words", VOCAB))

    file = tmp_path / "texts.npz"
    first = of(file)
    one = first.generate(CYCLE, method="suffix", max_new_tokens=30, seed=1, top_k=6)
    first.save_suffix_cache()
    assert file.exists()
    two = of(file).generate(CYCLE, method="suffix", max_new_tokens=30, seed=1, top_k=6)
    assert ids(two) == ids(one) and two.stats.target_calls < one.stats.target_calls
    file.unlink()
    first.save_suffix_cache()
    assert not file.exists(), "nothing was added since"
    first.generate(CYCLE, method="suffix", max_new_tokens=3, seed=1)
    del first
    gc.collect()
    assert file.exists(), "released, it is written"
    with pytest.raises(UserError, match="of another vocabulary: give one file to each target"):
        SuffixCache(1000, file, "other words", VOCAB)


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 no more", b"text\n", {"owners": 1}, {"tokens": [0, VOCAB]}, {"tokens": [0, -2]},
     {"lengths": [7]}, {"tokens": [0.5, 0.5]}],
    ids=str,
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path: Path, content: bytes | dict[str, Any]) -> None:
    file, parts = tmp_path / "texts.npz", {"vocabulary": "", "owners": ["a"], "lengths": [2]}
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        with open(file, "wb") as out:
            arrays = {"tokens": np.array([0, 1], np.int32), **parts} | content
            whole = {name: np.array(one, None if name != "tokens" or 0.5 in one else np.int32)  # type: ignore[operator]
                     for name, one in arrays.items()}  # fmt: skip
            np.savez(out, **whole)
    with pytest.raises(UserError, match=r"suffix cache .* is damaged"):
        SuffixCache(1000, file, "", VOCAB)


def test_strange_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="suffix_cache_tokens=-1 is out of range"):
        SuffixCache(-1)
    with pytest.raises(UserError, match="keeps no texts"):
        SuffixCache(0, tmp_path / "texts.npz")
    with pytest.raises(UserError, match="cannot read"):
        SuffixCache(10, tmp_path)
    cache = SuffixCache(10, tmp_path / "no such folder" / "texts.npz")
    cache.add("", [], [1])
    with pytest.raises(UserError, match="give another suffix cache"):
        cache.save()
    cache._store._changed = False  # else it is written once more when it is released
    with pytest.raises(UserError, match="least=5 is out of range"):
        parse_method("drafter=suffix(depth=4,least=5)")


def test_an_interrupted_text_is_kept_as_far_as_it_is_final(pair: sprinter.Pair) -> None:
    with pair.stream(
        CYCLE, method=Method.replace(parse_method("suffix")), max_new_tokens=30, seed=1
    ) as stream:
        seen = [next(stream).id for _ in range(5)]
    kept = pair._runtime.suffixes.of("").tokens().tolist()  # type: ignore[union-attr]
    assert kept[: len(CYCLE) + 5] == CYCLE + seen and kept[-1] == -1


def test_laws_in_float32_are_drawn_by_position() -> None:
    from sprinter.random import AddressedDraws, PositionDraws, Purpose

    law, plain, draws = torch.full((VOCAB,), 1 / VOCAB), AddressedDraws(7), PositionDraws(7, 10)
    for position in range(10, 40):
        wanted = plain.token(law, position - 9, position, Purpose.TARGET)
        assert all(draws.token(law, round, position, Purpose.TARGET) == wanted for round in (1, 5))


def test_the_owner_whose_text_has_ended_is_not_forgotten_first() -> None:
    cache = SuffixCache(100)
    owners = [str(number) for number in range(64)]
    for owner in owners:
        cache.of(owner)
    cache.add(owners[0], [1, 2], [3, 4, 5])
    cache.of("another")
    kept = {owner: len(index) for owner, index in cache._store.texts.items()}
    found = cache.of(owners[0])
    assert owners[1] not in kept and len(kept) == 64 and found is not None and len(found) == 6
