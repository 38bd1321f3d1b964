"""Heads that draft, beside a pair's target: those that its checkpoint holds, and what a target must be for any."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from sprinter.errors import UserError
from sprinter.heads.drafting import TokenHeads
from sprinter.heads.mtp import load_mtp
from sprinter.models.gguf.config import FAMILIES
from sprinter.models.gguf.dequantise import nextn_weights
from sprinter.models.gguf.load import GgufModel
from sprinter.models.interface import ServedModel
from sprinter.models.kernels import is_quantised, quantise_linears
from sprinter.models.pair import LoadedModel, LoadedPair
from sprinter.models.reduced_vocab import keeping, kept_tokens, some_rows

__all__ = ["attach_heads", "cut_heads", "native_heads"]

_log = logging.getLogger("sprinter")


def native_heads(target: LoadedModel) -> list[TokenHeads]:
    """The heads that draft of a target's own checkpoint, if it holds some that run; a warning if they do not."""
    if isinstance(target.model, ServedModel):
        if isinstance(target.model, GgufModel) and target.model.nextn:
            other = "; use runner='torch' (--runner torch)" if target.model.architecture in FAMILIES else ""
            _log.warning(
                "%s runs without its heads of multi-token prediction: llama.cpp gives them no hidden states%s",
                target.id, other,
            )  # fmt: skip
        return []
    path = Path(target.model.name_or_path or "")
    try:
        given = nextn_weights(path, target.model.config) if path.is_file() else None  # a GGUF file
        found = load_mtp(target.model, target.vocab_size, given)
    except UserError as error:
        _log.warning("%s", error)
        return []
    if found is None:
        return []
    found.id, found.revision = target.id, target.revision
    return [found]


def attach_heads(heads: TokenHeads, target: LoadedModel) -> None:
    """Make heads ready to draft for a target, in 8 bits if its weights are quantised on a CPU.

    Raises:
        UserError: they are for another target or pair, or the target gives no states.
    """
    if isinstance(target.model, ServedModel):
        raise UserError(
            f"heads that draft read the target's hidden states, which its runner ({target.model.runner}) does not "
            f"give: load '{target.id}' here, with runner='torch' (--runner torch)"
        )
    on_cpu = bool(target.quantised) and target.model.device.type == "cpu"  # with our kernels' layers
    changed = is_quantised(heads) and not on_cpu
    if changed or (heads.output is not None and heads.output.ids is not None):
        how = "have 8 bits" if changed else "draft a part of the vocabulary"
        raise UserError(f"these {heads.kind} heads {how}, for another pair: reload them for '{target.id}'")
    heads.attach(target.model, target.id, target.hidden_size, target.vocab_size)
    if on_cpu and not is_quantised(heads):
        heads.keep_fingerprint()
        quantise_linears(heads)


def cut_heads(
    heads: TokenHeads, given: int | str | Path | Sequence[int], models: LoadedPair, are_new: bool
) -> None:
    """Have attached heads draft a part of the vocabulary.

    Args:
        given: as ``draft_vocabulary`` of ``load_models``. are_new: whether no other pair drafts with them.

    Raises:
        UserError: they have an output layer of their own, or draft for another pair.
    """
    target, tokenizer = models.target, models.tokenizer
    if (output := heads.output) is None:
        raise UserError(
            f"draft_vocabulary is not for these {heads.kind} heads, which have an output layer of their own: leave "
            "it out"
        )
    if not are_new:
        raise UserError(
            f"these {heads.kind} heads draft for another pair, with the whole vocabulary: reload them"
        )
    words = None if tokenizer is None else tokenizer.get_vocab()
    size, ends = target.vocab_size, target.eos_ids
    ids = kept_tokens(given, size, ends) if words is None else keeping(given, words)(size, ends)
    output.keep(*some_rows(output.layer, ids))
