"""Gates: the public names. A gate is a head of kind ``gate``.

The paper's (SPRINTER, section 3) is one linear layer and a sigmoid on the hidden state that produced q: d + 1
parameters for hidden size d. It sees the prefix, not the token that is judged. Other gates read more or have other
networks.
"""

from __future__ import annotations

import os

from sprinter.errors import UserError
from sprinter.heads.artifact import load_head, save_head
from sprinter.heads.head import Gate, Head, HeadConfig, weights_fingerprint

__all__ = ["Gate", "GateConfig", "load_gate", "save_gate", "weights_fingerprint"]

GateConfig = HeadConfig
"""What a gate was made for."""
save_gate = save_head
"""Write the artifact."""


def load_gate(source: str | os.PathLike[str]) -> Head:
    """Load a gate, linear or not, from a directory or a hub id.

    Raises:
        UserError: as ``load_head``; and a head of another kind.
    """
    head = load_head(source)
    if head.config.kind != "gate":
        raise UserError(
            f"'{source}' is a {head.config.kind} head, which stops drafts: give a gate, or train one "
            "with 'sprinter gate train'"
        )
    return head
