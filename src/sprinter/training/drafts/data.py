"""Texts that the target writes itself, with its laws: made in shards, so that an interrupted run resumes.

A shard is known by its prompts and by what its texts depend on, so that a run with more data, or another limit, reuses
those that it shares with an earlier one. Exact speculative decoding asks the draft at
prefixes of the target's own text, so these are the positions at which its law counts. The laws come from the passes
that write the text: they cost no pass of their own.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.memory import cache_bytes, free_bytes
from sprinter.training.drafts.losses import TopLaws
from sprinter.training.drafts.settings import TextSettings
from sprinter.training.drafts.waves import WaveWriter
from sprinter.training.examples import ExampleEncoder, reader_of
from sprinter.training.prompts import PromptRule, PromptSplitter
from sprinter.training.shards import save_bytes
from sprinter.training.sources import is_record, read_records, survey

__all__ = ["INFO", "TargetText", "Texts", "TextsProgress", "read_shard", "shard_bytes", "write_texts"]

INFO = "texts.json"
FEW = 8
"""Minimum number of texts to train on."""
_FORMAT = 1
_TASKS = ("task", "kind", "category")
_SAME = ("format", "target_fingerprint", "weights", "vocab_size")
_WRITING = ("seed", "temperature", "new_tokens", "top")
_WAVE = 1024
"""Texts of a wave at the most, if memory allows."""
_CACHE_SHARE = 1 / 6
"""Part of a GPU's free memory for the caches of a wave: long prompts take several times as much while they are read."""


@dataclass(frozen=True, slots=True)
class TargetText:
    """One text of the target.

    Attributes:
        ids: ``[n]`` int64, prompt and answer.
        prompt: number of prompt tokens, at least one.
        top_ids: ``[n − prompt, k]`` int64, the most probable tokens for each token of the answer.
        top_probs: ``[n − prompt, k]`` float32, their probabilities under the raw law.
        task: the record's field "task", "kind" or "category", else the file's name.
        held_out: not to be trained on.
    """

    ids: Tensor
    prompt: int
    top_ids: Tensor
    top_probs: Tensor
    task: str
    held_out: bool = False

    @property
    def laws(self) -> TopLaws:
        """The target's laws for the tokens of the answer."""
        return TopLaws(self.top_ids, self.top_probs, self.ids[self.prompt :])


@dataclass(frozen=True, slots=True)
class Texts:
    """All texts of a run, and what they were made from.

    Attributes:
        texts: in the order of the prompts.
        info: {"target", "target_fingerprint", "weights", "data", "settings", "hash"}: ``hash`` covers all others and
            the texts themselves.
    """

    texts: tuple[TargetText, ...]
    info: dict[str, Any]

    def part(self, held_out: bool) -> tuple[TargetText, ...]:
        """The texts for evaluation, or those for training."""
        return tuple(text for text in self.texts if text.held_out == held_out)


@dataclass(frozen=True, slots=True)
class TextsProgress:
    """Progress of writing: prompts done of ``wanted``, tokens that this run wrote, seconds of this run."""

    done: int
    wanted: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _DraftPrompt:
    ids: tuple[int, ...]
    task: str

    def held_out(self, share: float) -> bool:
        digest = hashlib.sha256(str(list(self.ids)).encode()).digest()
        return int.from_bytes(digest[:4], "big") < share * 2**32


def write_texts(
    pair: Pair,
    data: Sequence[str | Path],
    out: Path,
    settings: TextSettings = TextSettings(),
    progress: Callable[[TextsProgress], None] | None = None,
) -> Texts:
    """Let the target answer the prompts; shards that an earlier run wrote are read instead.

    Args:
        pair: the target; a draft of the pair is not used.
        data: text files, JSON lines, Parquet files or names of data sets, see ``training.sources``.
        out: directory of the shards.
        settings: what the texts depend on.
        progress: called after each shard.

    Raises:
        UserError: too few texts, texts of another target or other settings in ``out``, a full disk, ...
    """
    sources = [str(source) for source in data]
    prompts = _prompts(pair, sources, settings)
    info = _info(pair, sources, settings)
    _check(out, info)
    began, tokens, texts = time.perf_counter(), 0, list[TargetText]()
    shards = [prompts[at : at + settings.shard] for at in range(0, len(prompts), settings.shard)]
    paths = [out / f"texts-{number:05d}.safetensors" for number in range(len(shards))]
    write, fresh = _Writer(pair, settings), dict[int, list[TargetText]]()
    for number, (part, path) in enumerate(zip(shards, paths, strict=True)):
        first = number * settings.shard
        found = fresh.pop(number, None)
        if found is None and path.is_file():
            found = read_shard(path, _key(info, first, part))
        if found is None:
            near = range(number + 1, min(number + write.shards, len(shards)))
            missing = [number, *(other for other in near if not paths[other].is_file())]
            numbers = [i * settings.shard + j for i in missing for j in range(len(shards[i]))]
            made = iter(write([prompts[i] for i in numbers], [settings.seed + i for i in numbers]))
            for i in missing:
                fresh[i] = [*islice(made, len(shards[i]))]
                tokens += sum(len(text.ids) - text.prompt for text in fresh[i])
                save_bytes(paths[i], shard_bytes(fresh[i], _key(info, i * settings.shard, shards[i])))
            found = fresh.pop(number)
        texts += (
            replace(text, held_out=prompt.held_out(settings.held_out))
            for text, prompt in zip(found, part, strict=True)
        )
        if progress is not None:
            done = min(first + settings.shard, len(prompts))
            progress(TextsProgress(done, len(prompts), tokens, time.perf_counter() - began))
    kept = tuple(text for text in texts if len(text.ids) > text.prompt)
    if settings.held_out > 0 and len(kept) > 1 and not any(text.held_out for text in kept):
        kept = (*kept[:-1], replace(kept[-1], held_out=True))  # by chance there was none
    if not any(not text.held_out for text in kept):
        raise UserError("no text is left to train on: give more prompts, or a smaller held_out")
    return Texts(kept, {**info, "texts": len(kept), "hash": _hash(info, kept)})


def read_shard(path: Path, key: str) -> list[TargetText] | None:
    """The texts of a shard; None if it is damaged or has another key, so that it is made again."""
    try:
        parts = load(path.read_bytes())
        own = json.loads(bytes(parts["about"].tolist()))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if own.get("key") != key:
        return None
    texts, tokens, laws = [], 0, 0
    for length, prompt, task in own["texts"]:
        answer = length - prompt
        ids, own = parts["ids"][tokens : tokens + length].long(), slice(laws, laws + answer)
        texts.append(
            TargetText(ids, prompt, parts["top_ids"][own].long(), parts["top_probs"][own].float(), task)
        )
        tokens, laws = tokens + length, laws + answer
    return texts


def shard_bytes(texts: Sequence[TargetText], key: str) -> bytes:
    """Bytes of a shard; laws in float16.

    Args:
        texts: its texts.
        key: hash of what they depend on, which ``read_shard`` compares.
    """
    about = {"key": key, "texts": [(len(text.ids), text.prompt, text.task) for text in texts]}
    return to_bytes(
        {
            "about": torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8),
            "ids": torch.cat([text.ids for text in texts]).int(),
            "top_ids": torch.cat([text.top_ids for text in texts]).int(),
            "top_probs": torch.cat([text.top_probs for text in texts]).half(),
        }
    )


class _Writer:
    """Answers prompts: by ``generate_batch``, or on a GPU in waves, several shards at a time.

    Attributes:
        shards: number of shards whose texts are best written together.
    """

    def __init__(self, pair: Pair, settings: TextSettings) -> None:
        model = pair.models.target.model
        self._pair, self._settings = pair, settings
        self._on_gpu = isinstance(model, nn.Module) and model.device.type == "cuda"
        self._waves: WaveWriter | None = None
        self.shards = max(1, _WAVE // settings.shard) if self._on_gpu else 1

    def __call__(self, prompts: Sequence[_DraftPrompt], seeds: Sequence[int]) -> list[TargetText]:
        """Their texts, of these seeds."""
        if not self._on_gpu:
            return _answered(self._pair, prompts, seeds, self._settings)
        if self._waves is None:
            self._waves = self._made()
        answers = self._waves.write([prompt.ids for prompt in prompts], seeds)
        return [
            TargetText(
                torch.cat([torch.tensor(prompt.ids), ids]), len(prompt.ids), top_ids, top_probs, prompt.task
            )
            for prompt, (ids, top_ids, top_probs) in zip(prompts, answers, strict=True)
        ]

    def _made(self) -> WaveWriter:
        own, models = self._settings, self._pair.models
        rows, room = self.shards * own.shard, free_bytes(models.target.module("writing texts").device)
        if room is not None:
            longest = own.prompt_tokens + own.new_tokens
            rows = max(1, min(rows, int(room * _CACHE_SHARE) // cache_bytes(models.target.model, longest)))
        return WaveWriter(
            models.target, models.vocab_size, rows=rows, prompt_tokens=own.prompt_tokens,
            new_tokens=own.new_tokens, temperature=own.temperature, top=own.top,
        )  # fmt: skip


def _answered(
    pair: Pair, prompts: Sequence[_DraftPrompt], seeds: Sequence[int], settings: TextSettings
) -> list[TargetText]:
    top = min(settings.top, pair.models.vocab_size)
    done = pair.generate_batch(
        [list(prompt.ids) for prompt in prompts], method="autoregressive", max_new_tokens=settings.new_tokens,
        temperature=settings.temperature, seed=[*seeds], logprobs=top, rows=min(settings.rows, len(prompts)),
    )  # fmt: skip
    texts = []
    for prompt, answer in zip(prompts, done, strict=True):
        tops = [token.top_logprobs or [] for token in answer.tokens]
        ids = torch.tensor([*prompt.ids, *(token.id for token in answer.tokens)])
        top_ids = torch.tensor([[one.id for one in each] for each in tops]).reshape(-1, top)
        logs = torch.tensor([[one.logprob for one in each] for each in tops]).reshape(-1, top)
        # laws are as they are stored, so that a run that resumes trains on the same numbers
        texts.append(TargetText(ids, len(prompt.ids), top_ids, logs.exp().half().float(), prompt.task))
    return texts


def _prompts(pair: Pair, sources: Sequence[str], settings: TextSettings) -> list[_DraftPrompt]:
    """All usable prompts, in the order of the data."""
    if not sources:
        raise UserError("there is no data: give at least one file")
    models = pair.models
    if models.tokenizer is None:
        raise UserError("distilling reads texts, and this target has no tokenizer: give tokenizer=...")
    if settings.prompt_tokens + settings.new_tokens > models.context:
        raise UserError(
            f"prompt_tokens={settings.prompt_tokens} and new_tokens={settings.new_tokens} exceed the target's context "
            f"of {models.context} tokens: give smaller ones"
        )
    found: list[_DraftPrompt] = []
    room = settings.prompt_tokens + settings.new_tokens
    splitter = PromptSplitter(
        PromptRule(settings.prompt_share, settings.prompt_tokens, 0, room), models.tokenizer, models.vocab_size,
        ExampleEncoder(models, settings.new_tokens),
    )  # fmt: skip
    for source in sources:
        tasks = list(_tasks(source, settings.split))
        texts = islice(
            reader_of(settings)([source], whole=True),
            None if settings.limit is None else max(0, settings.limit - len(found)),
        )
        found.extend(
            _DraftPrompt(prompt.ids, tasks[prompt.index])
            for prompt in splitter(texts)
            if len(prompt.ids) <= settings.prompt_tokens
        )
    if len(found) < FEW:
        skipped = ", ".join(f"{n} {why.replace('_', ' ')}" for why, n in splitter.skipped.items() if n)
        raise UserError(
            f"the data are too short: they have {len(found)} usable prompts ({skipped or 'none'} skipped), and a draft "
            f"needs {FEW} at least, better some thousands: give more texts"
        )
    return found


def _tasks(source: str, split: str) -> Iterator[str]:
    name = Path(source).name.partition(".")[0]
    for _, record in read_records(source, None, split):
        own = next((record[key] for key in _TASKS if isinstance(record.get(key), str)), None)
        yield own if own is not None and is_record(source) else name


def _info(pair: Pair, sources: Sequence[str], settings: TextSettings) -> dict[str, Any]:
    target = pair.models.target
    found = survey(sources, reader_of(settings), settings.limit)
    info: dict[str, Any] = {
        "format": _FORMAT,
        "target": Path(target.id).name,
        "target_fingerprint": weights_fingerprint(target.model),
        "weights": target.weights,
        "vocab_size": pair.models.vocab_size,
        "data": [{**source, "name": Path(source["name"]).name} for source in found],
        "settings": asdict(settings),
    }
    return info


def _key(info: dict[str, Any], first: int, prompts: Sequence[_DraftPrompt]) -> str:
    """What the texts of a shard depend on."""
    own = {name: info[name] for name in _SAME} | {name: info["settings"][name] for name in _WRITING}
    prompt_ids = [[*prompt.ids] for prompt in prompts]
    return hashlib.sha256(json.dumps([own, first, prompt_ids], sort_keys=True).encode()).hexdigest()


def _check(out: Path, info: dict[str, Any]) -> None:
    """Refuse a directory with texts of another target or other settings; write the info file."""
    path = out / INFO
    if out.exists() and not out.is_dir():
        raise UserError(f"'{out}' is a file: give a directory")
    if not path.is_file():
        save_bytes(path, json.dumps(info, indent=1))
        return
    try:
        there = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read ({error}): give another directory") from error
    differs = next((name for name in _SAME if there.get(name) != info[name]), None)
    before, now = there.get("settings", {}), info["settings"]
    if differs == "target_fingerprint":
        differs = f"another target ('{there.get('target')}')"
    elif differs is not None:
        differs = f"{differs}={there.get(differs)} (now {info[differs]})"
    else:
        name = next((name for name in _WRITING if before.get(name) != now[name]), None)
        differs = name and f"{name}={before.get(name)} (now {now[name]})"
    if differs:
        raise UserError(
            f"'{out}' holds texts made with {differs}: give another --out, or --restart to start over"
        )
    save_bytes(path, json.dumps(info, indent=1))


def _hash(info: dict[str, Any], texts: Sequence[TargetText]) -> str:
    digest = hashlib.sha256(json.dumps(info, sort_keys=True).encode())
    for text in texts:
        digest.update(text.ids.numpy().tobytes() + text.top_probs.numpy().tobytes())
    return digest.hexdigest()
