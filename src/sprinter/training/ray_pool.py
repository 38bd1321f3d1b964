"""A pool of Ray actors: tasks go to them one by one, results come back to this process.

Every node needs this package and the models, in the same directories or from the hub. A shared file system is not
needed: only the driver process writes. Ray restarts an actor that dies and runs its task again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sprinter.decode.checks import at_least
from sprinter.engine.pair import Pair
from sprinter.errors import SprinterError, UserError, first_line, install_line
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.pair import LoadedPair, load_models

__all__ = ["ModelSource", "RayPool", "ray_workers"]


class ModelSource(NamedTuple):
    """Models that every worker loads again, from the same directories or from the hub.

    Attributes:
        options: of ``load_models``. fingerprints: of the driver's weights, by "target" and "draft".
    """

    options: Mapping[str, Any]
    fingerprints: Mapping[str, str]

    @classmethod
    def of(cls, pair: Pair, fingerprints: Mapping[str, str], **options: Any) -> ModelSource:
        """The models of a pair that have a fingerprint, with its tokenizer; ``options``: how they are loaded."""
        tokenizer = getattr(pair.tokenizer, "name_or_path", "")
        models = {which: getattr(pair.models, which) for which in fingerprints}
        revisions = {
            ("draft_" * (which == "draft")) + "revision": one.revision for which, one in models.items()
        }
        sources = {which: _absolute(one.id) for which, one in models.items()}
        return cls(
            {**sources, **revisions, "tokenizer": _absolute(tokenizer) or None, **options}, fingerprints
        )

    def load(self) -> LoadedPair:
        """Load them on a worker.

        Raises:
            UserError: they have other weights than the driver's.
        """
        models = load_models(**self.options)
        for which, fingerprint in self.fingerprints.items():
            model = getattr(models, which)
            if weights_fingerprint(model.model) != fingerprint:
                raise UserError(
                    f"the {which} '{model.id}' is another model on a worker: put the same on all nodes"
                )
        return models


class _Actor:
    """Makes the worker with its first task, so that errors of both come back in one way."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]], threads: int) -> None:
        self._make, self._threads = make, threads
        self._work: Callable[[Any], Any] | None = None

    def run(self, task: Any) -> Any:
        if self._work is None:
            torch.set_num_threads(self._threads)
            self._work = self._make()
        return self._work(task)


class RayPool:
    """Actors that run one task after the other.

    Args:
        make: called on an actor, gives what turns a task into its result; it is sent there.
        workers: number of actors.
        address: address of a running cluster; None: start one on this machine for this run.
        on_gpu: whether each actor takes a GPU.

    Raises:
        UserError: Ray is not installed.
    """

    def __init__(
        self, make: Callable[[], Callable[[Any], Any]], workers: int, address: str | None, on_gpu: bool
    ) -> None:
        self._ray = _import_ray()
        self._threads = torch.get_num_threads()  # a result must not depend on the machine
        self._make, self._on_gpu = make, on_gpu
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

    def __call__(self, tasks: Iterable[Any]) -> Generator[Any]:
        """Yield the result of each task as it is finished, in any order.

        Raises:
            UserError: the cluster cannot be reached, or a worker refuses its models.
        """
        todo = list(tasks)
        if not todo:
            return
        ray = self._ray
        with _without_warnings():
            started = self._connect()
        try:
            actor = ray.remote(
                num_cpus=1, num_gpus=int(self._on_gpu), max_restarts=-1, max_task_retries=-1
            )(_Actor)  # fmt: skip
            actors = [actor.remote(self._make, self._threads) for _ in range(self._workers)]
            yield from ray.util.ActorPool(actors).map_unordered(lambda one, task: one.run.remote(task), todo)
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
                    cpus = max(self._workers, os.cpu_count() or 1)
                    ray.init(num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                where = f"the cluster at '{self._address}'" if self._address else "a cluster on this machine"
                raise UserError(f"cannot use {where} ({first_line(error)}): check --ray-address") from None
            return True
        return False


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


def _absolute(source: str) -> str:
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
        import_module("ray.util")
    except ImportError:
        raise UserError(f"engine=ray needs Ray: {install_line('ray')}, or use engine=local") from None
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
