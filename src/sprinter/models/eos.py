"""The token ids that end a text."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["eos_ids_of"]


def eos_ids_of(model: PreTrainedModel, speaker: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """EOS ids of the generation config; if the checkpoint has none, those of its config and the tokenizer.

    A chat model without a generation config often has the end of a document as EOS in its config and the end of a turn
    as EOS of its tokenizer: both end a text.
    """
    config: Any = model.config
    generation: Any = getattr(model, "generation_config", None)
    own, named = _ids_of(generation), _ids_of(config)
    # transformers derives a generation config from the config if the checkpoint has none.
    if own and (own != named or not getattr(generation, "_from_model_config", False)):
        return own
    return tuple(dict.fromkeys((*named, *_ids_of(config.get_text_config(decoder=True)), *_ids_of(speaker))))


def _ids_of(holder: Any) -> tuple[int, ...]:
    ids = getattr(holder, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(int(id) for id in ids) if isinstance(ids, list | tuple) else (int(ids),)
