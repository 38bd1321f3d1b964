"""LangChain: python langchain_client.py "Why is the sky blue?"

pip install langchain-openai; the server: sprinter serve --target TARGET --draft DRAFT
"""

from __future__ import annotations

import os
import sys

from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url=os.environ.get("SPRINTER_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("SPRINTER_KEY", "none"),  # type: ignore[arg-type]
    model=os.environ.get("SPRINTER_MODEL", ""),
    max_completion_tokens=128,
    extra_body={"sprinter": {"method": os.environ.get("SPRINTER_METHOD", "svip")}},
)
for part in model.stream(sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?"):
    print(part.content, end="", flush=True)
print()
