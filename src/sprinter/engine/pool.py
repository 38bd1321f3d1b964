"""Caches on loan: a runner serves one request at a time and is used again by the next."""

from __future__ import annotations

from collections import deque

from sprinter.models.choose import make_runner
from sprinter.models.pair import LoadedModel
from sprinter.models.runner import Runner

__all__ = ["RunnerPool"]

_GRAIN = 256  # cache lengths are rounded up to this, so that requests of like size share a runner


class RunnerPool:
    """Runners over one model. Streams that run at the same time get different ones."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._free: deque[Runner] = deque(maxlen=2)

    def take(self, max_len: int, rows: int = 1) -> Runner:
        """A runner of ``rows`` rows that hold ``max_len`` tokens each."""
        for _ in range(len(self._free)):
            runner = self._free.popleft()
            if runner.max_len >= max_len and runner.batch == rows:
                return runner
        rounded = -(-max_len // _GRAIN) * _GRAIN
        return make_runner(self._model.model, batch=rows, max_len=min(rounded, self._model.context))

    def give_back(self, runner: Runner | None) -> None:
        """Return a runner in whatever state it is."""
        if runner is not None:
            self._free.append(runner)
