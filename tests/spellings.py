"""Tokenizers of every kind of decoder, small, and with at least as many tokens as the built-in pair's models."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "▁",
    "▁▁",
    "▁▁▁",
    "\n",
    ":",
    "(",
    ")",
    "▁The",
    "▁answer",
    "▁is",
    "▁true",
    "▁def",
    "▁f",
    "▁return",
    "字",
    "é",
]
WORDS += [*"abcdefghijklmnopqrstuvwxyz", *(f"▁{letter}" for letter in "abcde")]
SIZE = 8192


def _vocabulary(words: list[str]) -> dict[str, int]:
    filler = (f"▁w{i}" for i in range(SIZE))
    return {word: i for i, word in enumerate([*dict.fromkeys([*SPECIAL, *words, *filler])][:SIZE])}


def _made(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def llama2() -> PreTrainedTokenizerFast:
    """As Llama 2's ``tokenizer.json``: "▁" before a text, byte fallback, and a decoder that strips one space.
    Texts begin with a BOS."""
    vocabulary = _vocabulary([*BYTES, *WORDS])
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return _made(backend)


def metaspace() -> PreTrainedTokenizerFast:
    """As SentencePiece tokenizers that transformers converts: a pre-tokenizer and a decoder named Metaspace."""
    backend = Tokenizer(models.BPE(vocab=_vocabulary(WORDS), merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return _made(backend)


def wordpiece() -> PreTrainedTokenizerFast:
    """As BERT's: spaces between words, none before "##"."""
    words = [word.replace("▁", "") for word in WORDS if word.strip("▁\n")]
    filler = [f"w{i}" for i in range(SIZE)]
    words = [*SPECIAL, *words, "##ing", "##s", *filler]
    vocabulary = {word: i for i, word in enumerate([*dict.fromkeys(words)][:SIZE])}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return _made(backend)


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's: every byte is a token, and a few tokens are longer or end inside a character."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    longer = [level.pre_tokenize_str(word)[0][0] for word in (" true", " is", "é", "字")]
    longer.append(level.pre_tokenize_str("s漢")[0][0][:-1])
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *longer]
    words += [f"Ġw{i}" for i in range(SIZE)]
    backend = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words[:SIZE])}, merges=[], unk_token="<unk>")
    )
    backend.pre_tokenizer, backend.decoder = level, decoders.ByteLevel()
    return _made(backend)


KINDS: dict[str, Any] = {
    "llama2": llama2, "metaspace": metaspace, "wordpiece": wordpiece, "byte level": byte_level,
}  # fmt: skip


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    """Ids of tokens by their spelling in the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]
