"""Fake arms with a clock of their own."""

from __future__ import annotations

from sprinter.bench.arm import ArmAnswer, Ask
from sprinter.engine.pair import Pair
from sprinter.laws import Sampling


class FakeArm:
    """Answers with the prompt's own ids, in ``pace_s`` per token; records the calls."""

    engine = "fake"

    def __init__(self, name: str, pace_s: float = 0.01, breaks_at: int = -1, starts: bool = True) -> None:
        self.name, self.spec, self._pace_s, self._breaks_at, self._starts = (
            name,
            name,
            pace_s,
            breaks_at,
            starts,
        )
        self.asks: list[Ask] = []
        self.log: list[str] = []

    def start(self, pair: Pair) -> None:
        self.log.append("start")
        if not self._starts:
            raise ImportError("no such engine\nand more")

    def lossless(self, sampling: Sampling) -> bool | None:
        return None

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}

    def answer(self, ask: Ask) -> ArmAnswer:
        if len(self.asks) == self._breaks_at:
            raise RuntimeError("out of luck")
        self.asks.append(ask)
        ids = [ask.ids[i % len(ask.ids)] for i in range(ask.new_tokens)]
        times = [self._pace_s * (i + 1) for i in range(len(ids))]
        return ArmAnswer(
            ids, times[-1], times, [1] * len(ids), target_calls=len(ids), drifts=[0.0] * len(ids)
        )

    def close(self) -> None:
        self.log.append("close")
