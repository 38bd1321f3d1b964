"""The tokenizers of a pair's models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sprinter.errors import UserError
from sprinter.models.gguf.tokenizer import gguf_tokenizer, gguf_tokens
from sprinter.models.source import Provenance, load_error
from sprinter.models.vocabulary import Vocabulary

__all__ = ["find_tokenizer", "own_vocabulary"]


def find_tokenizer(
    given: str | Path | PreTrainedTokenizerBase | None, target: Provenance, trust: bool
) -> PreTrainedTokenizerBase:
    """The pair's tokenizer: the one that was given, else the target's own."""
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if given is not None and not isinstance(given, str | Path):
        raise UserError(
            f"tokenizer={given!r} is none: give a directory, a hub id, a GGUF file or a tokenizer"
        )
    if given is not None:
        path = Path(given).expanduser()
        return gguf_tokenizer(path) if path.suffix == ".gguf" else _read_tokenizer(given, trust)
    own = _own_tokenizer(target, trust)
    if own is None:
        raise UserError(f"the target {target.name} comes without a tokenizer: give one as tokenizer=")
    return own


def _own_tokenizer(origin: Provenance, trust: bool) -> PreTrainedTokenizerBase | None:
    if origin.gguf is not None:
        return gguf_tokenizer(origin.gguf)
    directory = origin.tokenizer_dir
    return None if directory is None else _read_tokenizer(directory, trust)


def _read_tokenizer(source: str | Path, trust: bool) -> PreTrainedTokenizerBase:
    tokenizer: Any
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    except Exception as error:
        raise load_error(error, str(source), "tokenizer") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def own_vocabulary(origin: Provenance, trust: bool) -> Vocabulary | None:
    """The tokens that a model's own tokenizer knows; None if it comes without one."""
    if origin.gguf is not None:
        return gguf_tokens(origin.gguf) or None
    own = _own_tokenizer(origin, trust)
    return None if own is None else own.get_vocab()
