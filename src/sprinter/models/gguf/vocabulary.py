"""Writes tokenizers into GGUF files: the vocabulary in llama.cpp's form, and ``tokenizer.json``."""

from __future__ import annotations

import json
from typing import Any

from sprinter.errors import UserError
from sprinter.models.gguf.pretokenizers import PRE_TOKENIZERS

__all__ = ["CONTROL", "JSON_KEY", "NORMAL", "ROLES", "UNUSED", "USER_DEFINED", "add_vocabulary"]

JSON_KEY = "tokenizer.huggingface.json"
"""Metadata key: ``tokenizer.json``; reserved by the GGUF specification."""

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens."""

ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens of a tokenizer → their names in GGUF."""

_SPLITS = {
    (own.patterns[0], own.gpt2): name
    for name in ("llama-bpe", "qwen2", "smollm")
    for own in [PRE_TOKENIZERS[name]]
}
"""A pre-tokenizer's pattern, and whether GPT-2's follows it → llama.cpp's name, except for GPT-2's alone."""


def add_vocabulary(writer: Any, tokenizer: Any, name: str, vocab_size: int) -> None:
    """Add a tokenizer to a ``GGUFWriter``; embedding rows beyond its tokens become unused tokens.

    Args:
        writer: of the file.
        tokenizer: a byte-level BPE, a ``PreTrainedTokenizerBase``.
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
            f"the tokenizer of {name} is not a byte-level BPE of a kind that llama.cpp is known to share: "
            "use llama.cpp's converter"
        )
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    for token, number in rule["vocab"].items():
        tokens[number], kinds[number] = token, NORMAL
    for added in spec.get("added_tokens", []):
        number = added["id"]
        tokens[number], kinds[number] = added["content"], CONTROL if added["special"] else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in rule["merges"]]
    )
    for role, kept in ROLES.items():
        if (number := getattr(tokenizer, f"{role}_token_id")) is not None:
            writer.add_uint32(f"tokenizer.ggml.{kept}_token_id", number)
    bos = tokenizer.bos_token_id
    writer.add_add_bos_token(bos is not None and tokenizer("a")["input_ids"][:1] == [bos])
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(template)
    writer.add_string(JSON_KEY, json.dumps(spec, ensure_ascii=False))


def _pre(spec: dict[str, Any]) -> str | None:
    """llama.cpp's name for a tokenizer's pre-tokenizer; None if no name is known."""
    own = spec.get("pre_tokenizer") or {}
    if own.get("type") == "ByteLevel":
        return "gpt-2" if own["use_regex"] and not own["add_prefix_space"] else None
    parts = own.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    split, level = parts
    if level["add_prefix_space"] or split.get("invert") or split["behavior"] != "Isolated":
        return None
    return _SPLITS.get((split["pattern"].get("Regex", ""), level["use_regex"]))
