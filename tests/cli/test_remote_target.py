"""A target on a server through the commands: chat, bench and serve take its address as they take a folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.blocks import run_here
from tests.cli.tiny import Places, Run
from tests.serve.server import Running, serving, until

import sprinter

ASKED = {"round_trips", "paid_tokens", "sent_bytes", "received_bytes"}


@pytest.fixture(scope="module")
def server(places: Places) -> Iterator[Running]:
    with serving(sprinter.load_pair(places.target), model_name="large", max_len=512) as found:
        yield found


@pytest.fixture
def remote(server: Running, places: Places) -> list[str]:
    return ["--target", f"{server.url}/v1#large", "--draft", str(places.draft), "--gate", str(places.gate)]


def test_a_chat_of_two_turns(
    run: Run, places: Places, remote: list[str], template: str, tmp_path: Path
) -> None:
    """Answers are those of the target in this process; of the second turn only what is new is paid for."""
    script = b"Hello\n/method sprinter(tau=0.5)\nAnd again?\n"
    answers = []
    for models in (remote, places.gated):
        status, out, err = run(
            "chat", *models, "--template", template, "-n", "12", "--seed", "3", "--json", stdin=script
        )
        assert status == 0 and "error" not in err
        answers.append(json.loads(out))
    there, here = answers
    assert there["messages"] == here["messages"] and len(there["messages"]) == 4
    first, second = (answer["stats"] for answer in there["answers"])
    assert first["remote"].keys() == second["remote"].keys() == ASKED
    assert first["remote"]["paid_tokens"] >= first["new_tokens"] + 20  # its prompt has 23 tokens
    assert second["cached_tokens"] > 0
    assert second["remote"]["paid_tokens"] < first["remote"]["paid_tokens"] + second["cached_tokens"]
    assert "remote" not in here["answers"][0]["stats"]
    status, _, err = run("chat", *remote, "--template", template, "-n", "4", stdin=b"Hello\n")
    assert status == 0 and "round trips" in err and "tokens paid" in err


def test_the_block_of_the_page(server: Running, places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = run_here("docs/remote.md", __file__)
    for name, own in (
        ("https://host:8000", server.url),
        ("org/small", places.draft),
        ('"dir"', f'"{places.gate}"'),
    ):
        assert name in block
        block = block.replace(name, str(own))
    made: dict[str, Any] = {"sprinter": sprinter}
    exec(block, made)
    assert made["out"].stats.remote["round_trips"] > 0 < made["out"].stats.new_tokens
    assert capsys.readouterr().out.count("\n") == 2


def test_a_bench_of_two_arms(run: Run, remote: list[str], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "The river"}\n{"prompt": "A house"}\n')
    out = tmp_path / "out"
    arms = ["-a", "autoregressive", "-a", "speculative(gamma=3)"]
    more = ["-s", str(tmp_path / "p.jsonl"), "-n", "12", "-t", "0", "--no-analysis", "-o", str(out)]
    ended = run("bench", *remote, *more, *arms, "--json")
    assert ended.status == 0, ended.err
    assert {arm["name"]: arm["status"] for arm in json.loads(ended.out)["arms"]} == dict.fromkeys(
        ("autoregressive", "speculative(gamma=3)"), "ok"
    )
    results = json.loads((out / "results.json").read_text())
    assert (
        [row["model_id"] for row in results["rows"]].count("autoregressive") == 2 == len(results["rows"]) / 2
    )
    for row in results["rows"]:
        asked, (calls,) = row["remote"], row["target_calls"]
        assert asked.keys() == ASKED and asked["round_trips"] == calls and asked["paid_tokens"] >= 12
        assert asked["received_bytes"] >= 4 * 256 * calls and asked["sent_bytes"] > 0
    plain, exact = results["summary"]
    assert plain["round_trips_per_token"] == 1 and 0 < exact["round_trips_per_token"] <= 1
    for one in (plain, exact):
        assert one["bytes_per_token"] > 4 * 256 and one["paid_per_token"] >= 1
    page = (out / "report.html").read_text()
    assert all(head in page for head in ("round trips / token", "bytes / token", "paid / token"))


def test_a_proxy_before_it(
    server: Running, remote: list[str], tmp_path: Path, environment: dict[str, str]
) -> None:
    """``sprinter serve`` with a served target: answers are the target's own, and /metrics says what they cost."""
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "sprinter",
        "serve",
        *remote,
        "--port",
        "0",
        "--max-len",
        "256",
        "--rows",
        "2",
    ]
    with log.open("w") as stderr:
        proxy = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
    try:

        def port() -> int | None:
            found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
            return next((line["port"] for line in found if line["event"] == "listening"), None)

        until(port, 60)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port()}", trust_env=False, timeout=60) as http:
            until(lambda: http.get("/ready").status_code == 200, 60)
            body = {"prompt": "The river", "max_tokens": 12, "temperature": 0}
            made = http.post(
                "/v1/completions", json={**body, "sprinter": {"method": "speculative(gamma=3)"}}
            ).json()
            own = server.post("/v1/completions", body).json()
            assert made["choices"][0]["text"] == own["choices"][0]["text"]
            metrics = http.get("/metrics").text
        proxy.send_signal(signal.SIGTERM)
        assert proxy.wait(30) == -signal.SIGTERM
    finally:
        proxy.kill()
        proxy.wait(30)
    told = {
        line.partition('what="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("sprinter_remote_total{")
    }
    assert told.keys() == ASKED and told == made["choices"][0]["sprinter"]["remote"]
    assert told["paid_tokens"] >= 9 + 12 - 1 and told["round_trips"] <= 12
