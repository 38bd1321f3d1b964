"""What the stages of run.py share: sizes, the clock that stops them, and results that are kept after every stage."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT  # puts scripts/ on the path
from sprinter.files import write_atomic
from train_builtin import Preset, Shape

CLOSING_S = 12.0  # kept free for the last table
SHARES = {
    "train": 0.32,
    "arms": 0.2,
    "real": 0.14,
    "latency": 0.28,
    "roofline": 0.06,
}  # of the time, by stage
"""Stages in order; what one leaves over the next may use. The profiler, which may slow what follows, comes last."""


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        preset: vocabulary, models, tokens a step and step sizes.
        document_chars: shorter texts are joined to documents of at least this length.
        window: tokens of a training window.
        tokenizer_chars: text that the tokenizer is learned from.
        train_cap_s: most seconds of training a model.
        gate_reserve_s: of the training stage, kept for evaluation and gate.
        gate_texts, gate_tokens: texts that the gate's labels are made of, labelled positions in each.
        judged_documents: held-out documents that loss and overlap are measured on.
        prompts, new_tokens: most prompts an arm answers, and their limit of new tokens.
        tuning_prompts, gammas: what γ is set on, and the values tried.
        copy_bytes: of the large buffer whose copy gives the bandwidth.
        cached: tokens in the cache when a pass is timed.
        passes: tokens a timed pass.
        pass_repeats: forward passes of which the median is reported.
        latency_prompts, latency_new_tokens: of the random-weight runs.
    """

    preset: Preset
    document_chars: int
    window: int
    tokenizer_chars: int
    train_cap_s: float
    gate_reserve_s: float
    gate_texts: int
    gate_tokens: int
    judged_documents: int
    prompts: int
    new_tokens: int
    tuning_prompts: int
    gammas: tuple[int, ...]
    copy_bytes: int
    cached: int
    passes: tuple[int, ...]
    pass_repeats: int
    latency_prompts: int
    latency_new_tokens: int


FULL = Sizes(
    # Depth makes a pass dear on a GPU, so the draft is wide and shallow: 30 M and 344 M parameters.
    Preset(16384, Shape(24, 1024, 16, 3072), Shape(3, 768, 12, 1536), 32768, 0.02, 0.002),
    document_chars=1500, window=1024, tokenizer_chars=30_000_000, train_cap_s=1e9, gate_reserve_s=50,
    gate_texts=384, gate_tokens=64, judged_documents=100, prompts=60, new_tokens=32, tuning_prompts=2,
    gammas=(2, 4, 6, 9), copy_bytes=4 << 30, cached=256, passes=(1, 2, 4, 8, 16, 32), pass_repeats=20,
    latency_prompts=4, latency_new_tokens=48,
)  # fmt: skip
# 15.5 M and 1.3 M parameters, for texts of write.py: each is a document of its own. In 8 bits both take 18 MB.
STORIES = replace(
    FULL, preset=Preset(8192, Shape(7, 384, 6, 1024), Shape(1, 128, 2, 384), 131072, 0.02, 0.003),
    document_chars=1, window=512, gate_reserve_s=40, gate_texts=256, judged_documents=300,
)  # fmt: skip
PRESETS = {"large": FULL, "stories": STORIES}
"""What ``--preset`` names."""
TINY = Sizes(
    Preset(512, Shape(4, 64, 2, 128), Shape(1, 48, 2, 96), 2048, 0.02, 0.004),
    document_chars=1500, window=128, tokenizer_chars=100_000, train_cap_s=3.0, gate_reserve_s=3, gate_texts=120,
    gate_tokens=8, judged_documents=8, prompts=2, new_tokens=6, tuning_prompts=1, gammas=(2, 4), copy_bytes=1 << 20,
    cached=16, passes=(1, 2, 4), pass_repeats=3, latency_prompts=1, latency_new_tokens=5,
)  # fmt: skip


class TimeUp(Exception):
    """The time of a stage is used up; what it has measured so far counts."""


class Clock:
    """Shares a hard limit of time among the stages.

    Args:
        began: ``time.monotonic()`` when the command began.
        limit_s: seconds from then on.
        stages: those that will run, in order.
    """

    def __init__(self, began: float, limit_s: float, stages: list[str]) -> None:
        self.began, self.end, self._stages = began, began + limit_s - min(CLOSING_S, 0.1 * limit_s), stages

    @staticmethod
    def now() -> float:
        """As deadlines count it."""
        return time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self.began

    def deadline(self, stage: str) -> float:
        """When a stage that begins now must end: its share of what is left for it and the stages after it."""
        now, later = time.monotonic(), self._stages[self._stages.index(stage) :]
        return now + max(0.0, self.end - now) * SHARES[stage] / sum(SHARES[name] for name in later)


def check_time(deadline: float, need_s: float = 0.0) -> None:
    """Raise ``TimeUp`` if less than ``need_s`` seconds are left."""
    if time.monotonic() + need_s >= deadline:
        raise TimeUp


@dataclass
class Run:
    """One call of run.py.

    Attributes:
        out: folder for the pair, the gate and the rows of single answers.
        results: folder for gpu.json and gpu.md.
        device: where the models are.
        smoke: tiny sizes.
        compile: whether layers are compiled for training.
        render: makes gpu.md from ``told``.
        told: what gpu.json holds.
        more: of the real pair, its gate and heads.
    """

    out: Path
    results: Path
    device: torch.device
    sizes: Sizes
    smoke: bool
    compile: bool
    clock: Clock
    render: Callable[[dict[str, Any]], str]
    told: dict[str, Any] = field(default_factory=lambda: {"stages": {}})
    more: dict[str, Any] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """A line of progress on stderr."""
        print(f"[{self.clock.elapsed():5.0f} s] {text}", file=sys.stderr, flush=True)

    def keep(self, stage: str, **facts: Any) -> None:
        """Add to what a stage has found, and write gpu.json and gpu.md: a killed run loses nothing that is kept."""
        self.told["stages"].setdefault(stage, {}).update(facts)
        self.told["seconds"] = round(self.clock.elapsed(), 1)
        write_atomic(self.results / "gpu.json", json.dumps(self.told, indent=1) + "\n")
        write_atomic(self.results / "gpu.md", self.render(self.told) + "\n")


def synchronise(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give back the memory of models that nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """TF32 ("high") for training alone: what is measured keeps torch's own setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def no_path(text: str) -> str:
    """A line without the folders of this machine."""
    return text.replace(str(ROOT), "REPOSITORY").replace(str(Path.home()), "~")


def first_line(error: BaseException) -> str:
    """An error in one line; its second line too, where the first is only a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return no_path(f"{type(error).__name__}: {text}"[:400])
