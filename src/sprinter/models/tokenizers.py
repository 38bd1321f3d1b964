"""The tokenizers of a pair's models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sprinter.errors import UserError
from sprinter.models.common_tokens import SAMPLE, CommonTokens, words_of
from sprinter.models.gguf.header import gguf_head
from sprinter.models.gguf.tokenizer import gguf_tokenizer, gguf_tokens
from sprinter.models.remote import RemoteModel
from sprinter.models.source import Provenance, load_error
from sprinter.models.vocabulary import (
    Vocabulary,
    check_rows,
    check_same_vocabulary,
    common_tokens,
    is_foreign,
)

__all__ = ["common_tokenizer", "foreign_tokens", "own_vocabulary"]

_log = logging.getLogger("sprinter")


def common_tokenizer(
    given: str | Path | PreTrainedTokenizerBase | None,
    target: Provenance,
    draft: Provenance | None,
    trust: bool,
) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The pair's tokenizer, and the number of leading token ids that both models share with it; None: all.

    Reads tokenizers and configs, of GGUF files their metadata, but no weights: loading them may take minutes.

    Raises:
        UserError: no tokenizer, or models that do not agree with it or with each other.
    """
    if given is None and draft is not None and isinstance(target.at, RemoteModel):
        given = draft.gguf or draft.tokenizer_dir  # the server says whether it is its own
    speaker = _find_tokenizer(given, target, trust)
    words, tokens = speaker.get_vocab(), None
    drafted = None if draft is None else own_vocabulary(draft, trust)
    if given is not None:
        tokens = common_tokens(words, {"target": own_vocabulary(target, trust), "draft": drafted})
    elif draft is not None and drafted is not None:
        check_same_vocabulary(words, drafted, target.name, draft.name)
    models = {"target": target} if draft is None else {"target": target, "draft": draft}
    rows = {which: size for which, one in models.items() if (size := _rows(one, trust)) is not None}
    for which, size in rows.items():
        check_rows(words, size, which)
    if draft is not None and drafted is None and draft.at is not target.at:
        _check_unnamed(draft, rows)
    return speaker, tokens


def foreign_tokens(
    given: str | Path | PreTrainedTokenizerBase | None,
    target: Provenance,
    draft: Provenance | None,
    trust: bool,
) -> tuple[PreTrainedTokenizerBase, CommonTokens] | None:
    """A draft's own tokenizer, and what it has in common with the target's, if it is another one with which it can
    draft: half of a text's tokens are common. Says how many."""
    if draft is None or (theirs := own_vocabulary(draft, trust)) is None:
        return None
    ours = (
        own_vocabulary(target, trust) if given is None else _find_tokenizer(given, target, trust).get_vocab()
    )
    if ours is None or not is_foreign(ours, theirs):
        return None
    speaker, own = _find_tokenizer(given, target, trust), _find_tokenizer(None, draft, trust)
    words, others = words_of(speaker), words_of(own)
    if words is None or others is None:
        return None
    tokens = CommonTokens(words, others)
    if (share := tokens.share(speaker.encode(SAMPLE, add_special_tokens=False))) < 0.5:
        return None
    _log.warning(
        "different vocabularies: %s tokens in common, %.0f %% of those of a text in English and Python",
        f"{len(tokens.ids):,}", 100 * share,
    )  # fmt: skip
    return own, tokens


def _rows(origin: Provenance, trust: bool) -> int | None:
    """Number of a model's embedding rows; None if it is not known before its weights are read."""
    if origin.gguf is not None:
        embedding = gguf_head(origin.gguf).tensors.get("token_embd.weight")
        return None if embedding is None else embedding.shape[0]
    config = origin.config(trust)
    return None if config is None else getattr(config.get_text_config(decoder=True), "vocab_size", None)


def _check_unnamed(draft: Provenance, rows: Mapping[str, int]) -> None:
    """A draft that comes without a tokenizer: only the number of its tokens can be compared."""
    if len(set(rows.values())) > 1:
        raise UserError(
            f"the target has {rows['target']} token ids and the draft {rows['draft']}, and the draft comes without a "
            "tokenizer that would show that they agree: give the draft's directory, with its tokenizer"
        )
    _log.warning(
        "the draft %s comes without a tokenizer: that its tokens are the target's is taken for granted",
        draft.name,
    )


def _find_tokenizer(
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
    if target.gguf is not None:
        return gguf_tokenizer(target.gguf)
    if (directory := target.tokenizer_dir) is None:
        raise UserError(f"the target {target.name} comes without a tokenizer: give one as tokenizer=")
    return _read_tokenizer(directory, trust)


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
    directory = origin.tokenizer_dir
    return None if directory is None else _read_tokenizer(directory, trust).get_vocab()
