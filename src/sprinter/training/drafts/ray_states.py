"""States of the target computed by a pool of Ray actors, each of which loads the target."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.pair import load_models
from sprinter.training.drafts.states import StatesTask, states_of_texts
from sprinter.training.ray_pool import RayPool, whole_source

__all__ = ["RayStates"]


class RayStates:
    """A ``StatesMaker`` on a Ray cluster.

    Args:
        pair: the target; every worker loads it again from the same source.
        weights: the same in a floating-point dtype, where heads are trained.
        precision: dtype of matrix products.
        workers: number of actors.
        address: address of a running cluster; None: start one on this machine for this run.

    Raises:
        UserError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(
        self, pair: Pair, weights: PreTrainedModel, precision: str, workers: int, address: str | None
    ) -> None:
        target, tokenizer = pair.models.target, pair.tokenizer
        spec = {
            "target": whole_source(target.id),
            "revision": target.revision,
            "tokenizer": whole_source(getattr(tokenizer, "name_or_path", "")) or None,
            "fingerprint": weights_fingerprint(weights),
            "precision": precision,
            "dtype": str(weights.dtype).removeprefix("torch."),
            "device": weights.device.type,
            "threads": torch.get_num_threads(),
        }
        self._pool = RayPool(_StatesWorker, spec, workers, address, weights.device.type == "cuda")
        self._pool.check()

    def __call__(self, tasks: Sequence[StatesTask]) -> Generator[tuple[int, dict[int, Tensor]]]:
        """See ``StatesMaker``."""
        items = (
            {"task": json.dumps([task.number, list(task.layers), [ids.tolist() for ids in task.texts]])}
            for task in tasks
        )
        with closing(self._pool(items)) as results:
            for made in results:
                found = from_bytes(bytes(made["states"]))
                yield int(made["number"]), {int(layer): rows for layer, rows in found.items()}


class _StatesWorker:
    """One actor: load the target, then compute states.

    Raises:
        UserError: the worker's target has other weights than the driver's.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        options = {"device": spec["device"], "dtype": spec["dtype"], "revision": spec["revision"]}
        target = load_models(
            spec["target"], tokenizer=spec["tokenizer"], dequantise=True, **options
        ).target  # fmt: skip
        if weights_fingerprint(target.model) != spec["fingerprint"]:
            raise UserError(
                f"the target '{target.id}' is another model on a worker: put the same on all nodes"
            )
        self._model, self._precision = target.module("states"), spec["precision"]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute the states of the one task that a batch holds."""
        number, layers, texts = json.loads(str(batch["task"][0]))
        task = StatesTask(number, layers, [torch.tensor(ids) for ids in texts])
        made = states_of_texts(self._model, task, self._precision)
        shard = to_bytes({str(layer): rows.contiguous() for layer, rows in made.items()})
        return {"number": np.array([number]), "states": np.array([shard], dtype=object)}
