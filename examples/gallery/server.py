"""Server and client: a stream of OpenAI's client, each event with its tokens. pip install '.[serve]' openai"""

import socket
import subprocess
import sys
import time

import draw
import openai

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen([sys.executable, "-m", "sprinter", "serve", "--port", str(port), "--rows", "2"])
try:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    for _ in range(600):
        try:
            model = client.models.list().data[0].id
            break
        except (openai.APIConnectionError, openai.InternalServerError):  # it is still loading
            assert server.poll() is None, "the server has ended"
            time.sleep(0.2)
    shown = {}
    for method in ("speculative(gamma=4)", "sprinter(tail=3)"):
        events = client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=40, seed=3, stream=True,
            extra_body={"sprinter": {"method": method, "tokens": True}},
        )  # fmt: skip
        tokens, count = [], 0
        for event in events:
            more = (event.model_extra or {}).get("sprinter") or {}
            tokens += [(token["text"], token["origin"]) for token in more.get("tokens", [])]
            count += bool(more.get("tokens"))
        shown[f"{method}: {len(tokens)} tokens in {count} events"] = tokens
finally:
    server.terminate()
    server.wait(30)
draw.texts("server", shown)
