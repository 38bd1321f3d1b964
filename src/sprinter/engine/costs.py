"""What forward passes cost on this machine: measured once for a pair, and kept in the cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from sprinter.decode.costs import PassCosts
from sprinter.engine.captured import CapturedDraftSteps, CapturedTargetPasses
from sprinter.engine.jobs import DraftJob, Job, Models, TargetJob
from sprinter.engine.pool import RunnerPool
from sprinter.engine.record import cpu_name
from sprinter.engine.rows import Feed
from sprinter.engine.steps import DraftPlan, DraftRow, TargetRow
from sprinter.errors import SprinterError, UserError
from sprinter.heads.drafting import TokenHeads
from sprinter.laws import Sampling
from sprinter.models.cachedir import read_kept, write_kept
from sprinter.models.flops import forward_flops
from sprinter.models.pair import LoadedPair
from sprinter.random import AddressedDraws
from sprinter.version import __version__

__all__ = ["borrow", "draft_job", "head_costs", "pass_costs", "read_prompts", "run_interleaved", "target_job"]

_LOG = logging.getLogger(__name__)
_MEASURING = Lock()  # two measurements at a time would disturb each other
_FOLDER = "costs"  # of the cache directory
_CONTEXT = 64  # tokens before a pass
_TARGET, _DRAFT = (1, 2, 4, 8, 16, 32, 64), (1, 8, 32)  # tokens of the passes that are timed
_REPEATS = 3  # of each, after a warm-up; the least counts: other work only adds


def pass_costs(pair: LoadedPair, described: Mapping[str, Any]) -> PassCosts:
    """The costs of a pair's passes: read if they are known, else measured, which takes some seconds, and kept.

    Args:
        described: the record of the models; those that were given as objects are measured each time.

    Raises:
        SprinterError: a model fails.
    """
    models = {name: described[name] for name in ("target", "draft")}
    named = all(one is None or _is_named(one) for one in models.values())
    name = f"{_key(pair, models)}.json" if named else None
    with _MEASURING:
        if name is not None and (known := _read(name)) is not None:
            return known
        _LOG.info("measuring what forward passes of this pair cost here (once)")
        costs = _measure(pair)
        if name is not None:
            _keep(name, costs)
    return costs


def _is_named(model: Mapping[str, Any]) -> bool:
    """Whether a model was named: a revision, a path, or a file of the models folder; not an object, named by class."""
    name = model["id"]
    return bool(model["revision"]) or name.endswith(".gguf") or Path(name).expanduser().exists()


@torch.inference_mode()
def head_costs(heads: TokenHeads, costs: PassCosts, dtype: torch.dtype) -> PassCosts:
    """Costs of the target's passes, and in place of a draft model's those of a step of heads that draft.

    They are measured each time, in milliseconds. Rows run their heads one after the other, so that with many rows the
    steps of all are a little more than is said here.

    Args:
        heads: attached to the target. costs: of the target's passes. dtype: of the target's states.
    """
    like = next(heads.parameters())
    states = {
        layer: torch.zeros(_CONTEXT, heads.hidden_size, device=like.device, dtype=dtype)
        for layer in heads.layers
    }
    ids = [i % min(100, heads.vocab_size) for i in range(_CONTEXT + 1)]
    seconds = dict.fromkeys((1, 8), math.inf)
    for _ in range(_REPEATS + 1):  # the first warms up, and is never the least
        for tips in seconds:
            text = heads.begin()
            text.read(ids, states)
            text.logits([()])
            began = time.perf_counter()
            logits = text.logits([(i,) for i in range(tips)])
            if logits is not None:
                logits[0, 0].item()  # waits for the device
            seconds[tips] = min(seconds[tips], time.perf_counter() - began)
    one, eight = seconds.values()
    return PassCosts(costs.target, ((1, one), (8, max(one, eight))))


def _keep(name: str, costs: PassCosts) -> None:
    """Write costs for later; where that fails they are measured again next time."""
    try:
        write_kept(_FOLDER, name, json.dumps({"target": costs.target, "draft": costs.draft}))
    except (OSError, UserError) as error:
        _LOG.warning("the costs of forward passes cannot be kept, and are measured each time: %s", error)


def borrow(pair: LoadedPair, tokens: int) -> Models:
    """Rows of their own for ``tokens`` tokens, one in each model."""
    target, draft = (
        None if one is None else RunnerPool(one).take(tokens) for one in (pair.target, pair.draft)
    )
    return Models(target, draft, pair.vocab_size, CapturedDraftSteps, CapturedTargetPasses)


def _key(pair: LoadedPair, models: Mapping[str, Any]) -> str:
    """What the costs depend on: models as they were loaded, threads, processor, versions."""
    facts = {
        "models": models,
        "flops": [forward_flops(one.model.config) for one in (pair.target, pair.draft) if one is not None],
        "threads": torch.get_num_threads(),
        "machine": (cpu_name(), torch.cuda.get_device_name() if torch.cuda.is_available() else None),
        "versions": (__version__, torch.__version__),
        "passes": (_TARGET, _DRAFT, _CONTEXT),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _read(name: str) -> PassCosts | None:
    """Costs that were kept; None: there are none, or they cannot be read or trusted."""
    try:
        text = read_kept(_FOLDER, name)
        if text is None:
            return None
        kept: Mapping[str, Any] = json.loads(text)
        target, draft = (tuple((int(n), float(s)) for n, s in kept[name]) for name in ("target", "draft"))
        return PassCosts(target, draft)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None


def _measure(pair: LoadedPair) -> PassCosts:
    """Time the passes, interleaved."""
    longest, room = max(_TARGET), pair.context
    context = max(1, min(_CONTEXT, room - longest))
    models = borrow(pair, min(room, context + longest))
    ids = read_prompts(models, context, min(longest, room - context))
    jobs: dict[tuple[str, int], Job] = {}
    for n in _TARGET:
        if context + n <= room:
            jobs["target", n] = target_job(ids, context, n)
    for n in _DRAFT if pair.draft else ():
        if context + n < room:
            jobs["draft", n] = draft_job(ids, context, n)
    seconds = run_interleaved(models, jobs, _REPEATS)
    found: dict[str, list[tuple[int, float]]] = {"target": [], "draft": []}
    for (which, n), times in reversed(seconds.items()):
        longer = [
            least for _, least in found[which]
        ]  # a pass over fewer tokens costs no more than one over many
        found[which].insert(0, (n, min([*times, *longer])))
    for points in found.values():
        if len(points) == 1:  # a context of a few tokens
            points.append((2, points[0][1]))
    return PassCosts(tuple(found["target"]), tuple(found["draft"]))


def read_prompts(models: Models, context: int, more: int) -> list[int]:
    """Fill row 0 of the models with ``context`` tokens; returns ids, of these and of ``more`` that may follow them."""
    ids = [i % min(100, models.vocab) for i in range(context + more)]
    for rows in (models.target, models.draft):
        if rows is not None:
            rows.read_prompts([Feed(0, 0, ids[:context])])
    return ids


def target_job(ids: list[int], context: int, tokens: int, sampling: Sampling = Sampling()) -> TargetJob:
    """A target pass over ``tokens`` after the context."""
    return TargetJob(TargetRow(Feed(0, context, ids[context : context + tokens]), sampling))


def draft_job(ids: list[int], context: int, tokens: int, plan: DraftPlan | None = None) -> DraftJob:
    """A draft step that reads ``tokens`` after the context; by default with the law's entropy."""
    plan = plan or DraftPlan(Sampling(), ("entropy",), {})
    end = context + tokens
    return DraftJob(DraftRow(0, ids[context:end], end, 1, AddressedDraws(), plan))


def run_interleaved(
    models: Models,
    jobs: Mapping[Any, Job],
    repeats: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Any, list[float]]:
    """Seconds of each job in each repeat; a first one, the warm-up, is left out.

    Raises:
        SprinterError: a job fails.
    """
    times: dict[Any, list[float]] = {what: [] for what in jobs}
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for what, job in jobs.items():
                began = time.perf_counter()
                (done,) = models.run([job])
                if isinstance(done, SprinterError):
                    raise done
                if repeat:
                    times[what].append(time.perf_counter() - began)
            if progress is not None:
                progress(repeat, repeats)
    return times
