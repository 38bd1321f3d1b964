"""The server with a pair that has no draft model: heads on the target draft, for several requests at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.heads.test_medusa import medusa
from tests.serve.server import serving

import sprinter
from sprinter.models.pair import builtin_paths


def test_requests_at_once_have_the_texts_that_they_have_alone() -> None:
    heads = medusa(hidden=576, vocab=8192, accuracies=((0.5, 0.3, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.1)))
    pair = sprinter.load_pair(builtin_paths()["target"], heads=[heads], compile=False)
    prompts = ["The town", "A river flows", "In 1912 the", "Music"]
    methods = ["medusa(nodes=6)", "heads(gamma=3)", None, "autoregressive"]
    alone = [
        pair.generate(prompt, method=method, max_new_tokens=12, seed=5)
        for prompt, method in zip(prompts, methods, strict=True)
    ]
    with serving(pair, rows=4) as server:

        def ask(prompt: str, method: str | None) -> tuple[str, str]:
            body = {"model": "builtin", "prompt": prompt, "max_tokens": 12, "seed": 5}
            own = {} if method is None else {"sprinter": {"method": method}}
            (choice,) = server.post("/v1/completions", {**body, **own}).json()["choices"]
            return choice["text"], choice["sprinter"]["method"]

        with server.http() as client:
            (told,) = client.get("/v1/models").json()["data"]
        assert told["sprinter"]["heads"] == ["medusa"] and told["sprinter"]["draft"] is None
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(ask, prompts, methods))
    assert found == [(one.text, one.method) for one in alone]
    assert found[2][1] == "heads(gamma=4)", "the default of a pair with heads that draft"
