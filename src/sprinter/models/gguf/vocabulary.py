"""Writes tokenizers into GGUF files, and reads them back.

A file holds its vocabulary in llama.cpp's form. Files that this package writes also hold ``tokenizer.json``, under the
key that GGUF reserves for it, and are read from that. For other files a byte-level BPE is rebuilt here, any other
tokenizer by transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sprinter.errors import UserError
from sprinter.models.gguf.output_head import gguf_head

__all__ = ["GgufVocabulary", "add_vocabulary", "gguf_tokenizer", "gguf_tokens", "vocabulary"]

_JSON = "tokenizer.huggingface.json"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens of a tokenizer → their names in GGUF."""

_SPLITS = {
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+": "llama-bpe",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+": "qwen2",
}
"""Pre-tokenizer pattern → llama.cpp's name for it, except GPT-2's own."""


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A byte-level BPE in GGUF's form.

    Attributes:
        tokens: token strings by id.
        kinds: token types by id.
        merges: BPE merges, each as two tokens with a space between.
        pre: llama.cpp's name of the pre-tokenizer.
        json: contents of ``tokenizer.json``.
    """

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    pre: str
    json: str


def vocabulary(tokenizer: PreTrainedTokenizerBase | None, name: str, vocab_size: int) -> GgufVocabulary:
    """A tokenizer in GGUF's form; embedding rows beyond its tokens become unused tokens.

    Args:
        tokenizer: a byte-level BPE.
        name: the model's name, for messages.
        vocab_size: number of embedding rows.

    Raises:
        UserError: it is not a byte-level BPE, or its pre-tokenizer is unknown to llama.cpp.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spec = json.loads(backend.to_str()) if backend is not None else {}
    rule = spec.get("model") or {}
    pre = _pre(spec)
    if backend is None or rule.get("type") != "BPE" or pre is None or spec.get("normalizer"):
        raise UserError(
            f"the tokenizer of {name} is no byte-level BPE of a kind that llama.cpp is known to share: "
            "use llama.cpp's converter"
        )
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    for token, number in rule["vocab"].items():
        tokens[number], kinds[number] = token, _NORMAL
    for added in spec.get("added_tokens", []):
        number = added["id"]
        tokens[number], kinds[number] = added["content"], _CONTROL if added["special"] else _USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in rule["merges"]]
    return GgufVocabulary(tokens, kinds, merges, pre, json.dumps(spec, ensure_ascii=False))


def add_vocabulary(writer: Any, words: GgufVocabulary, tokenizer: Any) -> None:
    """Add a vocabulary, the ids of special tokens and the chat template to a ``GGUFWriter``."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    writer.add_token_merges(words.merges)
    for role, name in _ROLES.items():
        if (number := getattr(tokenizer, f"{role}_token_id")) is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    bos = tokenizer.bos_token_id
    writer.add_add_bos_token(bos is not None and tokenizer("a")["input_ids"][:1] == [bos])
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(template)
    writer.add_string(_JSON, words.json)


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file.

    Raises:
        UserError: the file is damaged, or its tokenizer cannot be rebuilt.
    """
    metadata = gguf_head(path).metadata
    if _JSON in metadata:
        backend = Tokenizer.from_str(metadata[_JSON])
    elif metadata.get("tokenizer.ggml.model") == "gpt2":
        backend = _byte_level(metadata, path)
    else:
        return _rebuilt(path)
    special = {
        f"{role}_token": backend.id_to_token(int(metadata[key]))
        for role, name in _ROLES.items()
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata
    }
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def gguf_tokens(path: Path) -> dict[str, int]:
    """Token → id of a GGUF file, also for tokenizers that cannot be rebuilt.

    Raises:
        UserError: the file is damaged.
    """
    metadata = gguf_head(path).metadata
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type")
    return {token: i for i, token in enumerate(tokens) if kinds is None or kinds[i] != _UNUSED}


def _byte_level(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """A byte-level BPE from its tokens, its merges and the name of its pre-tokenizer."""
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    patterns = {name: pattern for pattern, name in _SPLITS.items()}
    if pre != "gpt-2" and pre not in patterns:
        raise UserError(f"{path} has an unknown pre-tokenizer ({pre}): give tokenizer=")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(BPE(vocab=vocab, merges=merges))
    level = ByteLevel(add_prefix_space=False, use_regex=pre == "gpt-2")
    split = Split(Regex(patterns[pre]), "isolated") if pre in patterns else None
    backend.pre_tokenizer = Sequence([split, level]) if split else level
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    if metadata.get("tokenizer.ggml.add_bos_token"):
        bos = int(metadata["tokenizer.ggml.bos_token_id"])
        backend.post_processor = TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return backend


def _rebuilt(path: Path) -> PreTrainedTokenizerBase:
    tokenizer: Any
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"transformers cannot rebuild the tokenizer of {path} ({first[:200]}): give tokenizer="
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def _pre(spec: dict[str, Any]) -> str | None:
    """llama.cpp's name for a tokenizer's pre-tokenizer; None if no name is known."""
    own = spec.get("pre_tokenizer") or {}
    if own.get("type") == "ByteLevel":
        return "gpt-2" if own["use_regex"] and not own["add_prefix_space"] else None
    parts = own.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    split, level = parts
    plain = not level["use_regex"] and not level["add_prefix_space"] and not split.get("invert")
    return (
        _SPLITS.get(split["pattern"].get("Regex", "")) if plain and split["behavior"] == "Isolated" else None
    )
