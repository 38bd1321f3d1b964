"""Environment of a run: machine with its instruction sets and load, versions, commit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from sprinter.engine.pair import Pair
from sprinter.engine.record import cpu_name, drafting_record, model_facts, versions
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.kernels import parameter_count

__all__ = ["BusyCores", "environment", "instruction_sets", "load_average", "pair_facts"]

_TOLD = re.compile(r"avx2|avx512f|\w*vnni|\w*bf16|amx_\w+|asimd\w*|sve2?|i8mm")
"""Instruction sets that decide how fast a kernel is, as the system names them."""


def environment(repository: Path | None = None) -> dict[str, Any]:
    """Machine, instruction sets, load, threads, versions and commit.

    Args:
        repository: git repository whose commit is recorded, "dirty" if tracked files differ from it or ``src`` has
            untracked ones; None: the one that contains this package, if there is one.
    """
    gpu = torch.cuda.is_available()
    folder = repository or Path(__file__).resolve().parent
    return {
        "cpu": cpu_name(),
        "isa": instruction_sets(),
        "load": load_average(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions(),
        "commit": (commit := _line("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")),
        "dirty": commit and _dirty(folder),
    }


def instruction_sets() -> list[str]:
    """Instruction sets of the processor that matter to kernels, sorted; empty if the system does not tell."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    flags = next((line.split(":")[1] for line in lines if line.startswith(("flags", "Features"))), "")
    return sorted({flag for flag in flags.split() if _TOLD.fullmatch(flag)})


def load_average() -> float | None:
    """Mean number of runnable processes over the last minute; None if the system does not tell."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


class BusyCores:
    """How many cores other programs keep busy, from when it was made on."""

    def __init__(self) -> None:
        self._began, self._first = time.monotonic(), self._seconds()

    def others(self) -> float | None:
        """Mean number of them; None if the system does not tell."""
        now, elapsed = self._seconds(), time.monotonic() - self._began
        if self._first is None or now is None or elapsed <= 0:
            return None
        return round(max(0.0, (now - self._first) / elapsed), 2)

    @staticmethod
    def _seconds() -> float | None:
        """Processor seconds of all programs but this one; None if the system does not tell."""
        try:
            user, nice, system, _, _, *interrupts = map(
                int, Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:8]
            )
        except (OSError, ValueError, IndexError):
            return None
        ticks = user + nice + system + sum(interrupts[:2])
        return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def pair_facts(pair: Pair) -> dict[str, dict[str, Any]]:
    """Name, hash of the weights, number of parameters and dtype of each model and head of the pair."""
    facts = {"target": model_facts(pair.models.target)}
    if pair.models.draft is not None:
        facts["draft"] = model_facts(pair.models.draft)
    for kind, head in pair.heads.items():
        facts[kind] = {
            "sha256": weights_fingerprint(head),
            "parameters": sum(p.numel() for p in head.parameters()),
            "features": list(head.features),
            "tau": head.config.tau,
        }
    if (drafting := pair.drafting) is not None:
        loaded = drafting_record(drafting)
        facts[drafting.kind] = {
            "sha256": drafting.fingerprint, "parameters": parameter_count(drafting),
            **{name: loaded[name] for name in ("dtype", "draft_vocabulary") if name in loaded},
        }  # fmt: skip
    if pair.tokenizer is not None:
        contents = [sorted(pair.tokenizer.get_vocab().items()), pair.tokenizer.chat_template]
        facts["tokenizer"] = {"sha256": hashlib.sha256(json.dumps(contents).encode()).hexdigest()}
    return facts


def _dirty(folder: Path) -> bool:
    """Whether the working tree differs from its commit; published results are no part of what runs."""
    status = ("git", "-C", str(folder), "status", "--porcelain")
    changed = _line(*status, "-uno", "--", ":/", ":(top,exclude)benchmarks/results")
    return bool(changed or _line(*status, "--", ":(top)src"))


def _line(*command: str) -> str | None:
    """First line that a command prints; None if it fails or prints nothing."""
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip().splitlines()[0] if out.returncode == 0 and out.stdout.strip() else None
