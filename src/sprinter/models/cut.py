"""Llama models whose output layer knows a part of the vocabulary, as drafts of targets with large vocabularies.

The input embedding has a row for every token of the target, since the text before a draft may hold any of them; a
lookup costs the same for any number of rows. The output layer has rows for the ``draft_vocabulary`` tokens of a map.
All other tokens have a logit of −1e4, so their probability is exactly 0: exact methods stay exact, and a token outside
the map is written when the target draws it. The model type is our own, so that an engine that does not know the map
refuses the folder instead of reading it wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sprinter.errors import UserError

__all__ = ["CUT_TYPE", "CutHead", "CutLlamaConfig", "CutLlamaForCausalLM", "check_map"]

CUT_TYPE = "sprinter_cut_llama"
"""Model type in ``config.json``."""
_OUTSIDE = -1e4
"""Logit of tokens outside the map; exp of its distance from any other logit is 0, and float16 can hold it."""


class CutHead(nn.Module):
    """Output layer for some tokens of a vocabulary.

    Args:
        hidden: size of its inputs.
        vocab: number of logits.
        kept: number of tokens that it knows.

    Attributes:
        in_features, out_features: as those of the linear layer in its place.
        words: linear layer with one output per known token.
        ids: ``[kept]`` int64, the known tokens in ascending order.
    """

    ids: Tensor

    def __init__(self, hidden: int, vocab: int, kept: int) -> None:
        super().__init__()
        self.in_features, self.out_features = hidden, vocab
        self.words = nn.Linear(hidden, kept, bias=False)
        self.register_buffer("ids", torch.arange(kept))

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` of hidden states ``[..., hidden]``."""
        known: Tensor = self.words(hidden)
        logits = known.new_full((*known.shape[:-1], self.out_features), _OUTSIDE)
        logits[..., self.ids] = known
        return logits


class CutLlamaConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """Configuration of a Llama model with a ``CutHead``; ``draft_vocabulary`` is the number of tokens that it knows."""

    model_type = CUT_TYPE
    draft_vocabulary: int = 0


class CutLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A Llama model with a ``CutHead``."""

    config_class = CutLlamaConfig
    _tied_weights_keys: ClassVar[Any] = {}  # type: ignore[misc]

    def __init__(self, config: CutLlamaConfig) -> None:
        super().__init__(config)
        kept = config.draft_vocabulary
        if not 0 < kept <= config.vocab_size:
            raise UserError(
                f"draft_vocabulary={kept} in config.json is none of 1 to {config.vocab_size}: distil the draft again"
            )
        self.lm_head = CutHead(config.hidden_size, config.vocab_size, kept)
        self.post_init()  # type: ignore[no-untyped-call]


def check_map(ids: Tensor | Sequence[int], vocab: int) -> None:
    """Refuse a map that is not of a vocabulary of this size.

    Raises:
        UserError: ids that are negative, too large, repeated or out of order.
    """
    known = torch.as_tensor(ids)
    if len(known) and int(known[0]) >= 0 and int(known[-1]) < vocab and bool((known.diff() > 0).all()):
        return
    raise UserError(
        f"the draft's vocabulary map is not of the target's vocabulary ({len(known)} tokens up to "
        f"{int(known.max()) if len(known) else -1}, {vocab} token ids): distil the draft for this target"
    )


AutoConfig.register(CUT_TYPE, CutLlamaConfig)
AutoModelForCausalLM.register(CutLlamaConfig, CutLlamaForCausalLM)
