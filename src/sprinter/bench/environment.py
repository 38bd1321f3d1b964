"""Environment of a run: machine, versions, commit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

import sprinter
from sprinter.engine.pair import Pair
from sprinter.engine.record import cpu_name, drafting_record
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.pair import LoadedModel
from sprinter.models.quantised.layers import parameter_count

__all__ = ["environment", "pair_facts"]


def environment(repository: Path | None = None) -> dict[str, Any]:
    """Machine, threads, versions and commit.

    Args:
        repository: git repository whose commit is recorded, with "+" appended if tracked files differ; None: the one
            that contains this package, if there is one.
    """
    gpu = torch.cuda.is_available()
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sprinter": sprinter.__version__,
        "commit": _commit(repository or Path(__file__).resolve().parent),
    }


def pair_facts(pair: Pair) -> dict[str, dict[str, Any]]:
    """Name, hash of the weights, number of parameters and dtype of each model and head of the pair."""
    facts = {"target": _model_facts(pair.models.target)}
    if pair.models.draft is not None:
        facts["draft"] = _model_facts(pair.models.draft)
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


def _model_facts(model: LoadedModel) -> dict[str, Any]:
    return {
        "name": Path(model.id).name if Path(model.id).exists() else model.id,  # no local paths
        "revision": model.revision,
        **({} if model.compile is None else {"compile": model.compile}),
        "sha256": weights_fingerprint(model.model),
        "parameters": model.size,
        "dtype": model.weights,
        **({} if model.words is None else {"draft_vocabulary": model.words}),
        "context": model.context,
        "vocab_size": model.vocab_size,
    }


def _commit(folder: Path) -> str | None:
    commit = _line("git", "-C", str(folder), "rev-parse", "--short", "HEAD")
    changed = commit and _line(
        "git",
        "-C",
        str(folder),
        "status",
        "--porcelain",
        "-uno",
        "--",
        ":/",
        ":(top,exclude)benchmarks/results",
    )
    return f"{commit}+" if changed else commit


def _line(*command: str) -> str | None:
    """First line that a command prints; None if it fails or prints nothing."""
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip().splitlines()[0] if out.returncode == 0 and out.stdout.strip() else None
