"""Our server in Ray Serve with two replicas, and what the manifest for Kubernetes asks of the server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.blocks import commands, run_here
from typer.testing import CliRunner

import sprinter
from sprinter.cli.app import app as command_line

ROOT = Path(__file__).parents[2]
RUN = """
import time, httpx2, ray
from ray import serve
from examples.ray.serve_app import app

for left in (2, 1, 0):  # a busy machine starts Ray too slowly for it
    try:
        ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR")
        break
    except Exception:
        if not left:
            raise
serve.start(http_options={"port": PORT})
serve.run(app(ARGS))
http = httpx2.Client(base_url="http://127.0.0.1:PORT", timeout=120, trust_env=False)
asked = {"prompt": "The river rises", "max_tokens": 12, "temperature": 0}

def post(session):
    for _ in range(200):
        answer = http.post("/v1/completions", json=asked, headers={"serve_multiplexed_model_id": session})
        if answer.status_code != 503:
            return answer.json()
        time.sleep(0.2)

texts = {post(str(i % 3))["choices"][0]["text"] for i in range(9)}
replicas = serve.status().applications["default"].deployments["Sprinter"].replica_states
print("TOLD", len(texts), dict(replicas), "vllm:num_requests_waiting" in http.get("/metrics").text)
serve.shutdown()
"""


def test_two_replicas() -> None:
    """By the arguments of the page's line, but for the built-in pair and no GPU; two rows, so that texts wait."""
    pytest.importorskip("ray.serve", exc_type=ImportError)
    (block,) = {*run_here("docs/deploy.md", __file__), *run_here("examples/ray/README.md", __file__)}
    install, line = commands(block)
    assert install == "pip install 'ray[serve]'" and line.startswith("serve run examples.ray.serve_app:app ")
    args = dict(word.split("=") for word in line.split()[3:]) | {
        "replicas": "2",
        "num_cpus": "0.5",
        "rows": "2",
    }
    assert args.pop("num_gpus") == "1"
    args |= {name: str(sprinter.builtin_paths()[name]) for name in ("target", "draft")}
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", RUN.replace("PORT", str(port)).replace("ARGS", repr(args))],
        cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    told = [line for line in ended.stdout.splitlines() if line.startswith("TOLD")]
    assert told, ended.stderr[-2000:]
    assert (
        told[0].startswith("TOLD 1 ")
        and "RUNNING" in told[0]
        and ": 2" in told[0]
        and told[0].endswith("True")
    )


def manifest() -> dict[str, Any]:
    whole = yaml.safe_load_all((ROOT / "examples/ray/kubernetes.yaml").read_text(encoding="utf-8"))
    return {one["kind"]: one for one in whole}


def test_the_manifest_asks_what_the_server_has() -> None:
    found = manifest()
    assert set(found) == {"Deployment", "Service", "HorizontalPodAutoscaler"}
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    shown = CliRunner().invoke(command_line, ["serve", "--help-all"]).output
    assert all(word in shown for word in container["args"] if word.startswith("--"))
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    served = (ROOT / "src/sprinter/serve/app.py").read_text(encoding="utf-8")
    assert paths == {"/ready", "/health"} and all(f'@app.get("{path}"' in served for path in paths)
    metric = found["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    gauges = (ROOT / "src/sprinter/serve/prometheus.py").read_text(encoding="utf-8")
    assert metric.removeprefix("vllm:") in gauges
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert (
        found["Service"]["spec"]["selector"]
        == labels
        == found["Deployment"]["spec"]["selector"]["matchLabels"]
    )
