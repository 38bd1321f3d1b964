"""A streamed chat with a method of its own: python openai_client.py "Why is the sky blue?" "certain(threshold=1.0)"

pip install openai; the server: sprinter serve --target TARGET --draft DRAFT
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SPRINTER_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("SPRINTER_KEY", "none"),
)
question = sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?"
method = sys.argv[2] if len(sys.argv) > 2 else None
events = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": question}],
    max_tokens=128,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"sprinter": {"method": method}} if method else None,
)
for event in events:
    for choice in event.choices:
        print(choice.delta.content or "", end="", flush=True)
    if report := (event.model_extra or {}).get("sprinter"):
        drift = "unknown" if report["mean_drift"] is None else f"{report['mean_drift']:.3f}"
        print(
            f"\n\n{report['method']}: {report['new_tokens']} tokens, {report['target_calls']} target calls, "
            f"drift {drift} (known for {report['coverage']:.0%}), {'lossless' if report['lossless'] else 'lossy'}"
        )
