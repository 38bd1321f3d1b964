"""GGUF files of real models: their tokenizers agree with llama.cpp's own, are streamed whole, and load once."""

import unicodedata
from pathlib import Path

import pytest
from benchmarks.llamacpp.tokenizers import SPACE, LlamaTokenizer, edge_texts, extracts, ids, special_tokens
from tests.real import needs_gguf, needs_llama, real_file

import sprinter
from sprinter.engine.stream import Detokenizer
from sprinter.models.gguf.pretokenizers import PRE_TOKENIZERS
from sprinter.models.gguf.tokenizer import gguf_tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("smollm2", "qwen-draft", "gemma")

pytestmark = pytest.mark.real


def texts(special: list[str], count: int) -> list[str]:
    """Extracts of this repository's pages and tests, and edge texts."""
    paths = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tests" / "models").glob("test_*.py"))]
    return [*extracts([path.read_text("utf-8") for path in paths], count), *edge_texts(special, count)]


def formed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@needs_llama
@needs_gguf
@pytest.mark.parametrize("model", MODELS)
def test_the_tokenizer_agrees_with_llama_cpp(model: str) -> None:
    path = real_file(model)
    tokenizer, llama = gguf_tokenizer(path), LlamaTokenizer(path)
    marks = [*llama.named_control(tokenizer), *(SPACE if model == "gemma" else ())]  # see docs/llamacpp.md
    tried = [formed(text) for text in texts(special_tokens(tokenizer), 200)]
    tried = [text for text in tried if not any(mark in text for mark in marks)]
    assert len(tried) > 300
    for text, own in zip(tried, ids(tokenizer, tried), strict=True):
        assert own == llama(text), text
    llama.close()


@needs_gguf
@pytest.mark.parametrize("model", MODELS)
def test_texts_are_streamed_as_they_were(model: str) -> None:
    tokenizer = gguf_tokenizer(real_file(model))
    unwritten = [SPACE, *special_tokens(tokenizer)]  # special tokens are no part of a text that is streamed
    tried = [formed(text) for text in texts([], 200) if not any(mark in text for mark in unwritten)]
    assert len(tried) > 100
    for text, own in zip(tried, ids(tokenizer, tried), strict=True):
        stream = Detokenizer(tokenizer)
        parts = [stream.push(id) for id in own] + [stream.flush()]
        assert "".join(parts) == text
        assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@needs_llama
@needs_gguf
@pytest.mark.parametrize("pre", sorted(set(PRE_TOKENIZERS) - {"deepseek-coder"}))
def test_other_pre_tokenizers_agree_with_llama_cpp(pre: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's vocabulary under each name. Of deepseek-coder llama.cpp splits U+2028 unlike the checkpoint."""
    from sprinter.models.gguf import tokenizer as module
    from sprinter.models.gguf.header import gguf_head

    path = real_file("smollm2")
    head = gguf_head(path)
    monkeypatch.setitem(head.metadata, "tokenizer.ggml.pre", pre)
    monkeypatch.setattr(module, "gguf_head", lambda _: head)
    tokenizer, llama = gguf_tokenizer(path), LlamaTokenizer(path, pre)
    tried = [formed(text) for text in texts(special_tokens(tokenizer), 60)]
    for text, own in zip(tried, ids(tokenizer, tried), strict=True):
        assert own == llama(text), text
    llama.close()


@needs_llama
@needs_gguf
def test_a_text_of_smollm2() -> None:
    pair = sprinter.load_pair(real_file("smollm2"))
    out = pair.generate("The capital of France is", method="autoregressive", max_new_tokens=8, temperature=0)
    assert "Paris" in out.text
    assert pair.tokenizer.decode([token.id for token in out.tokens]) == out.text
