"""Records of an invented pair, so that tests of training need no models.

Hidden states are normal; q's logits are linear in them, and p's differ by noise that one direction of the hidden state
makes larger. So the overlap is learnable from ``hidden``, and every column follows from the two laws.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sprinter.decode.accept.fuzzy import DIVERGENCES
from sprinter.laws import entropy, overlap
from sprinter.training.records import (
    FIELDS,
    INFO,
    KINDS,
    LAMBDAS,
    TOP,
    LabelInfo,
    Records,
    dataset_hash,
    shard_name,
)

HIDDEN, VOCAB = 12, 24


def make_laws(hidden: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """p and q ``[n, VOCAB]``, float64."""
    maps = torch.Generator().manual_seed(77)
    to_logits = torch.randn(HIDDEN, VOCAB, generator=maps, dtype=torch.float64) * 0.6
    logits = hidden @ to_logits
    noise = torch.randn(len(hidden), VOCAB, generator=chance, dtype=torch.float64)
    spread = (0.9 * hidden[:, :1] - 0.3).exp()
    return torch.softmax(logits + spread * noise, -1), torch.softmax(logits, -1)


def make_records(
    prompts: int = 60, per_prompt: int = 24, seed: int = 0, kinds: tuple[str, ...] = KINDS, noise: float = 1.0
) -> Records:
    """``per_prompt`` positions of each prompt in each prefix class. ``noise`` 0 makes both models the same."""
    chance = torch.Generator().manual_seed(seed)
    n = prompts * len(kinds) * per_prompt
    prompt = torch.arange(prompts).repeat_interleave(len(kinds) * per_prompt)
    kind = torch.tensor([KINDS.index(kind) for kind in kinds]).repeat_interleave(per_prompt).repeat(prompts)
    own = torch.randn(prompts, HIDDEN, generator=chance, dtype=torch.float64)[
        prompt
    ]  # positions of a text are correlated
    hidden = 0.5 * own + 0.87 * torch.randn(n, HIDDEN, generator=chance, dtype=torch.float64)
    p, q = make_laws(hidden, chance)
    if noise == 0:
        p = q
    x = torch.multinomial(q, 1, generator=chance).squeeze(1)
    return records_of(p, q, hidden, x, prompt, kind, torch.arange(per_prompt).repeat(n // per_prompt), chance)


def records_of(
    p: Tensor,
    q: Tensor,
    hidden: Tensor,
    x: Tensor,
    prompt: Tensor,
    kind: Tensor,
    step: Tensor,
    chance: torch.Generator,
) -> Records:
    """All columns from the laws; the text's token is drawn by the model of its class."""
    by_kind = torch.stack([p, q, p, (p + q) / 2])[kind, torch.arange(len(p))]
    token = torch.multinomial(by_kind, 1, generator=chance).squeeze(1)
    refused = 1 - torch.minimum(torch.ones(()), _at(p, token) / _at(q, token))
    # the state after the token says how well the token fits
    hidden_x = torch.cat(
        [hidden[:, 1:], 3 * refused[:, None] - 1 + 0.3 * torch.randn(len(p), 1, generator=chance)], 1
    )
    sharp = [torch.softmax(torch.stack([p, q]).log() / t, -1) for t in (1.0, 0.7)]
    columns: dict[str, Any] = {
        "prompt": prompt, "kind": kind, "position": 100 + step, "step": step, "x": x, "token": token,
        "hidden": hidden, "hidden_x": hidden_x, "entropy": entropy(q), "max_q": q.amax(-1),
        "log_q": _at(q, x).log(), "log_p": _at(p, x).log(),
        "log_q_token": _at(q, token).log(), "log_p_token": _at(p, token).log(),
        "top_ids": _padded(torch.arange(VOCAB).expand(len(p), -1), -1), "top_q": _padded(q), "top_p": _padded(p),
        "rest_q": torch.zeros(len(p)), "rest_p": torch.zeros(len(p)),
        "overlap": torch.stack([*(overlap(*laws) for laws in sharp), p.argmax(-1) == q.argmax(-1)], 1),
        "expected_ratio": torch.stack([(q * (q <= value * p)).sum(-1) for value in LAMBDAS], 1),
        "greedy_ratio": _at(q, q.argmax(-1)) / _at(p, q.argmax(-1)),
        **{name: divergence(p, q) for name, divergence in DIVERGENCES.items()},
    }  # fmt: skip
    return Records(**{name: columns[name].to(FIELDS[name][0]) for name in FIELDS})


def _at(law: Tensor, token: Tensor) -> Tensor:
    return law.gather(1, token[:, None]).squeeze(1)


def _padded(values: Tensor, filler: float = 0) -> Tensor:
    return torch.nn.functional.pad(values, (0, 2 * TOP - VOCAB), value=filler)


def make_info(records: Records, hashes: list[str], **fields: Any) -> LabelInfo:
    """The description that labelling would have written."""
    texts = int(records.prompt.max()) + 1 if len(records) else 0
    known: dict[str, Any] = {
        "target_id": "org/target", "target_revision": None, "target_fingerprint": "t" * 64,
        "draft_id": "org/draft", "draft_revision": None, "draft_fingerprint": "d" * 64,
        "hidden_size": HIDDEN, "vocab_size": VOCAB, "dtype": "float32",
        "data": ({"name": "texts.txt", "sha256": "a" * 64, "texts": texts},),
        "settings": {"seed": 0, "temperature": 1.0}, "settings_hash": "s" * 64, "prompts": texts,
        "positions": len(records), "shards": len(hashes), "dataset_hash": dataset_hash(hashes),
    }  # fmt: skip
    return LabelInfo(**known | fields)


def write_labels(directory: Path, records: Records, shards: int = 2, **fields: Any) -> Path:
    """A finished data set on disk. ``fields`` change its ``LabelInfo``."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = [records.select(rows) for rows in torch.arange(len(records)).tensor_split(shards)]
    hashes = [part.content_hash() for part in parts]
    info = make_info(records, hashes, **fields)
    for step, (part, content) in enumerate(zip(parts, hashes, strict=True)):
        (directory / shard_name(step)).write_bytes(
            part.save({"settings": info.settings_hash, "content": content})
        )
    (directory / INFO).write_text(info.to_json())
    return directory
