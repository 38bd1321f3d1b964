"""Tokenizers that are rebuilt from a GGUF file's metadata, and files that hold none; without the extra's packages."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from sprinter.engine.stream import Detokenizer, continued_text
from sprinter.errors import UserError
from sprinter.models.gguf import tokenizer as module
from sprinter.models.gguf.pretokenizers import PRE_TOKENIZERS
from sprinter.models.gguf.tokenizer import gguf_tokenizer, gguf_tokens

PATH = Path("a.gguf")
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PRE = "tokenizer.ggml."


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that reads the tokenizer of a file with this metadata."""

    def of(metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
        head = SimpleNamespace(metadata=metadata)
        monkeypatch.setattr(module, "gguf_head", lambda path: head)
        return gguf_tokenizer(PATH)

    return of


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    """All bytes, some merges, an unused token, and one of each kind that is found whole."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    e = level.pre_tokenize_str("é")[0][0]
    merges = ["a b", "ab c", "Ġ ab", "1 2", f"{e[0]} {e[1]}"]
    made = [merge.replace(" ", "") for merge in merges]
    tokens = [*bytes_, *made, "whole", "<|end|>", "<tool>", "[PAD9]"]
    kinds = [*[NORMAL] * (len(bytes_) + len(made) + 1), CONTROL, USER, UNUSED]
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges}
    ids = {"eos_token_id": tokens.index("<|end|>"), "bos_token_id": tokens.index("<|end|>")}
    return {PRE + key: value for key, value in (fields | ids | more).items()}


def sentencepiece(**more: Any) -> dict[str, Any]:
    """As converters write a SentencePiece BPE: bytes, scores that fall with the rank, runs of spaces as spaces."""
    special = [
        ("<unk>", CONTROL),
        ("<s>", CONTROL),
        ("</s>", CONTROL),
        ("  ", USER),
        ("   ", USER),
        ("\n", USER),
    ]
    merged = ["ab", "▁a", "bc", "▁ab", "abc", "▁c"]
    tokens = [token for token, _ in special] + [f"<0x{byte:02X}>" for byte in range(256)] + [*merged, *"▁abc"]
    kinds = [kind for _, kind in special] + [BYTE] * 256 + [NORMAL] * (len(merged) + 4)
    scores = [0.0] * (len(special) + 256) + [-float(rank) for rank in range(len(merged) + 4)]
    fields = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": scores}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": False}
    return {PRE + key: value for key, value in (fields | ids | more).items()}


def pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["don", "'t", "Ġ1234", "ĠÃ©clair", "ĠĠ", "Ġ!?", "Ċ", "x"]),
        ("smollm", ["don", "'t", "Ġ", "1", "2", "3", "4", "ĠÃ©clair", "ĠĠ", "Ġ!?", "Ċ", "x"]),
        ("llama-bpe", ["don", "'t", "Ġ", "123", "4", "ĠÃ©clair", "ĠĠ", "Ġ!?Ċ", "x"]),
        ("qwen2", ["don", "'t", "Ġ", "1", "2", "3", "4", "ĠÃ©clair", "ĠĠ", "Ġ!?Ċ", "x"]),
        ("tekken", ["don", "'t", "Ġ", "1", "2", "3", "4", "ĠÃ©clair", "ĠĠ", "Ġ!?Ċ", "x"]),
        ("gpt-4o", ["don't", "Ġ", "123", "4", "ĠÃ©clair", "ĠĠ", "Ġ!?Ċ", "x"]),
        ("deepseek-coder", ["don", "'", "t", "Ġ", "1", "2", "3", "4", "ĠÃ©clair", "ĠĠ", "Ġ!?", "Ċ", "x"]),
        ("deepseek-v3", ["don", "'t", "Ġ", "123", "4", "ĠÃ©clair", "ĠĠ", "Ġ!?Ċ", "x"]),
    ],
)
def test_how_a_text_is_split(pre: str, expected: list[str]) -> None:
    found = [part for part, _ in PRE_TOKENIZERS[pre].splitter.pre_tokenize_str("don't 1234 éclair   !?\nx")]
    assert found == expected


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_a_byte_level_vocabulary(read: Any, pre: str) -> None:
    tokenizer = read(byte_level(pre, add_bos_token=False))
    text = " abc<|end|>12<tool>é 木\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert {"abc", "<|end|>", "<tool>"} <= set(pieces(tokenizer, text))
    assert tokenizer.eos_token == "<|end|>"
    assert "[PAD9]" not in tokenizer.get_vocab()
    assert tokenizer.get_vocab() == gguf_tokens(PATH)
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == " abc12<tool>é 木\n"


def test_what_a_pre_tokenizer_brings_along(read: Any) -> None:
    e = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("é")[0][0]
    assert pieces(read(byte_level("qwen2")), "e\u0301") == [e]  # composed, as its checkpoints do
    assert pieces(read(byte_level("smollm")), "e\u0301")[0] == "e"
    assert pieces(read(byte_level("llama-bpe")), "whole") == ["whole"]  # a token that no merge makes
    assert pieces(read(byte_level("qwen2")), "whole") == list("whole")
    assert read(byte_level("llama-bpe"))("a").input_ids[0] == read(byte_level("qwen2")).bos_token_id
    assert len(read(byte_level("qwen2"))("a").input_ids) == 1
    assert len(read(byte_level("qwen2", add_bos_token=True))("a").input_ids) == 2


def test_a_sentencepiece_vocabulary(read: Any) -> None:
    tokenizer = read(sentencepiece())
    assert pieces(tokenizer, "abc") == ["abc"]
    assert pieces(tokenizer, " abc") == ["▁ab", "c"]  # "ab" comes first, then "▁ab" before "abc"
    assert pieces(tokenizer, "a  b    c") == ["a", "▁▁", "b", "▁▁▁", "▁c"]  # runs of spaces before merges
    assert pieces(tokenizer, "é\n</s>") == ["<0xC3>", "<0xA9>", "\n", "</s>"]
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.get_vocab() == gguf_tokens(PATH) and "▁▁" in tokenizer.get_vocab()
    for text in (" abc  é\n木  ", "ab", " ab"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    prefixed = read(sentencepiece(add_space_prefix=True, add_bos_token=False))
    assert prefixed.convert_ids_to_tokens(prefixed("abc").input_ids) == ["▁ab", "c"]
    assert prefixed.decode(prefixed("abc").input_ids) == "abc"


@pytest.mark.parametrize(
    "metadata", [byte_level("qwen2"), sentencepiece()], ids=["byte level", "sentencepiece"]
)
def test_characters_of_several_bytes_are_streamed_whole(read: Any, metadata: dict[str, Any]) -> None:
    tokenizer = read(metadata)
    text = "a木👩\u200d👧 é€ ab\n"
    stream = Detokenizer(tokenizer)
    parts = [stream.push(id) for id in tokenizer(text, add_special_tokens=False).input_ids]
    assert "".join(parts) + stream.flush() == text
    assert "木" in parts and all("\ufffd" not in part for part in parts)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_continuation_keeps_its_space(read: Any, prefix: bool) -> None:
    tokenizer = read(sentencepiece(add_space_prefix=prefix))
    prompt, new = tokenizer("abc").input_ids, tokenizer.convert_tokens_to_ids(["▁ab", "c", "▁c"])
    assert continued_text(tokenizer, prompt, new) == " abc c"


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        ({}, "a.gguf holds no vocabulary: give tokenizer="),
        ({PRE + "model": "no_vocab"}, "a.gguf holds no vocabulary: give tokenizer="),
        (
            {PRE + "model": "gpt2"},
            "a.gguf holds no complete vocabulary: give tokenizer=, or fetch another file",
        ),
        (
            sentencepiece(scores=[0.0]),
            "a.gguf holds no complete vocabulary: give tokenizer=, or fetch another file",
        ),
        (
            byte_level("gpt-9"),
            "a.gguf has a pre-tokenizer that cannot be rebuilt (gpt-9; known are "
            f"{', '.join(PRE_TOKENIZERS)}): give tokenizer=",
        ),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(read: Any, metadata: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refused:
        read(metadata)
    assert str(refused.value) == line
