"""The target judges a student: overlap on held-out texts, accepted tokens a call, and the student's own drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.laws import Sampling, overlap, process
from sprinter.models.pair import LoadedModel, LoadedPair
from sprinter.training.drafts.batches import TextBatch, collate
from sprinter.training.drafts.data import TargetText
from sprinter.training.drafts.folder import Judging
from sprinter.training.prefixes import PrefixRow, PrefixWriter
from sprinter.training.records import KINDS

__all__ = ["OwnDrafts", "accepted", "by_task", "overlaps"]

_DRAFT = KINDS.index("draft")
_ROWS = 16


@torch.inference_mode()
def overlaps(
    target: PreTrainedModel, student: PreTrainedModel, texts: Sequence[TargetText], temperature: float
) -> dict[str, dict[str, float]]:
    """Mean β = Σ min(p, q) over the answers' positions, by task and for "all", from whole laws.

    Args:
        target, student: models in a floating-point dtype.
        texts: held-out texts.
        temperature: of both laws; 0: β is 1 where the first choices agree.

    Returns:
        task → {"texts", "positions", "beta"}.
    """
    found = []
    for text in texts:
        batch = collate([text])
        p, q = (process(_logits(model, batch), Sampling(temperature)) for model in (target, student))
        beta = overlap(p, q)
        found.append((text.task, (1, len(beta), float(beta.sum()))))
    return {
        task: {"texts": count, "positions": positions, "beta": beta / positions}
        for task, (count, positions, beta) in _sums(found).items()
    }


def _sums(rows: Iterable[tuple[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Numbers of (task, numbers) summed by task, and over "all"."""
    found: dict[str, list[float]] = {}
    for task, numbers in rows:
        for name in (task, "all"):
            found[name] = [a + b for a, b in zip(found.get(name, [0] * len(numbers)), numbers, strict=True)]
    return dict(sorted(found.items()))


def _logits(model: PreTrainedModel, batch: TextBatch) -> Tensor:
    logits: Tensor = model(input_ids=batch.ids.to(model.device), use_cache=False).logits[0]
    return logits[batch.places.to(model.device)].float().cpu()


def accepted(
    pair: Pair, texts: Sequence[TargetText], method: str, temperature: float, judging: Judging
) -> dict[str, dict[str, float]]:
    """Tokens a target call of a method, and the share of drafted tokens that were accepted, by task.

    Args:
        pair: the target with what drafts for it.
        texts: held-out texts, whose prompts are answered again.
        method, temperature: of the generation. judging: how many answers of which length.

    Returns:
        task → {"prompts", "tokens_per_call", "acceptance"}.
    """
    by_task: dict[str, list[TargetText]] = {}
    for text in texts:
        by_task.setdefault(text.task, []).append(text)
    chosen = [text for own in by_task.values() for text in own[: judging.prompts]]
    if not chosen:
        return {}
    done = pair.generate_batch(
        [text.ids[: text.prompt].tolist() for text in chosen], method=method,
        max_new_tokens=judging.new_tokens, temperature=temperature, rows=min(8, len(chosen)),
    )  # fmt: skip
    counts = (
        (one.stats.new_tokens, one.stats.target_calls, one.stats.accepted, one.stats.drafted) for one in done
    )
    sums = _sums((text.task, (1, *own)) for text, own in zip(chosen, counts, strict=True))
    return {
        task: {"prompts": prompts, "tokens_per_call": tokens / calls, "acceptance": kept / max(1, drafted)}
        for task, (prompts, tokens, calls, kept, drafted) in sums.items()
    }


@dataclass(frozen=True, slots=True)
class OwnDrafts:
    """Drafts of the student that the target judges: the positions that speculative decoding visits.

    A draft begins at a random place of a text of the target. Its positions up to the first token that exact decoding
    would reject are kept, with the target's laws; what follows a rejection is never asked for.

    Args:
        models: the target and what it shares with its drafts.
        texts: of the target, for training.
        gamma: length of the drafts.
        temperature: that the student drafts at.
        seed: of the places, drafts and verdicts.
        count: number of drafts a round.
        top: number of most probable tokens that are kept of each law.
    """

    models: LoadedPair
    texts: Sequence[TargetText]
    gamma: int
    temperature: float
    seed: int
    count: int = 256
    top: int = 64

    def __call__(self, student: LlamaForCausalLM, round: int) -> list[TargetText]:
        """The judged drafts of a round; see ``train.OnPolicy``."""
        seed = self.seed * 1000 + round
        chance = torch.Generator().manual_seed(seed)
        room = min(self.models.target.context, int(student.config.max_position_embeddings)) - self.gamma
        texts = [text for text in self.texts if text.prompt <= room]
        if not texts:
            raise UserError(
                f"no text leaves room for a draft of {self.gamma} tokens: give a smaller gamma, or on_policy=0"
            )
        rows = []
        for number in range(self.count):
            text = texts[int(torch.randint(len(texts), (1,), generator=chance))]
            last = min(len(text.ids), room + 1)
            end = text.prompt + int(torch.randint(last - text.prompt, (1,), generator=chance))
            prefix = tuple(text.ids[:end].tolist())
            rows.append((text.task, PrefixRow(number, _DRAFT, prefix, (0,) * self.gamma)))
        rows.sort(key=lambda row: len(row[1].ids))  # little of a batch is padding
        pair = LoadedPair(self.models.target, _loaded(student, self.models), None, self.models.tokens)
        writer, found = PrefixWriter(pair, seed, self.temperature), list[TargetText]()
        for at in range(0, len(rows), _ROWS):
            part = rows[at : at + _ROWS]
            read = writer([row for _, row in part])
            p, q = (process(logits, Sampling(self.temperature)).cpu() for logits in (read.p, read.q))
            raw = torch.softmax(read.p.float(), -1).cpu().topk(min(self.top, read.p.shape[-1]), -1)
            ratio = (p / q).gather(-1, read.tokens[..., None]).squeeze(-1)
            refused = torch.rand(ratio.shape, generator=chance) >= ratio
            for i, (task, row) in enumerate(part):
                visited = int(refused[i].int().argmax()) + 1 if bool(refused[i].any()) else self.gamma
                ids = torch.tensor([*row.ids, *read.tokens[i, :visited].tolist()])
                probs = raw.values[i, :visited].half().float()
                found.append(
                    TargetText(ids, len(row.ids), raw.indices[i, :visited].clone(), probs.clone(), task)
                )
        return found


def _loaded(student: LlamaForCausalLM, models: LoadedPair) -> LoadedModel:
    config: Any = student.config
    return LoadedModel(
        student, "student", None, int(config.max_position_embeddings), models.target.vocab_size,
        int(config.hidden_size), models.target.eos_ids,
    )  # fmt: skip


def by_task(*tables: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Join tables by task, "all" last."""
    names = sorted({name for table in tables for name in table}, key=lambda name: (name == "all", name))
    return {name: {k: v for table in tables for k, v in table.get(name, {}).items()} for name in names}
