"""config.json of a head in the format of speculators 0.9, which vLLM reads too.

Fields are those of ``Eagle3SpeculatorConfig``, ``PEagleSpeculatorConfig`` and ``DFlashSpeculatorConfig`` there. The
layer's fields are written in full: readers fill in the defaults of another class than Llama's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import LlamaConfig

__all__ = ["speculators_fields"]

_VERSION = "0.9.0"
_NAMES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator", "dflash": "DFlashSpeculator"}
_LAYER = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "rope_parameters",
)  # fmt: skip


def speculators_fields(
    kind: str,
    layer: LlamaConfig,
    model_type: str,
    tokens: int,
    target: str | None,
    architectures: Sequence[str],
) -> dict[str, Any]:
    """The fields that all kinds have.

    Args:
        layer: shape of the layers. model_type: whose they are.
        tokens: number that is drafted at once.
        target: name of the target. architectures: its classes.
    """
    whole = layer.to_dict()
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1,
                "accept_tolerance": 0.0}  # fmt: skip
    return {
        "architectures": [_NAMES[kind]],
        "speculators_model_type": kind,
        "speculators_version": _VERSION,
        "target_hidden_size": layer.hidden_size,
        "transformer_layer_config": {
            **layer.to_diff_dict(),
            **{name: whole[name] for name in _LAYER},
            "model_type": model_type,
            "tie_word_embeddings": False,  # its output layer is its own, or the target's
        },
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
    }
