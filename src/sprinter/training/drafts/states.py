"""States of the target along texts: computed once, kept in shards on disk, and read by every epoch.

A file is known by its texts and by the weights and the layer that the states are of, so that an interrupted run goes
on, and heads that read the same layer share it. States are kept in bfloat16 and mapped from the file: memory does not
grow with the number of texts.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.training.drafts.batches import TextBatch
from sprinter.training.drafts.data import TargetText
from sprinter.training.ray_pool import ModelSource
from sprinter.training.shards import save_bytes

__all__ = [
    "KeptStates",
    "StatesMaker",
    "StatesTask",
    "keep_states",
    "states_elsewhere",
    "states_of",
    "states_of_texts",
]

_FORMAT = 1
_SHARD = 64
_BYTES = 2  # of a bfloat16
_ROOM = 256 << 20  # bytes that a disk should have left


@torch.no_grad()
def states_of(target: PreTrainedModel, layers: Sequence[int], ids: Tensor) -> list[Tensor]:
    """The target's states ``[rows, width, d]`` of each layer, given token ids ``[rows, width]``.

    Args:
        layers: decoder layers, from 0, whose outputs are wanted; -1: after the final norm.
    """
    inner: Any = target.base_model
    deep = any(layer >= 0 for layer in layers)
    out = inner(input_ids=ids, use_cache=False, output_hidden_states=deep)
    return [out.last_hidden_state if layer < 0 else out.hidden_states[layer + 1] for layer in layers]


class StatesTask(NamedTuple):
    """States that are wanted: the number of a shard, layers as in ``states_of``, and token ids of its texts."""

    number: int
    layers: Sequence[int]
    texts: Sequence[Tensor]


StatesMaker = Callable[[Sequence[StatesTask]], Generator[tuple[int, dict[int, Tensor]]]]
"""Tasks → number and states by layer of each, in any order, bfloat16 ``[tokens of all texts, d]`` on the CPU."""


def states_of_texts(target: PreTrainedModel, task: StatesTask, precision: str) -> dict[int, Tensor]:
    """The states that a task wants, by layer. ``precision``: dtype of matrix products."""
    with torch.autocast(target.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        found = [states_of(target, task.layers, ids[None].to(target.device)) for ids in task.texts]
    return {
        layer: torch.cat([each[number][0] for each in found]).bfloat16().cpu()
        for number, layer in enumerate(task.layers)
    }


def states_elsewhere(
    source: ModelSource, precision: str
) -> Callable[[StatesTask], tuple[int, dict[int, Tensor]]]:
    """What does a task on a worker, as ``StatesMaker``."""
    model = source.load().target.module("states")
    return lambda task: (task.number, states_of_texts(model, task, precision))


class KeptStates:
    """States of texts on disk, one file for each layer of a shard of texts."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[Sequence[Path], int]] = {}
        self._open: dict[Path, Any] = {}

    def add(self, paths: Sequence[Path], texts: Sequence[TargetText]) -> None:
        """Take the files, by layer, that hold the states of some texts, one after the other."""
        start = 0
        for text in texts:
            self._places[text.ids.numpy().tobytes()] = paths, start
            start += len(text.ids)

    def of(self, batch: TextBatch) -> list[Tensor]:
        """States ``[rows, width, d]`` in float32 of each layer, on the CPU; 0 behind the end of a text.

        Raises:
            UserError: a file is gone.
        """
        rows = []
        for ids, length in zip(batch.ids.cpu(), batch.lengths, strict=True):
            paths, start = self._places[ids[:length].numpy().tobytes()]
            rows.append([self._file(path)[start : start + length].float() for path in paths])
        return [nn.utils.rnn.pad_sequence([*layer], batch_first=True) for layer in zip(*rows, strict=True)]

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                file: Any = safe_open(path, framework="pt")
                self._open[path] = file.get_slice("states")
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"cannot read '{path}' ({error}): run the same command again, which makes it anew"
                ) from None
        return self._open[path]


def keep_states(
    target: PreTrainedModel,
    layers: Sequence[int],
    texts: Sequence[TargetText],
    out: Path,
    precision: Literal["float32", "bfloat16"] = "float32",
    progress: Callable[[int, int], None] | None = None,
    make: StatesMaker | None = None,
) -> KeptStates:
    """Compute the states of texts; files that an earlier run wrote are taken as they are.

    Args:
        target: in a floating-point dtype. layers: as in ``states_of``.
        texts: of the target.
        out: directory of the files.
        precision: dtype of matrix products, as in training.
        progress: called after each shard with the texts done and all.
        make: computes them elsewhere (``states_elsewhere``); None: here.

    Raises:
        UserError: a disk that is full, or too small for what is missing.
    """
    kept, about = KeptStates(), [_FORMAT, weights_fingerprint(target), str(target.dtype), precision]
    shards: list[tuple[Sequence[TargetText], dict[int, Path]]] = []
    for at in range(0, len(texts), _SHARD):
        part = texts[at : at + _SHARD]
        shards.append(
            (part, {layer: out / f"states-{_key([*about, layer], part)}.safetensors" for layer in layers})
        )
    missing = [[layer for layer, path in paths.items() if not _whole(path, part)] for part, paths in shards]
    hidden = int(target.config.get_text_config(decoder=True).hidden_size)
    lacking = zip(missing, shards, strict=True)
    _check_room(
        hidden * sum(len(some) * sum(len(text.ids) for text in part) for some, (part, _) in lacking), out
    )
    done, tasks = 0, []
    for number, ((part, paths), some) in enumerate(zip(shards, missing, strict=True)):
        kept.add([paths[layer] for layer in layers], part)
        if some:
            tasks.append(StatesTask(number, some, [text.ids for text in part]))
            continue
        done += len(part)
        if progress is not None:
            progress(done, len(texts))
    here = ((task.number, states_of_texts(target, task, precision)) for task in tasks)
    with closing(
        here if make is None else make(tasks)
    ) as made:  # a cluster ends here also where a file cannot be written
        for number, states in made:
            part, paths = shards[number]
            for layer, rows in states.items():
                save_bytes(paths[layer], to_bytes({"states": rows}))
            done += len(part)
            if progress is not None:
                progress(done, len(texts))
    return kept


def _key(about: Sequence[object], texts: Sequence[TargetText]) -> str:
    digest = hashlib.sha256(json.dumps(about).encode())
    for text in texts:
        digest.update(len(text.ids).to_bytes(8, "little") + text.ids.numpy().tobytes())
    return digest.hexdigest()[:24]


def _whole(path: Path, texts: Sequence[TargetText]) -> bool:
    """Whether a file is there, with a state for each token."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return bool(file.get_slice("states").get_shape()[0] == sum(len(text.ids) for text in texts))
    except (OSError, SafetensorError):
        return False


def _check_room(numbers: int, out: Path) -> None:
    """Refuse a disk that cannot hold some numbers."""
    there = next(one for one in (out, *out.absolute().parents) if one.exists())
    need, free = _BYTES * numbers, shutil.disk_usage(there).free
    if need and need + _ROOM > free:
        raise UserError(
            f"the target's states need {need / 1e9:.1f} GB in '{out}', where {free / 1e9:.1f} GB are free: free some "
            "space, or give --no-keep-states, which computes them again in every epoch"
        )
