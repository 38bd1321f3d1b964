"""Trains a student: AdamW, a cosine schedule, checkpoints from which a killed run continues to the same weights."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import LlamaForCausalLM

from sprinter.errors import SprinterError, UserError
from sprinter.models.cut import CutHead
from sprinter.training.drafts.batches import TextBatch, collate, steps_of, stream
from sprinter.training.drafts.data import TargetText, Texts, read_shard, save_bytes, shard_bytes
from sprinter.training.drafts.losses import LOSSES, TopLaws, divergences, parse_loss, tempered
from sprinter.training.drafts.settings import TrainingSettings

__all__ = [
    "CHECKPOINT",
    "LossPoint",
    "OnPolicy",
    "TrainedStudent",
    "log_laws",
    "loss_temperature",
    "settle_scale",
    "train",
    "validate",
]

CHECKPOINT = "training.safetensors"
_WARM = parse_loss("ce+kl")
_CLIP = 1.0
_RAMP = 0.02
_LEAST_LR = 0.1
_REFRESHES = 4
"""Number of times that the student's own drafts are judged again during the on-policy steps."""


class LossPoint(NamedTuple):
    """Losses at a step: means since the last point, and those of the held-out texts.

    Attributes:
        step: number of steps made.
        tokens: positions trained on so far, repeats included.
        seconds: time of training so far, earlier runs included.
        train, held_out: loss by name ("ce", "kl", "reverse-kl", "tv"); ``held_out`` is empty without such texts.
    """

    step: int
    tokens: int
    seconds: float
    train: dict[str, float]
    held_out: dict[str, float]


class OnPolicy(Protocol):
    """Judges drafts of the student: texts whose positions the student's drafts visit."""

    def __call__(self, student: LlamaForCausalLM, round: int) -> Sequence[TargetText]:
        """The texts of a round, a pure function of the student's weights and the round's number."""
        ...


@dataclass(slots=True)
class TrainedStudent:
    """A trained student.

    Attributes:
        student: the model, in evaluation mode.
        history: one point per checkpoint.
        steps, tokens, seconds: of the whole training.
        resumed: step that an earlier run had reached; 0: none.
    """

    student: LlamaForCausalLM
    history: list[LossPoint] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    resumed: int = 0


def train(
    student: LlamaForCausalLM,
    texts: Texts,
    settings: TrainingSettings,
    out: Path,
    *,
    on_policy: OnPolicy | None = None,
    progress: Callable[[LossPoint, int], None] | None = None,
) -> TrainedStudent:
    """Train a student on texts of the target, or continue a run that was interrupted.

    Args:
        student: a fresh student; trained in place.
        texts: of the target, with its laws.
        settings: how to train.
        out: directory of the checkpoint.
        on_policy: needed if ``settings.on_policy`` is above 0.
        progress: called at each checkpoint with the newest point and the number of steps in all.

    Raises:
        UserError: a checkpoint of other settings, texts or student; a full disk.
        SprinterError: the loss is not finite.
    """
    if settings.on_policy and on_policy is None:
        raise UserError("on_policy needs the target, to judge the student's drafts: give it, or on_policy=0")
    run = _Run(student, texts, settings, out)
    with _threads(settings.threads):
        run.resume()
        batches = stream(run.texts, settings.tokens, settings.seed, run.done)
        while run.done < run.steps:
            if (number := run.refresh()) is not None:
                run.own = run.drafts(number, on_policy)
            run.step(next(batches))
            if run.done % settings.checkpoint == 0 or run.done == run.steps:
                point = run.note()
                run.save()
                if progress is not None:
                    progress(point, run.steps)
    student.train(False)
    return TrainedStudent(student, run.history, run.steps, run.tokens, run.seconds, run.resumed)


def log_laws(student: LlamaForCausalLM, batch: TextBatch, temperature: float = 1.0) -> tuple[Tensor, TopLaws]:
    """ln q at the places of a batch, and the target's laws there, both at a temperature.

    A cut vocabulary has one further column, which stands for all tokens outside: their ln q is −inf.

    Returns:
        ``[n, V]``, or ``[n, kept + 1]`` with laws whose ids are columns.
    """
    batch = batch.to(student.device)
    states = student.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    states = states.reshape(-1, states.shape[-1])[batch.places]
    laws, head = tempered(batch.laws, temperature), student.lm_head
    if not isinstance(head, CutHead):
        return torch.log_softmax(head(states) / temperature, -1), laws
    known = torch.log_softmax(head.words(states) / temperature, -1)
    column = torch.full((head.out_features,), len(head.ids), device=known.device)
    column[head.ids] = torch.arange(len(head.ids), device=known.device)
    outside = known.new_full((len(known), 1), -math.inf)
    return torch.cat([known, outside], -1), TopLaws(column[laws.ids], laws.probs, column[laws.tokens])


@torch.no_grad()
def validate(
    student: LlamaForCausalLM, texts: Sequence[TargetText], tokens: int, temperature: float
) -> dict[str, float]:
    """Mean losses over all positions of texts; empty without texts."""
    sums, count = dict.fromkeys(LOSSES, 0.0), 0
    for batch in _in_order(texts, tokens):
        parts = divergences(*log_laws(student, batch, temperature))
        sums = {name: sums[name] + float(parts[name].sum()) for name in sums}
        count += len(batch.places)
    return {name: value / count for name, value in sums.items()} if count else {}


@torch.no_grad()
def settle_scale(
    student: LlamaForCausalLM, texts: Sequence[TargetText], tokens: int, temperature: float
) -> float:
    """Scale the last norm so that the laws of a fresh student are least wrong on one batch of texts.

    Copied layers write states of another size than the last norm and the output layer expect; the laws are sure and
    wrong then, and AdamW, whose steps do not grow with a parameter, takes long to undo it.

    Returns:
        The factor, a power of the square root of 2.
    """
    batch, norm = next(_in_order(texts, tokens)), student.model.norm.weight
    before, best = norm.clone(), (math.inf, 1.0)
    for factor in (2 ** (-half / 2) for half in range(13)):
        norm.copy_(before * factor)
        best = min(best, (float(divergences(*log_laws(student, batch, temperature))["kl"].mean()), factor))
    norm.copy_(before * best[1])
    return best[1]


def _in_order(texts: Sequence[TargetText], tokens: int) -> Iterator[TextBatch]:
    part: list[TargetText] = []
    for text in sorted(texts, key=lambda text: len(text.ids)):
        if part and len(text.ids) * (len(part) + 1) > tokens:
            yield collate(part)
            part = []
        part.append(text)
    if part:
        yield collate(part)


class _Run:
    """State of one training run: what a checkpoint holds, and the optimizer."""

    def __init__(
        self, student: LlamaForCausalLM, texts: Texts, settings: TrainingSettings, out: Path
    ) -> None:
        self.student, self.settings, self._out = student, settings, out
        self.texts, self._held = texts.part(False), texts.part(True)
        lengths = [len(text.ids) for text in self.texts]
        self.steps = settings.steps or steps_of(lengths, settings.tokens, settings.seed, settings.epochs)
        self.temperature = loss_temperature(settings, texts)
        self.done, self.tokens, self.seconds, self.resumed = 0, 0, 0.0, 0
        self.history: list[LossPoint] = []
        self.own: Sequence[TargetText] = ()
        self._sums, self._count = dict.fromkeys(LOSSES, 0.0), 0
        self._named = _trainable(student, settings)
        groups = [
            {
                "params": [p for name, p in self._named.items() if _decays(name, p)],
                "weight_decay": settings.decay,
            },
            {"params": [p for name, p in self._named.items() if not _decays(name, p)], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=(0.9, 0.95)
        )
        own = {
            name: value for name, value in asdict(settings).items() if name not in ("threads", "checkpoint")
        }
        key = [texts.info["hash"], own, _digest(student)]
        self._hash = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self._began = time.perf_counter()

    def step(self, batch: TextBatch) -> None:
        """One optimizer step."""
        loss = _WARM if self.done < self.settings.warm_up * self.steps else parse_loss(self.settings.loss)
        parts = divergences(*log_laws(self.student, batch, self.temperature))
        value = loss.of(parts).mean()
        if self.own:
            extra = divergences(*log_laws(self.student, self._own_batch(), self.temperature))
            # A draft token is no draw of the target: cross-entropy on it would teach the student itself.
            value = value + loss.of({**extra, "ce": torch.zeros_like(extra["ce"])}).mean()
        if not bool(torch.isfinite(value)):
            raise SprinterError(f"the loss is not finite at step {self.done}: try a smaller lr")
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.lr * _schedule(self.done, self.steps)
        self._optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*self._named.values()], _CLIP)
        self._optimizer.step()
        self.done += 1
        self._count += len(batch.places)
        self._sums = {name: self._sums[name] + float(parts[name].detach().sum()) for name in self._sums}

    def note(self) -> LossPoint:
        """The point of a checkpoint, added to the history."""
        self.student.train(False)
        held = validate(self.student, self._held, self.settings.tokens, self.temperature)
        self.student.train()
        means = {name: value / self._count for name, value in self._sums.items()}
        self.tokens += self._count
        self.seconds += time.perf_counter() - self._began
        self._began, self._sums, self._count = time.perf_counter(), dict.fromkeys(LOSSES, 0.0), 0
        self.history.append(LossPoint(self.done, self.tokens, round(self.seconds, 2), means, held))
        return self.history[-1]

    def refresh(self) -> int | None:
        """Number of the round of drafts that begins at this step; None: no new one is due."""
        first = round(self.steps * (1 - self.settings.on_policy))
        if not self.settings.on_policy or self.done < first:
            return None
        each = max(1, -(-(self.steps - first) // _REFRESHES))
        number, past = divmod(self.done - first, each)
        return number if past == 0 or not self.own else None

    def drafts(self, number: int, judge: OnPolicy | None) -> Sequence[TargetText]:
        """The judged drafts of a round. They are kept on disk: the weights that drafted them are soon gone."""
        path = self._out / f"drafts-{number:02d}.safetensors"
        if path.is_file() and (found := read_shard(path, self._hash)) is not None:
            return found
        assert judge is not None
        self.student.train(False)
        found = [*judge(self.student, number)]
        self.student.train()
        save_bytes(path, shard_bytes(found, self._hash))
        return found

    def _own_batch(self) -> TextBatch:
        """The drafts of a step, by its number."""
        order = torch.randperm(len(self.own), generator=torch.Generator().manual_seed(self.done))
        picked, tokens = list[TargetText](), 0
        for index in order.tolist():
            tokens += len(self.own[index].ids)
            if picked and tokens > self.settings.tokens // 4:
                break
            picked.append(self.own[index])
        return collate(picked)

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state: dict[str, Tensor] = {}
        for name, value in self._named.items():
            state[f"weights.{name}"] = value.detach().cpu()
            moments = self._optimizer.state[value]
            state |= {f"{key}.{name}": moments[key].cpu() for key in ("exp_avg", "exp_avg_sq")}
        about = {
            "hash": self._hash, "done": self.done, "tokens": self.tokens, "seconds": self.seconds,
            "history": [point._asdict() for point in self.history],
        }  # fmt: skip
        save_bytes(self._out / CHECKPOINT, to_bytes(state, {"sprinter": json.dumps(about)}))

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one.

        Raises:
            UserError: it is damaged, or of other settings, texts or student.
        """
        path = self._out / CHECKPOINT
        if not path.is_file():
            return
        try:
            content = path.read_bytes()
            state = load(content)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            about: dict[str, Any] = json.loads(header["__metadata__"]["sprinter"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(
                f"the checkpoint '{path}' is damaged ({error}): delete it to train from the start"
            ) from None
        if about["hash"] != self._hash:
            raise UserError(
                f"the checkpoint '{path}' is of other settings, texts or another student: "
                "give another --out, or --restart to start over"
            )
        with torch.no_grad():
            for name, value in self._named.items():
                value.copy_(state[f"weights.{name}"])
                moments = {
                    key: state[f"{key}.{name}"].to(value.device, copy=True)
                    for key in ("exp_avg", "exp_avg_sq")
                }
                self._optimizer.state[value] = {"step": torch.tensor(float(about["done"])), **moments}
        self.done = self.resumed = about["done"]
        self.tokens, self.seconds = about["tokens"], about["seconds"]
        self.history = [LossPoint(**point) for point in about["history"]]


def loss_temperature(settings: TrainingSettings, texts: Texts) -> float:
    """Temperature of both laws in the loss."""
    if settings.temperature is not None:
        return settings.temperature
    own = float(texts.info["settings"]["temperature"])
    return own if 0 < own <= 1 else 1.0


def _trainable(student: LlamaForCausalLM, settings: TrainingSettings) -> dict[str, Tensor]:
    """Parameters to train by name; others are frozen. An input embedding of its own stays the target's."""
    student.lm_head.requires_grad_(not settings.freeze_embeddings)
    if not student.config.tie_word_embeddings:
        student.get_input_embeddings().requires_grad_(False)
    return {name: value for name, value in student.named_parameters() if value.requires_grad}


def _decays(name: str, value: Tensor) -> bool:
    return value.ndim == 2 and ".layers." in name


def _schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate."""
    ramp = max(1, round(_RAMP * steps))
    if step < ramp:
        return (step + 1) / ramp
    share = (step - ramp) / max(1, steps - ramp)
    return _LEAST_LR + (1 - _LEAST_LR) * 0.5 * (1 + math.cos(math.pi * share))


def _digest(student: LlamaForCausalLM) -> str:
    """Hash of all weights of a student before training."""
    digest = hashlib.sha256(json.dumps(student.config.to_dict(), sort_keys=True, default=str).encode())
    for name, value in sorted(student.state_dict().items()):
        digest.update(name.encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Run torch with a number of threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
