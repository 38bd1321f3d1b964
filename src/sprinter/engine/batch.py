"""Many prompts at once: options for each prompt, and results in the order of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sprinter.engine.generation import Generation
from sprinter.engine.options import GenerationOptions, item_of
from sprinter.engine.policy import Policy
from sprinter.engine.prompt import PromptInput
from sprinter.engine.request import Request
from sprinter.engine.runtime import PairRuntime
from sprinter.engine.scheduler import Scheduler
from sprinter.errors import RowsError, UserError
from sprinter.models.choose import tree_leaves

__all__ = ["generate_all", "listed", "options_of_each"]

_MOST_ROWS = 32
"""Default maximum number of rows in a batch."""


def options_of_each(
    options: GenerationOptions | Sequence[GenerationOptions | None] | None,
    keywords: Mapping[str, Any],
    count: int,
) -> list[GenerationOptions]:
    """The options of each prompt; one shared object if they are the same.

    Args:
        options: one for all prompts, or a list with one for each prompt.
        keywords: a value for all prompts, or a list with one for each prompt. For an option that is itself a list, a
            list of its items is for all prompts, and a list of lists has one for each prompt.
        count: number of prompts.

    Raises:
        UserError: a list of the wrong length, or an invalid value; the message starts with "prompt 3: " if it concerns
            one prompt.
    """
    items = {name: item_of(name) for name in keywords}
    wholes = _column("options", options, count)
    columns = {name: _column(name, value, count, items[name]) for name, value in keywords.items()}
    if not count:  # nothing to generate; values for all prompts are checked nevertheless
        shared: Any = None if _is_column(options) else options
        GenerationOptions.of(
            shared,
            {name: value for name, value in keywords.items() if not _is_column(value, items[name])},
        )
        return []
    if all(value is column[0] for column in (wholes, *columns.values()) for value in column):
        same = {name: column[0] for name, column in columns.items()}
        return [GenerationOptions.of(wholes[0], same)] * count
    found: list[GenerationOptions] = []
    for i, whole in enumerate(wholes):
        own = {name: column[i] for name, column in columns.items()}
        if found and "method" in own and own["method"] is columns["method"][0]:
            own["method"] = found[0].method  # read once
        with _of_prompt(i):
            found.append(GenerationOptions.of(whole, own))
    return found


def listed(prompts: Iterable[PromptInput]) -> list[PromptInput]:
    """The prompts of a call, as a list.

    Raises:
        UserError: they are one text, or no prompts.
    """
    if isinstance(prompts, str | bytes):
        raise UserError("prompts is one text: give a list of prompts")
    if not isinstance(prompts, Iterable):
        raise UserError(f"prompts={prompts!r} is not a list of prompts: give one")
    return list(prompts)


_IsItem = Callable[[Any], bool] | None


def _column(name: str, value: Any, count: int, item: _IsItem = None) -> list[Any]:
    """One value for each prompt."""
    if not _is_column(value, item):
        if item is None and _is_sequence(value):
            raise UserError(
                f"{name} is of type {type(value).__name__}: give one value, or a list with one per prompt"
            )
        return [value] * count
    if len(value) != count:
        raise UserError(
            f"{name} has {len(value)} values for {count} prompts: give one for all, or one per prompt"
        )
    return list(value)


def _is_column(value: Any, item: _IsItem = None) -> bool:
    """Whether the value of an option is a list with one for each prompt. ``item``: as ``item_of``."""
    if not isinstance(value, list | tuple):
        return False
    return item is None or not all(item(each) for each in value)


def _is_sequence(value: Any) -> bool:
    """Whether the value is a range, an array or the like, which is no value of an option that is not a list."""
    is_whole = isinstance(value, str | bytes | Mapping) or getattr(value, "ndim", 1) == 0
    return isinstance(value, Iterable) and not is_whole


def generate_all(
    runtime: PairRuntime,
    prompts: Sequence[PromptInput],
    options: Sequence[GenerationOptions],
    rows: int | None,
    policy: Policy,
    memory_bytes: int | None,
) -> list[Generation]:
    """Generate all texts, in the order of the prompts; see ``Pair.generate_batch``."""
    requests = []
    wanted = min(len(prompts), _MOST_ROWS) if rows is None else rows
    sharing = _sharing(wanted, len(prompts))
    for i, (prompt, own) in enumerate(zip(prompts, options, strict=True)):
        with _of_prompt(i):
            requests.append(Request(runtime, prompt, own, rows=sharing, most=sharing))
    if not requests:
        return []
    spare = max(request.spare for request in requests)
    scheduler = Scheduler(
        runtime,
        wanted if rows is not None else min(wanted, _rows_of_trees(runtime, spare)),
        max(request.length for request in requests),
        policy,
        memory_bytes,
        needs_target=any(request.needs_target for request in requests),
        needs_draft=any(request.needs_draft for request in requests),
        streams=False,
        spare=spare,
    )
    try:
        for i, request in enumerate(requests):  # the scheduler numbers its requests in this order
            with _of_prompt(i):
                scheduler.put(request)
        done = scheduler.results("prompt")
    finally:
        scheduler.close()
    return [done[i] for i in range(len(requests))]


def _rows_of_trees(runtime: PairRuntime, spare: int) -> int:
    """Default number of rows whose trees of up to ``spare + 1`` leaves the models hold."""
    loaded = [model for model in (runtime.models.target, runtime.models.draft) if model is not None]
    return next(
        (rows for rows in range(_MOST_ROWS, 1, -1)
         if all((tree_leaves(one.model, rows) or spare + 1) > spare for one in loaded)), 1
    )  # fmt: skip


def _sharing(rows: Any, prompts: int) -> int:
    """Number of rows that share passes; what is no number of rows is refused later, with a message."""
    return max(1, min(rows, prompts)) if isinstance(rows, int) else 1


@contextmanager
def _of_prompt(i: int) -> Iterator[None]:
    """Prefix the errors of one prompt among many with its index."""
    try:
        yield
    except RowsError as error:
        raise RowsError(f"prompt {i}: {error}") from error
    except UserError as error:
        raise UserError(f"prompt {i}: {error}") from error
