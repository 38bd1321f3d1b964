"""Train the built-in pair: a small Llama target and a one-layer draft distilled from it.

Runs on a CPU, a CUDA or an MPS device; resumes from atomic checkpoints. With `--tokens` the learning-rate
schedule follows tokens seen, so a resumed run repeats an uninterrupted one; with `--minutes` it follows
training time spent, which is recorded in the checkpoint.

    python scripts/train_builtin_pair.py --data ../shared/data --out .work/pair --minutes 80 --resume
    python scripts/train_builtin_pair.py --data ../shared/data --out .work/pair --role evaluate
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import pair_data
import pair_evaluate
from pair_data import Document, PreparedData, UsageError, Windows
from pair_model import (
    CONTEXT,
    PRESETS,
    Preset,
    Shape,
    build_model,
    export,
    inherit_embedding,
    load_exported,
    make_optimizers,
)

LONG_WINDOWS_FROM = 0.80  # the last fifth is trained at full context, so that late rotary positions are seen
DECAY_FROM = 0.68
DISTIL_FROM = 0.2  # plain text first: it costs half as much a token
CHECKPOINT_SECONDS = 240.0


@dataclass(frozen=True)
class Budget:
    """How long to train: by tokens, or by minutes of training time."""

    tokens: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            raise ValueError("give exactly one of --tokens and --minutes")
        if (self.tokens or self.minutes or 0) <= 0:
            raise ValueError("the training budget must be positive")

    def progress(self, tokens_seen: int, seconds: float) -> float:
        """Share of the budget that is spent."""
        if self.tokens is not None:
            return tokens_seen / self.tokens
        assert self.minutes is not None
        return seconds / (60 * self.minutes)


@dataclass(frozen=True)
class Job:
    """Everything one training run is given."""

    role: str
    preset: Preset
    budget: Budget
    seed: int
    device: torch.device
    compile: bool
    out: Path
    resume: bool
    distil: bool
    command: str

    @property
    def shape(self) -> Shape:
        """Size of the model this job trains."""
        return self.preset.target if self.role == "target" else self.preset.draft

    @property
    def batch_tokens(self) -> int:
        """Tokens per step. A draft sees fewer tokens in total and learns better in more steps."""
        return self.preset.batch_tokens // (1 if self.role == "target" else 2)


@dataclass
class Counters:
    """Contents of a checkpoint besides tensors. No sampler state: windows are a function of `tokens`."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)


def autocast_for(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bfloat16 if that is fast; a CPU without AMX is much slower in bfloat16 than in float32."""
    quick = device.type == "cuda" or (
        device.type == "cpu" and bool(torch.cpu.get_capabilities().get("amx_bf16"))
    )
    return torch.autocast(device.type, torch.bfloat16) if quick else contextlib.nullcontext()


def schedule(progress: float) -> float:
    """Learning-rate factor: short warm-up, plateau, linear decay to zero."""
    warmup = min(1.0, 0.02 + progress / 0.01)
    decay = min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))
    return warmup * decay


Step = Callable[[Tensor], Tensor]


def loss_function(model: nn.Module, teacher: nn.Module | None) -> Step:
    """Cross entropy; with a teacher, KL(teacher || model) / 2 plus their total variation.

    KL alone leaves a small student too broad. Total variation is what speculative decoding pays for, but teaches
    nothing where the two laws do not meet yet, so both are needed.
    """

    def compute(windows: Tensor) -> Tensor:
        inputs, labels = windows[:, :-1], windows[:, 1:].reshape(-1)
        logits = model(inputs, use_cache=False).logits.float().flatten(0, 1)
        if teacher is None:
            return F.cross_entropy(logits, labels)
        with torch.no_grad():
            wanted = F.log_softmax(teacher(inputs, use_cache=False).logits.float().flatten(0, 1), dim=-1)
        offered = F.log_softmax(logits, dim=-1)
        divergence = F.kl_div(offered, wanted, reduction="batchmean", log_target=True)
        variation = 1 - torch.minimum(offered.exp(), wanted.exp()).sum(-1).mean()
        return 0.5 * divergence + variation

    return compute


def save_checkpoint(path: Path, model: nn.Module, optimizers: tuple[Any, ...], counters: Counters) -> None:
    """Write everything that a resumed run needs, atomically."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "counters": asdict(counters),
    }
    temporary = path.with_suffix(".part")
    torch.save(state, temporary)
    temporary.replace(path)


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: tuple[Any, ...], device: torch.device
) -> Counters:
    """Restore model, optimisers and counters from a checkpoint."""
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Counters(**state["counters"])


def validation_losses(
    model: nn.Module, data: PreparedData, device: torch.device, per_source: int
) -> dict[str, float]:
    """Mean loss per source on the first `per_source` held-out documents of each, from their real starts."""
    losses: dict[str, float] = {}
    model.eval()
    for spec in pair_data.SOURCES:
        chosen = [d for d in data.heldout if d.source == spec.name][:per_source]
        if chosen:
            losses[spec.name] = mean_loss(model, data, chosen, device)
    model.train()
    return losses


@torch.no_grad()
def mean_loss(model: nn.Module, data: PreparedData, documents: list[Document], device: torch.device) -> float:
    """Token-weighted loss over documents, truncated to the context's length."""
    total, count = 0.0, 0
    for document in documents:
        ids = [*data.tokenizer.encode(document.text).ids, data.eos_id][:CONTEXT]
        tokens = torch.tensor([ids], device=device)
        logits = model(tokens[:, :-1], use_cache=False).logits.float()
        total += float(F.cross_entropy(logits[0], tokens[0, 1:], reduction="sum"))
        count += len(ids) - 1
    return total / max(count, 1)


class Reporter:
    """A progress bar on a terminal; a line every `interval` seconds when piped."""

    def __init__(self, title: str, interval: float = 20.0) -> None:
        self.console = Console()
        self.title, self.interval, self.last = title, interval, 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.1f}%"))
        self.bar = Progress(
            *columns, TimeRemainingColumn(), console=self.console, disable=not sys.stdout.isatty()
        )
        self.task = self.bar.add_task(title, total=1.0)

    def update(self, counters: Counters, progress: float, loss: float, rate: float) -> None:
        """Show where training stands."""
        status = f"{self.title}: step {counters.step} loss {loss:.3f} {rate:,.0f} tok/s"
        self.bar.update(self.task, completed=min(progress, 1.0), description=status)
        if self.bar.disable and time.monotonic() - self.last > self.interval:
            self.last = time.monotonic()
            print(f"{status} tokens {counters.tokens:,} {100 * progress:.1f}%", flush=True)


@contextlib.contextmanager
def stop_flag() -> Iterator[list[bool]]:
    """A list that becomes non-empty on SIGINT or SIGTERM, so that a run ends at a checkpoint."""
    flag: list[bool] = []
    previous = {s: signal.signal(s, lambda *_: flag.append(True)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Trainer:
    """One model's training run."""

    def __init__(self, job: Job, data: PreparedData) -> None:
        self.job, self.data = job, data
        self.folder = job.out / job.role
        self.work = job.out / "checkpoints"
        self.work.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self.work / f"{job.role}.pt"
        self.windows = Windows(data.tokens, job.seed)
        self.model = build_model(job.shape, job.preset.vocab_size, data.eos_id, job.seed).to(job.device)
        self.optimizers = make_optimizers(self.model, job.preset)
        self.counters = Counters()
        if job.resume and self.checkpoint.is_file():
            self.counters = load_checkpoint(self.checkpoint, self.model, self.optimizers, job.device)
        elif job.role == "draft" and job.distil:
            inherit_embedding(self.model, load_exported(job.out / "target", job.device))
        self.counters.sessions.append({"from_step": self.counters.step, "command": job.command})
        self.plain = self._step(None)
        self.distilling: Step | None = None

    def _step(self, teacher: nn.Module | None) -> Step:
        function = loss_function(self.model, teacher)
        return torch.compile(function, dynamic=False) if self.job.compile else function

    def _loss_at(self, progress: float) -> Step:
        if self.job.role != "draft" or not self.job.distil or progress < DISTIL_FROM:
            return self.plain
        if self.distilling is None:
            self.distilling = self._step(load_exported(self.job.out / "target", self.job.device))
        return self.distilling

    def train_step(self, progress: float) -> float:
        """One optimiser step; returns the loss."""
        length = CONTEXT if progress >= LONG_WINDOWS_FROM else 256
        rows = self.job.batch_tokens // length
        batch = torch.from_numpy(self.windows.batch(self.counters.tokens, rows, length)).to(self.job.device)
        with autocast_for(self.job.device):
            loss = self._loss_at(progress)(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, base in zip(
            self.optimizers, (self.job.preset.matrix_lr, self.job.preset.vector_lr), strict=True
        ):
            optimizer.param_groups[0]["lr"] = base * schedule(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.counters.tokens += rows * length
        self.counters.step += 1
        return float(loss.detach())

    def save(self, per_source: int) -> dict[str, float]:
        """Checkpoint, export and record."""
        save_checkpoint(self.checkpoint, self.model, self.optimizers, self.counters)
        export(self.model, self.data, self.folder)
        losses = validation_losses(self.model, self.data, self.job.device, per_source)
        record = {"step": self.counters.step, "validation": losses}
        with (self.work / f"{self.job.role}-validation.jsonl").open("a") as handle:
            handle.write(json.dumps(record) + "\n")
        write_training_record(self.job, self.data, self.counters, losses, self.model)
        return losses

    def run(self) -> None:
        """Train until the budget is spent or a signal arrives."""
        budget, counters = self.job.budget, self.counters
        reporter = Reporter(self.job.role)
        last_save, smooth, rate = time.monotonic(), math.nan, math.nan
        with stop_flag() as stopped, reporter.bar:
            while (progress := budget.progress(counters.tokens, counters.seconds)) < 1 and not stopped:
                begin = time.monotonic()
                before = counters.tokens
                loss = self.train_step(progress)
                spent = time.monotonic() - begin
                counters.seconds += spent
                smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
                speed = (counters.tokens - before) / spent
                rate = speed if math.isnan(rate) else 0.95 * rate + 0.05 * speed
                if counters.step % 20 == 0:
                    counters.curve.append(
                        {"step": counters.step, "tokens": counters.tokens, "loss": round(smooth, 4)}
                    )
                reporter.update(counters, progress, smooth, rate)
                if time.monotonic() - last_save > CHECKPOINT_SECONDS:
                    print(f"validation {self.save(per_source=6)}", flush=True)
                    last_save = time.monotonic()
        print(f"validation {self.save(per_source=6 if stopped else 1000)}", flush=True)
        if stopped:
            raise KeyboardInterrupt


def write_training_record(
    job: Job, data: PreparedData, counters: Counters, losses: dict[str, float], model: nn.Module
) -> None:
    """Add this role's record to training.json."""
    path = job.out / "training.json"
    whole: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    whole["data"] = {**data.manifest, "sources": pair_data.source_table()}
    whole[job.role] = {
        "command": job.command,
        "seed": job.seed,
        "device": str(job.device),
        "compile": job.compile,
        "distil": job.role == "draft" and job.distil,
        "preset": asdict(job.preset),
        "budget": asdict(job.budget),
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "numpy": np.__version__,
        },
        "finished": job.budget.progress(counters.tokens, counters.seconds) >= 1,
        "steps": counters.step,
        "tokens_seen": counters.tokens,
        "training_seconds": round(counters.seconds, 1),
        "validation_loss": losses,
        "sessions": counters.sessions,
        "loss_curve": counters.curve,
    }
    temporary = path.with_suffix(f".{job.role}.part")
    temporary.write_text(json.dumps(whole, indent=1))
    temporary.replace(path)


def pick_device(name: str) -> torch.device:
    """The named device, or the best one present."""
    if name != "auto":
        try:
            torch.zeros(1, device=name)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def can_compile(device: torch.device) -> bool:
    """torch.compile needs a C++ compiler on a CPU; on MPS it is left off."""
    if device.type == "cpu":
        return shutil.which("g++") is not None or shutil.which("clang++") is not None
    return device.type == "cuda"


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the source text files")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the pair, checkpoints and records"
    )
    parser.add_argument("--role", choices=("target", "draft", "both", "evaluate"), default="both")
    parser.add_argument("--tokens", type=int, help="train for this many tokens (exactly repeatable)")
    parser.add_argument(
        "--minutes", type=float, help="train for this much time (with both: 4/5 target, 1/5 draft)"
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu-3m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's own choice)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-distil", action="store_true", help="train the draft on text alone")
    return parser.parse_args(argv)


def check_paths(data: Path, out: Path) -> None:
    """Fail early, in one line, on a folder that cannot serve."""
    if not data.is_dir():
        raise UsageError(f"data folder not found: {data}")
    if missing := pair_data.missing_files(data):
        raise UsageError(f"{data} lacks {len(missing)} file(s): {', '.join(missing)}")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out is not a folder: {out}")
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise UsageError(f"cannot write to {out}")


def make_jobs(args: argparse.Namespace, device: torch.device, command: str) -> list[Job]:
    """One job a role; `both` shares a time budget four to one."""
    roles = ("target", "draft") if args.role == "both" else (args.role,)
    share = {"target": 0.8, "draft": 0.2} if args.role == "both" else {args.role: 1.0}
    jobs = []
    for role in roles:
        minutes = None if args.minutes is None else args.minutes * share[role]
        budget = Budget(args.tokens, minutes)
        compiled = not args.no_compile and can_compile(device)
        jobs.append(
            Job(
                role=role,
                preset=PRESETS[args.preset],
                budget=budget,
                seed=args.seed,
                device=device,
                compile=compiled,
                out=args.out,
                resume=args.resume,
                distil=not args.no_distil,
                command=command,
            )
        )
    return jobs


def recorded_command(argv: list[str]) -> str:
    """The command for the records, with the machine's own folders replaced by DATA and OUT."""
    named = {"--data": "DATA", "--out": "OUT"}
    words = [named.get(argv[i - 1], word) if i else word for i, word in enumerate(argv)]
    return "python scripts/train_builtin_pair.py " + shlex.join(words)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    try:
        check_paths(args.data, args.out)
        device = pick_device(args.device)
        if args.threads > 0:
            torch.set_num_threads(args.threads)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        preset = PRESETS[args.preset]
        data = pair_data.prepare(args.data, args.out / "cache", preset.vocab_size, args.seed)
        shutil.copyfile(args.out / "cache" / "heldout.jsonl", args.out / "heldout.jsonl")
        if args.role == "evaluate":
            pair_evaluate.evaluate_pair(args.out, data, device)
            return 0
        for job in make_jobs(args, device, recorded_command(argv)):
            Trainer(job, data).run()
    except ValueError as error:
        print(f"train_builtin_pair: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_builtin_pair: stopped; continue with --resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
