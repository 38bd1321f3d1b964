"""The Ray engine: steps go to a pool of actors (Ray Data ``map_batches``), shards come back to this process.

Every node needs this package and the models, in the same directories or from the hub. A shared file system is not
needed: only the driver process writes. Ray restarts an actor that dies and runs its steps again; a step's shard does
not depend on the actor. Batches are those of the local engine, and every actor uses as many threads as the driver.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sprinter.engine.pair import Pair
from sprinter.errors import SprinterError, UserError, first_line
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.pair import load_models
from sprinter.training.label_step import Labeller, LabelSettings, LabelStep
from sprinter.training.prefixes import PrefixRow
from sprinter.training.records import LabelInfo

__all__ = ["RayEngine"]


class RayEngine:
    """Run steps on a Ray cluster.

    Args:
        pair: target and draft; every worker loads them again from the same source.
        settings: settings of the data set.
        info: description of the data set.
        workers: number of actors.
        address: address of a running cluster; None: start one on this machine for this run.

    Raises:
        UserError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(
        self, pair: Pair, settings: LabelSettings, info: LabelInfo, workers: int, address: str | None
    ) -> None:
        self._ray = _import_ray()
        self._workers, self._address = workers, address
        model = pair.models.target.model
        tokenizer: Any = pair.tokenizer
        self._on_gpu = model.device.type == "cuda"
        self._spec = {
            "info": asdict(info),
            "target": _whole(info.target_id),
            "draft": _whole(info.draft_id),
            "settings": asdict(settings),
            "tokenizer": _whole(tokenizer.name_or_path) or None,
            "device": model.device.type,
            "threads": torch.get_num_threads(),
        }

    def __call__(self, steps: Iterable[LabelStep]) -> Iterator[tuple[int, bytes]]:
        """Yield (number, shard) of each step as it is finished."""
        items = [{"number": step.number, "rows": _packed(step)} for step in steps]
        if not items:
            return
        ray = self._ray
        with _without_warnings():
            started = self._connect()
        try:
            data = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
                _Worker,
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=self._workers),
                fn_constructor_args=(self._spec,),
                num_cpus=1,
                num_gpus=1 if self._on_gpu else 0,
            )
            for batch in data.iter_batches(batch_size=1, batch_format="numpy"):
                yield int(batch["number"][0]), bytes(batch["shard"][0])
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


class _Worker:
    """One actor: load the pair, then make shards.

    Args:
        spec: source and fingerprints of the pair, and the settings.

    Raises:
        UserError: the worker's models have other weights than the driver's.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        info = spec["info"]
        models = load_models(
            spec["target"], spec["draft"], tokenizer=spec["tokenizer"], device=spec["device"], dtype=info["dtype"],
            revision=info["target_revision"], draft_revision=info["draft_revision"],
        )  # fmt: skip
        assert models.draft is not None
        for which, model in (("target", models.target), ("draft", models.draft)):
            if weights_fingerprint(model.model) != info[f"{which}_fingerprint"]:
                raise UserError(
                    f"the {which} '{model.id}' is another model on a worker: put the same on all nodes"
                )
        self._label = Labeller(models, LabelSettings(**spec["settings"]), info["settings_hash"])

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Label the one step that a batch holds."""
        number = int(batch["number"][0])
        shard = self._label(LabelStep(number, _unpacked(batch["rows"][0])))
        return {"number": np.array([number]), "shard": np.array([shard], dtype=object)}


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence Ray's warnings about its own settings, which its user cannot change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _whole(source: str) -> str:
    """Absolute path of a directory or file (a worker has another working directory); a hub id unchanged."""
    return str(Path(source).resolve()) if source and Path(source).exists() else source


def _packed(step: LabelStep) -> str:
    return json.dumps([[row.prompt, row.kind, row.ids, row.original] for row in step.rows])


def _unpacked(text: str) -> tuple[PrefixRow, ...]:
    return tuple(
        PrefixRow(prompt, kind, tuple(ids), tuple(rest)) for prompt, kind, ids, rest in json.loads(text)
    )


def _import_ray() -> Any:
    # Ray reads these at import: they turn off usage reports and log output.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        ray = import_module("ray")
        import_module("ray.data")
    except ImportError:
        raise UserError(
            "engine=ray needs Ray: pip install 'sprinter-llm[ray]', or use engine=local"
        ) from None
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
