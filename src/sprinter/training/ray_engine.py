"""The Ray engine of labelling: steps go to a pool of actors, shards come back to this process.

A step's shard does not depend on the actor. Batches are those of the local engine, and every actor uses as many threads
as the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from sprinter.engine.pair import Pair
from sprinter.models.pair import load_models
from sprinter.training.label_step import LabelEngine, Labeller, LabelSettings, LabelStep
from sprinter.training.ray_pool import RayPool, check_same_weights, whole_source
from sprinter.training.records import LabelInfo

__all__ = ["ray_engine"]


def ray_engine(
    pair: Pair, settings: LabelSettings, info: LabelInfo, workers: int, address: str | None
) -> LabelEngine:
    """Runs steps on a Ray cluster.

    Args:
        pair: target and draft; every worker loads them again from the same source.
        settings: settings of the data set.
        info: description of the data set.
        workers: number of actors.
        address: address of a running cluster; None: start one on this machine for this run.

    Raises:
        UserError: Ray is not installed.
    """
    device = pair.models.target.model.device.type
    tokenizer: Any = pair.tokenizer
    spec = {
        "info": info,
        "target": whole_source(info.target_id),
        "draft": whole_source(info.draft_id),
        "settings": asdict(settings),
        "tokenizer": whole_source(tokenizer.name_or_path) or None,
        "device": device,
    }
    return RayPool(_worker, spec, workers, address, device == "cuda")


def _worker(spec: Mapping[str, Any]) -> Callable[[LabelStep], tuple[int, bytes]]:
    """Load the pair, then make shards.

    Raises:
        UserError: the worker's models have other weights than the driver's.
    """
    info = spec["info"]
    models = load_models(
        spec["target"], spec["draft"], tokenizer=spec["tokenizer"], device=spec["device"], dtype=info.dtype,
        revision=info.target_revision, draft_revision=info.draft_revision,
    )  # fmt: skip
    assert models.draft is not None
    check_same_weights("target", models.target, info.target_fingerprint)
    check_same_weights("draft", models.draft, info.draft_fingerprint)
    labeller = Labeller(models, LabelSettings(**spec["settings"]), info.settings_hash)
    return lambda step: (step.number, labeller(step))
