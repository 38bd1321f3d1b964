"""Waiting for a device: for the one that did the work, not for the current one."""

import pytest
import torch

from sprinter.bench.arms.engine import settle


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were waited for."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *devices: found.extend(devices))
    return found


def test_the_bench_waits_for_its_own_device(waited: list[torch.device]) -> None:
    settle(torch.device("cuda", 1))
    settle(torch.device("cpu"))
    assert waited == [torch.device("cuda", 1)]
