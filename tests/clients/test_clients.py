"""Clients as their users have them, each in an environment of its own, against a server of the built-in pair.

``make test-clients`` makes the environments (``scripts/environments.py``); elsewhere these tests are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serve.server import TEMPLATE, Running, builtin_pair, serving

import sprinter

HERE = Path(__file__).parent
ENVIRONMENTS = os.environ.get("SPRINTER_CLIENTS")
pytestmark = pytest.mark.skipif(
    ENVIRONMENTS is None, reason="there is no environment of clients: make test-clients"
)
TOOLS = TEMPLATE + "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{# 'tool' tool_calls #}"
BODIES: dict[str, tuple[str, dict[str, Any]]] = json.loads((HERE / "bodies.json").read_text())


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    found = builtin_pair()
    assert found.tokenizer is not None
    found.tokenizer.chat_template = TOOLS
    return found


@pytest.fixture(scope="module")
def server(pair: sprinter.Pair) -> Iterator[Running]:
    with serving(pair, rows=4, max_len=512) as found:
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


@pytest.mark.parametrize("name", BODIES)
def test_a_body_as_a_client_sends_it(server: Running, name: str) -> None:
    path, body = BODIES[name]
    answer = server.post(path, body | {"seed": 1})
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
    else:
        assert answer.json()["choices"][0]["message"]["content"]
