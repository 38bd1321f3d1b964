"""The models of a server by name: pairs, and LoRA adapters of their targets.

A model is loaded when it is first asked for; owners take turns. Where the loaded ones may take less memory than all,
those that nobody asks at the moment make room for it, the one that was asked longest ago first. If all are asked, the
one that was loaded longest ago takes no new requests for a while; a text that is written is never cut. A
model that cannot be loaded is an error of the requests for it, and no other's. The only pair of a server is loaded at
the start, and the server ends with it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sprinter.engine.fair_queue import FairQueue
from sprinter.engine.pair import Pair
from sprinter.errors import SprinterError, UserError
from sprinter.models.memory import weight_storages
from sprinter.serve.api_errors import Refusal, of_error
from sprinter.serve.logs import error_fields
from sprinter.serve.owners import Owners
from sprinter.serve.prometheus import ServeState
from sprinter.serve.service import Service
from sprinter.serve.settings import ServeSettings

__all__ = ["Models", "NamedSource", "frozen"]

_RETRY_S = 30.0
"""How long a model that could not be loaded, or has failed, is not tried again."""
_FIRST_S = 5
"""Seconds that the loading of a model takes if nothing is known about it."""
_SWEEP_S = 1.0
_DRAIN_S = 5.0
"""Seconds that a model takes no new requests where another one has no room, at most; then for as long it takes them."""
_NAMED = 8
"""Names of models in an error."""
_MIB = 2**20
_log = logging.getLogger("sprinter.serve")


@dataclass(frozen=True, slots=True)
class NamedSource:
    """A model that a server may load.

    Attributes:
        name: in requests. None: the settings', or the target's, of a server's only pair.
        load: loads the pair; None: it is an adapter.
        pair, adapter: an adapter's pair, by name, and its folder.
        size: bytes of its files, which count until it was loaded once.
    """

    name: str | None
    load: Callable[[], Pair] | None = None
    pair: str | None = None
    adapter: Path | None = None
    size: int = 0


@dataclass(eq=False)
class _KnownModel:
    """A source, and what has become of it.

    Attributes:
        service: None: it is not loaded.
        users: requests, and adapters, that need it now. used: when the last one ended.
        size: bytes that it takes, or took. load_s: how long the last loading took.
        loading, began: the loading that is under way, which returns why it has failed; since when.
        failed: why it cannot be asked, and since when.
        leave: called when it is closed.
        unused: set while it has no users. leaving: set when it has been closed for another model, or stays; None: it
            takes requests.
        turn, askers: of the loading: done when it is its turn; owners who wait for it.
    """

    source: NamedSource
    parent: _KnownModel | None = None
    service: Service | None = None
    users: int = 0
    used: float = 0.0
    size: int = 0
    load_s: float = 0.0
    loading: asyncio.Task[Refusal | None] | None = None
    began: float = 0.0
    failed: tuple[Refusal, float] | None = None
    leave: list[Callable[[], None]] = field(default_factory=list)
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: asyncio.Event | None = None
    turn: asyncio.Future[None] | None = None
    askers: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return str(self.source.name) if self.service is None else self.service.model

    @property
    def at_hand(self) -> bool:
        """Whether it need not be loaded, nor waited for: until it is known that it has room, it may be closed again."""
        idle = self.loading is None and self.leaving is None
        return idle and self.service is not None and self.service.error is None

    def hold(self, after: list[Callable[[], None]]) -> None:
        """Have it stay until the functions of ``after`` are called."""
        self.users += 1
        self.unused.clear()

        def leave() -> None:
            self.users -= 1
            self.used = time.monotonic()
            if not self.users:
                self.unused.set()

        after.append(leave)


class Models:
    """The models of a server. To be used in one event loop.

    Args:
        settings: of the server.
        sources: its pairs, the first of which is asked by requests without a name, and adapters.
        aliases: further names, and the name of the model of each.
        only: the only pair, if it has been made already.

    Attributes:
        only: the service of the only pair; None: there are several.
        on_failure: called in any thread when the only pair has failed.

    Raises:
        UserError: a name that several models have.
    """

    def __init__(
        self,
        settings: ServeSettings,
        sources: Sequence[NamedSource],
        aliases: Mapping[str, str] | None = None,
        only: Service | None = None,
    ) -> None:
        self.settings = settings
        self.owners = Owners(settings, self._states) if only is None else only.owners
        self.on_failure: Callable[[], None] = lambda: None
        self.created, self._closed, self._loading = int(time.time()), False, False
        self._line = FairQueue[asyncio.Future[None]]()  # of loadings
        self._rest = 0.0  # until when no model is to leave
        self._models = [_KnownModel(source, size=source.size) for source in sources]
        pairs = [one for one in self._models if one.source.load is not None]
        self._first = pairs[0]
        self.only: Service | None = None
        if len(pairs) == 1:
            load, name = frozen(pairs[0].source.load), pairs[0].source.name
            self.only = only or Service(settings, load, name, self.owners)
            self.only.on_failure = lambda: self.on_failure()
            self._first.service = self.only
            self._first.users = 1  # it stays
        for one in self._models:
            if one.source.adapter is not None:
                known = [pair for pair in pairs if one.source.pair in (None, pair.source.name)]
                if not known:
                    raise UserError(
                        f"the adapter {one.source.name} is for {one.source.pair!r}, which is not a pair here"
                    )
                one.parent = known[0]
        self._aliases = dict(aliases or {})
        names = [
            *(one.source.name for one in self._models if one.source.name),
            *self._aliases,
            *settings.aliases,
        ]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"two models have the name {twice[0]!r}: give each its own")
        if only is None:
            self.owners.metrics.ready = lambda: self.state == "ready"

    @classmethod
    def of(cls, served: Service | Models) -> Models:
        """The models of a server that has one pair."""
        if isinstance(served, Models):
            return served
        return cls(served.settings, [NamedSource(None, served._load)], only=served)

    # --- life ---
    def begin(self) -> None:
        """Load the only pair."""
        if self.only is not None:
            self.only.begin()

    async def aclose(self) -> None:
        """Cancel what is open, and release the caches."""
        self._closed = True
        for one in self._models:
            if one.loading is not None:
                one.loading.cancel()
            if one.service is not None:
                await one.service.aclose()

    @property
    def state(self) -> str:
        """That of the only pair; of several "ready" or "closing"."""
        if self.only is not None:
            return self.only.state
        return "closing" if self._closed else "ready"

    @property
    def error(self) -> BaseException | None:
        """Why the only pair has failed."""
        return None if self.only is None else self.only.error

    def _states(self) -> list[ServeState]:
        return [
            ServeState(one.name, 0, 0, 0, False, 0.0) if one.service is None else one.service.now_served()
            for one in self._models
        ]

    def retry_after_s(self) -> int:
        """When to try again if there is no room; seconds."""
        busy = [one.service.retry_after_s() for one in self._models if one.service is not None and one.users]
        return min(busy, default=1)

    # --- names ---
    def _named(self) -> Iterator[tuple[str, _KnownModel]]:
        for one in self._models:
            yield one.name, one
            also = self.settings.aliases if one is self._first else ()
            more = (alias for alias, name in self._aliases.items() if name == one.source.name)
            yield from ((alias, one) for alias in (*also, *more))

    def find(self, name: str | None) -> _KnownModel:
        """The model of a name; of none, the first pair.

        Raises:
            Refusal: there is none; the only pair is not loaded.
        """
        if self.only is not None:
            _ = self.only.engine  # its name is known once it is loaded
        if name is None:
            return self._first
        known = dict(self._named())
        if name not in known:
            shown = ", ".join(map(repr, [*known][:_NAMED])) + (", ..." if len(known) > _NAMED else "")
            raise Refusal(
                404, f"there is no model {name[:80]!r} here: ask for {shown}", "model_not_found", "model"
            )
        return known[name]

    def described(self, name: str | None = None) -> list[dict[str, Any]]:
        """The models as ``/v1/models`` lists them, each by all of its names; with ``name`` that one."""
        self.find(name)
        return [self._describe(known, one) for known, one in self._named() if name in (None, known)]

    def _describe(self, name: str, one: _KnownModel) -> dict[str, Any]:
        if one.service is None:
            found: dict[str, Any] = {
                "id": name, "object": "model", "created": self.created, "owned_by": "sprinter", "max_model_len": None,
                "sprinter": {"adapter": one.source.adapter and one.source.adapter.name},
            }  # fmt: skip
        else:
            found = one.service.describe(name)
        found["sprinter"]["loaded"] = one.service is not None
        return found if one.parent is None else {**found, "parent": one.parent.name}

    # --- loading ---
    async def take(self, one: _KnownModel, after: list[Callable[[], None]], owner: str = "") -> Service:
        """The service of a model, which is loaded if it is not, and stays until what is put into ``after`` is called.

        Raises:
            Refusal: it cannot be loaded, or takes longer than requests wait.
        """
        try:
            async with asyncio.timeout(self.settings.queue_timeout_s):
                while one.leaving is not None:
                    await one.leaving.wait()
                one.hold(after)
                if one.service is not None and (one.at_hand or one.service is self.only):
                    return one.service
                if one.failed is not None and (left := one.failed[1] + _RETRY_S - time.monotonic()) > 0:
                    why = one.failed[0]
                    raise Refusal(why.status, why.message, why.code, retry_after_s=math.ceil(left))
                if one.loading is None:
                    one.began, one.askers = time.monotonic(), {owner}
                    one.loading = asyncio.create_task(self._load(one, owner))
                elif one.turn is not None and owner not in one.askers:
                    one.askers.add(owner)
                    self._line.put(owner, one.turn)
                refusal = await asyncio.shield(one.loading)
        except TimeoutError:
            spent = 0.0 if one.loading is None else time.monotonic() - one.began
            left = one.load_s - spent if one.load_s > spent else max(_FIRST_S, spent)
            message = f"the model {one.name!r} is being loaded: try again later"
            raise Refusal(503, message, "loading", retry_after_s=math.ceil(left)) from None
        if refusal is not None:
            raise refusal
        assert one.service is not None
        return one.service

    @asynccontextmanager
    async def _turn(self, one: _KnownModel) -> AsyncIterator[None]:
        """One loading at a time, in turns of the owners who ask for them."""
        if self._loading:
            one.turn = turn = asyncio.get_running_loop().create_future()
            for owner in one.askers:
                self._line.put(owner, turn)
            await turn  # which is cancelled when the server ends
            one.turn = None
        self._loading = True
        try:
            yield
        finally:
            waiting = (self._line.pop() for _ in range(len(self._line)))
            following = next((one for one in waiting if not one.done()), None)
            self._loading = following is not None  # nobody else goes between
            if following is not None:
                following.set_result(None)

    async def _load(self, one: _KnownModel, owner: str) -> Refusal | None:
        """Load a model, in its owner's turn; why it has failed, or None."""
        after: list[Callable[[], None]] = []
        try:
            load = one.source.load
            if one.parent is not None:
                base = await self.take(one.parent, after, owner)
                one.parent.size = one.parent.size or self._size(one.parent)  # of the only pair
                load = partial(base.pair.with_lora, str(one.source.adapter))
            async with self._turn(one):
                if one.service is not None:
                    await self._close(one)  # it has failed
                await self._make_room(one)
                began, name = time.monotonic(), one.source.name
                service = Service(self.settings, frozen(load), name, self.owners)
                service.begin()
                try:
                    await asyncio.shield(asyncio.wrap_future(service.loaded))
                except asyncio.CancelledError:  # the server ends
                    await service.aclose()
                    raise
                if service.error is not None:
                    return self._failed(one, service.error, "cannot be loaded", "load_failed")
                service.on_failure = partial(self._died, one, service)
                one.service, one.failed, one.load_s = service, None, time.monotonic() - began
                one.leave, after = after, []
                one.size = self._size(one)
                try:
                    await self._make_room(one)
                except Refusal:
                    await self._close(one)
                    raise
        except Refusal as refusal:
            return refusal
        finally:
            one.loading = None
            for leave in after:
                leave()
        return None

    def _died(self, one: _KnownModel, service: Service) -> None:
        """Note that a model's engine has stopped; in any thread."""
        if service.error is not None:
            self._failed(one, service.error, "has failed", "engine_failed")

    def _failed(self, one: _KnownModel, error: BaseException, what: str, code: str) -> Refusal:
        """Note why a model cannot be asked, for a while; in the words of an error of ours, as a client may read it."""
        told = of_error(error).message if isinstance(error, SprinterError) else type(error).__name__
        refusal = Refusal(
            503, f"the model {one.source.name!r} {what}: {told}", code, retry_after_s=round(_RETRY_S)
        )
        one.failed = refusal, time.monotonic()
        _log.error(
            code, extra={"fields": {"model": one.source.name, "reason": str(error), **error_fields(error)}}
        )
        return refusal

    async def _make_room(self, one: _KnownModel) -> None:
        """Close models until one has room beside the others.

        Raises:
            Refusal: it has none, as the others are asked for long texts.
        """
        most, until = self.settings.models_bytes, time.monotonic() + _DRAIN_S
        while most is not None:
            loaded = [other for other in self._models if other.service is not None and other is not one]
            loaded = [] if one.size > most else loaded  # nothing would help
            if sum(other.size for other in loaded) + one.size <= most:
                return
            idle = [other for other in loaded if not other.users]
            if not idle and not await self._drain(one, loaded, until):
                size, room = -(-one.size // _MIB), most // _MIB
                names = ", ".join(other.name for other in loaded)
                beside = f" beside those that are asked now ({names})" if names else ""
                raise Refusal(
                    503, f"the model {one.name!r} takes {size} MiB, for which there is no room in {room} MiB{beside}",
                    "no_memory", retry_after_s=self.retry_after_s() if names else None,
                )  # fmt: skip
            if idle:
                await self._close(min(idle, key=lambda other: other.used))

    async def _drain(self, one: _KnownModel, loaded: Sequence[_KnownModel], until: float) -> bool:
        """Close the model that was loaded longest ago when its texts have ended; False: they take longer.

        Requests that come meanwhile wait: else owners who always ask for a model would keep all others out.
        """
        # As long as their adapters are there, or wait for their turn.
        adapted = {
            other.parent for other in self._models if other.service is not None or other.loading is not None
        }
        free = [other for other in loaded if other.service is not self.only and other not in adapted]
        now = time.monotonic()
        if not free or now < self._rest or now >= until:
            return False
        last = min(free, key=lambda other: other.began)
        last.leaving = left = asyncio.Event()
        try:
            async with asyncio.timeout(until - now):
                await last.unused.wait()
            await self._close(last)
        except TimeoutError:
            self._rest = time.monotonic() + _DRAIN_S
            return False
        finally:
            last.leaving = None
            left.set()
        return True

    async def _close(self, one: _KnownModel) -> None:
        service, one.service = one.service, None
        assert service is not None
        service.on_failure = lambda: None
        await service.aclose()
        del service
        leaving, one.leave = one.leave, []
        for leave in leaving:
            leave()
        _sweep()
        asyncio.get_running_loop().call_later(_SWEEP_S, _sweep)  # the last requests to it have left by then
        _log.info("closed", extra={"fields": {"model": one.name, "bytes": one.size}})

    def _size(self, one: _KnownModel) -> int:
        """Bytes of a model's weights, without those of its parent, and of its caches."""
        assert one.service is not None
        own, shared = _weights(one.service), {}
        if one.parent is not None and one.parent.service is not None:
            shared = _weights(one.parent.service)
        caches = one.service.engine.cache_bytes
        return caches + sum(size for at, size in own.items() if at not in shared)


def _sweep() -> None:
    """Free what nobody needs, of what ``frozen`` has left out too."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _weights(service: Service) -> dict[int, int]:
    models = service.pair.models
    loaded = [models.target] if models.draft is None else [models.target, models.draft]
    return {at: size for one in loaded for at, size in weight_storages(one.model).items()}


def frozen(load: Callable[[], Pair] | None) -> Callable[[], Pair]:
    """As ``load``, with what grammars need, and leave what there is then out of garbage collections, each of which
    would hold up the server for 0.3 s."""
    assert load is not None

    def loaded() -> Pair:
        pair = load()
        pair._runtime.grammars.warm()
        gc.collect()
        gc.freeze()
        return pair

    return loaded
