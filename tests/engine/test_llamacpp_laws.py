"""Joint laws through llama.cpp: every random draw of the real engine on tiny GGUF pairs, enumerated, for every method.

The reference is the same loop on laws that transformers' uncached passes give; lossless methods must write the target's
own law besides. All in float32, so laws of texts agree to 1e-5 and not to 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.joint_laws import PROMPT, SPECS, WIDTH, LawsOfModels, Text, distance, law_of_texts
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, tiny_llama
from tests.models.tiny import uncached
from torch import Tensor

from sprinter.decode.enumerate import EnumeratedDraws, joint_law, target_joint_law
from sprinter.decode.spec import METHODS, Method, parse_method
from sprinter.engine.executor import Executor
from sprinter.models.choose import make_runner
from sprinter.models.gguf import write as gguf_write
from sprinter.models.gguf.load import EOS_KEY, GgufModel

gguf = pytest.importorskip("gguf", reason=NO_GGUF)
pytest.importorskip("llama_cpp", reason=NO_LLAMA)

LENGTH, CLOSE = 3, 1e-5


class Pair(LawsOfModels):
    """A target and a draft, as transformers models and as files; the laws of the first as a ``MarkovPair`` has them."""

    def __init__(self, root: Path, vocab: int) -> None:
        super().__init__(vocab)
        sizes = {"vocab_size": vocab, "hidden_size": WIDTH, "intermediate_size": 48, "eos_token_id": None}
        self._models = [tiny_llama(seed, **sizes, num_hidden_layers=2 - i) for i, seed in enumerate((5, 6))]
        self.files = [bare_file(root / f"{vocab}-{i}.gguf", model) for i, model in enumerate(self._models)]

    def _read_once(self, which: int, text: Text) -> tuple[Tensor, Tensor]:
        logits, hidden = uncached(self._models[which], list(text))
        return torch.softmax(logits[-1].double(), -1), hidden[-1]


def bare_file(path: Path, model: Any) -> GgufModel:
    """A GGUF file without words, for vocabularies smaller than the bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    gguf_write._add_sizes(gguf, writer, model.config, "f32")
    writer.add_tokenizer_model("no_vocab")
    writer.add_string(EOS_KEY, str(model.config.vocab_size))
    gguf_write._add_tensors(gguf, writer, model, "f32", lambda done, wanted: None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufModel(path)


TREE = 40
"""Slots for a tree beside a text."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Pair]:
    """By size of the vocabulary."""
    root = tmp_path_factory.mktemp("laws")
    return cache(lambda vocab: Pair(root, vocab))


def law_through_llamacpp(pair: Pair, method: Method, ahead: int) -> dict[Text, float]:
    target, draft = (
        make_runner(file, batch=1, max_len=len(PROMPT) + LENGTH + TREE, leaves=TREE) for file in pair.files
    )
    assert target.name == draft.name == "llamacpp"
    return law_of_texts(
        Executor(target, draft, pair.vocab), pair.heads, method, LENGTH, ahead, EnumeratedDraws()
    )


# llama.cpp hands out no states for heads
WITHOUT_HEADS = [
    name for name in sorted(METHODS.names()) if not parse_method(SPECS.get(name, name)).drafter.by_heads
]


@pytest.mark.parametrize("name", WITHOUT_HEADS)
@pytest.mark.parametrize("ahead", [1, 3])
def test_the_joint_law_of_every_method(pairs: Callable[[int], Pair], name: str, ahead: int) -> None:
    method = parse_method(SPECS.get(name, name))
    pair: Any = pairs(2 if ahead > 1 else 3)
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
