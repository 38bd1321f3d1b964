"""``sprinter serve`` as a process: it loads, serves, drains on SIGTERM, and says why it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.serve.server import until

from sprinter.cli import main

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.mark.slow
def test_a_process_serves_and_drains(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "sprinter", "serve", "--port", "0", "--max-len", "512", "--rows", "2"]
    environment = os.environ | {"PYTHONPATH": str(SRC), "SPRINTER_CACHE": str(tmp_path / "cache")}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
    try:

        def lines(event: str) -> list[dict[str, Any]]:
            found = [json.loads(line) for line in log.read_text().splitlines()]
            return [line for line in found if line["event"] == event]

        until(lambda: lines("listening"), 60)
        url = f"http://127.0.0.1:{lines('listening')[0]['port']}"
        with httpx2.Client(base_url=url, trust_env=False, timeout=60) as http:
            until(lambda: http.get("/ready").status_code == 200, 60)
            body = {
                "prompt": "Xanadu",
                "max_tokens": 300,
                "seed": 1,
                "stream": True,
                "sprinter": {"speculation": False},
            }
            with http.stream("POST", "/v1/completions", json=body) as answer:
                events = answer.iter_lines()
                assert next(events).startswith("data: ")
                process.send_signal(signal.SIGTERM)
                rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] and last["sprinter"]["new_tokens"] > 50
        assert process.wait(30) == -signal.SIGTERM  # uvicorn ends by the signal that it was sent
    finally:
        process.kill()
        process.wait(30)
    assert [line["status"] for line in lines("request") if line["path"] == "/v1/completions"] == [200]
    assert "Xanadu" not in log.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "is reached by other machines"),
        (["--api-keys", "/nothing/keys"], "the file of keys /nothing/keys cannot be read"),
        (["--tls-cert", "x"], "--tls-cert FILE and --tls-key FILE go together"),
        (["--target", "/nothing/here"], "/nothing/here"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(options: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *options]) == 2
    error = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("{")]
    assert len(error) == 1 and message in error[0]
