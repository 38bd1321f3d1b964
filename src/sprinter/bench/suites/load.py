"""Load a suite by its name or from a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from sprinter.bench.sample import Sample, Suite
from sprinter.bench.suites import makers
from sprinter.bench.suites.chat import CODE_RULE
from sprinter.bench.suites.entry import Entry, Hub, Making, Reading, SuiteSource
from sprinter.bench.suites.rule import TextRule
from sprinter.bench.suites.table import PAPER_TOKENS, SUITES, TURN_TOKENS
from sprinter.decode.checks import at_least
from sprinter.errors import SprinterError, UserError
from sprinter.training.sources import FIELDS, MESSAGES, is_source, read_records

__all__ = ["check_suite", "load_suite", "suite_names"]

_PROMPTS = (MESSAGES, "prompt", "question", "turns")
"""Fields that hold prompts; the other fields of ``FIELDS`` hold running text."""

_CODE = {"prompt", "test", "entry_point", "canonical_solution", "task_id"}
"""Fields of HumanEval's records."""


def suite_names() -> dict[str, str]:
    """Named suites, plug-ins included, with a one-line description of each."""
    return {name: _entry(name).about for name in SUITES.names()}


def load_suite(
    name: str | Path,
    data: Path | None = None,
    *,
    limit: int | None = None,
    rule: TextRule | str | None = None,
    new_tokens: int | None = None,
    field: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chat: bool = False,
    system: str | None = None,
) -> Suite:
    """Load a suite.

    Args:
        name: name of a suite, a file (.txt, .txt.gz, .jsonl, .jsonl.gz, .parquet), or a data set on the hub (with a
            slash). Fields "messages", "turns", "prompt" and "question" of a record are whole prompts (with "answer" or
            "reference" as reference); any other field, like the lines of a text file, is running text.
        data: directory with the files of the named suites. None: they are loaded from the hub, through ``datasets``.
        limit: maximum number of samples, spread evenly over the suite's groups; the first N are the same for every
            limit >= N.
        rule: how running text becomes prompts, or changes to the suite's own rule as for ``TextRule.parse``.
        new_tokens: maximum number of new tokens per turn instead of the suite's own; 0: up to the context limit.
        field: field of a file's records that holds the text; dots lead into nested objects.
        tokenizer: the pair's tokenizer, for rules that count tokens.
        chat: ask in chat form, through the chat template; suites of conversations do so where there is a template.
        system: system message of all samples, in chat form.

    Raises:
        UserError: unknown suite, a file that is missing, damaged, empty or not UTF-8, a record without the field,
            ``chat`` for running text or without a chat template, ``system`` without chat form, ...
    """
    if limit is not None:
        at_least("limit", limit, 1)
    if new_tokens is not None:
        at_least("new_tokens", new_tokens, 0)
    found = check_suite(name, data, rule=rule, field=field, chat=chat, system=system, tokenizer=tokenizer)
    entry, chosen = found.entry, found.rule
    making = Making(found.name, chosen or TextRule(), tokenizer, field, chat)
    readings = [Reading(source, found.data) for source in entry.sources]
    made = entry.make([reading.rows() for reading in readings], making)
    kept = _different(found.name, islice(_evenly(made, entry.group) if entry.grouped else made, limit))
    if not kept:
        raise _empty(found.name, making.skipped)
    if system is not None:
        kept = [_with_system(found.name, sample, system) for sample in kept]
    usual = 0 if chosen and chosen.is_long_form else entry.new_tokens
    return Suite(
        name=found.name,
        samples=tuple(kept),
        new_tokens=usual if new_tokens is None else new_tokens,
        sources=tuple(fact for reading in readings for fact in reading.facts()),
        skipped={reason: count for reason, count in making.skipped.items() if count},
        rule=str(chosen or (chat and entry.chat_rule) or entry.rule),
        chat=chat or entry.chat,
        system=system,
    )


class FoundSuite(NamedTuple):
    """A suite before it is read: name, entry, data directory, and the rule that its running text is split by."""

    name: str
    entry: Entry
    data: Path | None
    rule: TextRule | None


def check_suite(
    name: str | Path,
    data: Path | None = None,
    *,
    rule: TextRule | str | None = None,
    field: str | None = None,
    chat: bool = False,
    system: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> FoundSuite:
    """Find a suite and check what ``load_suite`` is to be given, without reading all texts.

    Raises:
        UserError: see ``load_suite``.
    """
    title, entry, place = _find(str(name), data, field, rule is not None)
    chosen = rule if isinstance(rule, TextRule) else None
    if isinstance(entry.rule, TextRule):
        chosen = chosen or (entry.rule if rule is None else TextRule.parse(str(rule), entry.rule))
    elif rule is not None:
        raise UserError(
            f"the suite '{title}' has prompts of its own ({entry.rule}): leave the prompt rule away"
        )
    if chat and chosen is not None:
        raise UserError(
            f"the suite '{title}' is running text to be continued, which has no chat form: leave --chat away"
        )
    if (chat or system is not None) and tokenizer is not None and tokenizer.chat_template is None:
        raise UserError("the pair's tokenizer has no chat template: leave --chat and --system away")
    if system is not None and not (chat or entry.chat):
        raise UserError(f"the suite '{title}' is not asked in chat form: give --chat with --system")
    return FoundSuite(title, entry, place, chosen)


def _with_system(name: str, sample: Sample, system: str) -> Sample:
    if sample.system:
        own = f"sample '{sample.id}' of the suite '{name}' has a system message of its own"
        raise UserError(f"{own}: leave --system away")
    return replace(sample, system=system)


def _entry(name: str) -> Entry:
    entry = SUITES.get(name)()
    if not isinstance(entry, Entry):
        raise SprinterError(
            f"the plug-in suite '{name}' gives {type(entry).__name__}, no Entry: fix or uninstall it"
        )
    return entry


def _find(name: str, data: Path | None, field: str | None, running: bool) -> tuple[str, Entry, Path | None]:
    """Name, entry and data directory of a named suite, a file, or a data set on the hub."""
    if "/" not in name and not is_source(name):
        entry = _entry(name)
        if field is not None:
            raise UserError(f"the suite '{name}' knows its fields: leave --field away")
        if data is not None:
            _check_files(name, [file for source in entry.sources for file in source.files], data)
        return name, entry, data
    path = Path(name)
    if data is not None and not path.exists() and (data / name).is_file():
        path = data / name
    if path.exists() or is_source(name):
        stem = path.name.removesuffix(".gz")
        entry = _of_records(SuiteSource((path.name,)), str(path), field, running)
        return stem.rpartition(".")[0] or stem, entry, path.parent
    hub, _, split = name.partition("@")
    return name, _of_records(SuiteSource(hub=Hub(hub, split or "train")), name, field, running), None


def _check_files(name: str, wanted: list[str], data: Path) -> None:
    if not data.is_dir():
        raise UserError(f"--data {data} is not a directory: give the one that holds {', '.join(wanted)}")
    if missing := [file for file in wanted if not (data / file).is_file()]:
        raise UserError(
            f"--data {data} lacks {', '.join(missing)} of the suite '{name}': add what is missing, or leave --data "
            "away to load the suite from the hub"
        )


def _of_records(source: SuiteSource, name: str, field: str | None, running: bool) -> Entry:
    """Entry for a file or data set of the user; its first record shows what it holds."""
    first = next((record for _, record in read_records(name)), {})
    fields = first if isinstance(first, dict) else {}
    if field is None and fields.keys() >= _CODE:
        about = f"functions of {name}"
        return Entry(about, (source,), makers.code, 256, "prompts as they are", chat_rule=CODE_RULE)
    known = field or next((field for field in (MESSAGES, *FIELDS) if field in fields), "")
    grouped = "category" in fields
    about = f"records of {name}"
    if running or known.rpartition(".")[2] not in _PROMPTS:
        return Entry(about, (source,), makers.running_text, PAPER_TOKENS, TextRule(), grouped)
    make = partial(makers.talks, field=known)
    return Entry(about, (source,), make, TURN_TOKENS, "prompts as they are", grouped, chat=True)


def _evenly(samples: Iterable[Sample], group: Callable[[str], str]) -> list[Sample]:
    """Take one sample of each group in turn, and within a group one of each category in turn."""
    by_category = _in_turn(samples, lambda sample: sample.category)
    return _in_turn(by_category, lambda sample: group(sample.category))


def _in_turn(samples: Iterable[Sample], key: Callable[[Sample], str]) -> list[Sample]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return [sample for row in zip_longest(*groups.values()) for sample in row if sample is not None]


def _different(name: str, samples: Iterable[Sample]) -> list[Sample]:
    kept: dict[str, Sample] = {}
    for sample in samples:
        if sample.id in kept:
            raise UserError(
                f"two samples of the suite '{name}' are called '{sample.id}': give each its own id"
            )
        kept[sample.id] = sample
    return list(kept.values())


def _empty(name: str, skipped: Counter[str]) -> UserError:
    if total := sum(skipped.values()):
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
        return UserError(
            f"all {total} texts of the suite '{name}' were passed over ({why}): change the prompt rule; for prompts as "
            'they are give a .jsonl file of {"prompt": ...}'
        )
    return UserError(f"the suite '{name}' holds no text: give data with at least one")
