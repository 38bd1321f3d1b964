"""A pool of Ray actors (Ray Data ``map_batches``): items go to them one by one, results come back to this process.

Every node needs this package and the models, in the same directories or from the hub. A shared file system is not
needed: only the driver process writes. Ray restarts an actor that dies and runs its items again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Generator, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from sprinter.decode.checks import at_least
from sprinter.errors import SprinterError, UserError, first_line, install_line

__all__ = ["RayPool", "ray_workers", "whole_source"]


class RayPool:
    """Actors of one class, each of which takes one item after the other.

    Args:
        worker: the class: made of ``spec``, it is called with a batch of one item, arrays by name, and returns such a
            batch.
        spec: for its constructor; plain values.
        workers: number of actors.
        address: address of a running cluster; None: start one on this machine for this run.
        on_gpu: whether each actor takes a GPU.

    Raises:
        UserError: Ray is not installed.
    """

    def __init__(
        self, worker: type, spec: dict[str, Any], workers: int, address: str | None, on_gpu: bool
    ) -> None:
        self._ray = _import_ray()
        self._worker, self._spec, self._on_gpu = worker, spec, on_gpu
        self._workers, self._address = workers, address

    def check(self) -> None:
        """Find out whether the cluster can be reached, before other work is done.

        Raises:
            UserError: it cannot.
        """
        if self._address and not self._ray.is_initialized():
            with _without_warnings():
                self._connect()
            self._ray.shutdown()

    def __call__(self, items: Iterable[dict[str, Any]]) -> Generator[dict[str, Any]]:
        """Yield the result of each item as it is finished, in any order.

        Raises:
            UserError: the cluster cannot be reached, or a worker refuses its models.
        """
        todo = list(items)
        if not todo:
            return
        ray = self._ray
        with _without_warnings():
            started = self._connect()
        try:
            data = ray.data.from_items(todo, override_num_blocks=len(todo)).map_batches(
                self._worker,
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=self._workers),
                fn_constructor_args=(self._spec,),
                num_cpus=1,
                num_gpus=1 if self._on_gpu else 0,
            )
            for batch in data.iter_batches(batch_size=1, batch_format="numpy"):
                yield {name: values[0] for name, values in batch.items()}
        except Exception as error:
            raise _plain(error) from error
        finally:
            if started:
                ray.shutdown()

    def _connect(self) -> bool:
        """Join or start a cluster; return whether this engine has to shut it down."""
        ray = self._ray
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not ray.is_initialized():
            try:
                if self._address:
                    ray.init(address=self._address, **quiet)
                else:
                    cpus = max(self._workers + 1, os.cpu_count() or 1)  # one CPU for reading
                    ray.init(num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                where = f"the cluster at '{self._address}'" if self._address else "a cluster on this machine"
                raise UserError(f"cannot use {where} ({first_line(error)}): check --ray-address") from None
            started = True
        else:
            started = False
        ray.data.DataContext.get_current().enable_progress_bars = False
        return started


def ray_workers(engine: str, workers: int | None, address: str | None) -> int | None:
    """Number of workers of ``engine``, "local" or "ray"; None for local.

    Raises:
        UserError: another engine, or options that are not of it.
    """
    count = 2 if workers is None else workers
    if engine == "local":
        for option, value in (("workers", workers), ("ray_address", address)):
            if value is not None:
                raise UserError(f"{option}={value} is of the ray engine: leave it out, or give engine=ray")
        return None
    if engine != "ray":
        raise UserError(f"there is no engine '{engine}': use local or ray")
    at_least("workers", count, 1)
    return count


def whole_source(source: str) -> str:
    """Absolute path of a directory or file (a worker has another working directory); a hub id unchanged."""
    return str(Path(source).resolve()) if source and Path(source).exists() else source


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence Ray's warnings about its own settings, which its user cannot change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _import_ray() -> Any:
    # Ray reads these at import: they turn off usage reports and log output.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        ray = import_module("ray")
        import_module("ray.data")
    except ImportError:
        raise UserError(f"engine=ray needs Ray: {install_line('ray')}, or use engine=local") from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


def _plain(error: BaseException) -> BaseException:
    """This package's error, if one is in the chain of causes of Ray's error; otherwise Ray's."""
    each: BaseException | None = error
    while each is not None:
        for inner in (each, getattr(each, "cause", None)):
            if isinstance(inner, SprinterError):
                return type(inner)(first_line(inner)) if type(inner) in (SprinterError, UserError) else inner
        each = each.__cause__ or each.__context__
    return error
