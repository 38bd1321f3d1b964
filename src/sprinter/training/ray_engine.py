"""The Ray engine of labelling: steps go to a pool of actors, shards come back to this process.

A step's shard does not depend on the actor. Batches are those of the local engine, and every actor uses as many threads
as the driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.pair import load_models
from sprinter.training.label_step import Labeller, LabelSettings, LabelStep
from sprinter.training.prefixes import PrefixRow
from sprinter.training.ray_pool import RayPool, whole_source
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
        UserError: Ray is not installed.
    """

    def __init__(
        self, pair: Pair, settings: LabelSettings, info: LabelInfo, workers: int, address: str | None
    ) -> None:
        model = pair.models.target.model
        tokenizer: Any = pair.tokenizer
        spec = {
            "info": asdict(info),
            "target": whole_source(info.target_id),
            "draft": whole_source(info.draft_id),
            "settings": asdict(settings),
            "tokenizer": whole_source(tokenizer.name_or_path) or None,
            "device": model.device.type,
            "threads": torch.get_num_threads(),
        }
        self._pool = RayPool(_Worker, spec, workers, address, model.device.type == "cuda")

    def __call__(self, steps: Iterable[LabelStep]) -> Iterator[tuple[int, bytes]]:
        """Yield (number, shard) of each step as it is finished."""
        for made in self._pool({"number": step.number, "rows": _packed(step)} for step in steps):
            yield int(made["number"]), bytes(made["shard"])


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


def _packed(step: LabelStep) -> str:
    return json.dumps([[row.prompt, row.kind, row.ids, row.original] for row in step.rows])


def _unpacked(text: str) -> tuple[PrefixRow, ...]:
    return tuple(
        PrefixRow(prompt, kind, tuple(ids), tuple(rest)) for prompt, kind, ids, rest in json.loads(text)
    )
