"""A pool of runners: each serves one borrower at a time, and the next reuses its caches and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from sprinter.engine.prefix import OFF, HeldRows, PrefixCache
from sprinter.errors import UserError
from sprinter.models.choose import holds_leaves, make_runner, renew
from sprinter.models.interface import Runner
from sprinter.models.kernels import runs
from sprinter.models.pair import LoadedModel
from sprinter.models.runners.forward import head_sizes

__all__ = ["IdleRunners", "RunnerPool"]

_KEPT = 8  # maximum number of idle runners
_GRAIN = 256  # cache lengths are rounded up to this, so that requests of similar size share a runner


class IdleRunners:
    """The idle runners of all models of a pair.

    Args:
        max_bytes: maximum size of their caches; 0: no limit.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.lock = RLock()  # collecting garbage may give back a runner at any time, in this thread too
        self._order: list[tuple[RunnerPool, Runner]] = []  # the one that was used last is at the end

    def of(self, pool: RunnerPool) -> list[Runner]:
        """The runners of one pool, in the order of their last use."""
        return [runner for owner, runner in list(self._order) if owner is pool]

    @property
    def total_bytes(self) -> int:
        """Size of all their caches."""
        return sum(runner.cache_bytes for _, runner in list(self._order))

    def put(self, pool: RunnerPool, runner: Runner) -> None:
        """Add a runner; beyond the maximum number and size, those that were idle longest are dropped."""
        with self.lock:
            self._order.append((pool, runner))
            for old in self.of(pool)[:-_KEPT]:
                self.take(pool, old)
            while self.max_bytes and self.total_bytes > self.max_bytes:
                del self._order[0]

    def take(self, pool: RunnerPool, runner: Runner) -> None:
        """Remove a runner."""
        with self.lock:
            self._order.remove((pool, runner))


class RunnerPool:
    """Runners of one model. Concurrent streams and threads get different runners.

    Args:
        model: the model.
        cache: what is reused of earlier texts.
        idle: where idle runners are kept, shared by the pools of a pair; None: its own place.
    """

    def __init__(self, model: LoadedModel, cache: PrefixCache = OFF, idle: IdleRunners | None = None) -> None:
        self.model, self.cache = model, cache
        self._idle = IdleRunners() if idle is None else idle
        self._held: WeakKeyDictionary[Runner, HeldRows] = WeakKeyDictionary()

    @property
    def _free(self) -> list[Runner]:
        return self._idle.of(self)

    def take(self, max_len: int, rows: int = 1, spare: int = 0, prompt: Sequence[int] = ()) -> Runner:
        """A runner of ``rows`` rows of ``max_len`` tokens of text each, and ``spare`` more for a tree.

        ``prompt``: token ids of a text that it will read; a runner that holds a beginning of them is preferred.
        """
        with self._idle.lock:
            runner, source = self._choose(max_len, rows, spare, prompt)
            if runner is not None:
                self._idle.take(self, runner)
        if runner is None:
            size = self.size(max_len, spare)
            runner = make_runner(
                self.model.model, batch=rows, max_len=size, compile=self.model.compile, leaves=spare + 1
            )
            self._held[runner] = HeldRows(rows, self.cache, runs(self.model.model))
        if source is not None:
            self._copy(source, runner, prompt)
        return runner

    def reload(self) -> None:
        """Take the model as it is now: no runner that was made before is lent again.

        Raises:
            UserError: it cannot be served, or has fewer token ids than when it was loaded.
        """
        model = self.model.model
        self.clear()
        self._held = WeakKeyDictionary()
        renew(model)
        if isinstance(model, PreTrainedModel) and (ids := head_sizes(model)[0]) < self.model.vocab_size:
            raise UserError(
                f"{self.model.id} has {ids} token ids now and had {self.model.vocab_size} when it was loaded: "
                "load the pair again"
            )

    def held(self, runner: Runner) -> HeldRows:
        """What the rows of a runner of this pool hold."""
        return self._held[runner]

    def holds(self, max_len: int, rows: int, spare: int = 0, prompt: Sequence[int] = ()) -> bool:
        """Whether such a runner is idle, so that taking it needs no more memory."""
        with self._idle.lock:
            return self._choose(max_len, rows, spare, prompt).runner is not None

    def _choose(self, max_len: int, rows: int, spare: int, prompt: Sequence[int]) -> _IdleChoice:
        """Choose so that what other texts may still need stays, as long as there is room for another runner."""
        idle = [runner for runner in reversed(self._free) if runner.batch == rows]
        fitting = [runner for runner in idle if self._serves(runner, max_len, spare)]
        if rows > 1 or not self.cache.max_bytes:
            return _IdleChoice(fitting[0] if fitting else None)
        shared = {runner: self._held[runner].shared(0, prompt) for runner in idle}
        source = max(idle, key=lambda runner: shared[runner], default=None)
        if source is not None and not shared[source]:
            source = None
        if source is not None and source in fitting and self._held[source].continues(0, prompt):
            return _IdleChoice(source)
        others = [runner for runner in fitting if runner is not source]
        empty = [runner for runner in others if self._held[runner].empty]
        if empty or self._has_room(self.size(max_len, spare)):
            return _IdleChoice(empty[-1] if empty else None, source)
        if others:
            return _IdleChoice(others[-1], source)
        return _IdleChoice(source) if source in fitting else _IdleChoice(None, source)

    def _serves(self, runner: Runner, max_len: int, spare: int) -> bool:
        """Whether a runner is large enough; ``max_len`` is limited to the model's context."""
        return runner.max_len >= min(max_len, self.model.context) + spare and holds_leaves(runner, spare + 1)

    def _has_room(self, size: int) -> bool:
        """Whether another runner of one row of ``size`` tokens could be kept too."""
        free = self._free
        slots = sum(runner.batch * runner.max_len for runner in free)
        more = size * sum(runner.cache_bytes for runner in free) / slots if slots else 0
        return len(free) < _KEPT and self._idle.total_bytes + more <= self.cache.max_bytes

    def _copy(self, source: Runner, runner: Runner, prompt: Sequence[int]) -> None:
        """Copy the common prefix to another runner, and keep the first one if it holds more than that."""
        with self._idle.lock:
            if source not in self._free:
                return  # another thread was faster
            self._idle.take(self, source)
        held, given = self._held[runner], self._held[source]
        runner.rewind([0])
        held.texts[0].cut(0)
        length = given.shared(0, prompt)
        if runner.adopt(source, length):
            held.texts[0].take(given.texts[0], length)
        if not given.continues(0, prompt):
            self._idle.put(self, source)

    def clear(self) -> None:
        """Drop the idle runners."""
        with self._idle.lock:
            for runner in self._free:
                self._idle.take(self, runner)

    def forget(self) -> None:
        """Have the idle runners hold no text for reuse; their memory and captured passes stay."""
        with self._idle.lock:
            for runner in self._free:
                for text in self._held[runner].texts:
                    text.cut(0)

    def size(self, max_len: int, spare: int = 0) -> int:
        """Length of a row of a new runner: ``max_len`` rounded up, plus ``spare``, in tokens."""
        return min(-(-max_len // _GRAIN) * _GRAIN, self.model.context) + spare

    def give_back(self, runner: Runner | None) -> None:
        """Return a runner, whose rows hold what its ``HeldRows`` records."""
        if runner is not None and runner in self._held:  # else it was made before a reload
            self._idle.put(self, runner)


class _IdleChoice(NamedTuple):
    """An idle runner to take (None: make one), and one whose common prefix with the prompt is copied to it."""

    runner: Runner | None
    source: Runner | None = None
