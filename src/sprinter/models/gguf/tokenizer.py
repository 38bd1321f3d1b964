"""Reads tokenizers from GGUF files.

Files that this package writes hold ``tokenizer.json`` and are read from that. From other files a byte-level BPE or a
SentencePiece BPE is rebuilt here, any other tokenizer by transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sprinter.errors import UserError, first_line
from sprinter.models.gguf.header import gguf_head
from sprinter.models.gguf.pretokenizers import PRE_TOKENIZERS
from sprinter.models.gguf.vocabulary import CONTROL, JSON_KEY, NORMAL, ROLES, UNUSED, USER_DEFINED

__all__ = ["gguf_tokenizer", "gguf_tokens"]

_SPACE = "▁"  # how SentencePiece spells a space


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file.

    Raises:
        UserError: the file is damaged or has no vocabulary, or its tokenizer cannot be rebuilt.
    """
    metadata = gguf_head(path).metadata
    kind = metadata.get("tokenizer.ggml.model", "none")
    rebuild = _REBUILT.get(kind)
    if JSON_KEY in metadata:
        backend = Tokenizer.from_str(metadata[JSON_KEY])
    elif rebuild is not None:
        _check_vocabulary(metadata, path)
        backend = rebuild(metadata, path)
    elif kind in ("none", "no_vocab"):
        raise UserError(f"{path} holds no vocabulary: give tokenizer=")
    else:
        return _by_transformers(path)
    special = {
        f"{role}_token": backend.id_to_token(int(metadata[key]))
        for role, name in ROLES.items()
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata
    }
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_Uncopied(backend),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def gguf_tokens(path: Path) -> dict[str, int]:
    """Token → id of a GGUF file, also for tokenizers that cannot be rebuilt; empty if it holds no vocabulary.

    Raises:
        UserError: the file is damaged.
    """
    metadata = gguf_head(path).metadata
    return _ids(_tokens(metadata), metadata.get("tokenizer.ggml.token_type"))


class _Uncopied:
    """A tokenizer that transformers takes as it is. It copies others, for half a second with 150,000 tokens."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, _: object) -> Tokenizer:
        return self._backend


def _check_vocabulary(metadata: dict[str, Any], path: Path) -> None:
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not tokens or len(tokens) != len(kinds or ()):
        raise UserError(f"{path} holds no complete vocabulary: give tokenizer=, or fetch another file")


def _tokens(metadata: dict[str, Any]) -> list[str]:
    """Tokens by id, as the checkpoint spells them: converters write SentencePiece's own runs of spaces as spaces."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if metadata.get("tokenizer.ggml.model") != "llama":
        return tokens
    return [token.replace(" ", _SPACE) for token in tokens]


def _ids(tokens: list[str], kinds: list[int] | None) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens) if kinds is None or kinds[i] != UNUSED}


def _byte_level(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """A byte-level BPE from its tokens, its merges and the name of its pre-tokenizer."""
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"{path} has a pre-tokenizer that cannot be rebuilt ({name}; known are {', '.join(PRE_TOKENIZERS)}): "
            "give tokenizer="
        )
    pre = PRE_TOKENIZERS[name]
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    backend = Tokenizer(BPE(vocab=_ids(tokens, kinds), merges=merges, ignore_merges=pre.whole))
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer
    backend.pre_tokenizer = pre.splitter
    backend.decoder = decoders.ByteLevel()
    _add_whole(backend, tokens, kinds)
    _add_bos(backend, metadata, tokens, pre.bos)
    return backend


def _sentencepiece(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """A SentencePiece BPE from its tokens and their scores."""
    tokens, kinds = _tokens(metadata), metadata["tokenizer.ggml.token_type"]
    scores = metadata.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise UserError(f"{path} holds no complete vocabulary: give tokenizer=, or fetch another file")
    vocab = _ids(tokens, kinds)
    merges = _merges(tokens, kinds, scores, vocab)
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    plain = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*plain, decoders.Strip(" ", 1, 0)] if prefix else plain)
    _add_whole(backend, tokens, kinds)
    _add_bos(backend, metadata, tokens, True)
    return backend


def _merges(
    tokens: list[str], kinds: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """All pairs of tokens that make another, those with the best score first, as SentencePiece merges them."""
    best_first = np.argsort(-np.array(scores, np.float32), kind="stable").tolist()
    return [
        (left, right)
        for token in [tokens[i] for i in best_first if kinds[i] == NORMAL]
        for at in range(1, len(token))
        if (left := token[:at]) in vocab and (right := token[at:]) in vocab
    ]


def _add_whole(backend: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Add the tokens that are found in a text before anything else: control tokens, and those that a user defined."""
    backend.add_tokens(
        [
            AddedToken(token, normalized=_SPACE in token and kind == USER_DEFINED, special=kind == CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )


def _add_bos(backend: Tokenizer, metadata: dict[str, Any], tokens: list[str], otherwise: bool) -> None:
    """Let texts begin with the BOS token if the file says so, or if it says nothing and that is usual."""
    number = metadata.get("tokenizer.ggml.bos_token_id")
    if number is not None and metadata.get("tokenizer.ggml.add_bos_token", otherwise):
        bos = tokens[int(number)]
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, int(number))])


_REBUILT = {"gpt2": _byte_level, "llama": _sentencepiece}
"""GGUF's name of a kind of tokenizer → how it is rebuilt."""


def _by_transformers(path: Path) -> PreTrainedTokenizerBase:
    tokenizer: Any
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise UserError(
            f"transformers cannot rebuild the tokenizer of {path} ({first_line(error)[:200]}): give tokenizer="
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer
