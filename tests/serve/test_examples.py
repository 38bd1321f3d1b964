"""The examples of examples/serve: clients run against a server, deployments name what there is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.serve.server import Running

import sprinter

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "serve"


def run(command: list[str], server: Running) -> subprocess.CompletedProcess[str]:
    given = {
        "SPRINTER_URL": server.url,
        "NO_PROXY": "*",
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
    }
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=False)


def test_the_openai_client(server: Running, pair: sprinter.Pair) -> None:
    script = FOLDER / "openai_client.py"
    ended = subprocess.run(
        [sys.executable, str(script), "Why", "certain(threshold=1.0)"],
        env={**os.environ, "SPRINTER_URL": f"{server.url}/v1", "NO_PROXY": "*"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert re.search(
        r"\ncertain\(.*\): \d+ tokens, \d+ target calls, drift 0\.\d{3} \(known for \d+%\), lossy\n$",
        ended.stdout,
    )


def test_the_completion(server: Running) -> None:
    ended = subprocess.run(
        [sys.executable, str(FOLDER / "completion.py"), "The river", "certain(threshold=1.0)"],
        env={**os.environ, "SPRINTER_URL": f"{server.url}/v1", "NO_PROXY": "*"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"\n\ncertain\(.*\): \d+ target calls for \d+ tokens\n$", ended.stdout)


def test_the_langchain_client(server: Running) -> None:
    pytest.importorskip("langchain_openai", reason="it is not a dependency of the tests")
    ended = subprocess.run(
        [sys.executable, str(FOLDER / "langchain_client.py"), "Why"],
        env={**os.environ, "SPRINTER_URL": f"{server.url}/v1", "NO_PROXY": "*"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"\n\n\d+ tokens\n$", ended.stdout)


def test_the_chat_template(server: Running, template: Any) -> None:
    """A call that is asked for, and its result in the next turn."""
    template((FOLDER / "chat.jinja").read_text())
    day = {"type": "object", "properties": {"day": {"enum": ["today", "tomorrow"]}}, "required": ["day"]}
    body = {
        "messages": [{"role": "user", "content": "Is it sunny?"}], "max_tokens": 64,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": day}}],
    }  # fmt: skip
    path = "/v1/chat/completions"
    said = server.post(path, body).json()["choices"][0]
    (call,) = said["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"])["day"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    messages = [*body["messages"], said["message"], result]
    again = {**body, "messages": messages, "tool_choice": "none", "max_tokens": 8, "ignore_eos": True}
    after = server.post(path, again)
    assert after.status_code == 200 and after.json()["choices"][0]["message"]["content"], after.text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "sprinter.service"
    text = (FOLDER / "sprinter.service").read_text()
    assert "/opt/sprinter/bin/sprinter serve" in text
    unit.write_text(text.replace("/opt/sprinter/bin/sprinter", "/bin/true"))  # a program that there is
    ended = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0 and not ended.stderr, ended.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(server: Running) -> None:
    ended = run(["sh", str(FOLDER / "curl.sh")], server)
    assert ended.returncode == 0, ended.stderr
    first, second, refused, *metrics = ended.stdout.splitlines()
    assert json.loads(first)["choices"][0]["sprinter"]["lossless"] is True
    assert json.loads(second)["choices"][0]["sprinter"]["method"].startswith("certain(")
    assert "lossless" in json.loads(refused)["error"]["message"]
    assert any(line.startswith("vllm:spec_decode_num_drafts_total") for line in metrics)


def test_the_dashboard_asks_for_metrics_that_there_are(server: Running) -> None:
    server.post("/v1/completions", {"prompt": "A", "max_tokens": 8, "sprinter": {"method": "speculative"}})
    with server.http() as client:
        scraped = set(re.findall(r"^([a-z_:]+)(?:\{| )", client.get("/metrics").text, flags=re.MULTILINE))
    panels = json.loads((FOLDER / "grafana" / "dashboards" / "sprinter.json").read_text())["panels"]
    asked = {
        name
        for panel in panels
        for one in panel["targets"]
        for name in re.findall(r"(?:sprinter_|vllm:)\w+", one["expr"])
    }
    assert len(panels) == 10 and asked and asked <= scraped


def test_deployments_name_files_and_options_that_there_are() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    mounted = [
        volume.split(":")[0] for one in compose["services"].values() for volume in one.get("volumes", ())
    ]
    made = {"./keys", "./prometheus.key"}  # by the user: secrets
    assert {"./prometheus.yml", "./grafana/dashboards"} <= set(mounted)
    assert all((FOLDER / path).exists() for path in set(mounted) - made)
    assert compose["services"]["sprinter"]["read_only"] is True
    docker = (FOLDER / "Dockerfile").read_text()
    assert re.search(r"^USER (?!0)\d+$", docker, flags=re.MULTILINE) and docker.index("USER") < docker.index(
        "ENTRYPOINT"
    )
    told = subprocess.run(
        [sys.executable, "-m", "sprinter", "serve", "--help"], capture_output=True, text=True, check=True
    )
    for text in (
        docker,
        (FOLDER / "sprinter.service").read_text(),
        json.dumps(compose["services"]["sprinter"]),
    ):
        for option in re.findall(r"(?<![\w-])--(?:host|port|api-keys|target|draft|rows)\b", text):
            assert option in told.stdout
    for file in FOLDER.glob("*.sh"):
        assert subprocess.run(["sh", "-n", str(file)], check=False).returncode == 0 and os.access(
            file, os.X_OK
        )
    listed = set(re.findall(r"^\| `([\w.]+)`", (FOLDER / "README.md").read_text(), flags=re.MULTILINE))
    others = {"README.md", "prometheus.yml", "grafana", "Dockerfile.dockerignore"}
    assert listed == {path.name for path in FOLDER.iterdir()} - others
