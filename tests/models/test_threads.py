"""The number of threads: no more than there are free cores, unless the user says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sprinter.cli import doctor
from sprinter.models import devices
from sprinter.models.devices import Threads, choose_threads

REAL = devices.busy_cores  # before the settings for all tests replace it
LINE = "cpu{core} {user} 0 0 {idle} 0 0 0 0 0 0"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make this a machine of so many cores and threads, of which others keep some busy."""
    threads = torch.get_num_threads()

    def make(cores: int, busy: float, threads: int, named: str | None = None) -> None:
        torch.set_num_threads(threads)
        monkeypatch.setattr(devices, "usable_cores", lambda: cores)
        monkeypatch.setattr(devices, "busy_cores", lambda: busy)
        monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if named is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", named)
        choose_threads.cache_clear()

    yield make
    torch.set_num_threads(threads)
    choose_threads.cache_clear()


@pytest.mark.parametrize(
    ("cores", "busy", "before", "after"),
    [
        (2, 0.0, 2, 2),
        (2, 0.3, 2, 2),
        (2, 2.0, 2, 1),
        (2, 1.2, 2, 1),
        (8, 3.1, 4, 4),
        (8, 6.0, 8, 2),
        (1, 0.0, 2, 1),
    ],
)
def test_threads_are_no_more_than_free_cores(
    machine: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    cores: int,
    busy: float,
    before: int,
    after: int,
) -> None:
    machine(cores, busy, before)
    choose_threads()
    assert torch.get_num_threads() == after
    assert (f"{after} of {before} threads are used" in caplog.text) == (after < before)
    torch.set_num_threads(before)  # the user's
    choose_threads()
    assert torch.get_num_threads() == before


def test_a_named_number_stays_and_a_line_says_what_is_wrong(
    machine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    machine(2, 2.0, 2, "2")
    choose_threads()
    assert torch.get_num_threads() == 2 and "OMP_NUM_THREADS=1 may be faster meanwhile" in caplog.text
    status, detail = doctor._threads()
    assert status == "warn" and caplog.messages[0] in detail  # one text in both places
    machine(2, 0.0, 4, "4")
    assert "4 threads share 2 cores: set OMP_NUM_THREADS=2" in doctor._threads()[1]
    machine(2, 2.0, 2)
    assert "1 of 2 threads are used" in doctor._threads()[1]  # as the line of the load that follows
    machine(2, 0.1, 2)
    assert doctor._threads()[0] == "ok"


def test_a_busy_machine_disturbs_measurements() -> None:
    assert not Threads(1, 2, 1.0, True).disturbed and Threads(1, 2, 2.0, True).disturbed
    assert Threads(2, 2, 1.0, True).disturbed and not Threads(2, 2, 0.2, True).disturbed


def test_what_others_use_is_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, ticks = tmp_path / "stat", {0: [0, 0], 1: [0, 0]}
    monkeypatch.setattr(devices, "_STAT", stat)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)

    def write() -> None:
        lines = [LINE.format(core=core, user=user, idle=idle) for core, (user, idle) in ticks.items()]
        stat.write_text("\n".join(["cpu 9 9 9 9", *lines, "cpu7 99 0 0 0 0 0 0 0", "intr 1"]))

    def sleep(seconds: float) -> None:
        ticks[0][0] += 10  # busy all the time
        ticks[1][0] += 3
        ticks[1][1] += 7
        write()

    write()
    monkeypatch.setattr(devices.time, "sleep", sleep)
    monkeypatch.setattr(devices.time, "process_time", lambda: 0.0)
    assert REAL() == pytest.approx(1.3)
    monkeypatch.setattr(devices, "_STAT", tmp_path / "none")
    assert REAL() == 0.0


def test_a_quota_of_the_cgroup_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(devices, "_QUOTA", quota)
    for text, cores in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("none", 8)):
        quota.write_text(text)
        assert devices.usable_cores() == cores


def test_a_load_says_it(machine: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    import sprinter

    machine(2, 2.0, 2)
    with caplog.at_level(logging.WARNING, "sprinter"):
        sprinter.load_pair()
    assert torch.get_num_threads() == 1 and "2.0 of 2 cores busy: 1 of 2 threads" in caplog.text
