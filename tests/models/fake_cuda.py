"""CUDA graphs without CUDA: what is called inside a capture is called again at each replay, into the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet, ref

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from sprinter.models.capture import graphs


class FakeGraph:
    """Stands for ``torch.cuda.CUDAGraph``. Like that it holds none of the memory that it reads.

    Attributes:
        settings: what every capture was asked for. pools: memory pools that were made. device: the current one.
    """

    open: FakeGraph | None = None
    settings: ClassVar[list[dict[str, Any]]] = []
    pools: ClassVar[list[_Pool]] = []
    device: ClassVar[torch.device | None] = None

    def __init__(self) -> None:
        self.run: Callable[..., Sequence[Tensor]] | None = None
        self.args: Any = ()
        self.made: Sequence[Tensor] = ()

    def replay(self) -> None:
        assert FakeGraph.device is not None, "replayed on whatever device is the current one"
        assert self.run is not None
        if Counted.open is not None:
            Counted.open.events.append("launch")
            Counted.open.device.update(dict.fromkeys(self.made, True))
        again = self.run(*_held(self.args))
        assert all(one is other for one, other in zip(self.made, again, strict=True)), (
            "results have fixed memory"
        )


def _weak(args: Any) -> Any:
    return ref(args) if isinstance(args, Tensor) else [_weak(one) for one in args]


def _held(args: Any) -> Any:
    if isinstance(args, list):
        return [_held(one) for one in args]
    assert args() is not None, "the graph reads memory that was freed"
    return args()


@contextmanager
def _graph(graph: FakeGraph, **settings: Any) -> Iterator[None]:
    assert FakeGraph.device is not None, "captured on whatever device is the current one"
    FakeGraph.settings.append(settings)
    FakeGraph.open = graph
    pool: _Pool = settings["pool"]
    if pool.ever and not pool.used:
        raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
    pool.ever = True
    pool.used.add(graph)
    try:
        yield
    finally:
        FakeGraph.open = None


@contextmanager
def _device(device: torch.device) -> Iterator[None]:
    before, FakeGraph.device = FakeGraph.device, device
    try:
        yield
    finally:
        FakeGraph.device = before


class _Pool:
    """Torch counts the graphs of a pool: once all are gone, captured or broken off, its id is dead."""

    def __init__(self) -> None:
        self.ever, self.used = False, WeakSet[FakeGraph]()


def _pool() -> _Pool:
    FakeGraph.pools.append(_Pool())
    return FakeGraph.pools[-1]


class Counted(TorchFunctionMode):
    """Notes launches of graphs ("launch"), waits of the host for values that they made, or that follow from these
    ("wait"), and tensors that it makes of its own numbers ("copy"), which a GPU must be given.

    Attributes:
        device: tensors that a GPU would hold.
    """

    open: ClassVar[Counted | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.device = WeakTensorKeyDictionary()

    @property
    def launches(self) -> int:
        return self.events.count("launch")

    @property
    def waits(self) -> int:
        return self.events.count("wait")

    def __enter__(self) -> Counted:
        Counted.open = self
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        Counted.open = None
        super().__exit__(*args)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.from_numpy):
            self.events.append("copy")
        if not any(one in self.device for one in _tensors((args, kwargs))):
            return made
        if func in _READS:
            self.events.append("wait")
            return made.clone() if isinstance(made, Tensor) else made
        if isinstance(made, Iterator):
            made = list(made)
        self.device.update(dict.fromkeys(_tensors(made), True))
        return iter(made) if func is Tensor.__iter__ else made


_READS = frozenset({
    Tensor.cpu, Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__, Tensor.__array__,
})  # fmt: skip


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict | list | tuple):
        for one in given.values() if isinstance(given, dict) else given:
            yield from _tensors(one)


class _Stream:
    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...


@contextmanager
def _stream(_: object) -> Iterator[None]:
    yield


def fake_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let ``sprinter.models.capture.graphs`` capture on the CPU."""
    real = graphs.as_function

    def as_function(rows: Any, unit: Any) -> Callable[..., Sequence[Tensor]]:
        run = real(rows, unit)

        def call(*args: Any) -> Sequence[Tensor]:
            made: Sequence[Tensor] = run(*args)
            if FakeGraph.open is not None:
                # A capture computes nothing: its results hold rubbish until the first replay.
                made = [x.fill_(-7) for x in made]
                FakeGraph.open.run, FakeGraph.open.args, FakeGraph.open.made = run, _weak(args), made
            return made

        return call

    patch.setattr(graphs, "as_function", as_function)
    patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    patch.setattr(torch.cuda, "graph", _graph)
    patch.setattr(torch.cuda, "Stream", _Stream)
    patch.setattr(torch.cuda, "stream", _stream)
    patch.setattr(torch.cuda, "current_stream", _Stream)
    patch.setattr(torch.cuda, "device", _device)
    patch.setattr(torch.cuda, "graph_pool_handle", _pool)
    patch.setattr(FakeGraph, "settings", [])
    patch.setattr(FakeGraph, "pools", [])
