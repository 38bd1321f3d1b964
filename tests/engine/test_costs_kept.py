"""Costs of passes: measured once for a pair and a machine, and kept."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tests.engine.test_never_slower import CHEAP, DEAR

import sprinter
from sprinter.decode.costs import PassCosts
from sprinter.engine import costs as costs_module
from sprinter.engine.backends.base import DraftRow, PassInput
from sprinter.engine.costs import pass_costs, shared_costs
from sprinter.models.cachedir import write_kept
from sprinter.models.pair import LoadedPair


@pytest.mark.usefixtures("measured")
def test_costs_are_measured_once_and_kept(
    builtin_pair: sprinter.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    described = builtin_pair._runtime.described
    found = pass_costs(builtin_pair.models, described)
    assert [n for n, _ in found.target] == [1, 2, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64] and [
        n for n, _ in found.draft
    ] == [
        1,
        8,
        32,
    ]
    assert all(a[1] <= b[1] for a, b in zip(found.target, found.target[1:], strict=False))
    assert found.shared == () and found.host[0] > 0 and min(found.host) >= 0 and found.judged > 0
    (kept,) = (tmp_path / "cache" / "costs").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(costs_module, "_measure", lambda pair: pytest.fail("measured again"))
        assert pass_costs(builtin_pair.models, described) == found
    assert kept.stat().st_mode & 0o077 == 0
    kept.write_text('{"target": [[1, 1.0]], "draft": []}')  # cut short
    monkeypatch.setattr(costs_module, "_measure", lambda pair: CHEAP)
    assert pass_costs(builtin_pair.models, described) == CHEAP
    assert pass_costs(builtin_pair.models, described) == CHEAP
    monkeypatch.setattr(costs_module, "_measure", lambda pair: DEAR)
    kept.chmod(0o666)  # others could have written it
    assert pass_costs(builtin_pair.models, described) == DEAR


def test_processes_do_not_measure_at_the_same_time(
    builtin_pair: sprinter.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one holds the lock, and has kept its costs when it lets go."""
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(costs_module, "_measure", lambda pair: CHEAP)
    described = builtin_pair._runtime.described
    assert pass_costs(builtin_pair.models, described) == CHEAP
    (kept,) = (tmp_path / "cache" / "costs").iterdir()
    content = kept.read_bytes()
    kept.unlink()
    monkeypatch.setattr(costs_module, "_measure", lambda pair: pytest.fail("measured at the same time"))
    with ThreadPoolExecutor(1) as beside, FileLock(tmp_path / "cache" / "measuring.lock"):
        waiting = beside.submit(pass_costs, builtin_pair.models, described)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        write_kept("costs", kept.name, content.decode())
    assert waiting.result(10) == CHEAP


def test_a_cache_that_cannot_be_used_only_costs_time(
    builtin_pair: sprinter.Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(costs_module, "_measure", lambda pair: CHEAP)
    assert pass_costs(builtin_pair.models, builtin_pair._runtime.described) == CHEAP
    assert "cannot be kept" in caplog.text


def test_costs_of_files_in_the_models_folder_are_kept(
    tiny_pair: sprinter.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are named as on the hub, and have no revision."""
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(costs_module, "_measure", lambda pair: CHEAP)
    described = dict(tiny_pair._runtime.described)
    models = tiny_pair.models
    for name in ("target", "draft"):
        described[name] = {**described[name], "id": f"org/repository/{name}.gguf", "revision": None}
        models = replace(models, **{name: replace(getattr(models, name), load_s=1.0)})
    assert pass_costs(models, described) == CHEAP
    monkeypatch.setattr(costs_module, "_measure", lambda pair: pytest.fail("measured again"))
    assert pass_costs(models, described) == CHEAP


def test_costs_of_changed_models_are_neither_kept_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(costs_module, "_measure", lambda pair: CHEAP)
    pair = sprinter.load_pair()
    assert pair.pass_costs == CHEAP and len([*(tmp_path / "cache" / "costs").iterdir()]) == 1
    monkeypatch.setattr(costs_module, "_measure", lambda pair: DEAR)
    pair.reload()
    assert pair.pass_costs == DEAR
    assert pair.models.target.model.name_or_path  # a directory that exists, and may hold other weights
    given = sprinter.load_pair(
        pair.models.target.model,
        pair.models.draft.model,
        tokenizer=pair.tokenizer,  # type: ignore[union-attr]
    )
    assert given.pass_costs == DEAR
    assert sprinter.load_pair().pass_costs == CHEAP


@pytest.mark.usefixtures("measured")
def test_costs_of_models_without_a_name_are_not_kept(
    tiny_pair: sprinter.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    pair = sprinter.Pair(tiny_pair.models)
    assert pass_costs(pair.models, pair._runtime.described).target[0][1] > 0
    assert not (tmp_path / "cache" / "costs").exists()


@pytest.mark.usefixtures("measured")
def test_passes_of_rows_are_measured_once_and_kept(
    builtin_pair: sprinter.Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    models, described = builtin_pair.models, builtin_pair._runtime.described
    found = shared_costs(models, described, CHEAP)
    assert [rows for rows, _, _ in found.shared] == [rows for rows, _ in found.several] == [4, 16, 64]
    assert replace(found, shared=(), several=()) == CHEAP
    with monkeypatch.context() as patched:
        patched.setattr(costs_module, "_measure_shared", lambda pair, costs: pytest.fail("measured again"))
        assert shared_costs(models, described, CHEAP) == found
    for kept in (tmp_path / "cache" / "costs").iterdir():
        kept.unlink()

    def fails(pair: LoadedPair, costs: PassCosts) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(costs_module, "_measure_shared", fails)
    assert shared_costs(models, described, CHEAP) == CHEAP and "no room" in caplog.text
    assert not list((tmp_path / "cache" / "costs").iterdir())


def test_one_thread_is_timed_by_its_own_time(
    tiny_pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else costs would hold what other programs did meanwhile; several threads have no such clock."""
    models = costs_module.borrow(tiny_pair.models, 16)
    for threads, clock in ((1, time.thread_time), (2, time.perf_counter)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert costs_module._clock(models) is clock


def test_the_start_of_a_draft_run_is_apart_from_its_steps() -> None:
    step, start = costs_module._steps({1: 1.7, 3: 2.5, 7: 4.1})
    assert step == pytest.approx(0.4) and start == pytest.approx(1.3)
    assert costs_module._steps({1: 0.4, 3: 1.2}) == pytest.approx((0.4, 0.0))
    assert costs_module._steps({1: 0.5, 3: 0.3}) == pytest.approx((0.2, 0.0)), (
        "noise: no line rises through it"
    )
    assert costs_module._steps({2: 0.6}) == pytest.approx((0.3, 0.0)) and costs_module._steps({}) == (
        0.0,
        0.0,
    )


def test_rounds_are_timed_as_a_text_makes_them(
    builtin_pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run of the draft has a pass of the target before and after it; the median of the repeats counts."""
    asked, times = list[tuple[str, int]](), iter(range(10_000))
    models = costs_module.borrow(builtin_pair.models, 80)
    ids = costs_module.read_prompts(models, 64, 8)
    monkeypatch.setattr(costs_module, "_clock", lambda models: lambda: float(next(times)))
    monkeypatch.setattr(costs_module, "_LONGEST_S", 0.0)
    run = costs_module._run

    def spy(models: object, inputs: list[PassInput]) -> None:
        (one,) = inputs
        asked.append(("draft", one.count) if isinstance(one, DraftRow) else ("target", len(one.feed.tokens)))
        run(models, inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(costs_module, "_run", spy)
    drafts, checks = costs_module._rounds(models, ids, 64, [0, 1, 3], 2)
    each = [("target", 1), ("draft", 1), ("target", 2), ("draft", 3), ("target", 4)]
    assert asked == 3 * [*2 * each[:1], *2 * each[1:3], *2 * each[3:]], "each behind one of its kind"
    assert drafts == {1: 1.0, 3: 1.0} and checks == {1: 1.0, 2: 1.0, 4: 1.0}, "a tick of the clock for each"
