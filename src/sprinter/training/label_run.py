"""Labelling: texts in, a data set of records out, in steps that can be interrupted and taken up again.

Step i always holds the same prompts, whatever ran before and wherever it runs. So a killed run goes on where it
stopped, and the data set comes out the same, to the bit on one kind of machine with one number of threads.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from sprinter.decode.checks import at_least
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.pair import LoadedPair
from sprinter.training.label_step import LabelEngine, Labeller, LabelSettings, LabelStep, steps
from sprinter.training.prompts import SPLITS, Cut, PromptRule, is_plain, is_record, read_texts, survey
from sprinter.training.ray_engine import RayEngine
from sprinter.training.records import FEW, LabelInfo, dataset_hash
from sprinter.training.shards import ShardStore

__all__ = ["LabelProgress", "LabelReport", "LabelSettings", "label"]

_FORMAT = 1  # of records; another one is another data set


@dataclass(frozen=True, slots=True)
class LabelProgress:
    """How far labelling is.

    Attributes:
        share: of the input, from 0 to 1.
        prompts, positions: labelled, earlier runs included.
        tokens: of texts that this run labelled, prompts included.
        seconds: of this run.
    """

    share: float
    prompts: int
    positions: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LabelReport:
    """What labelling did.

    Attributes:
        info: of the finished data set.
        tokens: of texts that this run labelled, prompts included.
        seconds: of this run, from the first read to the last write.
        resumed: shards that were there already.
        notes: what the user should hear of the texts, a line each.
    """

    info: LabelInfo
    tokens: int
    seconds: float
    resumed: int
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Speed of this run; 0 if nothing was left to do."""
        return self.tokens / self.seconds if self.tokens else 0.0


def label(
    pair: Pair,
    data: Sequence[str | Path],
    out: str | Path,
    settings: LabelSettings = LabelSettings(),
    *,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    restart: bool = False,
    progress: Callable[[LabelProgress], None] | None = None,
) -> LabelReport:
    """Label texts; a data set that is there in part is completed, one that is whole is left as it is.

    Args:
        pair: target and draft.
        data: text files, JSON lines, Parquet files or names of data sets, see ``gate.prompts``.
        out: directory of the data set.
        engine: "local", or "ray" for a cluster (extra ``[ray]``).
        workers: of the ray engine, None: 2; each loads the pair.
        ray_address: of a running cluster; None starts one on this machine.
        restart: delete what is in ``out`` first.
        progress: told after each shard.

    Raises:
        UserError: what is wrong with the data, the pair, the settings or the directory, and how to mend it.
    """
    began = time.perf_counter()
    sources = [str(source) for source in data]
    _check(pair, sources, settings)
    info = _describe(pair.models, survey(sources, settings.field, settings.limit, settings.split), settings)
    run = _engine(engine, pair, settings, info, workers, ray_address)
    shelf = ShardStore(Path(out), info, restart=restart)
    resumed, tokens_before = len(shelf), shelf.total("tokens")
    todo = _Missing(pair, sources, settings, shelf, sum(source["texts"] for source in info.data))
    for number, shard in run(todo):
        shelf.add(number, shard)
        if progress is not None:
            done = (shelf.total("prompts"), shelf.total("positions"), shelf.total("tokens") - tokens_before)
            progress(LabelProgress(todo.share(), *done, time.perf_counter() - began))
    if not todo.steps:
        shelf.clear()
        raise _nothing(todo.cut, settings, pair.models, any(map(is_plain, sources)))
    info = _finished(info, shelf, todo.cut)
    shelf.write_info(info)
    seconds, notes = time.perf_counter() - began, _notes(info, any(map(is_plain, sources)))
    return LabelReport(info, shelf.total("tokens") - tokens_before, seconds, resumed, notes)


class _Missing:
    """The steps that have no shard yet, in order.

    Attributes:
        cut: makes the prompts, counts what is skipped.
        steps: steps seen so far, those with a shard included.
    """

    def __init__(
        self, pair: Pair, sources: Sequence[str], settings: LabelSettings, shelf: ShardStore, texts: int
    ) -> None:
        self.cut, self.steps = _cut(pair, settings), 0
        self._texts = islice(read_texts(sources, settings.field, settings.split), settings.limit)
        self._settings, self._shelf, self._total, self._all_seen = settings, shelf, texts, False

    def __iter__(self) -> Iterator[LabelStep]:
        for step in steps(self.cut(self._texts), self._settings):
            self.steps = step.number + 1
            if step.number not in self._shelf:
                yield step
        self._all_seen = True

    def share(self) -> float:
        """How much of the input is done, from 0 to 1."""
        return len(self._shelf) / self.steps if self._all_seen else self.cut.texts / self._total


def _check(pair: Pair, sources: Sequence[str], settings: LabelSettings) -> None:
    if not sources:
        raise UserError("there is no data: give at least one file")
    if pair.models.draft is None:
        raise UserError("labelling needs a draft, and this pair has none: give draft=...")
    if pair.tokenizer is None:
        raise UserError("labelling reads texts, and this pair has no tokenizer: give tokenizer=...")
    if settings.split != "lines" and not any(map(is_plain, sources)):
        raise UserError(
            f"split={settings.split} is of plain .txt files, and there is none: records and <doc> blocks are texts, "
            "leave it out"
        )
    if settings.field is not None and not any(map(is_record, sources)):
        raise UserError(f"field={settings.field} is of records, and plain text files have none: leave it out")
    if settings.new_tokens >= pair.models.context:
        raise UserError(
            f"new_tokens={settings.new_tokens} leaves no room for a prompt: the pair's context is "
            f"{pair.models.context} tokens, give {pair.models.context - 1} or less"
        )


def _describe(models: LoadedPair, data: list[dict[str, object]], settings: LabelSettings) -> LabelInfo:
    target, draft = models.target, models.draft
    assert draft is not None
    info = LabelInfo(
        target.id, target.revision, weights_fingerprint(target.model),
        draft.id, draft.revision, weights_fingerprint(draft.model), draft.hidden_size,
        models.vocab_size, target.weights, tuple(data), asdict(settings), "",
    )  # fmt: skip
    sources = [(source["sha256"], source["texts"]) for source in data]
    told = [
        _FORMAT,
        info.target_fingerprint,
        info.draft_fingerprint,
        info.vocab_size,
        info.dtype,
        sources,
        # data sets of before there was a choice go on
        {key: value for key, value in info.settings.items() if (key, value) != ("split", "lines")},
    ]
    return replace(info, settings_hash=hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest())


def _engine(
    name: str,
    pair: Pair,
    settings: LabelSettings,
    info: LabelInfo,
    workers: int | None,
    ray_address: str | None,
) -> LabelEngine:
    if name == "local":
        for option, value in (("workers", workers), ("ray_address", ray_address)):
            if value is not None:
                raise UserError(f"{option}={value} is of the ray engine: leave it out, or give engine=ray")
        labeller = Labeller(pair.models, settings, info.settings_hash)
        return lambda steps: ((step.number, labeller(step)) for step in steps)
    if name != "ray":
        raise UserError(f"there is no engine '{name}': use local or ray")
    workers = 2 if workers is None else workers
    at_least("workers", workers, 1)
    return RayEngine(pair, settings, info, workers, ray_address)


def _cut(pair: Pair, settings: LabelSettings) -> Cut:
    assert pair.tokenizer is not None
    rule = PromptRule(settings.prompt_share, settings.prompt_tokens, settings.new_tokens, pair.models.context)
    return Cut(rule, pair.tokenizer, pair.models.vocab_size)


def _notes(info: LabelInfo, plain: bool) -> tuple[str, ...]:
    texts, short = sum(source["texts"] for source in info.data), info.skipped["too_short"]
    if 2 * short <= texts:
        return ()
    return (
        f"{short:,} of {texts:,} texts were too short: a text must go on for {info.settings['new_tokens']} tokens "
        f"after its prompt; {_split_hint(info.settings['split']) if plain else 'give longer ones'} "
        f"({info.prompts:,} prompts were labelled; training wants {FEW} at least, better some hundreds)",
    )


def _split_hint(split: str) -> str:
    """How plain text files were cut into texts, and how else they may be."""
    was = {"lines": "each line", "blank-lines": "what stands between blank lines", "file": "each file"}[split]
    other = " or ".join(f"split={name}" for name in SPLITS[SPLITS.index(split) + 1 :])
    return f"{was} of a .txt file was one text" + (f", for wrapped text give {other}" if other else "")


def _nothing(cut: Cut, settings: LabelSettings, models: LoadedPair, plain: bool) -> UserError:
    long, short = cut.skipped["too_long"], cut.skipped["too_short"]
    why = f"{long} too long for the context of {models.context} tokens, {short} too short, {cut.skipped['empty']} empty"
    fit = max(1, models.context - settings.new_tokens)
    mend = f"give prompt_tokens={fit} or less" if long >= short else "give longer texts, or fewer new_tokens"
    if plain and short > long and settings.split != "file":
        mend = f"{_split_hint(settings.split)}; else {mend}"
    plural = "no text of 1" if cut.texts == 1 else f"none of {cut.texts} texts"
    return UserError(
        f"{plural} can be labelled ({why}; a text must go on for {settings.new_tokens} tokens after its prompt): {mend}"
    )


def _finished(info: LabelInfo, shelf: ShardStore, cut: Cut) -> LabelInfo:
    return replace(
        info,
        prompts=shelf.total("prompts"),
        positions=shelf.total("positions"),
        skipped=dict(cut.skipped),
        shards=len(shelf),
        dataset_hash=dataset_hash(shelf.content_hashes()),
    )
