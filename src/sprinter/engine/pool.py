"""A pool of runners: each serves one borrower at a time, and its caches are reused by the next."""

from __future__ import annotations

from collections import deque
from threading import Lock

from sprinter.models.choose import make_runner, tree_limit
from sprinter.models.pair import LoadedModel
from sprinter.models.runner import Runner

__all__ = ["RunnerPool"]

_KEPT = 4  # maximum number of idle runners
_GRAIN = 256  # cache lengths are rounded up to this, so that requests of similar size share a runner


class RunnerPool:
    """Runners of one model. Concurrent streams and threads get different runners."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._free: deque[Runner] = deque(maxlen=_KEPT)
        self._lock = Lock()

    def take(self, max_len: int, rows: int = 1, spare: int = 0) -> Runner:
        """A runner of ``rows`` rows of ``max_len`` tokens of text each, and ``spare`` more for a tree."""
        with self._lock:
            for runner in self._free:
                if self._serves(runner, max_len, rows, spare):
                    self._free.remove(runner)
                    return runner
        return make_runner(
            self.model.model, batch=rows, max_len=self.size(max_len, spare), compile=self.model.compile
        )

    def holds(self, max_len: int, rows: int, spare: int = 0) -> bool:
        """Whether such a runner is idle, so that taking it needs no more memory."""
        with self._lock:
            return any(self._serves(runner, max_len, rows, spare) for runner in self._free)

    def _serves(self, runner: Runner, max_len: int, rows: int, spare: int) -> bool:
        """Whether a runner is large enough; ``max_len`` is limited to the model's context."""
        return runner.max_len >= min(max_len, self.model.context) + spare and runner.batch == rows

    def clear(self) -> None:
        """Drop the idle runners."""
        with self._lock:
            self._free.clear()

    def size(self, max_len: int, spare: int = 0) -> int:
        """Length of a row of a new runner: ``max_len`` rounded up, plus ``spare``, in tokens."""
        text = min(-(-max_len // _GRAIN) * _GRAIN, self.model.context)
        limit = tree_limit(self.model.model) if spare else None
        return text + spare if limit is None else max(min(text + spare, limit), max_len)

    def give_back(self, runner: Runner | None) -> None:
        """Return a runner in any state; beyond the maximum number, the runner that was idle longest is dropped."""
        if runner is not None:
            with self._lock:
                self._free.append(runner)
