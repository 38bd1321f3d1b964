"""Ray Serve LLM and Ray Data with our methods inside vLLM: what they accept, and both for real on a CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for needed in ("vllm", "ray.serve", "pyarrow"):
    pytest.importorskip(needed, exc_type=ImportError)

ROOT = Path(__file__).parents[2]
METHODS = ("autoregressive", "svip", "speculative(gamma=4)", "lookup")
RUN = """
import json, sys, httpx2, ray
from ray import serve
from ray.serve.llm import build_openai_app
from examples.ray.vllm_app import batches, config
from sprinter import builtin_paths

METHODS, PORT = json.loads(sys.argv[1]), int(sys.argv[2])
PATHS = [str(builtin_paths()[name]) for name in ("target", "draft", "gate")]
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4, "block_size": 32,
          "kv_cache_memory_bytes": 32 << 20}
LITTLE = {"placement_group_config": {"bundles": [{"CPU": 0.25}]}}
for left in (2, 1, 0):  # a busy machine starts Ray too slowly for it
    try:
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=100 << 20)
        break
    except Exception:
        if not left:
            raise

rows = [{"prompt": "The river rises", "max_tokens": 12, "method": method} for method in METHODS]
local = ENGINE | {"distributed_executor_backend": "mp"}
processor = batches(*PATHS, engine=local, batch_size=4, concurrency=1, **LITTLE)
made = processor(ray.data.from_items(rows)).take_all()
print("DATA", json.dumps({row["method"]: row["text"] for row in made}), flush=True)

serve.start(http_options={"port": PORT})
own = config(*PATHS, engine=ENGINE, accelerator_config={"kind": "cpu"}, **LITTLE,
             deployment_config={"ray_actor_options": {"num_cpus": 0.25}})
ingress = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}}
serve.run(build_openai_app({"llm_configs": [own], "ingress_deployment_config": ingress}))
http = httpx2.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120, trust_env=False)
texts = {}
for method in (*METHODS, json.dumps({"method": "sprinter", "budget": 0.05})):
    body = {"model": "model", "prompt": "The river rises", "max_tokens": 12, "temperature": 0,
            "vllm_xargs": {"sprinter": method}}
    answers = [http.post("/v1/completions", json=body).json() for _ in range(3)]
    texts[method] = sorted({answer["choices"][0]["text"] for answer in answers})
refused = http.post("/v1/completions", json={**body, "vllm_xargs": {"sprinter": "tree"}}).status_code
replicas = serve.status().applications["default"].deployments["LLMServer:model"].replica_states
print("SERVE", json.dumps([texts, {str(state): n for state, n in replicas.items()}, refused]), flush=True)
serve.shutdown()
ray.shutdown()
"""


def test_what_they_accept() -> None:
    """Recipes of docs/vllm.md: Ray Serve LLM reads our arguments as its own and vLLM's, and asks for all GPUs."""
    from examples.ray.vllm_app import config
    from vllm.engine.arg_utils import AsyncEngineArgs

    sizes = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    found = config("org/target", "org/draft", method="svip", engine=sizes).get_engine_config()
    assert found.placement_bundles == [{"GPU": 1}] * 16
    given = found.get_initialization_kwargs()
    args = AsyncEngineArgs(**given)
    assert (
        args.worker_cls == "sprinter.doors.vllm.worker.Worker" and args.distributed_executor_backend == "ray"
    )
    assert args.additional_config == {"sprinter": {"draft": "org/draft", "method": "svip"}}
    with pytest.raises(ValueError, match="Unknown engine argument"):
        config("org/target", "org/draft", engine={"gamma": 4}).get_engine_config()


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    env = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0",
    }  # fmt: skip
    command = [sys.executable, "-c", RUN, json.dumps(METHODS), str(port)]
    ended = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    lines = [line.partition(" ") for line in ended.stdout.splitlines()]
    found = {name: json.loads(rest) for name, _, rest in lines if name in ("DATA", "SERVE")}
    assert len(found) == 2, ended.stderr[-2000:]
    return found


@pytest.mark.timeout(600)
def test_two_replicas_answer_by_the_method_that_a_request_names(told: dict[str, Any]) -> None:
    texts, replicas, refused = told["SERVE"]
    assert {*texts} > {*METHODS} and texts["autoregressive"][0]
    assert all(texts[method] == texts["autoregressive"] and len(texts[method]) == 1 for method in METHODS)
    assert replicas == {"RUNNING": 2} and refused == 400


@pytest.mark.timeout(600)
def test_rows_of_ray_data_have_methods(told: dict[str, Any]) -> None:
    texts = told["DATA"]
    assert {*texts} == {*METHODS} and {*texts.values()} == {*told["SERVE"][0]["autoregressive"]}
