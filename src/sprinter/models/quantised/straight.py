"""A forward pass of a model with joined layers that goes straight to its parts.

In a small model what transformers does between them (masks, lists of layers, outputs of many kinds) takes as long as a
tenth of the pass. Here the model's own modules are called one after the other, as its ``forward`` would: hooks on them
run. A pass that is anything more than that, or a model that is, takes the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
from weakref import ref

from torch import Tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    Phi3ForCausalLM,
    Phi3Model,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from sprinter.models.quantised.whole import _Forward, is_joined
from sprinter.models.runners.row_cache import RowCache

__all__ = ["Straight"]

_KNOWN: dict[Callable[..., Any], Callable[..., Any]] = {
    model.forward: inner.forward
    for model, inner in (
        (LlamaForCausalLM, LlamaModel),
        (MistralForCausalLM, MistralModel),
        (Phi3ForCausalLM, Phi3Model),
        (Qwen2ForCausalLM, Qwen2Model),
        (Qwen3ForCausalLM, Qwen3Model),
    )
}
"""``forward`` of models that do nothing more than here, and of the models in them."""


class Straight:
    """Forward passes of one model, which it holds weakly.

    Args:
        model: a model for which ``of`` made it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = ref(model)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """None: its passes take the usual way."""
        inner = getattr(model, "model", None)
        known = inner is not None and _KNOWN.get(type(model).forward) is type(inner).forward
        return cls(model) if known and is_joined(model) else None

    def __call__(
        self,
        tokens: Tensor,
        logits: bool,
        position_ids: Tensor,
        attention_mask: Tensor | Mapping[str, Tensor | None] | None,
        past_key_values: RowCache,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor | None, Tensor, tuple[Tensor, ...]] | None:
        """Logits, if they are wanted, the states that they are made of, and those of some decoder layers; None: this
        pass takes the usual way.

        Args:
            tokens: ``[batch, n]``. layers: numbers from 0. The others as transformers has them.
        """
        model: Any = self._model()
        inner = model.model
        if _KNOWN.get(type(model).forward) is not type(inner).forward:
            return None
        if isinstance(attention_mask, Mapping):
            if len(attention_mask) != 1:
                return None
            (attention_mask,) = attention_mask.values()
        if _watched(model) or _watched(inner) or _global_forward_hooks or _global_forward_pre_hooks:
            return None
        first = next(iter(inner.layers._modules.values()))
        member = first.__dict__.get("forward")
        if type(member) is not _Forward or first._forward_hooks or first._forward_pre_hooks:
            return None
        run = member.whole(past_key_values)
        if run is None:
            return None
        embedded = inner.embed_tokens(tokens)
        positions = inner.rotary_emb(embedded, position_ids=position_ids)
        *states, last = run(embedded, positions, attention_mask, layers)
        hidden = inner.norm(last)
        return (model.lm_head(hidden) if logits else None), hidden, tuple(states)


def _watched(module: Any) -> bool:
    """Whether it has hooks, or another ``forward`` than its class."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
