"""Label texts: write a data set of records, in steps, so that an interrupted run can be resumed.

Step i always holds the same prompts, on any machine and after any interruption. A killed run therefore resumes where
it stopped and produces the same data set, bit for bit on one kind of machine with one number of threads.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.gguf.load import GgufModel
from sprinter.models.pair import LoadedPair
from sprinter.training.examples import ExampleEncoder, reader_of
from sprinter.training.label_settings import CPU_BATCH, GPU_BATCH, LabelSettings
from sprinter.training.label_step import LabelEngine, Labeller, LabelStep, label_elsewhere, steps
from sprinter.training.prompts import PromptRule, PromptSplitter
from sprinter.training.ray_pool import ModelSource, RayPool, ray_workers
from sprinter.training.records import ENOUGH, FEW, INFO, KINDS, LabelInfo, dataset_hash, read_info
from sprinter.training.shards import ShardStore
from sprinter.training.sources import SPLITS, is_plain, is_record, survey

__all__ = ["LabelProgress", "LabelReport", "LabelSettings", "label", "usual_batch"]

_LATER = {"split": "lines", "chat": False, "system": None, "classes": None}
_FORMAT = 1  # version of the records' format; part of the settings hash


@dataclass(frozen=True, slots=True)
class LabelProgress:
    """Progress of a labelling run.

    Attributes:
        share: share of the input that is done, from 0 to 1.
        prompts, positions: number labelled so far, earlier runs included.
        tokens: number of tokens that this run labelled, prompts included.
        seconds: duration of this run so far.
    """

    share: float
    prompts: int
    positions: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LabelReport:
    """Result of a labelling run.

    Attributes:
        info: description of the finished data set.
        tokens: number of tokens that this run labelled, prompts included.
        seconds: duration of this run, from the first read to the last write.
        resumed: number of shards that an earlier run had written.
        notes: warnings about the texts for the user, one line each.
    """

    info: LabelInfo
    tokens: int
    seconds: float
    resumed: int
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of this run; 0 if nothing was left to do."""
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
    """Label texts. An incomplete data set in ``out`` is completed, a complete one is left unchanged.

    Args:
        pair: target and draft.
        data: text files, JSON lines, Parquet files or names of data sets, see ``training.sources``.
        out: directory of the data set.
        settings: what the records depend on, besides pair and data.
        engine: "local", or "ray" for a cluster (extra ``[ray]``).
        workers: number of Ray actors, each of which loads the pair; None: 2.
        ray_address: address of a running cluster; None starts one on this machine.
        restart: delete the labels in ``out`` first.
        progress: called after each shard.

    Raises:
        UserError: what is wrong with the data, the pair, the settings or the directory, and how to fix it.
    """
    began = time.perf_counter()
    sources = [str(source) for source in data]
    _check(pair, sources, settings)
    found = survey(sources, reader_of(settings), settings.limit)
    info = _describe(pair.models, found, settings)
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
        raise _nothing(todo.splitter, settings, pair.models, any(map(is_plain, sources)))
    info = _finished(info, shelf, todo.splitter)
    shelf.write_info(info)
    seconds, notes = time.perf_counter() - began, _notes(info, any(map(is_plain, sources)))
    return LabelReport(info, shelf.total("tokens") - tokens_before, seconds, resumed, notes)


def usual_batch(models: LoadedPair, out: Path, restart: bool) -> int:
    """Texts per step where none are asked for: those of the labels that are continued, else by device.

    Raises:
        UserError: the labels in ``out`` are damaged.
    """
    if not restart and (out / INFO).is_file():
        return int(read_info(out).settings["batch_size"])
    model = models.target.model
    on_cpu = not model.on_gpu if isinstance(model, GgufModel) else model.device.type == "cpu"
    return CPU_BATCH if on_cpu else GPU_BATCH


class _Missing:
    """Iterator over the steps that have no shard yet, in order.

    Attributes:
        splitter: makes the prompts and counts the texts that are skipped.
        steps: number of steps seen so far, those with a shard included.
    """

    def __init__(
        self, pair: Pair, sources: Sequence[str], settings: LabelSettings, shelf: ShardStore, texts: int
    ) -> None:
        self.splitter, self.steps = _splitter(pair, settings), 0
        self._texts = islice(reader_of(settings)(sources), settings.limit)
        self._settings, self._shelf, self._total, self._all_seen = settings, shelf, texts, False

    def __iter__(self) -> Iterator[LabelStep]:
        for step in steps(self.splitter(self._texts), self._settings):
            self.steps = step.number + 1
            if step.number not in self._shelf:
                yield step
        self._all_seen = True

    def share(self) -> float:
        """Share of the input that is done, from 0 to 1."""
        return len(self._shelf) / self.steps if self._all_seen else self.splitter.texts / self._total


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


def _alike(models: LoadedPair) -> bool:
    """Whether both models run in the same way: by llama.cpp, or in one dtype."""
    ways = {
        "llamacpp" if isinstance(one.model, GgufModel) else one.quantised or str(one.model.dtype)
        for one in (models.target, models.draft)
        if one is not None
    }
    return len(ways) == 1


def _describe(models: LoadedPair, data: list[dict[str, object]], settings: LabelSettings) -> LabelInfo:
    target, draft = models.target, models.draft
    assert draft is not None
    dtype = target.weights if _alike(models) else f"{target.weights}, draft {draft.weights}"
    info = LabelInfo(
        target.id, target.revision, weights_fingerprint(target.model),
        draft.id, draft.revision, weights_fingerprint(draft.model), draft.hidden_size,
        models.vocab_size, dtype, tuple(data), asdict(settings), "",
    )  # fmt: skip
    names = ("sha256", "texts", "examples")
    sources = [[source[name] for name in names if name in source] for source in data]
    hashed = [
        _FORMAT,
        info.target_fingerprint,
        info.draft_fingerprint,
        info.vocab_size,
        info.dtype,
        sources,
        # the defaults of later settings are not hashed: data sets older than these keep their hash
        {key: value for key, value in info.settings.items() if (key, value) not in _LATER.items()},
    ]
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
    return replace(info, settings_hash=digest)


def _engine(
    name: str,
    pair: Pair,
    settings: LabelSettings,
    info: LabelInfo,
    workers: int | None,
    ray_address: str | None,
) -> LabelEngine:
    count = ray_workers(name, workers, ray_address)
    if count is None:
        labeller = Labeller(pair.models, settings, info.settings_hash)
        return lambda steps: ((step.number, labeller(step)) for step in steps)
    if not _alike(pair.models):
        raise UserError(
            "the workers of engine=ray load both models in one way: give both one dtype, and the draft no runner of "
            "its own, or engine=local"
        )
    if any(one is not None and one.id.endswith(".gguf") for one in (pair.models.target, pair.models.draft)):
        raise UserError("the workers of engine=ray load no GGUF files: give engine=local")
    device = pair.models.target.model.device.type
    fingerprints = {"target": info.target_fingerprint, "draft": info.draft_fingerprint}
    source = ModelSource.of(pair, fingerprints, device=device, dtype=info.dtype)
    # A step's shard does not depend on the actor: batches and threads are those of the local engine.
    make = partial(label_elsewhere, source, settings, info.settings_hash)
    return RayPool(make, count, ray_address, device == "cuda")


def _splitter(pair: Pair, settings: LabelSettings) -> PromptSplitter:
    assert pair.tokenizer is not None
    rule = PromptRule(settings.prompt_share, settings.prompt_tokens, settings.new_tokens, pair.models.context)
    original = settings.kinds == (KINDS.index("original"),)
    examples = ExampleEncoder(pair.models, settings.new_tokens, original=original)
    return PromptSplitter(rule, pair.tokenizer, pair.models.vocab_size, examples)


def _notes(info: LabelInfo, plain: bool) -> tuple[str, ...]:
    texts, short = sum(source["texts"] for source in info.data), info.skipped["too_short"]
    notes = []
    if 2 * short > texts:
        notes.append(
            f"{short:,} of {texts:,} texts were too short: a text must go on for {info.settings['new_tokens']} tokens "
            f"after its prompt; {_split_hint(info.settings['split']) if plain else 'give longer ones'}"
        )
    if info.prompts < (enough := 10 * ENOUGH):
        labelled = "1 prompt was" if info.prompts == 1 else f"{info.prompts:,} prompts were"
        notes.append(f"{labelled} labelled: training needs {FEW} at least, and its evaluation {enough}")
    return tuple(notes)


def _split_hint(split: str) -> str:
    """How plain text files were split into texts, and the other ways to split them."""
    was = {"lines": "each line", "blank-lines": "what stands between blank lines", "file": "each file"}[split]
    other = " or ".join(f"split={name}" for name in SPLITS[SPLITS.index(split) + 1 :])
    return f"{was} of a .txt file was one text" + (f", for wrapped text give {other}" if other else "")


def _nothing(splitter: PromptSplitter, settings: LabelSettings, models: LoadedPair, plain: bool) -> UserError:
    long, short, empty = (splitter.skipped[reason] for reason in ("too_long", "too_short", "empty"))
    why = f"{long} too long for the context of {models.context} tokens, {short} too short, {empty} empty"
    fit = max(1, models.context - settings.new_tokens)
    hint = f"give prompt_tokens={fit} or less" if long >= short else "give longer texts, or fewer new_tokens"
    if plain and short > long and settings.split != "file":
        hint = f"{_split_hint(settings.split)}; else {hint}"
    plural = "no text of 1" if splitter.texts == 1 else f"none of {splitter.texts} texts"
    return UserError(
        f"{plural} can be labelled ({why}; a text must go on for {settings.new_tokens} tokens after its prompt): {hint}"
    )


def _finished(info: LabelInfo, shelf: ShardStore, splitter: PromptSplitter) -> LabelInfo:
    return replace(
        info,
        prompts=shelf.total("prompts"),
        positions=shelf.total("positions"),
        skipped=dict(splitter.skipped),
        shards=len(shelf),
        dataset_hash=dataset_hash(shelf.content_hashes()),
    )
