"""Joint laws through llama.cpp: every random draw of the real engine on tiny GGUF pairs, enumerated, for every method.

The reference is the same loop on laws that transformers' uncached passes give; lossless methods must write the target's
own law besides. All in float32, so laws of texts agree to 1e-5 and not to 1e-9.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, tiny_llama
from tests.models.tiny import uncached
from torch import Tensor

from sprinter.decode.draft import Record
from sprinter.decode.enumerate import EnumeratedDraws, joint_law, target_joint_law
from sprinter.decode.loop import Limits, decode
from sprinter.decode.methods import METHODS, Method, parse_method
from sprinter.engine.driver import Models, RowDriver
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.networks import Linear
from sprinter.laws import Sampling
from sprinter.models import gguf_write
from sprinter.models.gguf import EOS_KEY, GgufModel
from sprinter.models.runner import make_runner

gguf = pytest.importorskip("gguf", reason=NO_GGUF)
pytest.importorskip("llama_cpp", reason=NO_LLAMA)

Text = tuple[int, ...]
WIDTH, LENGTH, CLOSE = 32, 3, 1e-5
PROMPT = (0, 1, 0, 1, 0)  # prompt lookup finds something in it
FEATURES = {"gate": "hidden", "disco": "hidden", "specdec++": "hidden_x"}
SPECS = {
    "sprinter": "sprinter(tau=0.5, cap=2)",
    "heuristic": "heuristic(start=2)",
    "fuzzy": "fuzzy(threshold=0.02, gamma=2)",
    "opt": "opt(epsilon=0.1, gamma=2)",
    "uno": "uno(epsilon=0.1, gamma=2)",
    **{name: f"{name}(drafts=2, gamma=2)" for name in ("batch", "specinfer", "spectr")},
}
"""Settings at which short texts show what a method does; other methods at their defaults."""


def head(kind: str) -> Head:
    """A linear head that tells prefixes apart."""
    network = Linear(WIDTH)
    with torch.no_grad():
        network.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(len(kind)))
    return Head(HeadConfig(WIDTH, "draft", "target", kind=kind, features=(FEATURES[kind],)), network)


class Pair:
    """A target and a draft, as transformers models and as files; the laws of the first as a ``MarkovPair`` has them."""

    def __init__(self, root: Path, vocab: int) -> None:
        self.vocab, self.heads = vocab, {kind: head(kind) for kind in FEATURES}
        sizes = {"vocab_size": vocab, "hidden_size": WIDTH, "intermediate_size": 48, "eos_token_id": None}
        self._models = [tiny_llama(seed, **sizes, num_hidden_layers=2 - i) for i, seed in enumerate((5, 6))]
        self.files = [bare_file(root / f"{vocab}-{i}.gguf", model) for i, model in enumerate(self._models)]
        self._read = cache(self._read_once)

    def p(self, prefix: Text) -> Tensor:
        """Target's law."""
        return self._read(0, prefix)[0]

    def q(self, prefix: Text) -> Tensor:
        """Draft's law."""
        return self._read(1, prefix)[0]

    def score(self, kind: str, text: Text) -> float:
        """A head's score of the state after the text."""
        return float(self.heads[kind](self._read(1, text)[1]))

    def _read_once(self, which: int, text: Text) -> tuple[Tensor, Tensor]:
        logits, hidden = uncached(self._models[which], list(text))
        return torch.softmax(logits[-1].double(), -1), hidden[-1]


def bare_file(path: Path, model: Any) -> GgufModel:
    """A GGUF file without words, for vocabularies smaller than the bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    gguf_write._add_sizes(gguf, writer, model.config, "f32")
    writer.add_tokenizer_model("no_vocab")
    writer.add_string(EOS_KEY, str(model.config.vocab_size))
    gguf_write._write_tensors(gguf, writer, model, "f32", lambda done, wanted: None)
    writer.close()
    return GgufModel(path)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Pair]:
    """By size of the vocabulary."""
    root = tmp_path_factory.mktemp("laws")
    return cache(lambda vocab: Pair(root, vocab))


def law_through_llamacpp(pair: Pair, method: Method, ahead: int) -> dict[Text, float]:
    """The law of the new tokens: the engine's driver on llama.cpp's rows, once for each path of draws."""
    law: defaultdict[Text, float] = defaultdict(float)
    rows, draws = method.drafter.drafts, EnumeratedDraws()
    target, draft = (make_runner(file, batch=rows, max_len=len(PROMPT) + LENGTH) for file in pair.files)
    assert target.name == draft.name == "llamacpp"
    models = Models(target, draft, pair.vocab)
    while True:
        record = Record()
        driver = RowDriver(
            models, range(rows), pair.heads, PROMPT, method, Sampling(), draws, record.stats, ahead=ahead
        )
        loop = decode(PROMPT, method, Limits(LENGTH), draws, record)
        question = next(loop, None)
        while question is not None:
            try:
                question = loop.send(answered(models, driver.answer(question)))
            except StopIteration:
                question = None
        law[tuple(token.id for token in record.tokens)] += draws.weight
        if not draws.next_path():
            return dict(law)


def answered(models: Models, jobs: Any) -> Any:
    """The answer, once its jobs are done."""
    done = None
    while True:
        try:
            job = jobs.send(done)
        except StopIteration as end:
            return end.value
        (done,) = models.run([job])


def distance(found: dict[Text, float], wanted: dict[Text, float]) -> float:
    return max(abs(found.get(text, 0.0) - wanted.get(text, 0.0)) for text in found.keys() | wanted.keys())


@pytest.mark.parametrize("name", sorted(METHODS.names()))
@pytest.mark.parametrize("ahead", [1, 3])
def test_the_joint_law_of_every_method(pairs: Callable[[int], Pair], name: str, ahead: int) -> None:
    method = parse_method(SPECS.get(name, name))
    pair: Any = pairs(2 if method.drafter.drafts > 1 or ahead > 1 else 3)
    found = law_through_llamacpp(pair, method, ahead)
    assert sum(found.values()) == pytest.approx(1, abs=CLOSE)
    assert distance(found, joint_law(method, pair, LENGTH, prompt=PROMPT, ahead=ahead)) < CLOSE
    target = target_joint_law(pair, LENGTH, prompt=PROMPT)
    if method.lossless():
        assert distance(found, target) < CLOSE
    elif name not in ("allocation", "bild", "typical"):  # these may agree with the target on so short a text
        assert distance(found, target) > 100 * CLOSE


def test_the_laws_would_tell_a_slip(pairs: Callable[[int], Pair]) -> None:
    """Target and draft are far apart, and so are the laws after texts that differ in one token."""
    pair: Any = pairs(3)
    assert distance(
        law_through_llamacpp(pair, parse_method("draft-only"), 1), target_joint_law(pair, LENGTH, prompt=PROMPT)
    ) > 0.03  # fmt: skip
    for law in (pair.p, pair.q):
        assert float((law(PROMPT) - law((*PROMPT[:-1], 2))).abs().max()) > 0.03
        assert float((law(PROMPT) - law(PROMPT[1:])).abs().max()) > 0.001
    scores = [pair.score("gate", (*PROMPT, a, b)) for a in range(3) for b in range(3)]
    assert min(scores) < 0.5 < max(scores)
