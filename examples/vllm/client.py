"""Two methods from one vLLM server, and what it reports of each request: ``python client.py [http://host:8000]``."""

import json
import sys

import requests
from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
for sprinter in ("svip", json.dumps({"method": "sprinter", "budget": 0.05})):
    answer = client.completions.create(
        model=model, prompt="The river", max_tokens=64, extra_body={"vllm_xargs": {"sprinter": sprinter}}
    )
    reports = requests.get(f"{url}/sprinter/requests", params={"id": answer.id}, timeout=10).json()
    for report in reports.values():
        print(
            report["method"],
            report["tokens_per_target_call"],
            report["mean_drift"],
            repr(answer.choices[0].text[:60]),
        )
