"""One training run of a draft or of heads: AdamW, a cosine schedule, checkpoints that a killed run continues from."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor

from sprinter.errors import SprinterError, UserError
from sprinter.training.drafts.batches import TextBatch, collate, steps_of, stream
from sprinter.training.drafts.data import TargetText, Texts, read_shard, shard_bytes
from sprinter.training.drafts.learner import Learner, Losses
from sprinter.training.drafts.losses import LOSSES, parse_loss
from sprinter.training.drafts.settings import TrainingSettings
from sprinter.training.shards import save_bytes

__all__ = ["CHECKPOINT", "LossPoint", "Run", "loss_temperature", "run_to_end"]

CHECKPOINT = "training.safetensors"
_WARM = parse_loss("ce+kl")
_CLIP = 1.0
_RAMP = 0.02
_LEAST_LR = 0.1
_MOMENTS = ("exp_avg", "exp_avg_sq")
_REFRESHES = 4
"""Number of times that the student's own drafts are judged again during the on-policy steps."""


class LossPoint(NamedTuple):
    """Losses at a step: means since the last point, and those of the held-out texts.

    Attributes:
        step: number of steps made.
        tokens: positions trained on so far, repeats included.
        seconds: time of training so far, earlier runs included.
        train, held_out: loss by name ("ce", "kl", "reverse-kl", "tv"); ``held_out`` may have further measures, and is
            empty without such texts.
    """

    step: int
    tokens: int
    seconds: float
    train: dict[str, float]
    held_out: dict[str, float]


def run_to_end(
    learner: Learner,
    texts: Texts,
    settings: TrainingSettings,
    out: Path,
    *,
    judge: Callable[[int], Sequence[TargetText]] | None = None,
    progress: Callable[[LossPoint, int], None] | None = None,
) -> Run:
    """Train, or continue a run that was interrupted; without ``minutes`` the same weights come out on a CPU.

    Args:
        learner: fresh; trained in place.
        texts: of the target, with its laws.
        settings: how to train.
        out: directory of the checkpoint.
        judge: judged drafts of a round, needed if ``settings.on_policy`` is above 0.
        progress: called at each checkpoint with the newest point and the number of steps to expect in all.

    Raises:
        UserError: a checkpoint of other settings, texts or learner; a full disk.
        SprinterError: the loss is not finite.
    """
    run = Run(learner, texts, settings, out)
    with _threads(settings.threads):
        run.resume()
        batches = stream(run.texts, settings.tokens, settings.seed, run.done)
        ended = run.ended  # read once a step: the time goes on
        while not ended:
            if (number := run.refresh()) is not None:
                run.own = run.drafts(number, judge)
            run.step(next(batches))
            ended = run.ended
            if run.done % settings.checkpoint == 0 or ended:
                point = run.note()
                run.save()
                if progress is not None:
                    progress(point, run.expected)
    learner.module.train(False)
    run.steps = run.done
    return run


class Run:
    """State of one training run: what a checkpoint holds, and the optimizer.

    Attributes:
        history: one point per checkpoint.
        done, steps: steps made, and in all, or fewer if the time ends before. tokens, seconds: of the whole training.
        resumed: step that an earlier run had reached; 0: none.
    """

    def __init__(self, learner: Learner, texts: Texts, settings: TrainingSettings, out: Path) -> None:
        self.learner, self.settings, self._out = learner, settings, out
        self.texts, self._held = texts.part(False), texts.part(True)
        lengths = [len(text.ids) for text in self.texts]
        self.steps = settings.steps or steps_of(lengths, settings.tokens, settings.seed, settings.epochs)
        self.done, self.tokens, self.seconds, self.resumed = 0, 0, 0.0, 0
        self.history: list[LossPoint] = []
        self.own: Sequence[TargetText] = ()
        self._sums, self._count = dict.fromkeys(LOSSES, 0.0), 0
        self._named = learner.named()
        groups = [
            {"params": own, "weight_decay": decay}
            for decays, decay in ((True, settings.decay), (False, 0.0))
            if (own := [p for name, p in self._named.items() if learner.decays(name, p) == decays])
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
        key = [texts.info["hash"], settings.shaping(), learner.digest()]
        self._hash = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self._began = time.perf_counter()

    @property
    def place(self) -> float:
        """Where in its ``steps`` the training is: after those that were made, or further on where its time ends before
        they all are."""
        if self.settings.minutes is None:
            return self.done
        spent = self.seconds + time.perf_counter() - self._began
        return max(self.done, self.steps * spent / (60 * self.settings.minutes))

    @property
    def ended(self) -> bool:
        """Whether no step is left."""
        return self.place >= self.steps

    @property
    def expected(self) -> int:
        """Number of steps in all, as far as it can be told."""
        place = self.place
        return self.steps if place <= self.done else max(self.done, round(self.done * self.steps / place))

    def step(self, batch: TextBatch) -> None:
        """One optimizer step."""
        loss = _WARM if self.place < self.settings.warm_up * self.steps else parse_loss(self.settings.loss)
        found = self._losses(batch)
        parts = {name: found.parts[name] for name in LOSSES}
        own = loss.of(parts)
        value = found.mean(own if found.penalty is None else own + found.penalty)
        if self.own:
            extra = dict(self._losses(self._own_batch()).parts)
            # A draft token is no draw of the target: cross-entropy on it would teach the student itself.
            value = value + loss.of({**extra, "ce": torch.zeros_like(extra["ce"])}).mean()
        if not bool(torch.isfinite(value)):
            raise SprinterError(f"the loss is not finite at step {self.done}: try a smaller lr")
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.lr * _schedule(self.place, self.steps)
        self._optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*self._named.values()], _CLIP)
        self._optimizer.step()
        self.done += 1
        self._count += len(parts["tv"])
        self._sums = {name: self._sums[name] + float(parts[name].detach().sum()) for name in self._sums}

    def _losses(self, batch: TextBatch) -> Losses:
        half = self.settings.precision == "bfloat16"
        device = next(iter(self._named.values())).device.type
        with torch.autocast(device, torch.bfloat16, enabled=half):
            return self.learner.losses(batch)

    def note(self) -> LossPoint:
        """The point of a checkpoint, added to the history."""
        self.learner.module.train(False)
        held = self.learner.held_out(self._held, self.settings.tokens)
        self.learner.module.train(True)
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

    def drafts(
        self, number: int, judge: Callable[[int], Sequence[TargetText]] | None
    ) -> Sequence[TargetText]:
        """The judged drafts of a round. They are kept on disk: the weights that drafted them are soon gone."""
        path = self._out / f"drafts-{number:02d}.safetensors"
        if path.is_file() and (found := read_shard(path, self._hash)) is not None:
            return found
        assert judge is not None
        self.learner.module.train(False)
        found = [*judge(number)]
        self.learner.module.train(True)
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
            state |= {f"{key}.{name}": moments[key].cpu() for key in _MOMENTS}
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
                f"the checkpoint '{path}' is of other settings, texts or another model: "
                "give another --out, or --restart to start over"
            )
        with torch.no_grad():
            for name, value in self._named.items():
                value.copy_(state[f"weights.{name}"])
                moments = {key: state[f"{key}.{name}"].to(value.device, copy=True) for key in _MOMENTS}
                self._optimizer.state[value] = {"step": torch.tensor(float(about["done"])), **moments}
        self.done = self.resumed = about["done"]
        self.tokens, self.seconds = about["tokens"], about["seconds"]
        self.history = [LossPoint(**point) for point in about["history"]]


def loss_temperature(settings: TrainingSettings, texts: Texts) -> float:
    """Temperature of both laws in the loss."""
    if settings.loss_temperature is not None:
        return settings.loss_temperature
    own = float(texts.info["settings"]["temperature"])
    return own if 0 < own <= 1 else 1.0


def _schedule(place: float, steps: int) -> float:
    """Share of the peak learning rate."""
    ramp = max(1, round(_RAMP * steps))
    if place < ramp:
        return min(1.0, (place + 1) / ramp)
    share = (place - ramp) / max(1, steps - ramp)
    return _LEAST_LR + (1 - _LEAST_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Run torch with a number of threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
