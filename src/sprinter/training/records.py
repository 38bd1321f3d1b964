"""Records: the columns that labelling stores per position, and how a finished data set is read.

A record describes one position of one text. The prefix is the text before it, ``token`` is the text's token at the
position, and ``x`` is a token drawn from the draft there. Laws are raw (temperature 1). The paper's labels follow:

    >>> import math
    >>> log_q, log_p = math.log(0.3), math.log(0.25)
    >>> math.exp(log_q - log_p) <= 1.2  # ratio(λ = 1.2): q(x)/p(x) <= λ
    True
    >>> round(min(1.0, math.exp(log_p - log_q)), 3)  # accept: min(1, p/q)(x)
    0.833

``FIELDS`` is the one table of names, types and shapes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor

from sprinter.errors import UserError
from sprinter.training.label_settings import KINDS

__all__ = [
    "ENOUGH", "FEW", "FIELDS", "INFO", "KINDS", "LAMBDAS", "TEMPERATURES", "TOP", "LabelInfo", "Records",
    "dataset_hash", "read_info", "read_records", "read_shards", "shard_metadata", "shard_name", "shard_paths",
]  # fmt: skip

TEMPERATURES = (1.0, 0.7, 0.0)
"""Temperatures of the columns of ``overlap``; at 0 it is 1 if both laws have the same argmax, else 0."""
LAMBDAS = (1.0, 1.2, 1.5)
"""λ of the columns of ``expected_ratio``."""
TOP = 64
"""Number of most likely tokens of each model that a record keeps; ``top_ids`` holds their union."""
FEW = 30
"""Minimum number of prompts to train on: a tenth is held out for early stopping, another tenth for testing."""
ENOUGH = 20
"""Prompts of an evaluation below which its numbers come with a warning; a tenth of the labelled prompts is held out."""
INFO = "labels.json"
"""Name of the file in a data set's directory that holds the ``LabelInfo``."""

_METADATA = "sprinter"  # key of a shard's metadata

Shape = tuple[int | str, ...]

FIELDS: Mapping[str, tuple[torch.dtype, Shape]] = {
    "prompt": (torch.int64, ()),  # index of the text in the input
    "kind": (torch.uint8, ()),  # prefix class, index into KINDS
    "position": (torch.int32, ()),  # index of x in the text, prompt first
    "step": (torch.int32, ()),  # the same, counted from the end of the prompt
    "x": (torch.int32, ()),  # x ~ q
    "token": (torch.int32, ()),  # the text's own token
    "hidden": (torch.float32, ("d",)),  # draft's hidden state that produced q
    "hidden_x": (torch.float32, ("d",)),  # draft's hidden state after it was fed `token`
    "entropy": (torch.float32, ()),  # of q, nats
    "max_q": (torch.float32, ()),
    "log_q": (torch.float32, ()),  # ln q(x)
    "log_p": (torch.float32, ()),  # ln p(x)
    "log_q_token": (torch.float32, ()),  # ln q(token)
    "log_p_token": (torch.float32, ()),  # ln p(token)
    "top_ids": (torch.int32, (2 * TOP,)),  # union of both models' top 64; -1 where there is none
    "top_q": (torch.float32, (2 * TOP,)),  # q of top_ids, 0 where there is none
    "top_p": (torch.float32, (2 * TOP,)),  # p of top_ids, 0 where there is none
    "rest_q": (torch.float32, ()),  # q outside top_ids
    "rest_p": (torch.float32, ()),  # p outside top_ids
    "overlap": (torch.float32, (len(TEMPERATURES),)),  # β = Σ min(p, q) at TEMPERATURES
    "expected_ratio": (torch.float32, (len(LAMBDAS),)),  # P(q(x)/p(x) <= λ) over x ~ q, at LAMBDAS
    "greedy_ratio": (torch.float32, ()),  # q(x)/p(x) for x = argmax q
    "js": (torch.float32, ()),  # divergences as in decode.accept.fuzzy, full vocabulary
    "kl": (torch.float32, ()),  # KL(p‖q)
    "kl_reversed": (torch.float32, ()),  # KL(q‖p)
    "tv": (torch.float32, ()),
    "js_reference": (torch.float32, ()),
}
"""Name → (dtype, shape after the first axis n); "d" is the draft's hidden size."""


class Records:
    """n records as columns; ``FIELDS`` describes each column, which is an attribute of its name.

    Raises:
        TypeError: a column is missing or unknown.
        ValueError: a column has a wrong type, shape or length.
    """

    def __init__(self, **columns: Tensor) -> None:
        if columns.keys() != FIELDS.keys():
            raise TypeError(f"columns that do not fit: {', '.join(sorted(columns.keys() ^ FIELDS.keys()))}")
        self._columns = {name: columns[name] for name in FIELDS}
        n, d = len(self), columns["hidden"].shape[-1]
        for name, (dtype, tail) in FIELDS.items():
            column, wanted = columns[name], (n, *(d if size == "d" else size for size in tail))
            if column.dtype != dtype or tuple(column.shape) != wanted:
                raise ValueError(
                    f"column {name} is {column.dtype} {list(column.shape)}, wanted {dtype} {list(wanted)}"
                )

    def __getattr__(self, name: str) -> Tensor:
        if name not in FIELDS:
            raise AttributeError(name)
        return self._columns[name]

    def __len__(self) -> int:
        return len(self._columns["prompt"])

    def columns(self) -> dict[str, Tensor]:
        """Name → column, in the order of ``FIELDS``."""
        return {**self._columns}

    def select(self, rows: Tensor) -> Self:
        """The records at ``rows`` (indices or a mask)."""
        return type(self)(**{name: column[rows] for name, column in self._columns.items()})

    @classmethod
    def concat(cls, parts: Sequence[Records]) -> Self:
        """Concatenate the records of ``parts``, in order."""
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in FIELDS})

    def content_hash(self) -> str:
        """SHA-256 over the bytes of all columns, in the order of ``FIELDS``."""
        digest = hashlib.sha256()
        for column in self._columns.values():
            digest.update(column.contiguous().numpy().data)
        return digest.hexdigest()

    def save(self, metadata: Mapping[str, str]) -> bytes:
        """Bytes of a safetensors file; the same records and metadata give the same bytes."""
        columns = {name: column.contiguous() for name, column in self._columns.items()}
        # One entry: safetensors does not fix the order of several in the header.
        return to_bytes(columns, {_METADATA: json.dumps(dict(metadata), sort_keys=True)})

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read a safetensors file.

        Raises:
            UserError: the file is damaged or is not a shard.
        """
        try:
            return cls(**load(file.read_bytes()))
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise UserError(f"cannot read records from '{file}' ({error}): label the data again") from None


@dataclass(frozen=True, slots=True)
class LabelInfo:
    """Description of a data set, stored as ``labels.json`` in its directory.

    Attributes:
        target_id, target_revision, target_fingerprint: the target, see ``sprinter.fingerprint``.
        draft_id, draft_revision, draft_fingerprint: the draft.
        hidden_size: the draft's hidden size d.
        vocab_size: size of the common vocabulary that the laws cover.
        dtype: dtype of the models.
        data: name, sha256 and number of texts of each source, in order.
        settings: the fields of ``LabelSettings`` (seed, temperature, new_tokens, ...).
        classes: prefix classes, ``KINDS``.
        settings_hash: hash of all of the above except ids and revisions; every shard carries it.
        prompts, positions: number labelled so far.
        skipped: number of texts without a prompt, by reason ("too_long", "too_short", "empty").
        shards: number of shard files.
        dataset_hash: hash of the content of all shards in order; None until labelling is finished.
    """

    target_id: str
    target_revision: str | None
    target_fingerprint: str
    draft_id: str
    draft_revision: str | None
    draft_fingerprint: str
    hidden_size: int
    vocab_size: int
    dtype: str
    data: tuple[dict[str, Any], ...]
    settings: dict[str, Any]
    settings_hash: str
    classes: tuple[str, ...] = KINDS
    prompts: int = 0
    positions: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    shards: int = 0
    dataset_hash: str | None = None

    @property
    def temperature(self) -> float:
        """Sampling temperature of the completions (laws and labels are raw)."""
        return float(self.settings["temperature"])

    def to_json(self) -> str:
        """Text of ``labels.json``."""
        return json.dumps(asdict(self), indent=2) + "\n"


def shard_name(step: int) -> str:
    """File name of the shard of a step."""
    return f"shard-{step:06d}.safetensors"


def shard_paths(directory: Path) -> dict[int, Path]:
    """Map the number of each step to its shard file, in order of steps."""
    found = {
        int(path.stem.removeprefix("shard-")): path for path in directory.glob("shard-[0-9]*.safetensors")
    }
    return dict(sorted(found.items()))


def shard_metadata(path: Path) -> dict[str, str]:
    """Metadata of a shard file: settings hash, step, prompts, positions, content hash.

    Raises:
        UserError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as shard:
            return dict(json.loads((shard.metadata() or {}).get(_METADATA, "{}")))
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"the shard '{path}' is damaged ({error}): delete it and label again") from None


def dataset_hash(content_hashes: Iterable[str]) -> str:
    """One hash of the content hashes of all shards, in order of steps."""
    return hashlib.sha256("".join(content_hashes).encode()).hexdigest()


def read_info(directory: str | Path) -> LabelInfo:
    """Read the description of the data set in ``directory``, finished or not.

    Raises:
        UserError: there is no data set, or its ``labels.json`` is damaged.
    """
    file = Path(directory) / INFO
    if not file.is_file():
        raise UserError(
            f"'{directory}' holds no labels: it has no {INFO}; make it with 'sprinter gate label'"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        known = {key: raw[key] for key in LabelInfo.__dataclass_fields__}
        return LabelInfo(**known | {"data": tuple(known["data"]), "classes": tuple(known["classes"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"'{file}' is damaged ({type(error).__name__}: {error}): label the data again"
        ) from None


def read_shards(directory: str | Path) -> Iterator[Records]:
    """Yield the records of a finished data set, one shard at a time, each verified by its hash.

    Raises:
        UserError: the data set is not finished, or a shard is missing, damaged, or from other settings.
    """
    info, paths = read_info(directory), shard_paths(Path(directory))
    if info.dataset_hash is None:
        raise UserError(
            f"the labels in '{directory}' are not finished ({len(paths)} shards so far): "
            "run the same 'sprinter gate label' again, it resumes where it stopped"
        )
    if list(paths) != list(range(info.shards)):
        lost = sorted(set(range(info.shards)) ^ set(paths))[0]
        raise UserError(
            f"the labels in '{directory}' should be {info.shards} shards, and {shard_name(lost)} does not fit: "
            "run the same 'sprinter gate label' again to fix that"
        )
    hashes = []
    for path in paths.values():
        metadata, records = shard_metadata(path), Records.load(path)
        hashes.append(records.content_hash())
        if metadata.get("settings") != info.settings_hash or metadata.get("content") != hashes[-1]:
            raise UserError(f"the shard '{path}' is not what labelling wrote: delete it and label again")
        yield records
    if dataset_hash(hashes) != info.dataset_hash:
        raise UserError(f"the shards in '{directory}' are not those of its {INFO}: label the data again")


def read_records(directory: str | Path) -> Records:
    """Read all records of a finished data set, verified by their hashes.

    Raises:
        UserError: the data set is not finished, or a shard is missing, damaged, or from other settings.
    """
    return Records.concat(list(read_shards(directory)))
