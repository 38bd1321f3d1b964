"""The tokenizers of a pair's models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sprinter.errors import UserError
from sprinter.models.common_tokens import SAMPLE, CommonTokens, added_first, words_of
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

__all__ = ["PairTokenizer", "common_tokenizer", "own_vocabulary", "read_by"]

_LEAST = 0.5  # of the tokens of a text; with fewer in common most drafts end before they begin
_log = logging.getLogger("sprinter")


class PairTokenizer(NamedTuple):
    """The tokenizer of a pair.

    Attributes:
        tokenizer: the target's, or the one that was given.
        tokens: number of leading token ids that both models share with it; None: all.
        draft: the draft's own, and what it has in common with ``tokenizer``, if its vocabulary is another one.
    """

    tokenizer: PreTrainedTokenizerBase
    tokens: int | None = None
    draft: tuple[PreTrainedTokenizerBase, CommonTokens] | None = None


def common_tokenizer(
    given: str | Path | PreTrainedTokenizerBase | None,
    target: Provenance,
    draft: Provenance | None,
    trust: bool,
) -> PairTokenizer:
    """The pair's tokenizer.

    Reads tokenizers and configs, of GGUF files their metadata, but no weights: loading them may take minutes.

    Raises:
        UserError: no tokenizer, or models that do not agree with it, or have too few tokens in common.
    """
    if given is None and draft is not None and isinstance(target.at, RemoteModel):
        given = draft.gguf or draft.tokenizer_dir  # the server says whether it is its own
    speaker = _find_tokenizer(given, target, trust)
    words, tokens = speaker.get_vocab(), None
    drafted = None if draft is None else own_vocabulary(draft, trust)
    foreign = None
    if draft is not None and drafted is not None and is_foreign(words, drafted):
        own = _find_tokenizer(None, draft, trust)
        foreign = None if (shared := read_by(speaker, own)) is None else (own, shared)
    if given is not None:
        vocabularies = {"target": own_vocabulary(target, trust), "draft": None if foreign else drafted}
        tokens = common_tokens(words, vocabularies)
    elif draft is not None and drafted is not None and foreign is None:
        check_same_vocabulary(words, drafted, target.name, draft.name)
    models = {"target": target} if draft is None or foreign else {"target": target, "draft": draft}
    rows = {which: size for which, one in models.items() if (size := _rows(one, trust)) is not None}
    for which, size in rows.items():
        check_rows(words, size, which)
    if draft is not None and drafted is None and draft.at is not target.at:
        _check_unnamed(draft, rows)
    return PairTokenizer(speaker, tokens, foreign)


def read_by(speaker: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> CommonTokens | None:
    """How a model with a tokenizer of its own reads the tokens of another; None: with less than half of a text's
    tokens in common. Says how many."""
    words, others = words_of(speaker), words_of(own)
    if words is None or others is None:
        return None
    tokens = CommonTokens(words, others)
    if (share := tokens.share(speaker.encode(SAMPLE, add_special_tokens=False))) < _LEAST:
        return None
    tokens.join_firsts(added_first(speaker), added_first(own))
    _log.warning(
        "different vocabularies: %s tokens in common, %.0f %% of those of a text in English and Python",
        f"{len(tokens.ids):,}", 100 * share,
    )  # fmt: skip
    return tokens


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
