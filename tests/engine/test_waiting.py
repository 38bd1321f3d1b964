"""Waiting for a device: for the one that did the work, not for the current one."""

import pytest
import torch

from sprinter.bench.arms.engine import settle
from sprinter.engine.rows import ForwardResult, RowInput
from sprinter.engine.steps import EagerTargetPasses, TargetRow
from sprinter.laws import Sampling


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were waited for."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *devices: found.extend(devices))
    return found


def test_a_target_pass_waits_for_its_own_device(waited: list[torch.device]) -> None:
    class Rows:
        def read(self, feeds: object, layers: object) -> ForwardResult:
            logits = torch.zeros(1, 2, 7, device="meta")
            return ForwardResult(logits, logits, {})

    EagerTargetPasses(Rows())([TargetRow(RowInput(0, 0, [1, 2]), Sampling())])  # type: ignore[arg-type]
    assert waited == [torch.device("meta")]


def test_the_bench_waits_for_its_own_device(waited: list[torch.device]) -> None:
    settle(torch.device("cuda", 1))
    settle(torch.device("cpu"))
    assert waited == [torch.device("cuda", 1)]
