"""benchmarks/common.py: arms in turn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from benchmarks.common import Arm, interleave


def test_every_arm_reads_its_own_prompt() -> None:
    """An arm whose pair kept the prompt for another one would look faster."""

    def run(prompt: str, seed: int) -> SimpleNamespace:
        return SimpleNamespace(stats=SimpleNamespace(cached_tokens=len(prompt)))

    arm = Arm("svip", run)  # type: ignore[arg-type]
    interleave([arm], [""])
    assert len(arm.outs) == 1
    with pytest.raises(ValueError, match=r"svip found its prompt in the cache: .* prefix_cache_bytes=0"):
        interleave([arm], ["kept"])
