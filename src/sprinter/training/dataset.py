"""Positions to train and evaluate heads on: records of one or several data sets as features, columns and prompts.

The split is by text, not by position: all positions of a prompt are in the same part (train, validation or test). The
part depends only on a hash of the seed and of the prompt's place in its data file, so it is the same for every head
and in every data set made from that file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sprinter.errors import UserError
from sprinter.heads.features import LARGEST_K, stack_features, top_k_of
from sprinter.heads.head import Head
from sprinter.training.records import FIELDS, KINDS, TEMPERATURES, LabelInfo, Records, read_info, read_shards

__all__ = ["PARTS", "Positions", "check_head", "part_of", "read_positions", "record_features"]

PARTS = ("train", "validation", "test")
_SHARES = (0.8, 0.1, 0.1)
_SMALL = (*(name for name, (_, tail) in FIELDS.items() if not tail), "overlap", "expected_ratio")
"""Columns that are kept unchanged; hidden states and laws are used for the features only."""


@dataclass(frozen=True, slots=True)
class Positions:
    """n positions.

    Attributes:
        inputs: ``[n, m]`` float32, the concatenated features.
        columns: the records' small columns, ``[n]`` or ``[n, 3]``.
        group: ``[n]`` int64, the prompt of each position, as an index into ``prompts``.
        prompts: name of each prompt: digest of its data file, and its number in that file.
        infos: description of each data set.
    """

    inputs: Tensor
    columns: dict[str, Tensor]
    group: Tensor
    prompts: tuple[str, ...]
    infos: tuple[LabelInfo, ...]

    def __len__(self) -> int:
        return len(self.inputs)

    def select(self, rows: Tensor) -> Positions:
        """The positions at ``rows`` (indices or a mask)."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Positions(self.inputs[rows], columns, self.group[rows], self.prompts, self.infos)

    def of_kinds(self, kinds: Iterable[str]) -> Tensor:
        """Mask of the positions in texts of these prefix classes, ``[n]`` bool."""
        wanted = torch.tensor([KINDS.index(kind) for kind in kinds], dtype=self.columns["kind"].dtype)
        return torch.isin(self.columns["kind"], wanted)

    def at_temperature(self, temperature: float) -> Tensor:
        """Mask of the positions at this temperature, ``[n]`` bool; all True without a temperature column."""
        recorded = self.columns.get("temperature")
        return torch.ones(len(self), dtype=torch.bool) if recorded is None else recorded == temperature

    def parts(self, seed: int) -> Tensor:
        """Part of each position, ``[n]``, as an index into ``PARTS``."""
        by_prompt = torch.tensor([part_of(prompt, seed) for prompt in self.prompts], dtype=torch.int64)
        return by_prompt[self.group] if len(self) else self.group

    @property
    def data_hash(self) -> str:
        """One hash of all data sets, in order."""
        return hashlib.sha256("".join(str(info.dataset_hash) for info in self.infos).encode()).hexdigest()


def part_of(prompt: str, seed: int) -> int:
    """Index into ``PARTS``: 80 % train, 10 % validation, 10 % test."""
    digest = hashlib.sha256(f"{seed}:{prompt}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    return 0 if place < _SHARES[0] else 1 if place < _SHARES[0] + _SHARES[1] else 2


def record_features(records: Records, names: Sequence[str], temperature: float = 1.0) -> Tensor:
    """Concatenated features of a head, ``[n, m]`` float32.

    ``log_q`` and ``hidden_x`` refer to the text's token. ``position`` in the draft run is counted from the end of the
    prompt, which is correct for draft-written texts only.

    Args:
        records: where the features are taken from.
        names: features, in order.
        temperature: value of the feature "temperature".
    """
    values = {
        "hidden": records.hidden,
        "hidden_x": records.hidden_x,
        "entropy": records.entropy,
        "max_q": records.max_q,
        "log_q": records.log_q_token,
        "position": records.step + 1,
        "temperature": torch.full_like(records.entropy, temperature),
    }
    for name in names:
        if k := top_k_of(name):
            values[name] = records.top_q.topk(min(k, LARGEST_K), -1).values
    return stack_features(names, values)


def read_positions(directories: Sequence[str | Path], features: Sequence[str]) -> Positions:
    """All positions of finished data sets of one pair, a shard at a time.

    With the feature ``temperature`` every record is repeated for each recorded temperature, which the column
    "temperature" holds.

    Raises:
        UserError: no directory, one without finished labels, data sets of different pairs, no position at all.
    """
    if not directories:
        raise UserError("no labels were given: give at least one directory made by 'sprinter gate label'")
    infos = tuple(read_info(directory) for directory in directories)
    _check_same_pair(directories, infos)
    inputs: list[Tensor] = []
    extra = ("temperature",) if "temperature" in features else ()
    columns: dict[str, list[Tensor]] = {name: [] for name in (*_SMALL, *extra)}
    numbers: dict[str, int] = {}
    groups: list[Tensor] = []
    for directory, info in zip(directories, infos, strict=True):
        for records in read_shards(directory):
            group = _groups(records.prompt, info, numbers)
            for temperature in TEMPERATURES if "temperature" in features else (None,):
                inputs.append(record_features(records, features, 1.0 if temperature is None else temperature))
                groups.append(group)
                for name in _SMALL:
                    columns[name].append(getattr(records, name))
                if temperature is not None:
                    columns["temperature"].append(torch.full_like(records.entropy, temperature))
    if not sum(len(part) for part in inputs):
        raise UserError(
            f"the labels in {_listed(directories)} hold no position: label more text with 'sprinter gate label'"
        )
    joined = {name: torch.cat(parts) for name, parts in columns.items()}
    return Positions(torch.cat(inputs), joined, torch.cat(groups), tuple(numbers), infos)


def check_head(head: Head, infos: Iterable[LabelInfo]) -> None:
    """Raise a UserError if the labels were made with another draft than the head's."""
    made_for = head.config
    for info in infos:
        fits = info.hidden_size == made_for.hidden_size and (
            info.draft_fingerprint == made_for.draft_fingerprint
            if made_for.draft_fingerprint is not None
            else info.draft_id == made_for.draft_id
        )
        if not fits:
            raise UserError(
                f"the labels are of draft '{info.draft_id}' and the gate was made for '{made_for.draft_id}' "
                "(other weights): label texts with the gate's own draft, or train a gate on these labels"
            )


def _check_same_pair(directories: Sequence[str | Path], infos: Sequence[LabelInfo]) -> None:
    first = infos[0]
    for directory, info in zip(directories, infos, strict=True):
        for which in ("draft", "target"):
            name = f"{which}_fingerprint"
            if getattr(info, name) != getattr(first, name):
                raise UserError(
                    f"the labels in '{directory}' are of {which} '{getattr(info, which + '_id')}', those in "
                    f"'{directories[0]}' of '{getattr(first, which + '_id')}' (other weights): give labels of one pair"
                )


def _groups(prompt: Tensor, info: LabelInfo, numbers: dict[str, int]) -> Tensor:
    """Number of each position's prompt, ``[n]``; new prompts get the next free numbers."""
    found, inverse = torch.unique(prompt, return_inverse=True)
    names = [_prompt_name(int(index), info.data) for index in found]
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)[
        inverse
    ]


def _prompt_name(index: int, sources: Sequence[dict[str, Any]]) -> str:
    """``DIGEST:NUMBER``: the file's digest and the text's number in it."""
    for source in sources:
        if index < source.get("texts", math.inf):
            return f"{source.get('sha256', '')}:{index}"
        index -= int(source["texts"])
    return f":{index}"


def _listed(directories: Sequence[str | Path]) -> str:
    return ", ".join(f"'{directory}'" for directory in directories)
