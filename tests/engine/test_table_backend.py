"""A new backend is one file: texts alone, in batches and from the server, by every kind of method, and their law."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.blocks import run_here
from tests.engine.joint_laws import distance, law_of_texts
from tests.engine.table_backend import TableModel
from tests.models.tiny import word_tokenizer
from tests.serve.server import serving

import sprinter
from sprinter.decode.enumerate import EnumeratedDraws
from sprinter.decode.spec import parse_method
from sprinter.engine.executor import Executor
from sprinter.models.choose import make_runner

WORDS = 12
METHODS = (
    "speculative(gamma=3)", "svip(h=0.4)", "lookup(n=2, gamma=3)", "tree(expand=2, depth=2, nodes=3)",
    "specinfer(drafts=2, gamma=2)", "traversal(widths=2x1)",
)  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    target, draft = TableModel(WORDS, 1, eos=0), TableModel(WORDS, 2, eos=0)
    return sprinter.load_pair(target, draft, tokenizer=word_tokenizer(WORDS))


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


def test_it_is_one_short_file() -> None:
    source = Path(__file__).with_name("table_backend.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 120


def test_the_line_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = run_here("docs/adding-a-backend.md", __file__)
    monkeypatch.chdir(tmp_path)
    word_tokenizer(WORDS).save_pretrained("directory")
    made: dict[str, Any] = {
        "sprinter": sprinter,
        "MyModel": lambda _: TableModel(WORDS, 1, eos=0),
        "MyDraft": lambda _: TableModel(WORDS, 2, eos=0),
    }
    exec(line, made)
    assert (
        made["pair"].generate("w1 w2", method="speculative(gamma=3)", max_new_tokens=8).stats.target_calls > 0
    )


@pytest.mark.parametrize("method", [*METHODS, "auto", "certain(threshold=0.5)"])
def test_texts_alone_and_in_a_batch(pair: sprinter.Pair, method: str) -> None:
    options = {"method": method, "max_new_tokens": 24, "stop": ["w0"], "meter": "complete"}
    prompts = [[1 + i, 2, 3, 1 + i, 2] for i in range(8)]
    alone = [pair.generate(prompt, seed=i, never_slower=False, **options) for i, prompt in enumerate(prompts)]
    batch = pair.generate_batch(prompts, seed=list(range(8)), never_slower=False, rows=8, **options)
    assert list(map(ids, batch)) == list(map(ids, alone))
    assert all(one.stats.drift_coverage == 1.0 for one in batch)
    if not method.startswith("certain"):
        greedy, plain = (
            pair.generate(prompts[0], method=one, max_new_tokens=24, temperature=0.0)
            for one in (method, "autoregressive")
        )
        assert ids(greedy) == ids(plain)


def test_what_a_text_has_read_is_not_read_again(pair: sprinter.Pair) -> None:
    prompt = [1 + i % (WORDS - 1) for i in range(300)]
    pair.clear_prefix_cache()
    first, again = (
        pair.generate(prompt, method="speculative(gamma=3)", max_new_tokens=4, seed=1) for _ in range(2)
    )
    assert ids(first) == ids(again) and (first.stats.cached_tokens, again.stats.cached_tokens) == (0, 256)


def test_the_server_serves_it(pair: sprinter.Pair) -> None:
    with serving(pair, rows=4) as server:
        body = {
            "prompt": "w1 w2 w3",
            "max_tokens": 8,
            "seed": 3,
            "sprinter": {"method": "speculative(gamma=3)"},
        }
        answer = server.post("/v1/completions", body).json()
    wanted = pair.generate("w1 w2 w3", method="speculative(gamma=3)", max_new_tokens=8, seed=3)
    assert answer["choices"][0]["text"] == wanted.text


@pytest.mark.parametrize("name", METHODS)
def test_the_law_of_texts_through_the_executor(name: str) -> None:
    """Every draw enumerated: the law of exact methods is the table's own."""
    method, models = parse_method(name), (TableModel(3, 1), TableModel(3, 2))
    runners = [make_runner(model, max_len=24, leaves=4) for model in models]
    found = law_of_texts(Executor(runners[0], runners[1], 3), {}, method, 3, 2, EnumeratedDraws())
    prompt, wanted = (0, 1, 0, 1, 0), Counter[tuple[int, ...]]()
    for a in range(3):
        for b in range(3):
            for c in range(3):
                text, chance = prompt, 1.0
                for x in (a, b, c):
                    chance *= float(torch.softmax(models[0].logits(text), -1)[x])
                    text = (*text, x)
                wanted[a, b, c] += chance
    assert distance(found, dict(wanted)) < 1e-9
