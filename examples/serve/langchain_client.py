"""LangChain: a streamed chat with a method of its own: python langchain_client.py "Why is the sky blue?"

pip install langchain-openai; the server: sprinter serve --target TARGET --draft DRAFT
"""

from __future__ import annotations

import os
import sys

from langchain_openai import ChatOpenAI
from openai import OpenAI

url = os.environ.get("SPRINTER_URL", "http://127.0.0.1:8000/v1")
key = os.environ.get("SPRINTER_KEY", "none")
model = ChatOpenAI(
    base_url=url,
    api_key=key,  # type: ignore[arg-type]
    model=OpenAI(base_url=url, api_key=key).models.list().data[0].id,
    max_completion_tokens=128,
    stream_usage=True,  # which LangChain asks OpenAI's own address for, and no other
    extra_body={"sprinter": {"method": os.environ.get("SPRINTER_METHOD", "svip")}},
)
usage = None
for part in model.stream(sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?"):
    print(part.content, end="", flush=True)
    usage = part.usage_metadata or usage
print(f"\n\n{usage['output_tokens'] if usage else 'unknown'} tokens")
