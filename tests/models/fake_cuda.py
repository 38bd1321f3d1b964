"""CUDA graphs without CUDA: what is called inside a capture is called again at each replay, into the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from sprinter.models import graphs


class FakeGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    open: FakeGraph | None = None

    def __init__(self) -> None:
        self.call: Callable[[], Sequence[Tensor]] | None = None
        self.made: Sequence[Tensor] = ()

    def replay(self) -> None:
        assert self.call is not None
        for made, again in zip(self.made, self.call(), strict=True):
            made.copy_(again)


@contextmanager
def _graph(graph: FakeGraph) -> Iterator[None]:
    FakeGraph.open = graph
    try:
        yield
    finally:
        FakeGraph.open = None


class _Stream:
    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...


@contextmanager
def _stream(_: object) -> Iterator[None]:
    yield


def fake_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let ``sprinter.models.graphs`` capture on the CPU."""
    real = graphs.as_module

    def as_module(rows: Any, unit: Any) -> Callable[..., Sequence[Tensor]]:
        run = real(rows, unit)

        def call(*args: Any) -> Sequence[Tensor]:
            made: Sequence[Tensor] = run(*args)
            if FakeGraph.open is not None:
                # A capture computes nothing: its results hold rubbish until the first replay.
                made = [torch.full_like(x, -7) for x in made]
                FakeGraph.open.call, FakeGraph.open.made = (lambda: run(*args)), made
            return made

        return call

    patch.setattr(graphs, "as_module", as_module)
    patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    patch.setattr(torch.cuda, "graph", _graph)
    patch.setattr(torch.cuda, "Stream", _Stream)
    patch.setattr(torch.cuda, "stream", _stream)
    patch.setattr(torch.cuda, "current_stream", _Stream)
