"""What forward passes cost on this machine: measured once for a pair, and kept in the cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import linear_regression, median
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock, Timeout

from sprinter.decode.costs import EACH, PassCosts
from sprinter.engine import backends
from sprinter.engine.backends.base import DraftPlan, DraftRow, PassInput, PromptRow, RowInput, TargetRow
from sprinter.engine.executor import Executor
from sprinter.engine.host import host_costs
from sprinter.engine.pool import RunnerPool
from sprinter.engine.record import cpu_name
from sprinter.errors import SprinterError, UserError
from sprinter.heads.drafting import TokenHeads
from sprinter.laws import Sampling
from sprinter.models import capture, kernels, runners
from sprinter.models.cachedir import cache_dir, hash_file, make_cache_dir, read_kept, write_kept
from sprinter.models.choose import runner_kind
from sprinter.models.devices import find_threads
from sprinter.models.flops import forward_flops
from sprinter.models.memory import check_memory
from sprinter.models.pair import LoadedPair
from sprinter.models.runners.forward import ModelRunner
from sprinter.random import AddressedDraws
from sprinter.version import __version__

__all__ = [
    "borrow", "draft_input", "head_costs", "kept_costs", "pass_costs", "read_prompts", "run_interleaved",
    "shared_costs", "target_input",
]  # fmt: skip

_LOG = logging.getLogger(__name__)
_MEASURING = Lock()  # two measurements at a time would disturb each other, in this process or in others
_WAITS_S = 120  # for another process
_FOLDER = "costs"  # of the cache directory
_CONTEXT = 64  # tokens before a pass
# Tokens of the passes that are timed. Kernels compute in blocks of rows: one token more may begin another.
_TARGET, _DRAFT = (1, 2, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64), (1, 8, 32)
_SHARED = (
    4,
    16,
    64,
)  # rows of passes over one token, and over EACH, of each; without the last if passes are long
_FEW, _FEW_TIMES = 12, 3  # tokens of passes that are timed so many times as often: most drafts lead to them
_ROUNDS = 0, 1, 3, 7  # draft tokens of the rounds that are timed
_REPEATS, _FEW_REPEATS = 5, 3  # after a warm-up; few of long passes, and of many rows
_MOST_REPEATS = 25
_LONGEST_S = 1.0  # repeats go on for so many seconds: a first text waits for them
_LONG = 0.02  # seconds of a target pass that is long: then the longest passes are not timed, nor what the host does
_LONG_TARGET, _LONG_DRAFT = 16, 8  # tokens of the longest passes that are timed then
_LONG_HOST = (0.0003, 0.0001, 0.0003), 0.0002, 0.0001  # what the host does beside those: it does not matter
_HOST_TOKENS, _HOST_REPEATS, _HOST_ROWS = 16, 2, 8
_STEPS = DraftPlan(Sampling(), (), {})  # without signals, which cost little beside the passes


def pass_costs(pair: LoadedPair, described: Mapping[str, Any] | None) -> PassCosts:
    """The costs of one row's passes: read if they are known, else measured, which takes some seconds, and kept.

    Args:
        described: the record of the models; None: they were changed since. Such models, and those that were given as
            objects, are measured each time.

    Raises:
        SprinterError: a model fails.
    """
    return _once(pair, described, "", lambda: _measure(pair))


def kept_costs(pair: LoadedPair, described: Mapping[str, Any] | None) -> PassCosts | None:
    """``pass_costs`` if they are known; None: they would have to be measured."""
    name = _file(pair, described, "")
    return None if name is None else _read(name)


def shared_costs(pair: LoadedPair, described: Mapping[str, Any] | None, costs: PassCosts) -> PassCosts:
    """``costs`` with those of passes that rows share, measured and kept in the same way.

    Without them where a model decodes one row at a time, and where they fail, for example out of memory: then rows are
    taken to cost what so many tokens of one row do.
    """
    if _decodes_alone(pair):
        return costs
    try:
        found = _once(pair, described, "-rows", lambda: _measure_shared(pair, costs))
        return replace(costs, shared=found.shared, several=found.several)
    except (SprinterError, MemoryError, RuntimeError) as error:  # torch: RuntimeError for memory of the host
        _LOG.warning("passes over several rows cannot be timed here: %s", error)
        return costs


def _decodes_alone(pair: LoadedPair) -> bool:
    """Whether a model decodes one row at a time."""
    loaded = [one for one in (pair.target, pair.draft) if one is not None]
    return any(runner_kind(one.model)[0] == "crop" for one in loaded)


def _once(
    pair: LoadedPair,
    described: Mapping[str, Any] | None,
    which: str,
    measure: Callable[[], PassCosts],
) -> PassCosts:
    """Costs that were kept, or are measured and kept now."""
    name = _file(pair, described, which)
    if name is not None and (known := _read(name)) is not None:
        return known
    with _turn():
        if name is not None and (known := _read(name)) is not None:
            return known
        _LOG.info("measuring what forward passes%s of this pair cost here", " of several rows" * bool(which))
        disturbed = find_threads().disturbed
        costs = measure()
        if name is not None and not disturbed:
            _keep(name, costs)
        elif name is not None:
            _LOG.info("other programs keep the cores busy: these costs are measured again at the next start")
    return costs


@contextmanager
def _turn() -> Iterator[None]:
    """Context in which nothing else measures on this machine, as far as it shares this cache directory."""
    with _MEASURING, ExitStack() as held:
        try:
            make_cache_dir()
            lock = FileLock(cache_dir() / "measuring.lock")
            held.enter_context(lock.acquire(timeout=_WAITS_S))
        except Timeout:
            _LOG.warning("another process has measured for %d s, so both measure at the same time", _WAITS_S)
        except (OSError, UserError, RuntimeError) as error:  # no home, or no locks on this file system
            _LOG.debug("other processes may measure at the same time: %s", error)
        yield


def _file(pair: LoadedPair, described: Mapping[str, Any] | None, which: str) -> str | None:
    """Name of the file that keeps costs; None for models that are not, or no longer, what their files hold."""
    if described is None or any(one.load_s is None for one in pair.asked().values()):
        return None
    return f"{_key(pair, {name: described[name] for name in ('target', 'draft')})}{which}.json"


@torch.inference_mode()
def head_costs(heads: TokenHeads, costs: PassCosts, dtype: torch.dtype) -> PassCosts:
    """Costs of the target's passes, and in place of a draft model's those of a step of heads that draft.

    They are measured each time, in milliseconds. Rows run their heads one after the other.

    Args:
        heads: attached to the target. costs: of the target's passes. dtype: of the target's states.
    """
    states = {
        layer: torch.zeros(_CONTEXT, heads.hidden_size, device=heads.device, dtype=dtype)
        for layer in heads.layers
    }
    ids = [i % min(100, heads.vocab_size) for i in range(_CONTEXT + 1)]
    seconds = dict.fromkeys((1, 8), math.inf)
    with _turn():
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
    rows = tuple((count, target, count * one) for count, target, _ in costs.shared)  # one row after the other
    return replace(costs, draft=((1, one), (8, max(one, eight))), shared=rows, start=0.0)


def _keep(name: str, costs: PassCosts) -> None:
    """Write costs for later; where that fails they are measured again next time."""
    try:
        write_kept(_FOLDER, name, json.dumps(asdict(costs)))
    except (OSError, UserError) as error:
        _LOG.warning("the costs of forward passes cannot be kept, and are measured each time: %s", error)


def borrow(pair: LoadedPair, tokens: int, rows: int = 1) -> Executor:
    """Rows of their own for ``tokens`` tokens, in each model."""
    target, draft = (
        None if one is None else RunnerPool(one).take(tokens, rows) for one in (pair.target, pair.draft)
    )
    return Executor(target, draft, pair.vocab_size)


def _key(pair: LoadedPair, models: Mapping[str, Any]) -> str:
    """What the costs depend on: models as they were loaded, threads, processor, versions."""
    facts = {
        "models": models,
        "flops": [forward_flops(one.model.config) for one in (pair.target, pair.draft) if one is not None],
        "threads": torch.get_num_threads(),
        "machine": (cpu_name(), torch.cuda.get_device_name() if torch.cuda.is_available() else None),
        "versions": (__version__, torch.__version__, [field.name for field in fields(PassCosts)]),
        "kernels": kernels.name_of(),
        "code": [
            hash_file(path)
            for path in (
                Path(__file__),
                *(own for folder in (runners, capture, backends) for own in _files(folder)),
            )
        ],
        "passes": (
            _TARGET,
            _DRAFT,
            _SHARED,
            EACH,
            _CONTEXT,
            _HOST_TOKENS,
            _HOST_ROWS,
            _STEPS.signals,
            _ROUNDS,
        ),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _files(package: ModuleType) -> list[Path]:
    return sorted(Path(str(package.__file__)).parent.glob("*.py"))


def _read(name: str) -> PassCosts | None:
    """Costs that were kept; None: there are none, or they cannot be read or trusted."""
    try:
        text = read_kept(_FOLDER, name)
        return None if text is None else PassCosts.from_json(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None


def _measure(pair: LoadedPair) -> PassCosts:
    """Time the passes, interleaved."""
    longest, room = max(_TARGET), pair.context
    context = max(1, min(_CONTEXT, room - longest))
    models = borrow(pair, min(room, context + longest))
    ids = read_prompts(models, context, min(longest, room - context))
    long = min(run_interleaved(models, {1: target_input(ids, context, 1)}, 2)[1]) > _LONG
    rounds = [n for n in _ROUNDS if context + n < room] if pair.draft else [0]
    repeats = _FEW_REPEATS if long else _REPEATS
    drafts, seconds = _rounds(models, ids, context, rounds, repeats)
    step, start = _steps(drafts)
    jobs: dict[tuple[str, int], PassInput] = {}
    plain = target_input(ids, context, 1)
    for n in sorted({*_TARGET, *_DRAFT}):
        if drafts and n in _DRAFT[1:] and context + n < room and not (long and n > _LONG_DRAFT):
            jobs["draft", n] = draft_input(ids, context, n, _STEPS)
        if n in _TARGET and n not in seconds and context + n <= room and not (long and n > _LONG_TARGET):
            jobs["target", n] = target_input(ids, context, n)
    found = {"target": [*seconds.items()], "draft": [(1, step)] if drafts else []}
    few = {what: job for what, job in jobs.items() if what[1] <= _FEW}
    more = {what: job for what, job in jobs.items() if what not in few}
    for some, times in ((few, repeats if long else _FEW_TIMES * repeats), (more, repeats)):
        for (which, n), taken in run_interleaved(models, some, times, behind=plain).items():
            found[which].append((n, median(taken)))
    for points in found.values():
        points.sort()
        for at in reversed(range(len(points) - 1)):  # fewer tokens cost no more than many
            points[at] = points[at][0], min(points[at][1], points[at + 1][1])
    for points in found.values():
        if len(points) == 1:  # a context of a few tokens
            points.append((2, points[0][1]))
    tokens = min(_HOST_TOKENS, room)
    host, judged, greedy = (0.0, 0.0, 0.0), 0.0, 0.0
    if tokens > 8:
        rows = 1 if _decodes_alone(pair) else _HOST_ROWS
        host, judged, greedy = (
            _LONG_HOST if long else host_costs(borrow(pair, tokens, rows), tokens, _HOST_REPEATS)
        )
    return PassCosts(
        tuple(found["target"]), tuple(found["draft"]), host=host, judged=judged, greedy=greedy, start=start
    )


def _measure_shared(pair: LoadedPair, costs: PassCosts) -> PassCosts:
    """``costs`` with passes over one token, and over several, of each of several rows.

    Raises:
        SprinterError: a model fails, or memory is short.
    """
    loaded = [one for one in (pair.target, pair.draft) if one is not None]
    tokens = min(pair.context, _CONTEXT + EACH)
    shared, several = list[tuple[int, float, float]](), list[tuple[int, float]]()
    counts = _SHARED[:-1] if costs.target_s(1) > _LONG else _SHARED
    for rows in counts if tokens > EACH else ():
        sizes = [RunnerPool(one).size(tokens) for one in loaded]
        check_memory([one.model for one in loaded], rows, sizes, None)
        models = borrow(pair, tokens, rows)
        context = tokens - EACH
        ids = read_prompts(models, context, EACH, rows)
        rounds = [0, EACH - 1]
        drafts, seconds = _rounds(models, ids, context, rounds, _FEW_REPEATS, rows, pair.draft is not None)
        step = max([0.0, *((drafted - costs.start) / n for n, drafted in drafts.items())])
        shared.append((rows, seconds[1], max(step, costs.draft_s(1))))
        several.append((rows, max(seconds[EACH], seconds[1])))
        del models  # before more rows are made
    return replace(costs, shared=tuple(shared), several=tuple(several))


def _rounds(
    models: Executor, ids: list[int], context: int, drafted: Sequence[int], repeats: int, rows: int = 1,
    drafts: bool = True,
) -> tuple[dict[int, float], dict[int, float]]:  # fmt: skip
    """Median seconds of draft runs by their steps, and by its tokens of the target's pass behind each.

    They are made in turn, as in a text: what one model has in the processor's caches is lost while the other runs. Each
    follows one of its kind, as plain passes in between would leave less of the draft in them.

    Args:
        models, ids: rows that have read ``context`` tokens, and those to read. drafted: steps of each round, ascending.
        repeats: at least, after a warm-up; more within ``_LONGEST_S``. drafts: whether there is a draft.

    Raises:
        SprinterError: a model fails.
    """
    clock, every = _clock(models), range(rows)
    runs = {
        n: [draft_input(ids, context, 1, _STEPS, row, n) for row in every] if n and drafts else []
        for n in drafted
    }
    checks = {n: [target_input(ids, context, n + 1, row=row) for row in every] for n in drafted}
    found = {n: list[tuple[float, float]]() for n in drafted}
    began, repeat = time.perf_counter(), 0
    with torch.inference_mode():
        while repeat <= repeats or (time.perf_counter() - began < _LONGEST_S and repeat < _MOST_REPEATS):
            for n in drafted:
                for timed in (False, True):  # llama.cpp makes a graph for each length, too
                    first = clock()
                    if runs[n]:
                        _run(models, runs[n])
                    between = clock()
                    _run(models, checks[n])
                    if repeat and timed:
                        found[n].append((between - first, clock() - between))
            repeat += 1
    drawn = {n: median(one for one, _ in times) for n, times in found.items() if runs[n]}
    return drawn, {n + 1: median(one for _, one in times) for n, times in found.items()}


def _run(models: Executor, inputs: Sequence[PassInput]) -> None:
    for done in models.run(inputs):
        if isinstance(done, Exception):
            raise done


def _steps(drafts: Mapping[int, float]) -> tuple[float, float]:
    """Seconds of a draft step, and those of a run in addition, from runs of several lengths."""
    if not drafts:
        return 0.0, 0.0
    mean = sum(drafts.values()) / sum(drafts)
    if len(drafts) < 2:
        return mean, 0.0
    step, start = linear_regression([*drafts], [*drafts.values()])
    return (step, start) if step > 0 and start > 0 else (mean, 0.0)


def read_prompts(models: Executor, context: int, more: int, count: int = 1) -> list[int]:
    """Fill ``count`` rows of the models with ``context`` tokens; returns ids, of these and of ``more`` to follow."""
    ids = [i % min(100, models.vocab) for i in range(context + more)]
    for rows in (models.target, models.draft):
        if rows is not None:
            rows.read([PromptRow(rows.name, RowInput(row, 0, ids[:context])) for row in range(count)])
    return ids


def target_input(
    ids: list[int], context: int, tokens: int, sampling: Sampling = Sampling(), row: int = 0
) -> TargetRow:
    """A target pass over ``tokens`` after the context."""
    return TargetRow(RowInput(row, context, ids[context : context + tokens]), sampling)


def draft_input(
    ids: list[int], context: int, tokens: int, plan: DraftPlan | None = None, row: int = 0, count: int = 1
) -> DraftRow:
    """Draft steps, the first of which reads ``tokens`` after the context; by default with the law's entropy."""
    plan = plan or DraftPlan(Sampling(), ("entropy",), {})
    end = context + tokens
    return DraftRow(row, ids[context:end], end, 1, AddressedDraws(), plan, count=count)


def run_interleaved(
    models: Executor,
    jobs: Mapping[Any, PassInput | Sequence[PassInput]],
    repeats: int,
    progress: Callable[[int, int], None] | None = None,
    behind: PassInput | None = None,
) -> dict[Any, list[float]]:
    """Seconds of each job, or of jobs in one pass, in each repeat; a first one, the warm-up, is left out.

    A pass over one token of each row is timed after another such pass, as in plain decoding, all others after passes of
    another length, as where drafts differ in length: llama.cpp builds its graph anew after a pass of another length.

    Args:
        behind: a pass before each other than those over one token, as a long one leaves little in the processor's
            caches; None: the job before it.

    Raises:
        SprinterError: a job fails.
    """
    times: dict[Any, list[float]] = {what: [] for what in jobs}
    clock = _clock(models)
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for what, job in jobs.items():
                together = job if isinstance(job, Sequence) else [job]
                first = together if all(map(_reads_one, together)) else [behind] if behind else []
                for timed in (False, True) if first else (True,):
                    began = clock()
                    _run(models, together if timed else first)
                    if repeat and timed:
                        times[what].append(clock() - began)
            if progress is not None:
                progress(repeat, repeats)
    return times


def _clock(models: Executor) -> Callable[[], float]:
    """Where this thread alone computes, its own time: it does not count when other programs had the processor."""
    alone = torch.get_num_threads() == 1 and all(
        isinstance(rows.runner, ModelRunner) and rows.runner.device.type == "cpu" for rows in models.models
    )
    return time.thread_time if alone else time.perf_counter


def _reads_one(given: PassInput) -> bool:
    """Whether an input reads one token of its row."""
    if isinstance(given, TargetRow):
        return len(given.feed.tokens) == 1
    return isinstance(given, DraftRow) and len(given.tokens) == 1
