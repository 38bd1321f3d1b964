"""A completion with a method of its own: python completion.py "Once upon a time" "certain(threshold=1.0)"

pip install openai; the server: sprinter serve
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SPRINTER_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("SPRINTER_KEY", "none"),
)
answer = client.completions.create(
    model=client.models.list().data[0].id,
    prompt=sys.argv[1] if len(sys.argv) > 1 else "Once upon a time, there was a little",
    max_tokens=48,
    extra_body={"sprinter": {"method": sys.argv[2]}} if len(sys.argv) > 2 else None,
)
(choice,) = answer.choices
report = (choice.model_extra or {})["sprinter"]
print(choice.text)
print(f"\n{report['method']}: {report['target_calls']} target calls for {report['new_tokens']} tokens")
