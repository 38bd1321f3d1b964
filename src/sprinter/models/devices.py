"""Devices and dtypes by name; the number of threads."""

from __future__ import annotations

import logging
import os
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sprinter.errors import UserError

__all__ = [
    "Threads", "busy_cores", "choose_threads", "cpu_flags", "device_of", "dtype_name", "dtype_of", "find_threads",
    "place_of", "refuse_moved", "usable_cores",
]  # fmt: skip

_log = logging.getLogger("sprinter")
_NAMED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # environment variables that settle the number of threads
_SAMPLES_S = (0.1, 0.2)  # time over which the use of the cores is read; the second only if they seem busy
_FREE = 0.5  # so much of a core may be busy for a thread of ours to find it free
_STAT, _QUOTA = Path("/proc/stat"), Path("/sys/fs/cgroup/cpu.max")

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def dtype_name(dtype: str | torch.dtype) -> str:
    """Full name of a dtype: torch.bfloat16, "bf16" and "bfloat16" give "bfloat16". Unknown names are returned as is."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def device_of(name: str) -> torch.device:
    """A device by its name; "auto": CUDA, else MPS, else the CPU.

    Raises:
        UserError: there is none of this name, or it cannot be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"there is no device {name!r}: use auto, cpu, cuda or mps") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not available here: use cpu, or install a CUDA build of PyTorch")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device 'mps' is not available here: use device=cpu")
    try:  # torch accepts names of devices that this build or machine lacks; meta tensors hold no numbers
        usable = device.type != "meta" and torch.empty(0, device=device) is not None
    except Exception:  # each backend raises its own error
        usable = False
    if not usable:
        raise UserError(f"device {name!r} cannot be used here: use cpu, cuda or mps")
    return device


def dtype_of(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """A dtype by its name; "auto": float32 on a CPU, "auto" elsewhere.

    Raises:
        UserError: there is none of this name.
    """
    name = dtype_name(dtype)
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in _DTYPES:
        raise UserError(f"there is no dtype {name!r}: use auto, {', '.join(_DTYPES)}, int8, int4 or gguf")
    return _DTYPES[name]


class Threads(NamedTuple):
    """Threads and cores.

    Attributes:
        now: number of threads that PyTorch, our kernels and llama.cpp use. cores: number of cores that this process may
            use, by its affinity and its cgroup. busy: of these, kept busy by other processes.
        named: an environment variable settles the number of threads.
    """

    now: int
    cores: int
    busy: float
    named: bool

    @property
    def wanted(self) -> int:
        """Number of threads that find a free core; at least 1, at most ``now``."""
        return max(1, min(self.now, round(self.cores - self.busy)))

    @property
    def disturbed(self) -> bool:
        """Whether some of the threads share a core with others."""
        return self.busy > self.cores - self.now + _FREE

    @property
    def warning(self) -> str | None:
        """What is wrong with this number of threads, which wait for each other in every pass, and what is done."""
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        busy = f"other processes keep {self.busy:.1f} of {cores} busy"
        if not self.named:
            used = f"{busy}: {self.wanted} of {self.now} threads are used (OMP_NUM_THREADS overrides this)"
            return used if self.wanted < self.now else None
        if self.now > self.cores:
            return f"{self.now} threads share {cores}: set OMP_NUM_THREADS={self.cores}"
        if self.now > self.wanted:
            return (
                f"{busy}, and {self.now} threads wait for each other: OMP_NUM_THREADS={self.wanted} may be faster "
                "meanwhile"
            )
        return None


def find_threads() -> Threads:
    """The threads of this process and what is free; takes 0.1 to 0.3 s."""
    named = any(os.environ.get(name) for name in _NAMED)
    return Threads(torch.get_num_threads(), usable_cores(), busy_cores(), named)


@cache  # once in a process: what the user sets afterwards stays
def choose_threads() -> None:
    """Use no more threads than there are free cores, unless OMP_NUM_THREADS says how many; says so in one line.

    ``torch.set_num_threads`` replaces the choice afterwards.
    """
    if torch.get_num_threads() == 1:
        return
    found = find_threads()
    if found.warning is not None:
        _log.warning("%s", found.warning)
    if not found.named:
        torch.set_num_threads(found.wanted)


def usable_cores() -> int:
    """Number of cores that this process may use: by its affinity, and by the quota of its cgroup."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, _QUOTA.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no cgroups, or "max"
        return cores
    return max(1, min(cores, quota // period))


def busy_cores() -> float:
    """Number of this process's cores that others keep busy now; 0.0 where the system does not tell."""
    least = float("inf")
    for seconds in _SAMPLES_S:
        before, own = _used(), time.process_time()
        time.sleep(seconds)
        after, own = _used(), time.process_time() - own
        used = sum(
            (after[core][0] - busy) / max(1, after[core][1] - total)
            for core, (busy, total) in before.items()
            if core in after
        )
        least = min(least, max(0.0, used - own / seconds))
        if least < _FREE:
            break
    return least


def _used() -> dict[int, tuple[int, int]]:
    """By core of this process, its busy and all its ticks so far; {} where the system does not tell."""
    try:
        lines = _STAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    found = {}
    for name, *ticks in (line.split() for line in lines if line.startswith("cpu") and line[3:4].isdigit()):
        times = [int(one) for one in ticks[:8]]  # user nice system idle iowait irq softirq steal
        if own is None or int(name[3:]) in own:
            found[int(name[3:])] = (sum(times) - times[3] - times[4], sum(times))
    return found


def place_of(model: Any) -> str:
    """Dtype and device of a transformers model, in words."""
    return f"{dtype_name(model.dtype)} on {model.device}"


def refuse_moved(model: Any, was: str, error: RuntimeError) -> None:
    """After a pass of a model failed over caches that were made where it ``was`` (``place_of``).

    Raises:
        UserError: it is somewhere else now.
    """
    if (now := place_of(model)) != was:
        raise UserError(
            f"{type(model).__name__} was moved from {was} to {now} while caches hold texts: close engines and "
            "streams, call pair.reload(), and begin the texts anew"
        ) from error


def cpu_flags() -> str:
    """The instruction sets that a compiler may use on this CPU."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        machine = os.uname().machine if hasattr(os, "uname") else ""
        return f"{torch.backends.cpu.get_cpu_capability()} {machine}"
    lines = path.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
