"""States of the target computed by a pool of Ray actors, each of which loads the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from sprinter.engine.pair import Pair
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.pair import load_models
from sprinter.training.drafts.states import StatesMaker, StatesTask, states_of_texts
from sprinter.training.ray_pool import RayPool, check_same_weights, whole_source

__all__ = ["ray_states"]


def ray_states(
    pair: Pair, weights: PreTrainedModel, precision: str, workers: int, address: str | None
) -> StatesMaker:
    """Computes states on a Ray cluster.

    Args:
        pair: the target; every worker loads it again from the same source.
        weights: the same in a floating-point dtype, where heads are trained.
        precision: dtype of matrix products.
        workers: number of actors.
        address: address of a running cluster; None: start one on this machine for this run.

    Raises:
        UserError: Ray is not installed, or the cluster cannot be reached.
    """
    target, tokenizer = pair.models.target, pair.tokenizer
    spec = {
        "target": whole_source(target.id),
        "revision": target.revision,
        "tokenizer": whole_source(getattr(tokenizer, "name_or_path", "")) or None,
        "fingerprint": weights_fingerprint(weights),
        "precision": precision,
        "dtype": str(weights.dtype).removeprefix("torch."),
        "device": weights.device.type,
    }
    pool = RayPool(_worker, spec, workers, address, weights.device.type == "cuda")
    pool.check()
    return pool


def _worker(spec: Mapping[str, Any]) -> Callable[[StatesTask], tuple[int, dict[int, Tensor]]]:
    """Load the target, then compute states.

    Raises:
        UserError: the worker's target has other weights than the driver's.
    """
    options = {name: spec[name] for name in ("tokenizer", "device", "dtype", "revision")}
    target = load_models(spec["target"], dequantise=True, **options).target
    check_same_weights("target", target, spec["fingerprint"])
    model = target.module("states")
    return lambda task: (task.number, states_of_texts(model, task, spec["precision"]))
